"""FLOPs of fused attention, counted pair by pair."""

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite import Cluster, OptionError, Sharded
from alpa_lite.passes.costs.attention import BLOCK, pairs
from gallery.batches import shape

SHAPE = B, T, N, D = 4, 4 * BLOCK, 8, 64
"""Examples, tokens, heads and features."""


def test_causal_kernels_skip_whole_blocks():
    blocks = T // BLOCK
    computed = sum(BLOCK**2 for row in range(blocks) for column in range(blocks) if column <= row)
    assert pairs(T, T, causal=True) == computed
    assert pairs(T, T, causal=False) == T * T
    assert pairs(BLOCK, BLOCK, causal=True) == BLOCK**2


def test_windows_leave_the_pairs_within_them():
    for window in (1, 100, T - 1):
        seen = sum(min(query + 1, window) for query in range(T))
        assert pairs(T, T, causal=True, window=window) == pytest.approx(min(seen, pairs(T, T, causal=True)), rel=0.01)
    assert pairs(T, T, causal=False, window=T) == T * T


def loss(q, k, v):
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    return out.astype(jnp.float32).sum()


def step(state, batch):
    grads = jax.grad(lambda w: loss(w * batch, batch, batch))(state)
    return state - grads


def spent(**fields):
    """Seconds of the passes of attention of a step on one GPU, forward and backward."""
    cluster = Cluster(
        device="x", devices_per_node=1, memory=2**35, peak_flops={"f32": 1e12, "bf16": 1e12}, memory_bandwidth=1e15,
        node_link=alpa_lite.Link(1e12), **fields,
    )  # fmt: skip
    state = shape(N, D, dtype=jnp.bfloat16)
    plan = alpa_lite.make_plan(step, state, jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16), cluster=cluster, verify="off")
    rows = {row.operation: row.flops for row in plan.stages[0].spending}
    return [rows[f"dot_product_attention_{name}_wrapper"] for name in ("fwd", "bwd")]


def test_seconds_are_those_of_the_kernel_that_the_caller_names():
    work = B * N * D * pairs(T, T, causal=True) / 1e12
    assert spent(attention_efficiency={"cudnn": (0.5, 0.25)}) == pytest.approx([4 * work / 0.5, 10 * work / 0.25])
    assert spent(attention_efficiency={"cudnn": 0.2}) == pytest.approx([4 * work / 0.2, 10 * work / 0.2])
    # A kernel that is not listed is priced like a large product.
    found = spent(attention_efficiency={}, matmul_efficiency=0.8)
    assert found == pytest.approx([4 * work / 0.8, 10 * work / 0.8])


@pytest.mark.parametrize("given", [{"cudnn": 0}, {"cudnn": (0.5, 1.5)}, {"cudnn": (0.5,)}, {"cudnn": "fast"}])
def test_shares_that_no_kernel_reaches_are_refused(given):
    with pytest.raises(OptionError, match=r"attention_efficiency=.*give kernel -> "):
        spent(attention_efficiency=given)


@pytest.mark.parametrize("name", ["v5e", "mi300x"])
def test_cudnn_is_refused_for_other_platforms(name):
    state = shape(N, D, dtype=jnp.bfloat16)
    batch = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    with pytest.raises(OptionError, match=r'implementation="cudnn"\).*NVIDIA.*use implementation="xla"'):
        alpa_lite.make_plan(step, state, batch, cluster=name, method=Sharded(), verify="off")
