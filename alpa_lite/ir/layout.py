"""The layout of one tensor on a mesh, and how it gets from one layout to another.

A `LogicalMesh` is a grid of devices with named axes. A `Layout` gives, for each dim of a tensor, the mesh axes that
shard it, major to minor (the meaning of `jax.sharding.PartitionSpec`), and the axes over which the value is a
*partial sum*: the true value is the sum over those axes of what the devices hold.

`reshard_steps` turns one layout into another by elementary steps. The steps are data: the cost model prices them, the
lowering emits them, and the plan lists them, so that what is priced is what runs.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Axes = tuple[str, ...]


@dataclass(frozen=True)
class LogicalMesh:
    """A grid of devices. Axes are ordered major to minor in device number: the last axis joins neighbours.

    Attributes:
      shape: devices along each axis; an axis of one device is allowed and never used.
      axis_names: one name an axis.
    """

    shape: tuple[int, ...]
    axis_names: Axes

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axis_names) or len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(f"mesh shape {self.shape} and axis names {self.axis_names} do not match")

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(zip(self.axis_names, self.shape, strict=True))

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    def axis_size(self, axis: str) -> int:
        """Returns the number of devices along `axis`."""
        return self._sizes[axis]

    def product(self, axes: Axes) -> int:
        """Returns the number of devices that `axes` span together."""
        sizes, out = self._sizes, 1
        for axis in axes:
            out *= sizes[axis]
        return out


@dataclass(frozen=True)
class Layout:
    """The layout of a tensor on a mesh.

    Attributes:
      dims: for each dim the mesh axes that shard it, major to minor.
      partial: the axes over which the devices hold summands, in mesh order.
    """

    dims: tuple[Axes, ...]
    partial: Axes = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial))

    @property
    def used_axes(self) -> frozenset[str]:
        """Every axis that the layout mentions."""
        return frozenset(axis for axes in self.dims for axis in axes) | frozenset(self.partial)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole value."""
        return not self.used_axes

    def __str__(self) -> str:
        inner = ", ".join("None" if not a else a[0] if len(a) == 1 else f"({', '.join(a)})" for a in self.dims)
        return f"[{inner}]" + (f" partial {'+'.join(self.partial)}" if self.partial else "")


def replicated_layout(rank: int) -> Layout:
    """Returns the layout of a tensor of `rank` dims that every device holds whole."""
    return Layout(((),) * rank)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> tuple[int, ...]:
    """Returns the shape of one device's block.

    Raises:
      ValueError: where a dim is not divisible by the devices that shard it.
    """
    out = []
    for size, axes in zip(shape, layout.dims, strict=True):
        parts = mesh.product(axes)
        if size % parts:
            raise ValueError(f"dim of size {size} does not divide over {parts} devices of axes {axes}")
        out.append(size // parts)
    return tuple(out)


StepKind = Literal["slice", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "collective_permute"]


@dataclass(frozen=True)
class Step:
    """One elementary change of layout.

    kind / axes / dim / to_dim:
      slice: each device keeps its block of `dim` (no communication); `axes` become its minor axes.
      all_reduce: sums over the partial `axes`.
      reduce_scatter: sums over the partial `axes` and shards `dim` over them, as its minor axes.
      all_gather: joins the blocks of the minor `axes` of `dim`.
      all_to_all: moves the minor `axes` of `dim` to be the minor axes of `to_dim`.
      collective_permute: reorders the axes of `dim` from the source's order to `axes`.
    `source` and `target` are the layouts around the step.
    """

    kind: StepKind
    axes: Axes
    dim: int
    to_dim: int
    source: Layout
    target: Layout

    def communication_axes(self, mesh: LogicalMesh) -> Axes:
        """Returns the axes over which data moves: of a reordering those that it moves blocks along."""
        if self.kind != "collective_permute":
            return self.axes
        before = self.source.dims[self.dim]
        moved = find_moved_axes(before, self.axes, tuple(mesh.axis_size(axis) for axis in before))
        return tuple(before[i] for i in moved)

    def payload(self, shape: tuple[int, ...], itemsize: int, mesh: LogicalMesh) -> int:
        """Bytes per device that the plan reports: the result's, or for reduce_scatter the operand's; 0 for a slice."""
        if self.kind == "slice":
            return 0
        layout = self.source if self.kind == "reduce_scatter" else self.target
        return math.prod(local_shape(shape, layout, mesh)) * itemsize


def find_moved_axes(before: Axes, after: Axes, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns which axes a reordering of one dim's axes moves blocks along, by their positions in `before`.

    Block b = (b_1, .., b_n) is at coordinate b_i of axis `before[i]`, and goes where the same number, written in the
    sizes of `after`, says. An axis along which no block changes its coordinate takes no part: of (x, y, z) to (x, z, y)
    that is x.

    Args:
      shape: the devices along each axis of `before`.
    """
    order = [before.index(axis) for axis in after]
    blocks = np.arange(math.prod(shape))
    source = np.stack(np.unravel_index(blocks, shape))
    target = np.stack(np.unravel_index(blocks, tuple(shape[i] for i in order)))
    return tuple(sorted(i for k, i in enumerate(order) if (source[i] != target[k]).any()))


@functools.lru_cache(maxsize=200_000)
def reshard_steps(src: Layout, dst: Layout) -> tuple[Step, ...] | None:
    """The elementary steps from `src` to `dst`, or None where there are none (a whole value never becomes partial).

    Greedy, in the order of rising cost: slices first, since they shrink what later steps move; then reduce-scatters
    and all-to-alls that land where the goal wants the axis; then reordering; then all-reduces of partial axes that the
    goal has no use for, and last gathers of axes that must go. Neighbouring steps of one kind are joined, since one
    collective over two axes is cheaper than one per axis.

    The result does not depend on the tensor's shape: divisibility of `src` and `dst` implies that of what is between,
    except where a dim holds axes of both; callers check with `local_shape` on each step's layouts if in doubt.
    """
    if len(src.dims) != len(dst.dims) or any(a not in src.partial for a in dst.partial):
        return None
    steps: list[Step] = []
    before, dims, partial, goal = src, list(src.dims), src.partial, dst.dims
    open_dims = [i for i, axes in enumerate(goal) if dims[i] != axes]
    while open_dims or partial != dst.partial:
        found = _advance(dims, partial, goal, dst.partial, open_dims) or _give_up(dims, partial, dst, open_dims)
        kind, axes, dim, to_dim = found
        if kind in ("reduce_scatter", "all_reduce"):
            partial = tuple(a for a in partial if a not in axes)
        if kind in ("slice", "reduce_scatter"):
            dims[dim] = (*dims[dim], *axes)
        elif kind == "all_gather":
            dims[dim] = dims[dim][: -len(axes)]
        elif kind == "all_to_all":
            dims[dim], dims[to_dim] = dims[dim][:-1], (*dims[to_dim], *axes)
        elif kind == "collective_permute":
            dims[dim] = axes
        after = Layout(tuple(dims), partial)
        if (
            steps
            and (steps[-1].kind, steps[-1].dim) == (kind, dim)
            and kind in ("slice", "reduce_scatter", "all_gather")
        ):
            last = steps.pop()  # one longer step of the same dim
            before, axes = last.source, axes + last.axes if kind == "all_gather" else last.axes + axes
        steps.append(Step(kind, axes, dim, to_dim, before, after))
        before = after
        open_dims = sorted(i for i in {*open_dims, dim, to_dim} if i >= 0 and dims[i] != goal[i])
    return tuple(steps)


def _advance(
    dims: list[Axes], partial: Axes, goal: tuple[Axes, ...], kept: Axes, open_dims: list[int]
) -> tuple[StepKind, Axes, int, int] | None:
    """A step that lands an axis where the goal wants it, the cheapest kind first; None if there is no such step."""
    ready = [(i, goal[i][len(dims[i])]) for i in open_dims if goal[i][: len(dims[i])] == dims[i]]
    if ready:
        used = {a for axes in dims for a in axes}
        for i, axis in ready:
            if axis not in used and axis not in partial:
                return "slice", (axis,), i, i
        for i, axis in ready:
            if axis in partial and axis not in kept:
                return "reduce_scatter", (axis,), i, i
        for i, axis in ready:
            for source in open_dims:
                axes = dims[source]
                if source != i and axes and axes[-1] == axis and goal[source][: len(axes)] != axes:
                    return "all_to_all", (axis,), source, i
    for i in open_dims:
        if len(dims[i]) > 1 and sorted(dims[i]) == sorted(goal[i]):
            return "collective_permute", goal[i], i, i
    return None


def _give_up(dims: list[Axes], partial: Axes, dst: Layout, open_dims: list[int]) -> tuple[StepKind, Axes, int, int]:
    """Returns a step that gives up an axis: sums that the goal does not shard, then blocks that are in the way."""
    wanted = {a for axes in dst.dims for a in axes}
    rest = tuple(a for a in partial if a not in dst.partial and a not in wanted)
    if rest:
        return "all_reduce", rest, -1, -1
    wrong = [(len(dims[i]) - _prefix(dims[i], dst.dims[i]), -i) for i in open_dims]
    extra, i = max(wrong, default=(0, 0))
    if not extra:
        return "all_reduce", tuple(a for a in partial if a not in dst.partial), -1, -1
    have, goal = dims[-i], dst.dims[-i]
    order = (*(a for a in goal if a in have), *(a for a in have if a not in goal))
    if all(a in have for a in goal) and order != have:  # a reordering moves one block; a gather moves all of them
        return "collective_permute", order, -i, -i
    return "all_gather", have[-1:], -i, -i


def _prefix(current: Axes, goal: Axes) -> int:
    """Returns the length of the common prefix."""
    n = 0
    while n < len(current) and n < len(goal) and current[n] == goal[n]:
        n += 1
    return n
