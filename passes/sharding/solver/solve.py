"""Which strategy for each operation: the integer program of intra-operator parallelism, solved.

Given a `StrategyGraph`, choose one strategy per node so as to minimise

    sum_i node_cost[i][s_i]  +  sum_t  sum_{q wanted by a consumer of t} cost_t[p_t, q]        (seconds)

while at every program point the live buffers fit the budget. This is the integer program of Alpa (Zheng et al., OSDI
2022, section 4) with two additions: a value that several consumers want in one layout is resharded once, and memory is
a constraint in bytes over program points, not a sum.

The docstring of `sharding.solver.search` says how it is solved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import numpy as np

from alpa_lite.ir.strategy import Solution, StrategyGraph
from alpa_lite.passes.sharding.solver.messages import Ascent
from alpa_lite.passes.sharding.solver.peak import SWEEPS, PeakSearch
from alpa_lite.passes.sharding.solver.problem import forget_memory
from alpa_lite.passes.sharding.solver.reading import from_graph
from alpa_lite.passes.sharding.solver.restrict import Contradiction, Restriction, consistent
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
    """The best strategy of each node.

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

    Raises:
      ValueError: a node without strategies; a cost that is negative or NaN; classes or buffers out of range.
    """
    known = known or SolverState(graph)
    problem = replace(known.problem, budget=graph.budget)
    starts = [*known.choices, *([start.choice] if start and start.choice else [])]
    search = Search(problem, gap, max_work, cutoff=cutoff, roof=roof, messages=known.messages, starts=starts)
    try:
        search.run(free)
    except CutoffReached:
        return search.solution("cutoff")
    finally:
        known.note(search)
    return search.solution("infeasible" if search.choice is None else "optimal" if search.closed else "feasible")


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
        """Raises ValueError as `solve`."""
        self.problem = from_graph(graph)
        self.messages: np.ndarray | None = None
        self.choices: list[np.ndarray] = []
        self.seconds, self.work = 0.0, 0

    def note(self, search: Search) -> None:
        """Add the results of a search."""
        self.messages = search.messages
        if search.choice is not None:
            self.choices = [search.choice, *self.choices][:CHOICES]

    @cached_property
    def _ascent(self) -> tuple[Restriction, Ascent] | None:
        """Message passing on the strategies that are allowed; None if no choice is."""
        with suppress(Contradiction):
            restriction = consistent(forget_memory(self.problem))
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
    def fits(self) -> bool:
        """Whether the choice that the bound suggests stays within the budget."""
        if self._ascent is None:
            return False
        restriction, ascent = self._ascent
        return self.problem.fits(restriction.lift(ascent.choice()))


CHOICES = 3
"""The last choices that are remembered."""


def evaluate(graph: StrategyGraph, choice: Sequence[int]) -> tuple[float, float]:
    """Seconds and peak bytes of any choice, such as a textbook plan; `inf` seconds if it uses something forbidden.

    Raises:
      ValueError: as `solve`.
    """
    problem = from_graph(graph)
    return problem.seconds(choice), problem.peak(choice)


def bound_of_peak(graph: StrategyGraph) -> float:
    """Bytes that no choice undercuts; `minimal_budget` takes longer, and is exact.

    The budget of the graph is ignored. Without any allowed choice they are infinite.

    Raises:
      ValueError: as `solve`.
    """
    problem = replace(from_graph(graph), budget=None)
    return PeakSearch(problem, 1e-2, SOLVE_WORK).lower_bound()


def minimal_budget(graph: StrategyGraph, *, gap: float = 1e-4) -> tuple[float, Solution]:
    """The smallest peak, in bytes, that a choice reaches, and such a choice.

    The budget of the graph is ignored. The Solution's seconds are those of a choice made for memory alone: for the
    fastest plan within that budget, `solve` with it. Its status says whether the peak is proven minimal, within `gap`;
    its bound is a bound of seconds. Without any allowed choice the peak is infinite and the status "infeasible".

    Raises:
      ValueError: as `solve`.
    """
    problem = replace(from_graph(graph), budget=None)
    search = PeakSearch(problem, gap, SOLVE_WORK)
    peak, proven = search.minimise()
    search.bound = problem.lower_bound
    if search.choice is None:
        search.bound = math.inf if proven else search.bound
        return math.inf, search.solution("infeasible")
    return peak, search.solution("optimal" if proven else "feasible")
