"""The search for a choice of the least peak of bytes, and the steps that it shares with that for the least seconds.

Prices of memory give a bound and a choice, and forbid what exceeds it, as in `sharding.solver.search`; then linear and
integer programs over ever more program points minimise the largest of their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from alpa_lite.ir.strategy import Solution
from alpa_lite.passes.sharding.solver.memory import MemoryDual, peaks
from alpa_lite.passes.sharding.solver.problem import Problem, forget_seconds
from alpa_lite.passes.sharding.solver.program import LinearProgram, Relaxed, build, flatten
from alpa_lite.passes.sharding.solver.restrict import Contradiction, Restriction, consistent
from alpa_lite.passes.sharding.solver.work import (
    BUILT_ENTRY_WORK,
    LARGEST_INTEGER,
    LARGEST_LINEAR,
    SIMPLEX_ENTRY_WORK,
    WorkExhausted,
    choice_work,
    sweep_work,
)

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
        """Bytes that no peak undercuts; in a few steps, without integer programs."""
        try:
            restriction = consistent(forget_seconds(self.problem))
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
        restriction = consistent(forget_seconds(self.problem))
        self.peak_bound = float(restriction.problem.base.max(initial=0.0))
        while (dual := self._price_peak(restriction, STEPS, enough)) is not None:
            if restriction.problem.settled or math.isinf(self.peak):
                break
            self._charge(SWEEPS * sweep_work(restriction.problem.links))
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
        """Whether a bound of the peaks, which is noted, ends the search for a peak of at most `enough`."""
        self.peak_bound = bound = max(self.peak_bound, min(bound, self.peak))
        return self._is_close(self.peak, bound) or self.peak <= enough or bound > enough * (1 + 1e-6) > 0

    def _find_exactly(self, restriction: Restriction, enough: float) -> None:
        """The rest of `find`, by linear and integer programs over ever more program points."""
        problem = restriction.problem
        cheapest = np.zeros(problem.links.nodes, dtype=int)
        if problem.settled:
            self._offer_peak(restriction.lift(cheapest))
            self.peak_bound = max(self.peak_bound, self.peak)
            return
        if problem.size > LARGEST_LINEAR:
            return
        program = self._build(forget_seconds(problem))
        points = peaks(problem.bytes(cheapest), -1.0)
        for integral in (False, True)[: 1 + (problem.size <= LARGEST_INTEGER)]:
            while True:
                answer = self._solve_program(flatten, program, points, integral, self.gap)
                if answer.x is not None:
                    self._offer_peak(restriction.lift(program.round(answer.x)))
                if self._is_flat(answer.bound, enough) or answer.x is None:
                    return
                live = problem.bytes(program.round(answer.x)) if integral else program.bytes(answer.x)
                new = [t for t in peaks(live, self.peak_bound * (1 + ROUNDING)) if t not in points]
                if not new:
                    break
                points += new

    def _offer_peak(self, choice: np.ndarray) -> None:
        """Keep an allowed choice if its peak is the lowest."""
        seconds, peak = self.problem.seconds(choice), self.problem.peak(choice)
        if math.isfinite(seconds) and peak < self.peak:
            self.choice, self.objective, self.peak = choice, seconds, peak

    def _step(self, dual: MemoryDual, number: int) -> np.ndarray:
        """The choice of the next step of a dual."""
        sweeps, links = SWEEPS if number == 0 else 2, dual.problem.links
        self._charge(sweeps * sweep_work(links) + choice_work(links))
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
        rest = restriction.further(replace(problem, cost=cost, cells=cells))
        return rest, rest.problem.size <= share * problem.size

    def _build(self, problem: Problem) -> LinearProgram:
        self._charge(BUILT_ENTRY_WORK * problem.size)
        program = build(problem)
        self.variables = max(self.variables, len(program.cost))
        self.constraints = max(self.constraints, program.height)
        return program

    def _solve_program(self, solver: Callable[..., Relaxed], *args: Any) -> Relaxed:
        """The answer to a program, whose work is known afterwards.

        Raises:
          WorkExhausted: the limit was reached before.
        """
        self._charge(1)
        answer = solver(*args)
        self.work += SIMPLEX_ENTRY_WORK * answer.work
        return answer
