"""Progress while planning and compiling: nothing for the first second, then one live line.

    with planning("planning train_step") as report:
        report.stage("sharding")
        report.count("mesh shapes solved", 3, 10)  # planning train_step: sharding, mesh shapes solved 3 of 10 ██████

The line shows what is done and what is left, and changes only when something was done: it neither spins nor counts
seconds, which a planner that hangs could do as well. It shows on standard error where that is a terminal, and below the
running cell in notebooks, where the last line stays, with the seconds it took. Elsewhere it is silent: logs stay clean.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from alpa_lite.ir import units

DELAY = 1.0
"""Seconds of work before anything shows."""

Count = Callable[[str, int, int], None]
"""A progress callback: called with the name of the counted items, the number done, and the total."""

Show = Callable[[str], None]

_BAR_WIDTH = 20
_REFRESH_SECONDS = 0.1  # between two looks at whether the line has changed


class Report:
    """The object that `planning` yields: the work, its stage, and a count; silent unless something shows it."""

    def __init__(self, title: str) -> None:
        self.title, self._name = title, ""
        self._counted: tuple[str, int, int] | None = None
        self._lasting: tuple[str, int, int] | None = None

    def stage(self, name: str) -> None:
        """Begins the stage of that name, and ends the one before it."""
        self._name, self._counted = name, None

    def count(self, what: str, done: int, total: int, is_lasting: bool = False) -> None:
        """Shows that `done` of `total` items are done. The text `what` names them, such as "mesh shapes solved".

        A count ends with its stage, one with `is_lasting` when all are done; counts of stages do not replace it.
        """
        counted = None if is_lasting and done == total else (what, done, total)
        self._counted, self._lasting = (None, counted) if is_lasting else (counted, self._lasting)

    def line(self) -> str:
        """Returns the current stage, with its count and a progress bar if there is one."""
        text = f"{self.title}: {self._name}" if self._name else self.title
        for what, done, total in filter(None, [self._lasting or self._counted]):
            text += f", {what} {done} of {total} {units.bar(done, max(total, 1), _BAR_WIDTH)}".rstrip()
        return text


@contextmanager
def show_progress(title: str = "planning", stream: TextIO | None = None, delay: float = DELAY) -> Iterator[Report]:
    """Shows the progress of some work, once `delay` seconds have passed.

    Args:
      title: the name of the work, at the beginning of the line.
      stream: where to show it, by default standard error, or the notebook; nothing shows unless it is a terminal.
      delay: seconds.

    Yields:
      a `Report`, whose `stage(name)` is to be called as each stage begins, and `count` as parts of it are done.
    """
    report, over = Report(title), threading.Event()
    opened = _display(report, stream)
    if opened is None:
        yield report
        return
    watcher = threading.Thread(target=_watch, args=(report, opened, delay, over), daemon=True)
    watcher.start()
    try:
        yield report
    finally:
        over.set()
        watcher.join()


def _watch(report: Report, opened: AbstractContextManager[Show], delay: float, over: threading.Event) -> None:
    """Draws the line whenever it has changed until `over`; the work itself never waits for the terminal."""
    if over.wait(delay):
        return
    with opened as show:
        shown = ""
        while True:
            line = report.line()
            if line != shown:
                show(line)
                shown = line
            if over.wait(_REFRESH_SECONDS):
                return


def _display(report: Report, stream: TextIO | None) -> AbstractContextManager[Show] | None:
    """The place where lines show, once it is entered: the notebook, or a terminal; None where there is neither."""
    if stream is None and Console().is_jupyter:
        with contextlib.suppress(ImportError):
            from IPython.display import display  # pyright: ignore[reportMissingImports]

            return _in_notebook(display, report, time.perf_counter())
    stream = stream or sys.stderr  # None under pythonw
    return _in_terminal(Console(file=stream)) if stream and stream.isatty() else None


@contextmanager
def _in_terminal(console: Console) -> Iterator[Show]:
    """A line that changes in place, and goes away."""
    with Live(Text(""), console=console, transient=True, auto_refresh=False) as live:
        yield lambda line: live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


@contextmanager
def _in_notebook(display: Callable[..., Any], report: Report, start: float) -> Iterator[Show]:
    """One output of the cell, changed in place, where the shell can do that; it stays with the seconds of the work."""
    handle = display({"text/plain": report.line()}, raw=True, display_id=True)
    update = handle.update if handle else lambda data, raw: None
    try:
        yield lambda line: update({"text/plain": line}, raw=True)
    finally:
        update({"text/plain": f"{report.title}: {units.seconds(time.perf_counter() - start)}"}, raw=True)
