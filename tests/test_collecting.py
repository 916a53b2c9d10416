"""The cycle collector is left as it was found, however many threads plan at the same time."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from alpa_lite import collecting

FOUND = (700, 10, 10)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*FOUND)
    yield
    gc.set_threshold(*before)


def test_the_first_raises_and_the_last_restores():
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(collecting.seldom())
    second.enter_context(collecting.seldom())
    first.close()
    assert gc.get_threshold() == (collecting.SELDOM, collecting.OLDER, *FOUND[2:])  # the second one still plans
    second.close()
    assert gc.get_threshold() == FOUND


def test_threads_that_overlap_leave_it_as_it_was():
    entered, leave = threading.Barrier(9), threading.Barrier(9)
    inside: list[int] = []

    def plan() -> None:
        with collecting.seldom():
            entered.wait(timeout=240)
            inside.append(gc.get_threshold()[0])
            leave.wait(timeout=240)

    threads = [threading.Thread(target=plan) for _ in range(8)]
    for thread in threads:
        thread.start()
    entered.wait(timeout=240)
    leave.wait(timeout=240)
    for thread in threads:
        thread.join()
    assert inside == [collecting.SELDOM] * 8
    assert gc.get_threshold() == FOUND


def test_an_error_restores_it():
    with pytest.raises(ValueError, match="while planning"), collecting.seldom():
        raise ValueError("while planning")
    assert gc.get_threshold() == FOUND


def test_thresholds_of_the_program_stay():
    with collecting.seldom():
        gc.set_threshold(5, 6, 7)
    assert gc.get_threshold() == (5, 6, 7)
    gc.set_threshold(0)
    with collecting.seldom():
        assert gc.get_threshold()[0] == 0
    gc.set_threshold(10 * collecting.SELDOM, *FOUND[1:])
    with collecting.seldom():
        assert gc.get_threshold()[0] == 10 * collecting.SELDOM
    gc.set_threshold(*FOUND)
    gc.disable()
    try:
        with collecting.seldom():
            assert gc.get_threshold() == FOUND
    finally:
        gc.enable()


def test_what_was_made_is_old_afterwards():
    with collecting.seldom():
        made = [[] for _ in range(2000)]
    young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation)}
    assert young.isdisjoint(map(id, made))
    assert gc.get_freeze_count() < collecting.FROZEN


def test_what_several_plans_leave_is_freed(monkeypatch: pytest.MonkeyPatch):
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    monkeypatch.setattr(collecting, "SELDOM", 10_000)
    alive: list[weakref.ref[Cycle]] = []
    for _ in range(12):
        with collecting.seldom():
            alive += [weakref.ref(Cycle()) for _ in range(1_000)]
    assert sum(one() is not None for one in alive) < 10_000


def test_what_the_program_has_frozen_stays_so():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        assert frozen > collecting.FROZEN
        with collecting.seldom():
            pass
        assert gc.get_freeze_count() >= 0.9 * frozen
    finally:
        gc.unfreeze()
