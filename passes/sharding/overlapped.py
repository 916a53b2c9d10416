"""The race of mesh shapes where communication hides behind computing, so that seconds are no sum over choices.

Each plan that is found is settled: its seconds are those of two streams (`passes.lowering.overlap`), and by these plans
are compared. They are no less than the objective of the integer program by more than `SPEEDUP` times, which makes its
bounds bounds of them. Each mesh is solved at full prices, and with what may hide at a share of its price
(`sharding.hiding`), from whose solution on what hides is worth choosing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.sharding.hiding import Hiding
from alpa_lite.passes.sharding.lessons import NOTHING_KNOWN, Beaten, Lessons
from alpa_lite.passes.sharding.race import Found, Race, Rest, choice_of
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.space import Space
from alpa_lite.strategy import Solution

SPEEDUP = 2.0
"""How many times faster two streams are than one at most: each does one thing at a time."""


class OverlappedRace(Race):
    """A race of mesh shapes by the seconds of two streams.

    Args:
      settled: the seconds of a plan.
      hiding: what may hide.
    """

    speedup = SPEEDUP

    def __init__(
        self, method: str, budget: float, cutoff: float, meshes: Sequence[LogicalMesh], lessons: Lessons,
        in_equal_parts: float, settled: Callable[[Found], float], hiding: Hiding,
    ) -> None:  # fmt: skip
        super().__init__(method, budget, cutoff, meshes, replace(lessons, bounds=NOTHING_KNOWN), in_equal_parts)
        self._settled, self._hiding = settled, hiding
        self._objective = float("inf")  # the least of any plan

    def beaten(self, *, tried_all: bool = True) -> Beaten:
        """As of a race, with bounds of the seconds of two streams."""
        found = super().beaten(tried_all=tried_all)
        return Beaten({mesh: bound / SPEEDUP for mesh, bound in self.bounds.items()}, found.least, found.wider)

    def found(self, rest: Rest | None = None) -> Found:
        """The best plan, with bounds for other ways to run the step, of which no larger share is taken to hide."""
        found = super().found(rest)
        share = self.seconds / self._objective if self._objective else 1.0
        bounds = {mesh: share * bound for mesh, bound in self.bounds.items()}
        return replace(found, bounds=bounds, free=min(self.seconds, share * self.free))

    def _seconds(self, mesh: LogicalMesh, space: Space | None, found: Solution) -> float:
        self._objective = min(self._objective, found.objective)
        if space is None:
            return found.objective
        return self._settled(Found(mesh, space, found, choice_of(space, found), ()))

    def _put(self, name: str, mesh: LogicalMesh, space: Space | None, found: Solution | str) -> None:
        super()._put(name, mesh, space, found)
        if name != self.method or space is None or not isinstance(found, Solution) or not found.choice:
            return
        program = self._hiding.cheaper(space)
        other = solve.solve(replace(program, budget=None), start=found)
        if other.choice and other.peak > self.budget:
            other = solve.solve(program, start=found)
        if other.choice:
            objective, _ = solve.evaluate(space.program, other.choice)
            super()._put(name, mesh, space, replace(other, objective=objective, bound=found.bound))
