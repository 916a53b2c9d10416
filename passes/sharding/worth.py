"""Costs of the user's own shardings: the same program on the same mesh, solved without each of them, and without all.

Only where that is cheap: for few shardings, and programs with few strategies. Nothing is claimed otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.graph import Traced
from alpa_lite.passes.ir.primitives import CONSTRAINT
from alpa_lite.passes.sharding import limits, strategies
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.plan.pins import Pins, Wishes

STRATEGIES = 3000
"""The most strategies of a program that is solved again."""

SHARDINGS = 6
"""The most shardings that are told apart."""


def worth(
    step: GroupedStep, cluster: Cluster, method: Any, found: MeshSolution, *, budget: float, pins: Pins, wishes: Wishes
) -> tuple[str, ...]:
    """A note for each of the user's own shardings; none where there is none, or where telling is expensive.

    Args: those of `mesh_program.mesh_programs`, and the solution.
    """
    said = items(step.traced, wishes)
    size = sum(len(node.strategies) for node in found.space.nodes)
    if not said or len(said) > SHARDINGS or size > STRATEGIES or found.solution.status != "optimal":
        return ()
    if len(said) > 1:
        ops, leaves = zip(*said.values(), strict=True)
        said["all of the user's shardings"] = frozenset().union(*ops), frozenset().union(*leaves)
    notes = []
    for name, (ops, leaves) in said.items():
        left = {path: wish for path, wish in wishes.leaves.items() if path not in leaves}
        limit = replace(limits.limits(step, method, found.mesh, replace(wishes, leaves=left), pins), ignored=ops)
        space = strategies.build(step, MeshCost(cluster, found.mesh), budget=budget, constraints=limit)
        solution = solve.solve(space.program)
        if solution.status == "optimal":
            with_it, without = found.solution.objective, min(solution.objective, found.solution.objective)
            notes.append(f"{name}: the step takes {with_it:.4g} s with it and {without:.4g} s without, on this mesh")
    return tuple(notes)


def items(traced: Traced, wishes: Wishes) -> dict[str, tuple[frozenset[int], frozenset[str]]]:
    """In words each sharding -> the operations and the paths of arguments that it is said of."""
    ops: dict[str, set[int]] = {}
    leaves: dict[str, set[str]] = {}
    for op in traced.graph.ops():
        if op.name == CONSTRAINT and any(axes is not None for axes in op.params["dims"]):
            ops.setdefault(f"{op.params['why']} at {_jax.source_line(op.source)}", set()).add(op.index)
    for path, wish in wishes.leaves.items():
        if path not in wishes.given:
            leaves.setdefault(wish.why, set()).add(path)
    names = dict.fromkeys((*ops, *leaves))
    return {name: (frozenset(ops.get(name, ())), frozenset(leaves.get(name, ()))) for name in names}
