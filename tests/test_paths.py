from __future__ import annotations

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.ir import paths

TREE = {"a": [1, {"it's": 2, "x]y": 3, "p.q": 4}], "b/c": (5, {0: 6, 1: 7}, {("x", 1): 8})}
STORED = [f"s{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(({"a": TREE},))]


def test_prints_as_jax_does_with_slashes() -> None:
    tree = {"params": {"layers": [{"w": 1}], "it's": 2, "p.q": 3}}
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        simple = jax.tree_util.keystr(path, simple=True, separator="/")
        assert paths.shown(f"state{jax.tree_util.keystr(path)}") == f"state/{simple}"


def test_attributes_indices_and_slices() -> None:
    assert paths.shown("state['a'][0].mu[('x', 1)]") == "state/a/0/mu/('x', 1)"
    assert paths.shown("state['w'][0:3]") == "state/w[0:3]"
    assert paths.shown("batch") == "batch"
    assert paths.shown(("['a']", "[{0-3}]", ".{mu,nu}")) == "a/{0-3}/{mu,nu}"


@pytest.mark.parametrize("path", STORED)
def test_both_notations_are_accepted(path: str) -> None:
    assert paths.find(path, STORED) == [path]
    assert paths.find(paths.shown(path), STORED) == [path]


def test_paths_that_are_printed_the_same_are_all_found() -> None:
    twins = ["s['a/b']", "s['a']['b']", "s.c"]
    assert paths.find("s/a/b", twins) == twins[:2]
    assert paths.find("s['a/b']", twins) == twins[:1]
    assert paths.find("s/a", twins) == []


@given(st.text("ab0'\"\\[].:/(){} \n", max_size=30))
def test_tokens_lose_nothing(path: str) -> None:
    assert "".join(paths.tokens(path)) == path
