"""The gallery keeps its word: steps of the stated form, the same at every call, with gradients that say something.

These run plain JAX alone, of every model among the thorough tests: plans and results of models are tested elsewhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gallery
from gallery.registry import TAGS
from tests.comparing import assert_equal
from tests.marks import one_in, only

ZOO = gallery.find("zoo")


def test_cases_have_known_tags_and_names_of_their_own() -> None:
    """The registry asserts both."""
    cases = [case for kind in gallery.KINDS for case in gallery.find(kind).values()]
    assert set().union(*(case.tags for case in cases)) == TAGS
    assert all(case.small or case.published for case in cases)
    assert gallery.get("zoo", "linen_moe") in gallery.find("zoo", "linen", "mixture of experts").values()


@pytest.mark.parametrize("name", ["nnx_gpt_scan_dropout", "linen_moe", "plain_dropout_raw", "nnx_user_gpt"])
def test_make_is_deterministic(name: str) -> None:
    first, second = (jax.tree.leaves(ZOO[name].make()[1]) for _ in range(2))
    assert all(a is not b for a, b in zip(first, second, strict=True))
    assert_equal(first, second)


OFTEN = ("nnx_gpt_scan_dropout", "linen_convnet", "plain_dropout_typed", "plain_solve")


@pytest.mark.parametrize("name", only(OFTEN, [name for name, case in ZOO.items() if case.style == "functional"]))
def test_state_comes_back_in_its_own_shape(name: str) -> None:
    step, args = ZOO[name].make()
    state, metrics = jax.eval_shape(step, *args)
    expected = jax.eval_shape(lambda state: state, args[0])
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert set(metrics) == {"loss", "grads"}
    assert metrics["loss"].shape == () and metrics["loss"].dtype == jnp.float32
    assert jax.tree.structure(metrics["grads"]) == jax.tree.structure(args[0]["params"])


@pytest.mark.thorough
@pytest.mark.parametrize("name", one_in(2, ZOO))
def test_loss_falls_and_every_parameter_has_a_gradient(name: str) -> None:
    case = ZOO[name]
    step, args = case.make()
    if case.style == "nnx":
        step = nnx.jit(step)
        losses = [float(step(*args)) for _ in range(8)]
    else:
        step, losses = jax.jit(step), []
        for _ in range(8):
            out = step(*args)
            args = (*out[:-1], *args[len(out) - 1 :])
            losses.append(float(out[-1] if case.style == "optax" else out[-1]["loss"]))
            if case.style == "functional":
                for path, grad in jax.tree_util.tree_leaves_with_path(out[1]["grads"]):
                    assert np.any(grad) and np.all(np.isfinite(grad)), jax.tree_util.keystr(path)
    assert losses[-1] < losses[0], losses


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, case in ZOO.items() if case.reference])
def test_bfloat16_differs_from_its_float32_reference_but_little(name: str) -> None:
    losses = []
    for make in (ZOO[name].make, ZOO[name].reference):
        assert make is not None
        step, args = make()
        losses.append(float(jax.jit(step)(*args)[1]["loss"]))
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2**-6)
