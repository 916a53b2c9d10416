"""Seconds are divided as they are spent, told by a clock that the test sets."""

from __future__ import annotations

import math

import pytest

from alpa_lite.passes.sharding.deadline import FEW, STEPS, Deadline, OutOfTime


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_one_part_leaves_over_is_there_for_the_next():
    clock = Clock()
    deadline = Deadline(12.0, clock)
    assert deadline.share(3) == 4.0
    clock.now += 1.0
    assert (deadline.left, deadline.spent) == (11.0, 1.0)
    assert deadline.share(2) == 5.5 and deadline.share(2, reserve=3.0) == 4.0
    clock.now += 20.0
    assert deadline.over and deadline.left == deadline.share(1) == 0.0
    assert deadline.spent == 21.0


def test_a_part_ends_by_itself_or_with_the_whole():
    clock = Clock()
    deadline = Deadline(10.0, clock)
    short, long = deadline.within(4.0), deadline.within(40.0)
    assert (short.seconds, long.seconds) == (4.0, 10.0)
    clock.now += 6.0
    assert short.over and not deadline.over and long.left == 4.0
    assert deadline.within(8.0).left == 4.0 and short.within(1.0).over
    assert short.within(1.0, least=0.5).left == 0.5 and deadline.within(2.0, least=0.5).left == 2.0


def test_only_what_is_over_is_interrupted():
    clock = Clock()
    deadline = Deadline(1.0, clock)
    deadline.check()
    clock.now += 1.0
    with pytest.raises(OutOfTime):
        deadline.check()


def test_what_ends_since_it_repays_no_more_says_so():
    clock = Clock()
    deadline = Deadline(10.0, clock)
    little, late = deadline.repaying(4.0), deadline.repaying(40.0)
    assert (little.left, little.little) == (4.0, True) and (late.left, late.little) == (10.0, False)
    assert little.within(9.0).little and little.search().little and little.repaying(9.0).little
    assert not late.within(1.0).little and not late.search().little


def test_without_seconds_there_is_no_end():
    deadline = Deadline(clock=Clock())
    assert math.isinf(deadline.left) and not deadline.over and deadline.within(3.0).left == 3.0


def test_a_search_goes_on_while_what_it_can_save_repays_it():
    clock = Clock()
    whole = Deadline(30.0, clock)
    clock.now += 5.0
    search = whole.search()
    assert search.patience(0.0) == FEW and search.patience(0.01) == FEW + STEPS * 0.01
    clock.now += 1.0
    assert search.within(20.0).patience(0.01) == FEW + STEPS * 0.01 - 1.0
    assert search.within(0.5).patience(0.01) == 0.5 and search.patience(1.0) == search.left == 24.0
    clock.now += 10.0  # for pipelines, say, before the search goes on
    again = whole.search(search)
    assert again.patience(0.01) == 0.0 and again.patience(0.12) == pytest.approx(FEW + STEPS * 0.12 - 11.0)
    assert whole.search().patience(0.01) == FEW + STEPS * 0.01
    assert math.isinf(Deadline(clock=clock).search().patience(0.0))
