"""Reports as values: sections of lines and tables, which `console` renders for a terminal and `page.html` as HTML.

A cell holds a value, such as seconds, and not its text: the column formats it, and a page sorts by it. A terminal shows
less than a page: sections, columns and rows that only one of them shows say so (`only`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from rich.text import Text

from alpa_lite.paths import shown
from alpa_lite.report import grouping, units

Only = Literal["", "terminal", "page"]
"""The renderer that shows something; empty for both."""

T = TypeVar("T")


@dataclass(frozen=True)
class Styled:
    """A text with a style, by its name in Rich and its class on a page."""

    text: str
    style: str


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
    whole: float
    label: str = ""

    def share(self, size: float) -> str:
        """A size in percent of the whole, as style sheets want it."""
        return f"{min(100.0, 100 * size / self.whole) if self.whole > 0 else 0.0:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Blocks:
    """A tensor that is cut into rows and columns of blocks."""

    rows: int
    columns: int
    label: str


Cell = str | int | float | None | Styled | Branch | Nested | Bar | Blocks


@dataclass(frozen=True)
class Column:
    """A column: of numbers if it has a format.

    Attributes:
      wide: whether a terminal may wrap its cells.
    """

    name: str = ""
    format: units.Format | None = None
    wide: bool = False
    only: Only = ""

    def text(self, cell: Cell) -> Cell:
        """The cell with its number as text."""
        if cell is None:
            return ""
        return self.format(cell) if self.format and isinstance(cell, int | float) else cell


@dataclass(frozen=True)
class Row:
    """A cell for each column; a `total` stays at the end of a page's table, however it is sorted."""

    cells: tuple[Cell, ...]
    style: str = ""
    only: Only = ""
    total: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows.

    Attributes:
      order: the name of the column by which pages sort, the largest first; empty for the order of a terminal.
      searched: the plural of what rows are, where pages have a field to search in them.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    order: str = ""
    searched: str = ""

    def page_rows(self) -> list[Row]:
        """The rows of a page in its order, totals apart."""
        rows = [row for row in self.rows if row.only != "terminal" and not row.total]
        names = [column.name for column in self.columns]
        at = names.index(self.order) if self.order else -1
        return sorted(rows, key=lambda row: -_number(row.cells[at])) if self.order else rows


def _number(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0


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


def limited(
    items: Sequence[T], most: int, row: Callable[[T], Row], rest: Callable[[Sequence[T]], tuple[Cell, ...]]
) -> Iterator[Row]:
    """A row for each item; a terminal shows the first ones, and the cells of `rest` for the others."""
    for number, item in enumerate(items):
        yield row(item) if number < most else replace(row(item), only="page")
    if len(items) > most:
        yield Row(rest(items[most:]), only="terminal")


def tree(
    rows: Iterable[grouping.Row],
    cells: Callable[[grouping.Row], tuple[Cell, ...]],
    heading: Callable[[list[grouping.Row]], tuple[Cell, ...]],
) -> Iterator[Row]:
    """A row for each group of paths; in a terminal below headings with the beginnings of paths.

    Args:
      cells: of a group, those after its path.
      heading: of the groups below a heading, its cells after the beginning of their paths.
    """
    for part in grouping.sections(rows):
        alone = len(part.rows) == 1
        if not alone:
            yield Row((grouping.heading(part.prefix), *heading(part.rows)), "bold", "terminal")
        for row in part.rows:
            end = row.path if alone else f"  {shown(row.tokens[len(part.prefix) :])}"
            yield Row((Branch(row.path, end), *cells(row)))
