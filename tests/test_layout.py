"""Resharding steps move the value as they say, and paths are printed and found in both notations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

from alpa_lite.ir import paths
from alpa_lite.ir.layout import Layout, LogicalMesh, local_shape, replicated_layout, reshard_steps
from alpa_lite.passes.lowering import emission, program

MESH = LogicalMesh((2, 2, 2), ("x", "y", "z"))


@st.composite
def layouts(draw, rank=2, partial=True):
    axes = draw(st.permutations(MESH.axis_names))
    dims: list[tuple[str, ...]] = [()] * rank
    summed = []
    for axis in axes:
        place = draw(st.integers(-2 if partial else -1, rank - 1))
        if place >= 0:
            dims[place] = (*dims[place], axis)
        elif place == -2:
            summed.append(axis)
    return Layout(tuple(dims), tuple(a for a in MESH.axis_names if a in summed))


@given(layouts(), layouts())
@settings(max_examples=150, deadline=None)
def test_steps_chain_from_source_to_goal(src, dst):
    steps = reshard_steps(src, dst)
    if steps is None:
        assert set(dst.partial) - set(src.partial)
        return
    current = src
    for step in steps:
        assert step.source == current
        current = step.target
        assert len({a for axes in current.dims for a in axes}) == sum(len(axes) for axes in current.dims)
        local_shape((8, 8), current, MESH)
    assert current == dst
    assert (steps == ()) == (src == dst)


@pytest.mark.parametrize(
    ("src", "dst", "kinds"),
    [
        (Layout(((), ()), ("x",)), Layout((("x",), ())), ["reduce_scatter"]),
        (Layout(((), ()), ("x", "y")), replicated_layout(2), ["all_reduce"]),
        (Layout((("x", "y"), ())), replicated_layout(2), ["all_gather"]),
        (Layout((("x", "y"), ())), Layout((("x",), ("y",))), ["all_to_all"]),
        (Layout((("x", "y"), ())), Layout((("y", "x"), ())), ["collective_permute"]),
        (Layout((("x", "y"), ())), Layout((("y",), ())), ["collective_permute", "all_gather"]),
        (replicated_layout(2), Layout((("x",), ("y",))), ["slice", "slice"]),
        (Layout((("x",), ()), ("y",)), replicated_layout(2), ["all_reduce", "all_gather"]),
    ],
)
def test_known_steps(src, dst, kinds):
    steps = reshard_steps(src, dst)
    assert steps is not None
    assert [s.kind for s in steps] == kinds


@given(layouts(), layouts())
@settings(max_examples=12, deadline=None)
def test_steps_move_the_value(src, dst):
    steps = reshard_steps(src, dst)
    if steps is None:
        return
    mesh = Mesh(np.array(jax.devices()).reshape(MESH.shape), MESH.axis_names)
    shape = (8, 16)
    x = np.arange(128, dtype=np.float32).reshape(shape)

    def local(block):
        # Summands over the partial axes: device k of n holds k - (n - 1) / 2 + 1 / n times the value, in total once.
        for axis in src.partial:
            n = jax.lax.axis_size(axis)
            block = block * (jax.lax.axis_index(axis) - (n - 1) / 2 + 1 / n).astype(jnp.float32)
        for step in steps:
            block = emission.change_layout(block, step, shape, MESH)
        return jax.lax.psum(block, dst.partial) if dst.partial else block

    whole = Layout(dst.dims)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=program.spec_of(Layout(src.dims)), out_specs=program.spec_of(whole), check_vma=False
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(run)(x)), x)


TREE = {"a": [1, {"it's": 2, "x]y": 3, "p.q": 4}], "b/c": (5, {0: 6, 1: 7}, {("x", 1): 8})}
STORED = [f"s{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(({"a": TREE},))]


def test_prints_as_jax_does_with_slashes() -> None:
    tree = {"params": {"layers": [{"w": 1}], "it's": 2, "p.q": 3}}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        simple = jax.tree_util.keystr(path, simple=True, separator="/")
        assert paths.format_path(f"state{jax.tree_util.keystr(path)}") == f"state/{simple}"


def test_attributes_indices_and_slices() -> None:
    assert paths.format_path("state['a'][0].mu[('x', 1)]") == "state/a/0/mu/('x', 1)"
    assert paths.format_path("state['w'][0:3]") == "state/w[0:3]"
    assert paths.format_path("batch") == "batch"
    assert paths.format_path(("['a']", "[{0-3}]", ".{mu,nu}")) == "a/{0-3}/{mu,nu}"


@pytest.mark.parametrize("path", STORED)
def test_both_notations_are_accepted(path: str) -> None:
    assert paths.find(path, STORED) == [path]
    assert paths.find(paths.format_path(path), STORED) == [path]


def test_paths_that_are_printed_the_same_are_all_found() -> None:
    twins = ["s['a/b']", "s['a']['b']", "s.c"]
    assert paths.find("s/a/b", twins) == twins[:2]
    assert paths.find("s['a/b']", twins) == twins[:1]
    assert paths.find("s/a", twins) == []


@given(st.text("ab0'\"\\[].:/(){} \n", max_size=30))
def test_tokens_lose_nothing(path: str) -> None:
    assert "".join(paths.tokens(path)) == path
