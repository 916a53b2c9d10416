"""Every local form keeps the contract: blocks in, the form on every device, blocks out, equals the global operation."""

import dataclasses
import functools
import itertools
import math
import random
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback
from jax.lax import GatherScatterMode
from jax.sharding import AxisType, Mesh, PartitionSpec

from alpa_lite.graph import Lit, Op, Value
from alpa_lite.layout import Layout, LogicalMesh, local_shape
from alpa_lite.passes.factors import rules_of
from alpa_lite.passes.local.effects import needs_outside
from alpa_lite.passes.local.forms import local_form
from alpa_lite.passes.local.random import counters
from alpa_lite.passes.local.reductions import ordered, unordered
from alpa_lite.passes.local.types import LocalForm
from alpa_lite.strategy import Factor, Rule
from tests.marks import one_in

MESHES = [
    LogicalMesh((2,), ("a",)),
    LogicalMesh((2, 2), ("a", "b")),
    LogicalMesh((4, 2), ("a", "b")),
    LogicalMesh((2, 2, 2), ("a", "b", "c")),
]
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def device_mesh(mesh):
    devices = np.array(jax.devices()[: mesh.size]).reshape(mesh.shape)
    return Mesh(devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.shape))


@dataclasses.dataclass
class Case:
    """One equation, its rule, and arguments to try it on."""

    op: Op
    rule: Rule
    values: list
    args: list
    tolerance: float


def single(fun, *args, tolerance=0.0, primitive=None):
    """The case of the only equation of `fun` (or of its only equation of a primitive, on which `fun` must end)."""
    jaxpr: Any = jax.make_jaxpr(fun)(*args)
    while len(jaxpr.eqns) == 1 and "jaxpr" in jaxpr.eqns[0].params and jaxpr.eqns[0].primitive.name == "jit":
        jaxpr = jaxpr.eqns[0].params["jaxpr"]
    eqns = [e for e in jaxpr.eqns if primitive is None or e.primitive.name == primitive]
    assert len(eqns) == 1, jaxpr
    (eqn,) = eqns
    values, atoms = [], []
    for var in eqn.invars:
        if hasattr(var, "val"):
            atoms.append(Lit(var.val, var.aval))
        else:
            assert var in jaxpr.jaxpr.invars, jaxpr
            atoms.append(len(values))
            values.append(Value(tuple(var.aval.shape), var.aval.dtype, var.aval))
    order = [jaxpr.jaxpr.invars.index(var) for var in eqn.invars if not hasattr(var, "val")]
    results = []
    for var in eqn.outvars:
        results.append(len(values))
        values.append(Value(tuple(var.aval.shape), var.aval.dtype, var.aval))
    op = Op(
        0,
        eqn.primitive,
        eqn.params,
        tuple(atoms),
        tuple(results),
        (),
        eqn.source_info,
        "key",
        getattr(eqn, "ctx", None),
    )
    leaves = jax.tree.leaves(args)
    return Case(op, rules_of([op], values)["key"], values, [leaves[i] for i in order], tolerance)


def spec(layout):
    return PartitionSpec(*(axes if axes else None for axes in layout.dims))


def local_step(case, forms, mesh):
    """The forms on every device, over global arrays; partial results with a leading dim of summands."""

    def on_devices(form):
        def body(*blocks):
            blocks = iter(blocks)
            results = form.run(*(a.value if isinstance(a, Lit) else next(blocks) for a in case.op.operands))
            return [x[None] if la.partial else x for x, la in zip(results, form.results, strict=True)]

        ins = tuple(spec(la) for la, a in zip(form.operands, case.op.operands, strict=True) if not isinstance(a, Lit))
        outs = [
            PartitionSpec(la.partial, *(axes if axes else None for axes in la.dims)) if la.partial else spec(la)
            for la in form.results
        ]
        return jax.shard_map(body, mesh=device_mesh(mesh), in_specs=ins, out_specs=outs, check_vma=False)

    return jax.jit(lambda *args: [on_devices(form)(*args) for form in forms])


def plain(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def whole(case):
    """The global operation."""

    def run(*args):
        args = iter(args)
        operands = [a.value if isinstance(a, Lit) else next(args) for a in case.op.operands]
        out = case.op.primitive.bind(*operands, **case.op.primitive.get_bind_params(dict(case.op.params)))
        return list(out) if case.op.primitive.multiple_results else [out]

    return [plain(x) for x in jax.jit(run).lower(*case.args).compile(FAST)(*case.args)]


SIZES = {"i1": 1, "i8": 1, "ui8": 1, "i16": 2, "bf16": 2, "f16": 2, "i32": 4, "ui32": 4, "f32": 4, "i64": 8, "f64": 8}
COLLECTIVE = re.compile(r'"stablehlo\.(all_reduce|all_gather|reduce_scatter|all_to_all|collective_permute)"')


def written(text):
    """Kinds and bytes of the collectives in a StableHLO text."""
    found = Counter()
    for match in COLLECTIVE.finditer(text):
        kind = re.compile(r"-> tensor<([^>]*)>").search(text, match.end())
        assert kind is not None
        *dims, dtype = kind[1].split("x")
        found[match[1], math.prod(map(int, dims)) * SIZES[dtype]] += 1
    return found


def check_contract(case, chosen, mesh, expected):
    """Runs the forms of the chosen assignments and compares each with the global operation; how many have a form."""
    forms = {x: local_form(case.op, case.rule, x, case.values, mesh) for x in chosen}
    forms = {x: form for x, form in forms.items() if form is not None}
    if not forms:
        return 0
    lowered = local_step(case, list(forms.values()), mesh).lower(*case.args)
    declared = Counter((c.kind, c.bytes) for form in forms.values() for c in form.collectives)
    assert written(lowered.as_text()) == declared, (list(forms), mesh)
    everything = lowered.compile(FAST)(*case.args)
    for (assignment, form), results in zip(forms.items(), everything, strict=True):
        used = {a for axes in assignment for a in axes} or set(mesh.axis_names)
        assert all(set(c.axes) <= used for c in form.collectives)
        for got, want, layout in zip(results, expected, form.results, strict=True):
            compare(plain(got), want, layout, case.tolerance, f"{assignment} {mesh}")
    return len(forms)


def compare(got, want, layout, tolerance, message):
    assert got.dtype == want.dtype
    if layout.partial:
        got = got.sum(axis=0, dtype=got.dtype)
    if want.dtype.kind in "biu":
        tolerance = 0.0
    elif want.dtype.kind != "c":  # NumPy does not know what a NaN is in bfloat16
        got, want = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=message)


def assignments(rule, mesh):
    """Every assignment of the mesh's axes, each to one factor or none, in every order."""
    for owners in itertools.product([None, *range(len(rule.factors))], repeat=len(mesh.axis_names)):
        if all(o is None for o in owners):
            continue
        lists = [[a for a, o in zip(mesh.axis_names, owners, strict=True) if o == f] for f in range(len(rule.factors))]
        yield from itertools.product(*([tuple(p) for p in itertools.permutations(axes)] for axes in lists))


def array(*shape, dtype: Any = np.float32, seed=0, low=-4, high=5) -> Any:
    """Numbers with many ties."""
    rng = np.random.default_rng(seed)
    if np.dtype(dtype) == np.bool_:
        return rng.random(shape) < 0.3
    if np.dtype(dtype).kind in "iu":
        return rng.integers(max(low, 0) if np.dtype(dtype).kind == "u" else low, high, shape).astype(dtype)
    return (rng.integers(-32, 33, shape) / 8).astype(dtype)


def normal(*shape, dtype: Any = np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def with_nan(x):
    x = x.copy()
    x.reshape(-1)[[1, x.size - 2]] = np.nan
    return x


def take(indices, mode, fill=None, dims=None, slices=None):
    numbers = dims or lax.GatherDimensionNumbers(
        offset_dims=(indices.ndim - 1,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return lambda x, i: lax.gather(x, i, numbers, slices or (1, x.shape[1]), mode=mode, fill_value=fill)


def put(fun, mode, numbers=None):
    numbers = numbers or lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lambda x, i, u: fun(x, i, u, numbers, mode=mode)


def conv(strides=(1, 1), padding=((1, 1), (1, 1)), **options):
    return lambda x, k: lax.conv_general_dilated(
        x, k, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


def pool(window, strides, padding, init, fun):
    return lambda x: lax.reduce_window(x, init, fun, window, strides, padding)


FILL, CLIP, PROMISE = GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS
ROWS = np.array([[0], [15], [3], [8], [16], [-1], [7], [40]], np.int32)
PAIRS = np.array([[0, 1], [15, 7], [3, 8], [16, 2], [-2, -2], [7, 3], [8, 0], [40, 9]], np.int32)
KEY = jax.random.key(3)
SORTED_DIMS = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
LABEL_DIMS = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(1,),
    start_index_map=(1,),
    operand_batching_dims=(0,),
    start_indices_batching_dims=(0,),
)
LABEL_PUT = lax.ScatterDimensionNumbers(
    update_window_dims=(),
    inserted_window_dims=(1,),
    scatter_dims_to_operand_dims=(1,),
    operand_batching_dims=(0,),
    scatter_indices_batching_dims=(0,),
)
PAIR_PUT = lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1)
)
WINDOW_PUT = lax.ScatterDimensionNumbers(  # rows are single, columns a window of two of them
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
)


def cases():
    """Name -> a function that makes the case."""
    x, cube = array(16, 8), array(8, 4, 16)
    ints = array(16, 8, dtype=np.int32)
    yield "add", lambda: single(lambda a, b: lax.add(a, b), x, x)
    yield "add scalar", lambda: single(lambda a: lax.add(a, np.float32(2)), x)
    yield "select", lambda: single(lambda p, a, b: lax.select(p, a, b), x > 0, x, -x)
    yield "select scalar", lambda: single(lambda p, a, b: lax.select_n_p.bind(p, a, b), np.True_, x, -x)
    yield "convert", lambda: single(lambda a: lax.convert_element_type(a, jnp.bfloat16), x)
    yield "transpose", lambda: single(lambda a: lax.transpose(a, (2, 0, 1)), cube)
    yield "broadcast", lambda: single(lambda a: lax.broadcast_in_dim(a, (16, 4, 8), (0, 2)), x)
    yield "broadcast one", lambda: single(lambda a: lax.broadcast_in_dim(a, (16, 8), (0, 1)), array(16, 1))
    yield "reshape merge", lambda: single(lambda a: lax.reshape(a, (32, 16)), cube)
    yield "reshape split", lambda: single(lambda a: lax.reshape(a, (2, 8, 2, 4)), x)
    yield "squeeze", lambda: single(lambda a: lax.squeeze(a, (1,)), array(8, 1, 4))
    yield "concatenate", lambda: single(lambda a, b: lax.concatenate([a, b], 1), x, x)
    yield "split", lambda: single(lambda a: lax.split(a, (2, 6), 1), x)
    yield "tile", lambda: single(lambda a: lax.tile(a, (1, 3)), x, primitive="tile")
    yield "sort", lambda: single(lambda a, b: lax.sort((a, b), dimension=1, num_keys=1), x, ints)
    yield (
        "cholesky",
        lambda: single(
            lambda a: lax.linalg.cholesky(a, symmetrize_input=False),
            np.stack([np.eye(4, dtype=np.float32)] * 8),
            primitive="cholesky",
        ),
    )
    yield "fft", lambda: single(lambda a: lax.fft(a, "FFT", (8,)), x.astype(np.complex64), tolerance=1e-5)
    yield "barrier", lambda: single(lambda a, b: lax.optimization_barrier((a, b)), x, ints)
    yield "bitcast", lambda: single(lambda a: lax.bitcast_convert_type(a, np.uint8), x)
    yield from product_cases()
    yield from reduction_cases()
    yield from indexing_cases()
    yield from window_cases()
    yield from random_cases()


def product_cases():
    a, b = normal(8, 16), normal(16, 4, seed=1)
    batch = (((2,), (1,)), ((0,), (0,)))
    left, right = normal(4, 8, 16), normal(4, 16, 8, seed=2)
    yield "dot", lambda: single(lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))), a, b, tolerance=1e-5)
    yield "dot batch", lambda: single(lambda a, b: lax.dot_general(a, b, batch), left, right, tolerance=1e-5)
    yield (
        "dot int",
        lambda: single(
            lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))),
            array(8, 16, dtype=np.int32),
            array(16, 4, dtype=np.int32),
        ),
    )


def reduction_cases():
    x, cube = array(16, 8), array(8, 4, 16)
    yield "sum", lambda: single(lambda a: lax.reduce_sum_p.bind(a, axes=(0, 2), out_sharding=None), cube)
    for name, kind in [("float32", np.float32), ("bfloat16", jnp.bfloat16), ("int32", np.int32), ("uint8", np.uint8)]:
        for extreme in (jnp.max, jnp.min):
            label = f"{extreme.__name__} {name}"
            yield (
                label,
                lambda extreme=extreme, kind=kind: single(
                    lambda a: extreme(a, axis=0),
                    array(16, 8, dtype=kind),
                    primitive="reduce_max" if extreme is jnp.max else "reduce_min",
                ),
            )
    yield "max nan", lambda: single(lambda a: lax.reduce_max(a, (0,)), with_nan(x))
    yield "min nan", lambda: single(lambda a: lax.reduce_min(a, (0, 1)), with_nan(x))
    yield "max infinite", lambda: single(lambda a: lax.reduce_max(a, (0,)), np.full((8, 4), -np.inf, np.float32))
    yield "prod", lambda: single(lambda a: lax.reduce_prod(a, (0,)), normal(16, 8), tolerance=1e-5)
    for fun in (lax.reduce_and, lax.reduce_or, lax.reduce_xor):
        yield fun.__name__, lambda fun=fun: single(lambda a: fun(a, (0,)), array(16, 8, dtype=np.bool_))
        yield fun.__name__ + " int", lambda fun=fun: single(lambda a: fun(a, (0, 1)), array(16, 8, dtype=np.int32))
    for fun in (lax.argmax, lax.argmin):
        for data, label in [(x, ""), (with_nan(x), " nan"), (array(16, 8, dtype=np.int32), " int")]:
            yield (
                fun.__name__ + label,
                lambda fun=fun, data=data: single(lambda a: fun(a, 0, np.int32), data),
            )
    yield "argmax last", lambda: single(lambda a: lax.argmax(a, 2, np.int32), cube)
    for fun in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp):
        for reverse in (False, True):
            yield (
                f"{fun.__name__} {reverse}",
                lambda fun=fun, reverse=reverse: single(
                    lambda a: fun(a, axis=0, reverse=reverse), normal(16, 4), tolerance=2e-5
                ),
            )
    yield "cumsum int", lambda: single(lambda a: lax.cumsum(a, axis=1), array(4, 16, dtype=np.int32))
    yield "cummax int", lambda: single(lambda a: lax.cummax(a, axis=1), array(4, 16, dtype=np.int32))
    yield "top_k", lambda: single(lambda a: lax.top_k(a, 3), array(4, 16))
    yield "top_k many", lambda: single(lambda a: lax.top_k(a, 12), with_nan(array(4, 16, seed=4)))
    yield (
        "reduce",
        lambda: single(
            lambda a: lax.reduce(a, np.float32(0), lambda p, q: p + 2 * q, (1,)), array(16, 8), primitive="reduce"
        ),
    )


def indexing_cases():
    x, wide, updates = array(16, 8), array(16, 8, dtype=np.int32), array(8, 8, seed=5)
    for mode, label in [(FILL, "fill"), (CLIP, "clip"), (PROMISE, "promise")]:
        rows = ROWS[:4] if mode == PROMISE else ROWS
        rows = np.concatenate([rows] * 2) if mode == PROMISE else rows
        pairs = np.concatenate([PAIRS[:3], PAIRS[5:6]] * 2) % np.array([16, 8], np.int32) if mode == PROMISE else PAIRS
        yield f"gather {label}", lambda r=rows, m=mode: single(take(r, m), x, r)
        yield f"gather {label} int", lambda r=rows, m=mode: single(take(r, m), wide, r)
        yield (
            f"gather {label} pairs",
            lambda p=pairs, m=mode: single(take(p, m, dims=SORTED_DIMS, slices=(1, 1)), x, p),
        )
        yield (
            f"gather {label} labels",
            lambda r=rows, m=mode: single(take(r, m, dims=LABEL_DIMS, slices=(1, 1)), array(8, 16), r),
        )
        for fun in (lax.scatter_add, lax.scatter, lax.scatter_min, lax.scatter_mul):
            yield f"{fun.__name__} {label}", lambda r=rows, m=mode, f=fun: single(put(f, m), x, r, updates)
        yield (
            f"scatter_add {label} int",
            lambda r=rows, m=mode: single(put(lax.scatter_add, m), wide, r, updates.astype(np.int32)),
        )
        yield (
            f"scatter_add {label} pairs",
            lambda p=pairs, m=mode: single(put(lax.scatter_add, m, PAIR_PUT), x, p, array(8, seed=6)),
        )
        yield (
            f"scatter_add {label} labels",
            lambda r=rows, m=mode: single(put(lax.scatter_add, m, LABEL_PUT), array(8, 16), r, array(8, seed=6)),
        )
        yield (
            f"scatter_add {label} window",
            lambda p=pairs, m=mode: single(put(lax.scatter_add, m, WINDOW_PUT), x, p, array(8, 2, seed=6)),
        )
    yield "gather fill value", lambda: single(take(ROWS, FILL, fill=7.0), x, ROWS)
    yield "gather unsigned", lambda: single(take(ROWS, CLIP), x, ROWS.astype(np.uint8))
    yield "gather short", lambda: single(take(ROWS, FILL), x, ROWS.astype(np.int8))
    yield "gather bool", lambda: single(take(ROWS, FILL), x > 0, ROWS)
    yield "gather bfloat16", lambda: single(take(ROWS, FILL), x.astype(jnp.bfloat16), ROWS)
    yield (
        "scatter_add unsigned",
        lambda: single(put(lax.scatter_add, CLIP), x, np.array([[0], [255], [3], [9]], np.uint8), array(4, 8)),
    )
    yield (
        "scatter_add int8",
        lambda: single(
            put(lax.scatter_add, FILL), array(128, 4), np.array([[0], [127], [-128], [64]], np.int8), array(4, 4)
        ),
    )
    yield (
        "dynamic_slice",
        lambda: single(
            lambda a, i, j: lax.dynamic_slice_p.bind(a, i, j, slice_sizes=(16, 2)), x, np.int32(5), np.int32(3)
        ),
    )
    yield (
        "dynamic_update_slice",
        lambda: single(
            lambda a, u, i, j: lax.dynamic_update_slice_p.bind(a, u, i, j), x, array(16, 2), np.int32(5), np.int32(3)
        ),
    )


def window_cases():
    image, kernel = normal(4, 8, 8, 4), normal(3, 3, 4, 8, seed=1)
    options = {"tolerance": 1e-4}
    yield "conv", lambda: single(conv(), image, kernel, **options)
    yield (
        "conv wide",
        lambda: single(conv(padding=((2, 2), (2, 2))), normal(2, 16, 16, 1), normal(5, 5, 1, 2), **options),
    )
    yield "conv stride", lambda: single(conv((2, 2), ((0, 1), (1, 0))), image, kernel, **options)
    yield "conv dilated", lambda: single(conv((1, 1), ((2, 2), (2, 2)), rhs_dilation=(2, 2)), image, kernel, **options)
    yield "conv subsample", lambda: single(conv((2, 2), ((0, 0), (0, 0))), image, normal(1, 1, 4, 8), **options)
    yield "conv crop", lambda: single(conv((1, 1), ((-1, 2), (-1, 2))), image, normal(2, 2, 4, 8), **options)
    yield "conv patches", lambda: single(conv((2, 2), ((0, 0), (0, 0))), image, normal(2, 2, 4, 8), **options)
    yield "conv groups", lambda: single(conv(feature_group_count=4), image, normal(3, 3, 1, 8), **options)
    yield "conv batch groups", lambda: single(conv(batch_group_count=4), image, normal(3, 3, 4, 8), **options)
    yield (
        "conv contract",
        lambda: single(conv((1, 1), ((0, 0), (0, 0)), rhs_dilation=(2, 2)), image, normal(4, 4, 4, 8), **options),
    )
    yield (
        "conv spread",
        lambda: single(conv((1, 1), ((1, 1), (1, 1)), lhs_dilation=(2, 2)), image, normal(2, 2, 4, 8), **options),
    )
    low = -np.inf
    x = array(4, 16)
    yield "max pool", lambda: single(pool((1, 2), (1, 2), "VALID", low, lax.max), x)
    yield "max pool wide", lambda: single(pool((1, 3), (1, 1), "SAME", low, lax.max), x)
    yield "max pool both", lambda: single(pool((3, 3), (2, 2), ((0, 1), (1, 0)), low, lax.max), array(16, 16))
    yield (
        "max pool int",
        lambda: single(pool((1, 3), (1, 1), "SAME", np.iinfo(np.int32).min, lax.max), array(4, 16, dtype=np.int32)),
    )
    yield "min pool", lambda: single(pool((1, 3), (1, 2), "SAME", np.inf, lax.min), x)
    yield "sum pool", lambda: single(pool((1, 4), (1, 2), ((0, 0), (1, 1)), np.float32(0), lax.add), x)
    source = array(4, 8, seed=3)
    yield (
        "pool gradient",
        lambda: single(
            lambda s, a: lax.select_and_scatter_add_p.bind(
                s,
                a,
                select_prim=lax.ge_p,
                window_dimensions=(1, 2),
                window_strides=(1, 2),
                padding=((0, 0), (0, 0)),
            ),
            source,
            x,
        ),
    )
    yield "slice", lambda: single(lambda a: lax.slice(a, (0, 2), (4, 10)), x)
    yield "slice strided", lambda: single(lambda a: lax.slice(a, (0, 1), (4, 16), (1, 2)), x)
    yield "pad", lambda: single(lambda a: lax.pad(a, np.float32(1), ((1, 2, 0), (0, 0, 0))), x)
    yield "pad interior", lambda: single(lambda a: lax.pad(a, np.float32(1), ((0, 0, 0), (2, 1, 3))), x)
    yield "rev", lambda: single(lambda a: lax.rev(a, (0, 1)), x)


def random_cases():
    yield "iota", lambda: single(lambda: lax.broadcasted_iota(np.int32, (8, 16), 1))
    yield "iota float", lambda: single(lambda: lax.broadcasted_iota(np.float32, (8, 16), 0))
    yield "iota bfloat16", lambda: single(lambda: lax.iota(jnp.bfloat16, 4096))
    yield "iota uint8", lambda: single(lambda: lax.iota(np.uint8, 256))
    for width in (8, 16, 32):
        yield f"bits {width}", lambda w=width: single(lambda k: jax.random.bits(k, (8, 4, 16), f"uint{w}"), KEY)
    yield (
        "bits of keys",
        lambda: single(jax.vmap(lambda k: jax.random.bits(k, (8, 4), np.uint32)), jax.random.split(KEY, 4)),
    )
    yield (
        "fold_in",
        lambda: single(
            lambda k, i: jax.vmap(jax.random.fold_in)(k, i), jax.random.split(KEY, 8), np.arange(8, dtype=np.uint32)
        ),
    )
    yield (
        "wrap",
        lambda: single(lambda k: jax.random.wrap_key_data(k, impl="threefry2x32"), array(8, 2, dtype=np.uint32)),
    )
    yield "unwrap", lambda: single(lambda k: jax.random.key_data(k), jax.random.split(KEY, 8))


CASES = dict(cases())
# Hashing compiles slowly on CPU: fewer samples.
FEW = {"bits 8", "bits 16", "bits 32", "bits of keys", "fold_in"}


def sample(case, mesh, count, seed):
    """Some assignments that have a form, spread over all of them."""
    choices = list(assignments(case.rule, mesh))
    random.Random(seed).shuffle(choices)
    fit = (x for x in choices if local_form(case.op, case.rule, x, case.values, mesh) is not None)
    return list(itertools.islice(fit, count))


@functools.cache
def whole_of(name: str) -> list[np.ndarray]:
    """The global operation of a case, which every mesh compares with."""
    return whole(CASES[name]())


@pytest.mark.parametrize("name", CASES)
def test_contract(name):
    case, mesh = CASES[name](), MESHES[2]
    chosen = sample(case, mesh, 1 if name in FEW else 2, name)
    assert chosen, "no form at all"
    check_contract(case, chosen, mesh, whole_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", one_in(len(MESHES), MESHES[::-1]), ids=str)
@pytest.mark.parametrize("name", one_in(2, CASES))
def test_contract_everywhere(name, mesh):
    """Every assignment of a mesh of one axis, more of the bigger meshes."""
    case = CASES[name]()
    check_contract(case, sample(case, mesh, 3 if name in FEW else 8, name), mesh, whole_of(name))


def test_keys_are_split_in_blocks():
    case = single(lambda k: jax.random.split(k, 8), KEY)
    case.rule = Rule((Factor(8, "special"),), ((),), (((0,),),))
    assert check_contract(case, [(("b", "a"),)], MESHES[2], whole(case))


@settings(deadline=None, max_examples=10)
@given(st.data())
def test_counters_are_64_bit(data):
    """The counter of every element of a block, against NumPy's, in draws of more than 2**32 elements."""
    shape = data.draw(st.lists(st.sampled_from([1, 3, 8, 2**10, 2**20, 2**31, 2**32 - 5]), min_size=1, max_size=4))
    while math.prod(shape) >= 2**64:
        shape.pop()
    local = [min(n, 2) for n in shape]
    starts = [data.draw(st.integers(0, n - m)) for n, m in zip(shape, local, strict=True)]
    high, low = counters(shape, local, [np.uint32(i) for i in starts])
    want = np.zeros(local, np.uint64)
    for dim, (size, start) in enumerate(zip(local, starts, strict=True)):
        stride = np.uint64(math.prod(shape[dim + 1 :]))
        index = (np.arange(size, dtype=np.uint64) + np.uint64(start)) * stride
        want += index.reshape([-1 if d == dim else 1 for d in range(len(local))])
    got = np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low)
    np.testing.assert_array_equal(got, want)


def axes_of(case, *where):
    """An assignment that shards, for each (tensor, dim, axes), the major factor of that dim."""
    out = [()] * len(case.rule.factors)
    tensors = (*case.rule.operands, *case.rule.results)
    for tensor, dim, axes in where:
        (factor, *_) = tensors[tensor][dim]
        out[factor] = axes
    return tuple(out)


def form_of(case, mesh, *where):
    return local_form(case.op, case.rule, axes_of(case, *where), case.values, mesh)


def test_wide_types():
    mesh = MESHES[2]
    with jax.enable_x64(True):
        key = jax.random.key(3)
        bits = single(lambda k: jax.random.bits(k, (8, 16), np.uint64), key)
        counted = single(lambda: lax.iota(np.int64, 16))
        largest = single(lambda a: lax.reduce_max(a, (0,)), with_nan(array(16, 8, dtype=np.float64)))
        rows = single(take(ROWS.astype(np.int64), FILL), array(16, 8, dtype=np.float64), ROWS.astype(np.int64))
        for case, axes in [(bits, (("a",), ("b",))), (counted, (("b", "a"),))]:
            assert check_contract(case, [axes], mesh, whole(case))
        assert check_contract(largest, [axes_of(largest, (0, 0, ("a", "b")))], mesh, whole(largest))
        assert check_contract(rows, [axes_of(rows, (0, 0, ("b",)), (1, 0, ("a",)))], mesh, whole(rows))


def test_no_form_for_streams_that_cannot_be_cut():
    with jax.threefry_partitionable(False):
        case = single(lambda k: jax.random.bits(k, (8, 16), np.uint32), KEY)
    assert local_form(case.op, case.rule, (("a",), ()), case.values, MESHES[0]) is None
    case = single(lambda k: jax.random.bits(k, (8, 16), np.uint32), jax.random.key(0, impl="rbg"))
    assert local_form(case.op, case.rule, (("a",), ()), case.values, MESHES[0]) is None


def test_layouts_of_a_product():
    case = CASES["dot"]()
    form = form_of(case, MESHES[2], (0, 0, ("a",)), (0, 1, ("b",)))
    assert form is not None
    assert form.operands == (Layout((("a",), ("b",))), Layout((("b",), ())))
    assert form.results == (Layout((("a",), ()), ("b",)),)
    assert form.collectives == ()


def test_lookup_in_a_sharded_vocabulary_is_a_partial_sum():
    form = form_of(CASES["gather clip"](), MESHES[2], (0, 0, ("a",)), (1, 0, ("b",)))
    assert form is not None
    assert form.results == (Layout((("b",), ()), ("a",)),)
    assert form.collectives == ()


def test_label_pick_and_its_gradient_need_no_collective():
    for name, where in [("gather fill labels", (0, 1, ("a",))), ("scatter_add fill labels", (0, 1, ("a",)))]:
        form = form_of(CASES[name](), MESHES[0], where)
        assert form is not None, name
        assert form.collectives == (), name


def test_scattered_rows_leave_a_partial_sum():
    form = form_of(CASES["scatter_add fill"](), MESHES[0], (1, 0, ("a",)))
    assert form is not None
    assert form.results == (Layout(((), ()), ("a",)),)


def test_halos_are_exchanged():
    form = form_of(CASES["conv"](), MESHES[0], (0, 1, ("a",)))
    assert form is not None
    assert [c.kind for c in form.collectives] == ["collective_permute"] * 2
    assert form.collectives[0].bytes == 4 * 1 * 8 * 4 * 4


def test_no_form():
    mesh = MESHES[1]
    dot = CASES["dot"]()
    assert form_of(dot, mesh, (0, 0, ("a",)), (1, 1, ("a",))) is None  # an axis twice
    assert form_of(CASES["sort"](), mesh, (0, 1, ("a",))) is None  # replicate
    assert form_of(CASES["dot"](), LogicalMesh((3,), ("a",)), (0, 0, ("a",))) is None  # 8 over 3
    merge = CASES["reshape merge"]()  # (8, 4, 16) -> (32, 16)
    assert form_of(merge, mesh, (0, 1, ("a",))) is None  # the minor factor, the major one whole
    assert form_of(merge, mesh, (0, 0, ("a",)), (0, 1, ("b",))) is None  # the major one not cut to single elements
    wide = LogicalMesh((8, 2), ("a", "b"))
    form = form_of(merge, wide, (0, 0, ("a",)), (0, 1, ("b",)))
    assert form is not None
    assert form.results == (Layout((("a", "b"), ())),)


def test_an_axis_may_serve_each_operand_of_a_barrier():
    case = CASES["barrier"]()
    assignment = axes_of(case, (0, 0, ("a",)), (1, 1, ("a",)))
    assert check_contract(case, [assignment], MESHES[0], whole(case))


def test_opaque_ops_are_bound_as_they_are():
    case = single(lambda a: lax.sort(a), array(16))
    shape = case.args[0].shape
    rule = Rule((), (((),) * len(shape),), (((),) * len(shape),), "opaque", "for the test")
    form = local_form(case.op, rule, (), case.values, MESHES[2])
    assert isinstance(form, LocalForm)
    case.rule = rule
    assert check_contract(case, [()], MESHES[2], whole(case))


def test_a_print_prints_once(capfd):
    case = single(lambda a: jax.debug.print("here {}", a), array(2))
    assert not needs_outside(case.op)
    form = local_form(case.op, case.rule, ((),) * len(case.rule.factors), case.values, MESHES[2])
    assert form is not None
    local_step(case, [form], MESHES[2])(*case.args)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == 1


def test_an_io_callback_runs_once_and_all_receive_its_results():
    calls = []

    def record(x):
        calls.append(1)
        return x + 1, x > 0

    x = array(4)
    shapes = (jax.ShapeDtypeStruct((4,), np.float32), jax.ShapeDtypeStruct((4,), np.bool_))
    case = single(lambda a: io_callback(record, shapes, a), x)
    assignment = ((),) * len(case.rule.factors)
    expected = whole(case)
    assert check_contract(case, [assignment], MESHES[2], expected)
    jax.effects_barrier()
    assert len(calls) == 2  # one of them in `whole`


def test_a_pure_callback_is_replicated():
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    case = single(lambda a: jax.pure_callback(lambda x: np.asarray(x) * 2, shape, a), array(4))
    assert check_contract(case, [((),) * len(case.rule.factors)], MESHES[2], whole(case))


def test_what_needs_outside():
    mesh = device_mesh(MESHES[0])
    nested = single(
        lambda a: jax.shard_map(lambda x: x, mesh=mesh, in_specs=PartitionSpec("a"), out_specs=PartitionSpec("a"))(a),
        array(4),
    )
    assert needs_outside(nested.op)
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    # JAX orders effects on one device only, outside a region no less: ordered ones stay inside and lose their order.
    ordered = single(lambda a: io_callback(lambda x: x, shape, a, ordered=True), array(4))
    assert not needs_outside(ordered.op)
    shown = single(lambda a: jax.debug.callback(lambda x: None, a, ordered=True), array(4))
    assert not needs_outside(shown.op)
    assert needs_outside(single(lambda: lax.rng_uniform(0.0, 1.0, (4,))).op)
    assert not needs_outside(CASES["add"]().op)

    moved = single(lambda a: jax.device_put(a, jax.devices()[1]), array(4))
    assert not needs_outside(moved.op)
    assert check_contract(moved, [(("a",),)], MESHES[0], [moved.args[0]])
    assert needs_outside(single(lambda a: jax.device_put(a, jax.memory.Space.Host), array(4)).op)

    def solved(a, random):
        def apply(x):
            return 2 * x + (0 * lax.rng_uniform(0.0, 1.0, (4,)) if random else 0)

        return lax.custom_linear_solve(apply, a, lambda _, b: b / 2, symmetric=True)

    assert needs_outside(single(lambda a: solved(a, True), array(4)).op)
    assert not needs_outside(single(lambda a: solved(a, False), array(4)).op)


def test_collectives_divide_the_blocks_not_the_wholes():
    """An argmax over a dim sharded two ways gathers one value and one index a device."""
    form = form_of(CASES["argmax"](), MESHES[2], (0, 0, ("a",)), (0, 1, ("b",)))
    assert form is not None
    assert local_shape((16, 8), form.operands[0], MESHES[2]) == (4, 4)
    assert [(c.kind, c.axes, c.bytes) for c in form.collectives] == [("all_gather", ("a",), 4 * 4 * 4)] * 2


def test_metadata_is_kept():
    def scoped(a):
        with jax.named_scope("user_scope"):
            return lax.cumsum(a, axis=0)

    case = single(scoped, array(16, 4))
    form = form_of(case, MESHES[0], (0, 0, ("a",)))
    assert form is not None
    text = local_step(case, [form], MESHES[0]).lower(*case.args).as_text(debug_info=True)
    assert re.search(r"user_scope/all_gather", text)
    assert not re.search(r"user_scope/user_scope", text)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_floats_travel_as_integers_of_the_same_order(dtype):
    """NaN of either sign, which x86 makes as it pleases, becomes the extreme; all others come back as they were."""
    nan = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)
    numbers = np.array([-np.inf, -3e4, -1.5, -1e-7, -0.0, 0.0, 1e-7, 1.5, 3e4, np.inf], np.float32).astype(dtype)
    carrier = np.dtype(np.int32)
    bits = np.asarray(ordered(jnp.asarray(numbers), carrier, True))
    assert np.all(np.diff(bits) >= 0)
    np.testing.assert_array_equal(np.asarray(unordered(jnp.asarray(bits), dtype)), numbers)
    for high in (True, False):
        lost = np.asarray(ordered(jnp.asarray(nan).astype(dtype), carrier, high))
        assert np.all(lost > bits.max() if high else lost < bits.min())
        assert np.all(np.isnan(np.asarray(unordered(jnp.asarray(lost), dtype)).astype(np.float32)))
