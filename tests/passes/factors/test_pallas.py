"""Pallas kernels without a rule of their user: their grids say what may be sharded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

import alpa_lite
from alpa_lite import Cluster, DataParallel, Sharded
from alpa_lite.passes.ir.attention import pairs

B, N, T, D = 8, 4, 512, 128


def kernel_of(body, grid, blocks, out, shape, **options):
    return pl.pallas_call(
        body, grid=grid, in_specs=[pl.BlockSpec(*block) for block in blocks], out_specs=pl.BlockSpec(*out),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32), interpret=True, **options,
    )  # fmt: skip


def scaled(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...] * w_ref[...]


def numbered(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...] * w_ref[...] + pl.program_id(0)


SPECS = [((1, 4, 16), lambda b, i: (b, i, 0)), ((4, 16), lambda b, i: (i, 0))], ((1, 4, 16), lambda b, i: (b, i, 0))
ROWS = (8, 8, 16)
KERNELS = {
    "of blocks": kernel_of(scaled, (8, 2), *SPECS, ROWS),
    "with numbers": kernel_of(numbered, (8, 2), *SPECS, ROWS),
    "turned": kernel_of(
        scaled, (8, 2), [((1, 4, 16), lambda b, i: (7 - b, i, 0)), SPECS[0][1]], SPECS[1], ROWS
    ),
}  # fmt: skip


def step_of(kernel):
    return lambda w, x: (w - 0.1 * kernel(x, w).sum(0), kernel(x, w).sum())


def arguments():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.normal(size=ROWS[1:]), jnp.float32), jnp.asarray(rng.normal(size=ROWS), jnp.float32)


@pytest.mark.parametrize(("name", "sharded"), [("of blocks", True), ("with numbers", False), ("turned", False)])
def test_independent_dims_of_a_grid_are_sharded_and_equal_one_device(name, sharded):
    step, args = step_of(KERNELS[name]), arguments()
    want = jax.jit(step)(*args)
    ours = alpa_lite.parallelize(step, method=DataParallel(), state_argnums=0, batch_argnums=1)
    got = ours(*args)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-5)
    # A kernel whose batch cannot be cut has all of it gathered for it.
    assert any(c.kind == "all_gather" for c in ours.plan(*args).collectives) != sharded


def flash(w, x):
    def loss(w):
        return flash_attention(x * w, x * w, x, causal=True).astype(jnp.float32).mean()

    return w - jax.grad(loss)(w), loss(w)


SPLASH = splash.make_splash_mha_single_device(masks.MultiHeadMask([masks.CausalMask((T, T)) for _ in range(N)]))


def splashed(w, x):
    attend: Any = jax.vmap(SPLASH)

    def loss(w):
        return attend(x * w, x * w, x).astype(jnp.float32).mean()

    return w - jax.grad(loss)(w), loss(w)


@pytest.mark.parametrize("step", [flash, splashed])
def test_attention_kernels_for_tpus_are_sharded_and_priced(step):
    w = jax.ShapeDtypeStruct((N, 1, D), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((B, N, T, D), jnp.bfloat16)
    cluster = Cluster.preset("v5e")
    plan = alpa_lite.make_plan(
        step, w, x, cluster=cluster, verify="off", state_argnums=0, batch_argnums=1, method=Sharded((8,))
    )
    found = [d for d in plan.stages[0].decisions if d.name.startswith("pallas_call")]
    assert found and all(any(d.strategy) for d in found) and not plan.stages[0].replicated
    kernel = "flash_attention" if step is flash else "splash_attention"
    forward, backward = (cluster.attention(kernel, backward=backward) for backward in (False, True))
    assert forward and backward
    work = B * N * D * pairs(T, T, causal=True) / cluster.peak("bf16") / 8
    seconds = sum(row.flops for row in plan.stages[0].spending if row.operation == "pallas_call")
    assert seconds == pytest.approx(work * (2 * 4 / forward + 10 / backward), rel=0.01)  # forward also for the loss


def test_grouped_products_are_sharded_along_columns():
    def step(w, x, sizes):
        def loss(w):
            return gmm(x, w, sizes).astype(jnp.float32).sum()

        return w - jax.grad(loss)(w), loss(w)

    w = jax.ShapeDtypeStruct((4, 256, 2048), jnp.bfloat16)
    x, sizes = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    plan = alpa_lite.make_plan(
        step, w, x, sizes, cluster="v5e", verify="off", state_argnums=0, batch_argnums=(1, 2), method=Sharded((8,))
    )
    found = [d for d in plan.stages[0].decisions if d.name.startswith("pallas_call")]
    assert found and all(any(d.strategy) for d in found)
