"""The price of memory: the dual of the budget of a sharding problem.

With a price per byte at each program point, the budget leaves the constraints (Lagrange):

    L(price) = min_choice  seconds(choice) + sum_t price[t] (bytes(choice)[t] - budget)

is a lower bound for every price >= 0. Each choice met on the way says that L is at most its own line; the price where
the lowest of these lines is highest is tried next (Kelley's cutting planes), within a box around the best price so far
that grows with each success and shrinks with each failure. The minimum over choices is bounded by message passing
(`sharding.solver.messages`) and met by descent, so that no step needs an optimiser but for the lines, a linear program
of a handful of variables.

Without a budget the same finds the least peak: seconds are zero and prices sum to one.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from alpa_lite.passes.sharding.solver.descent import descend
from alpa_lite.passes.sharding.solver.messages import Ascent
from alpa_lite.passes.sharding.solver.problem import Problem, forget_seconds, price_memory

REACH, WIDER = 0.002, 3.0
"""Half the width of the first box, a price at which the bytes over the budget cost this share of all seconds, and the
factor by which a success widens it."""


class MemoryDual:
    """Prices of memory, improved by `step`.

    Attributes:
      bound: seconds that no choice within the budget undercuts; without a budget, bytes that no peak undercuts.
      price: [points] the price that gives it, in seconds per byte.
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
        self._ascending: Ascent | None = None
        self._begin = messages
        self._points: list[int] = []
        self._seconds: list[float] = []
        self._bytes: list[np.ndarray] = []
        self._reach = REACH
        self._stalled = 0
        self._backward = True
        self.finished = False

    @property
    def messages(self) -> np.ndarray:
        """Those of the last price, as of `Ascent`."""
        assert self._ascending is not None
        return self._ascending.messages

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
        """A choice that is good at a price, which need not be a better one."""
        ascent = self._ascent(price, sweeps)
        return descend(ascent.problem, ascent.choice())

    def add(self, seconds: float, live: np.ndarray) -> None:
        """Note the line of a choice, if it is allowed: its seconds, and its bytes at each program point."""
        if not np.isfinite(seconds):
            return
        self._seconds.append(seconds)
        self._bytes.append(live)
        self._points += [t for t in peaks(self._bytes[-1], self.limit, 4) if t not in self._points]

    def slack(self, sweeps: int) -> tuple[float, tuple[np.ndarray, np.ndarray]]:
        """A bound, and how far above it each strategy and cell is at the least: `Ascent.slack` at the best price."""
        ascent = self._ascent(self.price, sweeps)
        bound = self._bound_of(ascent, self.price)
        return bound, ascent.slack()

    def _ascent(self, price: np.ndarray, sweeps: int) -> Ascent:
        """Message passing at a price, beginning with the messages of the last one."""
        priced = price_memory(self.problem, price)
        if self._ascending is None:
            self._ascending = Ascent(priced, self._begin)
        else:
            self._ascending.reprice(priced)
        self._ascending.sweep(sweeps)
        return self._ascending

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


def peaks(live: np.ndarray, limit: float, most: int = 16) -> list[int]:
    """The fullest program points above a limit that are local maxima, the first point of each plateau."""
    padded = np.concatenate([[-np.inf], live, [-np.inf]])
    local = np.flatnonzero((live > limit) & (live > padded[:-2]) & (live >= padded[2:]))
    return [int(t) for t in local[np.argsort(-live[local], kind="stable")][:most]]
