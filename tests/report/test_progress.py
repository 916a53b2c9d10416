"""The line of progress, on a terminal and in a notebook, and the log: a sentence for each planning and compilation."""

import io
import logging
import re
import sys
import time
import types
from typing import Any

import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.report import progress
from gallery.steps import sgd, square_layers


class Stream(io.StringIO):
    terminal = True

    def isatty(self) -> bool:
        return self.terminal


def wait_for(there: Any) -> None:
    deadline = time.perf_counter() + 60
    while not there() and time.perf_counter() < deadline:
        time.sleep(0.02)
    assert there()


def test_shows_the_stage_and_what_is_done_and_left_and_then_stands_still() -> None:
    """A line that moved by itself would look the same if planning hung."""
    stream = Stream()
    with progress.show_progress("planning step", stream, delay=0.0) as report:
        report.stage("sharding")
        wait_for(lambda: "planning step: sharding" in stream.getvalue())
        report.count("mesh shapes solved", 3, 10)
        wait_for(lambda: "mesh shapes solved 3 of 10 ██████" in stream.getvalue())
        before = stream.getvalue()
        assert "███████" not in before
        time.sleep(0.3)
        assert stream.getvalue() == before


def test_counts_end_with_their_stage_and_lasting_ones_when_all_is_done() -> None:
    report = progress.Report("planning")
    report.stage("costs")
    report.count("layers priced", 1, 4)
    assert report.line().startswith("planning: costs, layers priced 1 of 4 ")
    report.stage("slicing")
    assert report.line() == "planning: slicing"
    report.count("stages planned", 1, 3, is_lasting=True)
    report.stage("sharding")
    report.count("mesh shapes solved", 1, 1)
    assert report.line().startswith("planning: sharding, stages planned 1 of 3 ")
    report.count("stages planned", 3, 3, is_lasting=True)
    assert report.line() == "planning: sharding"


@pytest.mark.parametrize(("terminal", "delay"), [(True, 60.0), (False, 0.0)])
def test_shows_nothing_before_the_delay_or_without_a_terminal(terminal: bool, delay: float) -> None:
    stream = Stream()
    stream.terminal = terminal
    with progress.show_progress("planning", stream, delay=delay) as report:
        report.stage("tracing")
        time.sleep(0.15)
    assert stream.getvalue() == ""


def test_in_a_notebook_one_output_of_the_cell_changes_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def display(data: dict[str, str], raw: bool, display_id: bool = True) -> Any:
        assert raw and display_id
        shown.append(data["text/plain"])
        return types.SimpleNamespace(update=display)

    monkeypatch.setattr(progress, "Console", lambda: types.SimpleNamespace(is_jupyter=True))
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    with progress.show_progress("planning step", delay=0.0) as report:
        report.stage("sharding")
        report.count("mesh shapes solved", 1, 2)
        wait_for(lambda: any("mesh shapes solved 1 of 2" in line for line in shown))
    assert shown[-1].startswith("planning step: ") and shown[-1].endswith("s")
    quick = len(shown)
    with progress.show_progress("planning step", delay=60.0):
        pass
    assert len(shown) == quick


step = sgd(square_layers)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    counts: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        progress.Report, "count", lambda self, what, done, total, is_lasting=False: counts.append((what, done, total))
    )
    return counts


def test_one_line_for_each_planning_and_compilation(
    caplog: pytest.LogCaptureFixture, counted: list[tuple[str, int, int]]
) -> None:
    planned = alpa_lite.parallelize(step)
    with caplog.at_level(logging.INFO, logger="alpa_lite"):
        state, _ = planned([jnp.ones((16, 8))], jnp.ones((32, 16)))
        planned(state, jnp.ones((32, 16)))
        planned([jnp.ones((16, 8))], jnp.ones((64, 16)))
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    reasons = [re.search(r"\(([^)]*)\)", line) for line in lines if line.startswith("planned step for 8 cpu")]
    wanted = ["first signature of its arguments", "another signature of its arguments"]
    assert [found[1] for found in reasons if found] == wanted
    assert sum(line.startswith("compiled step: 1 executable in ") for line in lines) == 2
    assert {"% of the search budget", "executables compiled"} <= {what for what, _, _ in counted}
    assert all(0 <= done <= total for _, done, total in counted)


def test_pipelines_count_layers_stages_and_executables(counted: list[tuple[str, int, int]]) -> None:
    planned = alpa_lite.parallelize(step, method=alpa_lite.Pipeline(num_stages=2), num_microbatches=2)
    planned([jnp.ones((16, 16))] * 2, jnp.ones((32, 16)))
    for what in ("layers priced", "stages planned", "executables compiled"):
        numbers = [(done, total) for name, done, total in counted if name == what]
        assert numbers and numbers == sorted(numbers), what
