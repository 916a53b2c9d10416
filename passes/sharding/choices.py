"""The strategies of a node as arrays, and the layouts that they lead to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa_lite.layout import Layout, LogicalMesh
from alpa_lite.passes.sharding.groups import Dims
from alpa_lite.passes.sharding.space import Strategy, layout_of


class Choices:
    """The strategies of a node as arrays: `parts[s, f]` is into how many parts strategy s cuts factor f.

    Nodes whose strategies are equal share one of these, and with it the layouts that they lead to.
    """

    def __init__(self, strategies: Sequence[Strategy], factors: int, mesh: LogicalMesh):
        self.strategies = tuple(strategies)
        sizes = [[mesh.product(axes) for axes in s.axes] for s in self.strategies]
        self.parts = np.array(sizes, dtype=np.float64).reshape(len(self.strategies), factors)
        self._cuts: dict[Dims, np.ndarray] = {}
        self._layouts: dict[tuple[Dims, bool], tuple[tuple[Layout, ...], np.ndarray]] = {}

    def cut(self, dims: Dims) -> np.ndarray:
        """[strategies] into how many blocks a tensor is cut whose dims are made of these factors."""
        found = self._cuts.get(dims)
        if found is None:
            found = self._cuts[dims] = self.parts[:, [f for dim in dims for f in dim]].prod(1)
        return found

    def layouts(self, dims: Dims, partial: bool) -> tuple[tuple[Layout, ...], np.ndarray]:
        """The layouts of a tensor, and which of them each strategy leads to; `partial`: with the strategy's sums."""
        key = dims, partial
        if key not in self._layouts:
            found = [layout_of(dims, s, s.partial if partial else ()) for s in self.strategies]
            self._layouts[key] = classify(found)
        return self._layouts[key]


def classify(layouts: Sequence[Layout]) -> tuple[tuple[Layout, ...], np.ndarray]:
    """The distinct layouts, and the number of each one's among them."""
    seen: dict[Layout, int] = {}
    classes = np.array([seen.setdefault(layout, len(seen)) for layout in layouts])
    return tuple(seen), classes
