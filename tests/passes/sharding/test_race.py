"""What is tried on one mesh, with a solver whose answers are given."""

from __future__ import annotations

from typing import Any, cast

import pytest

from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.sharding import race
from alpa_lite.passes.sharding.race import Problem
from alpa_lite.strategy import Solution, StrategyGraph

BUDGET = 10.0


class Enough(Exception):
    """The program that gathers state again was built."""


@pytest.mark.parametrize(("seconds", "again"), [(1.001, False), (1.02, True)])
def test_state_is_gathered_again_only_where_that_may_gain(monkeypatch, seconds: float, again: bool) -> None:
    """No plan of any memory takes less than 1 s: one of 1.001 s within the budget leaves nothing to gain."""
    free = Solution("feasible", (0,), 1.0, 1.0, 2 * BUDGET, 0, 0, 0)
    within = Solution("optimal", (0,), seconds, seconds, BUDGET, 0, 0, 0)
    monkeypatch.setattr(race.solve, "solve", lambda graph, **options: free if graph.budget is None else within)

    def build(**options: Any) -> Any:
        raise Enough

    problem = Problem(LogicalMesh((4,), ("x",)), "cuda", build, lambda space: 0.0)

    class Space:
        program = StrategyGraph((), (), budget=BUDGET)

    def search() -> Any:
        return race.solved(problem, cast(Any, Space), BUDGET, 2.0, cast(Any, None))

    if again:
        with pytest.raises(Enough):
            search()
    else:
        _, found, least = search()
        assert (found.objective, found.bound, found.status, least) == (1.001, 1.0, "feasible", 1.0)
