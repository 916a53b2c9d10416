"""Costs of resharding a tensor from one layout to another.

Every pair of layouts has one pair of coefficients, latency and seconds per byte of the whole tensor: the same for all
tensors, or one for each size where the cluster has measured collectives, whose rate depends on the payload.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import Axes, Layout, LogicalMesh, moved_axes, reshard_moves


def combinable(cost: MeshCost) -> frozenset[str]:
    """The kinds of collectives that the compiler joins: on CPU its combiner joins all-reduces alone."""
    if cost.cluster.platform == "cpu":
        return frozenset({"all_reduce"})
    return frozenset({"all_reduce", "reduce_scatter", "all_gather"})


@functools.lru_cache(maxsize=100_000)
def _moves(differ: tuple[tuple[Axes, Axes], ...], src_partial: Axes, dst_partial: Axes):
    src = Layout(tuple([before for before, _ in differ]), src_partial)
    return reshard_moves(src, Layout(tuple([after for _, after in differ]), dst_partial))


@functools.lru_cache(maxsize=100_000)
def _coefficients(
    cost: MeshCost, changes: tuple[tuple[Axes, Axes], ...], src: Axes, dst: Axes, nbytes: float
) -> tuple[float, float, float]:  # fmt: skip
    """Seconds of resharding: (latency of steps that may be combined, other latency, seconds per byte of the tensor).

    Args:
      changes: the axes of each dim that changes, before and after. src, dst: those of partial sums.
      nbytes: of the tensor, less by what dims that do not change are cut into.

    The latency is inf where it cannot be done. A dim that does not change takes no part in any step: the seconds per
    byte are those of a tensor that it does not cut. Nor do the names of the axes matter.
    """
    names: dict[str, str] = {}

    def renamed(axes: Axes) -> Axes:
        return tuple([names.setdefault(a, f"{len(names)}") for a in axes])

    differ = tuple([(renamed(before), renamed(after)) for before, after in changes])
    moves = _moves(differ, renamed(src), renamed(dst))
    if moves is None:
        return 0.0, math.inf, 0.0
    joins = combinable(cost)
    real = {short: name for name, short in names.items()}
    size = {short: cost.mesh.axis_size(name) for short, name in real.items()}
    alpha = [0.0, 0.0]
    beta = 0.0
    held = tuple([before for before, _ in differ])
    for kind, axes, dim, _, after, _ in moves:
        if kind == "collective_permute":
            order = held[dim]
            axes = tuple([order[i] for i in moved_axes(order, axes, tuple([size[x] for x in order]))])
        if kind != "slice":
            dims = held if kind == "reduce_scatter" else after
            cut = math.prod([size[x] for some in dims for x in some])
            a, b = cost.coefficients(kind, tuple([real[x] for x in axes]), nbytes / cut)
            alpha[kind not in joins] += a
            beta += b / cut
        held = after
    return alpha[0], alpha[1], beta


def pairs(cost: MeshCost, produced: tuple[Layout, ...], wanted: tuple[Layout, ...], nbytes: float) -> np.ndarray:
    """[3, P, Q] coefficients of every pair of layouts of one rank, as of `_coefficients`.

    Args:
      nbytes: of the tensor.
    """
    return _pairs(cost, produced, wanted, float(nbytes) if cost.cluster.collectives else 0.0)


@functools.lru_cache(maxsize=1024)
def _pairs(cost: MeshCost, produced: tuple[Layout, ...], wanted: tuple[Layout, ...], nbytes: float) -> np.ndarray:
    """The tables of `pairs`, which layers, stages and later plans on equal clusters and meshes share."""
    orders = dict.fromkeys(axes for layout in (*produced, *wanted) for axes in (*layout.dims, layout.partial))
    names = {axes: i for i, axes in enumerate(orders)}
    parts = np.array([cost.mesh.product(axes) for axes in orders])

    def coded(layouts: tuple[Layout, ...]) -> tuple[np.ndarray, np.ndarray]:
        """[layouts, dims] the number of each dim's axes, and [layouts] that of the sums."""
        dims = np.array([[names[axes] for axes in layout.dims] for layout in layouts], dtype=np.int64)
        return dims.reshape(len(layouts), -1), np.array([names[layout.partial] for layout in layouts])

    (sources, before), (goals, after) = coded(produced), coded(wanted)
    changes = sources[:, None, :] != goals[None, :, :]
    unchanged = np.ones(changes.shape[:2])
    number, base = before[:, None] * len(names) + after[None, :] + 1, len(names) ** 2 + 1
    for dim in range(sources.shape[1]):  # the sums, then the changes in order, each a digit from 1 to base - 1
        changed, mine, theirs = changes[..., dim], sources[:, None, dim], goals[None, :, dim]
        unchanged = np.where(changed, unchanged, unchanged * parts[mine])
        number = np.where(changed, number * base + mine * len(names) + theirs + 1, number)
    if (int(changes.sum(2).max(initial=0)) + 1) * math.log2(base) > 62:
        number = np.arange(number.size).reshape(number.shape)  # more than an integer can tell apart
    kind = np.unique(number, return_inverse=True)[1].reshape(number.shape)
    if nbytes:  # what is sent depends on the dims that do not change, too
        cuts, cut = np.unique(unchanged, return_inverse=True)
        kind = kind * len(cuts) + cut.reshape(number.shape)
    _, first, kind = np.unique(kind, return_index=True, return_inverse=True)
    found = []
    for i in first.tolist():
        src, dst = produced[i // len(wanted)], wanted[i % len(wanted)]
        changed = tuple([pair for pair in zip(src.dims, dst.dims, strict=True) if pair[0] != pair[1]])
        found.append(_coefficients(cost, changed, src.partial, dst.partial, nbytes / float(unchanged.flat[i])))
    table = np.moveaxis(np.array(found)[kind.reshape(number.shape)], -1, 0).copy()
    table[2] /= unchanged
    table.flags.writeable = False
    return table


def gathers(produced: Sequence[Layout], wanted: Sequence[Layout]) -> np.ndarray:
    """[P, Q] whether getting from one layout to the other gathers blocks."""
    moves = [[reshard_moves(src, dst) or [] for dst in wanted] for src in produced]
    return np.array([[any(move[0] == "all_gather" for move in some) for some in row] for row in moves])


def divides(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> bool:
    """Whether every dim divides over the devices that shard it."""
    return all(size % mesh.product(axes) == 0 for size, axes in zip(shape, layout.dims, strict=True))
