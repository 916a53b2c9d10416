"""The number of micro-batches: that the chosen one fits, and is the best, at its own costs too."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from alpa_lite.errors import InfeasibleError
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.stages.choosing import Sliced, best

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
        return SimpleNamespace(num_microbatches=count, layers=(), rescaled=lambda step: step)

    def cut(self, count: int) -> Any:
        layers: Any = SimpleNamespace(layering=SimpleNamespace(layers=()), num_microbatches=count)
        return layers

    def choose(self, priced: Any, counts: Sequence[int], limit: float) -> Sliced:
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
    found = best([1, 2, 4, 8], KINDS, search.price, search.choose, search.cut, Deadline())
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
    found = best([1, 2, 4, 8], KINDS, search.price, search.choose, search.cut, Deadline())
    assert found.slices.num_microbatches == found.priced.num_microbatches == chosen
    assert [count for count, _ in search.priced] == priced


@pytest.mark.parametrize(
    ("seconds", "priced"), [(5.0, [(4, KINDS)]), (9.0, [(4, KINDS), (8, (4,))]), (11.0, [(4, KINDS), (8, (4,))])]
)
def test_the_best_number_is_priced_itself_if_there_is_time_for_it(seconds, priced) -> None:
    search = Search({}, {8: 1.5})
    deadline = Deadline(seconds, lambda: search.now)
    found = best([1, 2, 4, 8], KINDS, search.price, search.choose, search.cut, deadline)
    assert found.slices.num_microbatches == found.priced.num_microbatches == 8
    assert search.priced == priced
