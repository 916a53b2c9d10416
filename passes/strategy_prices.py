"""What a strategy costs: the FLOPs of an operation, and the seconds of getting a tensor from one layout to another.

Every pair of layouts has one pair of coefficients whatever the tensor: latency, and seconds per byte of the whole
tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from alpa_lite.cost import MeshCost
from alpa_lite.graph import Lit, Op, Value
from alpa_lite.layout import Layout, LogicalMesh, reshard_moves
from alpa_lite.strategy import Rule


def combinable(cost: MeshCost) -> frozenset[str]:
    """The kinds of collectives that the compiler joins: on CPU its combiner joins all-reduces alone."""
    if cost.cluster.platform == "cpu":
        return frozenset({"all_reduce"})
    return frozenset({"all_reduce", "reduce_scatter", "all_gather"})


@functools.lru_cache(maxsize=400_000)
def _pair(cost: MeshCost, src: Layout, dst: Layout) -> tuple[float, float, float]:
    """Seconds of resharding: (latency of steps that may be combined, other latency, seconds per byte of the tensor).

    The latency is inf where it cannot be done.
    """
    moves = reshard_moves(src, dst)
    if moves is None:
        return 0.0, math.inf, 0.0
    joins = combinable(cost)
    alpha = [0.0, 0.0]
    beta = 0.0
    before = src.dims
    for kind, axes, _, _, after, _ in moves:
        if kind != "slice":
            dims = before if kind == "reduce_scatter" else after
            a, b = cost.coefficients(kind, axes)
            alpha[kind not in joins] += a
            beta += b / cost.mesh.product(tuple(a for axes in dims for a in axes))
        before = after
    return alpha[0], alpha[1], beta


@functools.lru_cache(maxsize=20_000)
def pairs(cost: MeshCost, produced: tuple[Layout, ...], wanted: tuple[Layout, ...]) -> tuple[np.ndarray, ...]:
    """Coefficients of every pair of layouts: three arrays [P, Q]."""
    table = np.array([[_pair(cost, p, q) for q in wanted] for p in produced])
    return table[..., 0], table[..., 1], table[..., 2]


def divides(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> bool:
    """Whether every dim divides over the devices that shard it."""
    return all(size % mesh.product(axes) == 0 for size, axes in zip(shape, layout.dims, strict=True))


def work(op: Op, rule: Rule, values: Sequence[Value]) -> float:
    """FLOPs of an operation: two per multiply-add of a product or convolution, else one per element."""
    if op.name in ("dot_general", "conv_general_dilated"):
        return 2.0 * math.prod(f.size for f in rule.factors)
    tensors = [v for v in (*op.operands, *op.results) if not isinstance(v, Lit)]
    return float(max((math.prod(values[v].shape) for v in tensors), default=1))
