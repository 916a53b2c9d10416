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
from alpa_lite.errors import VerificationError
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.checks.hlo import compare_hlo
from alpa_lite.passes.checks.shardy import check_shardy, collectives_of_shardy
from alpa_lite.passes.lowering import function_of, spec_of
from alpa_lite.passes.lowering.program import Reshard
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.stages import functions
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.segments import Segment
from alpa_lite.plan import Plan
from alpa_lite.records import Collective


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


def verified(plan: Plan, staged: Staged) -> Plan:
    """The plan with the result of the partitioner's check of every executable of every stage.

    With written collectives the check is exact, and a difference raises. With communication left to the compiler there
    is nothing to compare with: the plan then lists the collectives that the partitioner inserts.

    Raises:
      VerificationError: if the written collectives are not those of the plan, or the partitioner adds any.
    """
    lines: list[str] = []
    known: set[Any] = set()
    loops: dict[str, None] = {}
    for stage in staged.stages:
        mesh = stage.found.mesh
        if mesh.size == 1:
            continue
        if stage.program.outside:
            names = ", ".join(sorted({op.name for op in stage.program.outside}))
            lines.append(
                f"not checked: {names} run outside the shard_map regions, where the compiler decides what they "
                "communicate"
            )
            continue
        if stage.communication == "compiler":
            return _inserted(plan, stage)
        for segment in stage.segments.items:
            wanted = wanted_of(stage, segment)
            key = (
                mesh, segment.kind, segment.round, tuple((c.kind, c.axes, c.bytes, c.count) for c in wanted),
                tuple(item.op.key for item in segment.instructions if not isinstance(item, Reshard)),
            )  # fmt: skip
            if key in known:
                continue
            known.add(key)
            report = check_shardy(module_of(stage, segment, plan.cluster.platform, shared=True), mesh, wanted)
            loops.update(dict.fromkeys(report.unknown_loops))
    if known:
        count = sum(c.count for c in plan.collectives if c.kind != "transfer")
        what = "the lowered program" if len(known) == 1 else f"{len(known)} distinct stage executables"
        unknown = f"; of unknown trip count, counted once: {', '.join(loops)}" if loops else ""
        lines.append(f"Shardy: the {count} planned collectives are in {what}, and no others{unknown}")
    if not lines:
        one = len(staged.stages) == 1
        lines.append(f"{'one device' if one else 'every stage has one device'}: nothing to communicate")
    return replace(plan, verification=tuple(lines))


def _inserted(plan: Plan, stage: PlannedStage) -> Plan:
    """The plan with the collectives that the partitioner inserts, where communication is left to it."""
    mesh = stage.found.mesh
    cost = MeshCost(plan.cluster, mesh)
    (segment,) = stage.segments.items
    found = collectives_of_shardy(module_of(stage, segment, plan.cluster.platform, shared=True), mesh)
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


def verified_compiled(plan: Plan, staged: Staged, compiled: Sequence[Any]) -> Plan:
    """The plan with the compiler's rewrites by name, and the memory of the compiled executables.

    Args:
      compiled: the `jax.stages.Compiled` of each executable, in the program's order.

    Raises:
      VerificationError: an executable communicates what neither its stage's plan nor a known rewrite explains. With
        communication left to the compiler, differences are listed instead.
    """
    program = staged.program
    lines, rewrites = list(plan.verification), []
    largest: dict[int, tuple[float, str]] = {}
    checked = 0
    for number, one in enumerate(compiled):
        name, (position, item) = program.executables[number].name, staged.written.functions[number]
        stage = staged.stages[position]
        segment, mesh = stage.segments.items[item], stage.found.mesh
        if mesh.size > 1 and not stage.program.outside:
            compiler = stage.communication == "compiler"
            wanted = plan.collectives if compiler else wanted_of(stage, segment)
            report = compare_hlo(one.as_text(), mesh, wanted, module_of(stage, segment, plan.cluster.platform))
            if compiler:
                lines += [f"compiled, differs from the partitioner: {line}" for line in report.differences]
            else:
                try:
                    report.raise_if_bad()
                except VerificationError as error:
                    raise VerificationError(f"{name}: {error}") from None
                checked += 1
            rewrites += [f"{name}: {rewrite}" for rewrite in report.rewrites]
        where = program.executables[number].mesh
        found = _measured(name, memory_of(one, _predicted(plan, stage, segment)), segment)
        if found is not None:
            largest[where] = max(largest.get(where, (-1, "")), found)
    if checked:
        what = "the step has" if len(program.executables) == 1 else f"{checked} stage executables have"
        lines.append(f"compiled: {what} the planned collectives, apart from the listed rewrites")
    several = len(program.submeshes) > 1
    for where, (_, text) in sorted(largest.items()):
        lines.append(f"compiled: on submesh {where} at most {text}" if several else f"compiled: {text}")
    return replace(plan, verification=tuple(lines), rewrites=tuple(rewrites))


def _predicted(plan: Plan, stage: PlannedStage, segment: Segment) -> int:
    """Bytes per device that the plan predicts: of a whole step its peak, of a part of one its temporaries."""
    return plan.stages[0].memory.total if segment.kind == "step" else stage.temporary[segment]


def _measured(name: str, memory: MemoryReport | None, segment: Segment) -> tuple[float, str] | None:
    """What an executable takes, and the same in words beside what was predicted."""
    if memory is None:
        return None
    if segment.kind != "step":
        text = f"{memory.temporaries} bytes of temporaries in {name}; the plan predicts {memory.predicted}"
        return memory.temporaries, text
    if memory.ratio is None:
        return None
    text = (
        f"{memory.peak} bytes per device, of which {memory.arguments} are arguments and {memory.temporaries} "
        f"temporaries; the plan predicts {memory.predicted}, {memory.ratio:.2f} of it"
    )
    return memory.peak, text


def wanted_of(stage: PlannedStage, segment: Segment) -> tuple[Collective, ...]:
    """The collectives that one run of a segment must have."""
    return tuple(collective for collective, _ in stage.prices.collectives(segment.instructions))


def module_of(stage: PlannedStage, segment: Segment, platform: str, *, shared: bool = False) -> Any:
    """The lowered program of a segment, on an abstract mesh; with `shared`, identical layers are one function."""
    traced, program = stage.graph.traced, stage.program
    if segment.kind == "step":
        avals: Sequence[Any] = [traced.graph.values[v].aval for v in traced.graph.block.inputs]
        specs = [spec_of(layout) for layout in program.inputs]
    else:
        taken, _ = functions.types_of(stage.segments, segment, stage.num_microbatches)
        avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in taken]
        specs = [spec_of(layout) for _, _, layout in taken]

    def make(abstract: Any) -> Any:
        if segment.kind == "step":
            return function_of(program, traced, abstract, stage.communication, shared=shared)
        return functions.function_of(stage.segments, segment, abstract, stage.num_microbatches, shared=shared)

    return lowered_module(make, stage.found.mesh, avals, specs, platform)
