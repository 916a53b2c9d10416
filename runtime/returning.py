"""What of a pipeline's state comes back where the next call wants it, and which arguments a run overwrites.

State that comes back in place needs no check by the next call, as long as it is the same state; this is known from the
program alone, before anything runs.
"""

from __future__ import annotations

from alpa_lite.graph import Traced
from alpa_lite.program import Program, Run


def owned_inputs(program: Program) -> frozenset[int]:
    """The argument buffers that some run consumes, or that are results: these must not be the caller's."""
    given = {b for group in program.inputs for b in group}
    runs = (item for items in program.lists for item in items if isinstance(item, Run))
    return frozenset(given & {*program.outputs, *(b for item in runs for b in program.consumed(item))})


def returning_state(program: Program, traced: Traced) -> list[tuple[int, int, int]]:
    """(argument, its buffer, output) of the state that comes back where the next call wants it."""
    found = []
    for output, argument in traced.state:
        group, made = program.inputs[argument], program.outputs[output]
        if len(group) != 1:
            continue
        there, here = program.buffers[group[0]], program.buffers[made]
        if (there.mesh, there.layout) == (here.mesh, here.layout):
            found.append((argument, group[0], output))
    return found


def shared_outputs(program: Program, traced: Traced) -> list[int]:
    """The results whose buffers are also state that was given or is returned: a later call may donate these.

    Of equal results, new state keeps the buffer.
    """
    state = dict(traced.state)
    held = {b for argument in state.values() for b in program.inputs[argument]}
    found = []
    for n in sorted(range(len(program.outputs)), key=lambda n: n not in state):
        buffer = program.outputs[n]
        if buffer in held and not (n in state and buffer in program.inputs[state[n]]):
            found.append(n)
        if n in state:
            held.add(buffer)
    return sorted(found)


def user_state(traced: Traced) -> list[tuple[int, int]]:
    """(argument, result) of state, by the flat arguments and results of the user's step."""
    if traced.stacked is None:
        return [(argument, output) for output, argument in traced.state]
    new_value = {argument: output for output, argument in traced.state}
    result_of = {pieces.numbers[0]: n for n, pieces in enumerate(traced.stacked.results)}
    return [
        (n, result_of[new_value[pieces.numbers[0]]])
        for n, pieces in enumerate(traced.stacked.arguments)
        if pieces.numbers[0] in new_value
    ]
