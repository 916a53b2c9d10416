"""Rare garbage collection while something is planned, in any number of threads.

Planning makes millions of small objects that live until its end. Python's cycle collector traverses them again and
again, which takes a fourth of the CPU time of planning (GPT of 24 layers, 8 devices, five alternating runs: 10.7 s with
the raised threshold, 13.9 s without, in the median) and frees next to nothing.

The thresholds belong to the whole process. The first of several threads that plan at the same time raises them, and the
last one restores them. If the program sets thresholds itself in the meantime, its own stay; a collector that is off, or
that collects less often, is left as it is. `ALPA_LITE_DECLINE=gc` declines all of it (`processes.effects`).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from alpa_lite.processes import effects

MAX_YOUNG_OBJECTS = 10_000_000
"""New objects until the next collection, while something is planned: about a GiB that cycles may hold."""

MIN_COLLECTIONS = 100
"""Collections until surviving objects are traversed again, which takes as long as all of them together."""

_lock = threading.Lock()
_planning = 0
_before: tuple[int, int, int] = 0, 0, 0
_raised: tuple[int, int, int] | None = None


@contextlib.contextmanager
def reduced_gc() -> Iterator[None]:
    """Raises the threshold of the cycle collector to `MAX_YOUNG_OBJECTS` until the last thread leaves this context."""
    global _planning, _before, _raised
    allowed = effects.is_allowed("gc")
    with _lock:
        _planning += 1
        if _planning == 1:
            _before, _raised = gc.get_threshold(), None
            if gc.isenabled() and 0 < _before[0] < MAX_YOUNG_OBJECTS and allowed:
                gc.set_threshold(MAX_YOUNG_OBJECTS, max(MIN_COLLECTIONS, _before[1]), *_before[2:])
                _raised = gc.get_threshold()
    try:
        yield
    finally:
        with _lock:
            _planning -= 1
            if _planning == 0 and gc.get_threshold() == _raised:
                gc.set_threshold(*_before)
