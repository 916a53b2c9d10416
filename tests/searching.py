"""Steps in groups, and the best plan of one mesh for one, without the search over configurations."""

from __future__ import annotations

from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.passes import factors
from alpa_lite.passes.sharding import grouping, mesh_program
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.tracing import tracing


def grouped_step(step: Any, *args: Any) -> GroupedStep:
    """A step traced, with the rules of its operations and its groups."""
    traced = tracing.trace(step, args, {})
    rules = dict(factors.rules_of(traced.graph.ops(), traced.graph.values))
    return GroupedStep(traced, grouping.group(traced, rules), rules)


def best_of_meshes(traced: Any, groups: Any, rules: Any, cluster: Cluster, method: Any) -> MeshSolution:
    """The solution of the best mesh within the cluster's usable memory."""
    budget, step = cluster.usable_memory, GroupedStep(traced, groups, rules)
    programs = mesh_program.mesh_programs(step, cluster, method, budget=budget)
    found = mesh_program.solve_meshes(programs, budget)
    assert found is not None
    return found
