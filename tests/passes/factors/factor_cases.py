"""Equations with inputs: at least one of every kind that the factor tables describe."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from alpa_lite.ir.graph import Lit, Op, Value

KEY = np.random.default_rng(0)


def floats(*shape):
    return KEY.normal(size=shape).astype(np.float32)


def ints(high, *shape):
    return KEY.integers(0, high, size=shape).astype(np.int32)


def inner(eqn):
    """The jaxpr that a call calls, else None."""
    return eqn.params["jaxpr"] if eqn.primitive.name == "jit" else None


def to_op(eqn, key):
    """The equation as an op with values of its own."""
    values, atoms = [], []
    for var in (*eqn.invars, *eqn.outvars):
        if isinstance(var, Literal):
            atoms.append(Lit(var.val, var.aval))
        else:
            values.append(Value(tuple(getattr(var.aval, "shape", ())), getattr(var.aval, "dtype", None), var.aval))
            atoms.append(len(values) - 1)
    n = len(eqn.invars)
    return Op(0, eqn.primitive, eqn.params, tuple(atoms[:n]), tuple(atoms[n:]), (), None, key), values


def equations(fun, *avals):
    """Every equation of fun's jaxpr, as (op, values), each with a key of its own."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            called = inner(eqn)
            yield from walk(called.jaxpr) if called is not None else [eqn]

    return [to_op(eqn, number) for number, eqn in enumerate(walk(jax.make_jaxpr(fun)(*avals).jaxpr))]


def example(case):
    """The equation of a case, as (op, values), without running it."""
    name, fun, *args = CASES[case]
    return [pair for pair in equations(fun, *args) if pair[0].name == name][-1]


def capture(name, fun, *args):
    """The last equation of that primitive that running `fun` meets, as (op, values, inputs)."""
    found = []

    def constant(literal: Any):
        return jnp.asarray(literal.val, literal.aval.dtype)

    def run(jaxpr: Any, consts, args):
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            inputs = [constant(v) if isinstance(v, Literal) else env[v] for v in eqn.invars]
            if eqn.primitive.name == name:
                found.append((eqn, inputs))
            called = inner(eqn)
            outputs = bind(eqn, inputs) if called is None else run(called.jaxpr, called.consts, inputs)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    closed = jax.make_jaxpr(fun)(*args)
    run(closed.jaxpr, closed.consts, args)
    eqn, inputs = found[-1]
    return *to_op(eqn, name), inputs


def bind(eqn, inputs, **changes):
    """The results of an equation or op, with other inputs and parameters."""
    out = eqn.primitive.bind(*inputs, **{**eqn.params, **changes})
    return list(out) if eqn.primitive.multiple_results else [out]


def check(rule, operands, results):
    """Raises AssertionError unless the rule fits tensors of these shapes.

    A dim without a factor is whole; else the sizes of its factors multiply to its size, or, with a special factor among
    them, to a divisor of it. No factor has a size of one, and none appears twice in a tensor.
    """
    assert all(factor.size > 1 for factor in rule.factors), rule
    for tensors, shapes in ((rule.operands, operands), (rule.results, results)):
        assert len(tensors) == len(shapes), (rule, shapes)
        for dims, shape in zip(tensors, shapes, strict=True):
            assert len(dims) == len(shape), (rule, shape)
            named = [f for dim in dims for f in dim]
            assert len(named) == len(set(named)), (rule, shape)
            for dim, size in zip(dims, shape, strict=True):
                product = int(np.prod([rule.factors[f].size for f in dim]))
                special = any(rule.factors[f].kind == "special" for f in dim)
                assert not dim or product == size or (special and size % product == 0), (rule, shape)


def conv(lhs, rhs, padding="VALID"):
    def fun(a, b):
        return lax.conv_general_dilated(a, b, (1,), padding, dimension_numbers=("NCH", "OIH", "NCH"))

    return "conv_general_dilated", fun, floats(*lhs), floats(*rhs)


def grads(name, loss, *args, wrt=0):
    return name, jax.grad(lambda *a: jnp.sum(loss(*a) ** 2), argnums=wrt), *args


def patches(x, k):
    return lax.conv_general_dilated(x, k, (4,), "VALID", dimension_numbers=("NCH", "OIH", "NCH"))


def grouped(x, k):
    return lax.conv_general_dilated(x, k, (1,), "VALID", dimension_numbers=("NCH", "OIH", "NCH"), feature_group_count=4)


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")


wrap = jax.random.wrap_key_data


def vmapped_rows(x, i):
    return jax.vmap(lambda row, at: row[at])(x, i)


IMAGES = floats(2, 8, 5)
GROUPS = np.array([2, 5, 1], np.int32)
SEEDS = ints(9, 4, 2).astype(np.uint32)
CASES = {
    "add": ("add", lambda a, b: lax.add(a, b), floats(4, 6), floats(4, 6)),
    "add of a literal": ("add", lambda a: a + 1.0, floats(4, 6)),
    "select by a scalar": ("select_n", lambda p, a, b: lax.select_n(p, a, b), np.True_, floats(4), floats(4)),
    "clamp": ("clamp", lambda a: lax.clamp(0.0, a, 1.0), floats(4, 6)),
    "erf_inv": ("erf_inv", lax.erf_inv, np.tanh(floats(4, 6))),
    "product": ("dot_general", lambda a, b: jnp.einsum("bij,bjk->bik", a, b), floats(2, 4, 6), floats(2, 6, 8)),
    "product of many": (
        "dot_general", lambda a, b: lax.dot_general(a, b, (((1, 3), (0, 2)), ((2,), (1,)))), floats(4, 6, 2, 8),
        floats(6, 2, 8, 10),
    ),
    "product of bools": ("dot_general", lambda a, b: lax.dot(a, b), floats(4, 6) > 0, floats(6, 4) > 0),
    "ragged product": ("ragged_dot_general", lax.ragged_dot, floats(8, 6), floats(3, 6, 4), GROUPS),
    "reduce_sum": ("reduce_sum", lambda a: lax.reduce_sum_p.bind(a, axes=(1,), out_sharding=None), floats(4, 6, 8)),
    "reduce_max": ("reduce_max", lambda a: jnp.max(a, (0, 2)), floats(4, 6, 8)),
    "reduce_min": ("reduce_min", lambda a: jnp.min(a, 1), ints(9, 4, 6, 8)),
    "reduce_prod": ("reduce_prod", lambda a: jnp.prod(a, 1), floats(4, 6, 8)),
    "argmax": ("argmax", lambda a: jnp.argmax(a, 1), floats(4, 6)),
    "cumsum": ("cumsum", lambda a: lax.cumsum(a, 1), floats(4, 6)),
    "sort": ("sort", lambda a, b: lax.sort((a, b), dimension=0), floats(4, 6), floats(4, 6)),
    "top_k": ("top_k", lambda a: lax.top_k(a, 3), floats(4, 6)),
    "merge": ("reshape", lambda a: a.reshape(8, 6), floats(4, 2, 6)),
    "divide": ("reshape", lambda a: a.reshape(2, 4, 6, 1), floats(8, 6)),
    "uneven reshape": ("reshape", lambda a: a.reshape(8, 4, 15), floats(8, 10, 6)),
    "squeeze": ("squeeze", lambda a: jnp.squeeze(a, 1), floats(4, 1, 6)),
    "transpose": ("transpose", lambda a: a.transpose(2, 0, 1), floats(4, 6, 8)),
    "broadcast": ("broadcast_in_dim", lambda a: jnp.broadcast_to(a[:, None], (2, 4, 10, 6)), floats(4, 6)),
    "rev": ("rev", lambda a: lax.rev(a, (0,)), floats(4, 6)),
    "concatenate": ("concatenate", lambda a, b: lax.concatenate((a, b), 1), floats(4, 6), floats(4, 2)),
    "split": ("split", lambda a: lax.split(a, (2, 4), 1), floats(4, 6)),
    "stack": ("stack", lambda a, b: jnp.stack((a, b), 1), floats(4, 6), floats(4, 6)),
    "tile": ("tile", lambda a: jnp.tile(a, (1, 2)), floats(4, 6)),
    "pad": ("pad", lambda a: jnp.pad(a, ((0, 0), (1, 3))), floats(4, 6)),
    "slice": ("slice", lambda a: lax.slice(a, (0, 2), (4, 6)), floats(4, 6)),
    "dynamic_slice": ("dynamic_slice", lambda a, i: lax.dynamic_slice(a, (0, i), (4, 2)), floats(4, 6), np.int32(3)),
    "dynamic_update_slice": (
        "dynamic_update_slice", lambda a, u, i: lax.dynamic_update_slice(a, u, (0, i)), floats(4, 6), floats(4, 2),
        np.int32(3),
    ),
    "embedding": ("gather", lambda a, i: a.at[i].get(mode="fill", fill_value=0), floats(8, 6), ints(8, 2, 4)),
    "clipped embedding": ("gather", lambda a, i: a.at[i].get(mode="clip"), floats(8, 6), ints(8, 4)),
    "embedding of bools": ("gather", lambda a, i: a[i], floats(8, 6) > 0, ints(8, 4)),
    "two indices": ("gather", lambda a, i, j: a[i, j], floats(8, 6, 4), ints(8, 10), ints(6, 10)),
    "batched gather": ("gather", vmapped_rows, floats(4, 8, 6), ints(8, 4, 2)),
    "label pick": ("gather", lambda a, i: jnp.take_along_axis(a, i, 1), floats(4, 8), ints(8, 4, 1)),
    "window gather": (
        "gather", lambda a, i: jax.vmap(lambda s: lax.dynamic_slice(a, (s, 0), (2, 6)))(i), floats(8, 6), ints(6, 4)
    ),
    "scatter-add": ("scatter-add", lambda a, i, u: a.at[i].add(u), floats(8, 6), ints(8, 4), floats(4, 6)),
    "batched scatter-add": grads("scatter-add", vmapped_rows, floats(4, 8, 6), ints(8, 4, 2)),
    "scatter": ("scatter", lambda a, i, u: a.at[i].set(u), floats(8, 6), ints(8, 4), floats(4, 6)),
    "scatter-max": ("scatter-max", lambda a, i, u: a.at[i].max(u), floats(8, 6), ints(8, 4), floats(4, 6)),
    "conv": conv((4, 6, 10), (8, 6, 3), padding="SAME"),
    "point conv": conv((4, 6, 10), (8, 6, 1)),
    "patches": ("conv_general_dilated", patches, floats(4, 6, 16), floats(8, 6, 4)),
    "patches by kernel": grads("conv_general_dilated", patches, floats(4, 6, 16), floats(8, 6, 4), wrt=1),
    "patches by operand": grads("conv_general_dilated", patches, floats(4, 6, 16), floats(8, 6, 4)),
    "grouped conv": ("conv_general_dilated", grouped, floats(2, 8, 5), floats(4, 2, 3)),
    "grouped conv by kernel": (
        "conv_general_dilated", jax.linear_transpose(lambda k: grouped(IMAGES, k), floats(8, 2, 3)), floats(2, 8, 3)
    ),
    "max pool": ("reduce_window_max", pooled, floats(4, 6)),
    "max pool by operand": grads("select_and_scatter_add", pooled, floats(4, 6)),
    "overlapping pool": (
        "reduce_window_sum", lambda a: lax.reduce_window(a, 0.0, lax.add, (1, 3), (1, 1), "SAME"), floats(4, 6)
    ),
    "spread window": (
        "reduce_window_sum",
        lambda a: lax.reduce_window(a, 0.0, lax.add, (1, 2), (1, 1), ((0, 0), (1, 1)), base_dilation=(1, 2)),
        floats(4, 6),
    ),
    "fft": ("fft", lambda a: jnp.fft.rfft(a, axis=-1), floats(4, 6)),
    "cholesky": ("cholesky", lambda a: lax.linalg.cholesky(jnp.eye(3) + 0 * a), floats(4, 3, 3)),
    "svd": ("svd", lambda a: jnp.linalg.svd(a, compute_uv=False), floats(4, 3, 2)),
    "lu": ("lu", lax.linalg.lu, floats(4, 3, 3)),
    "qr": ("qr", lambda a: lax.linalg.qr(a, full_matrices=False), floats(4, 3, 2)),
    "eigh": ("eigh", lambda a: jnp.linalg.eigvalsh(a), floats(4, 3, 3)),
    "triangular_solve": (
        "triangular_solve", lambda a, b: lax.linalg.triangular_solve(jnp.eye(3) + a, b, left_side=True),
        floats(4, 3, 3), floats(4, 3, 2),
    ),
    "bitcast": ("bitcast_convert_type", lambda a: lax.bitcast_convert_type(a, jnp.uint8), floats(4, 6)),
    "barrier": ("optimization_barrier", lambda a, b: lax.optimization_barrier((a, b)), floats(4, 6), floats(2)),
    "random bits": ("random_bits", lambda s: jax.vmap(lambda key: jax.random.bits(key, (6,)))(wrap(s)), SEEDS),
    "split keys": ("random_split", lambda s: jax.vmap(lambda key: jax.random.split(key, 2))(wrap(s)), SEEDS),
    "keys": ("random_fold_in", lambda s: jax.vmap(partial(jax.random.fold_in, wrap(s)))(jnp.arange(4)), SEEDS[0]),
}  # fmt: skip
