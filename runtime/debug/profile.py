"""Profiles of a running pipeline: the most bytes that live arrays take, and when every task ran.

*Memory* is counted after every instruction. The compiler's own count ends at each executable; which buffers live
between them is the program's choice, and what it predicts (`program.peak_bytes`) is confirmed by a count of the arrays
that are there. Arrays that share memory count once: blocks are identified by device and address.

*Time* is recorded without delaying the step. The dispatch loop goes on at once; for each submesh a thread waits for the
results of its runs in their order, and for each link one waits for the arrays that it brings. A task ends when its
results are ready. It starts when it can run: when it has been dispatched, its inputs are there, and the task before it
on its submesh or link has ended. Results that a later run consumes cannot be waited for: they may be gone. In place of
them a function that takes the result and does nothing is dispatched behind the task.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from alpa_lite.ir.program import Free, Program, Run, Send
from alpa_lite.ir.timeline import Timeline
from alpa_lite.passes.programs import simulation
from alpa_lite.runtime.multihost import global_array

Track = tuple[int, int]
"""A submesh and -1, or a link: source and destination."""


class MemoryProfile:
    """Counts during one dispatch of a program, which it delays: called after every item.

    Attributes:
      most: for each submesh, bytes of the device that has held most so far.
    """

    def __init__(self, meshes: Sequence[Mesh], constants: Iterable[jax.Array]) -> None:
        """Args: the submeshes, and constants of the step, which count although they are there before."""
        self._meshes = meshes
        self._before = _blocks(jax.live_arrays()).keys() - _blocks(constants).keys()
        self.most = [0] * len(meshes)

    def __call__(self, _: int, env: Sequence[Any]) -> None:
        """Waits for all buffers, and counts."""
        jax.block_until_ready([x for x in env if x is not None])
        held: Counter[int] = Counter()
        for (device, pointer), size in _blocks(jax.live_arrays()).items():
            if (device, pointer) not in self._before:
                held[device] += size
        for mesh, devices in enumerate(self._meshes):
            self.most[mesh] = max(self.most[mesh], *(held[d.id] for d in devices.devices.flat))


def _blocks(arrays: Iterable[jax.Array]) -> dict[tuple[int, int], int]:
    """Bytes of the distinct blocks of arrays, by device and address."""
    found: dict[tuple[int, int], int] = {}
    for array in arrays:
        if array.is_deleted():
            continue
        for shard in array.addressable_shards:
            if shard.data.nbytes:
                found[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return found


class TimelineRecorder:
    """Records one dispatch of a program: a context manager, called after every item."""

    def __init__(self, program: Program, items: Sequence[Any], sharding_of: Callable[[int], NamedSharding]) -> None:
        """Compiles the functions that it dispatches in addition. `items` are those of the dispatch loop."""
        self._program, self._items = program, [item.source for item in items]
        consumed = {b for item in self._items if isinstance(item, Run) for b in program.consumed(item)}
        self._waited: list[int | None] = []  # of each item, the buffer whose readiness is its end
        self._peeks: dict[int, Any] = {}
        known: dict[Any, Any] = {}
        for item in items:
            outputs = [b for b in item.outputs if global_array.is_addressable(sharding_of(b))]
            lasting = [b for b in outputs if b not in consumed]
            chosen = min(lasting or outputs, key=lambda b: program.buffers[b].bytes, default=None)
            self._waited.append(chosen)
            if chosen is not None and not lasting:
                entry = program.buffers[chosen]
                key = entry.mesh, entry.layout, entry.shape, str(entry.dtype)
                if key not in known:
                    known[key] = _peek(jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=sharding_of(chosen)))
                self._peeks[chosen] = known[key]
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
            read, made = (item.inputs, item.outputs) if transfer is None else (transfer.sent, transfer.received)
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


def _peek(spec: jax.ShapeDtypeStruct) -> Any:
    """A compiled function that takes an array and does nothing with it."""
    return jax.jit(lambda array: np.uint8(0), keep_unused=True).lower(spec).compile()
