"""How one tensor lies on a mesh, and how it gets from one layout to another.

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

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.shape)

    def axis_size(self, axis: str) -> int:
        """The number of devices along `axis`."""
        return self.shape[self.axis_names.index(axis)]

    def product(self, axes: Axes) -> int:
        """The number of devices that `axes` span together."""
        return math.prod(self.axis_size(axis) for axis in axes)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh.

    Attributes:
      dims: for each dim the mesh axes that shard it, major to minor.
      partial: the axes over which the devices hold summands, in mesh order.
    """

    dims: tuple[Axes, ...]
    partial: Axes = ()

    @property
    def used(self) -> frozenset[str]:
        """Every axis that the layout mentions."""
        return frozenset(axis for axes in self.dims for axis in axes) | frozenset(self.partial)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole value."""
        return not self.used

    def __str__(self) -> str:
        inner = ", ".join("None" if not a else a[0] if len(a) == 1 else f"({', '.join(a)})" for a in self.dims)
        return f"[{inner}]" + (f" partial {'+'.join(self.partial)}" if self.partial else "")


def replicated(rank: int) -> Layout:
    """The layout of a tensor of `rank` dims that every device holds whole."""
    return Layout(((),) * rank)


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> tuple[int, ...]:
    """The shape of one device's block.

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
    `before` and `after` are the layouts around the step.
    """

    kind: StepKind
    axes: Axes
    dim: int
    to_dim: int
    before: Layout
    after: Layout

    def payload(self, shape: tuple[int, ...], itemsize: int, mesh: LogicalMesh) -> int:
        """Bytes per device that the plan reports: the result's, or for reduce_scatter the operand's; 0 for a slice."""
        if self.kind == "slice":
            return 0
        layout = self.before if self.kind == "reduce_scatter" else self.after
        return math.prod(local_shape(shape, layout, mesh)) * itemsize


def _prefix(current: Axes, goal: Axes) -> int:
    """The length of the common prefix."""
    n = 0
    while n < len(current) and n < len(goal) and current[n] == goal[n]:
        n += 1
    return n


@functools.lru_cache(maxsize=200_000)
def reshard_steps(src: Layout, dst: Layout) -> tuple[Step, ...] | None:
    """The elementary steps from `src` to `dst`, or None where there are none (a whole value never becomes partial).

    Greedy, in the order of rising cost: slices first, since they shrink what later steps move; then reduce-scatters
    and all-to-alls that land where the goal wants the axis; then reordering; then gathers of axes that must go, and
    last all-reduces of the partial axes that the goal does not shard. Neighbouring steps of one kind are joined, since
    one collective over two axes is cheaper than one per axis.

    The result does not depend on the tensor's shape: divisibility of `src` and `dst` implies that of what lies between,
    except where a dim holds axes of both; callers check with `local_shape` on each step's layouts if in doubt.
    """
    if set(dst.partial) - set(src.partial) or len(src.dims) != len(dst.dims):
        return None
    steps: list[Step] = []
    current = src

    def move(kind: StepKind, axes: Axes, dim: int, to_dim: int, after: Layout) -> None:
        nonlocal current
        steps.append(Step(kind, axes, dim, to_dim, current, after))
        current = after

    def with_dims(changes: dict[int, Axes], partial: Axes | None = None) -> Layout:
        dims = tuple(changes.get(i, axes) for i, axes in enumerate(current.dims))
        return Layout(dims, current.partial if partial is None else partial)

    while current != dst:
        if _advance(current, dst, move, with_dims):
            continue
        wanted = {axis for axes in dst.dims for axis in axes}
        rest = tuple(a for a in current.partial if a not in dst.partial and a not in wanted)
        if rest:
            move("all_reduce", rest, -1, -1, with_dims({}, tuple(a for a in current.partial if a not in rest)))
            continue
        wrong = [(d, a) for d, a in enumerate(current.dims) if _prefix(a, dst.dims[d]) < len(a)]
        if wrong:
            dim, axes = max(wrong, key=lambda item: len(item[1]) - _prefix(item[1], dst.dims[item[0]]))
            goal = dst.dims[dim]
            order = (*(a for a in goal if a in axes), *(a for a in axes if a not in goal))
            if set(goal) <= set(axes) and order != axes:  # a reordering moves one block; a gather moves all of them
                move("collective_permute", order, dim, dim, with_dims({dim: order}))
            else:
                move("all_gather", axes[-1:], dim, dim, with_dims({dim: axes[:-1]}))
            continue
        rest = tuple(a for a in current.partial if a not in dst.partial)
        assert rest, (src, dst, current)
        move("all_reduce", rest, -1, -1, with_dims({}, tuple(a for a in current.partial if a not in rest)))
    return _join(steps)


def _advance(current: Layout, dst: Layout, move, with_dims) -> bool:
    """Makes one step that lands an axis where the goal wants it; False if there is none."""
    for kind in ("slice", "reduce_scatter", "all_to_all"):
        for dim, goal in enumerate(dst.dims):
            have = current.dims[dim]
            if len(have) >= len(goal) or goal[: len(have)] != have:
                continue
            axis = goal[len(have)]
            grown = (*have, axis)
            if kind == "slice" and axis not in current.used:
                move("slice", (axis,), dim, dim, with_dims({dim: grown}))
                return True
            if kind == "reduce_scatter" and axis in current.partial and axis not in dst.partial:
                rest = tuple(a for a in current.partial if a != axis)
                move("reduce_scatter", (axis,), dim, dim, with_dims({dim: grown}, rest))
                return True
            if kind == "all_to_all":
                for source, axes in enumerate(current.dims):
                    if source != dim and axes and axes[-1] == axis and _prefix(axes, dst.dims[source]) < len(axes):
                        move("all_to_all", (axis,), source, dim, with_dims({source: axes[:-1], dim: grown}))
                        return True
    for dim, goal in enumerate(dst.dims):
        have = current.dims[dim]
        if have != goal and len(have) > 1 and sorted(have) == sorted(goal):
            move("collective_permute", goal, dim, dim, with_dims({dim: goal}))
            return True
    return False


def _join(steps: list[Step]) -> tuple[Step, ...]:
    """Joins neighbouring steps of one kind on one dim into one step over several axes."""
    out: list[Step] = []
    for step in steps:
        last = out[-1] if out else None
        same = last is not None and last.kind == step.kind and last.dim == step.dim and last.to_dim == step.to_dim
        if last is not None and same and step.kind in ("slice", "reduce_scatter"):
            out[-1] = Step(step.kind, last.axes + step.axes, step.dim, step.to_dim, last.before, step.after)
        elif last is not None and same and step.kind == "all_gather":
            out[-1] = Step(step.kind, step.axes + last.axes, step.dim, step.to_dim, last.before, step.after)
        else:
            out.append(step)
    return tuple(out)
