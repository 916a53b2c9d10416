"""The back-end for one mesh: the step is one executable, called once.

XLA reuses a donated buffer for an output of the same type and sharding, and for no other; JAX warns of a donated buffer
that no output can use. So "auto" donates the state leaves whose new value has their sharding, and of the arguments that
a user names those are donated that find such an output. JAX gives the buffers to the outputs of their type in order.
Where a leaf's new value is written over another leaf, XLA copies the old values that are still to be read; so donated
arguments are in the order of the outputs that replace them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.program import Executable as Stage
from alpa_lite.ir.program import Program, Run, Submesh, buffer
from alpa_lite.passes.lowering.program import Instruction
from alpa_lite.passes.tracing.leaves import donated_leaves
from alpa_lite.runtime.buffers import ProgramBuffers
from alpa_lite.runtime.compile import Call, picker
from alpa_lite.runtime.step import Donate, Executable, LoadOptions


class SingleExecutable(Executable):
    """A planned step on one mesh. Its buffers are its arguments, its constants, and its results, in order."""

    takes_uncommitted = True

    def __init__(
        self,
        traced: Traced,
        mesh: LogicalMesh,
        layouts: tuple[Sequence[Layout], Sequence[Layout]],
        function_of: Callable[[Mesh], Callable[..., Sequence[Any]]],
        instructions: Iterable[Instruction] = (),
        options: LoadOptions | None = None,
    ) -> None:
        """Prepares the executable; it is compiled by the first call, or by `compiled()`.

        Args:
          layouts: of the arguments, then of the constants; and of the results.
          function_of: on a mesh, from the flat arguments and constants to the flat outputs, all global arrays.
          instructions: that the function is made from.
        """
        options = options or LoadOptions()
        self._function_of, self._instructions = function_of, tuple(instructions)
        program = _program_of(traced, mesh, [*layouts[0], *layouts[1]])
        donated, (executable,) = donated_arguments(traced, program, options.donate), program.executables
        program = replace(program, executables=(replace(executable, donated_inputs=tuple(donated)),))
        buffers = ProgramBuffers(traced, program, options.devices)
        if not buffers.in_place.keys() >= set(donated):  # others may share a buffer with it: each call has to look
            buffers.in_place = {}
        (self.mesh,) = buffers.meshes
        self._pick_donated = picker(donated)
        self._pick_kept = picker([n for n in buffers.runs[0].inputs if n not in set(donated)])
        super().__init__(traced, buffers, options)

    def _emit(self, number: int) -> tuple[Callable[..., Sequence[Any]], Iterable[Instruction]]:
        """Returns the whole step."""
        return self._function_of(self.mesh), self._instructions

    def _load(self, calls: Mapping[int, Call], numbered: Collection[int]) -> None:
        """Takes the call, and copies the constants."""
        self._call = self._bound(calls[0], 0, -1) if numbered else calls[0]
        self._constants = list(self._buffers.constants(self._traced).values())

    def _start(self, leaves: Sequence[Any] | None) -> list[Any]:
        """Returns the arguments, and the constants."""
        return [*(leaves or [None] * len(self._traced.arguments)), *self._constants]

    def _execute(self, buffers: list[Any]) -> list[Any]:
        """Calls the executable."""
        return list(self._call(self._pick_donated(buffers), self._pick_kept(buffers)))


def _program_of(traced: Traced, mesh: LogicalMesh, layouts: Sequence[Layout]) -> Program:
    """Returns the program of one run, from the layouts of its arguments, constants and results."""
    block, values, count = traced.graph.block, traced.graph.values, len(traced.arguments)
    avals = [atom.aval if isinstance(atom, Lit) else values[atom].aval for atom in (*block.inputs, *block.outputs)]
    submesh = Submesh(mesh, 0)
    buffers = [buffer(0, submesh, one, aval.shape, aval.dtype) for one, aval in zip(layouts, avals, strict=True)]
    each, given = tuple((n,) for n in range(len(block.inputs))), tuple(range(len(block.inputs), len(buffers)))
    run = Run(0, -1, tuple(range(len(each))), given)
    executable = Stage(traced.name, 0, 0, "step", (), 0.0)
    return Program(
        (submesh,), (executable,), tuple(buffers), (), ((run,),), each[:count], each[count:], given, schedule="none"
    )


def donated_arguments(traced: Traced, program: Program, donate: Donate) -> list[int]:
    """Returns the arguments whose buffers become outputs, in the order of these outputs as far as it is known.

    These are the requested arguments whose type and sharding an output has; JAX would warn of others.
    """
    arguments, outputs = (
        [(one.shape, one.dtype, one.layout) for one in (program.buffers[b] for b in numbers)]
        for numbers in ([group[0] for group in program.inputs], program.outputs)
    )
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
