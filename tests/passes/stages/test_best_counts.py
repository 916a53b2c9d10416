"""Numbers of micro-batches at costs of their own, and pipelines that must be faster than what is at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.stages.choosing import Slower, best


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

    return best(counts, (1, 2), price, choose, cut, Deadline(), below), priced


def test_the_best_number_is_priced_itself() -> None:
    chosen, priced = found(math.inf)
    assert (chosen.slices.num_microbatches, chosen.seconds, priced) == (4, 5.0, [2, 4])


def test_what_is_not_faster_is_no_answer() -> None:
    assert found(5.1)[0].seconds == 5.0
    with pytest.raises(Slower) as caught:
        found(5.0)
    assert caught.value.seconds == 5.0
