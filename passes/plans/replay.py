"""Replays a plan: finds each group's decision by its key, without solving.

A plan holds the sharding of every argument by path, and a strategy for every class of groups by structural key, stage
by stage; what the method left no choice is fixed by key, too, since the program alone would allow more. Another JAX
version may trace a step into other equations; then some groups have no decision, and the plan is refused with their
names rather than completed by guessing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.errors import PlanError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.paths import format_path
from alpa_lite.ir.strategy import Rule, Solution
from alpa_lite.passes import factors
from alpa_lite.passes.layers.rematerialisation import Remat
from alpa_lite.passes.plans.writing import ingredients
from alpa_lite.passes.sharding import grouping, strategies
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.solver.solve import evaluate
from alpa_lite.passes.sharding.space import Constraints, Limit, Strategy
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.stages import stage_graph
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.passes.stages.pricing import REMAT
from alpa_lite.passes.stages.stage_graph import StageGraph
from alpa_lite.plan.decisions import Candidate
from alpa_lite.plan.pins import layout_of_spec
from alpa_lite.plan.records import PlanRecord, Stage


def replay(
    graph: StageGraph, cluster: Cluster, stage: Stage, communication: str, *, split_weights: bool = False
) -> DecidedStage:  # fmt: skip
    """Returns a stage with the decisions of a plan: what solving it would return.

    Args:
      cluster: the devices of its submesh.
      communication: "explicit" or "compiler".
      split_weights: as for `planning.decide`.

    Raises:
      PlanError: the plan is for other arguments, or another program; says what differs.
    """
    traced = graph.traced
    rules: Mapping[Any, Rule] = factors.rules_of(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(replace(traced, folded_step=None), rules, graph.apart_results)
    mesh = LogicalMesh(tuple(stage.mesh_shape), tuple(stage.axis_names))
    here = ingredients(traced, groups, cluster, mesh, communication)
    _check_arguments(traced, stage, here)
    recorded, left = _recorded(groups, stage, mesh)
    fixed = Constraints(_argument_layouts(traced, groups, stage), left)
    regather = stage.ingredients.get("state gathered anew for late uses") == "True"
    step = GroupedStep(traced, groups, rules, stage_graph.repeats(graph, split_weights=split_weights))
    space = strategies.build(step, MeshCost(cluster, mesh), constraints=fixed, regather=regather)
    choice, missing = [], []
    for node in space.nodes:
        group = groups.groups[node.group]
        wanted = recorded.get(node.group)
        if wanted in node.strategies:
            choice.append(node.strategies.index(wanted))
        elif len(node.strategies) == 1 and left.get(node.group, Limit()).record[0] < 0:
            choice.append(0)
        else:
            missing.append(group.name)
    if missing:
        raise PlanError(
            f"the plan has no decision for {len(missing)} of {len(space.nodes)} kinds of operations, such as "
            f"{', '.join(sorted(set(missing))[:5])}: {_differences(stage, here)}. "
            "Plan again for this program and version."
        )
    undecided = all(len(node.strategies) == 1 for node in space.nodes)  # one device: no key has been compared
    if undecided and stage.ingredients.get("jax") == here["jax"] and stage.ingredients["program"] != here["program"]:
        raise PlanError(f"the plan is for another program: {_differences(stage, here)}. Plan again for this one.")
    objective, peak = evaluate(space.program, tuple(choice))
    solution = Solution("feasible", tuple(choice), objective, objective, peak, 0, 0, 0)
    candidate = Candidate("replayed", mesh.shape, objective, int(peak), "chosen")
    return DecidedStage(graph, rules, groups, MeshSolution(space, solution, (candidate,)), cluster)


def check_devices(plan: PlanRecord, cluster: Cluster) -> None:
    """Raises PlanError if the plan is for another number of devices."""
    if plan.cluster.num_devices != cluster.num_devices:
        raise PlanError(
            f"the plan is for {plan.cluster.num_devices} devices, but the cluster has {cluster.num_devices}; plan "
            "again for this cluster."
        )


def check_layers(plan: PlanRecord, found: int) -> None:
    """Raises PlanError if the plan was made for another number of layers."""
    if found != plan.division.num_layers:
        raise PlanError(
            f"the plan cuts the step into {plan.division.num_layers} layers, but this step has {found}: the plan is "
            "for another program or version. Plan again."
        )


def remat_of(plan: PlanRecord) -> tuple[Remat, ...]:
    """Returns the rematerialisation of each stage.

    Raises:
      PlanError: this version does not support it.
    """
    out = []
    for name in plan.division.remat:
        known = Remat.parse(name)
        if known is None or known.choice not in REMAT or (known.first and plan.is_pipelined):
            raise PlanError(
                f"the plan recomputes {name!r} in a stage, which this version does not support. Plan again."
            )
        out.append(known)
    return tuple(out)


def _check_arguments(traced: Traced, stage: Stage, here: Mapping[str, str]) -> None:
    if stage.ingredients.get("arguments") == here["arguments"]:
        return
    values = traced.graph.values
    inputs = [(a.path, values[v]) for a, v in zip(traced.arguments, traced.graph.block.inputs, strict=False)]
    found = {format_path(path): f"{value.dtype}{list(value.shape)}" for path, value in inputs}
    leaves = (*stage.arguments, *stage.received)
    planned = {format_path(leaf.path): f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves}
    lines = [f"{p} is not in the plan" for p in found if p not in planned]
    lines += [f"{p} is in the plan but was not passed" for p in planned if p not in found]
    lines += [f"{p} is {kind}, planned {planned[p]}" for p, kind in found.items() if planned.get(p, kind) != kind]
    if not lines:  # the same in another order, as in plans of versions that kept them in the order of their names
        return
    listed = "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")
    raise PlanError(
        f"the plan is for other arguments: {listed}. Plan again, or pass the arguments for which it was made."
    )


def _recorded(groups: Grouping, stage: Stage, mesh: LogicalMesh) -> tuple[dict[int, Strategy], dict[int, Limit]]:
    """Returns the recorded strategy of each group that has one, and the limits that these are.

    A fixed strategy is not a decision; one that was both had alternatives.
    """
    fixed: dict[int, tuple[int, Strategy]] = {}
    for number, one in enumerate(stage.fixed):
        members = groups.classes.get(one.key, ())
        chosen = [members[i] for i in one.members if i < len(members)] if one.members else members
        fixed.update(dict.fromkeys(chosen, (number, Strategy(one.strategy, one.partial))))
    decided = {d.key: Strategy(d.strategy, d.partial) for d in stage.decisions if not d.paths}
    several = {axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1}
    recorded, limits = {}, {}
    for group in groups.groups:
        own = decided.get(group.color)
        number, wanted = fixed.get(group.index, (-1, own))
        if wanted is None:
            continue
        recorded[group.index] = wanted
        fills = several == {axis for axes in wanted.axes for axis in axes}
        limits[group.index] = Limit(fills=fills, record=(number, None if wanted == own else wanted))
    return recorded, limits


def _differences(stage: Stage, here: Mapping[str, str]) -> str:
    differ = [f"{k} was {stage.ingredients.get(k)}, is {v}" for k, v in here.items() if stage.ingredients.get(k) != v]
    return "; ".join(differ) or "nothing else differs"


def _argument_layouts(traced: Traced, groups: Grouping, stage: Stage) -> dict[int, tuple[Layout, ...]]:
    specs = {leaf.path: leaf.spec for leaf in (*stage.arguments, *stage.received)}
    arguments = zip(groups.leaves, traced.arguments, traced.graph.block.inputs, strict=False)
    return {
        group: (layout_of_spec(specs[argument.path], len(traced.graph.values[value].shape)),)
        for group, argument, value in arguments
        if group
    }
