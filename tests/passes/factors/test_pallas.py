"""Pallas kernels without a rule of their user: their grids say what may be sharded."""

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
from alpa_lite.passes.costs.attention import pairs

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


@pytest.mark.parametrize(("name", "sharded"), [("of blocks", True), ("with numbers", False), ("turned", False)])
def test_independent_dims_of_a_grid_are_sharded_and_equal_one_device(name, sharded):
    kernel, rng = KERNELS[name], np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in (ROWS[1:], ROWS))

    def step(w, x):
        return w - 0.1 * kernel(x, w).sum(0), kernel(x, w).sum()

    want = jax.jit(step)(*args)
    ours = alpa_lite.parallelize(step, method=DataParallel(), state_argnums=0, batch_argnums=1)
    got = ours(*args)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6, atol=1e-5)
    # A kernel whose batch cannot be cut has all of it gathered for it.
    assert any(c.kind == "all_gather" for c in ours.plan(*args).collectives) != sharded


def descended(loss):
    return lambda w, *data: (w - jax.grad(loss)(w, *data), loss(w, *data))


SPLASH: Any = splash.make_splash_mha_single_device(masks.MultiHeadMask([masks.CausalMask((T, T)) for _ in range(N)]))
ATTENTION = {
    "flash_attention": lambda w, x: flash_attention(x * w, x * w, x, causal=True).astype(jnp.float32).mean(),
    "splash_attention": lambda w, x: jax.vmap(SPLASH)(x * w, x * w, x).astype(jnp.float32).mean(),
}


def sharded_plan(loss, w, *data):
    """A plan on eight TPUs, in which every kernel is sharded."""
    plan = alpa_lite.make_plan(
        descended(loss), w, *data, cluster="v5e", verify="off", state_argnums=0,
        batch_argnums=tuple(range(1, 1 + len(data))), method=Sharded((8,)),
    )  # fmt: skip
    found = [d for d in plan.stages[0].decisions if d.name.startswith("pallas_call")]
    assert found and all(any(d.strategy) for d in found)
    return plan


@pytest.mark.parametrize("kernel", ATTENTION)
def test_attention_kernels_for_tpus_are_sharded_and_priced(kernel):
    x = jax.ShapeDtypeStruct((B, N, T, D), jnp.bfloat16)
    plan = sharded_plan(ATTENTION[kernel], jax.ShapeDtypeStruct((N, 1, D), jnp.bfloat16), x)
    assert not plan.stages[0].replicated
    cluster = Cluster.preset("v5e")
    forward, backward = (cluster.attention(kernel, backward=backward) for backward in (False, True))
    assert forward and backward
    work = B * N * D * pairs(T, T, causal=True) / cluster.peak("bf16") / 8
    seconds = sum(row.flops for row in plan.stages[0].spending if row.operation == "pallas_call")
    assert seconds == pytest.approx(work * (2 * 4 / forward + 10 / backward), rel=0.01)  # forward also for the loss


def test_grouped_products_are_sharded_along_columns():
    w = jax.ShapeDtypeStruct((4, 256, 2048), jnp.bfloat16)
    x, sizes = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    sharded_plan(lambda w, x, sizes: gmm(x, w, sizes).astype(jnp.float32).sum(), w, x, sizes)
