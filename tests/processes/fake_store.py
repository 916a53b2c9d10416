"""A key-value store like that of JAX's runtime, and threads that take the place of processes."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest

from alpa_lite import _jax
from alpa_lite.processes import channel

SECONDS = 60.0
"""Seconds after which threads that wait for each other fail the test."""


class FakeStore:
    """A client of the store; one is shared by all threads."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: Any, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    key_value_set_bytes = key_value_set

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for other in [one for one in self.values if one == key or one.startswith(f"{key}/")]:
                del self.values[other]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, Any]]:
        found = [(key, value) for key, value in self.values.items() if key.startswith(prefix)]
        if not found:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: nothing there")
        return found

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        until = time.monotonic() + timeout_in_ms / 1000
        with self._changed:
            while key not in self.values:
                if not self._changed.wait(until - time.monotonic()):
                    raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: not in time")
            return self.values[key]


class _Numbers:
    """Counters of collectives, of each process its own."""

    def __init__(self) -> None:
        self._counts: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)

    def __getitem__(self, kind: str) -> Iterator[int]:
        return self._counts[jax.process_index(), kind]


class Processes:
    """Threads with process indices of their own, which share a store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.count, self.store = count, FakeStore()
        self._index = threading.local()
        monkeypatch.setattr(jax, "process_index", lambda: getattr(self._index, "value", 0))
        monkeypatch.setattr(jax, "process_count", lambda: count)
        monkeypatch.setattr(_jax, "coordination_client", lambda: self.store)
        monkeypatch.setattr(channel, "_numbers", _Numbers())
        monkeypatch.setattr(channel, "_oldest", Counter())

    def act_as(self, index: int) -> None:
        """Gives this thread a process index."""
        self._index.value = index

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Runs a function of the process index in all; returns the results, or the errors, by index."""

        def run_one(index: int) -> Any:
            self.act_as(index)
            try:
                return program(index)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(run_one, index) for index in range(self.count)]
            return [future.result(timeout=SECONDS) for future in futures]
