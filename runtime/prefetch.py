"""Prefetches batches to the devices, in one process or in several.

In a multi-process run each process may have the whole global batch, or only the rows that its devices read (`rows`), in
that order. In neither case is anything communicated: `jax.device_put` of a host array would compare it over all
processes, by a collective, which in a thread of its own could come before that of a step in one process and after it in
another. `jax.make_array_from_process_local_data` expects less rows than a loader has where processes share out other
dims, such as a sequence.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.processes.failure_propagation import monitor


def rows(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """The positions in the leading dim that devices of this process read, ascending; all of an array without dims."""
    if not shape:
        return np.arange(0)
    indices: Any = sharding.addressable_devices_indices_map(shape)
    parts = {index[0].indices(shape[0])[:2] for index in indices.values()}
    return np.unique(np.concatenate([np.arange(0), *(np.arange(*part) for part in parts)]))


def is_part(have: tuple[int, ...], sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Returns whether a shape is that of an array, or of the rows of it that this process reads."""
    return have == shape or (bool(shape) and have == (len(rows(sharding, shape)), *shape[1:]))


def assemble_leaf(leaf: Any, sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns the global array of a leaf that this process has whole, or in the rows that it reads; a copy."""
    host = np.asarray(leaf)
    own = rows(sharding, shape)
    whole = host.shape == shape

    def shard(index: Any) -> np.ndarray:
        if not whole:
            start, stop, _ = index[0].indices(shape[0])
            first = int(np.searchsorted(own, start))
            index = (slice(first, first + stop - start), *index[1:])
        return np.array(host[index], dtype)  # a copy, which the array may keep

    return jax.make_array_from_callback(shape, sharding, shard, dtype=dtype)


class Prefetch(Iterator[Any]):
    """The items of an iterable, placed by a thread of its own while the caller computes.

    At most `size` placed items wait. An error of the iterable, or of placing, is raised where its item would have come.
    `close()`, the end of a `with` block, and dropping the iterator end the thread, which closes the iterable's iterator
    if that can be closed.
    """

    def __init__(self, items: Iterable[Any], place: Callable[[Any], Any], size: int = 2) -> None:
        """Starts the thread, which calls `place` on each item."""
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=size)
        self._closed = threading.Event()
        work = (items, place, self._queue, self._closed, monitor.call_log.begin_prefetch())
        # The thread must not hold this object, or it would never be dropped.
        produce = _jax.carry_settings(_produce)
        self._thread = threading.Thread(target=produce, args=work, name="alpa_lite prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        """Returns the next placed item."""
        if self._closed.is_set():
            raise StopIteration
        item, error = self._queue.get()
        if error is None:
            return item
        self.close()
        raise error

    def close(self) -> None:
        """Ends the thread; items that wait are dropped."""
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._closed.set()


def _produce(
    items: Iterable[Any], place: Callable[[Any], Any], out: queue.Queue[Any], closed: threading.Event, series: str
) -> None:
    def put(item: Any, error: BaseException | None = None) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                return out.put((item, error), timeout=0.1)

    source: Any = None
    try:
        source = iter(items)
        for number, item in enumerate(source, 1):
            if closed.is_set():
                return
            put(monitor.call_log.place_batch(series, number, place, item))
        put(None, StopIteration())
    except BaseException as error:  # also what ends the thread is the caller's to see
        put(None, error)
    finally:
        monitor.call_log.end_prefetch(series)
        close = getattr(source, "close", None)
        if close is not None and closed.is_set():
            close()
