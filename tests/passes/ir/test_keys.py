"""Keys tell apart what is not equal, also in graphs that are edited, and leave out what no layout depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from alpa_lite.passes.ir.keys import Keys, placeless
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.tracing import tracing
from alpa_lite.passes.tracing.conversion import graph_of


class Rate:
    """A parameter whose `repr` does not say its value."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __repr__(self) -> str:
        return "Rate()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rate) and other.rate == self.rate

    def __hash__(self) -> int:
        return hash(self.rate)


class Plain:
    """A parameter that compares by identity and prints the same for all."""

    def __repr__(self) -> str:
        return "Plain()"


def test_keys_of_objects_are_equal_where_the_objects_are():
    """Though all print the same; objects that compare by identity share a key."""
    keys = Keys()
    first, second = keys.text(Rate(0.1)), keys.text(Rate(0.2))
    assert first == "Rate()" != second
    assert keys.text(Rate(0.1)) == first and keys.text(Rate(0.2)) == second
    assert keys.text(Plain()) == keys.text(Plain())


def first_op(function, *shapes):
    """The first operation of a function, and the values of its graph."""
    traced = tracing.trace(function, tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes), {})
    return next(iter(traced.graph.ops())), traced.graph.values.__getitem__


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (lambda x: x[0:1], lambda x: x[3:4], True),
        (lambda x: x[0:1], lambda x: x[3:5], False),
        (lambda x: x[1:], lambda x: x[:, 1:], False),
        (lambda x: x[0::2], lambda x: x[1::2], False),
        (lambda x: lax.pad(x, 0.0, ((1, 2, 0), (0, 0, 0))), lambda x: lax.pad(x, 0.0, ((3, 0, 0), (0, 0, 0))), True),
        (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (0, 0, 0))), lambda x: lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))), False),
        (lambda x: lax.pad(x, 0.0, ((1, 0, 1), (0, 0, 0))), lambda x: lax.pad(x, 0.0, ((0, 1, 1), (0, 0, 0))), False),
    ],
)
def test_where_a_part_begins_is_left_out_unless_layouts_depend_on_it(one, other, alike):
    keys = [placeless(*first_op(function, (8, 8))) for function in (one, other)]
    assert (keys[0] == keys[1]) is alike
    assert first_op(one, (8, 8))[0].key != first_op(other, (8, 8))[0].key


def callbacks(x: jax.Array) -> Any:
    like = jax.ShapeDtypeStruct((4,), jnp.float32)
    return jax.pure_callback(lambda y: y + 1, like, x), jax.pure_callback(lambda y: y + 2, like, x)


def test_functions_keep_keys_of_their_own_when_one_of_them_is_rewritten() -> None:
    """The second function was the first that the new writer of keys saw, and got the number of the other."""
    graph = graph_of(jax.make_jaxpr(callbacks)(jnp.ones(4)))
    first, second = graph.block.ops
    assert first.key != second.key
    rewriter = Rewriter(graph)
    new = rewriter.finish(replace(graph.block, ops=(first, replace(second, key=None))))
    assert [op.key for op in new.block.ops] == [first.key, second.key]
    # And functions of a part that is traced later.
    part = graph_of(jax.make_jaxpr(lambda x: callbacks(2 * x))(jnp.ones(4)), graph.keys)
    assert len({op.key for op in (*graph.block.ops, *part.block.ops)}) == 5  # and the product
