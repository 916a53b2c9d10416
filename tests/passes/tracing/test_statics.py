"""Values made of constants alone are those that XLA computes, within bodies of loops as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from alpa_lite.passes.tracing.conversion import graph_of
from alpa_lite.passes.tracing.statics import FOLDED, NUMPY, Statics

SIGNED, OTHER = np.arange(-6, 6, dtype=np.int32).reshape(3, 4), np.int32(-4)


def folded(fun: Callable[[], Any]) -> Any:
    """The first result of a function, as it is known without running it."""
    graph = graph_of(jax.make_jaxpr(fun)())
    constants = zip(graph.block.inputs, graph.constants, strict=True)
    return Statics(graph.block.ops, graph.values, dict(constants)).of(graph.block.outputs[0])


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
    known = [atom for atom in (*graph.block.inputs, *inner) if statics.of(atom) is not None]
    assert len(known) > 2 and all(statics.of(atom) is statics.of(atom) for atom in known)


def test_inputs_of_bodies_are_known_where_every_run_has_the_same() -> None:
    def loops(x: jax.Array) -> Any:
        rows = jnp.arange(4)
        stacked = lax.scan(lambda c, _: (c * 2, rows * 2), x, None, length=3)[1]
        return lax.scan(lambda c, one: (c * one + rows, None), x, stacked)[0]

    graph = graph_of(jax.make_jaxpr(loops)(jnp.zeros(4, jnp.int32)))
    statics = Statics(graph.block.ops, graph.values, {})
    *_, last = [op for op in graph.block.ops if op.name == "scan"]
    constants, carry, scanned = map(statics.of, last.bodies[0].inputs)
    assert constants is not None and tuple(constants) == (0, 1, 2, 3)
    assert scanned is not None and tuple(scanned) == (0, 2, 4, 6)
    assert carry is None
