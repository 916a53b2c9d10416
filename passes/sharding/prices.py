"""Costs of resharding a tensor from one layout to another.

Every pair of layouts has one pair of coefficients, latency and seconds per byte of the whole tensor: the same for all
tensors, or one for each size where the cluster has measured collectives, whose rate depends on the payload.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

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


@functools.lru_cache(maxsize=200_000)
def _steps(mesh: LogicalMesh, changes: tuple[tuple[Axes, Axes], ...]) -> tuple[tuple[str, Axes, int], ...] | None:
    """The collectives of resharding: (kind, axes, blocks that the payload is one of); None where it cannot be done.

    A dim that does not change takes no part in any step: the blocks are those of a tensor that it does not cut. Nor do
    the names of the axes matter.

    Args:
      changes: the sums before and after, then the axes of each dim that changes.
    """
    names: dict[str, str] = {}

    def renamed(axes: Axes) -> Axes:
        return tuple([names.setdefault(a, f"{len(names)}") for a in axes])

    sums, *differ = [(renamed(before), renamed(after)) for before, after in changes]
    moves = _moves(tuple(differ), *sums)
    if moves is None:
        return None
    real = {short: name for name, short in names.items()}
    size = {short: mesh.axis_size(name) for short, name in real.items()}
    held = tuple([before for before, _ in differ])
    steps: list[tuple[str, Axes, int]] = []
    for kind, axes, dim, _, after, _ in moves:
        if kind == "collective_permute":
            order = held[dim]
            axes = tuple([order[i] for i in moved_axes(order, axes, tuple([size[x] for x in order]))])
        if kind != "slice":
            dims = held if kind == "reduce_scatter" else after
            cut = math.prod([size[x] for some in dims for x in some])
            steps.append((kind, tuple([real[x] for x in axes]), cut))
        held = after
    return tuple(steps)


def pairs(cost: MeshCost, produced: tuple[Layout, ...], wanted: tuple[Layout, ...], nbytes: float) -> np.ndarray:
    """[3, P, Q] coefficients of every pair of layouts of one rank, of resharding from one to the other.

    These are seconds of latency of steps that may be combined, other latency, and seconds per byte of the tensor. The
    latency is inf where it cannot be done.

    Args:
      nbytes: of the tensor.
    """
    return _pairs(cost, produced, wanted, float(nbytes) if cost.cluster.collectives else 0.0)


@dataclass(frozen=True, eq=False)
class _Changes:
    """How layouts of P and of Q differ.

    Attributes:
      steps: all that any change takes, each as of `_steps`. kind: [P, Q] the number of a change's steps among them.
      unchanged: [P, Q] into how many blocks the dims that do not change cut the tensor.
    """

    steps: tuple[tuple[tuple[str, Axes, int], ...] | None, ...]
    kind: np.ndarray
    unchanged: np.ndarray


@functools.lru_cache(maxsize=1024)
def _changes(mesh: LogicalMesh, produced: tuple[Layout, ...], wanted: tuple[Layout, ...]) -> _Changes:
    """The changes from some layouts to others."""
    every = (axes for layout in (*produced, *wanted) for axes in (*layout.dims, layout.partial))
    orders = {axes: n for n, axes in enumerate(dict.fromkeys(every))}
    parts = np.array([mesh.product(axes) for axes in orders])

    def coded(layouts: tuple[Layout, ...]) -> tuple[np.ndarray, np.ndarray]:
        """[layouts, dims] the number of each dim's axes, and [layouts] that of the sums."""
        dims = np.array([[orders[axes] for axes in layout.dims] for layout in layouts], dtype=np.int64)
        return dims.reshape(len(layouts), -1), np.array([orders[layout.partial] for layout in layouts])

    (sources, before), (goals, after) = coded(produced), coded(wanted)
    changes = sources[:, None, :] != goals[None, :, :]
    unchanged = np.ones(changes.shape[:2])
    number, base = before[:, None] * len(orders) + after[None, :] + 1, len(orders) ** 2 + 1
    if (int(changes.sum(2).max(initial=0)) + 1) * math.log2(base) > 62:
        number = number.astype(object)  # integers of any size
    for dim in range(sources.shape[1]):  # the sums, then the changes in order, each a digit from 1 to base - 1
        changed, mine, theirs = changes[..., dim], sources[:, None, dim], goals[None, :, dim]
        unchanged = np.where(changed, unchanged, unchanged * parts[mine])
        number = np.where(changed, number * base + mine * len(orders) + theirs + 1, number)
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    steps: dict[tuple[tuple[str, Axes, int], ...] | None, int] = {}
    kinds = []
    for row, column in zip(*np.unravel_index(first, unchanged.shape), strict=True):
        src, dst = produced[row], wanted[column]
        differ = [pair for pair in zip(src.dims, dst.dims, strict=True) if pair[0] != pair[1]]
        found = _steps(mesh, ((src.partial, dst.partial), *differ))
        kinds.append(steps.setdefault(found, len(steps)))
    return _Changes(tuple(steps), np.array(kinds)[number.reshape(unchanged.shape)], unchanged)


@functools.lru_cache(maxsize=1024)
def _pairs(cost: MeshCost, produced: tuple[Layout, ...], wanted: tuple[Layout, ...], nbytes: float) -> np.ndarray:
    """The tables of `pairs`, which layers, stages and later plans on equal clusters and meshes share."""
    changes, joins = _changes(cost.mesh, produced, wanted), combinable(cost)
    kind, size = changes.kind, len(changes.steps)
    if nbytes:  # what is sent depends on the dims that do not change, too
        cuts, cut = np.unique(changes.unchanged, return_inverse=True)
        kind = kind + size * cut.reshape(kind.shape)
    kinds, kind = np.unique(kind, return_inverse=True)
    found = np.zeros((3, len(kinds)))
    for n, number in enumerate(kinds.tolist()):
        steps = changes.steps[number % size]
        if steps is None:
            found[1, n] = math.inf
            continue
        own = nbytes / float(cuts[number // size]) if nbytes else 0.0
        for name, axes, blocks in steps:
            alpha, beta = cost.coefficients(name, axes, own / blocks)
            found[int(name not in joins), n] += alpha
            found[2, n] += beta / blocks
    table = found[:, kind.reshape(changes.unchanged.shape)]
    table[2] /= changes.unchanged
    table.flags.writeable = False
    return table


def gathers(produced: Sequence[Layout], wanted: Sequence[Layout]) -> np.ndarray:
    """[P, Q] whether getting from one layout to the other gathers blocks."""
    moves = [[reshard_moves(src, dst) or [] for dst in wanted] for src in produced]
    return np.array([[any(move[0] == "all_gather" for move in some) for some in row] for row in moves])


def divides(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> bool:
    """Whether every dim divides over the devices that shard it."""
    return all(size % mesh.product(axes) == 0 for size, axes in zip(shape, layout.dims, strict=True))
