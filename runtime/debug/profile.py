"""A profile of a running pipeline: when every task ran.

Time is recorded without delaying the step. The dispatch loop goes on at once; for each submesh a thread waits for the
results of its runs in their order, and for each link one waits for the arrays that it brings. A task ends when its
results are ready. It starts when it can run: when it has been dispatched, its inputs are there, and the task before it
on its submesh or link has ended. Results that a later run consumes cannot be waited for: they may be gone. In place of
them a function that takes the result and does nothing is dispatched behind the task.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite.ir.program import Free, Program, Run, Send
from alpa_lite.ir.timeline import Timeline
from alpa_lite.passes.programs import simulation
from alpa_lite.runtime.multihost import global_array

Track = tuple[int, int]
"""A submesh and -1, or a link: source and destination."""


class TimelineRecorder:
    """Records one dispatch of a program: a context manager, called after every item."""

    def __init__(self, program: Program, items: Sequence[Any], sharding_of: Callable[[int], NamedSharding]) -> None:
        """Compiles the functions that it dispatches in addition. `items` are those of the dispatch loop."""
        self._program, self._items = program, [item.source for item in items]
        consumed = {b for item in self._items if isinstance(item, Run) for b in program.consumed_buffers(item)}
        self._waited: list[int | None] = []  # of each item, the buffer whose readiness is its end
        self._peeks: dict[int, Any] = {}
        for item in items:
            outputs = [b for b in item.outputs if global_array.is_addressable(sharding_of(b))]
            lasting = [b for b in outputs if b not in consumed]
            chosen = min(lasting or outputs, key=lambda b: program.buffers[b].bytes, default=None)
            self._waited.append(chosen)
            if chosen is not None and not lasting:
                entry = program.buffers[chosen]
                self._peeks[chosen] = _peek(entry.shape, entry.dtype, sharding_of(chosen))
        self._dispatched = [0.0] * len(items)
        self._ends: dict[int, Future[float]] = {}
        self._waiting: dict[Track, ThreadPoolExecutor] = {}  # one thread each
        self._begin = self._now = 0.0

    def __enter__(self) -> TimelineRecorder:
        tracks = {self._track(item) for item in self._items if not isinstance(item, Free)}
        self._waiting = {track: ThreadPoolExecutor(1) for track in tracks}
        self._begin = self._now = time.perf_counter()
        return self

    def __call__(self, number: int, env: Sequence[Any]) -> None:
        """Notes that an item has been dispatched since the last call."""
        chosen, item = self._waited[number], self._items[number]
        if isinstance(item, Free):
            return
        self._dispatched[number] = self._now
        array = None
        if chosen is not None:
            array = self._peeks[chosen](env[chosen]) if chosen in self._peeks else env[chosen]
        self._ends[number] = self._waiting[self._track(item)].submit(_end_of, array)
        self._now = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        for threads in self._waiting.values():
            threads.shutdown()

    def timeline(self) -> Timeline:
        """Returns the recorded timeline, with the names that the simulation gives."""
        makers = simulation.producers(self._program)
        free: dict[Track, float] = {}
        ready: dict[int, float] = {}  # buffer -> when it was there
        events = []
        for number, item in enumerate(self._items):
            if isinstance(item, Free):
                continue
            track = self._track(item)
            transfer = None if isinstance(item, Run) else self._program.transfers[item.transfer]
            ends = (transfer.sent_buffers, transfer.received_buffers) if transfer else (item.inputs, item.outputs)
            read, made = ends
            start = max([self._dispatched[number], free.get(track, 0.0), *(ready.get(b, 0.0) for b in read)])
            end = free[track] = max(start, self._ends[number].result())
            ready.update(dict.fromkeys(made, end))
            times = max(0.0, start - self._begin), max(0.0, end - self._begin)
            if isinstance(item, Run):
                events.append(simulation.run_event(self._program, item, *times))
            else:
                events.append(simulation.transfer_event(self._program, item.transfer, makers, *times))
        return Timeline(tuple(events), len(self._program.submeshes), "executed")

    def _track(self, item: Run | Send) -> Track:
        if isinstance(item, Run):
            return self._program.executables[item.executable].mesh, -1
        transfer = self._program.transfers[item.transfer]
        return transfer.source, transfer.destination


def _end_of(array: Any) -> float:
    """Waits for an array, and returns when it was there."""
    with contextlib.suppress(Exception):  # the dispatch loop or the reader of the results meets it too
        jax.block_until_ready(array)
    return time.perf_counter()


@functools.lru_cache(maxsize=100)
def _peek(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """Returns a compiled function that takes an array and does nothing with it."""
    spec = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return jax.jit(lambda array: np.uint8(0), keep_unused=True).lower(spec).compile()
