"""Batches that are on the devices before the step asks for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_END = object()


class Prefetch(Iterator[Any]):
    """The items of an iterable, placed by a thread of its own while the caller computes.

    At most `size` placed items wait. An error of the iterable, or of placing, is raised where its item would have come.
    `close()`, the end of a `with` block, and dropping the iterator end the thread, which closes the iterable's iterator
    if that can be closed.
    """

    def __init__(self, items: Iterable[Any], place: Callable[[Any], Any], size: int = 2) -> None:
        """Starts the thread.

        Args:
          items: what to place.
          place: gives the placed item.
          size: how many placed items may wait.
        """
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(maxsize=size)
        self._closed = threading.Event()
        work = (items, place, self._queue, self._closed)
        # The thread must not hold this object, or it would never be dropped.
        self._thread = threading.Thread(target=_produce, args=work, name="alpa_lite prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        """The next placed item."""
        if self._closed.is_set():
            raise StopIteration
        item, error = self._queue.get()
        if item is not _END:
            return item
        self.close()
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread; items that wait are dropped."""
        self._closed.set()
        while True:
            try:
                self._queue.get_nowait()
            except queue.Empty:
                break
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._closed.set()


def _produce(items: Iterable[Any], place: Callable[[Any], Any], out: queue.Queue[Any], closed: threading.Event) -> None:
    def put(item: Any, error: BaseException | None = None) -> None:
        while not closed.is_set():
            try:
                out.put((item, error), timeout=0.1)
                return
            except queue.Full:
                continue

    source: Any = None
    try:
        source = iter(items)
        for item in source:
            if closed.is_set():
                return
            put(place(item))
    except BaseException as error:  # also what ends the thread is the caller's to see
        put(_END, error)
    else:
        put(_END)
    finally:
        close = getattr(source, "close", None)
        if close is not None and closed.is_set():
            close()
