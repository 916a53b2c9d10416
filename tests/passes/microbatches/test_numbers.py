"""The numbers of micro-batches that are tried."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.cluster import Cluster
from alpa_lite.errors import InfeasibleError, MicrobatchError
from alpa_lite.options import Pipeline
from alpa_lite.passes import factors, tracing
from alpa_lite.passes.microbatches.numbers import least, next_count, of_pipelines


def numbers(batch: int, loss: Any, devices: int = 8) -> list[int]:
    """The numbers that are tried for a step on a batch of so many rows."""

    def step(w: Any, rows: Any) -> Any:
        return w - jax.grad(loss)(w, rows)

    args = jnp.ones((4, 4)), jnp.ones((batch, 4))
    traced = tracing.trace(
        step, args, {}, batch_argnums="auto", batch_argnames=(), static_argnums=(), static_argnames=()
    )
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return of_pipelines(traced, rules, Cluster.preset("a100").part(devices), Pipeline())


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


@pytest.mark.parametrize(
    ("tried", "needed", "floor", "budget", "following"),
    [
        (1, 100.0, 20.0, 60.0, 2),  # 20 + 80 / 2 = 60
        (1, 100.0, 20.0, 59.0, 4),
        (4, 50.0, 20.0, 22.0, 64),  # 20 + 30 * 4 / 64
        (1, 100.0, 60.0, 60.0, None),  # the state alone fills the budget
        (1, 0.0, 20.0, 60.0, None),  # nobody knows what is needed
    ],
)
def test_the_next_number_is_the_least_power_of_two_that_may_fit(tried, needed, floor, budget, following) -> None:
    assert next_count(tried, needed, floor, budget) == following


def solving(needs: dict[int, float | None], budget: float) -> Any:
    """Plans that need so many bytes by the number of micro-batches; None is a number that cannot be cut."""

    def solve(count: int) -> int:
        size = needs[count]
        if size is None:
            raise MicrobatchError("the batch norm is of the whole batch")
        if size > budget:
            raise InfeasibleError("too small", size)
        return count

    return solve


def test_the_least_number_that_fits_is_taken() -> None:
    first = InfeasibleError("too small", 100.0)
    assert least(solving({2: 70.0, 4: 45.0}, 50.0), first, 0.0, 50.0) == 4
    assert least(solving({4: 20.0}, 25.0), first, 0.0, 25.0) == 4  # 2 cannot fit: it needs 50 at least


@pytest.mark.parametrize(
    ("needs", "floor", "said"),
    [
        ({2: 70.0, 4: 70.0}, 0.0, "4 micro-batches need 70"),
        ({2: None}, 0.0, "Micro-batches do not help: the batch norm"),
        ({}, 60.0, "too small"),
    ],
)
def test_why_micro_batches_do_not_help_is_said(needs: Any, floor: float, said: str) -> None:
    with pytest.raises(InfeasibleError, match=said) as caught:
        least(solving(needs, 50.0), InfeasibleError("too small", 100.0), floor, 50.0)
    assert caught.value.smallest_budget == 100.0
