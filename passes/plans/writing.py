"""Writes the plan of a decided step: a value that says what was chosen, what it costs, and what else there was."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir import units
from alpa_lite.ir.graph import Lit, Op, Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.program import Program
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes import lowering
from alpa_lite.passes.ir.folding import all_copies, whole_step
from alpa_lite.passes.local.effects import needs_outside
from alpa_lite.passes.plans import figures
from alpa_lite.passes.plans.decisions import decisions_of, fixed_strategies
from alpa_lite.passes.plans.notes import plan_notes
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding import tables
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.stage_graph import Port
from alpa_lite.plan.decisions import Replicated, Solver
from alpa_lite.plan.records import Collective, Leaf, Memory, PlanRecord, Stage

_MEMORY_SAMPLES = 64
"""Points of the step, at most, at which a plan has the memory of each kind: of equal parts those with most bytes."""


def write(staged: Staged, cluster: Cluster, *, method: str, budget: float, annotated: bool = False) -> PlanRecord:
    """The plan of a step in planned stages, without verification, planning seconds and alternatives (`weighing`).

    Args:
      cluster: all devices.
      method: what was asked for, in words.
      budget: bytes per device.
      annotated: whether the step, its arguments or the context say of themselves where values are placed.
    """
    program, step = staged.program, staged.seconds
    solutions = {id(found): found for found in (one.mesh_solution.solution for one in staged.stages)}  # twins share one
    own = [collectives_of(planned, number) for number, planned in enumerate(staged.stages)]
    stages = [_stage(staged, number, priced) for number, priced in enumerate(own)]
    listed = [*itertools.chain(*own), *_transfers(program)]
    parts = _whole_ingredients(staged, stages, cluster) | ({"annotations": "heeded"} if annotated else {})
    verdict = staged.verdict
    bound = min(verdict.bound, step)  # a step that is simulated can be had
    return PlanRecord(
        method=method,
        cluster=cluster,
        num_devices=sum(submesh.mesh.size for submesh in program.submeshes),
        num_stages=len(stages),
        num_microbatches=program.num_microbatches,
        schedule=program.schedule,
        step_seconds=step,
        fingerprint=fingerprint(parts),
        memory_per_device=int(budget),
        stages=tuple(stages),
        collectives=tuple(collective for collective, _ in listed),
        collective_seconds=tuple(cost for _, cost in listed),
        solver=Solver(
            verdict.status,
            verdict.seconds,
            bound,
            (verdict.seconds - bound) / verdict.seconds if verdict.seconds else 0.0,
            sum(found.work for found in solutions.values()),
            max(stage.solver.variables for stage in stages),
            verdict.model,
        ),
        division=staged.division,
        candidates=verdict.candidates,
        notes=plan_notes(staged, cluster),
        ingredients=parts,
        products=figures.products(staged.stages, cluster),
        comparisons=verdict.others,
    )


def collectives_of(planned: PlannedStage, number: int) -> list[tuple[Collective, float]]:
    """Returns the collectives of a stage in a step, with their seconds."""
    out = []
    for segment in planned.segments.items:
        runs = planned.runs(segment)
        for found, seconds in planned.prices.listed_collectives(segment.instructions):
            out.append((replace(found, count=found.count * runs, stage=number), seconds * runs))
    return out


def _stage(staged: Staged, number: int, own: Sequence[tuple[Collective, float]]) -> Stage:
    """Returns a stage of the plan, given its collectives and their seconds."""
    planned = staged.stages[number]
    graph, groups, rules, found = planned.graph, planned.grouping, planned.rules, planned.mesh_solution
    traced, solution, segments = graph.traced, found.solution, planned.segments.items
    parts = ingredients(traced, groups, planned.cluster, found.mesh, planned.communication)
    parts["state gathered anew for late uses"] = str(found.space.late_from is not None)
    memory = _memory(traced, groups, found.space, solution.choice)
    if not any(segment.kind == "step" for segment in segments):  # buffers wait between runs: the program knows how many
        used = sum(staged.bytes[staged.written.mesh_of[number]])
        memory = replace(memory, gathered=0)  # copies of weights live within a run: they are among its temporaries
        rest = max(0, used - sum(memory.kinds.values()) + memory.activations)
        memory = replace(memory, activations=rest, total=used, over_step=None)
    runs = {segment: planned.runs(segment) for segment in segments}
    arguments, received = _leaves(planned, graph.inputs, arguments=True)
    results, sent = _leaves(planned, graph.outputs, arguments=False)
    return Stage(
        mesh_shape=found.mesh.shape,
        axis_names=found.mesh.axis_names,
        arguments=arguments,
        results=results,
        memory=memory,
        seconds=sum(planned.seconds[s] * n for s, n in runs.items()),
        compute_seconds=planned.prices.arguments + sum(planned.prices.compute(s.instructions) for s in segments),
        communication_seconds=sum(cost for _, cost in own),
        hidden_seconds=sum(planned.overlap[s].hidden_seconds * n for s, n in runs.items()),
        hideable_seconds=sum(planned.overlap[s].hideable_seconds * n for s, n in runs.items()),
        solver=Solver(
            solution.status, solution.objective, solution.bound, solution.gap, solution.work, solution.variables
        ),
        received=received,
        sent=sent,
        decisions=decisions_of(planned),
        fixed=fixed_strategies(groups, found, len(traced.arguments)),
        replicated=_replicated(traced, groups, rules, MeshCost(planned.cluster, found.mesh)),
        ingredients=parts,
        axes=figures.axis_uses(planned, figures.examples(staged.traced) // staged.program.num_microbatches),
        held=figures.saved_activations(planned),
        spending=figures.operation_seconds(planned),
    )


def _transfers(program: Program) -> list[tuple[Collective, float]]:
    """Returns the transfers between submeshes with seconds, equal ones joined. Bytes are per receiving device."""
    found: dict[tuple[tuple[int, int], int, str], list[float]] = {}
    for transfer in program.transfers:
        size = sum(program.buffers[b].bytes for b in transfer.received_buffers)
        part = "per micro-batch" if transfer.microbatch >= 0 else "once per step"
        route, buffers = (transfer.source, transfer.destination), units.count_of(len(transfer.sent_buffers), "buffer")
        where = f"submesh {transfer.source} to {transfer.destination}, {buffers} {part}"
        found.setdefault((route, size, where), []).append(transfer.seconds)
    stage_of = {executable.mesh: executable.stage for executable in reversed(program.executables)}
    return [
        (Collective("transfer", (), size, len(seconds), stage_of.get(route[0], route[0]), where, route), sum(seconds))
        for (route, size, where), seconds in found.items()
    ]


def _whole_ingredients(staged: Staged, stages: Sequence[Stage], cluster: Cluster) -> dict[str, str]:
    """Returns the ingredients of a whole plan: those of its stages, the division of the step, and JAX's settings."""
    program, division = staged.program, staged.division
    divided = zip(division.first_layers, division.submeshes, division.remat, strict=True)
    out = {
        "arguments": _digest(_signature(whole_step(staged.traced))),
        "cluster": cluster.fingerprint,
        "communication": staged.stages[0].communication,
        "micro-batches": str(program.num_microbatches),
        "schedule": f"{program.schedule} x {division.virtual}",
        "stages": str(list(divided)),
        "jax": jax.__version__,
    }
    if staged.traced.calling is not None:
        out |= _jax.settings_text(staged.traced.calling.settings)
    for number, stage in enumerate(stages):
        out[f"stage {number}"] = fingerprint(stage.ingredients)
    return out


def _signature(traced: Traced) -> list[str]:
    values = traced.graph.values
    return [
        f"{a.path}: {values[v].dtype}{list(values[v].shape)}"
        for a, v in zip(traced.arguments, traced.graph.block.inputs, strict=False)
    ]


def ingredients(
    traced: Traced, grouping: Grouping, cluster: Cluster, mesh: LogicalMesh, communication: str
) -> dict[str, str]:
    """Returns the ingredients of a stage. Two programs are the same if they have the same groups, each as often."""
    colors = sorted(f"{color} {grouping.count(members)}" for color, members in grouping.classes.items())
    return {
        "program": _digest(colors),
        "arguments": _digest(_signature(whole_step(traced))),
        "devices": f"{cluster.num_devices} x {cluster.device}",
        "mesh": f"{mesh.shape} {mesh.axis_names}",
        "communication": communication,
        "jax": jax.__version__,
    }


def fingerprint(parts: Mapping[str, str]) -> str:
    """Returns a hash of a plan's ingredients without the JAX version: another version may trace the same program."""
    return _digest([f"{k}={v}" for k, v in sorted(parts.items()) if k != "jax"])


def _digest(lines: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=12).hexdigest()


def _leaves(
    planned: PlannedStage, ports: Sequence[Port], *, arguments: bool
) -> tuple[tuple[Leaf, ...], tuple[Leaf, ...]]:
    """Returns the flat arguments or results that the stage keeps, and those that it exchanges with other stages."""
    copies, traced, program = planned.graph.traced.copies, whole_step(planned.graph.traced), planned.program
    block, values = traced.graph.block, traced.graph.values
    records, atoms, layouts = (
        (traced.arguments, block.inputs, program.inputs)
        if arguments
        else (traced.outputs, block.outputs, program.outputs)
    )
    if copies is not None:
        own = copies.arguments if arguments else copies.outputs
        ports, layouts = [ports[n] for n in own], tuple([layouts[n] for n in own])
    kept, exchanged = [], []
    for port, record, atom, layout in zip(ports, records, atoms, layouts, strict=False):
        aval = atom.aval if isinstance(atom, Lit) else values[atom].aval
        nbytes = 0 if isinstance(atom, Lit) else values[atom].nbytes
        leaf = Leaf(record.path, tuple(aval.shape), str(aval.dtype), nbytes, record.role, lowering.spec_of(layout))
        (kept if port.kind == "argument" else exchanged).append(leaf)
    return tuple(kept), tuple(exchanged)


def _memory(traced: Traced, grouping: Grouping, space: Space, choice: Sequence[int]) -> Memory:
    """Returns the largest of the live bytes of each kind, and of all together, and those of all kinds over the step."""
    live = tables.live_bytes(traced, grouping, space, choice)
    total = np.sum([*live.values()], axis=0)
    parts = np.array_split(np.arange(len(total)), _MEMORY_SAMPLES)
    fullest = [part[total[part].argmax()] for part in parts if part.size]
    over_step = {kind: tuple(map(int, amounts[fullest])) for kind, amounts in live.items() if amounts.any()}
    peaks = {kind: int(amounts.max(initial=0.0)) for kind, amounts in live.items()}
    return Memory(**peaks, total=int(total.max(initial=0.0)), over_step=over_step)


def _replicated(
    traced: Traced, grouping: Grouping, rules: Mapping[Any, Rule], cost: MeshCost
) -> tuple[Replicated, ...]:
    """Returns operations that no rule describes, identical ones together, the largest first."""
    values = traced.graph.values
    found: dict[tuple[Any, str], list[Op]] = {}
    fixed = (grouping.ops[number] for number in grouping.groups[0].ops)
    replicated = [op for op in fixed if needs_outside(op) or rules[op.key].source == "opaque"]
    for op in all_copies(traced, replicated):
        found.setdefault((op.key, _jax.describe_location(op.source)), []).append(op)
    rows = []
    for (key, where), (*others, op) in found.items():
        tensors = [values[v] for v in (*op.operands, *op.results) if not isinstance(v, Lit)]
        if any(math.prod(value.shape) > 1 for value in tensors):
            size, count = sum(value.nbytes for value in tensors), len(others) + 1
            reason = "it cannot run inside a shard_map region: it needs and returns whole values"
            reason = reason if needs_outside(op) else rules[key].reason
            rows.append(Replicated(op.name, where, reason, size, cost.compute(0.0, size, None) * count, count))
    return tuple(sorted(rows, key=lambda r: -r.seconds))
