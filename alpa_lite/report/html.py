"""A plan as one HTML file that loads nothing: the sections of its printout with more columns, pictures and colours.

The content is that of `summary`; the template `page.html` lays it out.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence

import jinja2
from rich.text import Text

from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import prose, stages, summary
from alpa_lite.report.tables import Bar, Blocks, Branch, Curve, Grid, Legend, Nested, Section, Sentence, Table

MAX_CELL_BYTES = 100_000
"""The largest output of a notebook's cell."""

_LIMITS = (1000, 300, 100, 50, 25, 10, 3)
"""Numbers of rows of a table, parts of a bar, and sections of a kind, of which a cell takes the first that fits."""


def document(plan: Plan) -> str:
    """Returns the plan as a whole HTML document, in which everything stands: no resource is loaded."""
    return _render(plan, _sections(plan), whole=True)


def fragment(plan: Plan) -> str:
    """The plan as an element with its own style and script, as notebooks show it, with ids that no other cell has.

    Where it would be larger than `MAX_CELL_BYTES`, the smallest rows of tables are left out, then sections.
    """
    prefix, sections = f"alpa-{secrets.token_hex(4)}-", _sections(plan)
    pages = (_render(plan, sections, prefix, limit=limit) for limit in _LIMITS)
    page = next(pages)
    while len(page.encode()) > MAX_CELL_BYTES and (smaller := next(pages, "")):
        page = smaller
    return page


def _sections(plan: Plan) -> list[tuple[Section, int]]:
    """Returns the sections of a page, each with the number of those before it that have its name."""
    sections = [part for part in (*summary.sections(plan), *summary.details(plan)) if part.only != "terminal"]
    return [(part, [other.name for other in sections[:n]].count(part.name)) for n, part in enumerate(sections)]


def _render(
    plan: Plan, sections: Sequence[tuple[Section, int]], prefix: str = "", *, whole: bool = False, limit: int = 10**9
) -> str:
    shown = [(part, f"{part.name}-{n + 1}" if n else part.name) for part, n in sections if n < limit]
    page = _template().render(
        plan=plan, facts=summary.facts(plan), rates=summary.rates(plan), utilisation=summary.utilisation(plan),
        peak=stages.peak(plan), budget=summary.budget(plan), title=f"Plan {plan.method} for {plan.cluster}",
        prefix=prefix, sections=shown, hidden=len(sections) - len(shown), whole=whole, limit=limit,
    )  # fmt: skip
    return page.strip() + "\n"


@functools.cache
def _template() -> jinja2.Template:
    environment = prose.environment()
    kinds = (str, Sentence, Table, Grid, Legend, Text, Branch, Nested, Bar, Blocks, Curve)
    environment.tests |= {kind.__name__.lower(): lambda value, kind=kind: isinstance(value, kind) for kind in kinds}
    return environment.get_template("page.html")
