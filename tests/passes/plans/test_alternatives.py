"""Alternatives against brute force: the bound is a bound, the plan is a plan, and both mean what they say."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
from hypothesis import assume, given, settings

from alpa_lite.ir.strategy import StrategyGraph, Transfer
from alpa_lite.passes.plans import alternatives
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.solver.problem import Problem, from_graph
from tests.passes.sharding.solver.test_solve import SEEDS, random_graph


def _every(problem: Problem):
    """All allowed choices of a small problem, with their seconds and whether they fit."""
    for choice in itertools.product(*(range(size) for size in problem.links.sizes)):
        seconds = problem.seconds(choice)
        if math.isfinite(seconds):
            yield choice, seconds, problem.fits(choice)


def _weighed(seed: int, *, memory: bool):
    """A random problem, within a budget that its fastest choice may break, its optimum, and the weighed strategies."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, memory=memory, forbidden=0.08)
    if memory:
        least, _ = solve.minimal_budget(graph)
        assume(math.isfinite(least))
        graph = replace(graph, budget=least * float(rng.choice([1.0, 1.2, 2.0])))
    solution = solve.solve(graph, gap=0.0)
    assume(solution.status == "optimal")
    problem = from_graph(graph)
    rows = alternatives.weigh(problem, solution.choice, [9] * len(solution.choice))
    return problem, solution, rows


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_bound_and_plan_enclose_the_best_with_a_strategy(seed: int) -> None:
    problem, solution, rows = _weighed(seed, memory=False)
    best: dict[tuple[int, int], float] = {}
    for choice, seconds, _ in _every(problem):
        for item in enumerate(choice):
            best[item] = min(best.get(item, math.inf), seconds)
    for i, row in enumerate(rows):
        assert row[0].strategy == solution.choice[i]
        assert len({w.strategy for w in row}) == len(row)
        for w in row:
            plan = alternatives.changed_choice(solution.choice, w.fastest)
            assert plan[i] == w.strategy
            assert w.fitting == w.fastest
            assert w.bound <= best[i, w.strategy] + 1e-9 <= problem.seconds(plan) + 2e-9


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_within_a_budget_plans_fit_and_bounds_hold(seed: int) -> None:
    problem, solution, rows = _weighed(seed, memory=True)
    best: dict[tuple[int, int], float] = {}
    for choice, seconds, fits in _every(problem):
        if fits:
            for item in enumerate(choice):
                best[item] = min(best.get(item, math.inf), seconds)
    for i, row in enumerate(rows):
        for w in row:
            assert w.bound <= best.get((i, w.strategy), math.inf) + 1e-9
            for plan in (w.fitting, w.fastest):
                if plan is not None:
                    choice = alternatives.changed_choice(solution.choice, plan)
                    assert choice[i] == w.strategy
                    assert math.isfinite(problem.seconds(choice))
            if w.fitting is not None:
                assert problem.fits(alternatives.changed_choice(solution.choice, w.fitting))


def _chain(seconds: list[list[float]], move: float) -> Problem:
    """Nodes in a row; neighbours of unequal strategies pay `move`."""
    same, cost = np.arange(2), np.array([[0.0, move], [move, 0.0]])
    transfers = tuple(Transfer(i, same, ((i + 1, same),), cost) for i in range(len(seconds) - 1))
    return from_graph(StrategyGraph(tuple(np.array(one) for one in seconds), transfers))


def test_neighbours_adapt_to_what_is_forced() -> None:
    # Alone, strategy 1 of the middle node costs 4 to move in and out; all three moving cost 3 instead.
    problem = _chain([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], 2.0)
    rows = alternatives.weigh(problem, (0, 0, 0), [1, 1, 1])
    other = rows[1][1]
    assert other.fastest == {0: 1, 1: 1, 2: 1}
    assert other.bound == 3.0


def test_no_more_are_weighed_than_asked_for_or_allowed() -> None:
    assert [len(row) for row in alternatives.weigh(_chain([[0.0, 1.0], [0.0, 1.0]], 2.0), (0, 0), [0, 1])] == [1, 2]
    problem = _chain([[0.0, 1.0], [0.0, math.inf]], math.inf)
    assert [len(row) for row in alternatives.weigh(problem, (0, 0), [1, 1])] == [1, 1]
