"""Timelines for people: a trace that Perfetto opens, and a drawing of a hundred columns.

The trace is JSON in the trace-event format of Chrome's tracing. A timeline is a process of the trace, a submesh is a
track of it, and the transfers that the submesh sends are a track below. Given the predicted and the executed timeline,
one file holds both, one below the other, from the same start.

The drawing has a row for each submesh, and a cell for each task: the number of the micro-batch, and a shade for the
kind of the task, so that it reads without colour too.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from alpa_lite import schedules
from alpa_lite.report import units
from alpa_lite.schedules import Schedule
from alpa_lite.timeline import Event, Timeline

WIDTH = 100
_GAP = " ⋯ "
_WIDEST = 8  # columns of the shortest kind of task, however much room there is
_IDLE = "·"
_SHADES = {"forward": "░", "backward": "▓", "weight": "▒", "prologue": "-", "update": "-"}
_LETTERS = {"prologue": "P", "update": "U"}  # for tasks that belong to no micro-batch
STYLES = {
    "forward": ("blue", "cyan"),
    "backward": ("green", "bright_green"),
    "weight": ("yellow", "bright_yellow"),
    "prologue": ("magenta", "magenta"),
    "update": ("magenta", "magenta"),
}
"""The colours of each kind of task; the second for every other stage of a submesh."""


def write(path: str | os.PathLike[str], *timelines: Timeline) -> None:
    """Writes `trace_events` of the timelines to `path`, for https://ui.perfetto.dev or chrome://tracing."""
    Path(path).write_text(json.dumps(trace_events(*timelines)) + "\n", encoding="utf-8")


def trace_events(*timelines: Timeline) -> dict:
    """The timelines in the trace-event format, as JSON values. Times there are microseconds from the step's start.

    A timeline becomes a process, called by its name. In it are a track "submesh i" and, where it sends anything, a
    track "submesh i, transfers". Events of one track that overlap, as transfers to different submeshes may, are put on
    further tracks "(2)", "(3)". Each event has its stage, micro-batch, destination and bytes as arguments.
    """
    out: list[dict] = []
    for process, timeline in enumerate(timelines):
        share = units.percent(sum(timeline.idle), timeline.seconds * timeline.num_meshes)
        out.append(_metadata("process_name", process, 0, name=timeline.name or "step"))
        out.append(_metadata("process_labels", process, 0, labels=f"{units.seconds(timeline.seconds)}, {share} idle"))
        out.append(_metadata("process_sort_index", process, 0, sort_index=process))
        number = 0
        for title, events in _tracks(timeline):
            for suffix, lane in _lanes(events):
                number += 1
                out.append(_metadata("thread_name", process, number, name=title + suffix))
                out.append(_metadata("thread_sort_index", process, number, sort_index=number))
                out += [_complete(event, process, number) for event in lane]
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _metadata(kind: str, process: int, thread: int, **arguments: object) -> dict:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}


def _tracks(timeline: Timeline) -> list[tuple[str, list[Event]]]:
    tracks = []
    for mesh in range(timeline.num_meshes):
        own = [event for event in timeline.events if event.mesh == mesh]
        tracks.append((f"submesh {mesh}", [event for event in own if event.kind != "transfer"]))
        sent = [event for event in own if event.kind == "transfer"]
        if sent:
            tracks.append((f"submesh {mesh}, transfers", sent))
    return tracks


def _lanes(events: list[Event]) -> list[tuple[str, list[Event]]]:
    """The events by start, each in the first lane that is free. At least one lane."""
    lanes: list[list[Event]] = [[]]
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        start = _nanoseconds(event.start)
        free = next((lane for lane in lanes if not lane or _nanoseconds(lane[-1].end) <= start), None)
        if free is None:
            lanes.append([event])
        else:
            free.append(event)
    return [(f" ({number})" if number > 1 else "", lane) for number, lane in enumerate(lanes, start=1)]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _complete(event: Event, process: int, thread: int) -> dict:
    """An event with its duration. Ends are rounded, not durations, so that neighbours do not come to overlap."""
    start, end = _nanoseconds(event.start), _nanoseconds(event.end)
    given = {"stage": event.stage, "microbatch": event.microbatch, "destination": event.destination}
    arguments = {name: value for name, value in given.items() if value >= 0}
    if event.kind == "transfer":
        arguments |= {"source": event.mesh, "bytes": event.bytes}
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.kind,
        "ts": start / 1000,
        "dur": (end - start) / 1000,
        "pid": process,
        "tid": thread,
        "args": arguments,
    }


def draw(what: Timeline | Schedule, width: int = WIDTH) -> Text:
    """A drawing at most `width` columns wide: a row for each submesh, time to the right, and a legend.

    A schedule is drawn at equal times: forward, gradients of inputs and gradients of parameters take one unit each, so
    a backward task that is not split takes two. Where all of it cannot be drawn legibly, the middle is left out, and
    the last line says how much. Transfers are not drawn.

    Args:
      what: a timeline, predicted or executed, or a schedule.
      width: in columns, at least 40.

    Raises:
      ValueError: a smaller width.
    """
    if width < 40:
        raise ValueError(f"width={width} is too narrow to draw in; give at least 40")
    timeline = schedules.simulate(what, forward=1, backward=1, weight=1) if isinstance(what, Schedule) else what
    tasks = [event for event in timeline.events if event.kind != "transfer" and event.end > event.start]
    digits = len(str(max((event.microbatch for event in tasks), default=0)))
    labels = [f"submesh {mesh} " for mesh in range(timeline.num_meshes)]
    margin = max(map(len, labels), default=0)
    view = _view(timeline.seconds, tasks, digits, width - margin - len(" 100 %"))
    out = _heading(what, timeline)
    rows: list[list[Event]] = [[] for _ in labels]
    for event in tasks:
        rows[event.mesh].append(event)
    for label, row, idle in zip(labels, rows, timeline.idle, strict=True):
        out.append("\n" + label.ljust(margin))
        for number, (low, high) in enumerate(view.windows):
            if number:
                out.append(_GAP, "dim")
            _draw_row(out, row, view, low, high, timeline.num_meshes)
        out.append(units.percent(idle, timeline.seconds).rjust(len(" 100 %")))
    out.append("\n")
    _append_legend(out, tasks, width)
    if len(view.windows) > 1:
        out.append("\n" + _left_out(view, tasks))
    return out


@dataclass(frozen=True)
class _View:
    """The part of the time that is drawn, and its scale.

    Attributes:
      scale: columns for each second.
      windows: ranges of columns; more than one if columns between them are left out.
      total: the number of columns without anything left out.
    """

    scale: float
    windows: tuple[tuple[int, int], ...]
    total: int

    def column(self, seconds: float) -> int:
        return round(seconds * self.scale)

    def visible(self, event: Event) -> bool:
        start, end = self.column(event.start), self.column(event.end)
        return any(start < high and end > low for low, high in self.windows)


def _view(seconds: float, tasks: list[Event], digits: int, room: int) -> _View:
    """Whole columns for the shortest kind of task if all tasks are multiples of it; else the full width.

    A task has room for a number and a shade at least; if the drawing is then too wide, only its two ends are drawn.
    """
    if not tasks:
        return _View(1.0, ((0, 0),), 0)
    kinds = {event.kind for event in tasks if event.microbatch >= 0} or {event.kind for event in tasks}
    unit = min(statistics.median(event.seconds for event in tasks if event.kind == kind) for kind in kinds)
    columns = min(_WIDEST, int(room * unit / seconds * (1 + 1e-9)))
    if all(abs(event.seconds / unit - round(event.seconds / unit)) < 1e-6 for event in tasks) and columns > digits:
        scale = columns / unit
        return _View(scale, ((0, round(seconds * scale)),), round(seconds * scale))
    shortest = min(event.seconds for event in tasks if event.kind in kinds and event.seconds >= 0.8 * unit)
    scale = min(_WIDEST / unit, max(room / seconds, (digits + 1) / shortest))
    total = round(seconds * scale)
    if total <= room:
        return _View(scale, ((0, total),), total)
    left = (room - len(_GAP)) // 2
    right = room - len(_GAP) - left
    return _View(scale, ((0, left), (total - right, total)), total)


def _draw_row(out: Text, events: list[Event], view: _View, low: int, high: int, num_meshes: int) -> None:
    """Appends the columns from `low` to `high` of one submesh. A number that the border would cut is left out."""
    at = low
    for event in sorted(events, key=lambda event: event.start):
        begin, finish = view.column(event.start), view.column(event.end)
        start, end = max(begin, at), min(finish, high)
        if start >= end:
            continue
        out.append(_IDLE * (start - at), "dim")
        name = str(event.microbatch) if event.microbatch >= 0 else _LETTERS.get(event.kind, "")
        whole = start == begin and len(name) <= end - start
        cell = (name if whole else "").ljust(end - start, _SHADES[event.kind])
        odd = max(0, event.stage) // num_meshes % 2
        out.append(cell, STYLES[event.kind][odd])
        at = end
    out.append(_IDLE * (high - at), "dim")


def _heading(what: Timeline | Schedule, timeline: Timeline) -> Text:
    count = len({event.microbatch for event in timeline.events if event.microbatch >= 0})
    parts = [
        f"{timeline.num_meshes} submesh{'es' * (timeline.num_meshes != 1)}",
        f"{count} micro-batch{'es' * (count != 1)}",
    ]
    if isinstance(what, Schedule):
        parts[1:1] = [f"{what.num_stages} stages"] if what.virtual > 1 else []
    else:
        parts.append(units.seconds(timeline.seconds))
    parts.append(f"idle {units.percent(sum(timeline.idle), timeline.seconds * timeline.num_meshes)}")
    out = Text(no_wrap=True)
    out.append(timeline.name or "step", "bold")
    out.append(": " + ", ".join(parts))
    return out


def _append_legend(out: Text, tasks: list[Event], width: int) -> None:
    """Appends a sample of each kind of cell that occurs, in lines of at most `width` columns."""
    kinds = {event.kind for event in tasks}
    samples = [(_LETTERS.get(kind, shade), STYLES[kind][0], kind) for kind, shade in _SHADES.items() if kind in kinds]
    numbers = [("numbers", "", "are micro-batches")] if any(event.microbatch >= 0 for event in tasks) else []
    used = 0
    for cell, style, meaning in [*numbers, *samples, (_IDLE, "dim", "idle (total at the right)")]:
        size = len(cell) + 1 + len(meaning)
        separator = "" if not used else "  " if used + 2 + size <= width else "\n"
        used = size + (used + len(separator) if separator != "\n" else 0)
        out.append(separator)
        out.append(cell, style)
        out.append(f" {meaning}")


def _left_out(view: _View, tasks: list[Event]) -> str:
    """The share of the step that the gap hides, and the micro-batches that are not visible at all."""
    (_, left), (right, _) = view.windows
    seen = {event.microbatch for event in tasks if view.visible(event)}
    hidden = sorted({event.microbatch for event in tasks} - seen)
    text = f"{_GAP.strip()} {units.percent(right - left, view.total)} of the step is left out"
    return f"{text}, with all of micro-batches {units.runs(hidden, ' to ')}" if hidden else text
