"""Runs passes: times each, shows it while it works, and dumps its value."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from alpa_lite.report import dump, progress

P = ParamSpec("P")
T = TypeVar("T")


class Passes:
    """The runner of the passes of one compilation: `value = run("name of the lap", a_pass, ...)`.

    A pass may run several times; its laps are added up.

    Attributes:
      seconds: of each pass, by name, in the order of their first runs.
    """

    def __init__(self, show: progress.Report, write: dump.Write) -> None:
        """`show` is given the name of each running pass, `write` each name and value."""
        self.seconds: dict[str, float] = {}
        self._show, self._write = show, write

    def __call__(self, name: str, a_pass: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a pass, and returns its value. The seconds of a pass that raises are counted, too."""
        self._show.stage(name)
        start = time.perf_counter()
        try:
            value = a_pass(*args, **kwargs)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self._write(name, value)
        return value

    def count(self, what: str, done: int, total: int, is_lasting: bool = False) -> None:
        """Shows how many of some things are done, such as "layers priced"; see `progress.Report.count`."""
        self._show.count(what, done, total, is_lasting)


@contextlib.contextmanager
def passes(name: str, dump_dir: Any) -> Iterator[Passes]:
    """A runner for the step of that name; shows its progress, and writes values into `dump_dir`, if that is given."""
    with progress.show_progress(f"planning {name}") as show, dump.stages(dump_dir) as write:
        yield Passes(show, write)
