"""Traced steps that are rewritten compute what they did, compiled as they are."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from alpa_lite.ir.graph import Traced, check
from alpa_lite.passes.ir import evaluation


def assert_close_in_norm(actual: Sequence[Any], expected: Sequence[Any]) -> None:
    """Each array up to a share of its norm."""
    for a, b in zip(actual, expected, strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-5 * np.linalg.norm(np.asarray(b)) + 1e-7


def outputs(traced: Traced, leaves: Sequence[Any]) -> list[Any]:
    """The results of a traced step, compiled."""
    return jax.jit(lambda *x: evaluation.evaluate(traced.graph, x))(*leaves)


def assert_same(before: Traced, after: Traced, arguments: Any) -> None:
    """Two traced steps compute the same."""
    check(after.graph)
    leaves = jax.tree.leaves((arguments, {}))
    assert_close_in_norm(outputs(after, leaves), outputs(before, leaves))
