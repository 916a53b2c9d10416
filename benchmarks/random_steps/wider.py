"""More kinds of lines for random programs: what train steps of users hold beside plain primitives.

Loops that carry several dtypes, rules of differentiation with residuals, policies of rematerialisation, transformations
of loops and branches (`vmap` of a `cond`, of a `while`), distributions that reject, indices of several dims, images,
integer and boolean leaves, arrays of one element or none. Each adds lines to a `Builder`, or nothing where no value
fits, as those of `kinds.py` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from benchmarks.random_steps.program import Builder, Forms, Value, axis_of, pick, writers

FLOATS = ("float32",)
NUMBERS = ("float32", "bfloat16", "int32")
KINDS: dict[str, Callable[[Builder], Value | None]] = {}

kind = writers(KINDS)


@kind("scan", pick(FLOATS, least=1))
def mixed_scan(b: Builder, v: Value) -> Forms:
    return f"mixed_scan({v.name}, {axis_of(b, v)}, {b.rng.choice((1, 1, 2))})"


@kind("transformed", pick(FLOATS, least=2), pick(("int32",), least=1, most=1, exact=True))
def transformed_control_flow(b: Builder, v: Value, i: Value) -> Forms:
    if not math.prod(v.shape) or not i.shape[0]:
        return None
    n, rows = v.name, f"jnp.resize({i.name}, ({v.shape[0]},))"
    return (
        f"jax.vmap(lambda a, c: lax.cond(c > 2, jnp.tanh, lambda z: z * 0.5, a))({n}, {rows})",
        f"jax.vmap(lambda a, c: lax.while_loop(lambda s: s[0] < c % 4, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, a))[1])"
        f"(lax.stop_gradient({n}), {rows})",
        f"jax.vmap(lambda a, c: lax.dynamic_slice_in_dim(a, c, {max(1, v.shape[1] // 2)}, 0))({n}, {rows})",
        f"jax.vmap(lambda a, c: lax.switch(c % 3, [jnp.sin, lambda z: -z, lambda z: z.at[0].set(1)], a))({n}, {rows})",
        f"lax.map(lambda a: jnp.tanh(a) * jnp.mean(a), {n})",
        f"lax.map(lambda a: jnp.cumsum(a, -1), {n}, batch_size=3)",
        f"jax.vmap(lambda a: scanned(a, 0, False)[0], in_axes=1, out_axes=1)({n})",
        f"jax.vmap(jax.vmap(lambda a: a * 2 + 1))({n})",
        f"jax.jvp(lambda a: jnp.tanh(a) * a, ({n},), (jnp.ones_like({n}),))[1]",
        f"jax.grad(lambda a: jnp.sum(jax.checkpoint(jnp.sin)(a) ** 2))({n})",
    )


@kind("loop", pick(FLOATS, least=1), pick(("int32",), most=0, exact=True))
def data_bounded_loop(b: Builder, v: Value, i: Value) -> Forms:
    if not math.prod(v.shape):
        return None
    return f"bounded_loop(lax.stop_gradient({v.name}), {i.name} % 3)"


@kind("cumulative", pick(FLOATS, least=1), pick(FLOATS, like=0))
def recurrence(b: Builder, v: Value, w: Value) -> Forms:
    if not math.prod(v.shape):
        return None
    return f"recurrence(jax.nn.sigmoid({v.name}), {w.name}, {axis_of(b, v)}, {b.rng.choice((True, False))})"


@kind("cumulative", pick(("bfloat16", "int32", "bool", "uint8", "float32"), least=1, exact=True))
def cumulative_of_types(b: Builder, v: Value) -> Forms:
    axis = axis_of(b, v)
    return (f"jnp.cumsum({v.name} > 0, {axis})", f"jnp.cumsum({v.name}.astype('int8'), {axis})",
             f"jnp.diff({v.name}.astype('float32'), axis={axis})",
             f"jnp.cumprod(({v.name} > 0).astype('int32'), {axis})",
             f"lax.cummax({v.name}.astype('int32'), {axis}, reverse=True)",
             f"lax.associative_scan(jnp.maximum, {v.name}, axis={axis})")  # fmt: skip


@kind("own rule", pick(FLOATS, least=2))
def own_rules(b: Builder, v: Value) -> Forms:
    policies = ("dots_saveable", "nothing_saveable", "everything_saveable", "dots_with_no_batch_dims_saveable")
    w = b.leaf("state", (v.shape[-1], b.dim()))
    forms = (
        "scaled_product({0}, {1}, 0.5)",
        f"jax.checkpoint(lambda a, c: jnp.sin(jnp.tanh(a @ c)),"
        f" policy=jax.checkpoint_policies.{b.rng.choice(policies)})({{0}}, {{1}})",
        "jax.checkpoint(lambda a, c: jax.checkpoint(jnp.sin, prevent_cse=False)(a @ c))({0}, {1})",
        "lax.scan(jax.checkpoint(lambda a, c: (jnp.tanh(a + c), None)), jnp.zeros({0}.shape[1:]), {0})[0]",
        "jax.jit(jax.checkpoint(lambda a: a @ {1} + scaled_product(a, {1}, 2.0)))({0})",
    )
    return forms, [v, w]


@kind("random", pick(("key",)), pick(FLOATS, least=1))
def more_random_numbers(b: Builder, key: Value, v: Value) -> Forms:
    k = f"jax.random.fold_in({key.name}, {b.rng.randint(0, 9)})"
    n, rows = v.name, v.shape[0]
    forms = [
        f"{n} + jax.random.exponential({k}, {v.shape})", f"{n} * jax.random.rademacher({k}, {v.shape}, 'float32')",
        f"jax.random.categorical({k}, lax.stop_gradient({n}))", f"{n} + jax.random.laplace({k}, {v.shape[-1:]})",
        f"jax.random.bits({k}, {v.shape}, 'uint8').astype('float32') / 256 + {n}",
        f"{n} + jax.random.normal({k}, {v.shape}, 'bfloat16')",
        f"jax.random.split({k}, 3)[1]", f"jax.random.fold_in(jax.random.clone({key.name}), 7)",
        f"jax.random.wrap_key_data(jax.random.key_data({k}), impl=jax.random.key_impl({key.name}))",
        f"lax.scan(lambda q, a: (jax.random.split(q)[0], a + jax.random.uniform(q, a.shape)), {k}, {n})[1]",
        f"{n} + lax.cond({n}.size % 2 == 0, jax.random.uniform, jax.random.normal, {k})",
    ]  # fmt: skip
    if rows:
        forms += [
            f"jax.random.choice({k}, {n}, ({b.dim()},), axis=0)", f"jax.random.choice({k}, {n}, replace=False)",
            f"jax.vmap(lambda i, a: a * jax.random.bernoulli(jax.random.fold_in({k}, i), 0.5, a.shape))"
            f"(jnp.arange({rows}), {n})",
            f"lax.map(lambda t: t[1] + jax.random.normal(t[0], t[1].shape), (jax.random.split({k}, {rows}), {n}))",
        ]  # fmt: skip
    return forms


@kind("indexing", pick((*FLOATS, "int32"), least=1), pick(("int32",), least=1, most=2, exact=True), exact=True)
def indexing(b: Builder, v: Value, i: Value) -> Forms:
    if not math.prod(v.shape) or not math.prod(i.shape):
        return None
    rng, n, j, size = b.rng, v.name, i.name, v.shape[0]
    mode = rng.choice(("drop", "clip", "fill"))
    forms = [
        f"{n}[::-2]", f"{n}[..., None, 0]", f"{n}[jnp.array([0, -1, {size // 2}])]",
        f"{n}.at[{j} % {size}].add(1, mode='{mode if mode != 'fill' else 'drop'}')", f"{n}.at[::2].multiply(2)",
        f"{n}.at[{j}].get(mode='{mode if mode != 'drop' else 'fill'}', fill_value=0)",
        f"{n}.at[0].set(0)", f"{n}.at[-1].max(1)", f"jnp.take({n}, {j}.ravel()[0] % {size}, axis=0)",
        f"jnp.put_along_axis({n}, jnp.zeros((1,) * {n}.ndim, int), 0, axis=0, inplace=False)",
        f"jax.ops.segment_max({n}.astype('int32'), jnp.arange({size}) % 3, 3)", f"{n}.at[{size // 2}:].add(1)",
        f"jax.ops.segment_sum({n}, jnp.arange({size}) // 2, {size}, indices_are_sorted=True)",
        f"jnp.bincount({j}.ravel() % 8, length=8)", f"jnp.searchsorted(jnp.arange({size}), {j})",
        f"jnp.nonzero({j}.ravel() > 2, size=4, fill_value=-1)[0]", f"jnp.where({j} > 2, {j}, -{j})[..., :1]",
        f"jnp.unique({j}, size=4, fill_value=0)", f"jnp.digitize({j}, jnp.array([1, 3]))",
    ]  # fmt: skip
    if len(v.shape) > 1:
        forms += [
            f"{n}[{j}.ravel() % {size}, jnp.arange({math.prod(i.shape)}) % {v.shape[1]}]",
            f"{n}[:, {j} % {v.shape[1]}]",
            f"{n}.at[jnp.arange({size}), jnp.arange({size}) % {v.shape[1]}].set(1, unique_indices=True)",
            f"{n}.at[:, 0].add({n}[:, -1])", f"lax.dynamic_slice({n}, ({j}.ravel()[0], 1) + (0,) * ({n}.ndim - 2),"
            f" ({max(1, size // 2)}, {max(1, v.shape[1] - 1)}) + {n}.shape[2:])", f"jnp.diagonal({n})",
            f"{n}[{j} % {size}][..., {j} % {v.shape[1]}, :]" if len(v.shape) > 2 else f"jnp.fliplr({n})",
        ]  # fmt: skip
    return forms


@kind("sort", pick((*FLOATS, "int32"), least=1, exact=True))
def sorting(b: Builder, x: Value) -> Forms:
    if not math.prod(x.shape):
        return None
    axis, n = axis_of(b, x), x.name
    return (f"lax.sort(({n}, -{n}, {n} * 2), dimension={axis}, num_keys=2)[2]", f"jnp.median({n}, {axis})",
             f"jnp.quantile({n} * 1.0, 0.3, axis={axis})", f"jnp.sort({n}, {axis}, descending=True)",
             f"jnp.lexsort(({n}, {n} % 2), {axis})", f"jnp.argpartition({n}, 0, {axis}) * 0",
             f"jnp.argsort(jnp.argsort({n}, {axis}), {axis})", f"lax.top_k(jnp.moveaxis({n}, {axis}, -1), 1)[1]",
             f"jnp.percentile({n} * 1.0, 50)", f"lax.approx_max_k({n} * 1.0, 1, recall_target=1.0)[0]")  # fmt: skip


@kind("numeric", pick(FLOATS, least=1))
def numeric(b: Builder, v: Value) -> Forms:
    if not math.prod(v.shape):
        return None
    n = v.name
    forms = [
        f"jnp.interp({n}, jnp.linspace(-1, 1, 5), jnp.arange(5.0))", f"jnp.outer({n}, jnp.arange(4.0))[:24] / 4",
        f"jnp.linalg.norm({n})", f"jnp.tril({n}.reshape(-1, 1) * jnp.arange(4.0)) / 4", f"jnp.logaddexp({n}, 0.5)",
        f"jax.nn.standardize({n}, axis=-1, epsilon=0.1)", f"jnp.convolve({n}.ravel()[:40], jnp.array([1.0, 2, 1]) / 4)",
        f"jnp.clip({n}, jnp.mean({n}), jnp.mean({n}) + 1)", f"jax.nn.log_softmax({n})", f"jnp.std({n} + 0, 0)",
        f"jnp.nan_to_num(jnp.log({n}))", f"jnp.isfinite(1 / lax.stop_gradient({n})).astype('float32')",
        f"jnp.meshgrid({n}.ravel()[:6], jnp.arange(3.0))[0]", f"jnp.rot90({n}.reshape(-1, 1))",
        f"jax.image.resize({n}, {tuple(max(1, s // 2) for s in v.shape)}, 'linear')", f"jnp.prod(1 + {n} / 100)",
        f"jnp.stack(jnp.unstack({n})[::-1])", f"jnp.average({n}, 0, weights=jnp.arange({v.shape[0]}) + 1.0)",
        f"jnp.array_split({n}, 3)[0]", f"jnp.roll({n}, (1, 2), (0, -1))", f"jnp.nanmean({n}, 0)",
        f"jnp.power(jnp.abs({n}) + 0.5, 1.5)", f"jnp.hypot({n}, 0.5)", f"{n}.ravel().reshape({n}.shape, order='F')",
        f"jnp.select([{n} * 0 > 1, {n} * 0 < 1], [{n}, -{n}])", f"jnp.apply_along_axis(jnp.cumsum, 0, {n}) / 8",
    ]  # fmt: skip
    return forms


@kind("bits", pick(("bool", "uint8", "int8", "uint32", "int32", "float32", "bfloat16"), exact=True))
def bits(b: Builder, v: Value) -> Forms:
    n = v.name
    forms = [f"{n} == {n}", f"jnp.isnan({n} * 1.0)", f"jnp.sign({n})", f"jnp.floor({n} * 3).astype('int32')"]
    if v.dtype == "bool":
        forms = [f"~{n}", f"{n} & True", f"jnp.logical_xor({n}, jnp.any({n}))", f"jnp.sum({n})", f"{n} * 2"]
    elif v.dtype in ("uint8", "int8", "uint32", "int32"):
        forms += [f"{n} | 1", f"jnp.bitwise_or.reduce({n})", f"jnp.packbits({n} > 1)", f"jnp.left_shift({n}, 2)",
                  f"lax.bitcast_convert_type({n}, 'int8')", f"jnp.max({n}).astype('int32') - {n}",
                  f"jnp.prod({n} % 3)", f"jnp.dot({n}.astype('int8').ravel(), {n}.astype('int8').ravel(),"
                  f" preferred_element_type='int32')"]  # fmt: skip
    else:
        forms += [f"lax.bitcast_convert_type({n}, 'int{16 if v.dtype == 'bfloat16' else 32}') >> 3",
                  f"jnp.round({n}, 1)", f"jnp.signbit({n})", f"lax.nextafter({n}, {n} + 1)"]  # fmt: skip
    return forms


@kind("convolution")
def more_convolution(b: Builder) -> Forms:
    v = b.pick(FLOATS, least=4, most=4) or b.pick(FLOATS, least=3, most=3)
    if v is None or 0 in v.shape:
        return None
    if len(v.shape) == 3:
        w = b.leaf("state", (3, v.shape[-1], b.rng.choice((2, 8))))
        forms = (f"lax.conv_transpose({v.name}, {w.name}, (2,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC')) / 3",
                 f"lax.conv_general_dilated(jnp.swapaxes({v.name}, 1, 2), jnp.transpose({w.name}, (2, 1, 0)), (1,),"
                 " 'SAME') / 3")  # fmt: skip
    else:
        w = b.leaf("state", (2, 3, v.shape[-1], b.rng.choice((2, 8))))
        forms = (f"lax.conv_general_dilated({v.name}, {w.name}, ({b.rng.choice((1, 2))}, 1), 'SAME',"
                 " dimension_numbers=('NHWC', 'HWIO', 'NHWC')) / 4",)  # fmt: skip
    return forms, [v, w]


@kind("linear algebra", pick(FLOATS, least=2))
def solves(b: Builder, v: Value) -> Forms:
    if v.shape[-1] > 8 or not math.prod(v.shape):
        return None
    square = f"(jnp.einsum('...ia,...ja->...ij', {v.name}, {v.name}) + 3 * jnp.eye({v.shape[-2]}))"
    return (f"jnp.linalg.solve({square}, {v.name})", f"jnp.linalg.inv({square})", f"jnp.linalg.slogdet({square})[1]",
             f"jnp.linalg.eigvalsh({square})", f"jnp.linalg.svd({v.name} + jnp.eye({v.shape[-2]}, {v.shape[-1]}),"
             " compute_uv=False)", f"jnp.trace({square})")  # fmt: skip
