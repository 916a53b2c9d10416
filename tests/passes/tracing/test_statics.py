"""Values made of constants alone are those that XLA computes, and a `while` whose counter is known becomes a scan."""

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
from alpa_lite.passes.tracing.known_values import MAX_SIMULATED_TRIPS
from alpa_lite.passes.tracing.statics import FOLDED, NUMPY, Statics

SIGNED, OTHER = np.arange(-6, 6, dtype=np.int32).reshape(3, 4), np.int32(-4)


def folded(fun: Callable[[], Any]) -> Any:
    """The first result of a function, as it is known without running it."""
    graph = graph_of(jax.make_jaxpr(fun)())
    constants = zip(graph.block.inputs, graph.constants, strict=True)
    return Statics(graph.block.ops, graph.values, dict(constants)).array_of(graph.block.outputs[0])


VALUES = {
    "quotients": lambda x: lax.div(x, OTHER),
    "remainders": lambda x: lax.rem(x, jnp.int32(4)),
    "sums that wrap": lambda x: x.astype(jnp.uint8) + jnp.uint8(253),
    "limits": lambda x: lax.clamp(jnp.int32(-2), x, jnp.int32(3)),
    "signs": lambda x: lax.sign(x) + lax.neg(lax.abs(x)) * lax.square(x),
    "comparisons": lambda x: (x > 0) & ~(x == 3) | (x <= -5) ^ (x >= 1),
    "choices": lambda x: jnp.where(x < 0, x + 12, lax.max(x, 2)) - lax.min(x, 1),
    "cases": lambda x: lax.select_n(jnp.int32(2), x, x + 1, x + 2),
    "floats": lambda x: lax.floor(lax.exp(x.astype(jnp.float32)) / 3).astype(jnp.int32),
    "shapes": lambda x: lax.rev(x, (0,))[1:] if x.ndim == 1 else x.T.reshape(2, 1, 6)[:, 0, 1::2],
    "parts": lambda x: lax.dynamic_slice(x, (1, 9), (2, 3)) + jnp.arange(3),
    "masks": lambda x: jnp.tril(jnp.ones((4, 4), bool))[None] & (x[:, :, None] != 2),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_those_that_xla_computes(name: str) -> None:
    found, want = folded(lambda: VALUES[name](jnp.asarray(SIGNED))), VALUES[name](jnp.asarray(SIGNED))
    assert found is not None and found.ndim == want.ndim and found.dtype == want.dtype
    np.testing.assert_array_equal(np.broadcast_to(found, want.shape), want)


def test_division_by_zero_and_what_depends_on_arguments_are_not_known() -> None:
    assert folded(lambda: lax.div(jnp.asarray(SIGNED), jnp.int32(0))) is None
    graph = graph_of(jax.make_jaxpr(lambda x: (x + 1, jnp.sin(x)))(1.0))
    assert not any(map(Statics(graph.block.ops, graph.values, {}).has, graph.block.outputs))
    assert NUMPY.keys() < FOLDED


def test_an_array_is_the_same_object_in_each_call() -> None:
    """Knowledge of arrays is stored by `id`, which must not come to stand for another one."""
    big = jnp.asarray(SIGNED)
    graph = graph_of(jax.make_jaxpr(lambda x: (lax.cond(x > 0, lambda y: y * big, lambda y: y + big, 2),))(1.0))
    statics = Statics(graph.block.ops, graph.values, dict(zip(graph.block.inputs[1:], graph.constants, strict=True)))
    inner = [value for op in graph.block.ops for body in op.bodies for value in body.inputs]
    known = [atom for atom in (*graph.block.inputs, *inner) if statics.array_of(atom) is not None]
    assert len(known) > 2 and all(statics.array_of(atom) is statics.array_of(atom) for atom in known)


def test_inputs_of_bodies_are_known_where_every_run_has_the_same() -> None:
    def loops(x: jax.Array) -> Any:
        rows = jnp.arange(4)
        stacked = lax.scan(lambda c, _: (c * 2, rows * 2), x, None, length=3)[1]
        return lax.scan(lambda c, one: (c * one + rows, None), x, stacked)[0]

    graph = graph_of(jax.make_jaxpr(loops)(jnp.zeros(4, jnp.int32)))
    statics = Statics(graph.block.ops, graph.values, {})
    *_, last = [op for op in graph.block.ops if op.name == "scan"]
    constants, carry, scanned = map(statics.array_of, last.bodies[0].inputs)
    assert constants is not None and tuple(constants) == (0, 1, 2, 3)
    assert scanned is not None and tuple(scanned) == (0, 2, 4, 6)
    assert carry is None


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
