"""The nouns of the integer program of one mesh: strategies, nodes, reshardings, assignments of axes, constraints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from alpa_lite.ir.layout import Axes, Layout, LogicalMesh, reshard_steps
from alpa_lite.ir.strategy import Factor, StrategyGraph
from alpa_lite.passes.costs.traffic import MemoryTraffic
from alpa_lite.passes.ir.remembered import memoise_method
from alpa_lite.passes.sharding.groups import Dims, Group, factors_in
from alpa_lite.plan.pins import Wish


@dataclass(frozen=True)
class Strategy:
    """The mesh axes of each factor of a group, and the axes over which a linear group holds partial sums."""

    axes: tuple[Axes, ...]
    partial: Axes = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.partial))


@dataclass(frozen=True, eq=False)
class LayoutClasses:
    """The layouts that strategies lead to.

    Attributes:
      layouts: each once. klass: [strategies] the number of each one's among them.
      blocks: [layouts] into how many blocks each cuts a tensor.
    """

    layouts: tuple[Layout, ...]
    klass: np.ndarray
    blocks: np.ndarray


def classify(layouts: Sequence[Layout], mesh: LogicalMesh) -> LayoutClasses:
    """Returns the distinct ones of the layouts that strategies lead to, each."""
    seen: dict[Layout, int] = {}
    classes = np.array([seen.setdefault(layout, len(seen)) for layout in layouts])
    return LayoutClasses(tuple(seen), classes, np.array([block_count(layout, mesh) for layout in seen]))


class Choices:
    """The strategies of a node as arrays: `parts[s, f]` is into how many parts strategy s cuts factor f."""

    def __init__(self, strategies: Sequence[Strategy], factors: int, mesh: LogicalMesh):
        self.strategies, self.mesh = tuple(strategies), mesh
        sizes = [[mesh.product(axes) for axes in s.axes] for s in self.strategies]
        self.parts = np.array(sizes, dtype=np.float64).reshape(len(self.strategies), factors)

    @memoise_method
    def cut(self, dims: Dims) -> np.ndarray:
        """[strategies] into how many blocks a tensor is cut whose dims are made of these factors."""
        return self.parts[:, [f for dim in dims for f in dim]].prod(1)

    @memoise_method
    def layouts(self, dims: Dims, partial: bool) -> LayoutClasses:
        """Returns the layouts of a tensor; `partial`: with the strategy's sums."""
        return classify([layout_of(dims, s, s.partial if partial else ()) for s in self.strategies], self.mesh)


@dataclass(frozen=True, eq=False)
class Node:
    """The strategies of one class of groups, with seconds of each strategy of one group.

    Attributes:
      trips: how often it runs. count: how many groups of the whole step its members stand for.
      terms: [3, strategies] what its FLOPs take, what its bytes take, and what its kernels take to start.
      collectives: [3, strategies] of those that it issues in one run the seconds, those of latency, and the bytes.
    """

    group: int
    trips: int
    members: tuple[int, ...]
    count: int
    strategies: tuple[Strategy, ...]
    terms: np.ndarray
    collectives: np.ndarray

    @cached_property
    def communication(self) -> np.ndarray:
        """[strategies] seconds of the collectives that it issues."""
        return self.collectives[0] * self.trips

    @cached_property
    def compute(self) -> np.ndarray:
        """[strategies] the roofline of its work, the larger of the first two terms, and the starts of its kernels."""
        return self.terms[:2].max(0) + self.terms[2]

    @cached_property
    def seconds(self) -> np.ndarray:
        """[strategies] of all its groups."""
        return (self.compute + self.communication) * self.count


@dataclass(frozen=True, eq=False)
class Resharding:
    """A transfer of the integer program: `count` identical values, each moved `trips` times."""

    value: int
    produced_layouts: tuple[Layout, ...]
    wanted_layouts: tuple[Layout, ...]
    count: int
    trips: int


@dataclass(frozen=True, eq=False)
class Space:
    """The integer program of one mesh, and the meaning of its numbers.

    Attributes:
      program: for `sharding.solver.solve.solve`.
      nodes: one for each node of the program. node_of: group -> node.
      moves: one for each transfer of the program.
      late_from: program point from which a use counts as late (see `build`); None if uses are not split.
      buffer_values: for each of the program's buffers, the value that it holds.
      shares: as of `Tables`.
      traffic: op index -> what the operation reads and writes on one device.
    """

    mesh: LogicalMesh
    program: StrategyGraph
    nodes: tuple[Node, ...]
    node_of: tuple[int, ...]
    moves: tuple[Resharding, ...]
    late_from: int | None
    buffer_values: tuple[int, ...]
    shares: Mapping[tuple[int, int], float]
    traffic: Mapping[int, MemoryTraffic]


def layout_of(dims: Dims, strategy: Strategy, partial: Axes = ()) -> Layout:
    """Returns the layout of a tensor whose dims are made of the given factors of a group."""
    axes = strategy.axes
    # A dim of one factor, the usual one, takes its axes as they are.
    return Layout(tuple([axes[d[0]] if len(d) == 1 else tuple([a for f in d for a in axes[f]]) for d in dims]), partial)


def produced_layout(group: Group, dims: Dims, strategy: Strategy, mesh: LogicalMesh) -> Layout:
    """The layout in which a group makes a value of its own factors: sharded sums of an operation leave partial sums."""
    if group.kind != "heavy":
        return layout_of(dims, strategy, strategy.partial)
    sums = {a for f, axes in zip(group.factors, strategy.axes, strict=True) if f.kind == "sum" for a in axes}
    used = {a for f in factors_in(dims) for a in strategy.axes[f]}
    return layout_of(dims, strategy, tuple(a for a in mesh.axis_names if a in sums - used))


def block_count(layout: Layout, mesh: LogicalMesh) -> int:
    """Returns into how many distinct blocks a layout cuts a tensor."""
    return math.prod([mesh.product(axes) for axes in layout.dims])


def strategy_of(dims: Dims, layout: Layout, factors: int) -> Strategy:
    """The strategy that gives a tensor a layout, each of whose dims is made of one factor of a group at most."""
    axes: list[Axes] = [()] * factors
    for dim, wanted in zip(dims, layout.dims, strict=True):
        if dim:
            axes[dim[0]] = wanted
    return Strategy(tuple(axes))


def assignments(
    factors: Sequence[Factor], mesh: LogicalMesh, axes: Sequence[str] | None = None, *, orders: bool = False
) -> Iterator[tuple[Axes, ...]]:  # fmt: skip
    """Yields every assignment of mesh axes, all or some, to factors that divides their sizes; an axis may stay unused.

    Axes on one factor are in mesh order; with `orders`, two axes on one factor come in both orders, since gathering
    only the minor axis is cheap and different consumers gather different axes (the 3-D algorithm needs both).
    """
    usable = [i for i, f in enumerate(factors) if f.kind != "replicate" and f.size > 1]
    axes = [a for a in mesh.axis_names if mesh.axis_size(a) > 1] if axes is None else axes
    for places in itertools.product((-1, *usable), repeat=len(axes)):
        out: list[Axes] = [()] * len(factors)
        for axis, place in zip(axes, places, strict=True):
            if place >= 0:
                out[place] = (*out[place], axis)
        if any(a and f.size % mesh.product(a) for a, f in zip(out, factors, strict=True)):
            continue
        yield tuple(out)
        if orders:
            for place in usable:
                if len(out[place]) == 2:
                    yield tuple(a[::-1] if i == place else a for i, a in enumerate(out))


@dataclass(frozen=True)
class Limit:
    """The strategies that a method leaves to a group. Groups of one colour and of equal limits are tied.

    Attributes:
      axes: of the mesh: those that the method is about; strategies of the others are free.
      examples: (factor, by how many examples it runs).
      features: the factors that may be cut, if they hold no examples; None where examples are cut.
      readers: of what reads a parameter, the factors that it is cut along over all axes, the first choice first.
      blocks: whether blocks along one factor over all axes are allowed in addition to uncut tensors, or are preferred.
      fills: whether only the strategies with the fewest idle axes count, if the group is a product.
      record: the number and the only strategy of a group that a plan records.
    """

    axes: frozenset[str] = frozenset()
    examples: tuple[tuple[int, int], ...] = ()
    features: frozenset[int] | None = None
    readers: tuple[frozenset[int], ...] | None = None
    blocks: Literal["", "also", "instead"] = ""
    fills: bool = False
    record: tuple[int, Strategy | None] = (-1, None)

    def select(self, group: Group, found: Sequence[Strategy], mesh: LogicalMesh) -> list[Strategy]:
        """Returns those of a group's strategies that are left, of all that it could have.

        Those that cut nothing over the axes are left where no others are; all, if there are none of these either.
        """
        if self.record[1] is not None:
            # A method may fix what is left out where there is a choice, such as to leave axes of a cube idle.
            free = group.kind in ("light", "linear") and len(self.record[1].axes) == len(group.factors)
            return [self.record[1]] if free or self.record[1] in found else list(found)
        if not self.axes:
            return list(found)

        def cut_factors(strategy: Strategy) -> set[int]:
            return {f for f, axes in enumerate(strategy.axes) if self.axes.intersection(axes)}

        uncut = [s for s in found if not cut_factors(s)] or list(found)
        filling = [s for s in found if self.axes.issubset(itertools.chain(*s.axes))]
        if self.features is not None:
            for along in self.readers or ():
                if chosen := [s for s in filling if cut_factors(s) <= along]:
                    return chosen
            free = self.features.difference(f for f, _ in self.examples)
            return uncut if self.readers is not None else [s for s in found if cut_factors(s) <= free] or uncut
        if self.examples:
            counts = dict(self.examples)
            return [
                s for s in filling if self.axes.isdisjoint(s.partial)
                and all(counts.get(f, 1) % mesh.product(s.axes[f]) == 0 for f in cut_factors(s))
            ] or uncut  # fmt: skip
        blocks = [s for s in found if self.axes.isdisjoint(s.partial) and any(map(self.axes.issubset, s.axes))]
        if self.blocks == "instead":
            return blocks or uncut
        return [*uncut, *blocks] if self.blocks else uncut


@dataclass(frozen=True, eq=False)
class MoveLimits:
    """Reshardings that a method forbids over its axes.

    Attributes:
      unmoved_values: those that may only be cut. free_values: those that move as they must.
      whole_uses: (group, value) where the group must not take its block of a value that is whole.
    """

    axes: frozenset[str]
    unmoved_values: frozenset[int]
    free_values: frozenset[int]
    whole_uses: frozenset[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Constraints:
    """All that the integer program of one mesh must respect; the rest is free.

    Attributes:
      layouts: of groups that are not free.
      limits: of the strategies of groups, by a method or a recorded plan. moves: of reshardings.
      gathers_again: whether parameters are gathered for the backward pass again, regardless of memory.
      whole_factors: group -> those of its factors that must not be cut.
      ungathered_values: values that must not be gathered.
      ignored_constraints: operations of `ir.primitives.CONSTRAINT` that are not applied.
    """

    layouts: Mapping[int, tuple[Layout, ...]] = field(default_factory=dict)
    limits: Mapping[int, Limit] = field(default_factory=dict)
    moves: MoveLimits | None = None
    gathers_again: bool = False
    whole_factors: Mapping[int, frozenset[int]] = field(default_factory=dict)
    ungathered_values: frozenset[int] = frozenset()
    ignored_constraints: frozenset[int] = frozenset()

    def refuses(self, values: Sequence[int], src: Layout, dst: Layout, whole: bool) -> bool:
        """Returns whether some values must not get from one layout to another.

        `whole`: whether they must not be cut, too, for a use that is among `MoveLimits.whole_uses`.
        """
        steps, limits = reshard_steps(src, dst) or () if src != dst else (), self.moves
        if not self.ungathered_values.isdisjoint(values) and any(step.kind == "all_gather" for step in steps):
            return True
        if limits is None or not limits.free_values.isdisjoint(values):
            return False
        kinds = {"reduce_scatter", "all_to_all", "collective_permute"} | ({"slice"} if whole else set())
        if not limits.unmoved_values.isdisjoint(values):
            kinds |= {"all_reduce", "all_gather"}
        return any(step.kind in kinds and limits.axes.intersection(step.axes) for step in steps)


UNCONSTRAINED = Constraints()


def fits(wish: Wish, shape: tuple[int, ...], mesh: LogicalMesh) -> str | None:
    """Returns why a wish cannot be fulfilled for a shape on a mesh; None if it can."""
    unknown = [a for axes in wish.dims for a in axes or () if a not in mesh.axis_names]
    if unknown:
        return f"the mesh {describe_mesh(mesh)} has no axis {unknown[0]!r}"
    if len(wish.dims) > len(shape):
        return f"it has {len(wish.dims)} entries for {len(shape)} dims"
    for size, axes in zip(shape, wish.dims, strict=False):
        if axes and size % mesh.product(axes):
            return f"{size} does not divide over the {mesh.product(axes)} devices of {', '.join(axes)}"
    return None


def completions(wish: Wish, shape: tuple[int, ...], mesh: LogicalMesh) -> Iterator[Layout]:
    """Yields the layouts that fulfil a wish: free dims with any of the axes that are left, in mesh order."""
    dims = (*wish.dims, *((),) * (len(shape) - len(wish.dims)))
    # A dim of one element has one block, whatever the axes: strategies leave it whole.
    dims = tuple(() if size == 1 else axes for size, axes in zip(shape, dims, strict=True))
    used = {a for axes in dims for a in axes or ()}
    left = [a for a in mesh.axis_names if a not in used and mesh.axis_size(a) > 1]
    factors = [Factor(size, "parallel" if d is None else "replicate") for size, d in zip(shape, dims, strict=True)]
    fixed = [tuple(a for a in axes or () if mesh.axis_size(a) > 1) for axes in dims]
    for more in assignments(factors, mesh, left):
        yield Layout(tuple(own or axes for own, axes in zip(fixed, more, strict=True)))


def describe_mesh(mesh: LogicalMesh) -> str:
    """Returns a mesh in words: data=4 x model=2."""
    axes = list(zip(mesh.axis_names, mesh.shape, strict=True))
    return " x ".join(f"{name}={size}" for name, size in [axis for axis in axes if axis[1] > 1] or axes[:1])
