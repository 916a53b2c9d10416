"""The effects of the library on the process that uses it, and how a program declines them.

`docs/guide/process-effects.md` describes each of `EFFECTS`, with what it was measured to be worth. Planning has one of
them: it makes millions of small objects that live until its end, which Python's cycle collector would traverse again
and again, so `reduced_gc` has it run rarely.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time

from alpa_lite.errors import OptionError

DECLINE_VARIABLE = "ALPA_LITE_DECLINE"
"""The environment variable that names declined effects, separated by commas; `all` declines all of them."""

EFFECTS = ("gc", "jax", "excepthook", "atexit", "exit")

MAX_YOUNG_OBJECTS = 10_000_000
"""New objects until the next collection, while something is planned: about a GiB that cycles may hold."""

MIN_COLLECTIONS = 100
"""Collections until surviving objects are traversed again, which takes as long as all of them together."""


def is_allowed(effect: str) -> bool:
    """Returns whether the program has not declined one of `EFFECTS`.

    Raises:
      OptionError: the environment variable names an unknown effect.
    """
    given = os.environ.get(DECLINE_VARIABLE, "")
    declined = {name.strip() for name in given.split(",") if name.strip()}
    if not declined <= {*EFFECTS, "all"}:
        raise OptionError(f"{DECLINE_VARIABLE}={given!r}: give some of {', '.join(EFFECTS)}, or all")
    return not declined & {effect, "all"}


def exit_process(code: int, delay: float) -> None:
    """Ends the process at once, from any thread: no `finally` and no `atexit` runs.

    Args:
      delay: seconds to wait first. Process 0 takes the key-value store with it, so others may report until then.
    """
    time.sleep(delay)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class ReducedGc(contextlib.ContextDecorator):
    """A context that raises the threshold of the cycle collector until the last thread leaves it.

    A function that it decorates has released its locals by then: the collector need not traverse them.

    If the program sets thresholds itself in the meantime, its own stay; a collector that is off, or that collects less
    often, is left as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0
        self._before = self._raised = gc.get_threshold()

    def __enter__(self) -> None:
        allowed = is_allowed("gc")
        with self._lock:
            self._threads += 1
            if self._threads > 1:
                return
            self._before = self._raised = first, second, *rest = gc.get_threshold()
            if gc.isenabled() and 0 < first < MAX_YOUNG_OBJECTS and allowed:
                gc.set_threshold(MAX_YOUNG_OBJECTS, max(MIN_COLLECTIONS, second), *rest)
                self._raised = gc.get_threshold()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= 1
            if self._threads == 0 and gc.get_threshold() == self._raised:
                gc.set_threshold(*self._before)


reduced_gc = ReducedGc()
"""The one of this process."""
