"""Replays a plan: finds each group's decision by its key, without solving.

A plan holds the sharding of every argument by path, and a strategy for every class of groups by structural key. Another
JAX version may trace a step into other equations; then some groups have no decision, and the plan is refused with their
names rather than completed by guessing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.errors import PlanError
from alpa_lite.graph import Traced
from alpa_lite.layout import Layout, LogicalMesh
from alpa_lite.passes.plans import writing
from alpa_lite.passes.sharding import strategies
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.search import Found
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.space import Strategy
from alpa_lite.paths import shown
from alpa_lite.plan import Candidate, Plan, spec_axes
from alpa_lite.strategy import Rule, Solution


def replay(
    traced: Traced,
    grouping: Grouping,
    rules: Mapping[Any, Rule],
    cluster: Cluster,
    plan: Plan,
    *,
    communication: str,
) -> Found:
    """What `search` would return, with the decisions of `plan`.

    Raises:
      PlanError: if the plan is for other arguments, another number of devices, or another program; says what differs.
    """
    start = time.perf_counter()
    stage = plan.stages[0]
    mesh = LogicalMesh(tuple(stage.mesh_shape), tuple(stage.axis_names))
    here = writing.ingredients(traced, grouping, cluster, mesh.shape, mesh.axis_names, communication)
    _check(traced, plan, here, cluster)
    allowed = _argument_layouts(traced, grouping, plan)
    regather = plan.ingredients.get("state gathered anew for late uses") == "True"
    space = strategies.build(traced, grouping, rules, MeshCost(cluster, mesh), allowed=allowed, regather=regather)
    decided = {d.key: Strategy(d.strategy, d.partial) for d in plan.decisions if not d.paths}
    choice, missing = [], []
    for node in space.nodes:
        group = grouping.groups[node.group]
        wanted = decided.get(group.color)
        if len(node.strategies) == 1:
            choice.append(0)
        elif wanted in node.strategies:
            choice.append(node.strategies.index(wanted))
        else:
            missing.append(group.name)
    if missing:
        raise PlanError(
            f"the plan has no decision for {len(missing)} of {len(space.nodes)} kinds of operations, such as "
            f"{', '.join(sorted(set(missing))[:5])}: {_differences(plan, here)}. "
            "Plan again for this program and version."
        )
    undecided = all(len(node.strategies) == 1 for node in space.nodes)  # one device: no key has been compared
    if undecided and plan.ingredients.get("jax") == here["jax"] and plan.ingredients.get("program") != here["program"]:
        raise PlanError(f"the plan is for another program: {_differences(plan, here)}. Plan again for this one.")
    objective, peak = solve.evaluate(space.program, tuple(choice))
    solution = Solution("feasible", tuple(choice), objective, objective, peak, time.perf_counter() - start, 0, 0)
    strategies_of = tuple(space.nodes[n].strategies[choice[n]] for n in space.node_of)
    candidate = Candidate("replayed", mesh.shape, objective, int(peak), "chosen")
    return Found(mesh, space, solution, strategies_of, (candidate,))


def _check(traced: Traced, plan: Plan, here: Mapping[str, str], cluster: Cluster) -> None:
    if plan.num_devices != cluster.num_devices:
        raise PlanError(
            f"the plan is for {plan.num_devices} devices, but the cluster has {cluster.num_devices}; plan again for "
            "this cluster."
        )
    if plan.ingredients.get("arguments") == here["arguments"]:
        return
    values, block = traced.graph.values, traced.graph.block
    found = {
        shown(a.path): (tuple(values[v].shape), str(values[v].dtype))
        for a, v in zip(traced.arguments, block.inputs, strict=False)
    }
    planned = {shown(leaf.path): (leaf.shape, leaf.dtype) for leaf in plan.stages[0].arguments}
    lines = [f"{p} is not in the plan" for p in found if p not in planned]
    lines += [f"{p} is in the plan but was not passed" for p in planned if p not in found]
    lines += [
        f"{p} is {found[p][1]}{list(found[p][0])}, planned {planned[p][1]}{list(planned[p][0])}"
        for p in found
        if p in planned and found[p] != planned[p]
    ]
    listed = "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")
    raise PlanError(
        f"the plan is for other arguments: {listed}. Plan again, or pass the arguments for which it was made."
    )


def _differences(plan: Plan, here: Mapping[str, str]) -> str:
    differ = [f"{k} was {plan.ingredients.get(k)}, is {v}" for k, v in here.items() if plan.ingredients.get(k) != v]
    return "; ".join(differ) or "nothing else differs"


def _argument_layouts(traced: Traced, grouping: Grouping, plan: Plan) -> dict[int, tuple[Layout, ...]]:
    specs = plan.stages[0].inputs
    out: dict[int, tuple[Layout, ...]] = {}
    for number, argument in enumerate(traced.arguments):
        group = grouping.leaves[number]
        if not group:
            continue
        shape = traced.graph.values[traced.graph.block.inputs[number]].shape
        axes = spec_axes(specs[argument.path])
        out[group] = (Layout((*axes, *((),) * (len(shape) - len(axes)))),)
    return out
