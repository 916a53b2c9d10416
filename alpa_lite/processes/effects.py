"""The effects of the library on the process that uses it, and how a program declines them.

`docs/guide/process-effects.md` describes each of `EFFECTS`, with what it was measured to be worth. Planning has two of
them. It makes millions of small objects that live until its end, which Python's cycle collector would traverse again
and again: `reduced_gc` has it run rarely. And it calls functions at many depths: since 3.11 CPython keeps their frames
in chunks of 16 KiB, asks the operating system for a chunk where the next frame does not fit the last one, and returns
it when that frame is left (`push_chunk`, `_PyThreadState_PopFrame` in its `Python/pystate.c`). A function that is
called at the end of a chunk, again and again, pays 10 us a call for that instead of 0.1; which function this is depends
on how deep the caller is. `run_in_large_stack_chunk` has planning run in one large chunk.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from alpa_lite.errors import OptionError

P = ParamSpec("P")
R = TypeVar("R")

DECLINE_VARIABLE = "ALPA_LITE_DECLINE"
"""The environment variable that names declined effects, separated by commas; `all` declines all of them."""

EFFECTS = ("gc", "jax", "stack", "excepthook", "atexit", "exit")

MAX_YOUNG_OBJECTS = 10_000_000
"""New objects until the next collection, while something is planned: about a GiB that cycles may hold."""

MIN_COLLECTIONS = 100
"""Collections until surviving objects are traversed again, which takes as long as all of them together."""

FRAME_WORDS = 2**16 + 1
"""Words of the frame, just over half of a chunk of 1 MiB. The pages are not touched, so that they take no memory.

A chunk is as large as its first frame needs, rounded up to a power of two. The half MiB that is left is enough for
frames as deep as Python's own limit of 1,000 calls, with 60 words each.
"""


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


def run_in_large_stack_chunk(function: Callable[P, R]) -> Callable[P, R]:
    """Returns the same function, with half a MiB in one chunk for its frame and those of all that it calls.

    For functions that take milliseconds: a call takes some 10 us longer.
    """

    def wide(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    code = wide.__code__.replace(co_stacksize=FRAME_WORDS)
    patched = types.FunctionType(code, wide.__globals__, wide.__name__, None, wide.__closure__)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (patched if is_allowed("stack") else function)(*args, **kwargs)

    return call
