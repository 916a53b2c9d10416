"""Says where a job stands that does not go on: what each process waits for, in which step and at which instruction.

JAX's own runtime finds processes that are *lost*: each sends a sign of life, and after `heartbeat_timeout_seconds`
without one (100 s by default; an argument of `jax.distributed.initialize`) every other process is ended from C++, by a
message that names it. If process 0 is lost, the others know at once. What it cannot see are processes that live and do
not go on: one that waits for its data while the others wait for it in a collective, or a deadlock. A `Watchdog` is for
these:

    with alpa_lite.Watchdog(report_after=300, end_after=1800):
        for batch in step.prefetch(loader):
            state, loss = step(state, batch)

A thread of it looks, about once a second, at what the process does: the step that was called last, and of a pipeline
the first instruction that was started and is not done. If that has not changed for `report_after` seconds, it says so
in the log, with what the other processes that stand still have said of themselves, through the key-value store of JAX's
runtime. Nothing is sent while the job goes on. A process that has said nothing is named, too: it is lost, or busy with
something that the others do not wait for.

What follows a step holds weak references to its arrays, and small arrays alone: nothing large lives longer for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import OptionError

logger = logging.getLogger(__name__)

EXIT_CODE = 75
"""Of a process that a watchdog ends: EX_TEMPFAIL of <sysexits.h>, "try again later"; schedulers can restart on it."""

SMALL = 2**16
"""Bytes of an array that is kept until it is computed, to tell whether its instruction is done."""

_KEY = "alpa_lite/watchdog/"
watching: list[Watchdog] = []
"""The watchdogs around what runs now, in whatever thread, the innermost last."""


class Watchdog:
    """Reports a job that stands still, and can end it. Use it by `with`, around the training loop."""

    def __init__(self, report_after: float = 600.0, end_after: float | None = None) -> None:
        """Args:
          report_after: seconds without progress after which the log says where every process stands; again after each
            further so many.
          end_after: seconds without progress after which the process ends, with exit code `EXIT_CODE`, the stacks of
            its threads on standard error, and the report as its last line of the log. None never ends it. Waiting
            between steps counts: give more than the longest evaluation, compilation or save takes.

        Raises:
          OptionError: a time is not positive, or `end_after` is less than `report_after`.
        """
        if not report_after > 0:
            raise OptionError(f"report_after={report_after}: give a positive number of seconds")
        if end_after is not None and end_after < report_after:
            raise OptionError(f"end_after={end_after}: give at least report_after={report_after}, or None")
        self._report_after, self._end_after = report_after, end_after
        self._interval = min(1.0, report_after / 4)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._doing: dict[int, _Doing] = {}  # by thread
        self._last: _Doing | None = None  # the step that was called last, which devices may still be at
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Watchdog:
        self._thread = threading.Thread(target=self._watch, name="alpa_lite watchdog", daemon=True)
        self._thread.start()
        watching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        watching.remove(self)
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def now(self) -> str:
        """What this process does, in words."""
        busy = list(self._doing.values())
        if busy:
            return "; ".join(one.now() for one in busy)
        last = self._last
        if last is None:
            return "before its first step"
        return last.now() if last.is_under_way() else f"between steps, after {last.what}"

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[_Doing]:
        """While its body calls a step."""
        self._counts[name] += 1
        with self.doing(f"step {self._counts[name]} of {name}") as doing:
            self._last = doing
            yield doing

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[_Doing]:
        """While its body does something that may take long."""
        thread = threading.get_ident()
        before, doing = self._doing.get(thread), _Doing(what)
        self._doing[thread] = doing
        try:
            yield doing
        finally:
            if before is None:
                del self._doing[thread]
            else:
                self._doing[thread] = before

    def follow(self, following: Following) -> None:
        """Takes what follows the instructions of the step that this thread calls."""
        doing = self._doing.get(threading.get_ident())
        if doing is not None:
            doing.following = following

    def _watch(self) -> None:
        seen, since, reported = "", time.monotonic(), 0.0
        while not self._stopped.wait(self._interval):
            now = self.now()
            stands = time.monotonic() - since
            if now != seen:
                if reported:
                    _forget()
                seen, since, reported = now, time.monotonic(), 0.0
            elif self._end_after is not None and stands >= self._end_after:
                self._end(seen, stands)
            elif stands >= reported + self._report_after:
                reported = stands
                logger.warning("no progress for %.0f s. %s", stands, self._report(seen, stands))
        if reported:
            _forget()

    def _report(self, now: str, stands: float) -> str:
        """Where every process stands; waits a little for those that notice it later than this one."""
        own, count = jax.process_index(), jax.process_count()
        client = _jax.coordination_client()
        if count == 1 or client is None:
            return f"This process: {now}"
        text = json.dumps({"now": now, "since": time.time() - stands})
        client.key_value_set(f"{_KEY}{own}", text, allow_overwrite=True)
        until = time.monotonic() + 2 * self._interval + 1.0
        said: dict[int, str] = {}
        while len(said) < count and time.monotonic() < until:
            time.sleep(self._interval / 4)
            said = {int(key.rpartition("/")[2]): value for key, value in client.key_value_dir_get(_KEY)}
        return _in_words(own, count, {number: json.loads(value) for number, value in said.items()})

    def _end(self, now: str, stands: float) -> None:
        report = self._report(now, stands)
        faulthandler.dump_traceback(all_threads=True)
        logger.critical("this process ends, for it made no progress for %.0f s. %s", stands, report)
        if jax.process_index() == 0:
            time.sleep(2 * self._interval + 1.0)  # the others lose the store with this process: let them say theirs
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)


class _Doing:
    """Something that a thread does."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.following: Following | None = None
        self._results: list[weakref.ref[Any]] = []

    def returned(self, results: Any) -> None:
        """Takes what a step returned, which devices may still compute."""
        self._results = [weakref.ref(x) for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]

    def is_under_way(self) -> bool:
        """Whether devices are at it."""
        return any(_is_under_way(array) for array in self._results)

    def now(self) -> str:
        return self.what if self.following is None else f"{self.what}, {self.following.now()}"


class Following:
    """Follows a list of instructions while it is issued: called after each with its number and all buffers.

    Whether an instruction is done its arrays tell, as long as they are there. Most are dropped, or donated to what
    reads them, while the list is issued, long before devices get to them: then the instruction is known to be between
    two others. Small arrays are kept until they are computed.
    """

    def __init__(self, describe: Callable[[int], str], made: Sequence[Sequence[int]]) -> None:
        """Args:
        describe: an instruction in words.
        made: the buffers that each instruction makes.
        """
        self._describe, self._made = describe, made
        self._marks: list[list[weakref.ref[Any]]] = []
        self._kept: list[Any] = []

    def __call__(self, number: int, env: Sequence[Any]) -> None:
        """Takes note that an instruction was started; `env` holds all buffers."""
        arrays = [env[i] for i in self._made[number] if env[i] is not None]
        self._marks.append(list(map(weakref.ref, arrays)))
        self._kept += [array for array in arrays if array.nbytes <= SMALL]

    def now(self) -> str:
        """The first instruction that is started and not done, as exactly as is known; or the one that is starting."""
        self._kept = [array for array in self._kept if _is_under_way(weakref.ref(array))]
        issued, before = len(self._marks), -1
        for number in range(issued):
            states = [_is_under_way(mark) for mark in self._marks[number] if _is_there(mark)]
            if any(states):
                return self._between(before, number)
            if states:
                before = number
        if issued < len(self._made):
            return f"starting {self._named(issued)}"
        return "all instructions done"

    def _between(self, done: int, under_way: int) -> str:
        """What is under way, of the instructions after the last that is known to be done, up to one that is not."""
        between = [n for n in range(done + 1, under_way) if self._made[n]]
        since = f", or one of the {len(between)} since {self._named(done)}" if done >= 0 else ", or one before"
        return self._named(under_way) + (since if between else "")

    def _named(self, number: int) -> str:
        return f"instruction {number + 1} of {len(self._made)}, {self._describe(number)}"


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """While its body does something that may take long, such as planning."""
    with watching[-1].doing(what) if watching else contextlib.nullcontext():
        yield


def following(describe: Callable[[int], str], made: Sequence[Sequence[int]]) -> Following | None:
    """What follows the instructions that are about to be issued; None if nobody watches."""
    if not watching:
        return None
    found = Following(describe, made)
    watching[-1].follow(found)
    return found


def _is_there(mark: weakref.ref[Any]) -> bool:
    array = mark()
    return array is not None and not array.is_deleted()


def _is_under_way(mark: weakref.ref[Any]) -> bool:
    """Whether an array that is still there is not computed."""
    array = mark()
    try:
        return array is not None and not array.is_deleted() and not array.is_ready()
    except RuntimeError:  # it was deleted meanwhile
        return False


def _in_words(own: int, count: int, said: dict[int, dict[str, Any]]) -> str:
    lines = [
        f"Process {n}{' (this one)' * (n == own)}, for {time.time() - one['since']:.0f} s: {one['now']}"
        for n, one in sorted(said.items())
    ]
    silent = [str(n) for n in range(count) if n not in said]
    if silent:
        lines.append(f"No word of process {', '.join(silent)}: lost, or going on with something else")
    return "; ".join(lines)


def _forget() -> None:
    """Takes back what this process has said of itself."""
    client = _jax.coordination_client()
    if client is not None and jax.process_count() > 1:
        client.key_value_delete(f"{_KEY}{jax.process_index()}")
