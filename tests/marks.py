"""Which cases of many are run how often."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of `pytest.mark.parametrize`, of which all but one in `count` are thorough: CI has no time for them."""
    out = []
    for number, case in enumerate(cases):
        values, marks, name = (case if isinstance(case, tuple) else (case,)), (), None
        if hasattr(case, "marks"):
            values, marks, name = case.values, case.marks, case.id
        if number % count == 0:
            out.append(case)
        else:
            out.append(pytest.param(*values, marks=[*marks, pytest.mark.thorough], id=name))
    return out
