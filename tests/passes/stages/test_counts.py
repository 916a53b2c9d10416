"""The number of micro-batches: that the chosen one fits, and is the best, at its own costs too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from alpa_lite.errors import InfeasibleError
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.stages.choosing import Sliced
from alpa_lite.passes.stages.counts import Layered, Slower, best

KINDS = (1, 2, 4, 8)


class Search:
    """Stands in for the passes: costs are (micro-batches that were priced, micro-batches), the most of them is best.

    `unfit` holds what does not fit once it is priced at its own number, and how many kinds of submeshes that takes.
    """

    def __init__(self, unfit: dict[int, int], worse: dict[int, float] | None = None) -> None:
        self.unfit, self.worse = unfit, worse or {}
        self.priced: list[tuple[int, Any]] = []
        self.now = 0.0

    def price(self, count: int, kinds: Any) -> Any:
        self.priced.append((count, kinds))
        self.now += 4.0
        costs = SimpleNamespace(num_microbatches=count, layers=(), least_seconds=0.25)  # what no pipeline undercuts
        costs.rescaled = lambda step: SimpleNamespace(**{**vars(costs), "num_microbatches": step.num_microbatches})
        return costs

    def cut(self, count: int) -> Any:
        layers: Any = SimpleNamespace(layering=SimpleNamespace(layers=()), num_microbatches=count)
        return layers

    def choose(self, priced: Any, counts: Sequence[int], limit: float, must: bool) -> Sliced:
        count = priced.num_microbatches
        best = min(counts, key=lambda other: (self.seconds(count, other), -other))
        tried = sum(number == best for number, _ in self.priced)
        if count == best and len(counts) == 1 and tried <= self.unfit.get(best, 0):
            raise InfeasibleError("too much")
        slices: Any = SimpleNamespace(num_microbatches=best, devices=(4,), seconds=self.seconds(count, best))
        weighed: Any = tuple(SimpleNamespace(num_microbatches=other) for other in counts)
        return Sliced(priced, slices, weighed, 0.0)

    def seconds(self, priced: int, count: int) -> float:
        """What is estimated falls with the number; what is priced is `worse` times that."""
        return (self.worse.get(count, 1.0) if priced == count else 1.0) / count


@pytest.mark.parametrize(
    ("unfit", "chosen", "priced"),
    [
        ({}, 8, [(4, KINDS), (8, (4,))]),
        ({8: 1}, 8, [(4, KINDS), (8, (4,)), (8, KINDS)]),
        ({8: 2}, 4, [(4, KINDS), (8, (4,)), (8, KINDS)]),
    ],
)
def test_a_number_that_does_not_fit_after_all_gives_way(unfit, chosen, priced) -> None:
    search = Search(unfit)
    found = best(Layered([1, 2, 4, 8], KINDS, search.cut, search.price), search.choose, Deadline())
    assert found.slices.num_microbatches == found.priced.num_microbatches == chosen
    assert search.priced == priced
    assert {row.num_microbatches for row in found.weighed} >= {1, 2, 4}


@pytest.mark.parametrize(
    ("worse", "chosen", "priced"),
    [
        ({8: 1.01}, 8, [4, 8]),
        ({8: 1.5}, 8, [4, 8]),  # 1.5 / 8 is still less than what 4 takes
        ({8: 3.0}, 4, [4, 8]),
        ({8: 3.0, 4: 2.0}, 8, [4, 8]),
        ({8: 9.0, 4: 9.0}, 2, [4, 8, 2]),
    ],
)
def test_a_number_that_is_worse_than_estimated_is_compared_with_others(worse, chosen, priced) -> None:
    search = Search({}, worse)
    found = best(Layered([1, 2, 4, 8], KINDS, search.cut, search.price), search.choose, Deadline())
    assert found.slices.num_microbatches == found.priced.num_microbatches == chosen
    assert [count for count, _ in search.priced] == priced


@pytest.mark.parametrize(
    ("seconds", "priced"), [(5.0, [(4, KINDS)]), (9.0, [(4, KINDS), (8, (4,))]), (11.0, [(4, KINDS), (8, (4,))])]
)
def test_the_best_number_is_priced_itself_if_there_is_time_for_it(seconds, priced) -> None:
    search = Search({}, {8: 1.5})
    deadline = Deadline(seconds, lambda: search.now)
    found = best(Layered([1, 2, 4, 8], KINDS, search.cut, search.price), search.choose, deadline)
    assert found.slices.num_microbatches == found.priced.num_microbatches == 8
    assert search.priced == priced


class Rough(Search):
    """The same, where the first number is found roughly. By all schedules and submeshes one of `faster` takes less."""

    def __init__(self, seconds: dict[int, float], faster: dict[int, float], late: bool = False) -> None:
        super().__init__({})
        self.known, self.faster, self.late = seconds, faster, late
        self.limits: list[float] = []
        self.spare: list[float] = []

    def choose(self, priced: Any, counts: Sequence[int], limit: float, must: bool) -> Sliced:
        if len(counts) > 1:
            self.limits.append(limit)
            if self.late:
                raise OutOfTime
        return replace(super().choose(priced, counts, limit, must), bound=0.9)

    def roughly(self, priced: Any, counts: Sequence[int], limit: float, took: float) -> Sliced:
        self.spare.append(took)
        best = min(counts, key=self.known.__getitem__)
        slices: Any = SimpleNamespace(num_microbatches=best, devices=(4,), seconds=self.known[best])
        weighed: Any = tuple(SimpleNamespace(num_microbatches=other) for other in counts)
        return Sliced(priced, slices, weighed, 0.0, rough=best != priced.num_microbatches)

    def seconds(self, priced: int, count: int) -> float:
        return self.faster.get(count, self.known[count])


@pytest.mark.parametrize(
    ("faster", "chosen", "priced"),
    [
        ({}, 8, [4, 8]),
        ({2: 0.99}, 8, [4, 8]),  # no more than an estimate may be off
        ({2: 0.5}, 2, [4, 8, 2]),
        ({4: 0.5}, 4, [4, 8]),
    ],
)
def test_the_best_number_by_a_rough_search_is_priced_before_all_are_compared(faster, chosen, priced) -> None:
    """It takes 1 s: what others are compared with is 2 % less, and none of them is left out."""
    search = Rough({1: 4.0, 2: 3.0, 4: 2.0, 8: 1.0}, faster)
    deadline = Deadline(100.0, lambda: search.now)
    found = best(
        Layered([1, 2, 4, 8], KINDS, search.cut, search.price), search.choose, deadline, roughly=search.roughly
    )  # fmt: skip
    assert found.slices.num_microbatches == chosen and [count for count, _ in search.priced] == priced
    assert search.spare == [4.0] and search.limits[0] == pytest.approx(0.98)  # pricing takes 4 s
    assert not found.unfinished
    assert sorted(row.num_microbatches for row in found.weighed) == [1, 2, 4, 8]


@pytest.mark.parametrize(("layers", "musts"), [(0, [True, False]), (1, [True, False, True])])
def test_where_the_time_ends_while_the_best_number_is_priced_its_stages_at_scaled_costs_are_the_answer(
    layers, musts
) -> None:
    """Where it has other layers costs cannot be scaled, and are worked out after the time."""
    search, asked = Search({}), []

    def choose(priced: Any, counts: Sequence[int], limit: float, must: bool) -> Sliced:
        asked.append(must)
        if priced.num_microbatches == 8 and not must:
            raise OutOfTime
        return search.choose(priced, counts, limit, must)

    def cut(count: int) -> Any:
        step = search.cut(count)
        step.layering.layers = (0,) * layers
        return step

    found = best(Layered([1, 2, 4, 8], KINDS, cut, search.price), choose, Deadline(100.0, lambda: search.now))
    assert asked == musts and [count for count, _ in search.priced] == [4, 8, 8][: len(musts)]
    assert found.slices.num_microbatches == found.priced.num_microbatches == 8
    assert (found.unfinished, found.bound) == (layers == 0, 0.0)


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, 4), (3.0, 8)])
def test_where_few_schedules_were_compared_others_are_when_the_time_ends(seconds, chosen) -> None:
    """8 micro-batches take 1 s by the schedule that was compared; 4 take `seconds` by another."""
    search = Rough({1: 4.0, 2: 3.0, 4: 2.0, 8: 1.0}, {4: seconds})

    def choose(priced: Any, counts: Sequence[int], limit: float, must: bool) -> Sliced:
        if not must:
            raise OutOfTime
        return search.choose(priced, counts, limit, must)

    layers = Layered([1, 2, 4, 8], KINDS, search.cut, search.price)
    found = best(layers, choose, Deadline(100.0, lambda: search.now), roughly=search.roughly)
    assert found.slices.num_microbatches == found.priced.num_microbatches == chosen
    assert found.unfinished and found.bound <= 0.25


def test_where_no_time_is_left_to_compare_all_numbers_the_rough_one_is_the_answer_and_says_so() -> None:
    for late, seconds in ((True, 100.0), (False, 8.0), (False, 6.0)):  # it ends while they are compared, or before
        search = Rough({1: 4.0, 2: 3.0, 4: 2.0, 8: 1.0}, {2: 0.5}, late)
        deadline = Deadline(seconds, lambda search=search: search.now)
        found = best(
            Layered([1, 2, 4, 8], KINDS, search.cut, search.price), search.choose, deadline, roughly=search.roughly
        )  # fmt: skip
        assert found.slices.num_microbatches == 8 and found.unfinished and found.bound == 0.25
        assert len(search.limits) == late and [count for count, _ in search.priced] == [4, 8]


def test_a_number_that_a_rough_search_finds_is_all_there_is_where_no_other_fits() -> None:
    """It was compared with all of them then."""
    search = Rough({2: 3.0, 4: 2.0, 8: 1.0}, {})

    def choose(priced: Any, counts: Sequence[int], limit: float, must: bool) -> Sliced:
        if 8 not in counts:
            raise InfeasibleError("too much")
        return search.choose(priced, counts, limit, must)

    found = best(Layered([2, 4, 8], KINDS, search.cut, search.price), choose, Deadline(), roughly=search.roughly)
    assert found.slices.num_microbatches == 8 and not found.unfinished


@dataclass(frozen=True)
class Slices:
    """Stands in for `StageSlices`."""

    num_microbatches: int
    devices: tuple[int, ...] = (2, 2)


@dataclass(frozen=True)
class Chosen:
    """Stands in for `Sliced`."""

    slices: Slices
    seconds: float
    priced: Any = None
    weighed: tuple[Any, ...] = ()
    rough: bool = False


SECONDS = {1: 9.0, 2: 7.0, 4: 5.0}
"""Of the best stages with so many micro-batches."""


def found(below: float, counts: Sequence[int] = (1, 2, 4)) -> tuple[Any, list[int]]:
    """The best, and the numbers that were priced."""
    priced: list[int] = []

    def price(count: int, kinds: tuple[int, ...]) -> Any:
        priced.append(count)
        return count

    def choose(costs: Any, some: Sequence[int], limit: float, must: bool) -> Any:
        count = min(some, key=SECONDS.__getitem__)
        return replace(Chosen(Slices(count), SECONDS[count]), priced=costs)

    def cut(count: int) -> Any:
        raise AssertionError("there is time")

    return best(Layered(counts, (1, 2), cut, price), choose, Deadline(), below), priced


def test_the_best_number_is_priced_itself() -> None:
    chosen, priced = found(math.inf)
    assert (chosen.slices.num_microbatches, chosen.seconds, priced) == (4, 5.0, [2, 4])


def test_what_is_not_faster_is_no_answer() -> None:
    assert found(5.1)[0].seconds == 5.0
    with pytest.raises(Slower) as caught:
        found(5.0)
    assert caught.value.seconds == 5.0
