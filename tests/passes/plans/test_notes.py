"""The note on attention that writes its scores, and what these cost."""

import functools
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite import models
from gallery.batches import shape

B, T, N, D = 8, 2048, 8, 128


def attend(q, k, v, causal):
    scores = jnp.einsum("btnd,bsnd->bnts", q, k)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(scores.astype(jnp.float32), -1).astype(v.dtype), v)


def planned(attention: Callable[..., jax.Array], cluster: str = "h100") -> alpa_lite.Plan:
    def step(w, x):
        grads = jax.grad(lambda w: attention(x * w, x * w, x * w).astype(jnp.float32).sum())(w)
        return w - grads, 0.0

    w = shape(N, D, dtype=jnp.bfloat16)
    x = shape(B, T, N, D, dtype=jnp.bfloat16)
    method = alpa_lite.DataParallel()
    return alpa_lite.make_plan(
        step, w, x, cluster=cluster, verify="off", state_argnums=0, batch_argnums=1, method=method
    )


def saved(plan):
    notes = [note for note in plan.notes if "scores" in note]
    return notes[0] if notes else ""


@pytest.mark.parametrize("causal", [False, True])
def test_a_step_that_writes_scores_says_what_a_fused_kernel_would_take(causal):
    plain = planned(functools.partial(attend, causal=causal))
    note = saved(plain)
    assert "cudnn" in note
    fused = planned(lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=causal, implementation="cudnn"))
    assert saved(fused) == "" and fused.step_seconds < plain.step_seconds
    rows = [row for row in fused.stages[0].spending if "dot_product_attention" in row.operation]
    match = re.search(r"about ([\d.]+) (\w+)", note)
    assert match is not None
    number, unit = match.groups()
    said = float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    assert said == pytest.approx(sum(row.seconds for row in rows), rel=0.25)


def test_no_note_where_jax_has_no_kernel_or_there_are_no_scores():
    assert saved(planned(functools.partial(attend, causal=True), "mi300x")) == ""
    step, args = models.get("mlp").abstract("tiny", 64)
    assert saved(alpa_lite.make_plan(step, *args, cluster="h100", verify="off")) == ""


def test_attention_by_xla_moves_its_scores():
    kernel = planned(lambda *qkv: jax.nn.dot_product_attention(*qkv, implementation="xla"))
    moved = sum(row.bytes for row in kernel.stages[0].spending if row.operation == "kernel")
    scores = B * T * T * N * 2 / 8 / (kernel.cluster.memory_bandwidth * kernel.cluster.memory_efficiency)
    assert moved > 6 * scores
