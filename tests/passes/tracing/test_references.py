"""Steps with mutable references are traced to graphs without, which compute the same; references from outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.errors import SignatureError, TracingError
from alpa_lite.ir.graph import check
from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.tracing.tracing import trace
from tests import reference_steps

OF_REFERENCES = {"new_ref", "empty_ref", "free_ref", "freeze", "get", "swap", "addupdate"}


@pytest.mark.parametrize("step", reference_steps.PLAIN)
def test_values_take_the_place_of_references(step):
    """Results of control flow are compared here, and of all steps in `tests/test_callbacks.py`."""
    state, x = reference_steps.arguments(step)
    traced = trace(step, (state, x), {})
    check(traced.graph)
    assert OF_REFERENCES.isdisjoint(op.name for op in traced.graph.ops())
    assert not any(op.has_effects for op in traced.graph.ops())
    if step not in (reference_steps.scanned, reference_steps.searched, reference_steps.counted):
        return
    got = jax.jit(lambda *leaves: evaluate(traced.graph, leaves))(*jax.tree.leaves((state, x)))
    for a, b in zip(got, jax.tree.leaves(jax.jit(step)(state, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


counter = jax.new_ref(jnp.zeros(2))


def test_a_reference_from_outside_is_refused_by_name():
    def step(w, x):
        counter[...] += x.sum()
        return w - x.sum()

    with pytest.raises(
        TracingError, match=r"reference counter \(float32\[2\]\) at tracing/test_references.py:\d+ "
    ) as e:
        trace(step, (jnp.ones(()), jnp.ones(4)), {})
    assert "pass its value, ref[...], as an argument, return the new value" in str(e.value)


def test_a_reference_as_an_argument_is_refused_by_name():
    def step(state, x):
        state["count"][...] += 1
        return {**state, "w": state["w"] - x.sum()}

    with pytest.raises(SignatureError, match=r"state/count is a mutable reference .*; pass its value"):
        trace(step, ({"w": jnp.ones(()), "count": jax.new_ref(0)}, jnp.ones(4)), {})
