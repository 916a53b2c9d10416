"""Connections in an integer program: the transfers of each node, and the factors that are one dim."""

from __future__ import annotations

import itertools

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from alpa_lite.ir.graph import Traced
from alpa_lite.passes.sharding.groups import Dims, Grouping
from alpa_lite.passes.sharding.space import Space


def touching(space: Space) -> list[list[int]]:
    """For each node, the numbers of the transfers that it produces or consumes."""
    out: list[list[int]] = [[] for _ in space.nodes]
    for number, transfer in enumerate(space.program.transfers):
        for node in {transfer.src, *(n for n, _ in transfer.consumers)}:
            out[node].append(number)
    return out


def components(grouping: Grouping, space: Space, *, parts: bool = False) -> dict[tuple[int, int], int]:
    """(node, factor) -> a number that is the same for factors which are one dim.

    Where a dim is made of several factors and used as one, or the reverse, only the first of several is the same; with
    `parts`, all of them are: the examples of a batch, then, are both the micro-batches and the examples of each.
    """
    node_of = space.node_of
    number: dict[tuple[int, int], int] = {}
    joined: set[tuple[int, int]] = set()
    seen: set[tuple[int, Dims, int, Dims]] = set()

    def of(node: int, factor: int) -> int:
        return number.setdefault((node, factor), len(number))

    for demand in grouping.demands:
        home = grouping.homes.get(demand.value)
        if home is None or not home.group or not demand.group:
            continue
        key = (node_of[home.group], home.dims, node_of[demand.group], demand.dims)
        if key in seen:
            continue
        seen.add(key)
        for made, used in zip(home.dims, demand.dims, strict=True):
            if len(made) == len(used):
                pairs = zip(made, used, strict=True)
            elif parts:
                pairs = itertools.product(made, used)
            else:
                pairs = zip(made[:1], used[:1], strict=False)  # a dim of several factors grows with its first one
            joined |= {(of(key[0], a), of(key[2], b)) for a, b in pairs}
    for node, dims in {(node_of[home.group], home.dims) for home in grouping.homes.values() if home.group}:
        for dim in dims:
            for factor in dim:
                of(node, factor)
    ends = np.array(sorted(joined), dtype=int).reshape(-1, 2).T
    graph = sparse.coo_array((np.ones(ends.shape[1]), tuple(ends)), shape=(len(number), len(number)))
    component = connected_components(graph, directed=False)[1]
    return {pair: int(component[i]) for pair, i in number.items()}


def growing_factors(traced: Traced, grouping: Grouping, space: Space) -> frozenset[tuple[int, int]]:
    """The pairs (node, factor) whose size is proportional to the leading dim of the batch arguments."""
    values, inputs, node_of = traced.graph.values, traced.graph.block.inputs, space.node_of
    component = components(grouping, space)
    growing: set[int] = set()
    for argument, value in zip(traced.arguments, inputs, strict=False):
        home = grouping.homes.get(value)
        if argument.role == "batch" and values[value].shape and home is not None and home.group:
            growing |= {component[node_of[home.group], f] for f in home.dims[0][:1]}
    return frozenset(pair for pair, i in component.items() if i in growing)
