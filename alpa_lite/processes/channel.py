"""Messages between the processes of a program, over the key-value store of JAX's coordination service.

All communication of alpa_lite outside of device programs goes through this module, which alone knows the store, its
namespaces (`alpa_lite/...`), the time-outs and how errors travel:

- a `Collective` is an operation that every process takes part in: `broadcast` and `gather`, in rounds;
- a `Board` holds one value of each process under a topic: `post` and `poll`, whenever a process likes.

Nothing here runs on devices: a step may be running there, and a collective of another program between its own could
wait for ever. A text is compressed and split into parts that the service accepts in one message (gRPC refuses more than
4 MB). Readers wait in short turns, so that an interrupt is noticed.
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
"""Collectives of one kind whose messages stay stored; a slow process may still read those of an earlier one."""

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
    try:
        seconds = float(given) if given else DEFAULT_TIMEOUT_SECONDS
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise OptionError(f"{TIMEOUT_VARIABLE}={given!r}: give a positive number of seconds")
    return seconds


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
        """
        self.process, self.count = (0, 1) if local else (jax.process_index(), jax.process_count())
        self._kind, self._number = kind, -1 if local else next(_numbers[kind])
        self._activity, self._error, self._remedy = activity, error, remedy
        self._seconds = timeout() if seconds is None else seconds
        self._round, self._sent = 0, False
        self._client: Any = None if self.count == 1 else _client()

    def broadcast(self, name: str, make: Callable[[], Any], seconds: float | None = None) -> Any:
        """Returns the JSON value that process 0 makes.

        Args:
          name: of this round, for error messages.
          seconds: how long to wait for process 0.
        """
        return make() if self.count == 1 else self._reply(name, make, seconds)

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
            self._send({"name": name, "value": own})
        return self._reply(name, lambda: self._combine(name, own, combine))

    @contextlib.contextmanager
    def error_scope(self) -> Iterator[None]:
        """Sends an error that is raised within it in place of this process's next message."""
        try:
            yield
        except BaseException as error:
            if not self._sent:
                ours = isinstance(error, AlpaLiteError)
                text = str(error) if ours else f"{type(error).__name__}: {describe_error(error)}"
                self._send_error(error, f"{self._activity}: process {self.process} failed: {text}")
            raise

    def check_peers(self) -> None:
        """Called every few seconds while this process waits; an error that it raises ends the wait."""

    def _reply(self, name: str, make: Callable[[], Any], seconds: float | None = None) -> Any:
        """Ends a round by the value that process 0 makes, and the others receive."""
        if self.process == 0:
            with self.error_scope():
                value = make()
                self._send({"name": name, "value": value})
        else:
            value = self._receive(0, name, self._seconds + REPLY_MARGIN_SECONDS if seconds is None else seconds)
        self._round, self._sent = self._round + 1, False
        return value

    def _combine(self, name: str, own: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Returns the combined values of all processes, in process 0; the others raise its error without a prefix."""
        until = time.monotonic() + self._seconds
        try:
            others = [self._receive(p, name, until - time.monotonic()) for p in range(1, self.count)]
            self._remove_old()
            return combine([own, *others])
        except Exception as error:
            self._send_error(error, str(error))
            raise

    def _send(self, message: dict[str, Any]) -> None:
        """Puts the one message of this process in this round."""
        text = json.dumps(message)
        self._sent = True
        _put(self._client, f"{self._prefix(self._number)}/{self._round}/{self.process}", text)

    def _send_error(self, error: BaseException, text: str) -> None:
        if self._client is not None:
            with contextlib.suppress(Exception):  # without the store, JAX ends the others
                self._send({"error": type(error).__name__, "text": text})

    def _receive(self, process: int, name: str, seconds: float) -> Any:
        """Returns the value that a process sends in this round, or raises the error that it sends."""
        key = f"{self._prefix(self._number)}/{self._round}/{process}"
        text = _get(self._client, key, seconds, self.check_peers)
        if text is None:
            waited = self._seconds if self.process == 0 else seconds
            raise self._error(
                f"{self._activity}: process {process} did not respond within {waited:g} s ({name}); {self._remedy}"
            )
        message = json.loads(text)
        if "error" in message:
            raise _error_class(message["error"], self._error)(message["text"])
        if message["name"] != name:
            raise self._error(f"{self._activity}: process {process} is at {message['name']}, not at {name}")
        return message["value"]

    def _prefix(self, number: int) -> str:
        return f"alpa_lite/{self._kind}/{number}"

    def _remove_old(self) -> None:
        """Removes messages of earlier collectives, once all processes have begun this one."""
        first, last = _oldest[self._kind], self._number - RETAINED_COLLECTIVES
        for number in range(first, last):
            self._client.key_value_delete(self._prefix(number))
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


def _error_class(name: str, default: type[AlpaLiteError]) -> type[AlpaLiteError]:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, AlpaLiteError) else default


def _client() -> Any:
    client = _jax.coordination_client()
    if client is None:
        raise ProcessError(
            f"there are {jax.process_count()} processes, but no coordination service: call "
            "jax.distributed.initialize() at the start of the program"
        )
    return client


def _put(client: Any, key: str, text: str) -> None:
    data = zlib.compress(text.encode(), 1)
    parts = [data[start : start + MAX_PART_BYTES] for start in range(0, len(data), MAX_PART_BYTES)]
    for number, part in enumerate(parts):
        client.key_value_set_bytes(f"{key}/{number}", part)
    client.key_value_set_bytes(key, str(len(parts)).encode())  # now all parts are there


def _get(client: Any, key: str, seconds: float, check: Callable[[], None]) -> str | None:
    """Returns the text of a key as soon as it is put; None if it is not within `seconds`."""
    count = _wait(client, key, time.monotonic() + seconds, check)
    if count is None:
        return None
    parts = [_wait(client, f"{key}/{number}", math.inf, lambda: None) for number in range(int(count))]
    return zlib.decompress(b"".join(part for part in parts if part is not None)).decode()


def _wait(client: Any, key: str, until: float, check: Callable[[], None]) -> bytes | None:
    while True:
        turn = max(0.01, min(_POLL_SECONDS, until - time.monotonic()))
        try:
            return client.blocking_key_value_get_bytes(key, int(1000 * turn))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise ProcessError(
                    f"the coordination service, which process 0 holds, does not answer: {str(error)[:300]}"
                ) from error
        if time.monotonic() >= until:
            return None
        check()
