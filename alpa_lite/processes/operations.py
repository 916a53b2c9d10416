"""What processes tell each other while they do something together, over the key-value store of JAX's runtime.

Every process takes part in the same operations of a kind in the same order, each with a number of its own, so that a
background thread that finishes a save and the main thread that reads another checkpoint never read each other's words.
Nothing here runs on devices: a step may be under way on them, and collectives of another program between its own could
wait forever. Whoever waits does so for a bounded time, and learns from a process that failed why it did.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax

from alpa_lite.errors import ProcessError
from alpa_lite.processes.store import VARIABLE, Store, timeout

_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
_remembered: Counter[str] = Counter()
"""Of each kind the first operation whose words are still stored."""

KEPT = 64
"""The words of so many operations stay: another one may be under way, with a process that has to hear it."""


class Operation:
    """One operation of all processes.

    Attributes:
      process: the index of this one.
      count: the number of processes.
    """

    def __init__(
        self, kind: str, what: str, seconds: float, *, error: type[Exception] = ProcessError, remedy: str = ""
    ) -> None:
        """Args:
        kind: operations of one kind are numbered by themselves.
        what: is done, for messages: "saving step 3".
        seconds: that others are waited for.
        error: what is raised.
        remedy: for the message where a process says nothing.
        """
        self.process, self.count = jax.process_index(), jax.process_count()
        self._kind, self._what, self._seconds = kind, what, seconds
        self._error, self._remedy = error, remedy
        self._number = next(_numbers[kind])
        self._store = Store(f"{kind}/{self._number}") if self.count > 1 else None

    def first(self, name: str, make: Callable[[], Any]) -> Any:
        """What process 0 makes, a JSON value, on all of them.

        Raises the operation's error where process 0 failed, or said nothing in time.
        """
        if self.count == 1:
            return make()
        return self._telling(name, make) if self.process == 0 else self._hear(name, 0)

    def every(self, name: str, make: Callable[[], Any]) -> list[Any]:
        """What each process makes, a JSON value, on all of them.

        Raises the operation's error where a process failed, and its error is not this process's own; or where it said
        nothing in time.
        """
        if self.count == 1:
            return [make()]
        value = self._telling(name, make)
        return [value if p == self.process else self._hear(name, p) for p in range(self.count)]

    def forget_earlier(self) -> None:
        """Removes what was said in operations long before this one, which all processes have begun; by process 0."""
        if self.count > 1 and self.process == 0:
            first = _remembered[self._kind]
            last = max(first, self._number - KEPT)
            for number in range(first, last):
                Store(f"{self._kind}/{number}").remove()
            _remembered[self._kind] = last

    def _telling(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` makes, told to all; or its error, raised after it was told."""
        try:
            value = make()
        except BaseException as error:
            self._tell(name, {"error": said(error)})
            raise
        self._tell(name, {"value": value})
        return value

    def _tell(self, name: str, message: dict[str, Any]) -> None:
        assert self._store is not None
        self._store.put(f"{name}/{self.process}", json.dumps(message))

    def _hear(self, name: str, process: int) -> Any:
        assert self._store is not None
        text = self._store.get(f"{name}/{process}", self._seconds)
        if text is None:
            raise self._error(
                f"{self._what}: process {process} said nothing for {self._seconds:g} s ({name}); {self._remedy}"
            )
        message = json.loads(text)
        if "error" in message:
            raise self._error(f"{self._what}: process {process} failed: {message['error']}")
        return message["value"]


def gathered(value: Any, what: str) -> list[Any]:
    """The values of all processes, by their numbers. All must call it, and the same number of times.

    Args:
      value: that JSON can write.
      what: names it in an error.

    Raises:
      ProcessError: a process did not come in time; names it.
    """
    remedy = f"all processes must call it; raise {VARIABLE} if that one is only slow"
    return Operation("gathered", what, timeout(), remedy=remedy).every("value", lambda: value)


def said(error: BaseException) -> str:
    """An error in words, with what caused it: storage errors come wrapped."""
    out = [str(error) or type(error).__name__]
    seen = error
    while (seen := seen.__cause__ or seen.__context__) is not None:  # type: ignore[assignment]
        if str(seen) and str(seen) not in " ".join(out):
            out.append(str(seen))
    return ": ".join(out)
