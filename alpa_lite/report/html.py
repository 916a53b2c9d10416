"""A plan as one HTML file that loads nothing: the sections of its printout with more columns, pictures and colours.

The content is that of `text` and `summary`; the template `page.html` lays it out.
"""

from __future__ import annotations

import functools
import secrets

import jinja2

from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import summary, text, units
from alpa_lite.report.tables import Bar, Blocks, Branch, Grid, Legend, Nested, Sentence, Styled, Table

MAX_CELL_BYTES = 100_000
"""The largest output of a notebook's cell."""

_LIMITS = (1000, 300, 100, 50, 25, 10, 3)
"""Rows of a table, and parts of a bar, that a cell has room for: the first with which it is small enough."""


def document(plan: Plan) -> str:
    """The plan as a whole HTML document, in which everything stands: no resource is loaded."""
    return _render(plan, "", whole=True)


def fragment(plan: Plan) -> str:
    """The plan as an element with its own style and script, as notebooks show it, with ids that no other cell has.

    Where it would be larger than `MAX_CELL_BYTES`, the smallest rows of tables are left out.
    """
    prefix = f"alpa-{secrets.token_hex(4)}-"
    page = ""
    for limit in _LIMITS:
        page = _render(plan, prefix, limit=limit)
        if len(page.encode()) <= MAX_CELL_BYTES:
            break
    return page


def _render(plan: Plan, prefix: str, *, whole: bool = False, limit: int = 10**9) -> str:
    sections = [part for part in (*summary.sections(plan), *text.details(plan)) if part.only != "terminal"]
    before = [[other.name for other in sections[:n]].count(part.name) for n, part in enumerate(sections)]
    ids = [f"{part.name}-{count + 1}" if count else part.name for part, count in zip(sections, before, strict=True)]
    return _template().render(
        title=f"Plan {plan.method} for {plan.cluster}", facts=text.facts(plan), cards=_cards(plan), prefix=prefix,
        sections=list(zip(sections, ids, strict=True)), whole=whole, limit=limit,
    )  # fmt: skip


def _cards(plan: Plan) -> list[tuple[str, str]]:
    """The figures in large letters, each with its meaning."""
    size = summary.peak(plan)
    cards = [(units.seconds(plan.step_seconds), "predicted step")]
    cards += [(rate, f"{name} a second") for name, rate in summary.rates(plan).items()]
    if plan.products.flops:
        share = f"{100 * summary.utilisation(plan):.3g} %"
        cards.append((share, "of the peak: utilisation by the step's own products"))
    budget = f"{units.percent(size, plan.memory_per_device)} of {units.nbytes(plan.memory_per_device)}"
    return [*cards, (units.nbytes(size), f"per device at the peak, {budget}")]


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("alpa_lite.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    kinds = (str, Sentence, Table, Grid, Legend, Styled, Branch, Nested, Bar, Blocks)
    environment.tests |= {kind.__name__.lower(): functools.partial(_is, kind) for kind in kinds}
    return environment.get_template("page.html")


def _is(kind: type, value: object) -> bool:
    return isinstance(value, kind)
