"""Rare garbage collection while something is planned, in any number of threads.

Planning makes millions of small objects that live until its end. Python's cycle collector traverses them again and
again, which takes a fourth of the CPU time of planning (GPT of 24 layers, 8 devices, five alternating runs: 10.7 s with
the raised threshold, 13.9 s without, in the median) and frees next to nothing.

The thresholds belong to the whole process. The first of several threads that plan at the same time raises them, and the
last one restores them. If the program sets thresholds itself in the meantime, its own stay; a collector that is off, or
that collects less often, is left as it is. `ALPA_LITE_DECLINE=gc` declines all of it (`processes.effects`).
"""

from __future__ import annotations

import gc
import threading

from alpa_lite.processes import effects

MAX_YOUNG_OBJECTS = 10_000_000
"""New objects until the next collection, while something is planned: about a GiB that cycles may hold."""

MIN_COLLECTIONS = 100
"""Collections until surviving objects are traversed again, which takes as long as all of them together."""


class ReducedGc:
    """A context that raises the threshold of the cycle collector until the last thread leaves it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._before = self._raised = gc.get_threshold()

    def __enter__(self) -> None:
        is_allowed = effects.is_allowed("gc")
        with self._lock:
            self._threads += 1
            if self._threads > 1:
                return
            self._before = self._raised = first, second, *rest = gc.get_threshold()
            if gc.isenabled() and 0 < first < MAX_YOUNG_OBJECTS and is_allowed:
                gc.set_threshold(MAX_YOUNG_OBJECTS, max(MIN_COLLECTIONS, second), *rest)
                self._raised = gc.get_threshold()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0 and gc.get_threshold() == self._raised:
                gc.set_threshold(*self._before)


reduced_gc = ReducedGc()
"""The one of this process."""
