"""A `while` whose counter is known becomes a scan of as many iterations as Python counts, and no other does."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite.passes.tracing.conversion import graph_of
from alpa_lite.passes.tracing.trip_counts import MAX_SIMULATED_TRIPS

COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.ne)


def trips_of(start: Any, goes_on: Callable[[Any], Any], following: Callable[[Any], Any]) -> int | None:
    """The length of the scan that a loop becomes; 0 where it is removed, None where it stays a `while`."""

    def loop(x: Any) -> Any:
        return lax.while_loop(lambda c: goes_on(c[1]), lambda c: (jnp.sin(c[0]), following(c[1])), (x, start))[0]

    loops = [op for op in graph_of(jax.make_jaxpr(loop)(1.0)).ops() if op.name in ("scan", "while")]
    assert len(loops) <= 1
    return 0 if not loops else loops[0].params["length"] if loops[0].name == "scan" else None


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("flipped", [False, True])
def test_a_counter_with_a_constant_step(compare: Callable[[Any, Any], Any], flipped: bool) -> None:
    for start, step, limit in itertools.product((-2, 3), (-2, 1, 3), (-1, 4)):
        value, want = start, 0
        while want < 20 and (compare(limit, value) if flipped else compare(value, limit)):
            value, want = value + step, want + 1

        def goes_on(i: Any, limit: Any = limit) -> Any:
            return compare(np.int32(limit), i) if flipped else compare(i, limit)

        found = trips_of(start, goes_on, lambda i, step=step: i + step)
        assert found == (want if want < 20 else None), (start, step, limit)


@pytest.mark.parametrize(
    ("start", "goes_on", "following", "want"),
    [
        (0, lambda i: i < 1_000_000, lambda i: i + 1, 1_000_000),
        (np.uint8(250), lambda i: i <= 255, lambda i: i + np.uint8(1), None),
        (np.int8(120), lambda i: i > 0, lambda i: i + np.int8(1), 8),
        (1, lambda i: i < 100, lambda i: i * 3, 5),
        (0, lambda i: (i < 9) & (i != 5), lambda i: i + 1, 5),
        ((0, 1), lambda c: c[0] + c[1] < 30, lambda c: (c[1], c[0] + c[1]), 7),
        (17, lambda i: i != 1, lambda i: jnp.where(i % 2 == 0, i // 2, 3 * i + 1), 12),
        (-7, lambda i: i != 0, lambda i: -(abs(i) // 2), 3),
        (0, lambda i: i >= 0, lambda i: (i + 1) % 5, None),
        (0.0, lambda t: t < 1.0, lambda t: t + 0.25, None),
    ],
)
def test_other_counters(start: Any, goes_on: Any, following: Any, want: int | None) -> None:
    assert trips_of(start, goes_on, following) == want


def test_a_loop_without_end_is_not_simulated_for_ever() -> None:
    assert trips_of(0, lambda i: i < 2 * MAX_SIMULATED_TRIPS, lambda i: jnp.maximum(i + 1, 0)) is None
