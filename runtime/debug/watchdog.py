"""Reports where a job stands that makes no progress: what each process waits for, in which step and instruction.

JAX's own runtime ends the others of processes that are *lost*, after `heartbeat_timeout_seconds`. It cannot detect
processes that live and make no progress: one that waits for its data while the others wait for it in a collective, or a
deadlock. This can:

    with alpa_lite.Watchdog(report_after=300, end_after=1800):
        for batch in step.prefetch(loader):
            state, loss = step(state, batch)

A thread of it polls, about once a second, the activity of the process: the step that was called last, and of a pipeline
the first instruction that was started and is not done. If that has not changed for `report_after` seconds, the thread
posts it for the other processes (`processes.channel`), and logs it with what those that stand still have posted. A
process that has posted nothing is lost, or busy with something that the others do not wait for.

Trackers hold weak references to the arrays of a step, and small arrays alone: nothing large lives longer for them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from alpa_lite.errors import OptionError
from alpa_lite.processes import effects
from alpa_lite.processes.channel import Board

logger = logging.getLogger(__name__)

EXIT_CODE = 75
"""Of a process that a watchdog ends: EX_TEMPFAIL of <sysexits.h>, "try again later"; schedulers can restart on it."""

MAX_KEPT_BYTES = 2**16
"""Bytes of an array that is kept until it is computed, to tell whether its instruction is done."""

active: list[Watchdog] = []
"""The watchdogs around the running code, in any thread, the innermost last."""


class Watchdog:
    """Reports a job that makes no progress, and can end it. Use it by `with`, around the training loop."""

    def __init__(self, report_after: float = 600.0, end_after: float | None = None) -> None:
        """Args:
          report_after: seconds without progress after which the log says where every process stands; repeated after
            as many seconds again.
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
        self._thread = threading.Thread(target=self._watch, name="alpa_lite watchdog", daemon=True)
        self._activities: dict[int, Activity] = {}  # by thread
        self._last: Activity | None = None  # the step that was called last, which devices may still compute
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        active.remove(self)
        self._stopped.set()
        self._thread.join(timeout=5.0)

    def describe(self) -> str:
        """Returns a description of the current activities of this process."""
        current = list(self._activities.values())
        if current:
            return "; ".join(one.describe() for one in current)
        last = self._last
        if last is None:
            return "before its first step"
        return last.describe() if last.is_running() else f"between steps, after {last.name}"

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Activity]:
        """Records a call of a step for as long as its body runs."""
        self._counts[name] += 1
        with self.activity(f"step {self._counts[name]} of {name}") as activity:
            self._last = activity
            yield activity

    @contextlib.contextmanager
    def activity(self, name: str) -> Iterator[Activity]:
        """Records an activity of this thread that may take long, for as long as its body runs."""
        thread = threading.get_ident()
        outer = {thread: self._activities[thread]} if thread in self._activities else {}
        self._activities[thread] = activity = Activity(name)
        try:
            yield activity
        finally:
            del self._activities[thread]
            self._activities |= outer

    def _watch(self) -> None:
        board = Board("stalled")
        seen, since, reported = "", time.monotonic(), 0.0
        while not self._stopped.wait(self._interval):
            now = self.describe()
            seconds = time.monotonic() - since
            if now != seen:
                if reported:
                    board.post(None)
                seen, since, reported = now, time.monotonic(), 0.0
            elif self._end_after is not None and seconds >= self._end_after:
                report = self._report(board, seen, seconds)
                faulthandler.dump_traceback(all_threads=True)
                logger.critical("this process ends, for it made no progress for %.0f s. %s", seconds, report)
                effects.exit_process(EXIT_CODE, 2 * self._interval + 1.0 if jax.process_index() == 0 else 0.0)
            elif seconds >= reported + self._report_after:
                reported = seconds
                logger.warning("no progress for %.0f s. %s", seconds, self._report(board, seen, seconds))
        if reported:
            board.post(None)

    def _report(self, board: Board, now: str, seconds: float) -> str:
        """Returns where every process stands; waits a little for those that notice it later than this one."""
        own, count = jax.process_index(), jax.process_count()
        if count == 1:
            return f"This process: {now}"
        board.post({"now": now, "since": time.time() - seconds})
        until = time.monotonic() + 2 * self._interval + 1.0
        posted: dict[int, Any] = {}
        while len(posted) < count and time.monotonic() < until:
            time.sleep(self._interval / 4)
            posted = board.poll()
        lines = [
            f"Process {n}{' (this one)' * (n == own)}, for {time.time() - one['since']:.0f} s: {one['now']}"
            for n, one in sorted(posted.items())
        ]
        silent = [str(n) for n in range(count) if n not in posted]
        if silent:
            lines.append(f"No report of process {', '.join(silent)}: lost, or going on with something else")
        return "; ".join(lines)


class Activity:
    """An activity of a thread; of a step that is a pipeline, with the instructions that it issues.

    Whether an instruction is done is known from its arrays, as long as they exist. Most are dropped, or donated to what
    reads them, long before devices get to them: then the instruction is known to be between two others. Small arrays
    are kept until they are computed.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._results: list[weakref.ref[Any]] = []
        self._name_instruction: Callable[[int], str] = str
        self._outputs: Sequence[Sequence[int]] = ()  # the buffers that each instruction makes
        self._arrays: list[list[weakref.ref[Any]]] = []  # of each that was started
        self._kept: list[Any] = []

    def record_results(self, results: Any) -> None:
        """Records the results of a step, which devices may still compute."""
        self._results = [weakref.ref(x) for x in jax.tree.leaves(results) if isinstance(x, jax.Array)]

    def is_running(self) -> bool:
        """Returns whether devices still compute its results."""
        return any(map(_is_pending, self._results))

    def record_instruction(self, number: int, env: Sequence[Any]) -> None:
        """Records that an instruction was started; `env` holds all buffers."""
        arrays = [env[i] for i in self._outputs[number] if env[i] is not None]
        self._arrays.append(list(map(weakref.ref, arrays)))
        self._kept += [array for array in arrays if array.nbytes <= MAX_KEPT_BYTES]

    def describe(self) -> str:
        """Returns its name, and the first instruction that is started and not done, as exactly as is known."""
        if not self._outputs:
            return self.name
        self._kept = [array for array in self._kept if _is_pending(weakref.ref(array))]
        issued, done = len(self._arrays), -1
        for number in range(issued):
            pending = [state for state in map(_is_pending, self._arrays[number]) if state is not None]
            if any(pending):
                between = sum(bool(self._outputs[n]) for n in range(done + 1, number))
                since = f", or one of the {between} since {self._instruction(done)}" if done >= 0 else ", or one before"
                return f"{self.name}, {self._instruction(number)}{since if between else ''}"
            if pending:
                done = number
        is_issuing = issued < len(self._outputs)
        return f"{self.name}, " + (f"starting {self._instruction(issued)}" if is_issuing else "all instructions done")

    def _instruction(self, number: int) -> str:
        return f"instruction {number + 1} of {len(self._outputs)}, {self._name_instruction(number)}"


@contextlib.contextmanager
def activity(name: str) -> Iterator[None]:
    """Records an activity that may take long, such as planning, with the innermost watchdog if there is one."""
    with active[-1].activity(name) if active else contextlib.nullcontext():
        yield


def track_instructions(name: Callable[[int], str], outputs: Sequence[Sequence[int]]) -> Callable[..., None]:
    """Tracks the instructions that this thread is about to issue in the step that it calls.

    Args:
      name: an instruction in words.
      outputs: the buffers that each instruction makes.

    Returns:
      A function to call after each, with its number and all buffers.
    """
    activity = active[-1]._activities.get(threading.get_ident()) or Activity("")
    activity._name_instruction, activity._outputs = name, outputs
    return activity.record_instruction


def _is_pending(reference: weakref.ref[Any]) -> bool | None:
    """Returns whether an array is not computed yet; None of one that is gone."""
    array = reference()
    try:
        return None if array is None or array.is_deleted() else not array.is_ready()
    except RuntimeError:  # it was deleted meanwhile
        return None
