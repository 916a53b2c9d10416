"""The search for the best choice of a sharding problem: from cheap proofs to expensive ones.

The way to the optimum, each step with its own proof:
  1. without memory: bound from below by message passing (`sharding.solver.messages`), from above by descent; forbid
     what the two exclude, restrict the problem to the rest (`sharding.solver.restrict`), and repeat. Mostly bound and
     choice meet; if the choice fits, it is best.
  2. with a budget that binds: the same at the best price of memory (`sharding.solver.memory`).
  3. the linear relaxation of what is left (`sharding.solver.program`), memory rows added for the program points that
     are too full until none is; again forbid what its reduced costs exclude.
  4. branch and bound on the rest, rows again added as needed.
Every bound reported is one of a relaxation; a choice's seconds and bytes are always recomputed from the graph as given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from alpa_lite.ir.strategy import Solution
from alpa_lite.passes.sharding.solver.descent import descend
from alpa_lite.passes.sharding.solver.memory import MemoryDual, peaks
from alpa_lite.passes.sharding.solver.messages import Ascent
from alpa_lite.passes.sharding.solver.problem import Problem, allowance, forget_memory, forget_seconds, price_memory
from alpa_lite.passes.sharding.solver.program import LinearProgram, Relaxed, branch, build, flatten, relax
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
SWEEPS, ROUNDS, STEPS = 5, 10, 30  # sweeps in a round, twice as many every second round; rounds; prices of memory
FEW_STEPS = 6  # prices of memory for a quick bound of it
PRICES, POLISH = 8, (1.0, 0.5, 0.2, 0.0)  # multiples of a price that are tried, and of it for the best choice
STALLED, PATIENCE = 0.98, 3  # rounds that leave more than this share of the gap, and how many of them end a search
LOOSE = 5e-3  # the gap at which a bound is good enough, where the choice does not matter


class CutoffReached(Exception):
    """No choice is below the cutoff."""


@dataclass
class Search:
    """The best choice so far, the bound so far, and the steps that improve them.

    The search ends before the first step that exceeds `max_work` (`solver.work`); nothing else looks at it.
    """

    problem: Problem
    cutoff: float
    gap: float
    max_work: int
    work: int = 0
    choice: np.ndarray | None = None
    objective: float = math.inf
    bound: float = 0.0
    peak: float = math.inf  # bytes of the choice, where the least are looked for
    peak_bound: float = 0.0  # bytes that no choice undercuts
    ceiling: float = math.inf  # choices at least this expensive may have been forbidden
    roof: float = math.inf  # bytes above which a choice is of no interest but for its bound
    variables: int = 0
    constraints: int = 0
    points: list[int] = field(default_factory=list)
    messages: np.ndarray | None = None  # of the consistent problem, where there are any
    starts: list[Sequence[int] | np.ndarray] = field(default_factory=list)  # choices that are tried first

    @property
    def closed(self) -> bool:
        """Whether choice and bound have met, within the gap."""
        return self.choice is not None and self._is_close(self.objective, self.bound)

    def solution(self, status: Literal["optimal", "feasible", "infeasible", "cutoff"]) -> Solution:
        """Returns the result of the search, as the caller gets it."""
        choice, objective, bound, peak = (), math.inf, self.bound, math.inf
        if self.choice is not None and status in ("optimal", "feasible"):
            choice, objective = tuple(self.choice.tolist()), self.objective
            bound = objective if objective - bound <= ROUNDING * objective else bound
            peak = self.problem.peak(self.choice)
        return Solution(status, choice, objective, bound, peak, self.work, self.variables, self.constraints)

    def run(self, free: float | None = None) -> None:
        """Steps 1 to 4 of the module's docstring; step 1 only if its bound is not known."""
        for choice in self.starts:
            self._offer(np.asarray(choice, dtype=np.int64))
        try:
            if free is None:
                self._solve_free()
            else:
                self._raise_bound(free)
            if self.problem.budget is not None and not self.closed:
                self._solve_within()
        except Contradiction:
            self._raise_bound(math.inf)
        except WorkExhausted:
            pass

    def _charge(self, work: int) -> None:
        """Count the work of the next step.

        Raises:
          WorkExhausted: the step exceeds the limit.
        """
        if self.work + work > self.max_work:
            raise WorkExhausted
        self.work += work

    def _solve_free(self) -> None:
        """Ignore memory: the optimum without a budget, else the bound, and the optimum if it fits."""
        restriction, best, fits = consistent(forget_memory(self.problem)), math.inf, False
        messages, whole = self.messages, True
        while not restriction.problem.settled:
            problem = restriction.problem
            ascent, waited = Ascent(problem, messages), 0
            for turn in range(ROUNDS):
                before, lower, sweeps = best - ascent.bound, ascent.bound, SWEEPS << turn // 2
                self._charge(sweeps * sweep_work(problem.links) + choice_work(problem.links))
                ascent.sweep(sweeps)
                choice = descend(problem, ascent.choice(backward=turn % 2 == 1))
                if (seconds := problem.seconds(choice)) < best:
                    best, fits = seconds, self._offer(restriction.lift(choice))
                if whole:
                    self.messages = ascent.messages
                self._raise_bound(min(ascent.bound, best))
                close = best - ascent.bound <= LOOSE * best or ascent.bound - lower <= 0.2 * LOOSE * ascent.bound
                if close and self._is_over_roof():
                    return
                waited = waited + 1 if best - ascent.bound > STALLED * before else 0
                if self._is_close(best, ascent.bound) or waited == PATIENCE:
                    break
            if self.closed or (self._is_close(best, ascent.bound) and not fits):
                return
            slack = ascent.slack()
            restriction, smaller = self._forbid(restriction, ascent.bound, slack, best * (1 + ROUNDING), 0.5)
            messages, whole = ascent.messages[restriction.messages], False
            if not smaller:
                break
        if fits or self.problem.budget is None or restriction.problem.settled:
            self._finish(restriction)

    def _solve_within(self) -> None:
        """Respect the budget."""
        budget = allowance(self.problem.budget or 0.0)
        restriction, price, messages = consistent(self.problem), None, self.messages
        if self.choice is None:
            search = replace(self, problem=replace(self.problem, budget=None))
            try:
                search._flatten(consistent(forget_seconds(search.problem)), enough=budget)
            finally:
                self.work = search.work
            if search.peak_bound > budget * (1 + 1e-6):
                self._raise_bound(math.inf)
                return
            if search.choice is not None:
                self._offer(search.choice)
        while not restriction.problem.settled:
            problem = restriction.problem
            dual = MemoryDual(problem, price, messages)
            if self.choice is not None:
                dual.add(self.objective, self.problem.bytes(self.choice))
            for i in range(STEPS):
                self._offer(restriction.lift(self._step(dual, i)))
                self._raise_bound(dual.bound)
                if self.closed or dual.finished:
                    break
            price = dual.price
            self._bisect_price(restriction, price, dual)
            if self.choice is not None and not self.points:  # begin the memory rows where the best choice is fullest
                self.points = peaks(self.problem.bytes(self.choice), 0.98 * (self.problem.budget or 0.0))
            if self.closed or math.isinf(self.objective):
                break
            self._charge(SWEEPS * sweep_work(problem.links))
            restriction, smaller = self._forbid(restriction, *dual.slack(SWEEPS), self._limit())
            messages = dual.messages[restriction.messages]
            if not smaller:
                break
        if not self.closed:
            self._finish(restriction)

    def minimise_peak(self) -> tuple[float, bool]:
        """Find a choice of the least peak; returns the peak, and whether that is proven minimal within the gap."""
        try:
            self._flatten(consistent(forget_seconds(self.problem)), -math.inf)
        except Contradiction:
            return math.inf, True
        except WorkExhausted:
            pass
        return self.peak, self._is_close(self.peak, self.peak_bound)

    def bound_peak(self) -> tuple[float, float]:
        """Bytes that no peak undercuts, and the least peak met on the way; in a few steps, without integer programs."""
        try:
            restriction = consistent(forget_seconds(self.problem))
        except Contradiction:
            return math.inf, math.inf
        self.peak_bound = float(restriction.problem.base.max(initial=0.0))
        with suppress(WorkExhausted):
            self._price_peak(restriction, FEW_STEPS, -math.inf)
        return self.peak_bound, self.peak

    def _step(self, dual: MemoryDual, number: int) -> np.ndarray:
        """The choice of the next step of a dual."""
        sweeps, links = SWEEPS if number == 0 else 2, dual.problem.links
        self._charge(sweeps * sweep_work(links) + choice_work(links))
        return dual.step(sweeps)

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

    def _flatten(self, restriction: Restriction, enough: float) -> None:
        """Look for a choice of the least peak, or one of at most `enough` bytes; raises `peak_bound`."""
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
        self._flatten_exactly(restriction, enough)

    def _is_flat(self, bound: float, enough: float) -> bool:
        """Whether a bound of the peaks, which is noted, ends the search for a peak of at most `enough`."""
        self.peak_bound = bound = max(self.peak_bound, min(bound, self.peak))
        return self._is_close(self.peak, bound) or self.peak <= enough or bound > enough * (1 + 1e-6) > 0

    def _flatten_exactly(self, restriction: Restriction, enough: float) -> None:
        """The rest of `_flatten`, by linear and integer programs over ever more program points."""
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
          CutoffReached: the cutoff cannot be beaten.
        """
        self.bound = max(self.bound, min(bound, self.ceiling, self.objective))
        if math.isfinite(self.bound) and self.cutoff - self.bound <= ROUNDING * self.bound:
            self.bound = max(self.bound, self.cutoff)
            raise CutoffReached

    def _is_over_roof(self) -> bool:
        return self.choice is not None and math.isfinite(self.roof) and self.problem.peak(self.choice) > self.roof

    def _is_close(self, value: float, bound: float) -> bool:
        return math.isfinite(value) and value - bound <= max(self.gap, ROUNDING) * value

    def _limit(self) -> float:
        """Seconds that a choice must undercut to be of interest: from then on, bounds are valid up to it alone."""
        limit = self.objective * (1 - self.gap / 2 if self.gap > ROUNDING else 1 + ROUNDING)
        self.ceiling = min(self.ceiling, limit)
        return limit

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

    def _finish(self, restriction: Restriction) -> None:
        """Steps 3 and 4: relax, round, forbid, again while that helps, then branch."""
        while True:
            problem = restriction.problem
            if problem.settled:
                choice = np.zeros(problem.links.nodes, dtype=int)
                fits = self._offer(restriction.lift(choice))
                self._raise_bound(problem.seconds(choice) if fits or problem.budget is None else math.inf)
                return
            self._raise_bound(problem.lower_bound)
            if problem.size > LARGEST_LINEAR:
                return
            program = self._build(problem)
            relaxed = self._relax(program)
            self._raise_bound(relaxed.bound)
            if math.isinf(relaxed.bound):
                return
            if relaxed.x is not None:
                start = program.round(relaxed.x)
                self._offer(restriction.lift(start))
                self._offer(restriction.lift(descend(forget_memory(problem), start)))
            self._polish(restriction, relaxed.price)
            if self.closed:
                return
            smaller = False
            if relaxed.reduced_cost is not None and math.isfinite(self.objective):
                slack = program.slack(relaxed.reduced_cost)
                restriction, smaller = self._forbid(restriction, relaxed.bound, slack, self._limit())
            if not smaller and not restriction.problem.settled:
                self._branch(restriction)
                return

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

    def _unit(self, program: LinearProgram) -> float:
        """Seconds that the objective amounts to, at least roughly."""
        guesses = (self.objective, self.bound, float(program.cost.max()))
        return next((guess for guess in guesses if math.isfinite(guess) and guess > 0), 1.0)

    def _relax(self, program: LinearProgram) -> Relaxed:
        """The relaxation with as many memory rows as it takes to satisfy all."""
        budget = program.problem.budget
        while True:
            points = self.points if budget is not None else []
            relaxed = self._solve_program(relax, program, points, self._unit(program))
            if budget is None or relaxed.x is None:
                return relaxed
            new = [t for t in peaks(program.bytes(relaxed.x), budget * (1 + 1e-7)) if t not in points]
            if not new:
                return relaxed
            self.points += new

    def _bisect_price(self, restriction: Restriction, price: np.ndarray, dual: MemoryDual) -> None:
        """Offer choices that are good at multiples of a price of memory: the least that fits is the best."""
        low, high = 0.5, math.inf  # too cheap, and expensive enough
        for _ in range(PRICES if price.any() else 0):
            factor = low * 2 if math.isinf(high) else (low + high) / 2
            self._charge(2 * sweep_work(restriction.problem.links) + choice_work(restriction.problem.links))
            fits = self._offer(restriction.lift(dual.answer(factor * price, 2)))
            low, high = (low, factor) if fits else (factor, high)
            if self.closed or high < 1.02 * low:
                return
        self._polish(restriction, price)

    def _polish(self, restriction: Restriction, price: np.ndarray | None) -> None:
        """Offer the results of descent from the best choice, at lower and lower prices of memory."""
        for factor in POLISH if price is not None and price.any() else (0.0,):
            start = None if self.choice is None else restriction.lower(self.choice)
            if start is None or self.closed:
                return
            problem = restriction.problem
            self._charge(choice_work(problem.links))
            priced = problem if price is None else price_memory(problem, factor * price)
            self._offer(restriction.lift(descend(priced, start)))

    def _branch(self, restriction: Restriction) -> None:
        """Branch and bound, adding memory rows until the choice fits."""
        problem = restriction.problem
        if problem.size > LARGEST_INTEGER:
            return
        program = self._build(problem)
        covers: list[np.ndarray] = []
        while True:
            points = self.points if problem.budget is not None else []
            answer = self._solve_program(branch, program, points, covers, self._unit(program), self.gap)
            self._raise_bound(answer.bound)
            if answer.x is None:
                return
            choice = program.round(answer.x)
            if self._offer(restriction.lift(choice)) or self.closed or problem.budget is None:
                return
            live = problem.bytes(choice)
            new = [t for t in peaks(live, allowance(problem.budget)) if t not in points]
            if not new:  # within the solver's tolerance, but not within the budget
                covers.append(_cover(program, choice, int(live.argmax())))
            self.points += new


def _cover(program: LinearProgram, choice: np.ndarray, point: int) -> np.ndarray:
    """[variables] mask of the strategies that overfill a program point: not all of them can be chosen together."""
    items, links = program.problem.items, program.problem.links
    owner = items.owner[(items.start <= point) & (point <= items.end)]
    involved = np.union1d(owner[owner < links.nodes], links.node[np.isin(links.nodes + links.edge, owner)])
    mask = np.zeros(len(program.cost))
    mask[program.first[involved] + choice[involved]] = 1.0
    return mask
