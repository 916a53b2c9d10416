"""Progress while planning and compiling: nothing for the first second, then one live line.

    with planning("planning train_step") as report:
        report.stage("sharding")
        report.count("mesh shapes solved", 3, 10)  # planning train_step: sharding, mesh shapes solved 3 of 10 ██████

The line shows what is done and what is left, and changes only when something was done: it neither spins nor counts
seconds, which a planner that hangs could do as well. It shows on standard error where that is a terminal, and below the
running cell in notebooks, where the last line stays, with the seconds it took. Elsewhere it is silent: logs stay clean.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from alpa_lite.report import units

DELAY = 1.0
"""Seconds of work before anything shows."""

Count = Callable[[str, int, int], None]
"""Called with what is counted, how many are done, and how many there are."""

Show = Callable[[str], None]

_BAR = 20
_EVERY = 0.1  # seconds between two looks at whether the line has changed


class Report:
    """The object that `planning` yields; silent unless a terminal or a notebook shows it.

    Attributes:
      finished: (stage, seconds) for each finished stage, in order.
    """

    def __init__(self, title: str) -> None:
        """Starts the clock."""
        self.finished: list[tuple[str, float]] = []
        self.title = title
        self._name = ""
        self._counted: tuple[str, int, int] | None = None
        self._lasting = False
        self._start = self._since = time.perf_counter()

    def stage(self, name: str) -> None:
        """The stage of that name begins, and the one before it is over."""
        self._close()
        self._name, self._since = name, time.perf_counter()

    def count(self, what: str, done: int, total: int, lasting: bool = False) -> None:
        """Of `total` things that are to be done, `done` are; `what` names them, such as "mesh shapes solved".

        A count ends with its stage, a `lasting` one when all are done; counts of stages do not replace it.
        """
        if self._lasting and not lasting:
            return
        self._lasting = lasting and done < total
        self._counted = None if lasting and done == total else (what, done, total)

    def line(self) -> str:
        """The stage at work, and what of it is done and left."""
        text = f"{self.title}: {self._name}" if self._name else self.title
        counted = self._counted
        if counted is None:
            return text
        what, done, total = counted
        return f"{text}, {what} {done} of {total} {units.bar(done, max(total, 1), _BAR)}".rstrip()

    def last_line(self) -> str:
        """What stays in a notebook: the work, and how long it took."""
        return f"{self.title}: {units.seconds(time.perf_counter() - self._start)}"

    def _close(self) -> None:
        if self._name:
            self.finished.append((self._name, time.perf_counter() - self._since))
        self._name = ""
        if not self._lasting:
            self._counted = None


@contextmanager
def planning(title: str = "planning", stream: TextIO | None = None, delay: float = DELAY) -> Iterator[Report]:
    """Shows what is done of some work, once `delay` seconds have passed.

    Args:
      title: the name of the work, at the beginning of the line.
      stream: where to show it, by default standard error, or the notebook; nothing shows unless it is a terminal.
      delay: seconds.

    Yields:
      a `Report`, whose `stage(name)` is to be called as each stage begins, and `count` as parts of it are done.
    """
    report = Report(title)
    opened = _display(stream)
    if opened is None:
        try:
            yield report
        finally:
            report._close()
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(report, opened, delay, over), daemon=True)
    watcher.start()
    try:
        yield report
    finally:
        report._close()
        over.set()
        watcher.join()


def _watch(
    report: Report, opened: Callable[[Report], AbstractContextManager[Show]], delay: float, over: threading.Event
) -> None:
    """Draws the line whenever it has changed until `over`; the work itself never waits for the terminal."""
    if over.wait(delay):
        return
    with opened(report) as show:
        shown = ""
        while True:
            line = report.line()
            if line != shown:
                show(line)
                shown = line
            if over.wait(_EVERY):
                return


def _display(stream: TextIO | None) -> Callable[[Report], AbstractContextManager[Show]] | None:
    """How to open the place where lines show; None where there is none."""
    if stream is None:
        handle = _notebook()
        if handle is not None:
            return lambda report: _in_notebook(handle, report)
        stream = sys.stderr  # None under pythonw
    if stream is None or not stream.isatty():
        return None
    console = Console(file=stream)
    return lambda report: _in_terminal(console)


@contextmanager
def _in_terminal(console: Console) -> Iterator[Show]:
    with Live(Text(""), console=console, transient=True, auto_refresh=False) as live:
        yield lambda line: live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


@contextmanager
def _in_notebook(display: Callable[..., Any], report: Report) -> Iterator[Show]:
    """One output of the cell, changed in place."""
    handle = display({"text/plain": report.line()}, raw=True, display_id=True)
    if handle is None:  # a shell that cannot change what it has shown
        with nullcontext():
            yield lambda line: None
        return
    try:
        yield lambda line: handle.update({"text/plain": line}, raw=True)
    finally:
        handle.update({"text/plain": report.last_line()}, raw=True)


def _notebook() -> Callable[..., Any] | None:
    """IPython's `display` where this is a notebook, which Rich finds out."""
    if not Console().is_jupyter:
        return None
    try:
        from IPython.display import display  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return display
