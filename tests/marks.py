"""Which cases of many are run how often, for `pytest.mark.parametrize`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but one in `count` are thorough: CI has no time for them."""
    return [case if number % count == 0 else thorough(case) for number, case in enumerate(cases)]


def only(often: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but some are thorough."""
    return [case if case in often else thorough(case) for case in cases]


def thorough(case: Any) -> Any:
    """A case that is thorough."""
    given: Any = case
    if not hasattr(case, "marks"):
        given = pytest.param(*(case if isinstance(case, tuple) else (case,)))
    return pytest.param(*given.values, marks=[*given.marks, pytest.mark.thorough], id=given.id)
