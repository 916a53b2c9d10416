"""Traced steps that are rewritten compute what they did, compiled as they are."""

from typing import Any

import jax

from alpa_lite.ir.graph import Traced, check
from alpa_lite.passes.ir import evaluation
from tests.comparing import assert_close_in_norm


def outputs(traced: Traced, arguments: Any) -> list[Any]:
    """The results of a traced step, compiled."""
    return jax.jit(lambda *leaves: evaluation.evaluate(traced.graph, leaves))(*jax.tree.leaves(arguments))


def assert_same(before: Traced, after: Traced, arguments: Any) -> None:
    """Two traced steps compute the same."""
    check(after.graph)
    assert_close_in_norm(outputs(after, arguments), outputs(before, arguments))
