"""Loads a planned step onto the devices of this run.

A step on one mesh is a program of one run. XLA reuses a donated buffer for an output of the same type and sharding, and
for no other; JAX warns of a donated buffer that no output can use. So "auto" donates the state leaves whose new value
has their sharding, and of the arguments that a user names those are donated that find such an output. JAX gives the
buffers to the outputs of their type in order. Where a leaf's new value is written over another leaf, XLA copies the old
values that are still to be read; so donated arguments are in the order of the outputs that replace them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import Mesh

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.program import Executable as Stage
from alpa_lite.ir.program import Program, Run, Submesh, buffer
from alpa_lite.passes.lowering import emission
from alpa_lite.passes.lowering.program import Instruction
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.tracing.leaves import donated_leaves
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime.buffers import ProgramBuffers
from alpa_lite.runtime.pipeline import PipelineExecutable
from alpa_lite.runtime.step import Donate, Executable, LoadOptions


def load(staged: Staged, plan: Plan, options: LoadOptions | None = None) -> Executable:
    """Returns the planned step on devices that are here. The cluster's options for the compiler are added.

    Raises:
      PlanError: there are fewer devices than the plan needs.
    """
    options = options or LoadOptions()
    options = replace(options, compiler_options={**plan.cluster.compiler_options, **options.compiler_options})
    if plan.is_pipelined:
        return PipelineExecutable(staged.traced, staged.written, plan.cluster, options)
    (stage,) = staged.stages
    traced, program = stage.graph.traced, stage.program

    def function_of(mesh: Mesh) -> Callable[..., Sequence[Any]]:
        return emission.function_of(program, traced, mesh, stage.communication)

    layouts = [*program.inputs, *program.outputs]
    return load_on_mesh(traced, program.mesh, layouts, function_of, options, program.body.instructions)


def load_on_mesh(
    traced: Traced, mesh: LogicalMesh, layouts: Sequence[Layout], function_of: Callable[[Mesh], Callable[..., Any]],
    options: LoadOptions, instructions: Iterable[Instruction] = (),
) -> Executable:  # fmt: skip
    """Returns a step on one mesh.

    Args:
      layouts: of the arguments, then of the constants, then of the results.
      function_of: on a mesh, from the flat arguments and constants to the flat outputs, all global arrays.
      instructions: that the function is made from.
    """
    program = _program_of(traced, mesh, layouts)
    donated, (executable,) = donated_arguments(traced, program, options.donate), program.executables
    program = replace(program, executables=(replace(executable, donated_inputs=tuple(donated)),))
    buffers = ProgramBuffers(traced, program, options.devices)
    if not buffers.in_place.keys() >= set(donated):  # others may share a buffer with it: each call has to look
        buffers.in_place = {}
    return Executable(traced, buffers, options, lambda _: (function_of(buffers.meshes[0]), instructions))


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
