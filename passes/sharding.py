"""Which strategy for each operation: the integer program of intra-operator parallelism, solved.

Given a `StrategyGraph`, choose one strategy per node so as to minimise

    sum_i node_cost[i][s_i]  +  sum_t  sum_{q wanted by a consumer of t} cost_t[p_t, q]        (seconds)

while at every program point the live buffers fit the budget. This is the integer program of Alpa (Zheng et al., OSDI
2022, section 4) with two additions: a value that several consumers want in one layout is resharded once, and memory is
a constraint in bytes over program points, not a sum.

The way to the optimum, each step with a proof of its own:
  1. reduce without memory (`sharding_reductions`), solve the linear relaxation (`sharding_program`): it is mostly
     integral, and then the optimum without a budget; if that fits the budget, it is the budgeted optimum as well.
  2. with a budget that binds: reduce what memory permits, solve the relaxation, adding the rows of program points that
     are too full until none is; its dual prices of memory give a good choice by descent (Lagrange).
  3. what the reduced costs show to be no better than that choice is forbidden, and all is reduced again.
  4. branch and bound on what is left, rows again added as needed.
Every bound reported is one of a relaxation; a choice's seconds and bytes are always recomputed from the graph as given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from alpa_lite.passes.sharding_descent import descend
from alpa_lite.passes.sharding_problem import (
    Edge,
    Node,
    Problem,
    allowance,
    forget_memory,
    forget_seconds,
    from_graph,
    price_memory,
)
from alpa_lite.passes.sharding_program import Program, Relaxed, branch, build, flatten, relax
from alpa_lite.passes.sharding_reductions import Contradiction, Reduction, chain, reduce
from alpa_lite.strategy import Solution, StrategyGraph

ROUNDING = 1e-9  # bounds and objectives that differ by less are equal


def solve(graph: StrategyGraph, *, cutoff: float = math.inf, time_limit: float = 60.0, gap: float = 1e-4) -> Solution:
    """The best strategy of each node.

    Args:
      graph: the problem.
      cutoff: seconds; a problem that is proven to cost at least this is given up, with status "cutoff".
      time_limit: seconds to spend, approximately.
      gap: (objective - bound) / objective at which a choice counts as optimal.

    Returns:
      A Solution. "optimal": the gap is closed. "feasible": time ran out before. "infeasible" with an infinite bound: no
      choice fits, which is proven; with a finite bound: none was found in the time. "cutoff": see there. Without a
      choice, `objective` and `peak` are infinite.

    Raises:
      ValueError: a node without strategies; a cost that is negative or NaN; classes or buffers out of range.
    """
    search = _Search(from_graph(graph), cutoff, gap, time.perf_counter() + time_limit)
    started = time.perf_counter()
    try:
        search.run()
    except _CutoffReached:
        return search.solution("cutoff", started)
    if search.choice is None:
        return search.solution("infeasible", started)
    return search.solution("optimal" if search.closed else "feasible", started)


def evaluate(graph: StrategyGraph, choice: Sequence[int]) -> tuple[float, float]:
    """Seconds and peak bytes of any choice, such as a textbook plan; `inf` seconds if it uses something forbidden.

    Raises:
      ValueError: as `solve`.
    """
    problem = from_graph(graph)
    return problem.seconds(choice), problem.peak(choice)


def minimal_budget(graph: StrategyGraph, *, time_limit: float = 60.0, gap: float = 1e-4) -> tuple[float, Solution]:
    """The smallest peak, in bytes, that a choice reaches, and such a choice.

    The budget of the graph is ignored. The Solution's seconds are those of a choice made for memory alone: for the
    fastest plan within that budget, `solve` with it. Its status says whether the peak is proven minimal, within `gap`;
    its bound is a bound of seconds. Without any allowed choice the peak is infinite and the status "infeasible".

    Raises:
      ValueError: as `solve`.
    """
    started = time.perf_counter()
    problem = replace(from_graph(graph), budget=None)
    search = _Search(problem, math.inf, gap, started + time_limit)
    peak, proven, _ = search.minimise_peak()
    search.bound = problem.lower_bound
    if search.choice is None:
        search.bound = math.inf if proven else search.bound
        return math.inf, search.solution("infeasible", started)
    return peak, search.solution("optimal" if proven else "feasible", started)


class _CutoffReached(Exception):
    pass


@dataclass
class _Search:
    """The best choice so far, the bound so far, and the steps that improve them."""

    problem: Problem
    cutoff: float
    gap: float
    deadline: float
    choice: np.ndarray | None = None
    objective: float = math.inf
    bound: float = 0.0
    ceiling: float = math.inf  # choices at least this dear may have been forbidden
    variables: int = 0
    constraints: int = 0
    points: list[int] = field(default_factory=list)

    @property
    def left(self) -> float:
        return self.deadline - time.perf_counter()

    @property
    def closed(self) -> bool:
        return self.choice is not None and self.objective - self.bound <= max(self.gap, ROUNDING) * self.objective

    def solution(self, status: Literal["optimal", "feasible", "infeasible", "cutoff"], started: float) -> Solution:
        found = self.choice is not None and status in ("optimal", "feasible")
        bound = self.bound
        if found and self.objective - bound <= ROUNDING * self.objective:
            bound = self.objective
        return Solution(
            status,
            tuple(int(s) for s in self.choice) if found and self.choice is not None else (),
            self.objective if found else math.inf,
            bound,
            self.problem.peak(self.choice) if found and self.choice is not None else math.inf,
            time.perf_counter() - started,
            self.variables,
            self.constraints,
        )

    def run(self) -> None:
        """Steps 1 to 4 of the module's docstring."""
        try:
            self._optimise(self._forbid_dear(reduce(forget_memory(self.problem))), self.problem.budget is None)
            if self.problem.budget is not None and not self.closed:
                self._optimise(reduce(self.problem), branching=True)
        except Contradiction:
            self._raise_bound(math.inf)

    def minimise_peak(self, enough: float = -math.inf) -> tuple[float, bool, float]:
        """Look for the choice of the least peak, or for one of at most `enough` bytes.

        Returns:
          The peak reached, whether that is proven minimal within the gap, and a lower bound of all peaks.
        """
        try:
            reduction = reduce(forget_seconds(self.problem))
        except Contradiction:
            return math.inf, True, math.inf
        problem = reduction.problem
        choice = descend(price_memory(problem, np.ones(len(problem.base))))
        best, bound = self._offer_peak(reduction.lift(choice), math.inf), float(problem.base.max(initial=0.0))
        if _is_settled(problem):
            return best, True, best
        program = self._build(problem)
        points = _peaks(problem.bytes(choice), -1.0) or [0]
        for integral in (False, True):
            while True:
                if best <= enough or best - bound <= max(self.gap, ROUNDING) * best:
                    return best, best - bound <= max(self.gap, ROUNDING) * best, bound
                if bound > enough * (1 + 1e-6) > 0:
                    return best, False, bound
                answer = flatten(program, points, integral, self.left, self.gap)
                bound = max(bound, min(answer.bound, best))
                if answer.x is None or self.left <= 0:
                    return best, math.isinf(answer.bound), max(bound, answer.bound)
                choice = program.round(answer.x)
                best = self._offer_peak(reduction.lift(choice), best)
                live = problem.bytes(choice) if integral else program.bytes(answer.x)
                new = [t for t in _peaks(live, bound * (1 + ROUNDING)) if t not in points]
                if not new:
                    break
                points += new
        return best, best - bound <= max(self.gap, ROUNDING) * best, bound

    def _offer_peak(self, choice: np.ndarray, best: float) -> float:
        """Keep an allowed choice if its peak is below the best peak; returns the new best peak."""
        if not math.isfinite(seconds := self.problem.seconds(choice)) or self.problem.peak(choice) >= best:
            return best
        self.choice, self.objective = choice, seconds
        return self.problem.peak(choice)

    def _offer(self, choice: np.ndarray) -> bool:
        """Keep a choice of the original problem if it fits and is the best; returns whether it fits."""
        seconds = self.problem.seconds(choice)
        if not math.isfinite(seconds) or not self.problem.fits(choice):
            return False
        if seconds < self.objective:
            self.choice, self.objective = choice, seconds
        return True

    def _raise_bound(self, bound: float) -> None:
        """Note a lower bound of the choices that are not forbidden.

        Raises:
          _CutoffReached: the cutoff cannot be beaten.
        """
        self.bound = max(self.bound, min(bound, self.ceiling, self.objective))
        if math.isfinite(self.bound) and self.bound >= self.cutoff:
            raise _CutoffReached

    def _forbid_dear(self, reduction: Reduction) -> Reduction:
        """Without memory: forbid whatever alone costs more than a choice that descent finds."""
        problem = reduction.problem
        choice = descend(problem)
        most = problem.seconds(choice)
        if not math.isfinite(most):
            return reduction
        self._offer(reduction.lift(choice))
        spare = most * (1 + ROUNDING) - problem.lower_bound
        nodes = tuple(replace(n, cost=np.where(n.cost - n.cost.min() > spare, np.inf, n.cost)) for n in problem.nodes)
        edges = tuple(replace(e, cost=np.where(e.cost > spare, np.inf, e.cost)) for e in problem.edges)
        return chain(reduction, reduce(replace(problem, nodes=nodes, edges=edges)))

    def _optimise(self, reduction: Reduction, branching: bool) -> None:
        """Solve a reduced problem: relax, round, forbid, again while that helps, then branch if `branching`."""
        while True:
            problem = reduction.problem
            if _is_settled(problem):
                choice = np.zeros(len(problem.nodes), dtype=int)
                fits = self._offer(reduction.lift(choice))
                self._note_peaks(reduction.lift(choice))
                self._raise_bound(problem.seconds(choice) if fits or problem.budget is None else math.inf)
                return
            self._raise_bound(problem.lower_bound)
            program = self._build(problem)
            relaxed = self._relax(program)
            self._raise_bound(relaxed.bound)
            if math.isinf(relaxed.bound):
                return
            self._round(reduction, program, relaxed)
            if self.closed or self.left <= 0 or not branching:
                return
            smaller = self._forbid_by_reduced_cost(reduction, program, relaxed)
            stuck = smaller.problem.size > 0.7 * problem.size
            reduction = smaller
            if stuck and not _is_settled(reduction.problem):
                self._branch(reduction)
                return

    def _build(self, problem: Problem) -> Program:
        program = build(problem)
        self.variables = max(self.variables, len(program.cost))
        self.constraints = max(self.constraints, program.height)
        return program

    def _unit(self, program: Program) -> float:
        """Seconds that the objective amounts to, at least roughly."""
        for guess in (self.objective, self.bound, float(program.cost.max())):
            if math.isfinite(guess) and guess > 0:
                return guess
        return 1.0

    def _relax(self, program: Program) -> Relaxed:
        """The relaxation with as many memory rows as it takes to satisfy all."""
        budget = program.problem.budget
        while True:
            points = self.points if budget is not None else []
            relaxed = relax(program, points, self._unit(program), self.left)
            if budget is None or relaxed.x is None or self.left <= 0:
                return relaxed
            new = [t for t in _peaks(program.bytes(relaxed.x), budget * (1 + 1e-7)) if t not in points]
            if not new:
                return relaxed
            self.points += new

    def _note_peaks(self, choice: np.ndarray) -> None:
        """Begin the memory rows with the program points that a choice of the original problem overfills."""
        if self.problem.budget is not None and not self.points:
            self.points = _peaks(self.problem.bytes(choice), allowance(self.problem.budget))

    def _round(self, reduction: Reduction, program: Program, relaxed: Relaxed) -> None:
        """Offer the choices that the relaxation suggests."""
        problem = reduction.problem
        start = None if relaxed.x is None else program.round(relaxed.x)
        if start is not None:
            self._offer(reduction.lift(start))
        if problem.budget is None or relaxed.price is None or start is None:
            choice = reduction.lift(descend(problem, start))
            self._offer(choice)
            self._note_peaks(choice)
            return
        low, high = 0.5, math.inf  # multiples of the price of memory: too cheap, and dear enough
        for _ in range(12):
            factor = low * 2 if math.isinf(high) else (low + high) / 2
            choice = descend(price_memory(problem, factor * relaxed.price), start)
            if self._offer(reduction.lift(choice)):
                high = factor
                if self.closed or high < 1.05 * low:
                    return
            else:
                low = factor

    def _forbid_by_reduced_cost(self, reduction: Reduction, program: Program, relaxed: Relaxed) -> Reduction:
        """Forbid the strategies and pairs that cannot be in a choice better than the best; reduce again.

        Raises:
          Contradiction: none can be better.
        """
        if relaxed.reduced_cost is None or math.isinf(self.objective):
            return reduction
        limit = self.objective * (1 - self.gap / 2 if self.gap > ROUNDING else 1 + ROUNDING)
        self.ceiling = min(self.ceiling, limit)
        dear = relaxed.bound + relaxed.reduced_cost > limit
        nodes: list[Node] = []
        for i, node in enumerate(reduction.problem.nodes):
            nodes.append(replace(node, cost=np.where(dear[program.first[i] : program.first[i + 1]], np.inf, node.cost)))
        costs = [edge.cost.copy() for edge in reduction.problem.edges]
        pairs = np.flatnonzero(dear[program.integers :] & (program.pair_edge >= 0))
        for e, pair in zip(program.pair_edge[pairs], program.pair[pairs], strict=True):
            costs[e].flat[pair] = np.inf
        edges: list[Edge] = [replace(e, cost=cost) for e, cost in zip(reduction.problem.edges, costs, strict=True)]
        return chain(reduction, reduce(replace(reduction.problem, nodes=tuple(nodes), edges=tuple(edges))))

    def _branch(self, reduction: Reduction) -> None:
        """Branch and bound, adding memory rows until the choice fits."""
        problem = reduction.problem
        if self.choice is None and problem.budget is not None:
            search = replace(self, problem=replace(self.problem, budget=None))
            peak, _, least = search.minimise_peak(enough=allowance(problem.budget))
            if least > allowance(problem.budget) * (1 + 1e-6):
                self._raise_bound(math.inf)
                return
            if search.choice is not None and peak <= allowance(problem.budget):
                self._offer(search.choice)
        program = self._build(problem)
        covers: list[np.ndarray] = []
        while True:
            points = self.points if problem.budget is not None else []
            answer = branch(program, points, covers, self._unit(program), self.left, self.gap)
            self._raise_bound(answer.bound)
            if answer.x is None:
                return
            choice = program.round(answer.x)
            if self._offer(reduction.lift(choice)) or self.closed or self.left <= 0 or problem.budget is None:
                return
            live = problem.bytes(choice)
            new = [t for t in _peaks(live, allowance(problem.budget)) if t not in points]
            if not new:  # within the solver's tolerance, but not within the budget
                covers.append(_cover(program, choice, int(live.argmax())))
            self.points += new


def _is_settled(problem: Problem) -> bool:
    """Whether nothing is left to choose."""
    return all(len(node.cost) == 1 for node in problem.nodes)


def _peaks(live: np.ndarray, limit: float, most: int = 16) -> list[int]:
    """The fullest program points above a limit that are local maxima, the first point of each plateau."""
    padded = np.concatenate([[-np.inf], live, [-np.inf]])
    local = np.flatnonzero((live > limit) & (live > padded[:-2]) & (live >= padded[2:]))
    return [int(t) for t in local[np.argsort(-live[local], kind="stable")][:most]]


def _cover(program: Program, choice: np.ndarray, point: int) -> np.ndarray:
    """[variables] mask of the strategies that overfill a program point: not all of them can be chosen together."""
    problem = program.problem

    def live(memory: dict[tuple[int, int], np.ndarray]) -> bool:
        return any(start <= point <= end for start, end in memory)

    involved = {i for i, node in enumerate(problem.nodes) if live(node.memory)}
    for edge in problem.edges:
        if live(edge.memory):
            involved |= edge.nodes
    mask = np.zeros(len(program.cost))
    mask[[program.first[i] + choice[i] for i in involved]] = 1.0
    return mask
