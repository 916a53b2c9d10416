from __future__ import annotations

import io
import time

import pytest

from alpa_lite.report import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_shows_the_stage_after_the_delay_on_a_terminal() -> None:
    stream = Terminal()
    with progress.planning("planning", stream, delay=0.0) as report:
        report.stage("tracing")
        deadline = time.perf_counter() + 5
        while "tracing" not in stream.getvalue() and time.perf_counter() < deadline:
            time.sleep(0.02)
    assert "planning: tracing" in stream.getvalue()


def test_shows_nothing_before_the_delay() -> None:
    stream = Terminal()
    with progress.planning("planning", stream, delay=60.0) as report:
        report.stage("tracing")
    assert stream.getvalue() == ""


def test_shows_nothing_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with progress.planning("planning", stream, delay=0.0) as report:
        report.stage("tracing")
        time.sleep(0.15)
    assert stream.getvalue() == ""


def test_stages_are_timed_even_if_one_fails() -> None:
    with pytest.raises(KeyError), progress.planning("planning", Terminal(), delay=60.0) as report:
        report.stage("tracing")
        report.stage("sharding")
        raise KeyError
    assert [name for name, _ in report.finished] == ["tracing", "sharding"]
    assert all(seconds >= 0 for _, seconds in report.finished)
