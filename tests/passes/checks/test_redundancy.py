"""Collectives that a compiler may leave out, and compilers' memory statistics."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks import verification
from alpa_lite.passes.checks.redundancy import REASONS, redundant_collectives

MESH = LogicalMesh((4, 2), ("d", "m"))
ABSTRACT = AbstractMesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
SUM = ("all_reduce", ("d",), 16 * 8 * 4)
GATHER = ("all_gather", ("d",), 64 * 8 * 4)


def repeated(function, x, y=1.0):
    """A loop that reads a value from around it."""
    return lax.fori_loop(0, 3, lambda _, a: function(a) + y, x)


def psum(x):
    return lax.psum(x, "d")


def gather(x):
    return lax.all_gather(x, "d", axis=0, tiled=True)


def redundancy(fun):
    """Of a function of one local float32[16, 8]."""
    step = jax.shard_map(fun, mesh=ABSTRACT, in_specs=P("d"), out_specs=P(), check_vma=False)
    arg = jax.ShapeDtypeStruct((64, 8), jnp.float32, sharding=NamedSharding(ABSTRACT, P("d")))
    module = jax.jit(step).trace(arg).lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    found = redundant_collectives(module, MESH)
    assert {bits for *_, bits in found.collectives} <= {32}
    return {reason: {sent[:3]: n for sent, n in counts.items()} for reason, counts in found.removals.items()}


def expect(**found):
    names = {"merged duplicates": "merged", "removed constants": "constant", "reassociated sums": "reassociated"}
    return {reason: found.get(names.get(reason, reason), {}) for reason in REASONS}


def loop(body, n=5):
    return lambda x: lax.scan(lambda c, _: (body(c, x), None), x, None, length=n)[0]


summing = loop(lambda c, x: psum(c * x))


def branching(x):
    return lax.cond(x[0, 0] > 0, psum, jnp.cos, x)


@pytest.mark.parametrize(
    ("fun", "found"),
    [
        (lambda x: gather(x) + gather(x * 2), expect()),
        (lambda x: gather(x) * jnp.tanh(gather(x)), expect(merged={GATHER: 1})),
        (lambda x: gather(x) + gather(lax.slice(x, (0, 0), (16, 8))), expect(merged={GATHER: 1})),
        (lambda x: gather(x) + jnp.pad(gather(lax.slice(x, (0, 0), (15, 8))), [(0, 4), (0, 0)]), expect()),
        (lambda x: gather(x) + gather(lax.rev(x[None], (0,))[0]), expect(merged={GATHER: 1})),
        # The padding of no elements is a constant.
        (lambda x: gather(x) + gather(lax.pad(x[:0], 0.0, [(16, 0, 0), (0, 0, 0)])), expect(constant={GATHER: 1})),
        (lambda x: gather(x) + gather(lax.pad(x[:1], 0.0, [(15, 0, 0), (0, 0, 0)])), expect()),
        (lambda x: gather(x) * jnp.tanh(gather(lax.optimization_barrier(x))), expect(merged={GATHER: 1})),
        (lambda x: gather(x) + gather(lax.optimization_barrier((x, x * 2))[1]), expect()),
        (lambda x: gather(x) + gather(lax.rev(x[None], (1,))[0]), expect()),
        (lambda x: gather(x) + gather(x * 1.0 / 1.0), expect(merged={GATHER: 1})),
        (lambda x: gather(x) + gather(1.0 / x), expect()),
        (lambda x: gather(x) * gather(jnp.where(x > 0, x, x)), expect(merged={GATHER: 1})),
        (lambda x: gather(x) * gather(jnp.where(x > 0, x, -x)), expect()),
        (lambda x: gather(jnp.where(x > 0, jnp.zeros_like(x), jnp.zeros_like(x))), expect(constant={GATHER: 1})),
        (lambda x: gather(x) * gather(lax.cumsum(x[None], 0)[0]), expect(merged={GATHER: 1})),
        (lambda x: gather(x) * gather(lax.cumsum(x, 0)), expect()),
        (lambda x: gather(x) * gather(jnp.sum(x[None], 0)), expect(merged={GATHER: 1})),
        (lambda x: gather(x) * gather(jnp.broadcast_to(jnp.sum(x, 0), (16, 8))), expect()),
        (lambda x: gather(x) * gather(0.0 + x) * gather(x - jnp.zeros_like(x)), expect(merged={GATHER: 2})),
        (lambda x: gather(x) * gather(0.0 - x), expect()),
        (lambda x: gather(repeated(jnp.sin, x)) + gather(repeated(jnp.sin, x)), expect(merged={GATHER: 1})),
        (lambda x: gather(repeated(jnp.sin, x)) + gather(repeated(jnp.cos, x)), expect()),
        (lambda x: gather(repeated(jnp.sin, x, x)) + gather(repeated(jnp.sin, x, x * 2)), expect()),
        (lambda x: gather(lax.rem(x.astype("int32"), jnp.ones((16, 8), "int32"))), expect(constant={GATHER: 1})),
        (lambda x: gather(lax.rem(x.astype("int32"), jnp.full((16, 8), 2))), expect()),
        (lambda x: gather(lax.rem(x, jnp.ones((16, 8)))), expect()),
        (lambda x: psum(x) * lax.pmax(x, "d"), expect()),
        (lambda x: psum(x) * lax.psum(x, "m"), expect()),
        (lambda x: psum(jnp.ones_like(x)) * x, expect(constant={SUM: 1})),
        (lambda x: psum(jnp.ones_like(x) * lax.axis_index("d")), expect()),
        (lambda x: psum(x) + psum(x * 2), expect(reassociated={SUM: 1})),
        (lambda x: psum(x) + psum(x * 2) - psum(x * 3), expect(reassociated={SUM: 2})),
        (lambda x: psum(x) * psum(x * 2), expect()),
        (lambda x: psum(x) * 3.0 + psum(x * 2) * 3.0, expect(reassociated={SUM: 1})),
        (lambda x: jnp.zeros_like(x) + 8.0 * (psum(x) / 4) + 8.0 * (psum(x * 2) / 4), expect(reassociated={SUM: 1})),
        (lambda x: psum(x) * 3.0 + psum(x * 2) * 5.0, expect()),
        (lambda x: 3.0 / psum(x) + 3.0 / psum(x * 2), expect()),
        (lambda x: psum(x) * x[:1] + psum(x * 2) * x[:1], expect()),
        (loop(lambda c, x: c * psum(x)), expect(hoisted={SUM: 4})),
        (loop(lambda c, x: psum(c * x)), expect()),
        (loop(lambda c, x: c * gather(x)[:16] + gather(x)[16:32]), expect(hoisted={GATHER: 4}, merged={GATHER: 5})),
        # XLA:CPU compiles one all-reduce, before the loop, with JAX 0.10.2 and 0.12.
        (lambda x: loop(lambda c, x: c * psum(x))(x) + psum(x), expect(hoisted={SUM: 4}, merged={SUM: 1})),
        (lambda x: loop(lambda c, x: c * psum(c))(x) + psum(x), expect()),
        (lambda x: psum(x) * loop(lambda c, x: c * psum(x))(x), expect(merged={SUM: 5})),
        (loop(lambda c, x: loop(lambda e, x: e * psum(c), 3)(x)), expect(hoisted={SUM: 10})),
        (loop(lambda c, x: loop(lambda e, y: e * psum(y * x), 3)(x)), expect(hoisted={SUM: 14})),
        # Equal loops, and equal branches, are made once.
        (lambda x: summing(x) * jnp.sin(summing(x)), expect(merged={SUM: 5})),
        (lambda x: summing(x) * jnp.sin(summing(x * 2)), expect()),
        (lambda x: summing(x) * loop(lambda c, x: psum(c + x))(x), expect()),
        (lambda x: gather(summing(x)[:16]) * jnp.sin(gather(summing(x)[:16])), expect(merged={SUM: 5, GATHER: 1})),
        (loop(lambda c, x: summing(c) * jnp.sin(summing(c))), expect(merged={SUM: 25})),
        (lambda x: branching(x) * jnp.sin(branching(x)), expect(merged={SUM: 1})),
        (lambda x: branching(x) * jnp.sin(branching(-x)), expect()),
        (lambda x: lax.cond(x[0, 0] > 0, psum, lambda x: psum(x) * 2, x), expect()),
        (lambda x: jnp.sin(psum(x)) + lax.cond(x[0, 0] > 0, psum, jnp.cos, x), expect(merged={SUM: 1})),
        (lambda x: jax.jit(psum)(x) * jnp.sin(jax.jit(psum)(x)), expect(merged={SUM: 1})),
        (lambda x: psum(jnp.sort(x, axis=0)) * jnp.sin(psum(jnp.sort(x, axis=0))), expect(merged={SUM: 1})),
        (lambda x: x.sum() * 2, expect()),
    ],
)
def test_redundant_collectives(fun, found):
    assert redundancy(fun) == found


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
    assert (plain.arguments, plain.outputs, plain.aliases) == (block + 4096, block, 0)
    assert (donated.arguments, donated.outputs, donated.aliases) == (block + 4096, block, block)
    assert plain.peak - donated.peak == block
    assert donated.ratio is None
    assert plain.ratio == pytest.approx((block * 2 + 4096) / (block * 2 + 4096 + plain.temporaries))
    silent = types.SimpleNamespace(memory_analysis=lambda: None)  # a backend without statistics
    assert verification.memory_of(silent) is None
