"""Frames in one piece: no call asks the operating system for memory, however deep the caller is."""

from __future__ import annotations

import inspect
import resource
import sys

import pytest

from alpa_lite.compilation.stack_chunk import with_large_stack_chunk

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
    deep = with_large_stack_chunk(faults)
    assert max(deep(depth) for depth in DEPTHS) < CALLS // 4


def test_it_is_the_same_function():
    def divided(number: float, *, by: float = 2.0) -> float:
        """A quotient."""
        return number / by

    wide = with_large_stack_chunk(divided)
    assert wide(3.0) == 1.5
    assert wide(3.0, by=3.0) == 1.0
    assert inspect.signature(wide) == inspect.signature(divided)
    assert (wide.__name__, wide.__doc__) == ("divided", "A quotient.")
    with pytest.raises(ZeroDivisionError):
        wide(1.0, by=0.0)
    first, second = with_large_stack_chunk(lambda: 1), with_large_stack_chunk(lambda: 2)
    assert (first(), second(), first()) == (1, 2, 1)


def test_it_can_be_declined(monkeypatch):
    frames = with_large_stack_chunk(lambda: sys._getframe(1).f_code.co_stacksize)
    assert frames() > 2**16
    monkeypatch.setenv("ALPA_LITE_DECLINE", "stack")
    assert frames() < 2**16
