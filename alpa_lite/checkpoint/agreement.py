"""What processes tell each other while they save and restore, through the key-value store of JAX's distributed runtime.

Every process takes part in the same operations in the same order, each with a number of its own, so that a background
thread that finishes a save and the main thread that reads another checkpoint never read each other's words. Nothing
here runs on devices: a step may be under way on them, and collectives of another program between its own could wait
forever. Whoever waits does so for a bounded time, and learns from a process that failed why it did.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

from alpa_lite.errors import CheckpointError
from alpa_lite.processes.store import Store

_numbers = itertools.count()
_remembered = [0]
"""The first operation whose words are still stored."""

KEPT = 64
"""The words of so many operations stay: another manager's save may be under way, with a process that has to hear it."""


class Agreement:
    """One operation of all processes.

    Attributes:
      process: the index of this one.
      count: the number of processes.
    """

    def __init__(self, what: str, timeout: float) -> None:
        """Args:
        what: is done, for messages: "saving step 3".
        timeout: the seconds that others are waited for.
        """
        self.process, self.count = jax.process_index(), jax.process_count()
        self._what, self._timeout = what, timeout
        self._number = next(_numbers)
        self._store = Store(f"checkpoint/{self._number}") if self.count > 1 else None

    def first(self, name: str, make: Callable[[], Any]) -> Any:
        """What process 0 makes, a JSON value, on all of them.

        Raises:
          CheckpointError: process 0 failed, or said nothing in time.
        """
        if self.count == 1:
            return make()
        return self._telling(name, make) if self.process == 0 else self._hear(name, 0)

    def every(self, name: str, make: Callable[[], Any]) -> list[Any]:
        """What each process makes, a JSON value, on all of them.

        Raises:
          CheckpointError: a process failed, and its error is not this process's own; or said nothing in time.
        """
        if self.count == 1:
            return [make()]
        value = self._telling(name, make)
        return [value if p == self.process else self._hear(name, p) for p in range(self.count)]

    def _telling(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` makes, told to all; or its error, raised after it was told."""
        try:
            value = make()
        except BaseException as error:
            self._tell(name, {"error": said(error)})
            raise
        self._tell(name, {"value": value})
        return value

    def forget_earlier(self) -> None:
        """Removes what was said in operations long before this one, which all processes have begun; by process 0."""
        if self.count > 1 and self.process == 0:
            last = max(_remembered[0], self._number - KEPT)
            for number in range(_remembered[0], last):
                Store(f"checkpoint/{number}").remove()
            _remembered[0] = last

    def _tell(self, name: str, message: dict[str, Any]) -> None:
        assert self._store is not None
        self._store.put(f"{name}/{self.process}", json.dumps(message))

    def _hear(self, name: str, process: int) -> Any:
        assert self._store is not None
        text = self._store.get(f"{name}/{process}", self._timeout)
        if text is None:
            raise CheckpointError(
                f"{self._what}: process {process} said nothing for {self._timeout:g} s ({name}); it has ended, or is "
                "not at the same checkpoint; timeout= waits longer"
            )
        message = json.loads(text)
        if "error" in message:
            raise CheckpointError(f"{self._what}: process {process} failed: {message['error']}")
        return message["value"]


def said(error: BaseException) -> str:
    """An error in words, with what caused it: storage errors come wrapped."""
    out = [str(error) or type(error).__name__]
    seen = error
    while (seen := seen.__cause__ or seen.__context__) is not None:  # type: ignore[assignment]
        if str(seen) and str(seen) not in " ".join(out):
            out.append(str(seen))
    return ": ".join(out)
