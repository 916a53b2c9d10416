"""Seldom collecting cycles while something is planned, in any number of threads.

Planning makes millions of small objects that live until its end. Python's cycle collector looks through them again and
again, which takes a fifth of the planning time and frees next to nothing.

The collector's thresholds belong to the whole process. The first of several threads that plan at the same time raises
them, and the last one restores them; a count under a lock says which these are. If the program sets thresholds itself
in the meantime, its own stay.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

SELDOM = 100_000
"""Allocations between two collections while something is planned: more than a hundred times Python's own number."""


OLDER = 100
"""Collections until what survived them is looked through again, which takes as long as all of them together."""


class _Thresholds:
    """The collector's thresholds before the first of the threads that plan raised them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.planning = 0
        self.before: tuple[int, int, int] = (0, 0, 0)
        self.raised: tuple[int, int, int] | None = None

    def enter(self) -> None:
        """One more thread plans: the first raises the thresholds."""
        with self.lock:
            self.planning += 1
            if self.planning == 1:
                self.before, self.raised = gc.get_threshold(), None
                if gc.isenabled() and 0 < self.before[0] < SELDOM:
                    gc.set_threshold(SELDOM, max(OLDER, self.before[1]), *self.before[2:])
                    self.raised = gc.get_threshold()

    def leave(self) -> None:
        """One thread less plans: the last restores them."""
        with self.lock:
            self.planning -= 1
            if self.planning == 0 and self.raised is not None and gc.get_threshold() == self.raised:
                gc.set_threshold(*self.before)


_thresholds = _Thresholds()


@contextlib.contextmanager
def seldom() -> Iterator[None]:
    """Raises the threshold of the cycle collector to `SELDOM` until no thread is within this context any more.

    A collector that is off, or that collects less often than that, is left as it is.
    """
    _thresholds.enter()
    try:
        yield
    finally:
        _thresholds.leave()
