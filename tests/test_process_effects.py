"""What planning does to its process: rare garbage collection, which is undone, and stack frames in one piece."""

import contextlib
import gc
import inspect
import resource
import sys
import weakref
from collections.abc import Iterator

import pytest

from alpa_lite.errors import OptionError
from alpa_lite.processes import effects
from alpa_lite.processes.effects import reduced_gc, run_in_large_stack_chunk

FOUND = (700, 10, 10)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*FOUND)
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_the_first_raises_and_the_last_restores():
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(reduced_gc)
    second.enter_context(reduced_gc)
    first.close()
    # The second one still plans.
    assert gc.get_threshold() == (effects.MAX_YOUNG_OBJECTS, effects.MIN_COLLECTIONS, *FOUND[2:])
    second.close()
    assert gc.get_threshold() == FOUND
    with pytest.raises(ValueError, match="while planning"), reduced_gc:
        raise ValueError("while planning")
    assert gc.get_threshold() == FOUND


def test_thresholds_of_the_program_stay():
    with reduced_gc:
        gc.set_threshold(5, 6, 7)
    assert gc.get_threshold() == (5, 6, 7)
    for own in (0, 10 * effects.MAX_YOUNG_OBJECTS):
        gc.set_threshold(own, *FOUND[1:])
        with reduced_gc:
            assert gc.get_threshold()[0] == own
    gc.set_threshold(*FOUND)
    gc.disable()
    with reduced_gc:
        assert gc.get_threshold() == FOUND


def test_garbage_of_several_plans_is_freed():
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    alive: list[weakref.ref[Cycle]] = []
    for _ in range(12):
        with reduced_gc:
            alive += [weakref.ref(Cycle()) for _ in range(1_000)]
    assert sum(one() is not None for one in alive) < 10_000


def test_effects_on_planning_can_be_declined(monkeypatch: pytest.MonkeyPatch):
    words = run_in_large_stack_chunk(lambda: sys._getframe(1).f_code.co_stacksize)
    for given in ("gc", "exit, gc", "all", "exit", "stack", ""):
        monkeypatch.setenv(effects.DECLINE_VARIABLE, given)
        with reduced_gc:
            assert (gc.get_threshold() == FOUND) == ("gc" in given or given == "all")
        assert (words() < 2**16) == (given in ("stack", "all"))
    monkeypatch.setenv(effects.DECLINE_VARIABLE, "garbage")
    with pytest.raises(OptionError, match=r"ALPA_LITE_DECLINE='garbage': give some of gc, "), reduced_gc:
        pass
    assert gc.get_threshold() == FOUND


# -- stack frames

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
    deep = run_in_large_stack_chunk(faults)
    assert max(deep(depth) for depth in DEPTHS) < CALLS // 4


def test_it_is_the_same_function():
    def divided(number: float, *, by: float = 2.0) -> float:
        """A quotient."""
        return number / by

    wide = run_in_large_stack_chunk(divided)
    assert wide(3.0) == 1.5
    assert wide(3.0, by=3.0) == 1.0
    assert inspect.signature(wide) == inspect.signature(divided)
    assert (wide.__name__, wide.__doc__) == ("divided", "A quotient.")
    with pytest.raises(ZeroDivisionError):
        wide(1.0, by=0.0)
    first, second = run_in_large_stack_chunk(lambda: 1), run_in_large_stack_chunk(lambda: 2)
    assert (first(), second(), first()) == (1, 2, 1)
