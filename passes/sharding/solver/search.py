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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.passes.sharding.solver import work
from alpa_lite.passes.sharding.solver.memory import ROUNDING, STEPS, SWEEPS, MemoryDual, PeakSearch, find_peaks
from alpa_lite.passes.sharding.solver.messages import Ascent
from alpa_lite.passes.sharding.solver.problem import allowance, descend, forget_memory, price_memory
from alpa_lite.passes.sharding.solver.program import LinearProgram, RelaxedSolution, branch, solve_relaxation
from alpa_lite.passes.sharding.solver.restrict import Contradiction, Restriction, make_consistent
from alpa_lite.passes.sharding.solver.work import WorkExhausted

ROUNDS = 10  # with `SWEEPS` sweeps each, twice as many every second round
PRICES, POLISH = 8, (1.0, 0.5, 0.2, 0.0)  # multiples of a price that are tried, and of it for the best choice
STALLED, PATIENCE = 0.98, 3  # rounds that leave more than this share of the gap, and how many of them end a search
LOOSE = 5e-3  # the gap at which a bound is good enough, where the choice does not matter


class CutoffReached(Exception):
    """No choice is below the cutoff."""


@dataclass
class Search(PeakSearch):
    """The fastest choice so far, the bound so far, and the steps that improve them."""

    cutoff: float = math.inf
    ceiling: float = math.inf  # choices at least this expensive may have been forbidden
    roof: float = math.inf  # bytes above which a choice is of no interest but for its bound
    points: list[int] = field(default_factory=list)
    messages: np.ndarray | None = None  # of the consistent problem, where there are any
    starts: list[Sequence[int] | np.ndarray] = field(default_factory=list)  # choices that are tried first

    @property
    def is_closed(self) -> bool:
        """Whether choice and bound have met, within the gap."""
        return self.choice is not None and self._is_close(self.objective, self.bound)

    def run(self, free: float | None = None) -> None:
        """Steps 1 to 4 of the module's docstring; step 1 only if its bound is not known."""
        for choice in self.starts:
            self._offer(np.asarray(choice, dtype=np.int64))
        try:
            if free is None:
                self._solve_free()
            else:
                self._raise_bound(free)
            if self.problem.budget is not None and not self.is_closed:
                self._solve_within()
        except Contradiction:
            self._raise_bound(math.inf)
        except WorkExhausted:
            pass

    def _solve_free(self) -> None:
        """Ignore memory: the optimum without a budget, else the bound, and the optimum if it fits."""
        restriction, best, fits = make_consistent(forget_memory(self.problem)), math.inf, False
        messages, whole = self.messages, True
        while not restriction.problem.is_settled:
            problem = restriction.problem
            ascent, waited = Ascent(problem, messages), 0
            for turn in range(ROUNDS):
                before, lower, sweeps = best - ascent.bound, ascent.bound, SWEEPS << turn // 2
                self._charge(sweeps * work.sweep_work(problem.links) + work.choice_work(problem.links))
                ascent.sweep(sweeps)
                choice = descend(problem, ascent.choice(backward=turn % 2 == 1))
                if (seconds := problem.seconds(choice)) < best:
                    best, fits = seconds, self._offer(restriction.lift(choice))
                if whole:
                    self.messages = ascent.messages
                self._raise_bound(min(ascent.bound, best))
                close = best - ascent.bound <= LOOSE * best or ascent.bound - lower <= 0.2 * LOOSE * ascent.bound
                if close and self.choice is not None and self.problem.peak(self.choice) > self.roof:
                    return
                waited = waited + 1 if best - ascent.bound > STALLED * before else 0
                if self._is_close(best, ascent.bound) or waited == PATIENCE:
                    break
            if self.is_closed or (self._is_close(best, ascent.bound) and not fits):
                return
            slack = ascent.slack()
            restriction, smaller = self._forbid(restriction, ascent.bound, slack, best * (1 + ROUNDING), 0.5)
            messages, whole = ascent.messages[restriction.messages], False
            if not smaller:
                break
        if fits or self.problem.budget is None or restriction.problem.is_settled:
            self._finish(restriction)

    def _solve_within(self) -> None:
        """Respect the budget."""
        budget = allowance(self.problem.budget or 0.0)
        restriction, price, messages = make_consistent(self.problem), None, self.messages
        if self.choice is None:
            search = PeakSearch(replace(self.problem, budget=None), self.gap, self.max_work, self.work)
            try:
                search.find(enough=budget)
            finally:
                self.work = search.work
            if search.peak_bound > budget * (1 + 1e-6):
                self._raise_bound(math.inf)
                return
            if search.choice is not None:
                self._offer(search.choice)
        while not restriction.problem.is_settled:
            problem = restriction.problem
            dual = MemoryDual(problem, price, messages)
            if self.choice is not None:
                dual.add(self.objective, self.problem.bytes(self.choice))
            for i in range(STEPS):
                self._offer(restriction.lift(self._step(dual, i)))
                self._raise_bound(dual.bound)
                if self.is_closed or dual.finished:
                    break
            price = dual.price
            self._bisect_price(restriction, price, dual)
            if self.choice is not None and not self.points:  # begin the memory rows where the best choice is fullest
                self.points = find_peaks(self.problem.bytes(self.choice), 0.98 * (self.problem.budget or 0.0))
            if self.is_closed or math.isinf(self.objective):
                break
            self._charge(SWEEPS * work.sweep_work(problem.links))
            restriction, smaller = self._forbid(restriction, *dual.slack(SWEEPS), self._limit())
            messages = None if dual.messages is None else dual.messages[restriction.messages]
            if not smaller:
                break
        if not self.is_closed:
            self._finish(restriction)

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

    def _limit(self) -> float:
        """Seconds that a choice must undercut to be of interest: from then on, bounds are valid up to it alone."""
        limit = self.objective * (1 - self.gap / 2 if self.gap > ROUNDING else 1 + ROUNDING)
        self.ceiling = min(self.ceiling, limit)
        return limit

    def _finish(self, restriction: Restriction) -> None:
        """Steps 3 and 4: relax, round, forbid, again while that helps, then branch."""
        while True:
            problem = restriction.problem
            if problem.is_settled:
                choice = np.zeros(problem.links.nodes, dtype=int)
                fits = self._offer(restriction.lift(choice))
                self._raise_bound(problem.seconds(choice) if fits or problem.budget is None else math.inf)
                return
            self._raise_bound(problem.lower_bound)
            if problem.size > work.LARGEST_LINEAR:
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
            if self.is_closed:
                return
            smaller = False
            if relaxed.reduced_cost is not None and math.isfinite(self.objective):
                slack = program.slack(relaxed.reduced_cost)
                restriction, smaller = self._forbid(restriction, relaxed.bound, slack, self._limit())
            if not smaller and not restriction.problem.is_settled:
                self._branch(restriction)
                return

    def _unit(self, program: LinearProgram) -> float:
        """Returns seconds that the objective amounts to, at least roughly."""
        guesses = (self.objective, self.bound, float(program.cost.max()))
        return next((guess for guess in guesses if math.isfinite(guess) and guess > 0), 1.0)

    def _relax(self, program: LinearProgram) -> RelaxedSolution:
        """Returns the relaxation with as many memory rows as it takes to satisfy all."""
        budget = program.problem.budget
        while True:
            points = self.points if budget is not None else []
            relaxed = self._solve_program(solve_relaxation, program, points, self._unit(program))
            if budget is None or relaxed.x is None:
                return relaxed
            new = [t for t in find_peaks(program.bytes(relaxed.x), budget * (1 + 1e-7)) if t not in points]
            if not new:
                return relaxed
            self.points += new

    def _bisect_price(self, restriction: Restriction, price: np.ndarray, dual: MemoryDual) -> None:
        """Offer choices that are good at multiples of a price of memory: the least that fits is the best."""
        low, high = 0.5, math.inf  # too cheap, and expensive enough
        for _ in range(PRICES if price.any() else 0):
            factor = low * 2 if math.isinf(high) else (low + high) / 2
            self._charge(2 * work.sweep_work(restriction.problem.links) + work.choice_work(restriction.problem.links))
            fits = self._offer(restriction.lift(dual.answer(factor * price, 2)))
            low, high = (low, factor) if fits else (factor, high)
            if self.is_closed or high < 1.02 * low:
                return
        self._polish(restriction, price)

    def _polish(self, restriction: Restriction, price: np.ndarray | None) -> None:
        """Offer the results of descent from the best choice, at lower and lower prices of memory."""
        for factor in POLISH if price is not None and price.any() else (0.0,):
            start = None if self.choice is None else restriction.lower(self.choice)
            if start is None or self.is_closed:
                return
            problem = restriction.problem
            self._charge(work.choice_work(problem.links))
            priced = problem if price is None else price_memory(problem, factor * price)
            self._offer(restriction.lift(descend(priced, start)))

    def _branch(self, restriction: Restriction) -> None:
        """Branch and bound, adding memory rows until the choice fits."""
        problem = restriction.problem
        if problem.size > work.LARGEST_INTEGER:
            return
        program = self._build(problem)
        covers: list[np.ndarray] = []
        while True:
            points = self.points if problem.budget is not None else []
            answer = self._solve_program(
                branch, program, points, covers, self._unit(program), self.gap, least=program.integer_work
            )
            self._raise_bound(answer.bound)
            if answer.x is None:
                return
            choice = program.round(answer.x)
            if self._offer(restriction.lift(choice)) or self.is_closed or problem.budget is None:
                return
            live = problem.bytes(choice)
            new = [t for t in find_peaks(live, allowance(problem.budget)) if t not in points]
            if not new:  # within the solver's tolerance, but not within the budget
                covers.append(_cover(program, choice, int(live.argmax())))
            self.points += new


def _cover(program: LinearProgram, choice: np.ndarray, point: int) -> np.ndarray:
    """[variables] mask of the strategies that overfill a program point: not all of them can be chosen together."""
    (entry, start, end, _), links = program.problem.items, program.problem.links
    owner = np.searchsorted(links.begin, entry[(start <= point) & (point <= end)], side="right") - 1
    involved = np.union1d(owner[owner < links.nodes], links.node[np.isin(links.nodes + links.edge, owner)])
    mask = np.zeros(len(program.cost))
    mask[links.first[involved] + choice[involved]] = 1.0
    return mask
