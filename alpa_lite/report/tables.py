"""Reports as values: sections of lines and tables, which `console` renders for a terminal and `page.html` as HTML.

A cell holds a value, such as seconds, and not its text: the column formats it, and a page sorts by it. A terminal shows
less than a page: sections, columns and rows that only one of them shows say so (`only`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.text import Text

from alpa_lite.ir import units
from alpa_lite.ir.paths import format_path
from alpa_lite.report import grouping

Only = Literal["", "terminal", "page"]
"""The renderer that shows something; empty for both."""


@dataclass(frozen=True)
class Branch:
    """A path: whole on a page, and in a terminal its end, below a heading with its beginning."""

    path: str
    end: str


@dataclass(frozen=True)
class Nested:
    """A text, with further lines below it."""

    text: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """A piece of a bar, after a gap. Pages show `label` to who points at it, and `text` in it."""

    label: str
    size: float
    colour: str
    text: str = ""
    gap: float = 0.0


@dataclass(frozen=True)
class Bar:
    """Pieces of a whole, in a row."""

    parts: tuple[Part, ...]
    total: float
    label: str = ""

    def share(self, size: float) -> str:
        """Returns a size in percent of the whole, as style sheets want it."""
        return f"{min(100.0, 100 * size / self.total) if self.total > 0 else 0.0:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Blocks:
    """A tensor that is cut into rows and columns of blocks."""

    rows: int
    columns: int
    label: str


@dataclass(frozen=True)
class Curve:
    """Amounts over time, one on top of the other, in a box of the height `total`.

    Attributes:
      layers: colour, and the amounts at equal distances.
    """

    layers: tuple[tuple[str, Sequence[float]], ...]
    total: float
    label: str

    def areas(self) -> list[tuple[str, str]]:
        """The colour and the corners of the area below each layer, in a box of 100 x 100, the highest layer first."""
        out, below = [], [0.0] * len(self.layers[0][1])
        for colour, amounts in self.layers:
            below = [low + amount for low, amount in zip(below, amounts, strict=True)]
            step, scale = 100 / max(1, len(below) - 1), 100 / self.total if self.total else 0.0
            points = (f"{step * n:.1f},{100 - scale * height:.1f}" for n, height in enumerate(below))
            out.append((colour, f"0,100 {' '.join(points)} 100,100"))
        return out[::-1]


Cell = str | int | float | None | Text | Branch | Nested | Bar | Blocks | Curve
"""A text of Rich has a style, by its name there and its class on a page."""


@dataclass(frozen=True)
class Column:
    """A column: of numbers if it has a format.

    Attributes:
      value: the cell of an item (`Table.from_items`); None where rows are given as cells.
      total: what rows that stand for several items add up.
      is_wide: whether a terminal may wrap its cells.
    """

    name: str = ""
    value: Callable[[Any], Cell] | None = None
    format: units.Format | None = None
    total: Callable[[Any], float] | None = None
    is_wide: bool = False
    only: Only = ""

    def text(self, cell: Cell) -> Cell:
        """Returns the cell with its number as text."""
        if cell is None:
            return ""
        return self.format(cell) if self.format and isinstance(cell, int | float) else cell


@dataclass(frozen=True)
class Row:
    """A cell for each column; a total (`is_total`) stays at the end of a page's table, however it is sorted."""

    cells: tuple[Cell, ...]
    style: str = ""
    only: Only = ""
    is_total: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows.

    Attributes:
      order: the name of the column by which pages sort, the largest first; empty for the order of a terminal.
      search_noun: the plural of what rows are, where pages have a field to search in them.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    order: str = ""
    search_noun: str = ""

    @staticmethod
    def from_items(
        columns: Iterable[Column],
        items: Iterable[Any],
        most: int = sys.maxsize,
        rest: str = "",
        has_total: bool = False,
        style: Callable[[Any], str] = lambda item: "",
        **more: str,
    ) -> Table:
        """Returns a table with a row for each item, or for each tuple of cells where columns have no values.

        Args:
          most: rows that a terminal shows; one called by `rest` has the totals of the others, whose number it may hold.
          has_total: whether the last row has those of all.
          style: of an item's row.
          more: as in `Table`.
        """
        columns, items = tuple(columns), list(items)
        rows = [item if isinstance(item, Row) else Row(_cells(columns, item), style(item)) for item in items]
        rows[most:] = [replace(row, only="page") for row in rows[most:]]
        if len(items) > most:
            rows.append(Row(_totals(rest.format(len(items) - most), columns, items[most:]), only="terminal"))
        if has_total:
            rows.append(Row(_totals("total", columns, items), "bold", is_total=True))
        return Table(columns, tuple(rows), **more)

    def page_rows(self) -> list[Row]:
        """Returns the rows of a page in its order, totals apart."""
        rows = [row for row in self.rows if row.only != "terminal" and not row.is_total]
        if not self.order:
            return rows
        at = [column.name for column in self.columns].index(self.order)
        return sorted(rows, key=lambda row: -size if isinstance(size := row.cells[at], int | float) else 0)


def _cells(columns: Sequence[Column], item: Any) -> tuple[Cell, ...]:
    return tuple(column.value(item) if column.value else item[n] for n, column in enumerate(columns))


def _totals(label: str, columns: Sequence[Column], items: Sequence[Any]) -> tuple[Cell, ...]:
    """Returns the cells of a row for several items, called by the label."""
    return label, *(sum(map(column.total, items)) if column.total else None for column in columns[1:])


@dataclass(frozen=True)
class Grid:
    """The devices of a mesh: (number, place) row by row. Terminals leave it out."""

    title: str
    columns: int
    cells: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Legend:
    """The colours of parts of bars. Terminals leave it out."""

    entries: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sentence:
    """A line that breaks between its parts alone."""

    head: str
    parts: tuple[str, ...] = ()
    separator: str = ","
    indent: int = 0


Block = str | Sentence | Table | Grid | Legend | Text
"""A part of a section. A text of Rich is a drawing for terminals, which pages leave out."""


@dataclass(frozen=True)
class Section:
    """A heading, and the blocks below it.

    Attributes:
      name: on pages, for links; sections of one name have one link.
    """

    name: str
    heading: str
    body: tuple[Block, ...]
    only: Only = ""


def tree(columns: Sequence[Column], rows: Iterable[grouping.Row]) -> Iterator[Row]:
    """Yields a row for each group of paths, which the first column is for.

    In a terminal rows are below headings with the beginnings of their paths and the bytes of all.
    """
    sizes = [column if column.format is units.nbytes else Column() for column in columns]
    for part in grouping.sections(rows):
        alone = len(part.rows) == 1
        if not alone:
            yield Row(_totals(grouping.format_heading(part.prefix), sizes, part.rows), "bold", "terminal")
        for row in part.rows:
            end = row.path if alone else f"  {format_path(row.tokens[len(part.prefix) :])}"
            yield Row((Branch(row.path, end), *_cells(columns, row)[1:]))
