"""Messages between the processes of a program, over the key-value store of JAX's coordination service.

All communication of alpa_lite outside of device programs goes through this module, which alone knows the store, its
namespaces (`alpa_lite/...`), the time-outs and how errors travel:

- a `Collective` is an operation that every process takes part in: `broadcast` and `gather`, in rounds;
- a `Board` holds one value of each process under a topic: `post` and `poll`, whenever a process likes.

Nothing here runs on devices: a collective of another program between those of a step could wait for ever. A text is
compressed and split into parts that the service accepts in one message (gRPC refuses more than 4 MB). Readers wait in
short turns, so that an interrupt is noticed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax

from alpa_lite import _jax, errors
from alpa_lite.errors import AlpaLiteError, OptionError, ProcessError

TIMEOUT_VARIABLE = "ALPA_LITE_PROCESS_TIMEOUT"
"""The environment variable for the seconds that a process waits for another to reach the same collective."""

DEFAULT_TIMEOUT_SECONDS = 300.0
"""The seconds without it. Processes start apart by what their hosts differ in: loading data, a cold file system."""

REPLY_MARGIN_SECONDS = 15.0
"""Seconds that the others wait for process 0 longer than it waits for them, so that it can name the missing one."""

RETAINED_COLLECTIVES = 64
"""Collectives of one kind whose messages stay stored: another thread, as of a save, may still read an earlier one's."""

MAX_PART_BYTES = 1 << 20
"""Bytes of one value of the store."""

_POLL_SECONDS = 5.0
_REMEDY = (
    f"it may run other code, be called with other shapes, or only be slow; raise {TIMEOUT_VARIABLE} if it needs longer"
)

_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_oldest: Counter[str] = Counter()
"""The oldest collective of each kind whose messages are stored."""


def timeout() -> float:
    """Returns the seconds that a process waits for another.

    Raises:
      OptionError: the environment variable is not a positive number.
    """
    given = os.environ.get(TIMEOUT_VARIABLE, "")
    with contextlib.suppress(ValueError):
        seconds = float(given) if given else DEFAULT_TIMEOUT_SECONDS
        if seconds > 0:
            return seconds
    raise OptionError(f"{TIMEOUT_VARIABLE}={given!r}: give a positive number of seconds")


class Collective:
    """One operation of all processes, in rounds. Every process creates those of a kind in the same order.

    An error that one process raises is sent in place of its message, so that all processes raise it. In a program of
    one process, `broadcast` and `gather` only call their functions.

    Attributes:
      process: the index of this process.
      count: the number of processes.
    """

    def __init__(
        self, kind: str, activity: str, *, seconds: float | None = None, error: type[AlpaLiteError] = ProcessError,
        remedy: str = _REMEDY, local: bool = False,
    ) -> None:  # fmt: skip
        """Args:
          kind: namespace; collectives of one kind are numbered.
          activity: subject of error messages, such as "saving step 3".
          seconds: how long to wait for another process; by default `timeout()`.
          error: class of errors that are not one of alpa_lite's.
          remedy: end of the message about a process that did not respond.
          local: whether this process takes part alone.

        Raises:
          ProcessError: there are several processes, but no coordination service.
        """
        self.process, self.count = (0, 1) if local else (jax.process_index(), jax.process_count())
        self._client: Any = _jax.coordination_client()
        if self.count > 1 and self._client is None:
            raise ProcessError(
                f"there are {self.count} processes, but no coordination service: call jax.distributed.initialize() at "
                "the start of the program"
            )
        self._kind, self._number = kind, -1 if local else next(_numbers[kind])
        self._activity, self._error, self._remedy = activity, error, remedy
        self._seconds = timeout() if seconds is None else seconds
        self._round, self._sent = 0, False

    def broadcast(self, name: str, make: Callable[[], Any], seconds: float | None = None) -> Any:
        """Returns the JSON value that process 0 makes.

        Args:
          name: of this round, for error messages.
          seconds: how long to wait for process 0.
        """
        if self.count == 1:
            return make()
        if self.process == 0:
            with self.error_scope():
                self._send(name=name, value=(value := make()))
        else:
            value = self._receive(0, name, self._seconds + REPLY_MARGIN_SECONDS if seconds is None else seconds)
        self._round, self._sent = self._round + 1, False
        return value

    def gather(self, name: str, make: Callable[[], Any], combine: Callable[[list[Any]], Any] = list) -> Any:
        """Returns, in all processes, the value that process 0 combines from the JSON values of all.

        Args:
          name: of this round, for error messages.
          combine: takes the values by process index; by default they are returned. All processes raise its error.
        """
        if self.count == 1:
            return combine([make()])
        with self.error_scope():
            own = json.loads(json.dumps(make()))
        if self.process > 0:
            self._send(name=name, value=own)

        def combined() -> Any:
            """Returns the combined values, in process 0."""
            until = time.monotonic() + self._seconds
            with self.error_scope(of_all=True):
                others = [self._receive(p, name, until - time.monotonic()) for p in range(1, self.count)]
                self._remove_old()
                return combine([own, *others])

        return self.broadcast(name, combined)

    @contextlib.contextmanager
    def error_scope(self, of_all: bool = False) -> Iterator[None]:
        """Sends an error that is raised within it in place of this process's next message.

        Args:
          of_all: whether an error of alpa_lite is that of all processes; else the message names this one.
        """
        try:
            yield
        except BaseException as error:
            is_ours = isinstance(error, AlpaLiteError)
            text = str(error) if is_ours else f"{type(error).__name__}: {describe_error(error)}"
            if not (of_all and is_ours):
                text = f"{self._activity}: process {self.process} failed: {text}"
            if self.count > 1 and not self._sent:
                with contextlib.suppress(Exception):  # without the store, JAX ends the others
                    self._send(error=type(error).__name__, text=text)
            raise

    def check_peers(self) -> None:
        """Called every few seconds while this process waits; an error that it raises ends the wait."""

    def _send(self, **message: Any) -> None:
        """Puts the one message of this process in this round: its parts, and then their number under its own key."""
        data = zlib.compress(json.dumps(message).encode(), 1)
        self._sent = True
        key = self._key(self.process)
        parts = [data[start : start + MAX_PART_BYTES] for start in range(0, len(data), MAX_PART_BYTES)]
        for number, part in enumerate(parts):
            self._client.key_value_set_bytes(f"{key}/{number}", part)
        self._client.key_value_set_bytes(key, str(len(parts)).encode())

    def _receive(self, process: int, name: str, seconds: float) -> Any:
        """Returns the value that a process sends in this round, or raises the error that it sends."""
        key = self._key(process)
        count = self._wait(key, time.monotonic() + seconds)
        if count is None:
            waited = self._seconds if self.process == 0 else seconds
            raise self._error(
                f"{self._activity}: process {process} did not respond within {waited:g} s ({name}); {self._remedy}"
            )
        parts = [self._wait(f"{key}/{number}", math.inf) or b"" for number in range(int(count))]
        message = json.loads(zlib.decompress(b"".join(parts)))
        if "error" in message:
            kind = getattr(errors, message["error"], None)
            if not (isinstance(kind, type) and issubclass(kind, AlpaLiteError)):
                kind = self._error
            raise kind(message["text"])
        if message["name"] != name:
            raise self._error(f"{self._activity}: process {process} is at {message['name']}, not at {name}")
        return message["value"]

    def _wait(self, key: str, until: float) -> bytes | None:
        """Returns the value of a key as soon as it is set; None if it is not in time."""
        while True:
            turn = max(0.01, min(_POLL_SECONDS, until - time.monotonic()))
            try:
                return self._client.blocking_key_value_get_bytes(key, int(1000 * turn))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise ProcessError(
                        f"the coordination service, which process 0 holds, does not answer: {str(error)[:300]}; "
                        "look for the error of process 0"
                    ) from error
            if time.monotonic() >= until:
                return None
            self.check_peers()

    def _key(self, process: int) -> str:
        return f"alpa_lite/{self._kind}/{self._number}/{self._round}/{process}"

    def _remove_old(self) -> None:
        """Removes messages of earlier collectives, once all processes have begun this one."""
        first, last = _oldest[self._kind], self._number - RETAINED_COLLECTIVES
        for number in range(first, last):
            self._client.key_value_delete(f"alpa_lite/{self._kind}/{number}")
        _oldest[self._kind] = max(first, last)


class Board:
    """One JSON value of each process under a topic, which its process replaces and all processes read."""

    def __init__(self, topic: str) -> None:
        """Without a coordination service, posts are dropped."""
        self._client, self._prefix = _jax.coordination_client(), f"alpa_lite/{topic}/"

    def post(self, value: Any) -> None:
        """Replaces the value of this process; None removes it. Does nothing where the store is lost, as JAX reacts."""
        if self._client is None:
            return
        key = f"{self._prefix}{jax.process_index()}"
        with contextlib.suppress(Exception):
            if value is None:
                self._client.key_value_delete(key)
            else:
                self._client.key_value_set(key, json.dumps(value), allow_overwrite=True)

    def poll(self) -> dict[int, Any]:
        """Returns the values that are posted, by process index."""
        if self._client is None:
            return {}
        try:
            found = self._client.key_value_dir_get(self._prefix)
        except Exception as error:
            if "NOT_FOUND" in str(error):  # nothing is posted
                return {}
            raise
        return {int(key.rpartition("/")[2]): json.loads(text) for key, text in found}


def describe_error(error: BaseException) -> str:
    """Returns the messages of an error and of its causes: storage errors come wrapped."""
    out = [str(error) or type(error).__name__]
    seen: BaseException | None = error
    while seen is not None and (seen := seen.__cause__ or seen.__context__) is not None:
        if str(seen) and str(seen) not in " ".join(out):
            out.append(str(seen))
    return ": ".join(out)
