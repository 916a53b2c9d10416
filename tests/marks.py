"""Which cases of many are run how often, for `pytest.mark.parametrize`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but one in `count` are thorough: CI has no time for them."""
    return [case if number % count == 0 else thorough(case) for number, case in enumerate(cases)]


def slow(*values: Any) -> Any:
    """A slow case."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(often: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but some are slow."""
    return [case if case in often else slow(*case) if isinstance(case, tuple) else slow(case) for case in cases]


def only(often: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, of which all but some are thorough."""
    return [case if case in often else thorough(case) for case in cases]


def thorough(case: Any) -> Any:
    """A case that is thorough."""
    given: Any = case
    if not hasattr(case, "marks"):
        given = pytest.param(*(case if isinstance(case, tuple) else (case,)))
    return pytest.param(*given.values, marks=[*given.marks, pytest.mark.thorough], id=given.id)


def slow_one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases; of those that are slow all but one in `count` are thorough.

    Of pairs of a program and a method each of both stays among the slow ones, if their numbers share no divisor with
    `count`.
    """
    out, number = [], 0
    for case in cases:
        is_slow = any(mark.name == "slow" for mark in getattr(case, "marks", ()))
        out.append(thorough(case) if is_slow and number % count else case)
        number += is_slow
    return out
