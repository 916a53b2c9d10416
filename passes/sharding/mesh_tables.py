"""Tables that the integer programs of one step on one mesh share, for every method.

A search builds several programs on a mesh: of each textbook method, of all strategies, and with state gathered again.
They differ in which strategies the groups have, and in which consumers are served when. The definition, the cost and
the layouts of a group's strategy are the same in all of them, and are computed once: these are the tables, which
`sharding.strategies` fills as needed. Groups whose strategies are equal share one `Choices`, by which nodes and layouts
are found.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import numpy as np

from alpa_lite.cost import MeshCost
from alpa_lite.layout import Layout, LogicalMesh
from alpa_lite.passes.local.types import LocalForm
from alpa_lite.passes.sharding.choices import Choices, Reached, blocks
from alpa_lite.passes.sharding.prices import divides, pairs
from alpa_lite.passes.sharding.space import Node, Strategy


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
    """Tables of a step on a mesh.

    Attributes:
      forms: (`Op.key`, axes of its factors) -> the local form.
      assigned: (`Op.key`, factors) -> the strategies that a heavy group could have.
      free: (kind and factors) of a group without an operation to ask -> its strategies.
      made: (a value, strategies) -> the layouts in which a heavy group makes it. Results go by `Op.key` and their
        number, all others by group and slot.
      nodes: (groups, strategies) -> the node, and its seconds.
    """

    cost: MeshCost
    forms: dict[Hashable, LocalForm | None] = field(default_factory=dict)
    assigned: dict[Hashable, tuple[Strategy, ...]] = field(default_factory=dict)
    free: dict[Hashable, Choices] = field(default_factory=dict)
    made: dict[tuple[tuple[Hashable, int], Choices], Reached] = field(default_factory=dict)
    nodes: dict[tuple[tuple[int, ...], Choices], tuple[Node, np.ndarray]] = field(default_factory=dict)
    _choices: dict[tuple[int, tuple[Strategy, ...]], Choices] = field(default_factory=dict)
    _moves: dict[tuple[tuple[int, ...], int, tuple[Layout, ...], tuple[Layout, ...]], Moves] = field(
        default_factory=dict
    )

    @property
    def mesh(self) -> LogicalMesh:
        """The mesh."""
        return self.cost.mesh

    def choices(self, strategies: Iterable[Strategy], factors: int) -> Choices:
        """The strategies of a group of so many factors as arrays, one for all groups that have the same."""
        key = factors, tuple(strategies)
        found = self._choices.get(key)
        if found is None:
            found = self._choices[key] = Choices(key[1], factors, self.mesh)
        return found

    def moves(
        self, shape: tuple[int, ...], nbytes: int, produced: tuple[Layout, ...], wanted: tuple[Layout, ...]
    ) -> Moves:
        """Returns the costs of resharding tensors of a shape and of `nbytes` bytes from some layouts to others."""
        key = shape, nbytes, produced, wanted
        found = self._moves.get(key)
        if found is None:
            joint, alpha, beta = pairs(self.cost, produced, wanted, nbytes)
            costly = (joint + alpha + beta) > 0
            which = np.flatnonzero(costly.any(0)).tolist()
            copies = tuple([(q, blocks(wanted[q], self.mesh), costly[:, q] * 1.0) for q in which])
            refused = [j for j, layout in enumerate(wanted) if not divides(shape, layout, self.mesh)]
            if refused:
                alpha = alpha.copy()
                alpha[:, refused] = math.inf
            found = self._moves[key] = Moves(joint, alpha, beta, copies)
        return found
