"""The number of micro-batches: which are tried, and that the chosen one fits at its own costs too."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.errors import InfeasibleError
from alpa_lite.options import Pipeline
from alpa_lite.passes import factors
from alpa_lite.passes.programs import search
from alpa_lite.passes.tracing import tracing


class Slicer:
    """Stands in for the search's: costs are (micro-batches that were priced, micro-batches), the most of them is best.

    `unfit` holds what does not fit once it is priced at its own number, and how many kinds of submeshes that takes.
    """

    def __init__(self, unfit: dict[int, int], worse: dict[int, float] | None = None) -> None:
        self.unfit, self.worse = unfit, worse or {}
        self.weighed: tuple[Any, ...] = ()
        self.bound, self.over = 0.0, ""
        self.priced: list[tuple[int, tuple[int, ...] | None]] = []

    def layers(self, count: int, kinds: tuple[int, ...] | None = None) -> Any:
        self.priced.append((count, kinds))
        return SimpleNamespace(costs=lambda other: (count, kinds, other))

    def slice(self, costs: Sequence[Any], budget: float) -> Any:
        self.weighed = tuple(SimpleNamespace(num_microbatches=other) for *_, other in costs)
        best = min(costs, key=lambda cost: (self.seconds(*cost), -cost[2]))
        tried = sum(count == best[2] for count, _ in self.priced)
        if best[0] == best[2] and len(costs) == 1 and tried <= self.unfit.get(best[2], 0):
            raise InfeasibleError("too much")
        stage = SimpleNamespace(mesh=0)
        return SimpleNamespace(num_microbatches=best[2], devices=(4,), stages=(stage,), seconds=self.seconds(*best))

    def seconds(self, priced: int, kinds: Any, count: int) -> float:
        """What is estimated falls with the number; what is priced is `worse` times that."""
        return (self.worse.get(count, 1.0) if priced == count else 1.0) / count


@pytest.mark.parametrize(
    ("unfit", "chosen", "priced"),
    [
        ({}, 8, [(4, None), (8, (4,))]),
        ({8: 1}, 8, [(4, None), (8, (4,)), (8, None)]),
        ({8: 2}, 4, [(4, None), (8, (4,)), (8, None)]),
    ],
)
def test_a_number_that_does_not_fit_after_all_gives_way(unfit: dict[int, int], chosen: int, priced: list[Any]) -> None:
    slicer: Any = Slicer(unfit)
    coster: Any
    coster, found = search._sliced(slicer, [1, 2, 4, 8], 1.0)
    assert found.num_microbatches == chosen
    assert coster.costs(chosen)[0] == chosen
    assert slicer.priced == priced
    assert {row.num_microbatches for row in slicer.weighed} >= {1, 2, 4}


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
def test_a_number_that_is_worse_than_estimated_is_compared_with_others(
    worse: dict[int, float], chosen: int, priced: list[int]
) -> None:
    slicer: Any = Slicer({}, worse)
    coster: Any
    coster, found = search._sliced(slicer, [1, 2, 4, 8], 1.0)
    assert found.num_microbatches == chosen
    assert coster.costs(chosen)[0] == chosen
    assert [count for count, _ in slicer.priced] == priced


def numbers(batch: int, loss: Any, devices: int = 8) -> list[int]:
    """The numbers that are tried for a step on a batch of so many rows."""

    def step(w: Any, rows: Any) -> Any:
        return w - jax.grad(loss)(w, rows)

    args = jnp.ones((4, 4)), jnp.ones((batch, 4))
    traced = tracing.trace(
        step, args, {}, batch_argnums="auto", batch_argnames=(), static_argnums=(), static_argnames=()
    )
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return search._counts(traced, rules, Cluster.preset("a100").part(devices), Pipeline())


def test_numbers_are_the_powers_of_two_that_divide_the_batch() -> None:
    def loss(w: Any, rows: Any) -> Any:
        return ((rows @ w) ** 2).mean()

    assert numbers(24, loss) == [1, 2, 4, 8]
    assert numbers(7, loss) == [1]
    assert numbers(256, loss) == [1, 2, 4, 8, 16, 32, 64]
    assert numbers(256, loss, devices=2) == [1, 2, 4, 8, 16]


def test_a_step_whose_examples_need_each_other_has_one_part() -> None:
    def loss(w: Any, rows: Any) -> Any:
        y = rows @ w
        return ((y - y.mean(0)) ** 4).mean()

    assert numbers(16, loss) == [1]
