"""Timelines as traces and drawings: nothing lost, nothing that overlaps, legible within the width."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.text import Text

from alpa_lite.ir import schedules, units
from alpa_lite.ir.timeline import Event, Timeline
from alpa_lite.passes.programs import simulation
from alpa_lite.report import console
from alpa_lite.report import timeline as report
from tests import scheduling
from tests.pipelines import every, toy


def example() -> Timeline:
    made = schedules.schedule("1f1b", 3, 4)
    program = toy(made, forward=0.001, backward=0.001, weight=0.001, prologue=0.0005, update=0.002, transfer=0.0003)
    return simulation.simulate(program)


def draw(schedule: schedules.Schedule, width: int = 100) -> Text:
    """A schedule at equal times: forward, gradients of inputs and of parameters take a second each."""
    return report.draw(scheduling.simulate(schedule, forward=1, backward=1, weight=1), width)


def complete(trace: dict) -> list[dict]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X"]


def names(trace: dict, kind: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == kind}


def test_trace_holds_every_event_in_microseconds() -> None:
    timeline = example()
    trace = report.trace_events(timeline)
    tracks = names(trace, "thread_name")
    found = sorted((tracks[e["pid"], e["tid"]], e["name"], e["cat"], e["ts"], e["dur"]) for e in complete(trace))
    expected = []
    for e in timeline.events:
        start, end = round(e.start * 1e9), round(e.end * 1e9)
        track = f"submesh {e.mesh}" + ", transfers" * (e.kind == "transfer")
        expected.append((track, e.name, e.kind, start / 1e3, (end - start) / 1e3))
    assert found == sorted(expected)
    first = next(e for e in complete(trace) if e["name"] == "forward 0")
    assert (first["ts"], first["dur"], first["args"]) == (500.0, 1000.0, {"stage": 0, "microbatch": 0})
    sent = next(e for e in complete(trace) if e["cat"] == "transfer" and e["name"] == "backward 1")
    assert sent["args"] == {"stage": 1, "microbatch": 1, "source": 1, "destination": 0, "bytes": 0}
    update = next(e for e in complete(trace) if e["cat"] == "update")
    assert update["args"] == {"stage": 0}


def test_tracks_are_in_order_and_only_those_needed() -> None:
    trace = report.trace_events(example())
    order = {
        (e["pid"], e["tid"]): e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "thread_sort_index"
    }
    tracks = names(trace, "thread_name")
    wanted = [f"submesh {mesh}{kind}" for mesh in range(3) for kind in ("", ", transfers")]
    assert [tracks[key] for key in sorted(tracks, key=lambda key: order[key])] == wanted
    both = (
        Event(1, 0.0, 2.0, "forward 3", "transfer", 1, 3, 2),
        Event(1, 1.0, 3.0, "backward 0", "transfer", 1, 0, 0),
        Event(1, 2.0, 4.0, "forward 4", "transfer", 1, 4, 2),
    )
    trace = report.trace_events(Timeline(both, 3))
    tracks = names(trace, "thread_name")
    assert [(tracks[e["pid"], e["tid"]], e["name"]) for e in complete(trace)] == [
        ("submesh 1, transfers", "forward 3"),
        ("submesh 1, transfers", "forward 4"),
        ("submesh 1, transfers (2)", "backward 0"),
    ]
    empty = report.trace_events(Timeline((), 2, "empty"))
    assert list(names(empty, "thread_name").values()) == ["submesh 0", "submesh 1"]


times = st.floats(0, 10, allow_nan=False)


@given(st.lists(st.tuples(st.integers(0, 2), times, times, st.booleans()), max_size=30))
@settings(max_examples=40, deadline=None)
def test_nothing_overlaps_on_a_track_whatever_was_measured(spans: list[tuple[int, float, float, bool]]) -> None:
    events = tuple(
        Event(mesh, start, start + length, "forward 1", "transfer" if sent else "forward", 0, 1)
        for mesh, start, length, sent in spans
    )
    found = complete(report.trace_events(Timeline(events, 3)))
    assert len(found) == len(events)
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in found:
        start, length = round(e["ts"] * 1000), round(e["dur"] * 1000)
        tracks.setdefault((e["pid"], e["tid"]), []).append((start, start + length))
    for spans_of_track in tracks.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans_of_track)))


def test_two_timelines_lie_side_by_side_in_a_file(tmp_path: Path) -> None:
    predicted = example()
    executed = Timeline(predicted.events[:-1], 3, "executed")
    report.write(tmp_path / "both.json", predicted, executed)
    trace = json.loads((tmp_path / "both.json").read_text(encoding="utf-8"))
    assert trace == report.trace_events(predicted, executed)
    assert names(trace, "process_name") == {(0, 0): "predicted", (1, 0): "executed"}
    counts = [sum(e["pid"] == process for e in complete(trace)) for process in (0, 1)]
    assert counts == [len(predicted.events), len(predicted.events) - 1]
    labels = [e["args"]["labels"] for e in trace["traceEvents"] if e["name"] == "process_labels"]
    assert labels[0].startswith(units.seconds(predicted.seconds))


def cells(drawing: str, mesh: int) -> str:
    """The cells of one row."""
    line = next(line for line in drawing.splitlines() if line.startswith(f"submesh {mesh} "))
    return line.removeprefix(f"submesh {mesh} ").rsplit(maxsplit=2)[0]


def test_kinds_differ_without_colour_and_with_it() -> None:
    drawing = draw(schedules.schedule("zb-h1", 2, 3), width=60)
    styles = {drawing.plain[s.start : s.end][1]: s.style for s in drawing.spans if s.end - s.start == 4}
    assert len({styles[shade] for shade in "░▓▒"}) == 3
    assert console.render_plain(drawing) == "\n".join(line.rstrip() for line in drawing.plain.splitlines())


def test_every_task_is_drawn_where_there_is_room() -> None:
    for made in every((1, 2, 3), (1, 2, 3)):
        drawing = draw(made, width=400).plain
        assert "⋯" not in drawing
        for mesh, tasks in enumerate(made.tasks):
            drawn = [c for c in cells(drawing, mesh) if c.isdigit()]
            assert drawn == [str(task.microbatch) for task in tasks]


@pytest.mark.parametrize("width", [40, 100, 137])
def test_no_row_is_wider_than_requested(width: int) -> None:
    for made in every((1, 4), (1, 64)):
        lines = draw(made, width).plain.splitlines()
        rows = [line for line in lines if line.startswith("submesh")]
        assert len(rows) == made.num_meshes and len({len(row) for row in rows}) == 1
        assert max(map(len, lines if width >= 100 else rows)) <= width
    with pytest.raises(ValueError, match="width=39 is too narrow"):
        report.draw(example(), 39)


def numbers(text: str) -> list[int]:
    return [int(n) for n in "".join(c if c.isdigit() else " " for c in text).split()]


def test_a_number_is_never_cut() -> None:
    """Whatever the border cuts, a number in the drawing is that of a micro-batch that runs on that submesh there."""
    made = schedules.schedule("gpipe", 2, 64)
    for width in range(40, 120, 3):
        left, right = map(numbers, cells(draw(made, width).plain, 0).split("⋯"))
        assert left == list(range(len(left))) and right == list(range(64 - len(right), 64))
