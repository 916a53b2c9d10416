"""Every local form keeps the contract: blocks in, the form on every device, blocks out, equals the global operation."""

import dataclasses
import functools
import itertools
import math
import random
import re
from collections import Counter
from functools import partial
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

from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.ir.layout import Layout, LogicalMesh, local_shape
from alpa_lite.ir.strategy import Factor, Rule
from alpa_lite.passes.factors import rules_of
from alpa_lite.passes.local.effects import needs_outside
from alpa_lite.passes.local.forms import local_form
from alpa_lite.passes.local.random import counters
from alpa_lite.passes.local.reductions import float_order_to_int, int_to_float_order
from alpa_lite.passes.local.types import LocalForm
from gallery.batches import f32
from tests.marks import one_in

MESHES = [LogicalMesh(shape, ("a", "b", "c")[: len(shape)]) for shape in ((2,), (2, 2), (4, 2), (2, 2, 2))]


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
    results = tuple(range(len(values), len(values) + len(eqn.outvars)))
    values += [Value(tuple(var.aval.shape), var.aval.dtype, var.aval) for var in eqn.outvars]
    context = getattr(eqn, "ctx", None)
    op = Op(0, eqn.primitive, eqn.params, tuple(atoms), results, (), eqn.source_info, "key", context)
    leaves = jax.tree.leaves(args)
    return Case(op, rules_of([op], values)["key"], values, [leaves[i] for i in order], tolerance)


def spec(layout):
    return PartitionSpec(*(axes if axes else None for axes in layout.dims))


def local_step(case, forms, mesh):
    """A function that runs forms on every device, over global arrays; partial results lead with a dim of summands."""

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

    return lambda *args: [on_devices(form)(*args) for form in forms]


def plain(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def whole_operations(cases):
    """Results of the global operations of cases, in one program, which compiles faster than many."""

    def run(case, args):
        args = iter(args)
        operands = [a.value if isinstance(a, Lit) else next(args) for a in case.op.operands]
        out = case.op.primitive.bind(*operands, **case.op.primitive.get_bind_params(dict(case.op.params)))
        return list(out) if case.op.primitive.multiple_results else [out]

    arguments = [case.args for case in cases]
    program = jax.jit(lambda arguments: [run(*pair) for pair in zip(cases, arguments, strict=True)])
    return [[plain(x) for x in out] for out in program.lower(arguments).compile()(arguments)]


def whole(case):
    return whole_operations([case])[0]


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


def check_contracts(chosen, mesh):
    """Compares forms with global operations, all in one program; how many of the chosen assignments have a form.

    Arguments:
      chosen: of each case the assignments, and the results of the global operation.
    """
    found = []
    for case, some, expected in chosen:
        forms = ((x, local_form(case.op, case.rule, x, case.values, mesh)) for x in some)
        found.append((case, {x: form for x, form in forms if form is not None}, expected))
    steps = [local_step(case, list(forms.values()), mesh) for case, forms, _ in found]
    arguments = [case.args for case, _, _ in found]
    program = jax.jit(lambda arguments: [step(*args) for step, args in zip(steps, arguments, strict=True)])
    lowered = program.lower(arguments)
    declared = Counter((c.kind, c.bytes) for _, forms, _ in found for form in forms.values() for c in form.collectives)
    assert written(lowered.as_text()) == declared, ([(case.op.name, list(forms)) for case, forms, _ in found], mesh)
    for (case, forms, expected), everything in zip(found, lowered.compile()(arguments), strict=True):
        for (assignment, form), results in zip(forms.items(), everything, strict=True):
            used = {a for axes in assignment for a in axes} or set(mesh.axis_names)
            assert all(set(c.axes) <= used for c in form.collectives)
            for got, want, layout in zip(results, expected, form.results, strict=True):
                compare(plain(got), want, layout, case.tolerance, f"{case.op.name} {assignment} {mesh}")
    return sum(len(forms) for _, forms, _ in found)


def unsharded(case):
    return ((),) * len(case.rule.factors)


def assert_contract(case, assignment, mesh=MESHES[2]):
    """Holds one assignment of a case, which must have a form, to the contract."""
    assert check_contracts([(case, [assignment], whole(case))], mesh)


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


def case(fun, *args, **options):
    """A function that makes the case."""
    return partial(single, fun, *args, **options)


def pool(window, strides, padding, init, fun):
    return lambda x: lax.reduce_window(x, init, fun, window, strides, padding)


FILL, CLIP, PROMISE = GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP, GatherScatterMode.PROMISE_IN_BOUNDS
ROWS = np.array([[0], [15], [3], [8], [16], [-1], [7], [40]], np.int32)
PAIRS = np.array([[0, 1], [15, 7], [3, 8], [16, 2], [-2, -2], [7, 3], [8, 0], [40, 9]], np.int32)
KEY, FOUR = jax.random.key(3), f32(4)
SORTED_DIMS = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0, 1), start_index_map=(0, 1))
LABEL_DIMS = lax.GatherDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), start_indices_batching_dims=(0,))
LABEL_PUT = lax.ScatterDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,))
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
    yield "add", case(lax.add, x, x)
    yield "add scalar", case(lambda a: lax.add(a, np.float32(2)), x)
    yield "select", case(lambda p, a, b: lax.select(p, a, b), x > 0, x, -x)
    yield "select scalar", case(lambda p, a, b: lax.select_n_p.bind(p, a, b), np.True_, x, -x)
    yield "convert", case(lambda a: lax.convert_element_type(a, jnp.bfloat16), x)
    yield "transpose", case(lambda a: lax.transpose(a, (2, 0, 1)), cube)
    yield "broadcast", case(lambda a: lax.broadcast_in_dim(a, (16, 4, 8), (0, 2)), x)
    yield "broadcast one", case(lambda a: lax.broadcast_in_dim(a, (16, 8), (0, 1)), array(16, 1))
    yield "reshape merge", case(lambda a: lax.reshape(a, (32, 16)), cube)
    yield "reshape split", case(lambda a: lax.reshape(a, (2, 8, 2, 4)), x)
    yield "squeeze", case(lambda a: lax.squeeze(a, (1,)), array(8, 1, 4))
    yield "concatenate", case(lambda a, b: lax.concatenate([a, b], 1), x, x)
    yield "split", case(lambda a: lax.split(a, (2, 6), 1), x)
    yield "tile", case(lambda a: lax.tile(a, (1, 3)), x, primitive="tile")
    yield "sort", case(lambda a, b: lax.sort((a, b), dimension=1, num_keys=1), x, ints)
    squares = np.stack([np.eye(4, dtype=np.float32)] * 8)
    yield "cholesky", case(partial(lax.linalg.cholesky, symmetrize_input=False), squares, primitive="cholesky")
    yield "fft", case(lambda a: lax.fft(a, "FFT", (8,)), x.astype(np.complex64), tolerance=1e-5)
    yield "barrier", case(lambda a, b: lax.optimization_barrier((a, b)), x, ints)
    yield "bitcast", case(lambda a: lax.bitcast_convert_type(a, np.uint8), x)
    yield from product_cases()
    yield from reduction_cases()
    yield from indexing_cases()
    yield from window_cases()
    yield from random_cases()


def product_cases():
    a, b = normal(8, 16), normal(16, 4, seed=1)
    batch = (((2,), (1,)), ((0,), (0,)))
    left, right = normal(4, 8, 16), normal(4, 16, 8, seed=2)
    yield "dot", case(lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))), a, b, tolerance=1e-5)
    yield "dot batch", case(lambda a, b: lax.dot_general(a, b, batch), left, right, tolerance=1e-5)
    ints = array(8, 16, dtype=np.int32), array(16, 4, dtype=np.int32)
    yield "dot int", case(lambda a, b: lax.dot_general(a, b, (((1,), (0,)), ((), ()))), *ints)


def reduction_cases():
    x, cube = array(16, 8), array(8, 4, 16)
    yield "sum", case(lambda a: lax.reduce_sum_p.bind(a, axes=(0, 2), out_sharding=None), cube)
    for name, kind in [("float32", np.float32), ("bfloat16", jnp.bfloat16), ("int32", np.int32), ("uint8", np.uint8)]:
        for extreme in (jnp.max, jnp.min):
            primitive = "reduce_max" if extreme is jnp.max else "reduce_min"
            yield (
                f"{extreme.__name__} {name}",
                case(partial(extreme, axis=0), array(16, 8, dtype=kind), primitive=primitive),
            )
    yield "max nan", case(lambda a: lax.reduce_max(a, (0,)), with_nan(x))
    yield "min nan", case(lambda a: lax.reduce_min(a, (0, 1)), with_nan(x))
    yield "max infinite", case(lambda a: lax.reduce_max(a, (0,)), np.full((8, 4), -np.inf, np.float32))
    yield "prod", case(lambda a: lax.reduce_prod(a, (0,)), normal(16, 8), tolerance=1e-5)
    for fun in (lax.reduce_and, lax.reduce_or, lax.reduce_xor):
        yield fun.__name__, case(partial(fun, axes=(0,)), array(16, 8, dtype=np.bool_))
        yield fun.__name__ + " int", case(partial(fun, axes=(0, 1)), array(16, 8, dtype=np.int32))
    for fun in (lax.argmax, lax.argmin):
        for data, label in [(x, ""), (with_nan(x), " nan"), (array(16, 8, dtype=np.int32), " int")]:
            yield fun.__name__ + label, case(partial(fun, axis=0, index_dtype=np.int32), data)
    yield "argmax last", case(lambda a: lax.argmax(a, 2, np.int32), cube)
    for fun in (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin, lax.cumlogsumexp):
        for reverse in (False, True):
            scan = partial(fun, axis=0, reverse=reverse)
            yield f"{fun.__name__} {reverse}", case(scan, normal(16, 4), tolerance=2e-5)
    yield "cumsum int", case(lambda a: lax.cumsum(a, axis=1), array(4, 16, dtype=np.int32))
    yield "cummax int", case(lambda a: lax.cummax(a, axis=1), array(4, 16, dtype=np.int32))
    yield "top_k", case(lambda a: lax.top_k(a, 3), array(4, 16))
    yield "top_k many", case(lambda a: lax.top_k(a, 12), with_nan(array(4, 16, seed=4)))
    reduce = partial(lax.reduce, init_values=np.float32(0), computation=lambda p, q: p + 2 * q, dimensions=(1,))
    yield "reduce", case(reduce, array(16, 8), primitive="reduce")


def indexing_cases():
    x, wide, updates = array(16, 8), array(16, 8, dtype=np.int32), array(8, 8, seed=5)
    for mode, label in [(FILL, "fill"), (CLIP, "clip"), (PROMISE, "promise")]:
        rows = ROWS[:4] if mode == PROMISE else ROWS
        rows = np.concatenate([rows] * 2) if mode == PROMISE else rows
        pairs = np.concatenate([PAIRS[:3], PAIRS[5:6]] * 2) % np.array([16, 8], np.int32) if mode == PROMISE else PAIRS
        yield f"gather {label}", case(take(rows, mode), x, rows)
        yield f"gather {label} int", case(take(rows, mode), wide, rows)
        yield f"gather {label} pairs", case(take(pairs, mode, dims=SORTED_DIMS, slices=(1, 1)), x, pairs)
        yield f"gather {label} labels", case(take(rows, mode, dims=LABEL_DIMS, slices=(1, 1)), array(8, 16), rows)
        for fun in (lax.scatter_add, lax.scatter, lax.scatter_min, lax.scatter_mul):
            yield f"{fun.__name__} {label}", case(put(fun, mode), x, rows, updates)
        yield f"scatter_add {label} int", case(put(lax.scatter_add, mode), wide, rows, updates.astype(np.int32))
        yield f"scatter_add {label} pairs", case(put(lax.scatter_add, mode, PAIR_PUT), x, pairs, array(8, seed=6))
        labels = array(8, 16), rows, array(8, seed=6)
        yield f"scatter_add {label} labels", case(put(lax.scatter_add, mode, LABEL_PUT), *labels)
        yield f"scatter_add {label} window", case(put(lax.scatter_add, mode, WINDOW_PUT), x, pairs, array(8, 2, seed=6))
    yield "gather fill value", case(take(ROWS, FILL, fill=7.0), x, ROWS)
    yield "gather unsigned", case(take(ROWS, CLIP), x, ROWS.astype(np.uint8))
    yield "gather short", case(take(ROWS, FILL), x, ROWS.astype(np.int8))
    yield "gather bool", case(take(ROWS, FILL), x > 0, ROWS)
    yield "gather bfloat16", case(take(ROWS, FILL), x.astype(jnp.bfloat16), ROWS)
    bytes_, signed = np.array([[0], [255], [3], [9]], np.uint8), np.array([[0], [127], [-128], [64]], np.int8)
    yield "scatter_add unsigned", case(put(lax.scatter_add, CLIP), x, bytes_, array(4, 8))
    yield "scatter_add int8", case(put(lax.scatter_add, FILL), array(128, 4), signed, array(4, 4))
    start = np.int32(5), np.int32(3)
    yield "dynamic_slice", case(partial(lax.dynamic_slice_p.bind, slice_sizes=(16, 2)), x, *start)
    yield "dynamic_update_slice", case(lambda *args: lax.dynamic_update_slice_p.bind(*args), x, array(16, 2), *start)


def window_cases():
    image, kernel = normal(4, 8, 8, 4), normal(3, 3, 4, 8, seed=1)
    options = {"tolerance": 1e-4}
    yield "conv", case(conv(), image, kernel, **options)
    yield "conv wide", case(conv(padding=((2, 2), (2, 2))), normal(2, 16, 16, 1), normal(5, 5, 1, 2), **options)
    yield "conv stride", case(conv((2, 2), ((0, 1), (1, 0))), image, kernel, **options)
    yield "conv dilated", case(conv((1, 1), ((2, 2), (2, 2)), rhs_dilation=(2, 2)), image, kernel, **options)
    yield "conv subsample", case(conv((2, 2), ((0, 0), (0, 0))), image, normal(1, 1, 4, 8), **options)
    yield "conv crop", case(conv((1, 1), ((-1, 2), (-1, 2))), image, normal(2, 2, 4, 8), **options)
    yield "conv patches", case(conv((2, 2), ((0, 0), (0, 0))), image, normal(2, 2, 4, 8), **options)
    yield "conv groups", case(conv(feature_group_count=4), image, normal(3, 3, 1, 8), **options)
    yield "conv batch groups", case(conv(batch_group_count=4), image, normal(3, 3, 4, 8), **options)
    contracting = conv((1, 1), ((0, 0), (0, 0)), rhs_dilation=(2, 2))
    yield "conv contract", case(contracting, image, normal(4, 4, 4, 8), **options)
    yield "conv spread", case(conv(lhs_dilation=(2, 2)), image, normal(2, 2, 4, 8), **options)
    low = -np.inf
    x = array(4, 16)
    yield "max pool", case(pool((1, 2), (1, 2), "VALID", low, lax.max), x)
    yield "max pool wide", case(pool((1, 3), (1, 1), "SAME", low, lax.max), x)
    yield "max pool both", case(pool((3, 3), (2, 2), ((0, 1), (1, 0)), low, lax.max), array(16, 16))
    lowest = np.iinfo(np.int32).min
    yield "max pool int", case(pool((1, 3), (1, 1), "SAME", lowest, lax.max), array(4, 16, dtype=np.int32))
    yield "min pool", case(pool((1, 3), (1, 2), "SAME", np.inf, lax.min), x)
    yield "sum pool", case(pool((1, 4), (1, 2), ((0, 0), (1, 1)), np.float32(0), lax.add), x)
    window = {"window_dimensions": (1, 2), "window_strides": (1, 2), "padding": ((0, 0), (0, 0))}
    gradient = partial(lax.select_and_scatter_add_p.bind, select_prim=lax.ge_p, **window)
    yield "pool gradient", case(gradient, array(4, 8, seed=3), x)
    yield "slice", case(lambda a: lax.slice(a, (0, 2), (4, 10)), x)
    yield "slice strided", case(lambda a: lax.slice(a, (0, 1), (4, 16), (1, 2)), x)
    yield "pad", case(lambda a: lax.pad(a, np.float32(1), ((1, 2, 0), (0, 0, 0))), x)
    yield "pad interior", case(lambda a: lax.pad(a, np.float32(1), ((0, 0, 0), (2, 1, 3))), x)
    yield "rev", case(lambda a: lax.rev(a, (0, 1)), x)


def random_cases():
    yield "iota", case(lambda: lax.broadcasted_iota(np.int32, (8, 16), 1))
    yield "iota float", case(lambda: lax.broadcasted_iota(np.float32, (8, 16), 0))
    yield "iota bfloat16", case(lambda: lax.iota(jnp.bfloat16, 4096))
    yield "iota uint8", case(lambda: lax.iota(np.uint8, 256))
    for width in (8, 16, 32):
        yield f"bits {width}", case(partial(jax.random.bits, shape=(8, 4, 16), dtype=f"uint{width}"), KEY)
    bits = jax.vmap(lambda k: jax.random.bits(k, (8, 4), np.uint32))
    yield "bits of keys", lambda: single(bits, jax.random.split(KEY, 4))
    numbers = np.arange(8, dtype=np.uint32)
    yield "fold_in", lambda: single(jax.vmap(jax.random.fold_in), jax.random.split(KEY, 8), numbers)
    yield "wrap", case(lambda k: jax.random.wrap_key_data(k, impl="threefry2x32"), array(8, 2, dtype=np.uint32))
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


CHUNKS = [list(CASES)[number::16] for number in range(16)]


@pytest.mark.parametrize("names", CHUNKS, ids=lambda names: names[0])
def test_contract(names):
    mesh, cases = MESHES[2], [CASES[name]() for name in names]
    chosen = [sample(case, mesh, 1 if name in FEW else 2, name) for name, case in zip(names, cases, strict=True)]
    assert all(chosen), "no form at all"
    check_contracts(list(zip(cases, chosen, whole_operations(cases), strict=True)), mesh)


@functools.cache
def whole_of(name: str) -> list[np.ndarray]:
    """The global operation of a case, which every mesh compares with."""
    return whole(CASES[name]())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", one_in(len(MESHES), MESHES[::-1]), ids=str)
@pytest.mark.parametrize("name", one_in(2, CASES))
def test_contract_everywhere(name, mesh):
    """Every assignment of a mesh of one axis, more of the bigger meshes."""
    case = CASES[name]()
    check_contracts([(case, sample(case, mesh, 3 if name in FEW else 8, name), whole_of(name))], mesh)


def test_keys_are_split_in_blocks():
    case = single(lambda k: jax.random.split(k, 8), KEY)
    case.rule = Rule((Factor(8, "special"),), ((),), (((0,),),))
    assert_contract(case, (("b", "a"),))


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
    with jax.enable_x64(True):
        key = jax.random.key(3)
        bits = single(lambda k: jax.random.bits(k, (8, 16), np.uint64), key)
        largest = single(lambda a: lax.reduce_max(a, (0,)), with_nan(array(16, 8, dtype=np.float64)))
        rows = single(take(ROWS.astype(np.int64), FILL), array(16, 8, dtype=np.float64), ROWS.astype(np.int64))
        assert_contract(bits, (("a",), ("b",)))
        assert_contract(single(lambda: lax.iota(np.int64, 16)), (("b", "a"),))
        assert_contract(largest, axes_of(largest, (0, 0, ("a", "b"))))
        assert_contract(rows, axes_of(rows, (0, 0, ("b",)), (1, 0, ("a",))))


def test_no_form_for_streams_that_cannot_be_cut():
    with jax.threefry_partitionable(False):
        case = single(lambda k: jax.random.bits(k, (8, 16), np.uint32), KEY)
    other = single(lambda k: jax.random.bits(k, (8, 16), np.uint32), jax.random.key(0, impl="rbg"))
    for one in (case, other):
        assert local_form(one.op, one.rule, (("a",), ()), one.values, MESHES[0]) is None


@pytest.mark.parametrize(
    ("name", "mesh", "where", "results"),
    [
        ("dot", 2, ((0, 0, ("a",)), (0, 1, ("b",))), Layout((("a",), ()), ("b",))),
        # A lookup in a sharded vocabulary is a partial sum, and scattered rows leave one.
        ("gather clip", 2, ((0, 0, ("a",)), (1, 0, ("b",))), Layout((("b",), ()), ("a",))),
        ("scatter_add fill", 0, ((1, 0, ("a",)),), Layout(((), ()), ("a",))),
        # A label pick and its gradient.
        ("gather fill labels", 0, ((0, 1, ("a",)),), None),
        ("scatter_add fill labels", 0, ((0, 1, ("a",)),), None),
    ],
)
def test_layouts_without_collectives(name, mesh, where, results):
    form = form_of(CASES[name](), MESHES[mesh], *where)
    assert form is not None
    assert results is None or form.results == (results,)
    assert form.collectives == ()
    assert name != "dot" or form.operands == (Layout((("a",), ("b",))), Layout((("b",), ())))


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
    assert_contract(case, axes_of(case, (0, 0, ("a",)), (1, 1, ("a",))), MESHES[0])


def test_opaque_operations_and_pure_callbacks_are_bound_as_they_are():
    case = single(lambda a: lax.sort(a), array(16))
    case.rule = Rule((), (((),),), (((),),), "opaque", "for the test")
    assert isinstance(local_form(case.op, case.rule, (), case.values, MESHES[2]), LocalForm)
    assert_contract(case, ())
    case = single(lambda a: jax.pure_callback(lambda x: np.asarray(x) * 2, FOUR, a), array(4))
    assert_contract(case, unsharded(case))


def test_a_print_prints_once(capfd):
    case = single(lambda a: jax.debug.print("here {}", a), array(2))
    assert not needs_outside(case.op)
    form = local_form(case.op, case.rule, unsharded(case), case.values, MESHES[2])
    assert form is not None
    jax.jit(local_step(case, [form], MESHES[2]))(*case.args)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == 1


def test_an_io_callback_runs_once_and_all_receive_its_results():
    calls = []

    def record(x):
        calls.append(1)
        return x + 1, x > 0

    shapes = (FOUR, jax.ShapeDtypeStruct((4,), np.bool_))
    case = single(lambda a: io_callback(record, shapes, a), array(4))
    assert_contract(case, unsharded(case))
    jax.effects_barrier()
    assert len(calls) == 2  # one of them in `whole`


def test_operations_that_run_outside_of_regions():
    """JAX orders effects on one device only, outside a region too: ordered ones stay inside and lose their order."""
    mesh, along = device_mesh(MESHES[0]), PartitionSpec("a")

    def solved(a, random):
        def apply(x):
            return 2 * x + (0 * lax.rng_uniform(0.0, 1.0, (4,)) if random else 0)

        return lax.custom_linear_solve(apply, a, lambda _, b: b / 2, symmetric=True)

    for fun in (
        lambda a: jax.shard_map(lambda x: x, mesh=mesh, in_specs=along, out_specs=along)(a),
        lambda a: jax.device_put(a, jax.memory.Space.Host),
        lambda a: solved(a, True),
    ):
        assert needs_outside(single(fun, array(4)).op)
    assert needs_outside(single(lambda: lax.rng_uniform(0.0, 1.0, (4,))).op)
    for fun in (
        lambda a: io_callback(lambda x: x, FOUR, a, ordered=True),
        lambda a: jax.debug.callback(lambda x: None, a, ordered=True),
        lambda a: solved(a, False),
        lambda a: lax.add(a, a),
    ):
        assert not needs_outside(single(fun, array(4)).op)
    moved = single(lambda a: jax.device_put(a, jax.devices()[1]), array(4))
    assert not needs_outside(moved.op)
    assert check_contracts([(moved, [(("a",),)], [moved.args[0]])], MESHES[0])


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
    text = jax.jit(local_step(case, [form], MESHES[0])).lower(*case.args).as_text(debug_info=True)
    assert re.search(r"user_scope/all_gather", text)
    assert not re.search(r"user_scope/user_scope", text)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_floats_travel_as_integers_of_the_same_order(dtype):
    """NaN of either sign, which x86 makes as it pleases, becomes the extreme; all others come back as they were."""
    nan = np.array([0x7FC00000, 0xFFC00000], np.uint32).view(np.float32)
    numbers = np.array([-np.inf, -3e4, -1.5, -1e-7, -0.0, 0.0, 1e-7, 1.5, 3e4, np.inf], np.float32).astype(dtype)
    carrier = np.dtype(np.int32)
    bits = np.asarray(float_order_to_int(jnp.asarray(numbers), carrier, True))
    assert np.all(np.diff(bits) >= 0)
    np.testing.assert_array_equal(np.asarray(int_to_float_order(jnp.asarray(bits), dtype)), numbers)
    for high in (True, False):
        lost = np.asarray(float_order_to_int(jnp.asarray(nan).astype(dtype), carrier, high))
        assert np.all(lost > bits.max() if high else lost < bits.min())
        assert np.all(np.isnan(np.asarray(int_to_float_order(jnp.asarray(lost), dtype)).astype(np.float32)))
