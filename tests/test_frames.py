"""Frames in one piece: no call asks the operating system for memory, however deep the caller is."""

from __future__ import annotations

import inspect
import resource
import sys

import pytest

from alpa_lite import compiler
from alpa_lite.frames import in_one_piece

DEPTHS, CALLS = range(0, 400, 2), 200


def leaf(value: int) -> int:
    return value


def faults(depth: int) -> int:
    """Pages that the operating system hands out while a function is called `CALLS` times, so deep."""
    if depth:
        return faults(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        leaf(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="the chunks are CPython's")
def test_no_depth_asks_for_a_page_with_every_call():
    deep = in_one_piece(faults)
    assert max(deep(depth) for depth in DEPTHS) < CALLS // 4


def test_it_is_the_same_function():
    def divided(number: float, *, by: float = 2.0) -> float:
        """A quotient."""
        return number / by

    wide = in_one_piece(divided)
    assert wide(3.0) == 1.5
    assert wide(3.0, by=3.0) == 1.0
    assert inspect.signature(wide) == inspect.signature(divided)
    assert (wide.__name__, wide.__doc__) == ("divided", "A quotient.")
    with pytest.raises(ZeroDivisionError):
        wide(1.0, by=0.0)


def test_functions_do_not_share_what_they_call():
    first, second = in_one_piece(lambda: 1), in_one_piece(lambda: 2)
    assert (first(), second(), first()) == (1, 2, 1)


def test_steps_are_planned_so():
    """`compile_step` runs in a frame that is wider than any other."""
    assert compiler.compile_step.__code__.co_stacksize > 2**16
