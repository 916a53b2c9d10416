"""Ends the processes that would wait for ever for one that has raised.

An error that only one process meets (a callback, its part of the data, an argument that was donated) leaves the others
in collectives that it does not enter, where no exception reaches them: they wait in C++. JAX's runtime sees a process
that is lost, not one that lives and does something else. So a process that fails says so in the key-value store of
JAX's runtime, and a thread of every other process looks there, each `PERIOD` seconds. There are these kinds of words:

*It ends.* An exception that nobody catches has ended the program, or a callback in a pipeline has raised, whose results
the other stages lack. The others end `GRACE` seconds after they have read it, with exit code 1, and their last line of
the log names the process and its error. A process whose own callback raised has twice that time to raise what the
devices make of it.

*It has raised in a call of a step.* If the others raise in the same call (all were given the same wrong argument, a
plan is refused), the user may catch it in all of them, and nothing ends. Calls are counted, for every process calls the
same steps in the same order: who has made that call and has not raised in it ends like the above.

*Its program is over.* It ends without an error, and makes no more calls: whoever has begun one more ends like the
above.

*It plans*, since the arguments of a step are others than before, and waits for the others to plan with it. Who goes
through the same place of the program without planning says so, and the process that waits raises (`turns`,
`check_others_plan`), by which the others end.

In the time of grace a process can still raise by itself, write what it has, and leave: its last line of the log names
the other all the same, and it waits `GRACE` seconds at most for the others to leave JAX's runtime with it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import ProcessError
from alpa_lite.processes import turns
from alpa_lite.processes.turns import Turn, Turns

logger = logging.getLogger(__name__)

PERIOD = 2.0
"""Seconds between two looks."""

GRACE = 10.0
"""Seconds from the first look that finds a reason to end until the end."""

EXIT_CODE = 1

_LONGEST = 1000
"""Characters of an error that the others are told."""

_KEY = "alpa_lite/failed/"
_OVER = "/over"
_UNLIKE = "/unlike"


@dataclass(frozen=True)
class Failed:
    """What a process says of itself.

    Attributes:
      process: its number.
      text: the error, in a line.
      call: the number of the call of a step that it was in.
      ends: whether it does not go on.
    """

    process: int
    text: str
    call: int
    ends: bool


def reasons(said: Iterable[Failed], own: int, begun: int, raised: Collection[int]) -> list[Failed]:
    """Those words after which this process cannot go on.

    Args:
      own: the number of this process.
      begun: how many calls of steps it has begun.
      raised: the calls that raised here.
    """
    return [
        one for one in said
        if one.ends or (one.process != own and one.call <= begun and one.call not in raised)
    ]  # fmt: skip


class Alarm:
    """Tells of failures, and looks for those of others.

    Attributes:
      turns: what this process has gone through.
    """

    def __init__(self) -> None:
        self.turns = Turns()
        self._raised: set[int] = set()
        self._client: Any = None
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        self._follows: Failed | None = None  # what had been said when an exception ended the program

    def plans(self) -> Turn | None:
        """Tells that this process plans in the turn that this thread is in; that turn, if it is in one."""
        turn = self.turns.plans()
        if self._client is not None and turn is not None:
            self._put(*turns.plan_of(turn, jax.process_index()))
        return turn

    def check_others_plan(self, turn: Turn | None, name: str) -> None:
        """Raises ProcessError if another process has said that it does not plan in this turn."""
        if self._client is None or turn is None:
            return
        process = turns.who_passed(turn, self._said(turns.PASSED))
        if process is not None:
            raise ProcessError(
                f"process {process} goes through {turn} as it was planned before, and process {jax.process_index()} "
                f"has to plan {name} for other arguments there: every process must give arrays of the same global "
                "shapes and dtypes, in equally many calls and batches"
            )

    def start(self) -> None:
        """Begins to look, if there are several processes. Also tells from then on what ends the program."""
        with self._starting:
            if self._client is not None or jax.process_count() == 1:
                return
            self._client = _jax.coordination_client()
            if self._client is None:
                return
        before = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            before(kind, error, trace)
            if isinstance(error, Exception):
                self._follows = self._first(_line(error))
                self.ends(error)

        sys.excepthook = hook
        thread = threading.Thread(target=self._look, name="alpa_lite alarm", daemon=True)
        thread.start()

        def stop() -> None:
            calls = self.turns.calls
            over = f"the end of its program, which made {calls} calls of steps"
            self._tell(Failed(jax.process_index(), over, calls + 1, False), _OVER)
            try:
                jax.effects_barrier()
                failed = False
            except Exception as error:
                failed = True
                self.ends(error)
            self._stopped.set()
            thread.join(timeout=2 * PERIOD)
            if self._follows is not None:
                self._follow(self._follows)
            if failed:  # JAX's own way out raises at the same place, and leaves the others to wait for a heartbeat
                with contextlib.suppress(Exception):
                    jax.distributed.shutdown()

        atexit.register(stop)  # to run before JAX leaves its runtime, which a program that has ended well does together

    def is_new(self, turn: Turn) -> None:
        """Takes note of a call with other arguments than the call before; see `Turns.is_new`."""
        if self._client is not None:
            self.turns.is_new(turn)

    def runs(self, turn: Turn, step: int, program: Callable[[], str]) -> None:
        """Takes note of the program that a step runs from a call on; see `Turns.runs`."""
        if self._client is not None:
            self.turns.runs(turn, step, program())

    def raised(self, call: int, name: str, error: Exception) -> None:
        """Tells that a call of a step raised."""
        if self._client is not None:
            self._raised.add(call)
            text = f"{type(error).__name__} in call {call} of a step, {name}: {error}"[:_LONGEST]
            self._tell(Failed(jax.process_index(), text, call, False))

    def ends(self, error: Exception) -> None:
        """Tells that this process does not go on, or not as the others need it."""
        if self._client is not None:
            self._tell(Failed(jax.process_index(), _line(error), self.turns.calls, True))

    def _tell(self, said: Failed, kind: str = "") -> None:
        """Says it in place of what this process has said of the same kind."""
        self._put(f"{_KEY}{jax.process_index()}{kind}", json.dumps(asdict(said)))

    def _put(self, key: str, text: str) -> None:
        with contextlib.suppress(Exception):  # without the store, JAX ends the others
            self._client.key_value_set(key, text, allow_overwrite=True)

    def _said(self, prefix: str) -> list[tuple[str, str]]:
        """What processes have said under a prefix."""
        try:
            return self._client.key_value_dir_get(prefix)
        except Exception as error:
            if "NOT_FOUND" in str(error):  # nobody has said anything
                return []
            raise

    def _found(self, own: int) -> list[Failed]:
        """What has been said after which this process cannot go on."""
        words = [Failed(**json.loads(text)) for _, text in self._said(_KEY)]
        return reasons(words, own, self.turns.calls, self._raised)

    def _first(self, error: str) -> Failed | None:
        """What another process has said before this one is left by an exception, unless that is the same one."""
        own = jax.process_index()
        with contextlib.suppress(Exception):  # without the store, JAX ends this process
            found = self._found(own)
            others = [one for one in found if one.process != own and one.text != error]
            if others and all(one.process != own for one in found):
                return min(others, key=lambda one: not one.ends)
        return None

    def _follow(self, failed: Failed) -> None:
        """Names the process that failed before this one, and does not wait long for it.

        The exception is most often what the devices make of the other's end ("connection closed by peer"), which names
        nobody. JAX has the processes leave together: it waits for one that is gone until a heartbeat is missed, and
        aborts. So this process goes there if all others come there too, and ends by itself if not.
        """
        own = jax.process_index()
        _name(failed, own)
        until = time.monotonic() + GRACE
        with contextlib.suppress(Exception):  # as above
            while sum(key.endswith(_OVER) for key, _ in self._said(_KEY)) < jax.process_count():
                if time.monotonic() > until:
                    _end(own)
                time.sleep(0.1)

    def _compare(self, own: int) -> None:
        """Tells which programs this process runs, and ends where those of another one are others."""
        words = self.turns.programs(own)
        if words is not None:
            self._put(*words)
        other = self.turns.unlike(own, self._said(turns.RUNS))
        if other is not None:
            process, call = other
            # The one with the higher number stands for what is wrong: the other one ends first, and process 0 with it.
            text = (
                f"process {own} and process {process} run call {call} of a step as planned for other arguments: every "
                "process must give arrays of the same global shapes and dtypes, in equally many calls"
            )
            self._tell(Failed(max(own, process), _line(ProcessError(text)), call, True), _UNLIKE)

    def _look(self) -> None:
        own, since = jax.process_index(), 0.0
        while not self._stopped.wait(PERIOD):
            try:
                found = self._found(own)
                for words in self.turns.look(own, self._said(turns.PLANS)):
                    self._put(*words)
                self._compare(own)
            except Exception:
                return  # the runtime was left, or process 0 is gone and JAX ends this one
            if not found:
                since = 0.0
                continue
            since = since or time.monotonic()
            first = next((one for one in found if one.process != own), found[0])
            if time.monotonic() - since >= (2 * GRACE if first.process == own else GRACE):
                _name(first, own)
                _end(own)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_LONGEST]


def _name(failed: Failed, own: int) -> None:
    logger.critical(
        "process %d ends, for process %d does not go on with it, after %s", own, failed.process, failed.text
    )  # fmt: skip


def _end(own: int) -> None:
    if own == 0:
        time.sleep(2 * PERIOD)  # with this process the others lose JAX's runtime: let them say theirs
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)


alarm = Alarm()
"""That of this process."""
