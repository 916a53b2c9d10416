"""The sentences of reports: words are in `prose.txt`, a template with a macro for each, figures come from plans."""

from __future__ import annotations

import functools
from typing import Any

import jinja2

from alpa_lite.ir import units

_FILTERS = (
    repr, units.seconds, units.nbytes, units.exact_bytes, units.percent, units.times, units.flops, units.count_of,
    units.digits, units.factor, units.pace, units.spec, units.type_name,
)  # fmt: skip


@functools.cache
def environment() -> jinja2.Environment:
    """The templates of this folder; those of pages are escaped. Functions of `units` are filters there."""
    found = jinja2.Environment(
        loader=jinja2.PackageLoader("alpa_lite.report", "."), autoescape=jinja2.select_autoescape(["html"]),
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
    )  # fmt: skip
    found.filters |= {one.__name__: one for one in _FILTERS} | {"first_of": units.first}
    found.globals["EQUAL"] = units.EQUAL
    return found


@functools.cache
def _macros() -> Any:
    return environment().get_template("prose.txt").module


def text(macro: str, *values: Any) -> list[str]:
    """Returns the lines that a macro writes about some values, as they are; without empty ones."""
    return [line for line in getattr(_macros(), macro)(*values).splitlines() if line.strip()]


def lines(macro: str, *values: Any) -> list[str]:
    """Returns the lines that a macro writes, of several blanks one."""
    return [" ".join(line.split()) for line in text(macro, *values)]


def sentence(macro: str, *values: Any) -> str:
    """Returns the lines of a macro as one."""
    return " ".join(lines(macro, *values))


def parts(macro: str, *values: Any) -> list[list[str]]:
    """Returns the lines that a macro writes, each in its parts; those without a text behind the first are left out."""
    return [line.split(" | ") for line in lines(macro, *values) if " | " in line]
