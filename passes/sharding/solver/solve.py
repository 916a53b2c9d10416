"""Which strategy for each operation: the integer program of intra-operator parallelism, solved.

It is that of Alpa (Zheng et al., OSDI 2022, section 4) with two additions: a value that several consumers want in one
layout is resharded once, and memory is a constraint in bytes over program points, not a sum. `solver.problem` has the
formula, `solver.search` says how it is solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from alpa_lite.ir.strategy import Solution, StrategyGraph
from alpa_lite.passes.sharding.solver.memory import SWEEPS, PeakSearch
from alpa_lite.passes.sharding.solver.messages import Ascent
from alpa_lite.passes.sharding.solver.problem import Problem, forget_memory, problem_from_graph
from alpa_lite.passes.sharding.solver.restrict import Contradiction, Restriction, make_consistent
from alpa_lite.passes.sharding.solver.search import CutoffReached, Search
from alpa_lite.passes.sharding.solver.work import SOLVE_WORK, sweep_work


def solve(
    graph: StrategyGraph,
    *,
    cutoff: float = math.inf,
    max_work: int = SOLVE_WORK,
    gap: float = 1e-4,
    free: float | None = None,
    roof: float = math.inf,
    known: SolverState | None = None,
    start: Solution | None = None,
) -> Solution:
    """Returns the best strategy of each node.

    Args:
      graph: the problem.
      cutoff: seconds; a problem that is proven to cost at least this is given up, with status "cutoff".
      max_work: at which the search ends, in the unit of `solver.work`. More of it never gives a worse choice or bound.
      gap: (objective - bound) / objective at which a choice counts as optimal.
      free: seconds that no choice undercuts even without the budget, where that is known and the best choice without
        it is known not to fit: the search then begins with the budget.
      roof: bytes; where the best choice takes more, its bound alone is of interest, and five parts in 1e3 are enough.
      known: what earlier solves of the same graph, with this budget or another, have found out; added to.
      start: of another problem with the same nodes and strategies: its choice is tried first.

    Returns:
      A Solution. "optimal": the gap is closed. "feasible": it is not. "infeasible" with an infinite bound: no choice
      fits, which is proven; with a finite bound: none was found. "cutoff": see there. Without a choice, `objective` and
      `peak` are infinite.
    """
    known = known or SolverState(graph)
    problem = replace(known.problem, budget=graph.budget)
    starts = [start.choice] if start and start.choice else []
    return known.solve(problem, free, starts, gap=gap, max_work=max_work, cutoff=cutoff, roof=roof)


class SolverState:
    """The results of solves of one graph, from which the next one, with another budget, may start.

    Attributes:
      problem: the graph in arrays.
      messages: of `solver.messages.Ascent`, without regard to memory. choices: good ones.
      seconds: that no choice undercuts, whatever the budget: a quick bound, raised by `improve`; `inf` if every choice
        uses something forbidden.
      work: of raising it, in the unit of `solver.work`.
    """

    def __init__(self, graph: StrategyGraph) -> None:
        self.problem = problem_from_graph(graph)
        self.messages: np.ndarray | None = None
        self.choices: list[np.ndarray] = []
        self.seconds, self.work = 0.0, 0

    def solve(
        self, problem: Problem, free: float | None = None, starts: Sequence[Sequence[int]] = (), **limits: Any
    ) -> Solution:
        """Returns the solution of the problem with another budget, or at a price of memory; its results are added.

        Args:
          free, starts: as of the function `solve`. limits: as of `Search`.
        """
        search = Search(problem, messages=self.messages, starts=[*self.choices, *starts], **limits)
        try:
            search.run(free)
        except CutoffReached:
            return search.solution("cutoff")
        finally:
            self.messages = search.messages
            if search.choice is not None:
                self.choices = [search.choice, *self.choices][:CHOICES]
        return search.solution("infeasible" if search.choice is None else "optimal" if search.is_closed else "feasible")

    @cached_property
    def _ascent(self) -> tuple[Restriction, Ascent] | None:
        """Message passing on the strategies that are allowed; None if no choice is."""
        with suppress(Contradiction):
            restriction = make_consistent(forget_memory(self.problem))
            return restriction, Ascent(restriction.problem)
        return None

    def improve(self) -> None:
        """Raise the bound: mostly within a tenth of the optimum at first, and within a few percent after that."""
        if self._ascent is None:
            self.seconds = math.inf
            return
        restriction, ascent = self._ascent
        ascent.sweep(SWEEPS)
        self.work += SWEEPS * sweep_work(restriction.problem.links)
        self.seconds = max(self.seconds, ascent.bound)
        self.messages = ascent.messages

    @property
    def is_within_budget(self) -> bool:
        """Whether the choice that the bound suggests stays within the budget."""
        if self._ascent is None:
            return False
        restriction, ascent = self._ascent
        return self.problem.fits(restriction.lift(ascent.choice()))


CHOICES = 3
"""The last choices that are remembered."""


def evaluate(graph: StrategyGraph, choice: Sequence[int]) -> tuple[float, float]:
    """Seconds and peak bytes of any choice, such as a textbook plan; `inf` seconds if it uses something forbidden."""
    problem = problem_from_graph(graph)
    return problem.seconds(choice), problem.peak(choice)


def find_minimal_budget(graph: StrategyGraph, *, gap: float = 1e-4) -> tuple[float, Solution]:
    """Returns the smallest peak, in bytes, that a choice reaches, and such a choice.

    The budget of the graph is ignored. The Solution's seconds are those of a choice made for memory alone: for the
    fastest plan within that budget, `solve` with it. Its status says whether the peak is proven minimal, within `gap`;
    its bound is a bound of seconds. Without any allowed choice the peak is infinite and the status "infeasible".
    """
    problem = replace(problem_from_graph(graph), budget=None)
    search = PeakSearch(problem, gap, SOLVE_WORK)
    peak, proven = search.minimise()
    search.bound = problem.lower_bound
    if search.choice is None:
        search.bound = math.inf if proven else search.bound
        return math.inf, search.solution("infeasible")
    return peak, search.solution("optimal" if proven else "feasible")
