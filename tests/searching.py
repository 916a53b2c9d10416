"""The best plan of one mesh for a grouped step, without the search over configurations."""

from __future__ import annotations

from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.passes.sharding import mesh_program
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.tables import GroupedStep


def best_of_meshes(traced: Any, grouping: Any, rules: Any, cluster: Cluster, method: Any) -> MeshSolution:
    """The solution of the best mesh within the cluster's usable memory."""
    budget, step = cluster.usable_memory, GroupedStep(traced, grouping, rules)
    programs = mesh_program.mesh_programs(step, cluster, method, budget=budget)
    found = mesh_program.solve_meshes(programs, budget)
    assert found is not None
    return found
