"""The numbers of micro-batches that are tried."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.cluster import Cluster
from alpa_lite.options import Pipeline
from alpa_lite.passes import factors
from alpa_lite.passes.microbatches.loop import candidate_numbers
from alpa_lite.passes.tracing import tracing


def numbers(batch: int, loss: Any, devices: int = 8) -> list[int]:
    """The numbers that are tried for a step on a batch of this many rows."""

    def step(w: Any, rows: Any) -> Any:
        return w - jax.grad(loss)(w, rows)

    args = jnp.ones((4, 4)), jnp.ones((batch, 4))
    traced = tracing.trace(step, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return candidate_numbers(traced, rules, Cluster.preset("a100").part(devices), Pipeline())


def test_numbers_are_powers_of_two_and_those_that_leave_a_power_of_two_of_examples() -> None:
    def loss(w: Any, rows: Any) -> Any:
        return ((rows @ w) ** 2).mean()

    assert numbers(24, loss) == [1, 2, 4, 8, 12, 24]
    assert numbers(7, loss) == [1, 7]
    assert numbers(200, loss) == [1, 2, 4, 8, 25, 50]
    assert numbers(256, loss) == [1, 2, 4, 8, 16, 32, 64]
    assert numbers(256, loss, devices=2) == [1, 2, 4, 8, 16]


def test_a_step_whose_examples_need_each_other_has_one_part() -> None:
    def loss(w: Any, rows: Any) -> Any:
        y = rows @ w
        return ((y - y.mean(0)) ** 4).mean()

    assert numbers(16, loss) == [1]
