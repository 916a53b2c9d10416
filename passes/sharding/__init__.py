"""How one mesh runs a step: the best strategy of each operation, by an integer program.

In: a graph, its rules, and a mesh or a cluster. Out: `Found`: the mesh, and a strategy for each group of operations
that decide together, with the proven bound. `group` makes the groups, `build` prices every strategy in seconds and
bytes, `search.search` solves each mesh shape and takes the best; the mathematics is in `solver`.
"""

from alpa_lite.passes.sharding.grouping import group
from alpa_lite.passes.sharding.strategies import build

__all__ = ["build", "group"]
