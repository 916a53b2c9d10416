"""The price of memory: the dual of the budget of a sharding problem.

With a price per byte at each program point, the budget leaves the constraints (Lagrange):

    L(price) = min_choice  seconds(choice) + sum_t price[t] (bytes(choice)[t] - budget)

is a lower bound for every price >= 0. Each choice met on the way says that L is at most its own line; the price where
the lowest of these lines is highest is tried next (Kelley's cutting planes), within a box around the best price so far
that grows with each success and shrinks with each failure. The minimum over choices is bounded by message passing
(`sharding.solver.messages`) and met by descent, so that no step needs an optimiser but for the lines, a linear program
of a handful of variables.

Without a budget the same finds the least peak: seconds are zero and prices sum to one. `PeakSearch` begins with that,
forbids what exceeds the bound, as `sharding.solver.search` does; then linear and integer programs over ever more
program points minimise the largest of their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy.optimize import linprog

from alpa_lite.ir.strategy import Solution
from alpa_lite.passes.sharding.solver import work
from alpa_lite.passes.sharding.solver.messages import Ascent
from alpa_lite.passes.sharding.solver.problem import Problem, descend, forget_seconds, price_memory
from alpa_lite.passes.sharding.solver.program import LinearProgram, RelaxedSolution, build, flatten
from alpa_lite.passes.sharding.solver.restrict import Contradiction, Restriction, make_consistent
from alpa_lite.passes.sharding.solver.work import WorkExhausted

REACH, WIDER = 0.002, 3.0
"""Half the width of the first box, a price at which the bytes over the budget cost this share of all seconds, and the
factor by which a success widens it."""


class MemoryDual:
    """Prices of memory, improved by `step`.

    Attributes:
      bound: seconds that no choice within the budget undercuts; without a budget, bytes that no peak undercuts.
      price: [points] the price that gives it, in seconds per byte.
      messages: those of the last price, as of `Ascent`.
    """

    def __init__(self, problem: Problem, price: np.ndarray | None = None, messages: np.ndarray | None = None) -> None:
        """Args: price, messages: where to begin; the messages as of `Ascent`."""
        self.problem = problem if problem.budget is not None else forget_seconds(problem)
        self.limit = problem.budget or 0.0
        self.bound = -np.inf
        if price is None:
            points = len(problem.base)
            price = np.zeros(points) if problem.budget is not None else np.full(points, 1.0 / max(points, 1))
        self.price = self._next = price
        self.messages = messages
        self._points: list[int] = []
        self._seconds: list[float] = []
        self._bytes: list[np.ndarray] = []
        self._reach = REACH
        self._stalled = 0
        self._backward = True
        self.finished = False

    def step(self, sweeps: int) -> np.ndarray:
        """Try the next price: returns the choice that is good at it."""
        ascent = self._ascent(self._next, sweeps)
        bound = self._bound_of(ascent, self._next)
        self._reach *= WIDER if bound > self.bound else 0.5
        self._stalled = 0 if bound - self.bound > 1e-3 * abs(bound) else self._stalled + 1
        if bound > self.bound:
            self.bound, self.price = bound, self._next
        self._backward = not self._backward
        choice = descend(ascent.problem, ascent.choice(self._backward))
        self.add(self.problem.seconds(choice), self.problem.bytes(choice))
        self._aim()
        return choice

    def answer(self, price: np.ndarray, sweeps: int) -> np.ndarray:
        """Returns a choice that is good at a price, which need not be a better one."""
        ascent = self._ascent(price, sweeps)
        return descend(ascent.problem, ascent.choice())

    def add(self, seconds: float, live: np.ndarray) -> None:
        """Note the line of a choice, if it is allowed: its seconds, and its bytes at each program point."""
        if not np.isfinite(seconds):
            return
        self._seconds.append(seconds)
        self._bytes.append(live)
        self._points += [t for t in find_peaks(self._bytes[-1], self.limit, 4) if t not in self._points]

    def slack(self, sweeps: int) -> tuple[float, tuple[np.ndarray, np.ndarray]]:
        """A bound, and how far above it each strategy and cell is at the least: `Ascent.slack` at the best price."""
        ascent = self._ascent(self.price, sweeps)
        bound = self._bound_of(ascent, self.price)
        return bound, ascent.slack()

    def _ascent(self, price: np.ndarray, sweeps: int) -> Ascent:
        """Message passing at a price, beginning with the messages of the last one."""
        ascent = Ascent(price_memory(self.problem, price), self.messages)
        ascent.sweep(sweeps)
        self.messages = ascent.messages
        return ascent

    def _bound_of(self, ascent: Ascent, price: np.ndarray) -> float:
        return ascent.bound + float((price * (self.problem.base - self.limit)).sum())

    def _aim(self) -> None:
        """The next price, from the lines of the choices so far."""
        seconds, points = np.array(self._seconds), self._points
        if not points:
            self.finished = len(seconds) > 0
            return
        over = np.array([live[points] for live in self._bytes]) - self.limit
        unit, size = max(float(seconds.max()), 1e-300), max(float(np.abs(over).max()), 1e-300)
        peak = self.problem.budget is None
        # variables: the height of the lowest line, then a price for each point
        cost = np.concatenate([[-1.0], np.zeros(len(points))])
        lines = np.hstack([np.ones((len(seconds), 1)), -over / size])
        scale = 1.0 if peak else unit / size
        near = self.price[points] / scale
        low, high = np.maximum(near - self._reach, 0.0), np.minimum(near + self._reach, 1.0 if peak else 1e4)
        bounds = [(None, None), *zip(low, np.maximum(low, high), strict=True)]
        result = linprog(
            cost,
            A_ub=lines,
            b_ub=np.zeros(len(seconds)) if peak else seconds / unit,
            A_eq=np.concatenate([[0.0], np.ones(len(points))])[None, :] if peak else None,
            b_eq=np.ones(1) if peak else None,
            bounds=bounds,
            method="highs",
        )
        if result.status != 0:
            self.finished = True
            return
        self._next = np.zeros(len(self.price))
        self._next[points] = result.x[1:] * scale
        height = -result.fun * (size if peak else unit)
        self.finished = self._stalled >= 8 or height - self.bound <= 1e-4 * abs(height)


def find_peaks(live: np.ndarray, limit: float, most: int = 16) -> list[int]:
    """Returns the fullest program points above a limit that are local maxima, the first point of each plateau."""
    padded = np.concatenate([[-np.inf], live, [-np.inf]])
    local = np.flatnonzero((live > limit) & (live > padded[:-2]) & (live >= padded[2:]))
    return [int(t) for t in local[np.argsort(-live[local], kind="stable")][:most]]


Slack = tuple[np.ndarray, np.ndarray]
"""How far above a bound a choice must be that takes a strategy, or a cell: [strategies], [cells]."""

ROUNDING = 1e-9  # bounds and objectives that differ by less are equal
SWEEPS, STEPS = 5, 30  # sweeps in a round; prices of memory
FEW_STEPS = 6  # prices of memory for a quick bound of it


@dataclass
class PeakSearch:
    """The choice of the least peak so far and its bound so far, and the steps that improve them.

    The search ends before the first step that exceeds `max_work` (`solver.work`); nothing else looks at it.
    """

    problem: Problem
    gap: float
    max_work: int
    work: int = 0
    choice: np.ndarray | None = None
    objective: float = math.inf
    bound: float = 0.0  # seconds that no choice undercuts
    peak: float = math.inf  # bytes of the choice
    peak_bound: float = 0.0  # bytes that no choice undercuts
    variables: int = 0
    constraints: int = 0

    def solution(self, status: Literal["optimal", "feasible", "infeasible", "cutoff"]) -> Solution:
        """Returns the result of the search, as the caller gets it."""
        choice, objective, bound, peak = (), math.inf, self.bound, math.inf
        if self.choice is not None and status in ("optimal", "feasible"):
            choice, objective = tuple(self.choice.tolist()), self.objective
            bound = objective if objective - bound <= ROUNDING * objective else bound
            peak = self.problem.peak(self.choice)
        return Solution(status, choice, objective, bound, peak, self.work, self.variables, self.constraints)

    def minimise(self) -> tuple[float, bool]:
        """Find a choice of the least peak; returns the peak, and whether that is proven minimal within the gap."""
        try:
            self.find(-math.inf)
        except Contradiction:
            return math.inf, True
        except WorkExhausted:
            pass
        return self.peak, self._is_close(self.peak, self.peak_bound)

    def lower_bound(self) -> float:
        """Returns bytes that no peak undercuts; in a few steps, without integer programs."""
        try:
            restriction = make_consistent(forget_seconds(self.problem))
        except Contradiction:
            return math.inf
        self.peak_bound = float(restriction.problem.base.max(initial=0.0))
        with suppress(WorkExhausted):
            self._price_peak(restriction, FEW_STEPS, -math.inf)
        return self.peak_bound

    def find(self, enough: float) -> None:
        """Look for a choice of the least peak, or one of at most `enough` bytes; raises `peak_bound`.

        Raises:
          Contradiction: no choice is allowed.
          WorkExhausted: the limit was reached.
        """
        restriction = make_consistent(forget_seconds(self.problem))
        self.peak_bound = float(restriction.problem.base.max(initial=0.0))
        while (dual := self._price_peak(restriction, STEPS, enough)) is not None:
            if restriction.problem.is_settled or math.isinf(self.peak):
                break
            self._charge(SWEEPS * work.sweep_work(restriction.problem.links))
            try:
                restriction, smaller = self._forbid(restriction, *dual.slack(SWEEPS), self.peak * (1 + ROUNDING))
            except Contradiction:
                self.peak_bound = self.peak
                return
            if not smaller:
                break
        else:
            return
        self._find_exactly(restriction, enough)

    def _price_peak(self, restriction: Restriction, steps: int, enough: float) -> MemoryDual | None:
        """Look for a low peak by prices of memory; returns the last ones, or None where the search is over."""
        dual = MemoryDual(restriction.problem)
        for i in range(steps):
            self._offer_peak(restriction.lift(self._step(dual, i)))
            if self._is_flat(dual.bound, enough):
                return None
            if dual.finished:
                break
        return dual

    def _is_flat(self, bound: float, enough: float) -> bool:
        """Returns whether a bound of the peaks, which is noted, ends the search for a peak of at most `enough`."""
        self.peak_bound = bound = max(self.peak_bound, min(bound, self.peak))
        return self._is_close(self.peak, bound) or self.peak <= enough or bound > enough * (1 + 1e-6) > 0

    def _find_exactly(self, restriction: Restriction, enough: float) -> None:
        """The rest of `find`, by linear and integer programs over ever more program points."""
        problem = restriction.problem
        cheapest = np.zeros(problem.links.nodes, dtype=int)
        if problem.is_settled:
            self._offer_peak(restriction.lift(cheapest))
            self.peak_bound = max(self.peak_bound, self.peak)
            return
        if problem.size > work.LARGEST_LINEAR:
            return
        program = self._build(forget_seconds(problem))
        points = find_peaks(problem.bytes(cheapest), -1.0)
        for integral in (False, True)[: 1 + (problem.size <= work.LARGEST_INTEGER)]:
            while True:
                answer = self._solve_program(flatten, program, points, integral, self.gap)
                if answer.x is not None:
                    self._offer_peak(restriction.lift(program.round(answer.x)))
                if self._is_flat(answer.bound, enough) or answer.x is None:
                    return
                live = problem.bytes(program.round(answer.x)) if integral else program.bytes(answer.x)
                new = [t for t in find_peaks(live, self.peak_bound * (1 + ROUNDING)) if t not in points]
                if not new:
                    break
                points += new

    def _offer_peak(self, choice: np.ndarray) -> None:
        """Keep an allowed choice if its peak is the lowest."""
        seconds, peak = self.problem.seconds(choice), self.problem.peak(choice)
        if math.isfinite(seconds) and peak < self.peak:
            self.choice, self.objective, self.peak = choice, seconds, peak

    def _step(self, dual: MemoryDual, number: int) -> np.ndarray:
        """Returns the choice of the next step of a dual."""
        sweeps, links = SWEEPS if number == 0 else 2, dual.problem.links
        self._charge(sweeps * work.sweep_work(links) + work.choice_work(links))
        return dual.step(sweeps)

    def _charge(self, work: int) -> None:
        """Count the work of the next step.

        Raises:
          WorkExhausted: the step exceeds the limit.
        """
        if self.work + work > self.max_work:
            raise WorkExhausted
        self.work += work

    def _is_close(self, value: float, bound: float) -> bool:
        return math.isfinite(value) and value - bound <= max(self.gap, ROUNDING) * value

    def _forbid(
        self, restriction: Restriction, bound: float, slack: Slack, limit: float, share: float = 0.7
    ) -> tuple[Restriction, bool]:
        """Forbid the strategies, and the cells of edges, that lift a choice above a limit.

        Returns:
          The rest, and whether it is no more than a share of what there was.

        Raises:
          Contradiction: nothing is below the limit.
        """
        problem, (strategies, cells) = restriction.problem, slack
        cost = np.where(strategies > limit - bound, np.inf, problem.cost)
        cells = np.where(cells > limit - bound, np.inf, problem.cells)
        rest = restriction.restrict_further(replace(problem, cost=cost, cells=cells))
        return rest, rest.problem.size <= share * problem.size

    def _build(self, problem: Problem) -> LinearProgram:
        self._charge(work.BUILT_ENTRY_WORK * problem.size)
        program = build(problem)
        self.variables = max(self.variables, len(program.cost))
        self.constraints = max(self.constraints, program.height)
        return program

    def _solve_program(self, solver: Callable[..., RelaxedSolution], *args: Any, least: int = 1) -> RelaxedSolution:
        """Returns the answer to a program, which takes `least` work or more: all of it is known afterwards.

        Raises:
          WorkExhausted: the limit would be exceeded.
        """
        self._charge(least)
        answer = solver(*args)
        self.work += max(0, work.SIMPLEX_ENTRY_WORK * answer.work - least)
        return answer
