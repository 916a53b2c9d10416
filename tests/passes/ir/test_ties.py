"""Comparisons with a maximum: which are found, and that rematerialisation keeps both sides together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_lite.ir.graph import Block
from alpa_lite.passes.ir.loops import scan_op
from alpa_lite.passes.ir.ties import Tie, ties
from alpa_lite.passes.tracing.conversion import graph_of
from tests.passes import microbatched
from tests.passes.layers.test_layering import layers_of
from tests.passes.layers.test_rematerialisation import SGD, rewritten
from tests.zoo_base import normal


def found(fun: Callable[..., Any]) -> tuple[Block, Mapping[int, Tie]]:
    block = graph_of(jax.make_jaxpr(fun)(normal(0, 4, 6))).block
    return block, ties(block.ops)


@pytest.mark.parametrize("fun", [lambda x: x.max(1), lambda x: x.min(0), lambda x: x.max(1, keepdims=True)])
def test_gradients_of_maxima_are_found_and_other_comparisons_are_not(fun: Callable[[jax.Array], jax.Array]) -> None:
    block, links = found(jax.grad(lambda x: (fun(jnp.sin(x)) ** 2).sum()))
    tied = [(op, links[op.index]) for op in block.ops if op.name == "eq" and op.index in links]
    assert tied and all(tie.chain[-1].results[0] in op.operands for op, tie in tied)
    assert not found(lambda x: (x == x[::-1], jnp.argmax(x, 1) == 0, jax.nn.softmax(x), x == x.sum()))[1]


def test_a_recomputed_value_is_compared_with_its_own_maximum() -> None:
    """Though maxima are saved, recomputed values are compared with a recomputed maximum."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.sin(x @ w) * lax.rsqrt(1.0 + x.mean())
            x = x - x.max(-1, keepdims=True)
        return (x**2).mean()

    step, state = microbatched.step_of(loss_fn, [normal(i, 16, 16) for i in range(3)], 2, SGD)
    layers = layers_of(step, state, {"x": normal(7, 8, 16)})
    selected = {v for op in layers.body.ops if op.name == "reduce_max" for v in op.results}
    result = rewritten(layers, frozenset(selected))
    ops = scan_op(result.traced, result.scan).bodies[0].ops
    again = [op for op in ops if op.name == "eq" and op.index in result.copies]
    links = ties(ops)
    assert len(again) == 3 and all(op.index in links for op in again)
