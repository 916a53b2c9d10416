"""The strategies of a node as arrays, and the layouts that they lead to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from alpa_lite.layout import Layout, LogicalMesh
from alpa_lite.passes.sharding.groups import Dims
from alpa_lite.passes.sharding.space import Strategy, layout_of


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
        return np.array([blocks(layout, self.mesh) for layout in self.layouts])


def blocks(layout: Layout, mesh: LogicalMesh) -> int:
    """Into how many blocks a layout cuts a tensor."""
    return math.prod([mesh.product(axes) for axes in layout.dims])


class Choices:
    """The strategies of a node as arrays: `parts[s, f]` is into how many parts strategy s cuts factor f.

    Nodes whose strategies are equal share one of these, and with it the layouts that they lead to.
    """

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


def classify(layouts: Sequence[Layout], mesh: LogicalMesh) -> Reached:
    """The distinct ones of the layouts that strategies lead to, each."""
    seen: dict[Layout, int] = {}
    classes = np.array([seen.setdefault(layout, len(seen)) for layout in layouts])
    return Reached(mesh, tuple(seen), classes)
