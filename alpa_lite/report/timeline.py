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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from alpa_lite.ir import units
from alpa_lite.ir.timeline import Event, Timeline

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
        share = units.percent(sum(timeline.idle_seconds), timeline.seconds * timeline.num_meshes)
        labels = f"{units.seconds(timeline.seconds)}, {share} idle"
        for kind, value in (("name", timeline.name or "step"), ("labels", labels), ("sort_index", process)):
            out.append(_metadata("process", kind, value, process))
        for number, (title, events) in enumerate(_tracks(timeline), start=1):
            out.append(_metadata("thread", "name", title, process, number))
            out.append(_metadata("thread", "sort_index", number, process, number))
            out += [{**_complete(event), "pid": process, "tid": number} for event in events]
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _metadata(of: str, kind: str, value: object, process: int, thread: int = 0) -> dict:
    return {"ph": "M", "name": f"{of}_{kind}", "pid": process, "tid": thread, "args": {kind: value}}


def _tracks(timeline: Timeline) -> Iterator[tuple[str, list[Event]]]:
    """The tasks of each submesh, then the transfers that it sends; each event is in the first track that is free."""
    for mesh in range(timeline.num_meshes):
        for title, sent in ((f"submesh {mesh}", False), (f"submesh {mesh}, transfers", True)):
            own = [event for event in timeline.events if event.mesh == mesh and (event.kind == "transfer") == sent]
            tracks: list[list[Event]] = [] if sent else [[]]
            for event in sorted(own, key=lambda event: (event.start, event.end)):
                start = _nanoseconds(event.start)
                free = next((track for track in tracks if not track or _nanoseconds(track[-1].end) <= start), None)
                if free is None:
                    tracks.append(free := [])
                free.append(event)
            for number, track in enumerate(tracks, start=1):
                yield f"{title} ({number})" if number > 1 else title, track


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _complete(event: Event) -> dict:
    """Returns an event with its duration.

    Ends are rounded, not durations, so that neighbours do not come to overlap.
    """
    start, end = _nanoseconds(event.start), _nanoseconds(event.end)
    given = {"stage": event.stage, "microbatch": event.microbatch, "destination": event.destination}
    arguments = {name: value for name, value in given.items() if value >= 0}
    if event.kind == "transfer":
        arguments |= {"source": event.mesh, "bytes": event.bytes}
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"ph": "X", "name": event.name, "cat": event.kind, **times, "args": arguments}


def draw(timeline: Timeline, width: int = WIDTH) -> Text:
    """Returns a drawing at most `width` columns wide: a row for each submesh, time to the right, and a legend.

    Where all of it cannot be drawn legibly, the middle is left out, and the last line says how much. Transfers are not
    drawn.

    Args:
      timeline: predicted or executed.
      width: in columns, at least 40.

    Raises:
      ValueError: a smaller width.
    """
    if width < 40:
        raise ValueError(f"width={width} is too narrow to draw in; give at least 40")
    tasks = [event for event in timeline.events if event.kind != "transfer" and event.end > event.start]
    digits = len(str(max((event.microbatch for event in tasks), default=0)))
    labels = [f"submesh {mesh} " for mesh in range(timeline.num_meshes)]
    margin = max(map(len, labels), default=0)
    view = _view(timeline.seconds, tasks, digits, width - margin - len(" 100 %"))
    out = _heading(timeline)
    for mesh, (label, idle) in enumerate(zip(labels, timeline.idle_seconds, strict=True)):
        row = sorted((event for event in tasks if event.mesh == mesh), key=lambda event: event.start)
        parts = Text(_GAP, "dim").join(_drawn(row, view, *window, timeline.num_meshes) for window in view.windows)
        share = units.percent(idle, timeline.seconds).rjust(len(" 100 %"))
        out.append_text(Text.assemble("\n", label.ljust(margin), parts, share))
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


def _drawn(events: list[Event], view: _View, low: int, high: int, num_meshes: int) -> Text:
    """Returns the columns from `low` to `high` of one submesh. A number that the border would cut is left out."""
    out, at = Text(), low
    for event in events:
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
    return out.append(_IDLE * (high - at), "dim")


def _heading(timeline: Timeline) -> Text:
    count = len({event.microbatch for event in timeline.events if event.microbatch >= 0})
    idle = units.percent(sum(timeline.idle_seconds), timeline.seconds * timeline.num_meshes)
    sizes = units.count_of(timeline.num_meshes, "submesh"), units.count_of(count, "micro-batch")
    parts = *sizes, units.seconds(timeline.seconds), f"idle {idle}"
    return Text.assemble((timeline.name or "step", "bold"), ": ", ", ".join(parts), no_wrap=True)


def _append_legend(out: Text, tasks: list[Event], width: int) -> None:
    """Appends a sample of each kind of cell that occurs, in lines of at most `width` columns."""
    kinds = {event.kind for event in tasks}
    samples = [(_LETTERS.get(kind, shade), STYLES[kind][0], kind) for kind, shade in _SHADES.items() if kind in kinds]
    numbers = [("numbers", "", "are micro-batches")] if any(event.microbatch >= 0 for event in tasks) else []
    used = 0
    for cell, style, meaning in [*numbers, *samples, (_IDLE, "dim", "idle (total at the right)")]:
        size = len(cell) + 1 + len(meaning)
        separator = "" if not used else "  " if used + 2 + size <= width else "\n"
        used = size if separator == "\n" else used + len(separator) + size
        out.append_tokens([(separator, None), (cell, style), (f" {meaning}", None)])


def _left_out(view: _View, tasks: list[Event]) -> str:
    """Returns the share of the step that the gap hides, and the micro-batches that are not visible at all."""
    (_, left), (right, _) = view.windows
    seen = {e.microbatch for e in tasks if view.column(e.start) < left or view.column(e.end) > right}
    hidden = sorted({event.microbatch for event in tasks} - seen)
    text = f"{_GAP.strip()} {units.percent(right - left, view.total)} of the step is left out"
    return f"{text}, with all of micro-batches {units.runs(hidden, ' to ')}" if hidden else text
