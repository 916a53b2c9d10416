"""Terminates processes that would otherwise hang in a collective after another process failed.

An error that only one process meets (a callback, its part of the data, an argument that was donated) leaves the others
in collectives that it does not enter, where no exception reaches them: they wait in C++. JAX's runtime detects a
process that is lost, not one that lives and does something else. So a process posts its failures, and a thread of every
other process polls them. There are these kinds:

- `end`: an exception that nobody catches has ended the program, or a callback in a pipeline has raised, whose results
  the other stages lack. The others end `GRACE_SECONDS` after they have read it, with exit code 1, and their last line
  of the log names the process and its error. A process whose own callback raised has twice that time to raise what the
  devices make of it. An exception in a call of a step is of this kind, too, but ends no process that raises in the same
  call (all were given the same wrong argument, a plan is refused): the user may catch it in all of them. Calls are
  counted, for every process calls the same steps in the same order.
- `over`: the program has ended without an error, and makes no more calls. A process that has begun one more ends.
- `mismatch`: two processes ran different programs in one call (`divergence`). Both end.

A process that plans where others do not raises by itself (`check_not_passed`), by which the others end.

In the time of grace a process can still raise by itself, write what it has, and leave: its last line of the log names
the other all the same, and it waits `GRACE_SECONDS` at most for the others to leave JAX's runtime with it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import ProcessError
from alpa_lite.processes import effects
from alpa_lite.processes.channel import Board
from alpa_lite.processes.divergence import CallLog, ProgramPoint, find_passed

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
"""Seconds between two polls."""

GRACE_SECONDS = 10.0
"""Seconds from the first poll that finds a reason to end until the end."""

EXIT_CODE = 1

_MAX_CHARACTERS = 1000
"""Characters of an error that are posted."""


@dataclass(frozen=True)
class Failure:
    """A reason for other processes to end.

    Attributes:
      process: the index of the process that failed.
      text: the error, in a line.
      call: the number of the call of a step that it was in.
      ends: whether the process does not go on.
    """

    process: int
    text: str
    call: int
    ends: bool


def find_reasons(failures: Iterable[Failure], own: int, begun: int, raised: Collection[int]) -> list[Failure]:
    """Returns the failures after which this process cannot go on.

    Args:
      own: the index of this process.
      begun: the number of calls of steps that it has begun.
      raised: the calls that raised here.
    """
    return [
        one for one in failures
        if one.ends or (one.process != own and one.call <= begun and one.call not in raised)
    ]  # fmt: skip


class FailureMonitor:
    """Posts the failures of this process, and ends it after those of others.

    Attributes:
      call_log: of this process.
    """

    def __init__(self) -> None:
        self.call_log = CallLog()
        self._raised: set[int] = set()
        self._boards: tuple[Board, Board] | None = None  # of failures and of call logs, once started
        self._own: dict[str, Failure] = {}  # by kind
        self._posted: Any = None  # of the call log
        self._predecessor: Failure | None = None  # failed before an exception ended this program
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begins to poll, and to post what ends the program, if there are several processes."""
        with self._lock:
            if self._boards is not None or jax.process_count() == 1 or _jax.coordination_client() is None:
                return
            self._boards = Board("failures"), Board("calls")
        thread = threading.Thread(target=self._poll, name="alpa_lite failure monitor", daemon=True)
        thread.start()
        if effects.is_allowed("excepthook"):
            self._chain_excepthook()
        if effects.is_allowed("atexit"):  # runs before JAX leaves its runtime, which programs that end well do together
            atexit.register(self._leave, thread)

    def announce_planning(self) -> ProgramPoint | None:
        """Posts that this thread plans at its program point. Returns that point, if it is at one."""
        point = self.call_log.record_planning()
        self._post_calls()
        return point

    def check_not_passed(self, point: ProgramPoint | None, name: str) -> None:
        """Raises ProcessError if another process has passed a point where this one plans the step `name`."""
        if self._boards is None or point is None:
            return
        process = find_passed(point, self._boards[1].poll())
        if process is not None:
            raise ProcessError(
                f"process {process} goes through {point} as it was planned before, and process {jax.process_index()} "
                f"has to plan {name} for other arguments there: every process must give arrays of the same global "
                "shapes and dtypes, in equally many calls and batches"
            )

    def record_new_arguments(self, point: ProgramPoint) -> None:
        """Records a call with other arguments than the call before; see `CallLog.record_new_arguments`."""
        if self._boards is not None:
            self.call_log.record_new_arguments(point)

    def record_program(self, point: ProgramPoint, step: int, digest: Callable[[], str]) -> None:
        """Records the program that a step runs from a call on; see `CallLog.record_program`."""
        if self._boards is not None:
            self.call_log.record_program(point, step, digest())

    def report_raised(self, call: int, name: str, error: Exception) -> None:
        """Posts that a call of a step raised."""
        if self._boards is not None:
            self._raised.add(call)
            text = f"{type(error).__name__} in call {call} of a step, {name}: {error}"[:_MAX_CHARACTERS]
            self._post("end", Failure(jax.process_index(), text, call, False))

    def report_end(self, error: Exception) -> None:
        """Posts that this process does not go on, or not as the others need it."""
        if self._boards is not None:
            self._post("end", Failure(jax.process_index(), _line(error), self.call_log.calls, True))

    def _post(self, kind: str, failure: Failure) -> None:
        """Replaces what this process has posted of the same kind."""
        assert self._boards is not None
        with self._lock:
            self._own[kind] = failure
            self._boards[0].post({kind: asdict(one) for kind, one in self._own.items()})

    def _post_calls(self) -> None:
        with self._lock:
            value = self.call_log.to_json()
            if self._boards is not None and value != self._posted:
                self._posted = value
                self._boards[1].post(value)

    def _reasons(self, own: int) -> list[Failure]:
        """Returns the posted failures after which this process cannot go on."""
        assert self._boards is not None
        posted = [Failure(**one) for kinds in self._boards[0].poll().values() for one in kinds.values()]
        return find_reasons(posted, own, self.call_log.calls, self._raised)

    def _poll(self) -> None:
        own, since = jax.process_index(), 0.0
        while not self._stopped.wait(POLL_SECONDS):
            try:
                found = self._reasons(own)
                self._compare_calls(own)
            except Exception:
                return  # the runtime was left, or process 0 is gone and JAX ends this one
            if not found:
                since = 0.0
                continue
            since = since or time.monotonic()
            first = next((one for one in found if one.process != own), found[0])
            if time.monotonic() - since >= (2 * GRACE_SECONDS if first.process == own else GRACE_SECONDS):
                _log_end(first, own)
                _end(own)
                return

    def _compare_calls(self, own: int) -> None:
        """Posts the call log, and ends processes that ran different programs in the same call."""
        assert self._boards is not None
        mismatch = self.call_log.compare({p: log for p, log in self._boards[1].poll().items() if p != own})
        self._post_calls()
        if mismatch is not None:
            process, call = mismatch
            error = ProcessError(
                f"process {own} and process {process} run call {call} of a step as planned for other arguments: every "
                "process must give arrays of the same global shapes and dtypes, in equally many calls"
            )
            # The one with the higher index stands for what is wrong: the other one ends first, and process 0 with it.
            self._post("mismatch", Failure(max(own, process), _line(error), call, True))

    def _chain_excepthook(self) -> None:
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            before(kind, error, trace)
            if isinstance(error, Exception):
                self._predecessor = self._find_predecessor(_line(error))
                self.report_end(error)

        sys.excepthook = hook

    def _find_predecessor(self, error: str) -> Failure | None:
        """Returns the failure of another process that preceded an exception here, unless it is the same error."""
        own = jax.process_index()
        with contextlib.suppress(Exception):  # without the store, JAX ends this process
            found = self._reasons(own)
            others = [one for one in found if one.process != own and one.text != error]
            if others and all(one.process != own for one in found):
                return min(others, key=lambda one: not one.ends)
        return None

    def _leave(self, thread: threading.Thread) -> None:
        """Posts the end of the program, and leaves JAX's runtime such that no process waits for a heartbeat."""
        calls = self.call_log.calls
        text = f"the end of its program, which made {calls} calls of steps"
        self._post("over", Failure(jax.process_index(), text, calls + 1, False))
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
        assert self._boards is not None
        own = jax.process_index()
        _log_end(failure, own)
        until = time.monotonic() + GRACE_SECONDS
        with contextlib.suppress(Exception):  # as above
            while sum("over" in kinds for kinds in self._boards[0].poll().values()) < jax.process_count():
                if time.monotonic() > until:
                    _end(own)
                    return
                time.sleep(0.1)


def _line(error: Exception) -> str:
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
