"""Seconds that a search may take, divided over what it tries.

One `Deadline` begins with each compilation (`compiler.compile_step`), and its children, made by `within`, divide it:
each ends by itself or with its parent, whichever is earlier. Passes are given a deadline, or seconds of one, and keep
no clock of their own.

A search also ends where it can no longer be repaid. Let g be the seconds a step that what is left to be searched may
save at most: those of the best plan less a lower bound. Since it began, or a plan is known, a search takes no longer
than

    FEW + STEPS * g

(`Deadline.patience`). As plans get better and bounds closer, g falls, and with it what may still be spent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since some moment."""


STEPS = 100
"""How many steps may win back what planning takes: one in a hundred of a short training run, of 10,000 steps."""

FEW = 1.0
"""Seconds that a search may take whatever it can win: a plan that is proven is worth as much to who reads it."""


class OutOfTime(Exception):
    """The time is spent, and what was interrupted has nothing to return.

    Attributes:
      little: whether it is spent since more could not be won back (`Deadline.little`), not for want of time.
    """

    def __init__(self, why: str = "", little: bool = False) -> None:
        """`why` says what was not searched, if that is known."""
        super().__init__(why)
        self.little = little


class Deadline:
    """A limit of wall-clock seconds that begins now. What one attempt leaves over is there for the next ones.

    Attributes:
      seconds: from its beginning to its end.
      little: whether it ends there since more could not be won back, not for want of time.
    """

    def __init__(
        self, seconds: float = math.inf, clock: Clock = time.perf_counter, begun: float | None = None,
        little: bool = False,
    ) -> None:  # fmt: skip
        """`clock` says what time it is; tests set it. A search that is limited began when it said `begun`, or now."""
        self.seconds, self.little, self._clock = seconds, little, clock
        self._end = clock() + seconds
        self._begun = begun if begun is not None else clock() if math.isfinite(seconds) else math.inf

    @property
    def left(self) -> float:
        """Seconds until the end; 0 after it."""
        return max(self._end - self._clock(), 0.0)

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - (self._end - self.seconds) if math.isfinite(self.seconds) else 0.0

    @property
    def over(self) -> bool:
        """Whether nothing is left."""
        return self.left <= 0

    def share(self, parts: float, reserve: float = 0.0) -> float:
        """Seconds for the first of so many equal parts of what is left, less a reserve; none if that is spent."""
        return max(self.left - reserve, 0.0) / parts

    def within(self, seconds: float, least: float = 0.0) -> Deadline:
        """A limit that begins now, of so many seconds or of what is left, whichever is less; with the same clock.

        Args:
          seconds: at most; as many as are left, if that is less.
          least: even where fewer are left, and the limit is exceeded by it.
        """
        return Deadline(max(min(seconds, self.left), least), self._clock, self._begun, self.little)

    def repaying(self, seconds: float) -> Deadline:
        """As `within`, for what repays no more than so many seconds."""
        return Deadline(min(seconds, self.left), self._clock, self._begun, self.little or seconds < self.left)

    def search(self, before: Deadline | None = None) -> Deadline:
        """The same limit for a search that begins now, or that began with the deadline of another."""
        return Deadline(self.left, self._clock, None if before is None else before._begun, self.little)

    def patience(self, gain: float) -> float:
        """Seconds that the search may go on for what can save `gain` seconds a step at most; without a limit, all."""
        return min(self.left, max(FEW + worthwhile(gain) - (self._clock() - self._begun), 0.0))

    def check(self) -> None:
        """Raises OutOfTime if nothing is left."""
        if self.over:
            raise OutOfTime


def worthwhile(gain: float) -> float:
    """Seconds of planning that `STEPS` steps win back, each of which takes at most so many seconds less then."""
    return STEPS * gain
