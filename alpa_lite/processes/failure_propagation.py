"""Terminates processes that would otherwise hang in a collective after another process failed.

JAX's runtime detects a process that is lost, not one that raised alone, left its program, or runs another program than
the others. So every process posts its failures and its call log (`divergence`), and a thread of every process polls
them. After a failure of another process this one ends within `GRACE_SECONDS`, with an error of its own or with exit
code 1, and its last line of the log names the process and the error. `docs/processes.md` describes each kind of
failure, and `processes.effects` how a program declines the consequences.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import sys
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax

from alpa_lite import _jax
from alpa_lite.errors import ProcessError
from alpa_lite.processes import effects
from alpa_lite.processes.channel import Board
from alpa_lite.processes.divergence import CallLog, ProgramPoint, has_passed

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Seconds between two polls."""

GRACE_SECONDS = 10.0
"""Seconds from the first poll that finds a reason to end until the end."""

EXIT_CODE = 1

_MAX_CHARACTERS = 1000
"""Characters of an error that are posted."""


class Failure(NamedTuple):
    """A reason for other processes to end."""

    process: int  # that failed
    text: str  # the error, in a line
    call: int  # the number of the call of a step that it was in
    ends: bool  # whether the process does not go on

    def forces_end(self, own: int, begun: int, raised: Collection[int]) -> bool:
        """Whether process `own`, which has begun this many calls of steps and raised in some, cannot go on after it."""
        return self.ends or (self.process != own and self.call <= begun and self.call not in raised)


class FailureMonitor:
    """Posts the failures and the call log of this process, and ends it after failures of others, once started."""

    def __init__(self) -> None:
        self.call_log = CallLog()
        self._board: Board | None = None  # once started
        self._failures: dict[str, Failure] = {}  # of this process, the last of each kind
        self._raised: set[int] = set()
        self._posted: Any = None
        self._predecessor: Failure | None = None  # failed before an exception ended this program
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    @property
    def is_running(self) -> bool:
        """Whether there are other processes, and planning with them has begun."""
        return self._board is not None

    def start(self) -> None:
        """Starts to poll, and to post the end of the program and its cause, if there are several processes."""
        with self._lock:
            if self.is_running or jax.process_count() == 1 or _jax.coordination_client() is None:
                return
            self._board = Board("status")
        thread = threading.Thread(target=self._poll, name="alpa_lite failure monitor", daemon=True)
        thread.start()
        if effects.is_allowed("excepthook"):
            self._chain_excepthook()
        if effects.is_allowed("atexit"):  # runs before JAX leaves its runtime, which programs that end well do together
            atexit.register(self._leave, thread)

    def announce_planning(self) -> ProgramPoint | None:
        """Posts that this thread plans at its program point. Returns that point, if it is at one."""
        point = self.call_log.record_planning()
        self._post()
        return point

    def find_passed(self, point: ProgramPoint) -> set[int]:
        """Returns the other processes that have posted that they passed a point without planning there."""
        return {process for process, log in self._statuses().items() if has_passed(log, point)} - {jax.process_index()}

    def report_raised(self, call: int, name: str, error: Exception) -> None:
        """Posts that a call of a step raised."""
        if self.is_running:
            self._raised.add(call)
            text = f"{type(error).__name__} in call {call} of a step, {name}: {error}"
            self._post(end=Failure(jax.process_index(), text[:_MAX_CHARACTERS], call, False))

    def report_end(self, error: Exception) -> None:
        """Posts that this process does not go on, or not as the others need it."""
        if self.is_running:
            self._post(end=Failure(jax.process_index(), _summarise(error), self.call_log.calls, True))

    def _post(self, **failures: Failure) -> None:
        """Posts the call log and the failures of this process, the last of each kind, if they have changed."""
        with self._lock:
            self._failures |= failures
            failed = {"failures": [*self._failures.values()], "over": "over" in self._failures}
            status = {**failed, **self.call_log.to_json()}
            if self._board is not None and status != self._posted:
                self._posted = status
                self._board.post(status)

    def _statuses(self) -> dict[int, Any]:
        """Returns the posted status of each process."""
        return {} if self._board is None else self._board.poll()

    def _find_reasons(self, statuses: Mapping[int, Any]) -> list[Failure]:
        """Returns the posted failures after which this process cannot go on."""
        posted = [Failure(*one) for status in statuses.values() for one in status["failures"]]
        begun, raised = self.call_log.calls, self._raised
        return [one for one in posted if one.forces_end(jax.process_index(), begun, raised)]

    def _poll(self) -> None:
        """Ends this process `GRACE_SECONDS` after the first poll that finds a reason."""
        own, since = jax.process_index(), math.inf
        while not self._stopped.wait(POLL_SECONDS):
            try:
                statuses = self._statuses()
            except Exception:
                return  # the runtime was left, or process 0 is gone and JAX ends this one
            self._compare_calls(statuses)
            found = sorted(self._find_reasons(statuses), key=lambda one: one.process == own)
            since = min(since, time.monotonic()) if found else math.inf
            # A process whose own callback raised has more time to raise what the devices make of it.
            if found and time.monotonic() - since >= GRACE_SECONDS * (2 if found[0].process == own else 1):
                _log_end(found[0], own)
                _end(own)
                return

    def _compare_calls(self, statuses: Mapping[int, Any]) -> None:
        """Posts the call log, and a failure if another process ran another program in the same call."""
        own = jax.process_index()
        mismatch = self.call_log.compare({process: log for process, log in statuses.items() if process != own})
        failures = {}
        if mismatch is not None:
            process, call = mismatch
            error = ProcessError(
                f"process {own} and process {process} run call {call} of a step as planned for other arguments: every "
                "process must give arrays of the same global shapes and dtypes, in equally many calls"
            )
            # The one with the higher index stands for what is wrong: the other one ends first, and process 0 with it.
            failures["mismatch"] = Failure(max(own, process), _summarise(error), call, True)
        self._post(**failures)

    def _chain_excepthook(self) -> None:
        """Posts exceptions that nobody catches, after the hook of the program has shown them."""
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            before(kind, error, trace)
            if isinstance(error, Exception):
                self._predecessor = self._find_predecessor(_summarise(error))
                self.report_end(error)

        sys.excepthook = hook

    def _find_predecessor(self, error: str) -> Failure | None:
        """Returns the failure of another process that preceded an exception here, unless it is the same error."""
        with contextlib.suppress(Exception):  # without the store, JAX ends this process
            found = self._find_reasons(self._statuses())
            if all(one.process != jax.process_index() for one in found):
                others = [one for one in found if one.text != error]
                return min(others, key=lambda one: not one.ends, default=None)
        return None

    def _leave(self, thread: threading.Thread) -> None:
        """Posts the end of the program, and leaves JAX's runtime such that no process waits for a heartbeat."""
        calls = self.call_log.calls
        text = f"the end of its program, which made {calls} calls of steps"
        self._post(over=Failure(jax.process_index(), text, calls + 1, False))
        failed = False
        try:
            jax.effects_barrier()
        except Exception as error:
            failed = True
            self.report_end(error)
        self._stopped.set()
        thread.join(timeout=2 * POLL_SECONDS)
        if self._predecessor is not None:
            self._follow(self._predecessor)
        if failed:  # JAX's own exit raises at the same place, and leaves the others to wait for a heartbeat
            with contextlib.suppress(Exception):
                jax.distributed.shutdown()

    def _follow(self, failure: Failure) -> None:
        """Names the process that failed before this one, and does not wait long for it.

        The exception is most often what the devices make of the other's end ("connection closed by peer"), which names
        nobody. JAX has the processes leave together: it waits for one that is gone until a heartbeat is missed, and
        aborts. So this process goes there if all others come there too, and ends by itself if not.
        """
        own = jax.process_index()
        _log_end(failure, own)
        until = time.monotonic() + GRACE_SECONDS
        with contextlib.suppress(Exception):  # as above
            while sum(status["over"] for status in self._statuses().values()) < jax.process_count():
                if time.monotonic() > until:
                    _end(own)
                    return
                time.sleep(0.1)


def _summarise(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]


def _log_end(failure: Failure, own: int) -> None:
    logger.critical(
        "process %d %s, for process %d does not go on with it, after %s",
        own, "ends" if effects.is_allowed("exit") else "should end", failure.process, failure.text,
    )  # fmt: skip


def _end(own: int) -> None:
    if effects.is_allowed("exit"):
        effects.exit_process(EXIT_CODE, 2 * POLL_SECONDS if own == 0 else 0.0)


monitor = FailureMonitor()
"""The one of this process."""
