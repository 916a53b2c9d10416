"""Compiler memory statistics."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.passes.checks import verification


def test_memory_is_per_device_and_counts_donation_once():
    mesh = Mesh(np.array(jax.devices()), ("d",))
    x = jax.ShapeDtypeStruct((8, 1024, 128), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    w = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=NamedSharding(mesh, P()))
    block = 1024 * 128 * 4

    def compiled(**options):
        return jax.jit(lambda x, w: x + w[None, :, None], **options).lower(x, w).compile()

    plain = verification.memory_of(compiled(), predicted=block * 2 + 4096)
    donated = verification.memory_of(compiled(donate_argnums=0))
    assert plain is not None and donated is not None
    assert (plain.arguments, plain.outputs, plain.aliased) == (block + 4096, block, 0)
    assert (donated.arguments, donated.outputs, donated.aliased) == (block + 4096, block, block)
    assert plain.peak - donated.peak == block
    assert donated.ratio is None
    assert plain.ratio == pytest.approx((block * 2 + 4096) / (block * 2 + 4096 + plain.temporaries))
    silent = types.SimpleNamespace(memory_analysis=lambda: None)  # a backend without statistics
    assert verification.memory_of(silent) is None
