"""Tables that the integer programs of one step on one mesh share, for every method.

A search builds several programs on a mesh: of each textbook method, of all strategies, and with state gathered again.
They differ in which strategies the groups have, and in which consumers are served when. The definition, the cost and
the layouts of a group's strategy are the same in all of them, and are computed once. Groups whose strategies are equal
share one `Choices`, by which nodes and layouts are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.passes.sharding.groups import Dims
from alpa_lite.passes.sharding.prices import divides, pairs
from alpa_lite.passes.sharding.space import Strategy, block_count, layout_of

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Reached:
    """The layouts that strategies lead to.

    Attributes:
      layouts: each once. klass: [strategies] the number of each one's among them.
    """

    mesh: LogicalMesh
    layouts: tuple[Layout, ...]
    klass: np.ndarray

    @cached_property
    def blocks(self) -> np.ndarray:
        """[layouts] into how many blocks each cuts a tensor."""
        return np.array([block_count(layout, self.mesh) for layout in self.layouts])


def classify(layouts: Sequence[Layout], mesh: LogicalMesh) -> Reached:
    """The distinct ones of the layouts that strategies lead to, each."""
    seen: dict[Layout, int] = {}
    classes = np.array([seen.setdefault(layout, len(seen)) for layout in layouts])
    return Reached(mesh, tuple(seen), classes)


class Choices:
    """The strategies of a node as arrays: `parts[s, f]` is into how many parts strategy s cuts factor f."""

    def __init__(self, strategies: Sequence[Strategy], factors: int, mesh: LogicalMesh):
        self.strategies, self.mesh = tuple(strategies), mesh
        sizes = [[mesh.product(axes) for axes in s.axes] for s in self.strategies]
        self.parts = np.array(sizes, dtype=np.float64).reshape(len(self.strategies), factors)
        self._cuts: dict[Dims, np.ndarray] = {}
        self._layouts: dict[tuple[Dims, bool], Reached] = {}

    @cached_property
    def cuts(self) -> np.ndarray:
        """[strategies] into how many parts the work is cut."""
        return self.parts.prod(1)

    def cut(self, dims: Dims) -> np.ndarray:
        """[strategies] into how many blocks a tensor is cut whose dims are made of these factors."""
        found = self._cuts.get(dims)
        if found is None:
            found = self._cuts[dims] = self.parts[:, [f for dim in dims for f in dim]].prod(1)
        return found

    def layouts(self, dims: Dims, partial: bool) -> Reached:
        """The layouts of a tensor; `partial`: with the strategy's sums."""
        key = dims, partial
        found = self._layouts.get(key)
        if found is None:
            each = [layout_of(dims, s, s.partial if partial else ()) for s in self.strategies]
            found = self._layouts[key] = classify(each, self.mesh)
        return found


@dataclass(frozen=True, eq=False)
class Moves:
    """The costs of resharding tensors of one shape from some layouts to others.

    Attributes:
      joint, alpha, beta: [P, Q] as of `prices.pairs`; alpha is inf where the shape does not divide.
      copies: (q, into how many blocks layout q cuts, [P] one where resharding to it costs anything, else zero), of
        those q that cost anything.
    """

    joint: np.ndarray
    alpha: np.ndarray
    beta: np.ndarray
    copies: tuple[tuple[int, int, np.ndarray], ...]


@dataclass(frozen=True, eq=False)
class MeshTables:
    """Tables of a step on a mesh."""

    cost: MeshCost
    _known: dict[Hashable, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of `make`, called for each key once; a key begins with the name of its table."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def choices(self, strategies: Iterable[Strategy], factors: int) -> Choices:
        """The strategies of a group of so many factors as arrays, one for all groups that have the same."""
        some = tuple(strategies)
        return self.once(("choices", factors, some), lambda: Choices(some, factors, self.cost.mesh))

    def moves(
        self, shape: tuple[int, ...], nbytes: int, produced: tuple[Layout, ...], wanted: tuple[Layout, ...]
    ) -> Moves:
        """Returns the costs of resharding tensors of a shape and of `nbytes` bytes from some layouts to others."""
        key = shape, nbytes, produced, wanted
        return self.once(("moves", *key), lambda: _moves(self.cost, *key))


def _moves(
    cost: MeshCost, shape: tuple[int, ...], nbytes: int, produced: tuple[Layout, ...], wanted: tuple[Layout, ...]
) -> Moves:  # fmt: skip
    joint, alpha, beta = pairs(cost, produced, wanted, nbytes)
    costly = (joint + alpha + beta) > 0
    which = np.flatnonzero(costly.any(0)).tolist()
    copies = tuple([(q, block_count(wanted[q], cost.mesh), costly[:, q] * 1.0) for q in which])
    refused = [not divides(shape, layout, cost.mesh) for layout in wanted]
    return Moves(joint, np.where(refused, math.inf, alpha), beta, copies)
