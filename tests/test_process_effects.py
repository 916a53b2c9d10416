"""What planning does to its process: rare garbage collection, which is undone."""

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from alpa_lite.errors import OptionError
from alpa_lite.processes import effects
from alpa_lite.processes.effects import reduced_gc

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
    for given in ("gc", "exit, gc", "all", "exit", ""):
        monkeypatch.setenv(effects.DECLINE_VARIABLE, given)
        with reduced_gc:
            assert (gc.get_threshold() == FOUND) == ("gc" in given or given == "all")
    monkeypatch.setenv(effects.DECLINE_VARIABLE, "garbage")
    with pytest.raises(OptionError, match=r"ALPA_LITE_DECLINE='garbage': give some of gc, "), reduced_gc:
        pass
    assert gc.get_threshold() == FOUND
