"""Writes the plan of a pipeline, and replays one.

A stage is a step of its own, so each has a plan of its own (`Plan.parts`), with the decisions that replaying needs. The
whole plan counts what the segments of all stages communicate, each as often as the schedule runs it, and what goes
between stages; its seconds are those of the simulated program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.errors import VerificationError
from alpa_lite.graph import Traced
from alpa_lite.passes.checks import hlo, shardy, verification
from alpa_lite.passes.layers import stacked_arguments
from alpa_lite.passes.lowering.program import Body, Reshard, collectives, spec_of
from alpa_lite.passes.plans import writing
from alpa_lite.passes.programs.search import FoundPipeline
from alpa_lite.passes.stages import functions
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.segments import Segment
from alpa_lite.passes.stages.slicing import microbatches
from alpa_lite.plan import Candidate, Collective, Memory, PipelineShape, Plan, Solver, Stage
from alpa_lite.program import Program, peak_bytes, sparing

MAX_LAYERS = 64


def write(traced: Traced, found: FoundPipeline, cluster: Cluster, *, method: str, budget: float) -> Plan:
    """The plan of a pipeline. `verification` and `planning_seconds` are left empty."""
    program = found.pipeline.program
    parts: list[Plan] = []
    alike: dict[int, Plan] = {}  # stages whose choices were taken over share the solution
    for number, stage in enumerate(found.stages):
        part = writing.write(
            stage.graph.traced, stage.grouping, stage.rules, stage.found, stage.program, stage.cluster,
            method=f"stage {number}", budget=budget, communication="explicit",
            like=alike.get(id(stage.found.solution)),
        )  # fmt: skip
        alike.setdefault(id(stage.found.solution), part)
        parts.append(part)
    listed: list[tuple[Collective, float]] = []
    for number, stage in enumerate(found.stages):
        listed += _stage_collectives(number, stage, found)
    listed += _transfers(program)
    seconds = found.seconds
    ingredients = _ingredients(traced, parts, cluster, found)
    return Plan(
        method=method,
        cluster=cluster,
        num_devices=sum(submesh.mesh.size for submesh in program.submeshes),
        num_stages=len(found.stages),
        num_microbatches=program.num_microbatches,
        schedule=program.schedule,
        step_seconds=seconds,
        fingerprint=writing.fingerprint(ingredients),
        memory_per_device=int(budget),
        stages=tuple(_stage(number, part, found) for number, part in enumerate(parts)),
        collectives=tuple(collective for collective, _ in listed),
        collective_seconds=tuple(cost for _, cost in listed),
        solver=_solver(found, parts),
        candidates=_candidates(found),
        notes=(*traced.notes, *found.accumulated.notes, *_notes(found)),
        ingredients=ingredients,
        pipeline=PipelineShape(
            virtual=found.slices.virtual,
            num_layers=len(found.layers.layers),
            max_layers=MAX_LAYERS,
            first_layers=tuple(stage.first for stage in found.slices.stages),
            submeshes=found.pipeline.mesh_of,
            first_devices=tuple(submesh.first for submesh in program.submeshes),
            remat=found.remat,
            buffer_bytes=tuple(pair[0] for pair in found.bytes),
            temporary_bytes=tuple(pair[1] for pair in found.bytes),
            timeline=found.timeline,
        ),
        parts=tuple(parts),
    )


def verified(plan: Plan, found: FoundPipeline) -> Plan:
    """The plan with the partitioner's result for every segment of every stage, each checked exactly.

    Raises:
      VerificationError: a segment does not communicate as planned.
    """
    checked = 0
    known: set[Any] = set()
    for stage in found.stages:
        mesh = stage.found.mesh
        if mesh.size == 1:
            continue
        for segment in stage.segments.items:
            wanted = segment_collectives(stage, segment)
            key = (
                mesh, segment.kind, segment.round, tuple((c.kind, c.axes, c.bytes, c.count) for c in wanted),
                tuple(item.op.key for item in segment.instructions if not isinstance(item, Reshard)),
            )  # fmt: skip
            if key in known:
                continue
            known.add(key)
            shardy.check_shardy(_module(stage, segment, plan.cluster.platform, shared=True), mesh, wanted)
            checked += 1
    if not checked:
        return replace(plan, verification=("every stage has one device: nothing to communicate within a stage",))
    text = (
        f"Shardy: each of {checked} distinct stage executables has the planned collectives in its lowered program and "
        "no others"
    )
    return replace(plan, verification=(text,))


def verified_compiled(plan: Plan, found: FoundPipeline, compiled: Sequence[Any]) -> Plan:
    """The plan with the compiler's rewrites by name, and the memory of the compiled executables.

    Args:
      compiled: the `jax.stages.Compiled` of each executable, in the program's order.

    Raises:
      VerificationError: an executable communicates what neither its stage's plan nor a known rewrite explains.
    """
    program = found.pipeline.program
    lines, rewrites = list(plan.verification), []
    largest: dict[int, tuple[float, str]] = {}
    several = 0
    for number, one in enumerate(compiled):
        name, (position, item) = program.executables[number].name, found.pipeline.functions[number]
        stage = found.stages[position]
        segment, mesh = stage.segments.items[item], stage.found.mesh
        if mesh.size > 1:
            module = _module(stage, segment, plan.cluster.platform)
            report = hlo.compare_hlo(one.as_text(), mesh, segment_collectives(stage, segment), module)
            try:
                report.raise_if_bad()
            except VerificationError as error:
                raise VerificationError(f"{name}: {error}") from None
            several += 1
            rewrites += [f"{name}: {rewrite}" for rewrite in report.rewrites]
        memory = verification.memory_of(one, stage.temporary[segment])
        if memory is not None:
            text = f"{memory.temporaries} bytes of temporaries in {name}; the plan predicts {memory.predicted}"
            where = program.executables[number].mesh
            largest[where] = max(largest.get(where, (-1, "")), (memory.temporaries, text))
    if several:
        lines.append(
            f"compiled: {several} stage executables have the planned collectives, apart from the listed rewrites"
        )
    for where, (_, text) in sorted(largest.items()):
        lines.append(f"compiled: on submesh {where} at most {text}")
    return replace(plan, verification=tuple(lines), rewrites=tuple(rewrites))


def donating(found: FoundPipeline, arguments: Collection[int]) -> FoundPipeline:
    """The pipeline that consumes no arguments but these.

    Args:
      arguments: the numbers of flat arguments of the user's step that the caller gives away.
    """
    stacked = found.accumulated.traced.stacked
    if stacked is not None:
        arguments = {n for i in arguments for n in stacked.arguments[i].numbers}
    program = found.pipeline.program
    owned = {b for i, buffers in enumerate(program.inputs) if i not in arguments for b in buffers}
    spared = sparing(program, owned)
    used = tuple((peak, rest) for peak, (_, rest) in zip(peak_bytes(spared), found.bytes, strict=True))
    return replace(found, pipeline=replace(found.pipeline, program=spared), bytes=used)


def segment_collectives(stage: PlannedStage, segment: Segment) -> tuple[Collective, ...]:
    """The collectives of one run of a segment."""
    program = replace(stage.program, body=Body((), segment.instructions, ()))
    return tuple(collective for collective, _ in collectives(program, stage.graph.traced))


def _module(stage: PlannedStage, segment: Segment, platform: str, *, shared: bool = False) -> Any:
    """The lowered program of a segment, on an abstract mesh; with `shared`, equal layers are one function."""
    import jax

    count = stage.graph.traced.graph  # the number of micro-batches is the length of the stage's scan
    length = next((int(op.params["length"]) for op in count.block.ops if op.index == stage.graph.scan), 1)
    taken, _ = functions.types_of(stage.segments, segment, length)
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in taken]
    specs = [spec_of(layout) for _, _, layout in taken]

    def make(abstract: Any) -> Any:
        return functions.function_of(stage.segments, segment, abstract, length, shared=shared)

    return verification.lowered_module(make, stage.found.mesh, avals, specs, platform)


def _stage_collectives(number: int, stage: PlannedStage, found: FoundPipeline) -> list[tuple[Collective, float]]:
    """The collectives of a stage in a step, with their shares of its seconds: those of one kind start together."""
    cost = MeshCost(stage.cluster, stage.found.mesh)
    out = []
    for segment in stage.segments.items:
        runs = found.pipeline.program.num_microbatches if segment.kind in ("forward", "backward", "weight") else 1
        listed = segment_collectives(stage, segment)
        alone = [cost.collective(c.kind, c.axes, c.bytes) * c.count for c in listed]
        share = stage.communication[segment] / sum(alone) if any(alone) else 0.0
        for c, seconds in zip(listed, alone, strict=True):
            out.append((replace(c, count=c.count * runs, stage=number), seconds * share * runs))
    return out


def _transfers(program: Program) -> list[tuple[Collective, float]]:
    """What goes between submeshes, equal transfers joined. Bytes are those of one device of the receiver."""
    found: dict[tuple[int, int, int, str], list[float]] = {}
    for transfer in program.transfers:
        size = sum(program.buffers[b].bytes for b in transfer.received)
        part = "per micro-batch" if transfer.microbatch >= 0 else "once per step"
        where = f"submesh {transfer.source} to {transfer.destination}, {len(transfer.sent)} buffers {part}"
        found.setdefault((transfer.source, transfer.destination, size, where), []).append(transfer.seconds)
    stage_of = {executable.mesh: executable.stage for executable in reversed(program.executables)}
    return [
        (Collective("transfer", (), size, len(seconds), stage_of.get(source, source), where), sum(seconds))
        for (source, _, size, where), seconds in found.items()
    ]


def _stage(number: int, part: Plan, found: FoundPipeline) -> Stage:
    """A stage of the whole plan: its arguments, its seconds of the simulated step, its memory in the program."""
    planned = found.stages[number]
    stage = part.stages[0]
    runs = found.pipeline.program.num_microbatches
    times = {s: runs if s.kind in ("forward", "backward", "weight") else 1 for s in planned.segments.items}
    seconds = sum(planned.seconds[s] * n for s, n in times.items())
    communication = sum(cost for _, cost in _stage_collectives(number, planned, found))
    mesh = found.pipeline.mesh_of[number]
    total = sum(found.bytes[mesh])
    memory = stage.memory
    rest = total - memory.params - memory.gradients - memory.optimizer
    inputs = [
        leaf for leaf, port in zip(stage.arguments, planned.graph.inputs, strict=True) if port.kind == "argument"
    ]  # fmt: skip
    outputs = [leaf for leaf, port in zip(stage.results, planned.graph.outputs, strict=True) if port.kind == "argument"]
    return replace(
        stage,
        arguments=tuple(inputs),
        results=tuple(outputs),
        memory=Memory(memory.params, memory.gradients, memory.optimizer, max(0, rest), total),
        seconds=seconds,
        compute_seconds=max(0.0, seconds - communication),
        communication_seconds=min(seconds, communication),
    )


def _solver(found: FoundPipeline, parts: Sequence[Plan]) -> Solver:
    """Seconds of the simulation; the bound is the stage DP's, on its own model of the same costs."""
    seconds, bound = found.seconds, min(found.bound, found.seconds)
    return Solver(
        "replayed" if found.replayed else "feasible", seconds, bound, (seconds - bound) / seconds if seconds else 0.0,
        sum(part.solver.seconds for part in parts), max(part.solver.variables for part in parts),
    )  # fmt: skip


def _candidates(found: FoundPipeline) -> tuple[Candidate, ...]:
    out = []
    for weighed in found.weighed:
        twice = f" with {weighed.virtual} stages per submesh" if weighed.virtual > 1 else ""
        name = f"{weighed.schedule}{twice}, {microbatches(weighed.num_microbatches)}"
        shape = (weighed.num_stages,) if weighed.num_stages is not None else ()
        size = None if weighed.bytes is None else int(weighed.bytes)
        out.append(Candidate(name, shape, weighed.seconds, size, weighed.status))
    return tuple(out)


def _notes(found: FoundPipeline) -> list[str]:
    gap = "gap: simulated step against the stage search's lower bound; the two use different cost models"
    notes = [] if found.replayed else [gap]
    notes += stacked_arguments.notes(found.accumulated.traced.stacked, found.pipeline.program)
    return [*notes, found.over] if found.over else notes


def _ingredients(
    traced: Traced, parts: Sequence[Plan], cluster: Cluster, found: FoundPipeline
) -> Mapping[str, str]:  # fmt: skip
    """What the plan belongs to: the ingredients of its stages, and how the step was divided."""
    values = traced.graph.values
    signature = [
        f"{a.path}: {values[v].dtype}{list(values[v].shape)}"
        for a, v in zip(traced.arguments, traced.graph.block.inputs, strict=False)
    ]
    out = {
        "arguments": "; ".join(signature),
        "cluster": cluster.fingerprint,
        "communication": "explicit",
        "micro-batches": str(found.slices.num_microbatches),
        "schedule": f"{found.slices.schedule} x {found.slices.virtual}",
        "stages": str([(s.first, s.stop, s.mesh) for s in found.slices.stages]),
    }
    for number, part in enumerate(parts):
        out[f"stage {number}"] = part.fingerprint
    return out
