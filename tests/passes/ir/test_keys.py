"""Operations by keys, which tell apart what is not equal, by names, which exist, and maxima that are compared again."""

import ast
import functools
import gc
import importlib
import pathlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

import alpa_lite
from alpa_lite.ir.graph import Block
from alpa_lite.passes.factors import tables
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.keys import Keys, key_without_position
from alpa_lite.passes.ir.loops import scan_op
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.ir.ties import Tie, ties
from alpa_lite.passes.local import forms
from alpa_lite.passes.tracing import conversion, tracing
from alpa_lite.passes.tracing.conversion import graph_of
from gallery.batches import f32, normal
from tests.passes import microbatched
from tests.passes.layers.test_layering import layers_of
from tests.passes.layers.test_rematerialisation import SGD, rewritten


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
    keys = [key_without_position(*first_op(function, (8, 8))) for function in (one, other)]
    assert (keys[0] == keys[1]) is alike
    assert first_op(one, (8, 8))[0].key != first_op(other, (8, 8))[0].key


def callbacks(x: jax.Array) -> Any:
    like = f32(4)
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


PASSES = pathlib.Path(alpa_lite.__file__).parents[1] / "passes"
MODULES = (
    "jax.lax.linalg", "jax.nn", "jax.ffi", "jax.scipy.special", "jax.experimental.pallas",
    "jax.experimental.scheduling_groups",
)  # fmt: skip
ENDED = frozenset({"call", "closed_call", "core_map"})
"""Primitives of JAX 0.10 that later versions do not have."""
NEW = frozenset({"log2", "one_minus_square", "polynomial"})
"""Primitives that JAX 0.10 does not have yet."""


@functools.cache
def known() -> frozenset[str]:
    for module in MODULES:
        importlib.import_module(module)
    gc.unfreeze()  # what is frozen is not listed
    return frozenset(one.name for one in gc.get_objects() if isinstance(one, Primitive)) | ENDED | NEW


def compared() -> Iterator[tuple[str, str]]:
    """(place, name) of every string that a pass compares with the name of an operation."""
    for path in sorted(PASSES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "name":
                for one in ast.walk(ast.Tuple(node.comparators, ast.Load())):
                    if isinstance(one, ast.Constant) and isinstance(one.value, str):
                        yield f"{path.name}:{node.lineno}", one.value


SETS = {name: value for name, value in vars(primitives).items() if isinstance(value, frozenset)}


def test_the_names_in_sets_and_tables_exist():
    assert len(SETS) > 20
    assert not {name: sorted(value - known()) for name, value in SETS.items() if value - known()}
    for table in (tables.TABLE, forms.FORMS, conversion.CALL_BODY):
        assert not set(table) - known()


def test_the_names_that_passes_compare_with_exist():
    names = known()
    other_languages = ("schedules", "stablehlo.", "func.", "sdy.")
    found = [(place, name) for place, name in compared() if not name.startswith(other_languages)]
    assert len(found) > 30
    assert not [(place, name) for place, name in found if name not in names and name not in {"follow"}]


def test_primitives_of_other_versions_alone_are_used():
    """A primitive that no set mentions any more leaves the lists of this test, too."""
    assert frozenset().union(*SETS.values()) | set(conversion.CALL_BODY) >= ENDED | NEW


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
    """The gradient of a maximum compares values with it: recomputed ones with a recomputed maximum."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.sin(x @ w) * lax.rsqrt(1.0 + x.mean())
            x = x - x.max(-1, keepdims=True)
        return (x**2).mean()

    step, state = microbatched.step_of(loss_fn, [normal(i, 16, 16) for i in range(3)], 2, SGD)
    layers = layers_of(step, state, {"x": normal(7, 8, 16)})
    result = rewritten(layers, "layer")
    ops = scan_op(result.traced, result.scan).bodies[0].ops
    again = [op for op in ops if op.name == "eq" and op.index in result.copies]
    links = ties(ops)
    assert len(again) == 3 and all(op.index in links for op in again)
