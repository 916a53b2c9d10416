"""The pictures of the page: the mesh, the tiles of a tensor, memory as stacked bars, and the schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from alpa_lite.records import Leaf, Stage, spec_axes
from alpa_lite.report import units
from alpa_lite.report.html.elements import Markup, element, join, svg
from alpa_lite.timeline import Event, Timeline

COLOURS = {
    "params": "--c0", "frozen": "--c7", "gathered": "--c1", "gradients": "--c2", "optimizer": "--c3",
    "activations": "--c4", "in flight": "--c4", "temporaries": "--c5",
}  # fmt: skip
"""The colour of each kind of memory."""
KINDS = {"forward": "--c0", "backward": "--c3", "weight": "--c4", "prologue": "--c1", "update": "--c1", "step": "--c0"}
"""The colour of each kind of task."""
_MOST_DEVICES = 256
_MOST_PARTS = 16
_MOST_EVENTS = 6000


def mesh(stage: Stage, first: int) -> Markup:
    """The devices of a stage's mesh by their numbers: the last axis to the right, the one before it down.

    Args:
      first: the number of the mesh's first device.
    """
    shape: tuple[int, ...] = tuple(stage.mesh_shape)
    planes = math.prod(shape[:-2])
    columns = shape[len(shape) - 1]
    rows = shape[-2] if len(shape) > 1 else 1
    size, gap, left, top = 30, 4, 34, 20
    wide, high = columns * (size + gap), rows * (size + gap) + 16
    parts: list[Markup] = []
    last = stage.axis_names[-1]
    parts.append(element("text", f"{last} →", x=left, y=13, class_="dim"))
    if len(shape) > 1:
        parts.append(element("text", f"{stage.axis_names[-2]} ↓", x=2, y=top + 18, class_="dim"))
    shown = 0
    for plane, row, column in itertools.product(range(planes), range(rows), range(columns)):
        if shown == _MOST_DEVICES:
            break
        shown += 1
        number = first + (plane * rows + row) * columns + column
        x, y = left + column * (size + gap), top + plane * (high + 6) + row * (size + gap)
        place = ", ".join(
            f"{name}={at}" for name, at in zip(stage.axis_names, _coordinates(number - first, shape), strict=True)
        )
        box = element(
            "rect", x=x, y=y, width=size, height=size, rx=4, fill="var(--c0)", fill_opacity=0.25, stroke="var(--c0)"
        )
        text = element("text", number, x=x + size / 2, y=y + size / 2 + 4, text_anchor="middle")
        parts.append(element("g", element("title", f"device {number}: {place}"), box, text))
    label = f"mesh {units.mesh(shape, stage.axis_names)}, devices {first} to {first + stage.num_devices - 1}"
    height = top + math.ceil(shown / (rows * columns)) * (high + 6)
    more = stage.num_devices - shown
    return join(
        svg(left + wide, height, label, *parts), element("p", f"and {more} more", class_="dim") if more else None
    )


def _coordinates(number: int, shape: Sequence[int]) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        out.append(number % size)
        number //= size
    return tuple(reversed(out))


def tiles(stage: Stage, leaf: Leaf) -> Markup:
    """A tensor as a rectangle cut into its blocks; the first device's block is filled.

    Two dims are drawn: those that are cut, then the largest. A dim that is cut into more parts is drawn in 16.
    """
    wide, high = 84, 30
    axes = [*spec_axes(leaf.spec), *((),) * (len(leaf.shape) - len(leaf.spec))]
    sizes = dict(zip(stage.axis_names, stage.mesh_shape, strict=True))
    parts = [math.prod(sizes[a] for a in some) for some in axes]
    dims = sorted(range(len(leaf.shape)), key=lambda d: (parts[d] == 1, -leaf.shape[d]))[:2]
    dims.sort()
    down, right = (dims[0], dims[1]) if len(dims) == 2 else (None, dims[0]) if dims else (None, None)
    rows = 1 if down is None else min(_MOST_PARTS, parts[down])
    columns = 1 if right is None else min(_MOST_PARTS, parts[right])
    blocks = math.prod(parts)
    label = (
        f"{blocks} blocks, {stage.num_devices // max(1, blocks)} copies of each"
        if blocks > 1
        else "every device holds all"
    )
    frame = element("rect", x=1, y=1, width=wide, height=high, fill="var(--c0)", fill_opacity=0.22, class_="edge")
    own = element("rect", x=1, y=1, width=wide / columns, height=high / rows, fill="var(--c0)", fill_opacity=0.85)
    lines = [
        element("line", x1=1 + wide * i / columns, x2=1 + wide * i / columns, y1=1, y2=1 + high, class_="cut")
        for i in range(1, columns)
    ]
    lines += [
        element("line", y1=1 + high * i / rows, y2=1 + high * i / rows, x1=1, x2=1 + wide, class_="cut")
        for i in range(1, rows)
    ]
    return svg(wide + 2, high + 2, label, element("title", label), frame, own, *lines)


def stacked(rows: Sequence[tuple[str, Mapping[str, int], int]], budget: int) -> Markup:
    """Memory by kind, a bar a row of (name, bytes by kind, peak), of the budget."""
    most = max([budget, *(sum(kinds.values()) for _, kinds, _ in rows)], default=1)
    used = [kind for kind in COLOURS if any(kinds.get(kind) for _, kinds, _ in rows)]
    out: list[Markup] = []
    for name, kinds, peak in rows:
        pieces = [
            element("i", style=f"width:{100 * kinds[kind] / most:.3f}%;background:var({COLOURS[kind]})",
                    title=f"{kind}: {units.nbytes(kinds[kind])}")
            for kind in used
            if kinds.get(kind)
        ]  # fmt: skip
        said = ", ".join(f"{kind} {units.nbytes(kinds[kind])}" for kind in used if kinds.get(kind))
        bar = element("div", *pieces, class_="bar", role="img", aria_label=said)
        share = units.percent(peak, budget)
        out.append(
            join(element("span", name), bar, element("span", f"peak {units.nbytes(peak)}, {share}", class_="number"))
        )
    keys = [element("li", swatch(COLOURS[kind]), kind) for kind in used]
    note = f"Each bar is the budget of {units.nbytes(budget)} per device. Kinds need not peak together."
    return join(
        element("ul", *keys, class_="legend"), element("div", *out, class_="bars"), element("p", note, class_="dim")
    )


def swatch(colour: str) -> Markup:
    """A square of a colour, for legends."""
    return element("span", class_="key", style=f"background:var({colour})")


def schedule(timeline: Timeline) -> Markup:
    """What runs when on each submesh: a box a task, with its micro-batch where there is room."""
    wide, high, left = 1080.0, 26, 84
    scale = (wide - left) / timeline.seconds if timeline.seconds else 0.0
    parts: list[Markup] = []
    for number in range(timeline.num_meshes):
        parts.append(element("text", f"submesh {number}", x=0, y=number * (high + 6) + 17))
        y = number * (high + 6)
        parts.append(element("rect", x=left, y=y, width=wide - left, height=high, fill="var(--soft)"))
    tasks = [event for event in timeline.events if event.kind != "transfer" and event.end > event.start]
    parts += [_task(event, left, scale, high) for event in tasks[:_MOST_EVENTS]]
    bottom = timeline.num_meshes * (high + 6)
    for i in range(6):
        x = left + (wide - left) * i / 5
        text = element("text", units.seconds(timeline.seconds * i / 5), x=x, y=bottom + 12, class_="dim",
                       text_anchor="start" if i == 0 else "end" if i == 5 else "middle")  # fmt: skip
        parts.append(text)
    used = [kind for kind in KINDS if any(event.kind == kind for event in tasks)]
    keys = [element("li", swatch(KINDS[kind]), kind) for kind in used]
    idle = units.percent(sum(timeline.idle), timeline.seconds * timeline.num_meshes)
    label = f"schedule of {timeline.num_meshes} submeshes, {units.seconds(timeline.seconds)}, {idle} idle"
    more = len(tasks) - _MOST_EVENTS
    note = f"Numbers are micro-batches; {idle} of the time of all submeshes is idle."
    note += f" {more} tasks are left out." if more > 0 else ""
    picture = svg(wide, bottom + 18, label, *parts)
    return join(element("ul", *keys, class_="legend"), picture, element("p", note, class_="dim"))


def _task(event: Event, left: float, scale: float, high: float) -> Markup:
    x, width = left + event.start * scale, max(0.5, event.seconds * scale)
    y = event.mesh * (high + 6)
    title = f"{event.name}, stage {event.stage}, {units.seconds(event.seconds)}"
    box = element(
        "rect", x=x, y=y, width=width, height=high, fill=f"var({KINDS.get(event.kind, '--c5')})", stroke="var(--bg)",
        stroke_width=0.7,
    )  # fmt: skip
    number = str(event.microbatch)
    text = None
    if event.microbatch >= 0 and width > 7 * len(number) + 3:
        middle = x + width / 2
        text = element("text", number, x=middle, y=y + 17, text_anchor="middle", style="fill:var(--bg)")
    return element("g", element("title", title), box, text)
