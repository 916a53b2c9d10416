"""The position of the axes of a logical mesh in a machine, and which meshes are worth trying.

A machine is a tower of levels, outermost first: nodes, cards of a node, devices of a card; or slices, then the dims of
a torus. Devices are numbered in mixed radix over the levels, so that the last level joins neighbours. A mesh axis of
size s and stride t (in device numbers) is then a product of *pieces*, each a part of one level:

    levels (8 nodes, 8 devices), mesh (16, 4):  axis 1 = 4 of the 8 devices of a node, stride 1
                                                axis 0 = 2 of the 8 devices of a node, stride 4, and all 8 nodes

Two mesh shapes are *equivalent* if their axes consist of the same pieces: within a switch all orders cost the same,
and so do permutations of equal torus dims. `mesh_shapes` lists one shape of each class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Level:
    """One rung of a machine.

    Attributes:
      kind: "network" and "switch": every device reaches every other at the same rate; "ring" and "line": a torus dim
        with and without wraparound.
      size: how many of the next lower rungs it joins.
      bandwidth: bytes/s that a device sends, one way, while all others send as well; of a torus dim, of one link.
      latency: seconds of one step (of a torus dim: of one hop).
    """

    kind: Literal["network", "switch", "ring", "line"]
    size: int
    bandwidth: float
    latency: float

    @property
    def is_torus(self) -> bool:
        """Whether distance counts."""
        return self.kind in ("ring", "line")


@dataclass(frozen=True, order=True)
class Piece:
    """A part of one level: `size` members, `stride` apart."""

    level: int
    size: int
    stride: int


def fit_sizes(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Returns the number of members of each level that `count` devices occupy, filling the innermost levels first.

    A count that does not fill a level evenly takes the greatest common divisor there and the rest further out: 12
    devices on nodes of 8 are 3 nodes with 4 each. A remainder widens the outermost level of more than one member.
    """
    used = [1] * len(sizes)
    for level in reversed(range(len(sizes))):
        used[level] = count if count <= sizes[level] else math.gcd(sizes[level], count)
        count //= used[level]
    if count > 1:
        used[next(level for level, size in enumerate(sizes) if size > 1)] *= count
    return tuple(used)


def decompose(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[tuple[Piece, ...], ...] | None:
    """Returns the pieces of each axis, innermost first, or None where an axis straddles a level unevenly.

    Args:
      shape: mesh shape, major to minor; its product equals that of `sizes`.
      sizes: members of each level, outermost first.
    """
    level, taken = len(sizes) - 1, 1
    axes: list[tuple[Piece, ...]] = []
    for size in reversed(shape):
        pieces = []
        while size > 1:
            left = sizes[level] // taken
            if left == 1:
                level, taken = level - 1, 1
                continue
            if size % left and left % size:
                return None
            part = min(size, left)
            pieces.append(Piece(level, part, taken))
            taken *= part
            size //= part
        axes.append(tuple(pieces))
    return tuple(reversed(axes))


def mesh_shapes(levels: tuple[Level, ...], max_axes: int) -> tuple[tuple[int, ...], ...]:
    """The distinct mesh shapes of one to `max_axes` axes, fewest axes first; every axis has two devices or more.

    Of equivalent shapes the one with the larger axes first is listed. Shapes of one and two axes are complete. Of three
    and more axes only those are kept whose axes are each within one level or cover their levels wholly (any other is a
    kept shape with some axes used jointly), and also the one nearest to a cube, which 3-D algorithms want.

    Args:
      levels: outermost first, with the sizes in use.
      max_axes: at least 1.
    """
    sizes = tuple(level.size for level in levels)
    count = math.prod(sizes)
    if count == 1:
        return ((1,),)
    chosen: list[tuple[int, ...]] = []
    for rank in range(1, max_axes + 1):
        classes: dict[object, tuple[int, ...]] = {}
        for shape in _factorizations(count, rank):
            pieces = decompose(shape, sizes)
            if pieces is not None:
                key = _class_of(pieces, levels)
                classes[key] = max(shape, classes.get(key, shape))
        shapes = sorted(classes.values(), reverse=True)
        if rank >= 3 and shapes:
            cube = min(shapes, key=lambda shape: max(shape) / min(shape))
            shapes = [shape for shape in shapes if shape == cube or _is_aligned(shape, levels)]
        chosen.extend(shapes)
    return tuple(chosen)


def _factorizations(count: int, rank: int) -> Iterator[tuple[int, ...]]:
    """Yields every ordered product of `rank` factors above one that equals `count`."""
    if rank == 1:
        if count > 1:
            yield (count,)
        return
    for first in range(2, count // 2 + 1):
        if count % first == 0:
            for rest in _factorizations(count // first, rank - 1):
                yield (first, *rest)


def _class_of(axes: tuple[tuple[Piece, ...], ...], levels: tuple[Level, ...]) -> object:
    """A key, equal for equivalent meshes: the pieces of equal levels, up to the order of axes."""

    def key(piece: Piece) -> tuple[object, ...]:
        level = levels[piece.level]
        where = levels.index(level) if level.is_torus else piece.level  # the first of equal torus dims
        return where, piece.size, piece.stride if level.is_torus else 0

    return tuple(sorted(tuple(sorted(map(key, axis))) for axis in axes))


def _is_aligned(shape: tuple[int, ...], levels: tuple[Level, ...]) -> bool:
    """Whether every axis is within one level or covers its levels wholly; the switches of a node count as one."""
    groups: list[int] = []
    group_of = []
    for level in levels:
        if level.kind == "switch" and group_of and levels[len(group_of) - 1].kind == "switch":
            groups[-1] *= level.size
        else:
            groups.append(level.size)
        group_of.append(len(groups) - 1)
    pieces = decompose(shape, tuple(groups))
    return pieces is not None and all(
        len({p.level for p in axis}) <= 1 or all(p.size == groups[p.level] for p in axis) for axis in pieces
    )
