"""Data flow against the definition, on graphs of traced functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alpa_lite.graph import Block
from alpa_lite.passes.ir import flow
from alpa_lite.passes.tracing.conversion import graph_of


def block_of() -> Block:
    def fun(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
        a = jnp.sin(x)
        b = a * a
        c = jnp.cos(y)
        return b + 1.0, b * c, x

    return graph_of(jax.make_jaxpr(fun)(jnp.ones(3), jnp.ones(3))).block


def test_makers_and_readers() -> None:
    block = block_of()
    sin, square, cos, plus, times = block.ops
    assert [op.name for op in block.ops] == ["sin", "mul", "cos", "add", "mul"]
    (x, y), (a,), (b,), (c,) = block.inputs, sin.results, square.results, cos.results
    assert flow.producers(block.ops) == {op.results[0]: op for op in block.ops}
    assert flow.users(block.ops) == {x: [sin], a: [square], y: [cos], b: [plus, times], c: [times]}
    assert square.reads == (a, a) and plus.reads == (b,)
    assert flow.uses(block) == {x: 2, a: 2, y: 1, b: 2, c: 1, plus.results[0]: 1, times.results[0]: 1}


def test_what_is_reached_forward_and_backward() -> None:
    block = block_of()
    sin, square, cos, plus, times = (op.results[0] for op in block.ops)
    x, y = block.inputs
    assert flow.made_of(block.ops, [y]) == {y, cos, times}
    assert flow.made_of_all(block.ops, [x]) == {x, sin, square, plus}
    assert set(flow.needed([times], flow.producers(block.ops))) == {times, square, sin, cos, x, y}
    assert list(flow.reach([3], lambda n: range(n))) == [3, 2, 1, 0]
