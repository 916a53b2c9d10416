"""Progress while planning: nothing for the first second, then one live line on standard error.

    with planning() as report:
        report.stage("tracing")
        ...
        report.stage("sharding (4, 2)")

It shows only where standard error is a terminal; logs and notebooks stay clean.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

from alpa_lite.report import units

DELAY = 1.0
"""Seconds of planning before anything shows."""


class Report:
    """The object that `planning` yields; silent unless a terminal shows it.

    Attributes:
      finished: (stage, seconds) for each finished stage, in order.
    """

    def __init__(self, title: str) -> None:
        """Starts the clock."""
        self.finished: list[tuple[str, float]] = []
        self._title = title
        self._name = ""
        self._start = self._since = time.perf_counter()

    def stage(self, name: str) -> None:
        """The stage of that name begins, and the one before it is over."""
        self._close()
        self._name, self._since = name, time.perf_counter()

    def line(self) -> str:
        """The stage at work, and how long it and the whole have taken."""
        now = time.perf_counter()
        return f"{self._title}: {self._name} {units.seconds(now - self._since)} of {units.seconds(now - self._start)}"

    def _close(self) -> None:
        if self._name:
            self.finished.append((self._name, time.perf_counter() - self._since))
            self._name = ""


@contextmanager
def planning(title: str = "planning", stream: TextIO | None = None, delay: float = DELAY) -> Iterator[Report]:
    """Shows the running stage of planning, on `stream` (standard error), once `delay` seconds have passed.

    Args:
      title: the name of the work, at the beginning of the line.
      stream: where to show it; nothing is shown unless it is a terminal.
      delay: seconds.

    Yields:
      a `Report`, whose `stage(name)` is to be called as each stage begins.
    """
    report = Report(title)
    stream = sys.stderr if stream is None else stream
    if stream is None or not stream.isatty():  # pythonw has no standard error
        try:
            yield report
        finally:
            report._close()
        return
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(report, stream, delay, over), daemon=True)
    watcher.start()
    try:
        yield report
    finally:
        report._close()
        over.set()
        watcher.join()


def _watch(report: Report, stream: TextIO, delay: float, over: threading.Event) -> None:
    """Redraws the line ten times a second until `over`; planning itself never waits for the terminal."""
    if over.wait(delay):
        return
    spinner = Spinner("dots")
    console = Console(file=stream)
    with Live(spinner, console=console, transient=True, auto_refresh=False) as live:
        while not over.wait(0.1):
            spinner.update(text=report.line())
            live.refresh()
