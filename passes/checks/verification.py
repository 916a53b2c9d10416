"""Is the plan true? Three checks, each on what a compiler made of the step, and none on what we meant.

    check_shardy   the lowered StableHLO: exactly the planned collectives within the written regions, and no others
    compare_hlo    the optimised HLO of CPU, GPU or TPU: the planned collectives, up to rewrites listed by name
    memory_of      the compiler's own memory, against the bytes that the plan predicts

The first needs no devices and takes milliseconds, so every plan is checked with it; the others need a compiled
executable, for devices that are here or for a topology compiled ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.cost import MeshCost
from alpa_lite.graph import Traced
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes import lowering
from alpa_lite.passes.checks.hlo import compare_hlo
from alpa_lite.passes.checks.shardy import check_shardy, collectives_of_shardy
from alpa_lite.passes.lowering import emission
from alpa_lite.passes.lowering.program import LocalProgram
from alpa_lite.plan import Plan


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a compiled executable, in bytes per device.

    Attributes:
      arguments: what the caller passes.
      outputs: what the executable returns, donated buffers that it reuses included.
      aliased: outputs that live in donated arguments.
      temporaries: buffers that live only while it runs.
      code: the program itself, 0 where the backend does not say.
      predicted: the bytes that the plan predicts, None without a prediction.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    predicted: int | None = None

    @property
    def peak(self) -> int:
        """Bytes in use while it runs: arguments, outputs that are not aliased, temporaries and code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @property
    def ratio(self) -> float | None:
        """Predicted over measured: 1 is exact, below 1 the plan is too optimistic."""
        return None if self.predicted is None or self.peak == 0 else self.predicted / self.peak


def memory_of(compiled: Any, predicted: int | None = None) -> MemoryReport | None:
    """The compiler's memory statistics of one executable.

    Args:
      compiled: a `jax.stages.Compiled`.
      predicted: bytes per device that the plan predicts.

    Returns:
      The report, or None where the backend has no statistics.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryReport(
        arguments=int(stats.argument_size_in_bytes),
        outputs=int(stats.output_size_in_bytes),
        aliased=int(stats.alias_size_in_bytes),
        temporaries=int(stats.temp_size_in_bytes),
        code=int(stats.generated_code_size_in_bytes),
        predicted=predicted,
    )


def lowered_module(
    make: Callable[[AbstractMesh], Callable[..., Any]],
    mesh: LogicalMesh,
    avals: Sequence[Any],
    specs: Sequence[PartitionSpec],
    platform: str,
) -> Any:
    """The StableHLO module of a function over a mesh that need not exist.

    Args:
      make: makes the function of global arrays for an abstract mesh.
      avals, specs: shape, dtype and sharding of each argument.
      platform: "cpu", "cuda", "rocm" or "tpu", to lower for.
    """
    abstract = AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(abstract, spec), weak_type=aval.weak_type)
        for aval, spec in zip(avals, specs, strict=True)
    ]
    with _jax.callbacks_held():
        traced = jax.jit(make(abstract)).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")


def step_module(plan: Plan, traced: Traced, program: LocalProgram, *, shared: bool = False) -> Any:
    """The StableHLO module of a planned step, on an abstract mesh; with `shared`, equal layers are one function."""
    communication = plan.ingredients["communication"]
    return lowered_module(
        lambda abstract: emission.function_of(program, traced, abstract, communication, shared=shared),
        program.mesh,
        [traced.graph.values[v].aval for v in traced.graph.block.inputs],
        [lowering.spec_of(layout) for layout in program.inputs],
        plan.cluster.platform,
    )


def verified(plan: Plan, traced: Traced, program: LocalProgram) -> Plan:
    """The plan with the result of the partitioner's check.

    With written collectives the check is exact, and a difference raises. With communication left to the compiler there
    is nothing to compare with: the plan then lists the collectives that the partitioner inserts.

    Raises:
      VerificationError: if the written collectives are not those of the plan, or the partitioner adds any.
    """
    mesh = program.mesh
    if mesh.size == 1:
        return replace(plan, verification=("one device: nothing to communicate",))
    if program.outside:
        names = ", ".join(sorted({op.name for op in program.outside}))
        text = (
            f"not checked: {names} run outside the shard_map regions, where the compiler decides what they communicate"
        )
        return replace(plan, verification=(text,))
    module = step_module(plan, traced, program, shared=True)
    if plan.ingredients["communication"] == "explicit":
        report = check_shardy(module, mesh, plan.collectives)
        loops = report.unknown_loops
        unknown = f"; of unknown trip count, counted once: {', '.join(loops)}" if loops else ""
        count = sum(c.count for c in plan.collectives)
        text = f"Shardy: the {count} planned collectives are in the lowered program, and no others{unknown}"
        return replace(plan, verification=(text,))
    cost = MeshCost(plan.cluster, mesh)
    found = collectives_of_shardy(module, mesh)
    # The partitioner may use a part of an axis, `x:(1)4`, which costs no more than all of it.
    whole = [tuple(dict.fromkeys(axis.partition(":(")[0] for axis in c.axes)) for c in found]
    return replace(
        plan,
        collectives=found,
        collective_seconds=tuple(
            cost.collective(c.kind, axes, c.bytes) * c.count for c, axes in zip(found, whole, strict=True)
        ),
        verification=(
            "Shardy: the listed collectives are those that the partitioner inserts for the plan's shardings",
        ),
    )


def verified_compiled(plan: Plan, traced: Traced, program: LocalProgram, compiled: Any) -> Plan:
    """The plan with the compiler's rewrites by name, and the memory of the compiled program.

    Args:
      compiled: the `jax.stages.Compiled` of the step.

    Raises:
      VerificationError: if the compiled program has a collective that neither the plan nor a known rewrite explains.
        With communication left to the compiler, differences are listed instead.
    """
    lines, rewrites = list(plan.verification), ()
    if program.mesh.size > 1 and not program.outside:
        module = step_module(plan, traced, program)
        report = compare_hlo(compiled.as_text(), program.mesh, plan.collectives, module)
        if plan.ingredients["communication"] == "explicit":
            report.raise_if_bad()
            lines.append("compiled: the planned collectives, apart from the listed rewrites")
        else:
            lines += [f"compiled, differs from the partitioner: {line}" for line in report.differences]
        rewrites = tuple(str(rewrite) for rewrite in report.rewrites)
    memory = memory_of(compiled, plan.stages[0].memory.total)
    if memory is not None and memory.ratio is not None:
        lines.append(
            f"compiled: {memory.peak} bytes per device, of which {memory.arguments} are arguments and "
            f"{memory.temporaries} temporaries; the plan predicts {memory.predicted}, {memory.ratio:.2f} of it"
        )
    return replace(plan, verification=tuple(lines), rewrites=rewrites)
