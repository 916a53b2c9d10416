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

_lock = threading.Lock()
_planning = 0
_before: tuple[int, int, int] = (0, 0, 0)
_raised: tuple[int, int, int] | None = None


@contextlib.contextmanager
def seldom() -> Iterator[None]:
    """Raises the threshold of the cycle collector to `SELDOM` until no thread is within this context any more.

    A collector that is off, or that collects less often than that, is left as it is.
    """
    global _planning, _before, _raised
    with _lock:
        _planning += 1
        if _planning == 1:
            _before = gc.get_threshold()
            _raised = None
            if gc.isenabled() and 0 < _before[0] < SELDOM:
                gc.set_threshold(SELDOM, *_before[1:])
                _raised = gc.get_threshold()
    try:
        yield
    finally:
        with _lock:
            _planning -= 1
            if _planning == 0 and _raised is not None and gc.get_threshold() == _raised:
                gc.set_threshold(*_before)
