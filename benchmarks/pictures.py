"""The pictures of the documentation, drawn from stored rows as small SVGs: `python -m benchmarks pictures`.

What plans look like is a benchmark as well (`python -m benchmarks run pictures`): a GPT of 4 layers is planned as a
pipeline of four virtual CPU devices, whose predicted and executed timelines are kept, and for eight H100, of which
the printed summary is, and the shardings of a block under tensor parallelism.
"""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks import planning, published
from benchmarks.harness import ROOT, Benchmark, Row, Rows, get, load

FOLDER = ROOT / "docs" / "pictures"
COLOURS = {
    "forward": "#4c8bf5", "backward": "#f2a33a", "weight": "#c9762b", "update": "#7c5cbf", "prologue": "#999999",
    "step": "#7c5cbf", "transfer": "#cccccc",
}  # fmt: skip
KINDS = {"issue": "#d9534f", "published": "#4c8bf5", "unusual": "#7c5cbf", "toy": "#999999", "own": "#3a9d5d"}
BOXES = (
    ("Tracing", "jaxpr to a graph; state and batch"),
    ("Factors", "dims of each operation that are sharded together"),
    ("Micro-batches, layers", "a loop over examples; layers and rematerialisation"),
    ("Search", "candidates with bounds, one budget of work"),
    ("Sharding: integer program", "seconds under a limit of memory"),
    ("Stages, programs", "cuts, submeshes, schedules, transfers"),
    ("Lowering", "collectives written out"),
    ("Verification", "Shardy, and the targets' compilers"),
    ("Plan", "print, explain, save, diff, replay"),
    ("Runtime", "executables, transfers, donation"),
)


# -- what plans look like ---------------------------------------------------------------------------------------------


def measure(case: str) -> Row:
    """The timelines of a pipeline, and the summary and shardings of a plan on one mesh."""
    import alpa_lite
    from alpa_lite import models

    step, args = models.get("gpt").build("tiny", 16, layers=4)
    method = alpa_lite.Pipeline(num_stages=4, submesh_shapes=(1, 1, 1, 1), schedule="1f1b")
    run = alpa_lite.parallelize(step, method=method, num_microbatches=8)
    executed = [run.profile(None, *args) for _ in range(3)][-1]  # the first runs are slower
    predicted = run.plan(*args).division.timeline
    step, args = models.get("gpt").abstract("1.3B", 32)[:2]
    plan = alpa_lite.make_plan(step, *args, cluster="h100")
    sharded = alpa_lite.make_plan(step, *args, cluster="h100", method=alpa_lite.TensorParallel())
    leaves = {leaf.path: [list(leaf.shape), str(leaf.spec)] for leaf in sharded.stages[0].arguments}
    return {
        "predicted": predicted.to_json(), "executed": executed.to_json(), "summary": str(plan).splitlines(),
        "block": {path: leaf for path, leaf in leaves.items() if re.search(r"params.*(layers?_?\W*0|embed)", path)},
    }  # fmt: skip


# -- drawing ----------------------------------------------------------------------------------------------------------


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    """A rectangle with a tooltip."""
    tip = f"<title>{html.escape(title)}</title>" if title else ""
    shape = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{fill}"'
    return f"<rect {shape}>{tip}</rect>"


def words(x: float, y: float, text: str, size: int = 12, anchor: str = "start", more: str = "") -> str:
    """A line of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {place} {more}>{html.escape(text)}</text>"


def stroke(x: float, y: float, to_x: float, to_y: float, colour: str = "#888888", dashed: bool = False) -> str:
    """A line."""
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}"{dash}/>'


def dot(x: float, y: float, fill: str, title: str) -> str:
    """A point with a tooltip."""
    tip = f"<title>{html.escape(title)}</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" fill-opacity="0.7">{tip}</circle>'


def framed(width: float, height: float, shapes: Iterable[str]) -> str:
    """A picture on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-family="sans-serif">'
    return "\n".join([head, rect(0, 0, width, height, "#ffffff"), *shapes, "</svg>", ""])


def architecture() -> str:
    """The passes from the step to the runtime."""
    shapes = [words(20, 24, "A step written for one device", 14)]
    for number, (name, about) in enumerate(BOXES):
        y = 40 + 46 * number
        shapes += [rect(20, y, 460, 34, "#e8f0fe"), words(32, y + 22, name, 13, more='font-weight="bold"')]
        shapes += [
            words(468, y + 22, about, 11, "end"),
            *[stroke(250, y + 34, 250, y + 46)] * (number + 1 < len(BOXES)),
        ]
    return framed(500, 40 + 46 * len(BOXES), shapes)


def summary(lines: Sequence[str]) -> str:
    """The printed plan."""
    style = 'font-family="monospace" xml:space="preserve" fill="#222222"'
    shapes = [words(16, 26 + 16 * i, line, 12, more=style) for i, line in enumerate(lines)]
    return framed(32 + 7.3 * max(map(len, lines)), 36 + 16 * len(lines), shapes)


def timelines(row: Row) -> str:
    """The predicted and the executed timeline of one step, each at its own scale."""
    shapes: list[str] = []
    for number, name in enumerate(("predicted", "executed")):
        top, events = 30 + 150 * number, row[name]["events"]
        end = max(event[2] for event in events)
        shapes.append(words(10, top - 8, f"{name}: {1e3 * end:.2f} ms", 13))
        for mesh, start, stop, title, kind, *_ in events:
            if kind != "transfer":
                shapes.append(
                    rect(90 + 700 * start / end, top + 26 * mesh, 700 * (stop - start) / end, 22, COLOURS[kind], title)
                )
        shapes += [words(10, top + 16 + 26 * mesh, f"submesh {mesh}", 11) for mesh in range(row[name]["num_meshes"])]
    for number, kind in enumerate(("forward", "backward", "update")):
        shapes += [rect(90 + 110 * number, 302, 14, 14, COLOURS[kind]), words(110 + 110 * number, 314, kind)]
    return framed(810, 326, shapes)


def block(leaves: dict[str, Any]) -> str:
    """The shardings of a block: a bar of each leaf, cut along its sharded dims."""
    shapes, y = [words(10, 22, "Parameters of a transformer block under tensor parallelism on 8 devices", 14)], 38.0
    for path, (shape, spec) in leaves.items():
        shapes.append(words(10, y + 13, " ".join(re.findall(r"\w+", path)[2:]), 11))
        axes = re.sub(r"^\w+\(|\)$", "", spec).rstrip(",")
        sharded = bool(re.search(r"'\w+'", axes))
        width, colour = (14, "#4c8bf5") if sharded else (16, "#cccccc")
        shapes += [rect(300 + 16 * part, y, width, 18, colour) for part in range(8)]
        shapes.append(words(440, y + 13, f"{' x '.join(map(str, shape))}: {axes or 'replicated'}", 10))
        y += 24
    return framed(680, y + 8, shapes)


def scatter(
    points: Sequence[tuple[float, float, str, str]], x_title: str, y_title: str, *, diagonal: bool = False
) -> str:
    """Points (x, y, colour, title) on logarithmic axes, with decades marked."""
    low, high = (
        [bound([math.log10(value) for value in axis]) for axis in zip(*((x, y) for x, y, *_ in points), strict=True)]
        for bound in (lambda v: math.floor(min(v)), lambda v: math.ceil(max(v)))
    )
    if diagonal:
        low, high = [min(low)] * 2, [max(high)] * 2

    def place(axis: int, value: float) -> float:
        share = (math.log10(value) - low[axis]) / (high[axis] - low[axis])
        return 70 + 400 * share if axis == 0 else 430 - 400 * share

    shapes = []
    for axis in (0, 1):
        for power in range(low[axis], high[axis] + 1):
            at, label = place(axis, 10.0**power), f"{10.0**power:g}"
            shapes += [stroke(at, 30, at, 430, "#e5e5e5"), words(at, 446, label, 11, "middle")] if axis == 0 else [
                stroke(70, at, 470, at, "#e5e5e5"), words(64, at + 4, label, 11, "end")
            ]  # fmt: skip
    shapes += [stroke(70, 430, 470, 30, "#444444", dashed=True)] * diagonal
    shapes += [dot(place(0, x), place(1, y), colour, title) for x, y, colour, title in points]
    return framed(490, 476, [*shapes, words(270, 466, x_title, 12, "middle"), words(70, 18, y_title)])


def bars(values: Sequence[tuple[float, str, str]], title: str, mark: float | None = None) -> str:
    """Sorted values (value, colour, title) as bars, with a line at `mark`."""
    top, width = max(value for value, *_ in values), 8
    shapes = [words(40, 18, title)]
    for number, (value, colour, name) in enumerate(sorted(values)):
        height = 260 * value / top
        shapes.append(rect(40 + width * number, 290 - height, width - 2, height, colour, f"{name}: {value:.3g}"))
    for value in (0.0, top, *([] if mark is None else [mark])):
        y = 290 - 260 * value / top
        shapes += [words(34, y + 4, f"{value:.3g}", 11, "end"), stroke(40, y, 40 + width * len(values), y, dashed=True)]
    for number, (kind, colour) in enumerate(KINDS.items()):
        shapes += [rect(40 + 100 * number, 304, 12, 12, colour), words(57 + 100 * number, 314, kind, 11)]
    return framed(max(56 + width * len(values), 560), 326, shapes)


def planned(rows: Rows) -> list[tuple[str, Row, str]]:
    """The names, rows and colours of the cases that were planned."""
    return [(name, row, KINDS[planning.CASES[name].of]) for name, row in rows.items() if name in planning.CASES]


def against_baselines(rows: Rows) -> str:
    """Predicted seconds of Auto over those of the best textbook plan."""
    ratios = [
        (row["plan"]["step_seconds"] / best[1], colour, f"{name}, {best[0]}")
        for name, row, colour in planned(rows)
        if planning.CASES[name].method[0] == "Auto" and "plan" in row and (best := planning.best_textbook(row))
    ]
    return bars(ratios, "Predicted step of Auto over that of the fastest textbook plan that fits", 1.0)


def planning_seconds(rows: Rows) -> str:
    """CPU seconds of planning."""
    values = [(row["cpu_seconds"], colour, name) for name, row, colour in planned(rows) if "cpu_seconds" in row]
    return bars(values, "CPU seconds of planning, one core", 30.0)


def against_published(rows: Rows) -> str:
    """Predicted against measured seconds of published steps."""
    presets = dict.fromkeys(row["preset"] for row in published.DATA["rows"])
    palette = dict(zip(presets, itertools.cycle(KINDS.values()), strict=False))
    points = [
        (published.measured_seconds(row), rows[row["name"]]["seconds"], palette[row["preset"]], row["name"])
        for row in published.DATA["rows"]
        if row["name"] in rows and not row["excluded"]
    ]
    return scatter(points, "measured seconds of a step", "predicted seconds", diagonal=True)


def draw() -> None:
    """Draws every picture of which there are rows."""
    FOLDER.mkdir(exist_ok=True)
    plans = load(BENCHMARKS[0]).get("gpt")
    pictures: dict[str, Callable[[], str] | None] = {
        "architecture": architecture,
        "plan": (lambda: summary(plans["summary"])) if plans else None,
        "timeline": (lambda: timelines(plans)) if plans else None,
        "block": (lambda: block(plans["block"])) if plans else None,
        "auto": lambda: against_baselines(load(get("planning"))),
        "planning": lambda: planning_seconds(load(get("planning"))),
        "published": lambda: against_published(load(get("published"))),
    }
    for name, make in pictures.items():
        if make is not None:
            (FOLDER / f"{name}.svg").write_text(make())


BENCHMARKS = (Benchmark("pictures", lambda: ["gpt"], measure, devices=4),)
