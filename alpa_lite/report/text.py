"""A plan as text of a hundred columns: `str(plan)`, and what `alpa-lite show` prints in colour.

Alike things are one row: twelve layers whose weights are sharded alike, or the same collective in each of them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from alpa_lite.plan import Leaf, Plan, Stage
from alpa_lite.report import grouping, units

WIDTH = 100
_BAR = 40
_MAX_ROWS = 48  # argument rows before the smallest are folded into one line
_MAX_COLLECTIVES = 16
_MAX_REPLICATED = 10


def render(plan: Plan) -> str:
    """The plan as plain text, at most 100 columns wide."""
    return plain(renderable(plan))


def plain(content: RenderableType, width: int = WIDTH) -> str:
    """Anything that Rich prints, as plain text without colour and without trailing blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(content, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def renderable(plan: Plan) -> Group:
    """The plan as something that a Rich console prints."""
    parts: list[RenderableType] = [
        _header(plan),
        section(f"Predicted step: {units.seconds(plan.step_seconds)}", _time(plan)),
    ]
    for number, stage in enumerate(plan.stages):
        suffix = f" of stage {number}" if plan.num_stages > 1 else ""
        parts.append(section(f"Shardings{suffix}", sharding_table(stage)))
        parts.append(section(f"Memory per device{suffix}", _memory(plan, stage)))
    parts.append(section("Collectives per step", _collectives(plan)))
    if plan.replicated:
        parts.append(section("Not distributed", _replicated(plan)))
    if plan.candidates:
        parts.append(section("Weighed against", _candidates(plan)))
    parts.append(section("Solver", *_solver(plan)))
    remarks = (("Checked", plan.verification), ("Compiler rewrites", plan.rewrites), ("Notes", plan.notes))
    parts += [section(heading, *lines) for heading, lines in remarks if lines]
    return Group(*parts)


def section(heading: str, *body: RenderableType) -> Group:
    """A heading after an empty line, and what stands below it, indented. Texts in `body` are taken as they are."""
    lines = (Text(part) if isinstance(part, str) else part for part in body)
    return Group(Text(f"\n{heading}", style="bold"), Padding(Group(*lines), (0, 0, 0, 2)))


def table(*columns: str, right: Sequence[int] = (), wide: int | None = None) -> Table:
    """A table without lines; columns numbered in `right` hold numbers, and column `wide` may wrap."""
    out = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_header=any(columns))
    for number, name in enumerate(columns):
        out.add_column(
            name,
            justify="right" if number in right else "left",
            no_wrap=number != wide,
            overflow="fold",
        )
    return out


def add(out: Table, *cells: RenderableType, style: str = "") -> None:
    """Adds a row. Texts are taken as they are: a layout such as "[data, None]" is not Rich's markup."""
    out.add_row(*(Text(cell, style=style) if isinstance(cell, str) else cell for cell in cells))


def _header(plan: Plan) -> RenderableType:
    head = Text("Plan ", style="bold")
    head.append(plan.method, style="bold cyan")
    head.append(f" for {plan.cluster}", style="default not bold")
    stage = plan.stages[0]
    facts = [f"{plan.num_devices} device{'s' if plan.num_devices != 1 else ''}"]
    if plan.num_stages == 1:
        facts.append(f"mesh {units.mesh(stage.mesh_shape, stage.axis_names)}")
    facts.append(f"{plan.num_stages} stage{'s' if plan.num_stages != 1 else ''}")
    facts.append(f"{plan.num_microbatches} micro-batch{'es' if plan.num_microbatches != 1 else ''}")
    if plan.schedule != "none":
        facts.append(f"schedule {plan.schedule}")
    facts.append(f"fingerprint {plan.fingerprint[:12]}")
    return Group(head, Text(", ".join(facts)))


@dataclass
class Cost:
    """What collectives cost per step: seconds, bytes per device, executions."""

    seconds: float = 0.0
    bytes: int = 0
    count: int = 0


def communication_by_axes(plan: Plan) -> dict[tuple[str, ...], Cost]:
    """What the collectives over each set of mesh axes cost per step, dearest first."""
    out: dict[tuple[str, ...], Cost] = {}
    for collective, seconds in zip(plan.collectives, plan.collective_seconds, strict=True):
        cost = out.setdefault(collective.axes, Cost())
        cost.seconds += seconds
        cost.bytes += collective.bytes * collective.count
        cost.count += collective.count
    return dict(sorted(out.items(), key=lambda item: -item[1].seconds))


def _time(plan: Plan) -> RenderableType:
    """Where the predicted step time goes."""
    compute = sum(stage.compute_seconds for stage in plan.stages)
    rows = [("compute", compute, "green")]
    rows += [(f"over {units.axes(axes)}", c.seconds, "yellow") for axes, c in communication_by_axes(plan).items()]
    rest = sum(stage.communication_seconds for stage in plan.stages) - sum(plan.collective_seconds)
    if rest > 5e-4 * plan.step_seconds:
        rows.append(("other communication", rest, "yellow"))
    whole = max(plan.step_seconds, sum(seconds for _, seconds, _ in rows))
    out = table("", "", "", "", right=(1, 2))
    for name, seconds, colour in rows:
        text = Text(units.bar(seconds, whole, _BAR), style=colour)
        add(out, f"{name}", units.seconds(seconds), units.percent(seconds, whole), text)
    return out


def sharding_table(stage: Stage) -> Table:
    """The arguments of a stage, alike ones as one row, below headings for what their paths begin with."""
    leaves = {leaf.path: leaf for leaf in stage.arguments}
    rows = grouping.group((leaf.path, (leaf.shape, leaf.dtype, leaf.role, leaf.spec)) for leaf in stage.arguments)
    shown, hidden = _largest(rows, leaves, stage)
    out = table("argument", "", "type", "sharding", "per device", right=(1, 4), wide=0)
    for part in grouping.sections(shown):
        alone = len(part.rows) == 1
        if not alone:
            heading = grouping.heading(part.prefix)
            members = [leaves[path] for row in part.rows for path in row.members]
            total = units.nbytes(sum(stage.bytes_per_device(leaf) for leaf in members))
            add(out, heading, "", "", "", total, style="bold")
        for row in part.rows:
            name = f"{row.path}" if alone else f"  {grouping.short(row.tokens[len(part.prefix) :])}"
            add(out, *_leaf_cells(name, row, leaves, stage))
    if hidden:
        size = sum(stage.bytes_per_device(leaves[path]) for row in hidden for path in row.members)
        count = sum(len(row.members) for row in hidden)
        add(out, "smaller ones", f"x {count}", "", "", units.nbytes(size))
    return out


def _leaf_cells(name: str, row: grouping.Row, leaves: dict[str, Leaf], stage: Stage) -> tuple[RenderableType, ...]:
    leaf = leaves[row.members[0]]
    count = f"x {len(row.members)}" if len(row.members) > 1 else ""
    sharding = units.spec(leaf.spec)
    style = "dim" if sharding == "replicated" else "cyan"
    size = units.nbytes(stage.bytes_per_device(leaf) * len(row.members))
    return name, count, type_text(leaf), Text(sharding, style=style), size


def type_text(leaf: Leaf) -> str:
    """Dtype and shape of a leaf, such as "f32[768,3072]"."""
    return units.type_name(leaf.dtype, leaf.shape)


def _largest(
    rows: list[grouping.Row], leaves: dict[str, Leaf], stage: Stage
) -> tuple[list[grouping.Row], list[grouping.Row]]:
    """The rows to show, in their order, and the smallest ones beyond the limit."""
    if len(rows) <= _MAX_ROWS:
        return rows, []
    size = {id(row): sum(stage.bytes_per_device(leaves[path]) for path in row.members) for row in rows}
    kept = {id(row) for row in sorted(rows, key=lambda row: -size[id(row)])[: _MAX_ROWS - 1]}
    return [row for row in rows if id(row) in kept], [row for row in rows if id(row) not in kept]


def _memory(plan: Plan, stage: Stage) -> Table:
    memory = stage.memory
    out = table("", "", "", "", right=(1, 2))
    kinds = ("params", "gradients", "optimizer", "activations")
    for kind in kinds:
        size = getattr(memory, kind)
        text = Text(units.bar(size, plan.memory_per_device, _BAR), style="blue")
        add(out, f"{kind}", units.nbytes(size), units.percent(size, plan.memory_per_device), text)
    text = Text(units.bar(memory.total, plan.memory_per_device, _BAR), style="bold blue")
    share = units.percent(memory.total, plan.memory_per_device)
    add(out, f"peak, of {units.nbytes(plan.memory_per_device)}", units.nbytes(memory.total), share, text)
    return out


@dataclass
class CollectiveRow:
    """Alike collectives: the same kind, axes, bytes and place but for layer numbers."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    where: str
    count: int
    seconds: float


def collective_rows(plan: Plan) -> list[CollectiveRow]:
    """The collectives of a plan, alike ones as one row, dearest first."""
    found: dict[tuple, list[int]] = {}
    for number, c in enumerate(plan.collectives):
        key = (c.kind, c.axes, c.bytes, c.stage, re.sub(r"\d+", "#", c.where))
        found.setdefault(key, []).append(number)
    rows = []
    for (kind, axes, size, _, _), numbers in found.items():
        where = grouping.template([plan.collectives[n].where for n in numbers])
        count = sum(plan.collectives[n].count for n in numbers)
        rows.append(CollectiveRow(kind, axes, size, where, count, sum(plan.collective_seconds[n] for n in numbers)))
    return sorted(rows, key=lambda row: -row.seconds)


def _collectives(plan: Plan) -> RenderableType:
    rows = collective_rows(plan)
    if not rows:
        return Text("none")
    out = table("kind", "axes", "bytes each", "count", "seconds", "where", right=(2, 3, 4), wide=5)
    for row in rows[:_MAX_COLLECTIVES]:
        cells = (units.nbytes(row.bytes), f"x {row.count}", units.seconds(row.seconds), row.where)
        add(out, f"{row.kind}", units.axes(row.axes), *cells)
    rest = rows[_MAX_COLLECTIVES:]
    if rest:
        count, seconds = sum(row.count for row in rest), sum(row.seconds for row in rest)
        add(out, f"{len(rest)} more rows", "", "", f"x {count}", units.seconds(seconds), "")
    size = sum(row.bytes * row.count for row in rows)
    count, seconds = sum(row.count for row in rows), sum(row.seconds for row in rows)
    cells = ("total", "", units.nbytes(size), f"x {count}", units.seconds(seconds), "")
    add(out, *cells, style="bold")
    return out


def _replicated(plan: Plan) -> RenderableType:
    out = table("operation", "", "bytes", "seconds", "why and where", right=(1, 2, 3), wide=4)
    for row in plan.replicated[:_MAX_REPLICATED]:
        count = f"x {row.count}" if row.count > 1 else ""
        cells = (count, units.nbytes(row.bytes), units.seconds(row.seconds), f"{row.reason}; {row.where}")
        add(out, f"{row.name}", *cells)
    rest = plan.replicated[_MAX_REPLICATED:]
    if rest:
        size, seconds = sum(r.bytes * r.count for r in rest), sum(r.seconds for r in rest)
        add(out, "lighter ones", f"x {sum(r.count for r in rest)}", units.nbytes(size), units.seconds(seconds), "")
    return out


def _candidates(plan: Plan) -> RenderableType:
    out = table("plan", "mesh", "step", "memory", "", right=(2, 3))
    order = sorted(plan.candidates, key=lambda c: (c.status != "chosen", c.step_seconds is None, c.step_seconds or 0.0))
    for candidate in order:
        step = "" if candidate.step_seconds is None else units.seconds(candidate.step_seconds)
        memory = "" if candidate.bytes_per_device is None else units.nbytes(candidate.bytes_per_device)
        shape = "x".join(map(str, candidate.mesh_shape))
        style = "bold" if candidate.status == "chosen" else ""
        cells = (f"{candidate.method}", shape, step, memory, _status(plan, candidate.status, candidate.step_seconds))
        add(out, *cells, style=style)
    return out


def _status(plan: Plan, status: str, seconds: float | None) -> str:
    """The status, with how much slower where that is known."""
    if status == "cutoff":
        return "cut off: cannot be faster"
    if status == "chosen" or seconds is None or seconds <= plan.step_seconds or plan.step_seconds <= 0:
        return status
    return f"{status} by {units.percent(seconds - plan.step_seconds, plan.step_seconds)}"


def _solver(plan: Plan) -> list[str]:
    solver = plan.solver
    gap = "no gap" if solver.gap == 0 else "gap under 0.01 %" if solver.gap < 1e-4 else f"gap {100 * solver.gap:.2g} %"
    costs = f"objective {units.seconds(solver.objective)}, bound {units.seconds(solver.bound)}, {gap}"
    effort = f"{solver.variables:,} variables" if solver.variables else "proved without an optimiser"
    lines = [f"{solver.status}: {costs}; {effort}, {units.seconds(solver.seconds)}"]
    if plan.planning_seconds:
        parts = [f"{name} {units.seconds(value)}" for name, value in plan.planning_seconds.items()]
        lines += _filled(f"planned in {units.seconds(sum(plan.planning_seconds.values()))}:", parts)
    return lines


def _filled(head: str, parts: Sequence[str]) -> list[str]:
    """Parts joined by commas, in lines that break between parts only."""
    lines = [head]
    for number, part in enumerate(parts):
        piece = part + ("," if number + 1 < len(parts) else "")
        if len(lines[-1]) + 1 + len(piece) <= WIDTH - 2:
            lines[-1] += f" {piece}"
        else:
            lines.append(f"  {piece}")
    return lines
