"""HTML and SVG elements as text. What is not a `Markup` is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already."""


Child = object
"""A `Markup`, any other value (written as its text), None (nothing), or a list of these."""

_VOID = frozenset({"input", "br", "meta", "col"})


def join(*children: Child) -> Markup:
    """Children one after another."""
    out: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            out.append(child)
        elif isinstance(child, Iterable) and not isinstance(child, str):
            out.append(join(*child))
        else:
            out.append(html.escape(str(child)))
    return Markup("".join(out))


def element(tag: str, *children: Child, **attributes: object) -> Markup:
    """An element. An attribute `class_` is written `class`, other underscores as hyphens; None and False: none."""
    parts = [tag]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        written = name.rstrip("_").replace("_", "-")
        parts.append(written if value is True else f'{written}="{html.escape(_text(value))}"')
    start = f"<{' '.join(parts)}>"
    return Markup(start if tag in _VOID else f"{start}{join(*children)}</{tag}>")


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def svg(width: float, height: float, label: str, *children: Child, class_: str = "") -> Markup:
    """A picture of so many units, with a label for those who do not see it."""
    box = f"0 0 {_text(float(width))} {_text(float(height))}"
    return element(
        "svg", *children, viewBox=box, width=float(width), height=float(height), role="img", aria_label=label,
        class_=class_ or None,
    )  # fmt: skip


def section(name: str, heading: str, *children: Child) -> Markup:
    """A section with a heading that can be linked to."""
    title = element("h2", heading, id=f"{name}-heading")
    return element("section", title, *children, id=name, aria_labelledby=f"{name}-heading")


def table(
    name: str, columns: Iterable[tuple[str, bool]], rows: Iterable[Iterable[Child]], *, search: str = ""
) -> Markup:
    """A table whose columns sort at a press of their headings; with `search`, one that can be searched.

    Args:
      columns: (heading, whether it holds numbers). A cell of a number is a pair (number, text).
      search: the label of the field.
    """
    columns = list(columns)
    heads = [
        element("th", element("button", title, type="button"), scope="col", class_="number" if number else None)
        for title, number in columns
    ]
    body = [element("tr", *(_cell(c, number) for c, (_, number) in zip(r, columns, strict=True))) for r in rows]
    field = None
    if search:
        count = element("output", f"{len(body)} rows", id=f"{name}-count", for_=f"{name}-search")
        words = element("input", type="search", id=f"{name}-search", data_table=name, placeholder="words, all of them")
        field = element("p", element("label", search, " ", words, for_=f"{name}-search"), " ", count, class_="search")
    found = element("table", element("thead", element("tr", *heads)), element("tbody", *body), id=name)
    box = element("div", found, class_="scroll", tabindex=0, role="region", aria_label=search or name)
    return join(field, box)


def _cell(value: Child, number: bool) -> Markup:
    if number and isinstance(value, tuple):
        key, text = value
        return element("td", text, class_="number", data_key=repr(float(key)))
    return element("td", value, class_="number" if number else None)
