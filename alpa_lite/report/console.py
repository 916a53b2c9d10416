"""Sections and tables in a terminal, by Rich, a hundred columns wide."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from alpa_lite.ir import units
from alpa_lite.report.tables import Bar, Block, Blocks, Branch, Cell, Curve, Nested, Section, Sentence, Table

WIDTH = 100
BAR_WIDTH = 40


def render_plain(content: RenderableType, width: int = WIDTH) -> str:
    """Returns anything that Rich prints, as plain text without colour and without trailing blanks."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(content, highlight=False)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def render(parts: Iterable[Section | Block]) -> Group:
    """Renders sections, and blocks outside of sections, except those that only pages show."""
    return Group(*(_section(part) if isinstance(part, Section) else _block(part) for part in parts if _is_shown(part)))


def _is_shown(part: object) -> bool:
    return getattr(part, "only", "") != "page"


def _section(section: Section) -> Group:
    """Returns a heading after an empty line, and the body below it, indented."""
    body = Group(*map(_block, section.body))
    return Group(Text(f"\n{section.heading}", style="bold"), Padding(body, (0, 0, 0, 2)))


def _block(block: Block) -> RenderableType:
    """Returns a block of a section.

    Texts are taken as they are: a layout such as "[data, None]" is not Rich's markup.
    """
    match block:
        case str():
            return Text(block)
        case Text():
            return block
        case Sentence():
            return Text(_wrapped(block))
        case Table():
            return _table(block)
    return Group()


def _wrapped(sentence: Sentence) -> str:
    """Returns the lines of a sentence within the indent of a section, without a break in its head or a part."""
    head, *parts = (text.replace(" ", "\0") for text in (sentence.head, *sentence.parts))
    lines = textwrap.TextWrapper(
        WIDTH - 2, " " * sentence.indent, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    ).wrap(f"{head} {f'{sentence.separator} '.join(parts)}".strip())
    return "\n".join(lines).replace("\0", " ")


def _table(table: Table) -> RichTable:
    """Returns a table without lines."""
    numbers = [n for n, column in enumerate(table.columns) if _is_shown(column)]
    named = any(table.columns[n].name for n in numbers)
    out = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", show_header=named)
    for n in numbers:
        column = table.columns[n]
        side = "right" if column.format else "left"
        out.add_column(column.name, justify=side, no_wrap=not column.is_wide, overflow="fold")
    for row in filter(_is_shown, table.rows):
        out.add_row(*(_cell(table.columns[n].text(row.cells[n]), row.style) for n in numbers))
    return out


def _cell(cell: Cell, style: str) -> RenderableType:
    match cell:
        case Text():
            return cell
        case Branch():
            return Text(cell.end, style=style)
        case Nested():
            return Group(Text(cell.text), *(Padding(Text(line), (0, 0, 0, 2)) for line in cell.lines))
        case Bar():
            return Text("").join(
                Text(units.bar(part.size, cell.total, BAR_WIDTH), style=f"{style} {part.colour}".strip())
                for part in cell.parts
            )
        case Blocks() | Curve():
            return ""
    return Text(str(cell), style=style)
