"""The kinds of operations of random programs: each adds lines to a `Builder`, or nothing where no value fits.

`general` makes a step of many primitives in any order on arrays of any shape; `layered` makes a chain of layers over
examples, as models are, which can be cut into micro-batches and stages.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

from benchmarks import random_further, random_wider
from benchmarks.random_programs import Builder, Program, Value, entered, is_float

FLOATS = ("float32",)
REAL = ("float32", "bfloat16")
INTEGERS = ("int32", "uint8", "int8")
KINDS: dict[str, Callable[[Builder], object]] = {}
LAYERS: dict[str, Callable[[Builder, Value], Value | None]] = {}

_kind, _layer = entered(KINDS), entered(LAYERS)


def general(seed: int, wider: bool = False, further: bool = False) -> Program:
    """A step of many primitives; with `wider`, of those of `random_wider`, too; with `further`, of `random_further`."""
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
    kinds = KINDS | random_wider.KINDS if wider else KINDS
    names = list(kinds)
    if gradient:
        names.remove("while_loop")
    wanted = rng.randint(4, 14)
    for number in range(4 * wanted):
        if further and number % 3 == 0:
            rng.choice(list(random_further.KINDS.values()))(b)
        kinds[rng.choice(names)](b)
        if len(b.lines) >= wanted:
            break
    program = dataclasses.replace(b.finished(gradient, generator), further=further)
    return varied(program, b) if wider else program


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


def layered(seed: int, wider: bool = False, further: bool = False) -> Program:
    """A chain of layers over examples; with `wider`, of those of `random_wider`, too; with `further`, as `general`."""
    b = Builder(seed)
    rng = b.rng
    examples, width = rng.choice((8, 16, 16, 32)), rng.choice((8, 16, 8, 12))
    times = rng.choice((0, 0, 4, 8))
    h: Value = b.leaf("batch", (examples, times, width) if times else (examples, width))
    target = b.leaf("batch", h.shape)
    b.leaf("batch", h.shape[:-1], "int32")
    b.leaf("state", (), "key")
    b.leaf("state", (), "int32")
    kinds = LAYERS | random_wider.LAYERS if wider else LAYERS
    names = list(kinds)
    for _ in range(rng.randint(3, 7)):
        h = kinds[rng.choice(names)](b, h) or h
    outputs = []
    for _ in range(rng.randint(1, 2) if further else 0):
        made = rng.choice(list(random_further.KINDS.values()))(b)
        outputs += [made.name] if isinstance(made, Value) and rng.random() < 0.7 else []
    error = b.add("loss", f"{h.name} - {target.name}", [h, target])
    assert error is not None
    outputs.append(error.name)
    if rng.random() < 0.4:
        ids = b.batch[2]
        for source in (f"jnp.sum({ids.name} > 2)", f"jnp.max({ids.name})", f"{ids.name} * 2"):
            made = b.add("metric", source, [ids])
            if made is not None and rng.random() < 0.6:
                outputs.append(made.name)
    if rng.random() < 0.3:
        made = b.add("metric", f"jnp.mean({h.name}, 0)", [h])
        outputs += [made.name] if made is not None else []
    key = b.state[0]
    b.add("key", f"jax.random.split({key.name})[0]", [key])
    program = b.finished(rng.random() < 0.9, rng.choice(("threefry2x32", "rbg")), outputs)
    program = dataclasses.replace(program, further=further)
    return varied(program, b) if wider else program


def _axis(b: Builder, v: Value) -> int:
    return b.rng.randrange(len(v.shape))


@_kind
def unary(b: Builder) -> object:
    v = b.pick(REAL)
    forms = (
        "jnp.tanh({0})", "jnp.sin({0})", "jnp.exp(-jnp.abs({0}))", "jnp.log1p(jnp.abs({0}))", "jax.nn.sigmoid({0})",
        "jnp.sqrt(jnp.abs({0}) + 0.5)", "{0} * {0}", "lax.erf({0})", "-{0}", "jax.nn.gelu({0})", "jax.nn.relu({0})",
        "lax.integer_pow({0}, 3) * 0.1", "lax.rsqrt(jnp.abs({0}) + 1)", "jnp.clip({0}, -0.3, 0.4)", "lax.cbrt({0} + 3)",
        "lax.stop_gradient({0})", "lax.reduce_precision({0}, 8, 7)", "jax.nn.softplus({0})", "jnp.arctan({0})",
        "jax.jit(lambda a: jnp.cos(a) * 2)({0})", "jnp.expm1({0} * 0.1)", "lax.optimization_barrier({0})",
    )  # fmt: skip
    return v and b.add("elementwise", b.rng.choice(forms).format(v.name), [v])


@_kind
def integer(b: Builder) -> object:
    v = b.pick(INTEGERS)
    forms = ("{0} % 3", "{0} // 2", "~{0}", "-{0}", "jnp.sign({0})", "{0} << 1", "{0} >> 1", "{0} & 5", "{0} ^ 3",
             "lax.population_count({0})", "lax.clz({0})", "jnp.clip({0}, 1, 4)", "{0} * {0} + 1",
             "{0} == 2")  # fmt: skip
    return v and b.add("integer", b.rng.choice(forms).format(v.name), [v])


@_kind
def binary(b: Builder) -> object:
    v = b.pick((*REAL, "int32"))
    if v is None:
        return None
    w = b.pick((v.dtype,), shape=v.shape if b.rng.random() < 0.6 else None)
    forms = ["{0} + {1}", "{0} * {1}", "{0} - {1}", "jnp.maximum({0}, {1})", "jnp.minimum({0}, {1})"]
    if v.dtype != "int32":
        forms += ["{0} / (1 + jnp.abs({1}))", "jnp.arctan2({0}, 2 + {1} * {1})", "jnp.logaddexp({0}, {1})"]
    return w and b.add("elementwise", b.rng.choice(forms).format(v.name, w.name), [v, w])


@_kind
def broadcast_binary(b: Builder) -> object:
    v = b.pick(FLOATS, least=2)
    if v is None:
        return None
    shape = tuple(1 if b.rng.random() < 0.5 else s for s in v.shape)[b.rng.choice((0, 0, 1)) :]
    w = b.leaf("state", shape)
    return b.add("elementwise", f"{v.name} * {w.name}", [v, w])


@_kind
def choose(b: Builder) -> object:
    c = b.pick((*FLOATS, "int32"), exact=True)
    if c is None:
        return None
    v, w = b.pick(FLOATS, shape=c.shape), b.pick(FLOATS, shape=c.shape)
    if v is None or w is None:
        return None
    return b.add("elementwise", f"jnp.where({c.name} > 0, {v.name}, 0.5 * {w.name})", [c, v, w])


@_kind
def convert(b: Builder) -> object:
    if b.rng.random() < 0.5:
        v = b.pick((*REAL, "float32", "bool", "int32"))
        dtype = b.rng.choice(("float32", "bfloat16", "float32", "complex64", "float16"))
        return v and b.add("convert", f"{v.name}.astype('{dtype}')", [v])
    v = b.pick((*REAL, "int32", "bool"), exact=True)
    dtype = b.rng.choice(("int32", "uint8", "int8", "bool", "uint32"))
    return v and b.add("convert", f"({v.name} * 4).astype('int32').astype('{dtype}')", [v])


@_kind
def reduce(b: Builder) -> object:
    v = b.pick((*REAL, "int32"), least=1)
    if v is None:
        return None
    axes = tuple(sorted(b.rng.sample(range(len(v.shape)), b.rng.randint(1, len(v.shape)))))
    keep = b.rng.random() < 0.3
    forms = ["jnp.mean", "jnp.max", "jnp.min", "jnp.sum"]
    if is_float(v.dtype):
        forms += ["jax.nn.logsumexp", "jnp.var", "jnp.mean", "jax.nn.softmax", "jnp.prod"]
    form = b.rng.choice(forms)
    if form == "jax.nn.softmax":
        return b.add("reduce", f"jax.nn.softmax({v.name}, {axes})", [v])
    scale = f" / {max(1, math.prod(v.shape[a] for a in axes))}" if form == "jnp.sum" and is_float(v.dtype) else ""
    return b.add("reduce", f"{form}({v.name}, axis={axes}, keepdims={keep}){scale}", [v])


@_kind
def reduce_exact(b: Builder) -> object:
    v = b.pick(("int32", "float32", "bool", "uint8"), least=1, exact=True)
    if v is None:
        return None
    axis = _axis(b, v)
    forms = ("jnp.argmax({0}, {1})", "jnp.argmin({0}, {1})", "jnp.any({0} > 0, {1})", "jnp.all({0} > 0, {1})",
             "jnp.sum({0} > 0, {1})", "jnp.bitwise_xor.reduce(({0} * 3).astype('int32'), {1})",
             "jnp.bitwise_and.reduce(({0} * 3).astype('int32'), {1})")  # fmt: skip
    return b.add("reduce", b.rng.choice(forms).format(v.name, axis), [v])


@_kind
def product(b: Builder) -> object:
    v = b.pick((*REAL, "float32", "complex64"), least=1, most=3)
    if v is None:
        return None
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
    return b.add("product", f"jnp.einsum('{spec}', {v.name}, {w.name}) / {scale}", [v, w])


@_kind
def matmul(b: Builder) -> object:
    v = b.pick(REAL, least=2)
    if v is None:
        return None
    w = b.leaf("state", (v.shape[-1], b.dim()), v.dtype)
    forms = ("jnp.tanh({0} @ {1})", "{0} @ {1}", "jax.vmap(lambda a: a @ {1})({0})",
             "jax.checkpoint(lambda a, c: jnp.sin(jnp.tanh(a @ c)))({0}, {1})",
             "jnp.matmul({0}, {1}, preferred_element_type='float32')")  # fmt: skip
    return b.add("product", b.rng.choice(forms).format(v.name, w.name), [v, w])


@_kind
def integer_product(b: Builder) -> object:
    v = b.pick(("int32", "uint8"), least=2)
    w = b.pick(("int32", "uint8"), least=1)
    if v is None or w is None:
        return None
    return b.add("product", f"jnp.tensordot({v.name}, {w.name}, axes=([-1], [0])) % 7", [v, w])


@_kind
def shape_change(b: Builder) -> object:
    v = b.pick((), least=1)
    if v is None:
        return None
    rng, n, axis = b.rng, v.name, _axis(b, v)
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
    return b.add("reshape", rng.choice(forms), [v], exact=True)


@_kind
def movement(b: Builder) -> object:
    v = b.pick((), least=1)
    if v is None:
        return None
    rng, n, axis = b.rng, v.name, _axis(b, v)
    size = v.shape[axis]
    low, high, inside = rng.choice((0, 1, 2, -1)), rng.choice((0, 1, 3, -1)), rng.choice((0, 0, 1))
    pads = [(0, 0, 0)] * axis + [(low, high, inside)] + [(0, 0, 0)] * (len(v.shape) - axis - 1)
    start, stop, stride = (*sorted((rng.randint(0, size), rng.randint(0, size))), rng.choice((1, 1, 2, 3)))
    forms = [f"jnp.flip({n}, {axis})", f"jnp.roll({n}, {rng.choice((1, 2, -1))}, {axis})",
             f"lax.pad({n}, jnp.zeros((), {n}.dtype), {tuple(pads)})", f"jnp.repeat({n}, 2, {axis})",
             f"lax.slice_in_dim({n}, {start}, {stop}, {stride}, {axis})", f"jnp.tile({n}, 2)",
             f"jnp.split({n}, 2, {axis})[{rng.choice((0, 1))}]", f"jnp.stack([{n}, {n} * 1], {axis})",
             f"lax.rev({n}, ({axis},))", f"jnp.pad({n}, 1, mode='edge')"]  # fmt: skip
    return b.add("movement", rng.choice(forms), [v], exact=True)


@_kind
def concatenate(b: Builder) -> object:
    v = b.pick((*REAL, "int32"), least=1)
    w = v and b.pick((v.dtype,), shape=v.shape)
    if v is None or w is None:
        return None
    axis = _axis(b, v)
    part = f"lax.slice_in_dim({w.name}, 0, {max(0, v.shape[axis] - b.rng.choice((0, 0, 1)))}, axis={axis})"
    return b.add("movement", f"jnp.concatenate([{v.name}, {part}], {axis})", [v, w], exact=True)


@_kind
def gather(b: Builder) -> object:
    v, i = b.pick((*FLOATS, "int32"), least=1), b.pick(("int32",), exact=True)
    if v is None or i is None:
        return None
    axis = _axis(b, v)
    mode = b.rng.choice(("clip", "fill", "wrap"))
    forms = [f"jnp.take({v.name}, {i.name}, axis={axis}, mode='{mode}')", f"{v.name}[{i.name}]"]
    if len(v.shape) > 1:
        forms += [f"{v.name}[{i.name}, {i.name} % {v.shape[1] or 1}]", f"{v.name}[:, {i.name} % {v.shape[1] or 1}]"]
    if i.shape == v.shape:
        forms += [f"jnp.take_along_axis({v.name}, {i.name} % {v.shape[axis] or 1}, {axis})"] * 4
    return b.add("gather", b.rng.choice(forms), [v, i], exact=True)


@_kind
def scatter(b: Builder) -> object:
    v, i = b.pick((*FLOATS, "int32"), least=1), b.pick(("int32",), least=1, most=1, exact=True)
    if v is None or i is None or not v.shape[0]:
        return None
    update = (*i.shape, *v.shape[1:])
    u = b.pick((v.dtype,), shape=update) or b.leaf("batch", update, v.dtype)
    form = b.rng.choice(("add", "max", "min", "add", "multiply"))
    if form == "multiply" and v.dtype == "int32":
        form = "add"
    forms = [f"{v.name}.at[{i.name}].{form}({u.name})",
             f"jax.ops.segment_sum({u.name}, {i.name} % {v.shape[0]}, {v.shape[0]})",
             f"{v.name}.at[jnp.arange({i.shape[0]}) % {v.shape[0]}].add({u.name} * 2)"]  # fmt: skip
    if i.shape[0] <= v.shape[0]:
        forms.append(f"{v.name}.at[jnp.arange({i.shape[0]})[::-1]].set({u.name})")
    return b.add("scatter", b.rng.choice(forms), [v, i, u])


@_kind
def dynamic(b: Builder) -> object:
    v, i = b.pick((*FLOATS, "int32"), least=1), b.pick(("int32",), most=0, exact=True)
    if v is None or i is None:
        return None
    axis = _axis(b, v)
    size = b.rng.randint(0, v.shape[axis])
    forms = [f"lax.dynamic_slice_in_dim({v.name}, {i.name}, {size}, {axis})",
             f"lax.dynamic_index_in_dim({v.name}, {i.name}, {axis}, keepdims=False)",
             f"lax.dynamic_update_slice_in_dim({v.name}, lax.slice_in_dim({v.name}, 0, {size}, axis={axis}) * 2,"
             f" {i.name}, {axis})"]  # fmt: skip
    return b.add("dynamic", b.rng.choice(forms), [v, i], exact=True)


@_kind
def sort(b: Builder) -> object:
    v = b.pick(FLOATS, least=1)
    x = b.pick((*FLOATS, "int32"), least=1, exact=True)
    rng = b.rng
    if rng.random() < 0.4 or x is None:
        if v is None or not v.shape[-1]:
            return None
        k = rng.randint(1, v.shape[-1])
        forms = (f"jnp.sort({v.name}, {_axis(b, v)})", f"lax.top_k({v.name}, {k})[0]")
        return b.add("sort", rng.choice(forms), [v])
    axis = _axis(b, x)
    y = b.pick(FLOATS, shape=x.shape) or x
    forms = [f"jnp.argsort({x.name}, {axis}, descending={rng.choice((True, False))})",
             f"lax.sort(({x.name}, {y.name}), dimension={axis}, num_keys=1)[1]"]  # fmt: skip
    if x.shape[-1]:
        forms += [f"lax.top_k({x.name}, {rng.randint(1, x.shape[-1])})[{rng.choice((0, 1))}]"]
    return b.add("sort", rng.choice(forms), [x, y])


@_kind
def cumulative(b: Builder) -> object:
    v = b.pick((*FLOATS, "int32"), least=1)
    if v is None:
        return None
    axis, reverse = _axis(b, v), b.rng.choice((True, False))
    size = max(1, v.shape[axis])
    forms = [f"lax.cummax({v.name}, {axis}, {reverse})", f"lax.cummin({v.name}, {axis}, {reverse})"]
    if v.dtype == "int32":
        forms += [f"lax.cumsum({v.name}, {axis}, {reverse})"]
    else:
        forms += [f"lax.cumsum({v.name}, {axis}, {reverse}) / {size}", f"lax.cumlogsumexp({v.name}, {axis}, {reverse})",
                  f"lax.cumprod(1 + 0.1 * {v.name}, {axis}, {reverse})",
                  f"lax.associative_scan(lambda a, c: 0.5 * a * c + c, {v.name}, axis={axis})"]  # fmt: skip
    return b.add("cumulative", b.rng.choice(forms), [v])


@_kind
def convolution(b: Builder) -> object:
    v = b.pick(FLOATS, least=3, most=3)
    if v is None or 0 in v.shape:
        return None
    rng = b.rng
    groups = rng.choice([g for g in (1, 1, 2, v.shape[-1]) if v.shape[-1] % g == 0])
    out = groups * rng.choice((1, 2, 4))
    w = b.leaf("state", (rng.choice((1, 2, 3)), v.shape[-1] // groups, out))
    padding = rng.choice(("'SAME'", "'VALID'", "[(1, 2)]"))
    strides = f"({rng.choice((1, 1, 2))},), {padding}, lhs_dilation=({rng.choice((1, 1, 2))},)"
    rest = f"rhs_dilation=({rng.choice((1, 1, 2))},), dimension_numbers=('NWC', 'WIO', 'NWC')"
    return b.add(
        "convolution",
        f"lax.conv_general_dilated({v.name}, {w.name}, {strides}, {rest}, feature_group_count={groups}) / 2",
        [v, w],
    )


@_kind
def window(b: Builder) -> object:
    v = b.pick(FLOATS, least=2, most=3)
    if v is None:
        return None
    rng, axis = b.rng, _axis(b, v)
    sizes = tuple(rng.choice((2, 3)) if a == axis else 1 for a in range(len(v.shape)))
    strides = tuple(rng.choice((1, 2)) if a == axis else 1 for a in range(len(v.shape)))
    how = rng.choice(("-jnp.inf, lax.max", "0.0, lax.add"))
    padding = rng.choice(("SAME", "VALID"))
    return b.add("window", f"lax.reduce_window({v.name}, {how}, {sizes}, {strides}, '{padding}')", [v])


@_kind
def scan(b: Builder) -> object:
    v = b.pick(FLOATS, least=1)
    if v is None:
        return None
    which = b.rng.choice((0, 0, 1))
    return b.add("scan", f"scanned({v.name}, {_axis(b, v)}, {b.rng.choice((True, False))})[{which}]", [v])


@_kind
def counted_loop(b: Builder) -> object:
    v = b.pick(FLOATS, least=1)
    if v is None:
        return None
    w = b.leaf("state", (v.shape[-1], v.shape[-1]))
    return b.add("loop", f"looped({v.name}, {w.name}, {b.rng.choice((0, 1, 2, 3))})", [v, w])


@_kind
def while_loop(b: Builder) -> object:
    v, i = b.pick(FLOATS), b.pick(("int32",), most=0, exact=True)
    if v is None or i is None or not math.prod(v.shape):
        return None
    return b.add("while", f"while_below({v.name}, {i.name} % 4)", [v, i])


@_kind
def condition(b: Builder) -> object:
    v, i = b.pick(FLOATS, least=1), b.pick(("int32",), exact=True)
    if v is None or i is None or not math.prod(i.shape):
        return None
    forms = (
        "lax.cond(jnp.sum({1}) % 2 == 0, lambda a: jnp.tanh(a), lambda a: a - jnp.mean(a, 0), {0})",
        "lax.switch(jnp.max({1}) % 3, [lambda a: a, lambda a: a * jnp.mean(a), lambda a: jnp.flip(a, 0)], {0})",
        "lax.cond(jnp.max({1}) > 3, lambda a: jnp.sort(a, -1), lambda a: jnp.cumsum(a, 0) / 8, {0})",
    )
    return b.add("condition", b.rng.choice(forms).format(v.name, i.name), [v, i])


@_kind
def own_rule(b: Builder) -> object:
    v = b.pick(FLOATS)
    w = v and b.pick(FLOATS, shape=v.shape)
    if v is None or w is None:
        return None
    forms = (
        "own_gradient({0})",
        "own_tangent({0}, {1})",
        "jax.checkpoint(lambda a, c: jnp.tanh(a * jnp.sin(c)))({0}, {1})",
    )
    return b.add("own rule", b.rng.choice(forms).format(v.name, w.name), [v, w])


@_kind
def random_numbers(b: Builder) -> object:
    key = b.pick(("key",))
    v = b.pick(FLOATS, least=1)
    if key is None or v is None:
        return None
    k = f"jax.random.fold_in({key.name}, {b.rng.randint(0, 9)})"
    rows = v.shape[0]
    forms = (
        f"{v.name} * jax.random.bernoulli({k}, 0.7, {v.shape})", f"{v.name} + jax.random.normal({k}, {v.shape})",
        f"{v.name} + jax.random.uniform({k}, {v.shape}, minval=-1)", f"jax.random.permutation({k}, {v.name})",
        f"jax.vmap(lambda q, a: a + jax.random.normal(q, a.shape))(jax.random.split({k}, {rows}), {v.name})",
        f"{v.name} + jax.random.truncated_normal({k}, -1, 1, {v.shape})", f"jax.random.randint({k}, {v.shape}, 0, 5)",
        f"jax.random.normal({k}, (4, 8))", f"jax.random.split({key.name})[1]", f"jax.random.fold_in({key.name}, 3)",
        f"{v.name} + jax.random.gumbel({k}, {v.shape}) * 0.1",
    )  # fmt: skip
    return b.add("random", b.rng.choice(forms), [key, v])


@_kind
def complex_numbers(b: Builder) -> object:
    v = b.pick(("complex64",))
    if v is not None and b.rng.random() < 0.7:
        forms = ("jnp.real({0})", "jnp.imag({0})", "jnp.conj({0}) * {0}", "jnp.sum({0}, 0) / 8", "{0} * (0.5 + 1j)",
                 "jnp.fft.ifft({0})", "jnp.abs({0} + 2)", "jnp.exp(1j * jnp.real({0})) * {0}")  # fmt: skip
        return b.add("complex", b.rng.choice(forms).format(v.name), [v])
    x = b.pick(FLOATS)
    y = x and b.pick(FLOATS, shape=x.shape)
    if x is None or y is None:
        return None
    forms = ("lax.complex({0}, {1})", "jnp.fft.fft({0}) / 4", "jnp.fft.rfft({0}, norm='ortho')")
    return b.add("complex", b.rng.choice(forms).format(x.name, y.name), [x, y])


@_kind
def linear_algebra(b: Builder) -> object:
    v = b.pick(FLOATS, least=2)
    if v is None or v.shape[-1] > 8:
        return None
    square = f"(jnp.einsum('...ia,...ja->...ij', {v.name}, {v.name}) + 3 * jnp.eye({v.shape[-2]}))"
    forms = (f"jnp.linalg.cholesky({square})", f"jnp.triu({v.name})", f"jnp.linalg.norm({v.name} + 1, axis=-1)",
             f"jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky({square}), {v.name}, lower=True)")  # fmt: skip
    return b.add("linear algebra", b.rng.choice(forms), [v])


@_kind
def numbers(b: Builder) -> object:
    v = b.pick((*FLOATS, "int32"), least=1)
    i = b.pick(("int32",), exact=True)
    if v is None or i is None:
        return None
    forms = (f"{v.name} + jnp.arange({v.shape[-1]})", f"jax.nn.one_hot({i.name}, {b.dim()})",
             f"{v.name} * lax.broadcasted_iota({v.name}.dtype, {v.shape}, 0) / 8")  # fmt: skip
    return b.add("numbers", b.rng.choice(forms), [v, i])


def _square(b: Builder, h: Value, dtype: str = "float32") -> Value:
    """A matrix of the width of a layer; now and then one that is used before."""
    shape = (h.shape[-1], h.shape[-1])
    known = [v for v in b.state if v.shape == shape and v.dtype == dtype]
    return b.rng.choice(known) if known and b.rng.random() < 0.15 else b.leaf("state", shape, dtype)


@_layer
def dense(b: Builder, h: Value) -> Value | None:
    w, c = _square(b, h), b.leaf("state", h.shape[-1:])
    forms = ("jnp.tanh({0} @ {1} + {2})", "{0} + jax.nn.relu({0} @ {1}) * {2}", "jax.nn.gelu({0} @ {1}) + {2}",
             "jax.checkpoint(lambda a, w: jnp.sin(jnp.tanh(a @ w)))({0}, {1}) + {2}",
             "own_gradient({0} @ {1} + {2})", "own_tangent({0} @ {1}, {0}) + {2}",
             "(({0}.astype('bfloat16') @ {1}.astype('bfloat16')).astype('float32') + {2}) * 0.5",
             "jax.vmap(lambda a: jnp.tanh(a @ {1} + {2}))({0})", "looped({0}, {1}, 2) + {2}")  # fmt: skip
    return b.add("dense", b.rng.choice(forms).format(h.name, w.name, c.name), [h, w, c])


@_layer
def wide(b: Builder, h: Value) -> Value | None:
    n = h.shape[-1]
    up, down = b.leaf("state", (n, 2 * n)), b.leaf("state", (2 * n, n))
    return b.add("dense", f"{h.name} + jnp.tanh({h.name} @ {up.name}) @ {down.name} / 4", [h, up, down])


@_layer
def norm(b: Builder, h: Value) -> Value | None:
    w = b.leaf("state", h.shape[-1:])
    forms = ("(({0}) - jnp.mean({0}, -1, keepdims=True)) * lax.rsqrt(jnp.var({0}, -1, keepdims=True) + 0.1) * {1}",
             "{0} * lax.rsqrt(jnp.mean({0} ** 2, -1, keepdims=True) + 0.1) * {1}",
             "jax.nn.softmax({0} * {1})")  # fmt: skip
    return b.add("norm", b.rng.choice(forms).format(h.name, w.name), [h, w])


@_layer
def within(b: Builder, h: Value) -> Value | None:
    """Operations within an example."""
    axis = b.rng.randrange(1, len(h.shape))
    forms = ("jnp.sort({0}, {1})", "jnp.flip({0}, {1})", "jnp.roll({0}, 1, {1})", "jnp.cumsum({0}, {1}) / 4",
             "scanned({0}, {1}, False)[0]", "scanned({0}, {1}, True)[0]", "lax.cummax({0}, {1})",
             "{0} + lax.top_k({0}, 2)[0][..., :1]", "jnp.real(jnp.fft.ifft(jnp.fft.fft({0}, axis={1}) * 1j, axis={1}))",
             "jnp.concatenate(jnp.split({0}, 2, {1})[::-1], {1})", "{0} - jnp.max({0}, {1}, keepdims=True)",
             "jnp.pad({0}, [(0, 0)] * {1} + [(1, 0)] + [(0, 0)] * ({0}.ndim - 1 - {1}))[tuple([slice(None)] * {1} +"
             " [slice(0, -1)])]")  # fmt: skip
    return b.add("within", b.rng.choice(forms).format(h.name, axis), [h])


@_layer
def embedding(b: Builder, h: Value) -> Value | None:
    ids, table = b.batch[2], b.leaf("state", (8, h.shape[-1]))
    forms = ("{0} + {2}[{1}]", "{0} + jax.nn.one_hot({1}, 8) @ {2}",
             "jnp.where(({1} > 2)[..., None], {0}, {0} * {2}[0])",
             "{0} + jnp.take({2}, {1}, axis=0, mode='clip') * 0.5")  # fmt: skip
    return b.add("embedding", b.rng.choice(forms).format(h.name, ids.name, table.name), [h, ids, table])


@_layer
def mixing(b: Builder, h: Value) -> Value | None:
    """Attention, convolution or a recurrence over time; experts where there is none."""
    w, n = _square(b, h), h.shape[-1]
    if len(h.shape) == 2:
        e = b.leaf("state", (4, n, n))
        gate = b.leaf("state", (n, 4))
        source = "jnp.einsum('be,bd,edf->bf', jax.nn.softmax({0} @ {1}), {0}, {2})"
        return b.add("experts", source.format(h.name, gate.name, e.name), [h, gate, e])
    forms = ("jnp.einsum('bqk,bkd->bqd', jax.nn.softmax(jnp.where(jnp.tri({0}.shape[1], dtype=bool),"
             " jnp.einsum('bqd,bkd->bqk', {0}, {0} @ {1}), -1e9)), {0})",
             "lax.conv_general_dilated({0}, {1}[None], (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))",
             "jnp.swapaxes(lax.scan(lambda c, x: (jnp.tanh(c @ {1} + x),) * 2, jnp.zeros_like({0}[:, 0]),"
             " jnp.swapaxes({0}, 0, 1))[1], 0, 1)")  # fmt: skip
    return b.add("mixing", b.rng.choice(forms).format(h.name, w.name), [h, w])


@_layer
def dropout(b: Builder, h: Value) -> Value | None:
    key = b.state[0]
    k = f"jax.random.fold_in({key.name}, {b.rng.randint(0, 9)})"
    rows = h.shape[0]
    forms = (f"{h.name} * jax.random.bernoulli({k}, 0.8, {h.shape})",
             f"{h.name} + 0.1 * jax.random.normal({k}, {h.shape})",
             f"jax.vmap(lambda q, a: a + jax.random.normal(q, a.shape))(jax.random.split({k}, {rows}), {h.name})",
             f"{h.name} * jax.random.uniform({k}, {h.shape[-1:]})")  # fmt: skip
    return b.add("random", b.rng.choice(forms), [key, h])


@_layer
def branch(b: Builder, h: Value) -> Value | None:
    w, count = _square(b, h), b.state[1]
    forms = ("lax.cond({2} % 2 == 0, lambda a: jnp.tanh(a @ {1}), lambda a: a * 0.5, {0})",
             "lax.switch({2} % 3, [jnp.tanh, lambda a: a @ {1}, lambda a: -a], {0})")  # fmt: skip
    return b.add("condition", b.rng.choice(forms).format(h.name, w.name, count.name), [h, w, count])


@_layer
def stacked(b: Builder, h: Value) -> Value | None:
    """A scan over layers."""
    n = h.shape[-1]
    w = b.leaf("state", (b.rng.choice((2, 3, 4)), n, n))
    body = b.rng.choice(("jnp.tanh(a @ m)", "jax.checkpoint(lambda a, m: jnp.sin(a @ m))(a, m)"))
    return b.add("stacked layers", f"lax.scan(lambda a, m: ({body}, None), {h.name}, {w.name})[0]", [h, w])
