"""Random programs: operations in any order on arrays of any shape, or layers over examples, as models are."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from benchmarks.random_steps.operations import OPERATIONS, Scope, kind, leaf, let
from benchmarks.random_steps.program import Builder, Program, Value, is_float


def product(b: Builder) -> Value | None:
    """A product over random dims, some of them shared, with a random order of the results'."""
    v = b.pick(("float32", "bfloat16", "float32", "complex64"), least=1, most=3)
    if v is None:
        return None
    rng, letters = b.rng, "abcd"[: len(v.shape)]
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


def general(seed: int) -> Program:
    """A step of many operations."""
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
    kinds = [one for one in (*OPERATIONS, product, product) if not gradient or getattr(one, "label", "") != "while"]
    wanted = rng.randint(4, 14)
    for _ in range(4 * wanted):
        rng.choice(kinds)(b)
        if len(b.lines) >= wanted:
            break
    return varied(b.finished(gradient, generator), b)


def varied(program: Program, b: Builder) -> Program:
    """The program with another optimizer, leaves that are returned as they came or swapped, one array for several."""
    rng, floats = b.rng, [v for v in program.state if is_float(v.dtype)]
    optimizers = ["descended", "momentum", "clipped", "skipped", "branched"] if floats else ["descended"]
    outputs, updates = program.outputs, dict(program.updates)
    if rng.random() < 0.3:
        leaves = [v.name for v in (*program.state, *program.batch) if v.dtype != "key"]
        outputs = (*outputs, rng.choice(leaves or outputs))
    fixed = [v for v in program.state if not (program.gradient and is_float(v.dtype)) and v.name not in updates]
    for one, two in itertools.combinations(fixed, 2):
        if (one.shape, one.dtype) == (two.shape, two.dtype) and rng.random() < 0.5:
            updates |= {one.name: two.name, two.name: one.name}
            break
    return dataclasses.replace(
        program, outputs=tuple(dict.fromkeys(outputs)), updates=tuple(updates.items()),
        optimizer=rng.choice(optimizers), feeding=rng.choice(("", "", "", "aliased", "on_host")),
    )  # fmt: skip


# -- layers -----------------------------------------------------------------------------------------------------------


def square(b: Builder, scope: Scope) -> Value:
    """A matrix of the width of a layer; now and then one that is used before."""
    shape = scope["h"].shape[-1:] * 2
    known = [v for v in b.state if (v.shape, v.dtype) == (shape, "float32")]
    return b.rng.choice(known) if known and b.rng.random() < 0.15 else b.leaf("state", shape)


FLAT, DEEP = "len(h.shape) == 2", "len(h.shape) == 3"
LAYERS = [
    kind("dense", """
        jnp.tanh({h} @ {w} + {c})  {h} + jax.nn.relu({h} @ {w}) * {c}  jax.nn.gelu({h} @ {w}) + {c}
        jax.checkpoint(lambda a, w: jnp.sin(jnp.tanh(a @ w)))({h}, {w}) + {c}  own_gradient({h} @ {w} + {c})
        own_tangent({h} @ {w}, {h}) + {c}  jax.vmap(lambda a: jnp.tanh(a @ {w} + {c}))({h})  looped({h}, {w}, 2) + {c}
        (({h}.astype('bfloat16') @ {w}.astype('bfloat16')).astype('float32') + {c}) * 0.5
    """, w=square, c=leaf("h.shape[-1:]")),
    kind("dense", "{h} + jnp.tanh({h} @ {up}) @ {down} / 4", up=leaf("(h.shape[-1], 2 * h.shape[-1])"),
         down=leaf("(2 * h.shape[-1], h.shape[-1])")),
    kind("dense", "scaled_product({h}, {w}, 0.5) @ {u}", FLAT, w=square, u=square),
    kind("norm", """
        (({h}) - jnp.mean({h}, -1, keepdims=True)) * lax.rsqrt(jnp.var({h}, -1, keepdims=True) + 0.1) * {w}
        {h} * lax.rsqrt(jnp.mean({h} ** 2, -1, keepdims=True) + 0.1) * {w}  jax.nn.softmax({h} * {w})
    """, w=leaf("h.shape[-1:]")),
    kind("within", """
        jnp.sort({h}, {axis})  jnp.flip({h}, {axis})  jnp.roll({h}, 1, {axis})  jnp.cumsum({h}, {axis}) / 4
        scanned({h}, {axis}, False)[0]  scanned({h}, {axis}, True)[0]  lax.cummax({h}, {axis})
        {h} + lax.top_k({h}, 2)[0][..., :1]  jnp.real(jnp.fft.ifft(jnp.fft.fft({h}, axis={axis}) * 1j, axis={axis}))
        jnp.concatenate(jnp.split({h}, 2, {axis})[::-1], {axis})  {h} - jnp.max({h}, {axis}, keepdims=True)
        lax.slice_in_dim(jnp.pad({h}, {pads}), 0, {h.shape[axis]}, axis={axis})
    """, axis=let("rng.randrange(1, len(h.shape))"),
         pads=let("[(0, 0)] * axis + [(1, 0)] + [(0, 0)] * (len(h.shape) - 1 - axis)")),
    kind("embedding", """
        {h} + {table}[{ids}]  {h} + jax.nn.one_hot({ids}, 8) @ {table}
        jnp.where(({ids} > 2)[..., None], {h}, {h} * {table}[0])
        {h} + jnp.take({table}, {ids}, axis=0, mode='clip') * 0.5
    """, table=leaf("(8, h.shape[-1])")),
    kind("mixing", """
        jnp.einsum('bqk,bkd->bqd', jax.nn.softmax(jnp.where(jnp.tri({h.shape[1]}, dtype=bool), {scores}, -1e9)), {h})
        lax.conv_general_dilated({h}, {w}[None], (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))
        jnp.swapaxes(lax.scan({cell}, jnp.zeros_like({h}[:, 0]), jnp.swapaxes({h}, 0, 1))[1], 0, 1)
        gated({h}, {w}, {u})  {h} + attended({h}, {w}, {one(1, 2, 4)})
    """, DEEP, w=square, u=square, scores="jnp.einsum('bqd,bkd->bqk', {h}, {h} @ {w})",
         cell="lambda c, x: (jnp.tanh(c @ {w} + x),) * 2"),
    kind("experts", """
        jnp.einsum('be,bd,edf->bf', jax.nn.softmax({h} @ {gate}), {h}, {w})  routed({h}, {gate}, {w}, {one(1, 2)})
    """, FLAT, w=leaf("(4, *h.shape[-1:] * 2)"), gate=leaf("(h.shape[-1], 4)")),
    kind("random", """
        {h} * jax.random.bernoulli({k}, 0.8, {h.shape})  {h} + 0.1 * jax.random.normal({k}, {h.shape})
        jax.vmap(lambda q, a: a + jax.random.normal(q, a.shape))(jax.random.split({k}, {h.shape[0]}), {h})
        {h} * jax.random.uniform({k}, {h.shape[-1:]})
    """, k="jax.random.fold_in({key}, {rng.randint(0, 9)})"),
    kind("condition", """
        lax.cond({count} % 2 == 0, lambda a: jnp.tanh(a @ {w}), lambda a: a * 0.5, {h})
        lax.switch({count} % 3, [jnp.tanh, lambda a: a @ {w}, lambda a: -a], {h})
    """, w=square),
    kind("stacked layers", """
        lax.scan(lambda a, m: (jnp.tanh(a @ m), None), {h}, {w})[0]  blocks({h}, ({w}, {c}), {key}, {policy})
        lax.scan(lambda a, m: (jax.checkpoint(lambda a, m: jnp.sin(a @ m))(a, m), None), {h}, {w})[0]
    """, w=leaf("(one(2, 3, 4), *h.shape[-1:] * 2)"), c=leaf("(w.shape[0], h.shape[-1])"), policy=let(
        "one('None', 'jax.checkpoint_policies.dots_saveable', 'jax.checkpoint_policies.nothing_saveable')")),
    kind("half", """
        {h} + jnp.matmul({x}, {m}, preferred_element_type='float32') * {c} / 4
        jax.nn.gelu({x} @ {m}).astype('float32') * {c}
        (jax.nn.silu({x} @ {m}) * ({x} @ {m}[::-1])).astype('float32') / 4 + {c}
        jax.checkpoint(lambda a: jnp.tanh(a @ {m} + {c}.astype('bfloat16')))({x}).astype('float32')
    """, w=leaf("h.shape[-1:] * 2", "one('bfloat16', 'float32')"), c=leaf("h.shape[-1:]"),
         x="{h}.astype('bfloat16')", m="{w}.astype('bfloat16')"),
    kind("masked", """
        jnp.where({mask}, {h}, 0)  {h} * jnp.cumsum({mask}, -1)  {h} / (1.0 + {count} % 4)
        {h} + jax.nn.one_hot({ids} % 4, {h.shape[-1]})  {h}.at[..., 0].add({ids} * 0.1)
        jnp.take_along_axis({h}, ({ids} % {h.shape[-1]})[..., None], -1) + {h} * 0.5  {h} * (jnp.sum({ids} > 0) > 2)
    """, mask="({ids} > 1)[..., None]"),
]  # fmt: skip
"""Layers, of the hidden state, the integers of the examples, a key and a count."""


def layered(seed: int) -> Program:
    """A chain of layers over examples, which can be cut into micro-batches and stages."""
    b = Builder(seed)
    rng = b.rng
    examples, width = rng.choice((8, 16, 16, 32)), rng.choice((8, 16, 8, 12))
    times = rng.choice((0, 0, 4, 8))
    h: Value = b.leaf("batch", (examples, times, width) if times else (examples, width))
    target, ids = b.leaf("batch", h.shape), b.leaf("batch", h.shape[:-1], "int32")
    given: dict[str, Any] = {"ids": ids, "key": b.leaf("state", (), "key"), "count": b.leaf("state", (), "int32")}
    for _ in range(rng.randint(3, 7)):
        h = rng.choice(LAYERS)(b, h=h, **given) or h
    outputs = []
    for _ in range(rng.randint(0, 2)):
        made = rng.choice(OPERATIONS)(b)
        outputs += [made.name] if made is not None and made.dtype != "key" and rng.random() < 0.7 else []
    error = b.add("loss", f"{h.name} - {target.name}", [h, target])
    assert error is not None
    outputs.append(error.name)
    metrics = {f"jnp.sum({ids.name} > 2)": ids, f"jnp.max({ids.name})": ids, f"{ids.name} * 2": ids}
    for source, read in (metrics | {f"jnp.mean({h.name}, 0)": h}).items():
        made = b.add("metric", source, [read]) if rng.random() < 0.25 else None
        outputs += [made.name] if made is not None else []
    b.add("key", f"jax.random.split({given['key'].name})[0]", [given["key"]])
    return varied(b.finished(rng.random() < 0.9, rng.choice(("threefry2x32", "rbg")), outputs), b)
