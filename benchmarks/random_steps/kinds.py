"""The kinds of operations of random programs: each adds lines to a `Builder`, or nothing where no value fits.

`general` makes a step of many primitives in any order on arrays of any shape.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

from benchmarks.random_steps import features, wider
from benchmarks.random_steps.program import Builder, Forms, Program, Value, axis_of, is_float, pick, writers

FLOATS = ("float32",)
REAL = ("float32", "bfloat16")
INTEGERS = ("int32", "uint8", "int8")
KINDS: dict[str, Callable[[Builder], Value | None]] = {}

kind = writers(KINDS)


def general(seed: int, is_wider: bool = False, further: bool = False) -> Program:
    """A step of many primitives; with `is_wider`, of those of `wider`, too; with `further`, of `features`."""
    b = Builder(seed)
    rng = b.rng
    gradient = rng.random() < 0.45
    dims = [b.dim() for _ in range(3)] + [rng.choice((1, 8, 8, 0 if rng.random() < 0.15 else 2))]
    for where in ("state", "batch"):
        for _ in range(rng.randint(1, 3)):
            b.leaf(where, tuple(rng.choice(dims) for _ in range(rng.choice((1, 2, 2, 3)))))
        if rng.random() < 0.3:
            b.leaf(where, tuple(rng.choice(dims) for _ in range(2)), rng.choice(("bfloat16", "complex64", "uint8")))
    b.leaf("batch", (rng.choice(dims),), "int32")
    b.leaf("batch", tuple(rng.choice(dims) for _ in range(2)), "int32")
    b.leaf("state", (), rng.choice(("int32", "float32")))
    generator = rng.choice(("threefry2x32", "rbg", "unsafe_rbg"))
    if rng.random() < 0.5:
        b.leaf("state", (), "key")
    kinds = KINDS | wider.KINDS if is_wider else KINDS
    names = list(kinds)
    if gradient:
        names.remove("while_loop")
    wanted = rng.randint(4, 14)
    for number in range(4 * wanted):
        if further and number % 3 == 0:
            rng.choice(list(features.KINDS.values()))(b)
        kinds[rng.choice(names)](b)
        if len(b.lines) >= wanted:
            break
    program = dataclasses.replace(b.finished(gradient, generator), further=further)
    return varied(program, b) if is_wider else program


def varied(program: Program, b: Builder) -> Program:
    """The program with another optimizer, leaves that are returned as they came or swapped, one array for several."""
    rng, floats = b.rng, [v for v in program.state if is_float(v.dtype)]
    optimizers = ["descended", "momentum", "clipped", "skipped", "branched"] if floats else ["descended"]
    outputs, updates = program.outputs, dict(program.updates)
    if rng.random() < 0.3:
        outputs = (
            *outputs,
            rng.choice([v.name for v in (*program.state, *program.batch) if v.dtype != "key"] or outputs),
        )
    fixed = [v for v in program.state if not (program.gradient and is_float(v.dtype)) and v.name not in updates]
    for one, two in itertools.combinations(fixed, 2):
        if (one.shape, one.dtype) == (two.shape, two.dtype) and rng.random() < 0.5:
            updates |= {one.name: two.name, two.name: one.name}
            break
    return dataclasses.replace(
        program, outputs=tuple(dict.fromkeys(outputs)), updates=tuple(updates.items()),
        optimizer=rng.choice(optimizers), feeding=rng.choice(("", "", "", "aliased", "on_host")),
    )  # fmt: skip


@kind("elementwise", pick(REAL))
def unary(b: Builder, v: Value) -> Forms:
    return (
        "jnp.tanh({0})", "jnp.sin({0})", "jnp.exp(-jnp.abs({0}))", "jnp.log1p(jnp.abs({0}))", "jax.nn.sigmoid({0})",
        "jnp.sqrt(jnp.abs({0}) + 0.5)", "{0} * {0}", "lax.erf({0})", "-{0}", "jax.nn.gelu({0})", "jax.nn.relu({0})",
        "lax.integer_pow({0}, 3) * 0.1", "lax.rsqrt(jnp.abs({0}) + 1)", "jnp.clip({0}, -0.3, 0.4)", "lax.cbrt({0} + 3)",
        "lax.stop_gradient({0})", "lax.reduce_precision({0}, 8, 7)", "jax.nn.softplus({0})", "jnp.arctan({0})",
        "jax.jit(lambda a: jnp.cos(a) * 2)({0})", "jnp.expm1({0} * 0.1)", "lax.optimization_barrier({0})",
    )  # fmt: skip


@kind("integer", pick(INTEGERS))
def integer(b: Builder, v: Value) -> Forms:
    return ("{0} % 3", "{0} // 2", "~{0}", "-{0}", "jnp.sign({0})", "{0} << 1", "{0} >> 1", "{0} & 5", "{0} ^ 3",
             "lax.population_count({0})", "lax.clz({0})", "jnp.clip({0}, 1, 4)", "{0} * {0} + 1",
             "{0} == 2")  # fmt: skip


@kind("elementwise", pick((*REAL, "int32")))
def binary(b: Builder, v: Value) -> Forms:
    w = b.pick((v.dtype,), shape=v.shape if b.rng.random() < 0.6 else None)
    forms = ["{0} + {1}", "{0} * {1}", "{0} - {1}", "jnp.maximum({0}, {1})", "jnp.minimum({0}, {1})"]
    if v.dtype != "int32":
        forms += ["{0} / (1 + jnp.abs({1}))", "jnp.arctan2({0}, 2 + {1} * {1})", "jnp.logaddexp({0}, {1})"]
    return w and (forms, [v, w])


@kind("elementwise", pick(FLOATS, least=2))
def broadcast_binary(b: Builder, v: Value) -> Forms:
    shape = tuple(1 if b.rng.random() < 0.5 else s for s in v.shape)[b.rng.choice((0, 0, 1)) :]
    return "{0} * {1}", [v, b.leaf("state", shape)]


@kind("elementwise", pick((*FLOATS, "int32"), exact=True), pick(FLOATS, like=0), pick(FLOATS, like=0))
def choose(b: Builder, c: Value, v: Value, w: Value) -> Forms:
    return "jnp.where({0} > 0, {1}, 0.5 * {2})"


@kind("convert")
def convert(b: Builder) -> Forms:
    if b.rng.random() < 0.5:
        v = b.pick((*REAL, "float32", "bool", "int32"))
        dtype = b.rng.choice(("float32", "bfloat16", "float32", "complex64", "float16"))
        return v and (f"{{0}}.astype('{dtype}')", [v])
    v = b.pick((*REAL, "int32", "bool"), exact=True)
    dtype = b.rng.choice(("int32", "uint8", "int8", "bool", "uint32"))
    return v and (f"({{0}} * 4).astype('int32').astype('{dtype}')", [v])


@kind("reduce", pick((*REAL, "int32"), least=1))
def reduce(b: Builder, v: Value) -> Forms:
    axes = tuple(sorted(b.rng.sample(range(len(v.shape)), b.rng.randint(1, len(v.shape)))))
    keep = b.rng.random() < 0.3
    forms = ["jnp.mean", "jnp.max", "jnp.min", "jnp.sum"]
    if is_float(v.dtype):
        forms += ["jax.nn.logsumexp", "jnp.var", "jnp.mean", "jax.nn.softmax", "jnp.prod"]
    form = b.rng.choice(forms)
    if form == "jax.nn.softmax":
        return f"jax.nn.softmax({v.name}, {axes})"
    scale = f" / {max(1, math.prod(v.shape[a] for a in axes))}" if form == "jnp.sum" and is_float(v.dtype) else ""
    return f"{form}({v.name}, axis={axes}, keepdims={keep}){scale}"


@kind("reduce", pick(("int32", "float32", "bool", "uint8"), least=1, exact=True))
def reduce_exact(b: Builder, v: Value) -> Forms:
    forms = ("jnp.argmax({0}, AXIS)", "jnp.argmin({0}, AXIS)", "jnp.any({0} > 0, AXIS)", "jnp.all({0} > 0, AXIS)",
             "jnp.sum({0} > 0, AXIS)", "jnp.bitwise_xor.reduce(({0} * 3).astype('int32'), AXIS)",
             "jnp.bitwise_and.reduce(({0} * 3).astype('int32'), AXIS)")  # fmt: skip
    axis = str(axis_of(b, v))
    return [form.replace("AXIS", axis) for form in forms]


@kind("product", pick((*REAL, "float32", "complex64"), least=1, most=3))
def product(b: Builder, v: Value) -> Forms:
    rng = b.rng
    letters = "abcd"[: len(v.shape)]
    summed = [a for a in letters if rng.random() < 0.5]
    shared = [a for a in letters if a not in summed and rng.random() < 0.3]
    new = "xy"[: rng.randint(0, 2)]
    other = [*summed, *shared, *new]
    rng.shuffle(other)
    sizes = dict(zip(letters, v.shape, strict=True)) | {a: b.dim() for a in new}
    shape = tuple(sizes[a] for a in other)
    w = b.pick((v.dtype,), shape=shape) or b.leaf("state", shape, v.dtype)
    result = [a for a in letters if a not in summed] + list(new)
    rng.shuffle(result)
    scale = max(1, math.isqrt(math.prod(sizes[a] for a in summed)))
    spec = f"{letters},{''.join(other)}->{''.join(result)}"
    return f"jnp.einsum('{spec}', {v.name}, {w.name}) / {scale}", [v, w]


@kind("product", pick(REAL, least=2))
def matmul(b: Builder, v: Value) -> Forms:
    w = b.leaf("state", (v.shape[-1], b.dim()), v.dtype)
    forms = ("jnp.tanh({0} @ {1})", "{0} @ {1}", "jax.vmap(lambda a: a @ {1})({0})",
             "jax.checkpoint(lambda a, c: jnp.sin(jnp.tanh(a @ c)))({0}, {1})",
             "jnp.matmul({0}, {1}, preferred_element_type='float32')")  # fmt: skip
    return forms, [v, w]


@kind("product", pick(("int32", "uint8"), least=2), pick(("int32", "uint8"), least=1))
def integer_product(b: Builder, v: Value, w: Value) -> Forms:
    return "jnp.tensordot({0}, {1}, axes=([-1], [0])) % 7"


@kind("reshape", pick((), least=1), exact=True)
def shape_change(b: Builder, v: Value) -> Forms:
    rng, n, axis = b.rng, v.name, axis_of(b, v)
    order = rng.sample(range(len(v.shape)), len(v.shape))
    forms = [f"jnp.transpose({n}, {tuple(order)})", f"jnp.expand_dims({n}, {axis})", f"{n}.reshape(-1)",
             f"jnp.broadcast_to({n}, {(rng.choice((2, 3, 8)), *v.shape)})", f"jnp.moveaxis({n}, {axis}, 0)",
             f"jnp.squeeze({n})"]  # fmt: skip
    size = v.shape[axis]
    for k in (2, 4, 3):
        if size and size % k == 0:
            parts = rng.choice(((k, size // k), (size // k, k)))
            forms.append(f"{n}.reshape({(*v.shape[:axis], *parts, *v.shape[axis + 1 :])})")
    if axis + 1 < len(v.shape):
        forms.append(f"{n}.reshape({(*v.shape[:axis], size * v.shape[axis + 1], *v.shape[axis + 2 :])})")
    return forms


@kind("movement", pick((), least=1), exact=True)
def movement(b: Builder, v: Value) -> Forms:
    rng, n, axis = b.rng, v.name, axis_of(b, v)
    size = v.shape[axis]
    low, high, inside = rng.choice((0, 1, 2, -1)), rng.choice((0, 1, 3, -1)), rng.choice((0, 0, 1))
    pads = [(0, 0, 0)] * axis + [(low, high, inside)] + [(0, 0, 0)] * (len(v.shape) - axis - 1)
    start, stop, stride = (*sorted((rng.randint(0, size), rng.randint(0, size))), rng.choice((1, 1, 2, 3)))
    return [f"jnp.flip({n}, {axis})", f"jnp.roll({n}, {rng.choice((1, 2, -1))}, {axis})",
             f"lax.pad({n}, jnp.zeros((), {n}.dtype), {tuple(pads)})", f"jnp.repeat({n}, 2, {axis})",
             f"lax.slice_in_dim({n}, {start}, {stop}, {stride}, {axis})", f"jnp.tile({n}, 2)",
             f"jnp.split({n}, 2, {axis})[{rng.choice((0, 1))}]", f"jnp.stack([{n}, {n} * 1], {axis})",
             f"lax.rev({n}, ({axis},))", f"jnp.pad({n}, 1, mode='edge')"]  # fmt: skip


@kind("movement", pick((*REAL, "int32"), least=1), pick(like=0), exact=True)
def concatenate(b: Builder, v: Value, w: Value) -> Forms:
    axis = axis_of(b, v)
    part = f"lax.slice_in_dim({w.name}, 0, {max(0, v.shape[axis] - b.rng.choice((0, 0, 1)))}, axis={axis})"
    return f"jnp.concatenate([{v.name}, {part}], {axis})"


@kind("gather", pick((*FLOATS, "int32"), least=1), pick(("int32",), exact=True), exact=True)
def gather(b: Builder, v: Value, i: Value) -> Forms:
    axis = axis_of(b, v)
    mode = b.rng.choice(("clip", "fill", "wrap"))
    forms = [f"jnp.take({v.name}, {i.name}, axis={axis}, mode='{mode}')", f"{v.name}[{i.name}]"]
    if len(v.shape) > 1:
        forms += [f"{v.name}[{i.name}, {i.name} % {v.shape[1] or 1}]", f"{v.name}[:, {i.name} % {v.shape[1] or 1}]"]
    if i.shape == v.shape:
        forms += [f"jnp.take_along_axis({v.name}, {i.name} % {v.shape[axis] or 1}, {axis})"] * 4
    return forms


@kind("scatter", pick((*FLOATS, "int32"), least=1), pick(("int32",), least=1, most=1, exact=True))
def scatter(b: Builder, v: Value, i: Value) -> Forms:
    if not v.shape[0]:
        return None
    update = (*i.shape, *v.shape[1:])
    u = b.pick((v.dtype,), shape=update) or b.leaf("batch", update, v.dtype)
    form = b.rng.choice(("add", "max", "min", "add", "multiply"))
    if form == "multiply" and v.dtype == "int32":
        form = "add"
    forms = [f"{{0}}.at[{{1}}].{form}({{2}})", f"jax.ops.segment_sum({{2}}, {{1}} % {v.shape[0]}, {v.shape[0]})",
             f"{{0}}.at[jnp.arange({i.shape[0]}) % {v.shape[0]}].add({{2}} * 2)"]  # fmt: skip
    if i.shape[0] <= v.shape[0]:
        forms.append(f"{{0}}.at[jnp.arange({i.shape[0]})[::-1]].set({{2}})")
    return forms, [v, i, u]


@kind("dynamic", pick((*FLOATS, "int32"), least=1), pick(("int32",), most=0, exact=True), exact=True)
def dynamic(b: Builder, v: Value, i: Value) -> Forms:
    axis = axis_of(b, v)
    size = b.rng.randint(0, v.shape[axis])
    return [f"lax.dynamic_slice_in_dim({v.name}, {i.name}, {size}, {axis})",
             f"lax.dynamic_index_in_dim({v.name}, {i.name}, {axis}, keepdims=False)",
             f"lax.dynamic_update_slice_in_dim({v.name}, lax.slice_in_dim({v.name}, 0, {size}, axis={axis}) * 2,"
             f" {i.name}, {axis})"]  # fmt: skip


@kind("sort")
def sort(b: Builder) -> Forms:
    v = b.pick(FLOATS, least=1)
    x = b.pick((*FLOATS, "int32"), least=1, exact=True)
    rng = b.rng
    if rng.random() < 0.4 or x is None:
        if v is None or not v.shape[-1]:
            return None
        k = rng.randint(1, v.shape[-1])
        return (f"jnp.sort({{0}}, {axis_of(b, v)})", f"lax.top_k({{0}}, {k})[0]"), [v]
    axis = axis_of(b, x)
    y = b.pick(FLOATS, shape=x.shape) or x
    forms = [f"jnp.argsort({{0}}, {axis}, descending={rng.choice((True, False))})",
             f"lax.sort(({{0}}, {{1}}), dimension={axis}, num_keys=1)[1]"]  # fmt: skip
    if x.shape[-1]:
        forms += [f"lax.top_k({{0}}, {rng.randint(1, x.shape[-1])})[{rng.choice((0, 1))}]"]
    return forms, [x, y]


@kind("cumulative", pick((*FLOATS, "int32"), least=1))
def cumulative(b: Builder, v: Value) -> Forms:
    axis, reverse = axis_of(b, v), b.rng.choice((True, False))
    size = max(1, v.shape[axis])
    forms = [f"lax.cummax({v.name}, {axis}, {reverse})", f"lax.cummin({v.name}, {axis}, {reverse})"]
    if v.dtype == "int32":
        forms += [f"lax.cumsum({v.name}, {axis}, {reverse})"]
    else:
        forms += [f"lax.cumsum({v.name}, {axis}, {reverse}) / {size}", f"lax.cumlogsumexp({v.name}, {axis}, {reverse})",
                  f"lax.cumprod(1 + 0.1 * {v.name}, {axis}, {reverse})",
                  f"lax.associative_scan(lambda a, c: 0.5 * a * c + c, {v.name}, axis={axis})"]  # fmt: skip
    return forms


@kind("convolution", pick(FLOATS, least=3, most=3))
def convolution(b: Builder, v: Value) -> Forms:
    if 0 in v.shape:
        return None
    rng = b.rng
    groups = rng.choice([g for g in (1, 1, 2, v.shape[-1]) if v.shape[-1] % g == 0])
    out = groups * rng.choice((1, 2, 4))
    w = b.leaf("state", (rng.choice((1, 2, 3)), v.shape[-1] // groups, out))
    padding = rng.choice(("'SAME'", "'VALID'", "[(1, 2)]"))
    strides = f"({rng.choice((1, 1, 2))},), {padding}, lhs_dilation=({rng.choice((1, 1, 2))},)"
    rest = f"rhs_dilation=({rng.choice((1, 1, 2))},), dimension_numbers=('NWC', 'WIO', 'NWC')"
    return f"lax.conv_general_dilated({{0}}, {{1}}, {strides}, {rest}, feature_group_count={groups}) / 2", [v, w]


@kind("window", pick(FLOATS, least=2, most=3))
def window(b: Builder, v: Value) -> Forms:
    rng, axis = b.rng, axis_of(b, v)
    sizes = tuple(rng.choice((2, 3)) if a == axis else 1 for a in range(len(v.shape)))
    strides = tuple(rng.choice((1, 2)) if a == axis else 1 for a in range(len(v.shape)))
    how = rng.choice(("-jnp.inf, lax.max", "0.0, lax.add"))
    padding = rng.choice(("SAME", "VALID"))
    return f"lax.reduce_window({v.name}, {how}, {sizes}, {strides}, '{padding}')"


@kind("scan", pick(FLOATS, least=1))
def scan(b: Builder, v: Value) -> Forms:
    which = b.rng.choice((0, 0, 1))
    return f"scanned({v.name}, {axis_of(b, v)}, {b.rng.choice((True, False))})[{which}]"


@kind("loop", pick(FLOATS, least=1))
def counted_loop(b: Builder, v: Value) -> Forms:
    w = b.leaf("state", (v.shape[-1], v.shape[-1]))
    return f"looped({{0}}, {{1}}, {b.rng.choice((0, 1, 2, 3))})", [v, w]


@kind("while", pick(FLOATS), pick(("int32",), most=0, exact=True))
def while_loop(b: Builder, v: Value, i: Value) -> Forms:
    if not math.prod(v.shape):
        return None
    return f"while_below({v.name}, {i.name} % 4)"


@kind("condition", pick(FLOATS, least=1), pick(("int32",), exact=True))
def condition(b: Builder, v: Value, i: Value) -> Forms:
    if not math.prod(i.shape):
        return None
    return (
        "lax.cond(jnp.sum({1}) % 2 == 0, lambda a: jnp.tanh(a), lambda a: a - jnp.mean(a, 0), {0})",
        "lax.switch(jnp.max({1}) % 3, [lambda a: a, lambda a: a * jnp.mean(a), lambda a: jnp.flip(a, 0)], {0})",
        "lax.cond(jnp.max({1}) > 3, lambda a: jnp.sort(a, -1), lambda a: jnp.cumsum(a, 0) / 8, {0})",
    )


@kind("own rule", pick(FLOATS), pick(FLOATS, like=0))
def own_rule(b: Builder, v: Value, w: Value) -> Forms:
    return (
        "own_gradient({0})",
        "own_tangent({0}, {1})",
        "jax.checkpoint(lambda a, c: jnp.tanh(a * jnp.sin(c)))({0}, {1})",
    )


@kind("random", pick(("key",)), pick(FLOATS, least=1))
def random_numbers(b: Builder, key: Value, v: Value) -> Forms:
    k = f"jax.random.fold_in({key.name}, {b.rng.randint(0, 9)})"
    rows = v.shape[0]
    return (
        f"{v.name} * jax.random.bernoulli({k}, 0.7, {v.shape})", f"{v.name} + jax.random.normal({k}, {v.shape})",
        f"{v.name} + jax.random.uniform({k}, {v.shape}, minval=-1)", f"jax.random.permutation({k}, {v.name})",
        f"jax.vmap(lambda q, a: a + jax.random.normal(q, a.shape))(jax.random.split({k}, {rows}), {v.name})",
        f"{v.name} + jax.random.truncated_normal({k}, -1, 1, {v.shape})", f"jax.random.randint({k}, {v.shape}, 0, 5)",
        f"jax.random.normal({k}, (4, 8))", f"jax.random.split({key.name})[1]", f"jax.random.fold_in({key.name}, 3)",
        f"{v.name} + jax.random.gumbel({k}, {v.shape}) * 0.1",
    )  # fmt: skip


@kind("complex")
def complex_numbers(b: Builder) -> Forms:
    v = b.pick(("complex64",))
    if v is not None and b.rng.random() < 0.7:
        forms = ("jnp.real({0})", "jnp.imag({0})", "jnp.conj({0}) * {0}", "jnp.sum({0}, 0) / 8", "{0} * (0.5 + 1j)",
                 "jnp.fft.ifft({0})", "jnp.abs({0} + 2)", "jnp.exp(1j * jnp.real({0})) * {0}")  # fmt: skip
        return forms, [v]
    x = b.pick(FLOATS)
    y = x and b.pick(FLOATS, shape=x.shape)
    if x is None or y is None:
        return None
    return ("lax.complex({0}, {1})", "jnp.fft.fft({0}) / 4", "jnp.fft.rfft({0}, norm='ortho')"), [x, y]


@kind("linear algebra", pick(FLOATS, least=2))
def linear_algebra(b: Builder, v: Value) -> Forms:
    if v.shape[-1] > 8:
        return None
    square = f"(jnp.einsum('...ia,...ja->...ij', {v.name}, {v.name}) + 3 * jnp.eye({v.shape[-2]}))"
    return (f"jnp.linalg.cholesky({square})", f"jnp.triu({v.name})", f"jnp.linalg.norm({v.name} + 1, axis=-1)",
             f"jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky({square}), {v.name}, lower=True)")  # fmt: skip


@kind("numbers", pick((*FLOATS, "int32"), least=1), pick(("int32",), exact=True))
def numbers(b: Builder, v: Value, i: Value) -> Forms:
    return (f"{v.name} + jnp.arange({v.shape[-1]})", f"jax.nn.one_hot({i.name}, {b.dim()})",
             f"{v.name} * lax.broadcasted_iota({v.name}.dtype, {v.shape}, 0) / 8")  # fmt: skip
