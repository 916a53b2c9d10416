"""Texts that processes tell each other, over the key-value store of JAX's coordination service.

A text is compressed and cut into parts that the service takes in one message (gRPC refuses more than 4 MB). Nothing is
ever overwritten: every text has a key of its own. A reader waits for a key in short turns, so that an interrupt is
heard, and for so long in all as the caller says.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.errors import OptionError, ProcessError

VARIABLE = "ALPA_LITE_PROCESS_TIMEOUT"
"""The environment variable for the seconds that a process waits for another one to come to the same place."""

TIMEOUT = 300.0
"""The seconds without it. Processes start apart by what their hosts differ in: loading data, a cold file system."""

PART = 1 << 20
"""Bytes of one value of the store."""

_TURN = 5.0  # seconds of one wait


def timeout() -> float:
    """Seconds that a process waits for another.

    Raises:
      OptionError: the environment variable is no positive number.
    """
    given = os.environ.get(VARIABLE, "")
    try:
        seconds = float(given) if given else TIMEOUT
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise OptionError(f"{VARIABLE}={given!r}: give a positive number of seconds")
    return seconds


class Store:
    """The key-value store, under one prefix. Every process makes one with the same prefix."""

    def __init__(self, prefix: str) -> None:
        """Raises ProcessError where the processes have no store: they were not joined by `jax.distributed`."""
        self._client: Any = _jax.coordination_client()
        if self._client is None:
            raise ProcessError(
                f"there are {jax.process_count()} processes, but no coordination service: call "
                "jax.distributed.initialize() at the start of the program"
            )
        self._prefix = f"alpa_lite/{prefix}"

    def put(self, key: str, text: str) -> None:
        """Tells a text."""
        data = zlib.compress(text.encode(), 1)
        parts = [data[start : start + PART] for start in range(0, len(data), PART)]
        for number, part in enumerate(parts):
            self._client.key_value_set_bytes(f"{self._prefix}/{key}/{number}", part)
        self._client.key_value_set_bytes(f"{self._prefix}/{key}", str(len(parts)).encode())  # now all are there

    def get(self, key: str, seconds: float, check: Callable[[], None] = lambda: None) -> str | None:
        """The text that was told, as soon as it is; None if it is not told in so many seconds.

        Args:
          check: called every few seconds while it waits; what it raises ends the wait.

        Raises:
          ProcessError: the service is gone: process 0, which holds it, has ended.
        """
        until = time.monotonic() + seconds
        count = self._wait(key, until, check)
        if count is None:
            return None
        parts = [self._wait(f"{key}/{number}", until + _TURN) for number in range(int(count))]
        if any(part is None for part in parts):
            return None
        return zlib.decompress(b"".join(part for part in parts if part is not None)).decode()

    def remove(self) -> None:
        """Removes all that was told under the prefix. No process may read of it any more."""
        self._client.key_value_delete(self._prefix)

    def _wait(self, key: str, until: float, check: Callable[[], None] = lambda: None) -> bytes | None:
        while True:
            turn = max(0.01, min(_TURN, until - time.monotonic()))
            try:
                return self._client.blocking_key_value_get_bytes(f"{self._prefix}/{key}", int(1000 * turn))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise ProcessError(
                        f"the coordination service, which process 0 holds, does not answer: {str(error)[:300]}"
                    ) from error
            if time.monotonic() >= until:
                return None
            check()
