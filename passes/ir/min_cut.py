"""Minimum cuts of networks with integer capacities; vertex 0 is the source, and vertex 1 the sink."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

SOURCE, SINK = 0, 1

UNLIMITED = 1 << 30
"""The capacity of an edge that is not cut. SciPy counts in int32: others together must have less."""


def smallest_side(capacity: Mapping[tuple[int, int], int], count: int, end: int) -> set[int]:
    """The vertices on one side of the minimum cut that is nearest to this end: those connected in the residual graph.

    Args:
      capacity: of each edge.
      count: the number of vertices.
      end: SOURCE or SINK.
    """
    starts, ends = np.array(list(capacity), np.int32).reshape(-1, 2).T
    sizes = np.array(list(capacity.values()), np.int32)
    graph = sparse.csr_matrix((sizes, (starts, ends)), shape=(count, count), dtype=np.int32)
    left = (graph - csgraph.maximum_flow(graph, SOURCE, SINK).flow).tocsr()
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    residual = left if end == SOURCE else left.T.tocsr()
    return set(csgraph.breadth_first_order(residual, end, return_predecessors=False).tolist())
