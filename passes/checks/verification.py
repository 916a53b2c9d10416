"""Three checks of a plan, each on the output of a compiler, and none on the planner's own representation.

    check_shardy   the lowered StableHLO: exactly the planned collectives within the written regions, and no others
    compare_hlo    the optimised HLO of CPU, GPU or TPU: the planned collectives, up to rewrites listed by name
    memory_of      the compiler's own memory, against the bytes that the plan predicts

The first needs no devices and takes milliseconds, so every plan is checked with it; the others need a compiled
executable, for devices that are here or for a topology compiled ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir import units
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks.hlo import HloReport, compare_hlo
from alpa_lite.passes.checks.redundancy import redundant_collectives
from alpa_lite.passes.checks.shardy import check_shardy, collectives_of_shardy
from alpa_lite.passes.checks.standins import StandIns
from alpa_lite.passes.lowering import function_of, spec_of
from alpa_lite.passes.lowering.program import Reshard
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.stages import functions
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.segments import Segment
from alpa_lite.plan.records import Collective, PlanRecord

P = TypeVar("P", bound=PlanRecord)


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a compiled executable, in bytes per device.

    Attributes:
      arguments: what the caller passes.
      outputs: what the executable returns, donated buffers that it reuses included.
      aliases: outputs that live in donated arguments.
      temporaries: buffers that live only while it runs.
      code: the program itself, 0 where the backend does not say.
      predicted_bytes: the bytes that the plan predicts, None without a prediction.
    """

    arguments: int
    outputs: int
    aliases: int
    temporaries: int
    code: int
    predicted_bytes: int | None = None

    @property
    def peak(self) -> int:
        """Bytes in use while it runs: arguments, outputs that are not aliased, temporaries and code."""
        return self.arguments + self.outputs - self.aliases + self.temporaries + self.code

    @property
    def data(self) -> int:
        """The same without the code, which plans do not predict: the memory that they leave free has room for it."""
        return self.peak - self.code

    @property
    def ratio(self) -> float | None:
        """Predicted over measured: 1 is exact, below 1 the plan is too optimistic."""
        return None if self.predicted_bytes is None or self.peak == 0 else self.predicted_bytes / self.peak


def memory_of(compiled: Any, predicted: int | None = None) -> MemoryReport | None:
    """Returns the compiler's memory of a `jax.stages.Compiled`, or None where the backend has no statistics.

    Args:
      predicted: bytes per device that the plan predicts.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    names = ("argument", "output", "alias", "temp", "generated_code")
    return MemoryReport(*(int(getattr(stats, f"{name}_size_in_bytes")) for name in names), predicted_bytes=predicted)


def lower_module(
    make: Callable[[AbstractMesh], Callable[..., Any]], mesh: LogicalMesh, avals: Sequence[Any],
    specs: Sequence[PartitionSpec], platform: str, standins: StandIns | None = None,
) -> Any:  # fmt: skip
    """Returns the StableHLO module, for a platform, of the function that `make` makes over a mesh that need not exist.

    Args:
      avals, specs: shape, dtype and sharding of each argument.
      standins: what stands in for operations that do not lower; it remembers which.
    """
    abstract = AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))
    arguments = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=NamedSharding(abstract, spec), weak_type=aval.weak_type)
        for aval, spec in zip(avals, specs, strict=True)
    ]
    with _jax.replace_by_stand_ins(standins or StandIns(platform)):
        traced = jax.jit(make(abstract)).trace(*arguments)
    return traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")


def verify_partitioning(plan: P, staged: Staged) -> P:
    """Returns the plan with the result of the partitioner's check of every executable of every stage.

    With written collectives the check is exact, and a difference raises. With communication left to the compiler there
    is nothing to compare with: the plan then lists the collectives that the partitioner inserts.

    Raises:
      VerificationError: if the written collectives are not those of the plan, or the partitioner adds any.
    """
    lines: list[str] = []
    known: set[Any] = set()
    loops: dict[str, None] = {}
    platform = plan.cluster.platform
    standins = StandIns(platform)
    for stage in staged.stages:
        mesh = stage.mesh_solution.mesh
        if mesh.size == 1:
            continue
        if stage.program.boundary_ops:
            names = ", ".join(sorted({op.name for op in stage.program.boundary_ops}))
            lines.append(
                f"not checked: {names} run outside the shard_map regions, where the compiler decides what they "
                "communicate"
            )
            continue
        if stage.communication == "compiler":
            return _inserted(plan, stage)
        for segment in stage.segments.items:
            wanted = expected_collectives(stage, segment)
            key = (
                mesh, segment.kind, segment.round, tuple((c.kind, c.axes, c.bytes, c.count) for c in wanted),
                tuple(item.op.key for item in segment.instructions if not isinstance(item, Reshard)),
            )  # fmt: skip
            if key not in known:
                known.add(key)
                module = module_of(stage, segment, platform, shared=True, standins=standins)
                loops.update(dict.fromkeys(check_shardy(module, mesh, wanted).unknown_loops))
    if known:
        count = sum(c.count for c in plan.collectives if c.kind != "transfer")
        what = "the lowered program" if len(known) == 1 else f"{len(known)} distinct stage executables"
        copies = staged.traced.copies
        what += f", in which one copy of a repeated layer stands for {1 + copies.count}" if copies is not None else ""
        unknown = f"; of unknown trip count, counted once: {', '.join(loops)}" if loops else ""
        lines.append(f"Shardy: the {count} planned collectives are in {what}, and no others{unknown}")
    lines += standins.line()
    if not lines:
        one = len(staged.stages) == 1
        lines.append(f"{'one device' if one else 'every stage has one device'}: nothing to communicate")
    return replace(plan, verification=tuple(lines))


def _inserted(plan: P, stage: PlannedStage) -> P:
    """Returns the plan with the collectives that the partitioner inserts, where communication is left to it."""
    mesh, platform = stage.mesh_solution.mesh, plan.cluster.platform
    cost, standins = MeshCost(plan.cluster, mesh), StandIns(platform)
    (segment,) = stage.segments.items
    found = collectives_of_shardy(module_of(stage, segment, platform, shared=True, standins=standins), mesh)
    # The partitioner may use a part of an axis, `x:(1)4`, which costs no more than all of it.
    whole = [tuple(dict.fromkeys(axis.partition(":(")[0] for axis in c.axes)) for c in found]
    seconds = [cost.collective(c.kind, axes, c.bytes) * c.count for c, axes in zip(found, whole, strict=True)]
    line = "Shardy: the listed collectives are those that the partitioner inserts for the plan's shardings"
    return replace(plan, collectives=found, collective_seconds=tuple(seconds), verification=(line, *standins.line()))


@dataclass(frozen=True)
class CompiledReport:
    """One compiled executable against the plan.

    Attributes:
      name: of the executable.
      submesh: where it runs.
      is_whole_step: whether it is the whole step, whose memory is its peak; that of a part of one is its temporaries.
      planned_collectives: the collectives that one run must have.
      hlo: what was found; None where nothing is planned to compare with (one device, or operations outside of regions).
      memory: with the bytes that the plan predicts; None where the backend has no statistics.
    """

    name: str
    submesh: int
    is_whole_step: bool
    planned_collectives: tuple[Collective, ...]
    hlo: HloReport | None
    memory: MemoryReport | None

    @property
    def bytes(self) -> int:
        """Measured bytes per device: the peak of a whole step, else the temporaries; 0 without statistics."""
        if self.memory is None:
            return 0
        return self.memory.peak if self.is_whole_step else self.memory.temporaries


def compiled_reports(
    plan: PlanRecord, staged: Staged, compiled: Iterable[Any], platform: str
) -> Iterator[CompiledReport]:
    """Compares the `jax.stages.Compiled` of each executable, in the program's order, with the plan. Raises nothing.

    Args:
      compiled: None for those of other processes.
      platform: the one that they are compiled for: "cpu", "cuda", "rocm" or "tpu".
    """
    for number, one in enumerate(compiled):
        if one is None:
            continue
        position, item = staged.written.functions[number]
        stage = staged.stages[position]
        segment, mesh = stage.segments.items[item], stage.mesh_solution.mesh
        whole = segment.kind == "step"
        wanted = plan.collectives if stage.communication == "compiler" else expected_collectives(stage, segment)
        report = None
        if mesh.size > 1 and not stage.program.boundary_ops:
            redundancy = redundant_collectives(module_of(stage, segment, platform), mesh)
            report = compare_hlo(one.as_text(), mesh, wanted, redundancy)
        executable = staged.program.executables[number]
        memory = memory_of(one, plan.stages[0].memory.total if whole else stage.temporary_bytes[segment])
        yield CompiledReport(executable.name, executable.mesh, whole, tuple(wanted), report, memory)


def verify_compiled(plan: P, staged: Staged, compiled: Sequence[Any]) -> P:
    """Returns the plan with the compiler's rewrites by name, and the memory of the compiled executables.

    Raises:
      VerificationError: an executable communicates what neither its stage's plan nor a known rewrite explains. With
        communication left to the compiler, differences are listed instead.
    """
    reports = list(compiled_reports(plan, staged, compiled, plan.cluster.platform))
    compared = [(one.name, one.hlo) for one in reports if one.hlo is not None]
    lines = list(plan.verification)
    if staged.stages[0].communication == "compiler":
        lines += [f"compiled, differs from the partitioner: {line}" for _, hlo in compared for line in hlo.differences]
    elif compared:
        for name, hlo in compared:
            hlo.raise_if_bad(name)
        one = len(staged.program.executables) == 1
        what = "the step has" if one else f"{len(compared)} stage executables have"
        lines.append(f"compiled: {what} the planned collectives, apart from the listed rewrites")
    several = len(staged.program.submeshes) > 1
    for submesh in sorted({one.submesh for one in reports}):
        texts = [(one.bytes, text) for one in reports if one.submesh == submesh and (text := _in_words(one))]
        if texts:
            lines.append(f"compiled: {f'on submesh {submesh} at most ' if several else ''}{max(texts)[1]}")
    rewrites = tuple(f"{name}: {rewrite}" for name, hlo in compared for rewrite in hlo.rewrites)
    return replace(plan, verification=tuple(lines), rewrites=rewrites)


def _in_words(found: CompiledReport) -> str | None:
    """Returns the memory of an executable next to the prediction, in words; None without either."""
    memory = found.memory
    if memory is None or memory.predicted_bytes is None:
        return None
    predicted = units.exact_bytes(memory.predicted_bytes)
    if not found.is_whole_step:
        return f"{units.exact_bytes(memory.temporaries)} of temporaries in {found.name}; the plan predicts {predicted}"
    if memory.ratio is None:
        return None
    return (
        f"{units.exact_bytes(memory.peak)} per device, of which {units.nbytes(memory.arguments)} are arguments and "
        f"{units.nbytes(memory.temporaries)} temporaries; the plan predicts {predicted}, {memory.ratio:.2f} of it"
    )


def expected_collectives(stage: PlannedStage, segment: Segment) -> tuple[Collective, ...]:
    """Returns the collectives that one run of a segment must have."""
    return tuple(collective for collective, _ in stage.prices.collectives(segment.instructions))


def module_of(
    stage: PlannedStage, segment: Segment, platform: str, *, shared: bool = False, standins: StandIns | None = None
) -> Any:
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

    return lower_module(make, stage.mesh_solution.mesh, avals, specs, platform, standins)
