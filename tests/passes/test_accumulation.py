"""The loop over micro-batches computes what the step on the whole batch does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite import graph as graphs
from alpa_lite.errors import MicrobatchError
from alpa_lite.passes import accumulation, evaluation, factors, tracing
from tests import zoo

TOLERANCE = 1e-5


def accumulated(fun, args, parts, **options):
    """The traced step, and the same as a loop."""
    traced = tracing.trace(fun, args, {}, **options.pop("tracing", {}))
    rules = factors.rules(traced.graph.ops(), traced.graph.values)
    found = accumulation.accumulate(traced, rules, parts, **options)
    graphs.check(found.traced.graph)
    loop = next(op for op in found.traced.graph.block.ops if op.index == found.scan)
    assert loop.name == "scan" and loop.params["length"] == parts == found.num_microbatches
    return traced, found


def outputs(traced, args):
    """The flat outputs, compiled."""
    leaves = jax.tree.leaves(args)
    return jax.jit(lambda *leaves: evaluation.evaluate(traced.graph, leaves))(*leaves)


def plain(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else np.asarray(x)


def compare(got, want, tolerance=TOLERANCE):
    """Floats up to the tolerance, as a share of their own norm or of a thousandth of all; the rest exactly."""
    total = np.sqrt(sum(np.sum(plain(w) ** 2) for w in want if jnp.issubdtype(w.dtype, jnp.inexact)))
    assert len(got) == len(want)
    for number, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape and g.dtype == w.dtype
        if jnp.issubdtype(w.dtype, jnp.inexact):
            error = np.linalg.norm(plain(g) - plain(w))
            assert error <= tolerance * max(np.linalg.norm(plain(w)), 1e-3 * total), (number, error)
        else:
            np.testing.assert_array_equal(plain(g), plain(w))


def equal(fun, args, parts, **options):
    """Asserts equality, and returns what was rewritten."""
    traced, found = accumulated(fun, args, parts, **options)
    compare(outputs(found.traced, args), outputs(traced, args))
    return found


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize(
    "name", ["linen_mlp", "plain_masked_mean", "plain_dropout_typed", "linen_gpt_scan", "linen_moe"]
)
def test_zoo(name, parts):
    equal(*zoo.get(name).make(), parts)


def test_batch_norm_is_refused_by_name():
    with pytest.raises(
        MicrobatchError, match=r"num_microbatches=2: .* at tests/zoo_linen.py.*BatchNorm.*allow_inexact"
    ):
        accumulated(*zoo.get("linen_convnet").make(), 2)
