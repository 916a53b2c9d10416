"""How one mesh runs a step: the best strategy of each operation, by an integer program.

In: a graph, its rules, and a mesh or a cluster. Out: the mesh, and a strategy for each group of operations that decide
together, with the proven bound. `group` makes the groups, `strategies.build` prices each strategy in seconds and bytes,
`search.search` solves each mesh shape and takes the best; the mathematics is in `solver`.
"""

from alpa_lite.passes.sharding.grouping import group

__all__ = ["group"]
