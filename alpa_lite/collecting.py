"""Seldom collecting cycles while something is planned, in any number of threads.

Planning makes millions of small objects that live until its end. Python's cycle collector looks through them again and
again, which takes a fifth of the planning time and frees next to nothing. Nor does it look through them once planning
is over: what there is then belongs to the oldest generation, as if it had survived, and is looked through with that,
or here, once several plans have left `SELDOM` objects.

The collector's thresholds belong to the whole process. The first of several threads that plan at the same time raises
them, and the last one restores them; a count under a lock says which these are. If the program sets thresholds itself
in the meantime, its own stay.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

SELDOM = 10_000_000
"""Objects that there are more of than at the last collection until the next one, while something is planned.

They are about a GiB: what cycles may hold at most before they are freed. A GPT of 48 layers planned for 64 devices
takes fewer, and 1.02 GiB in all, where a collection every 100,000 objects takes 0.99 GiB, and 4.0 of 50 s.
"""

FROZEN = 1_000
"""Objects that are frozen before a program freezes any: 375 of Python 3.12's own, none of 3.11's."""

OLDER = 100
"""Collections until what survived them is looked through again, which takes as long as all of them together."""


class _Thresholds:
    """The collector's thresholds before the first of the threads that plan raised them.

    `left` counts objects that plans have left since they were looked through here.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.planning, self.left = 0, 0
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
                self.left += gc.get_count()[0]
                if self.left > SELDOM:
                    gc.collect()
                    self.left = 0
                elif gc.get_freeze_count() < FROZEN:  # else what the program has frozen would be thawed
                    gc.freeze()
                    gc.unfreeze()
                gc.set_threshold(*self.before)


_thresholds = _Thresholds()


@contextlib.contextmanager
def seldom() -> Iterator[None]:
    """Raises the threshold of the cycle collector to `SELDOM` until no thread is within this context any more.

    Then all objects become old ones, unless the program has frozen some. A collector that is off, or that collects less
    often than that, is left as it is.
    """
    _thresholds.enter()
    try:
        yield
    finally:
        _thresholds.leave()
