"""State whose buffers a step overwrites: which arguments are donated, and which come back where the next call reads
them. Known from the program alone, before anything runs.

On one mesh, XLA reuses a donated buffer for an output of the same type and sharding, and for no other; JAX warns of a
donated buffer that no output can use. So "auto" donates the state leaves whose new value has their sharding, and of the
arguments that a user names those are donated that find such an output. JAX gives the buffers to the outputs of their
type in order. Where a leaf's new value is written over another leaf, XLA copies the old values that are still to be
read; so donated arguments are in the order of the outputs that replace them. In a pipeline the program says which
buffers end where.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from alpa_lite.errors import OptionError
from alpa_lite.graph import Traced
from alpa_lite.passes.tracing.arguments import donated_leaves
from alpa_lite.pins import layout_of_spec
from alpa_lite.program import Program, Run

Donate = str | int | Sequence[int | str]
"""The user's choice of donation: "auto", or positions and names of arguments."""


def donated_arguments(
    traced: Traced, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec], donate: Donate
) -> list[int]:
    """Returns the arguments whose buffers become outputs, in the order of these outputs as far as it is known.

    These are the requested arguments whose type and sharding an output has; JAX would warn of others.
    """
    values, block = traced.graph.values, traced.graph.block

    def kind(aval: Any, spec: PartitionSpec) -> tuple[Any, ...]:
        return tuple(aval.shape), aval.dtype, layout_of_spec(spec, len(aval.shape))

    arguments = [kind(values[number], spec) for number, spec in zip(block.inputs, in_specs, strict=False)]
    atoms = [values[atom] if isinstance(atom, int) else atom.aval for atom in block.outputs]
    outputs = list(map(kind, atoms, out_specs))
    if isinstance(donate, str):
        if donate != "auto":
            raise OptionError(f'donate_argnums is {donate!r}; give "auto", an int or a tuple of ints')
        return [argument for output, argument in sorted(traced.state) if outputs[output] == arguments[argument]]
    free = Counter(outputs)
    chosen = []
    for argument in donated_leaves(traced, donate):
        if free[arguments[argument]] > 0:
            free[arguments[argument]] -= 1
            chosen.append(argument)
    replaced_by = {argument: output for output, argument in traced.state}
    return sorted(chosen, key=lambda argument: replaced_by.get(argument, len(outputs)))


def owned_inputs(program: Program) -> frozenset[int]:
    """Returns the argument buffers that some run consumes, or that are results: these must not be the caller's."""
    given = {b for group in program.inputs for b in group}
    runs = (item for items in program.lists for item in items if isinstance(item, Run))
    return frozenset(given & {*program.outputs, *(b for item in runs for b in program.consumed(item))})


def in_place_state(program: Program, traced: Traced) -> dict[int, int]:
    """Returns argument -> its buffer of the state that comes back where the next call reads it."""
    found = {}
    for output, argument in traced.state:
        group, result = program.inputs[argument], program.buffers[program.outputs[output]]
        read = [program.buffers[b] for b in group]
        if len(group) == 1 and (read[0].mesh, read[0].layout) == (result.mesh, result.layout):
            found[argument] = group[0]
    return found


def shared_outputs(program: Program, traced: Traced) -> list[int]:
    """Returns the results whose buffers are also state that was given or is returned: later calls may donate these.

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
