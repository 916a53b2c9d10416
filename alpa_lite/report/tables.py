"""The tables that reports are made of: primitives of a hundred columns, arguments with their shardings, collectives.

Identical things are one row: twelve layers whose weights have one sharding, or the same collective in each of them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from alpa_lite.paths import shown
from alpa_lite.records import Collective, Leaf, Stage
from alpa_lite.report import grouping, units

WIDTH = 100
BAR = 40
_MAX_ROWS = 48  # argument rows before the smallest are folded into one line


def plain(content: RenderableType, width: int = WIDTH) -> str:
    """Anything that Rich prints, as plain text without colour and without trailing blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(content, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def section(heading: str, *body: RenderableType) -> Group:
    """A heading after an empty line, and `body` below it, indented. Texts in `body` are taken as they are."""
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


def bars(rows: Iterable[tuple[str, float, str]], whole: float) -> Table:
    """Seconds as rows of (name, seconds, colour), each with its share of `whole`."""
    out = table("", "", "", "", right=(1, 2))
    for name, seconds, colour in rows:
        text = Text(units.bar(seconds, whole, BAR), style=colour)
        add(out, name, units.seconds(seconds), units.percent(seconds, whole), text)
    return out


def sharding_table(*stages: Stage) -> Table:
    """The arguments of identical stages, identical ones as one row, below headings for the beginnings of their paths.

    Counts and bytes are for one of the stages.
    """
    leaves = {leaf.path: leaf for stage in stages for leaf in stage.arguments}
    rows = grouping.group(
        (leaf.path, (leaf.shape, leaf.dtype, leaf.role, leaf.spec)) for stage in stages for leaf in stage.arguments
    )
    shares = _Shares(leaves, stages[0], len(stages))
    visible, hidden = _largest(rows, shares)
    out = table("argument", "", "type", "sharding", "per device", right=(1, 4), wide=0)
    for part in grouping.sections(visible):
        alone = len(part.rows) == 1
        if not alone:
            heading = grouping.heading(part.prefix)
            total = units.nbytes(sum(shares.bytes(row) for row in part.rows))
            add(out, heading, "", "", "", total, style="bold")
        for row in part.rows:
            name = row.path if alone else f"  {shown(row.tokens[len(part.prefix) :])}"
            add(out, *_leaf_cells(name, row, shares))
    if hidden:
        size = sum(shares.bytes(row) for row in hidden)
        add(out, "smaller arguments", f"x {sum(shares.count(row) for row in hidden)}", "", "", units.nbytes(size))
    return out


@dataclass(frozen=True)
class _Shares:
    """The share of one stage in a row that stands for several identical stages."""

    leaves: dict[str, Leaf]
    stage: Stage
    stages: int

    def count(self, row: grouping.Row) -> int:
        return -(-len(row.members) // self.stages)

    def bytes(self, row: grouping.Row) -> int:
        return sum(self.stage.bytes_per_device(self.leaves[path]) for path in row.members) // self.stages


def _leaf_cells(name: str, row: grouping.Row, shares: _Shares) -> tuple[RenderableType, ...]:
    leaf = shares.leaves[row.members[0]]
    count = f"x {shares.count(row)}" if shares.count(row) > 1 else ""
    sharding = units.spec(leaf.spec)
    style = "dim" if sharding == "replicated" else "cyan"
    return name, count, type_text(leaf), Text(sharding, style=style), units.nbytes(shares.bytes(row))


def type_text(leaf: Leaf) -> str:
    """Dtype and shape of a leaf, such as "f32[768,3072]"."""
    return units.type_name(leaf.dtype, leaf.shape)


def _largest(rows: list[grouping.Row], shares: _Shares) -> tuple[list[grouping.Row], list[grouping.Row]]:
    """The rows to show, in their order, and the smallest ones beyond the limit."""
    if len(rows) <= _MAX_ROWS:
        return rows, []
    kept = {id(row) for row in sorted(rows, key=lambda row: -shares.bytes(row))[: _MAX_ROWS - 1]}
    return [row for row in rows if id(row) in kept], [row for row in rows if id(row) not in kept]


@dataclass
class CollectiveRow:
    """Identical collectives: the same kind, axes, bytes and place, except for layer numbers."""

    kind: str
    axes: tuple[str, ...]
    bytes: int
    where: str
    count: int
    seconds: float


def collective_rows(items: Iterable[tuple[Collective, float]]) -> list[CollectiveRow]:
    """Collectives with their seconds per step, identical ones as one row, the most expensive first."""
    found: dict[tuple, list[tuple[Collective, float]]] = {}
    for collective, seconds in items:
        key = (collective.kind, collective.axes, collective.bytes, re.sub(r"\d+", "#", collective.where))
        found.setdefault(key, []).append((collective, seconds))
    rows = []
    for (kind, axes, size, _), same in found.items():
        where = grouping.template([c.where for c, _ in same])
        rows.append(
            CollectiveRow(kind, axes, size, where, sum(c.count for c, _ in same), sum(seconds for _, seconds in same))
        )
    return sorted(rows, key=lambda row: -row.seconds)


def collective_table(rows: Sequence[CollectiveRow], most: int) -> RenderableType:
    """The `most` most expensive rows, and the sum of all."""
    if not rows:
        return Text("none")
    out = table("kind", "axes", "size each", "count", "time", "where", right=(2, 3, 4), wide=5)
    for row in rows[:most]:
        cells = (units.nbytes(row.bytes), f"x {row.count}", units.seconds(row.seconds), row.where)
        add(out, f"{row.kind}", units.axes(row.axes), *cells)
    rest = rows[most:]
    if rest:
        count, seconds = sum(row.count for row in rest), sum(row.seconds for row in rest)
        add(out, f"{len(rest)} more rows", "", "", f"x {count}", units.seconds(seconds), "")
    size = sum(row.bytes * row.count for row in rows)
    count, seconds = sum(row.count for row in rows), sum(row.seconds for row in rows)
    add(out, "total", "", units.nbytes(size), f"x {count}", units.seconds(seconds), "", style="bold")
    return out
