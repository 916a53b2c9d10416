"""Layers of random programs: each adds lines that read the hidden state, or nothing.

`layered` makes a chain of layers over examples, as models are, which can be cut into micro-batches and stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from benchmarks.random_steps import features
from benchmarks.random_steps.kinds import varied
from benchmarks.random_steps.program import Builder, Program, Value, entered

Layer = Callable[[Builder, Value], Value | None]
LAYERS: dict[str, Layer] = {}
WIDER: dict[str, Layer] = {}
"""Those of `wider` programs, too."""

_layer, _wider = entered(LAYERS), entered(WIDER)


def layered(seed: int, is_wider: bool = False, further: bool = False) -> Program:
    """A chain of layers over examples; with `is_wider`, of those of `wider`, too; with `further`, as `general`."""
    b = Builder(seed)
    rng = b.rng
    examples, width = rng.choice((8, 16, 16, 32)), rng.choice((8, 16, 8, 12))
    times = rng.choice((0, 0, 4, 8))
    h: Value = b.leaf("batch", (examples, times, width) if times else (examples, width))
    target = b.leaf("batch", h.shape)
    b.leaf("batch", h.shape[:-1], "int32")
    b.leaf("state", (), "key")
    b.leaf("state", (), "int32")
    kinds = LAYERS | WIDER if is_wider else LAYERS
    names = list(kinds)
    for _ in range(rng.randint(3, 7)):
        h = kinds[rng.choice(names)](b, h) or h
    outputs = []
    for _ in range(rng.randint(1, 2) if further else 0):
        made = rng.choice(list(features.KINDS.values()))(b)
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
    return varied(program, b) if is_wider else program


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


@_wider
def gated(b: Builder, h: Value) -> Value | None:
    n = h.shape[-1]
    w, u = b.leaf("state", (n, n)), b.leaf("state", (n, n))
    if len(h.shape) == 2:
        return b.add("dense", f"scaled_product({h.name}, {w.name}, 0.5) @ {u.name}", [h, w, u])
    return b.add("mixing", f"gated({h.name}, {w.name}, {u.name})", [h, w, u])


@_wider
def blocks(b: Builder, h: Value) -> Value | None:
    n, count, key = h.shape[-1], b.rng.choice((2, 3, 4)), b.state[0]
    w, c = b.leaf("state", (count, n, n)), b.leaf("state", (count, n))
    policy = b.rng.choice(("None", "jax.checkpoint_policies.dots_saveable", "jax.checkpoint_policies.nothing_saveable"))
    return b.add("stacked layers", f"blocks({h.name}, ({w.name}, {c.name}), {key.name}, {policy})", [h, w, c, key])


@_wider
def attention(b: Builder, h: Value) -> Value | None:
    n = h.shape[-1]
    if len(h.shape) == 2:
        gate, experts = b.leaf("state", (n, 4)), b.leaf("state", (4, n, n))
        return b.add(
            "experts", f"routed({h.name}, {gate.name}, {experts.name}, {b.rng.choice((1, 2))})", [h, gate, experts]
        )
    w = b.leaf("state", (n, n))
    return b.add("mixing", f"{h.name} + attended({h.name}, {w.name}, {b.rng.choice((1, 2, 4))})", [h, w])


@_wider
def half(b: Builder, h: Value) -> Value | None:
    """Layers in bfloat16, with norms in float32."""
    w, c = b.leaf("state", (h.shape[-1],) * 2, b.rng.choice(("bfloat16", "float32"))), b.leaf("state", h.shape[-1:])
    x = f"{h.name}.astype('bfloat16')"
    m = f"{w.name}.astype('bfloat16')"
    forms = (
        f"{h.name} + jnp.matmul({x}, {m}, preferred_element_type='float32') * {c.name} / 4",
        f"jax.nn.gelu({x} @ {m}).astype('float32') * {c.name}",
        f"(jax.nn.silu({x} @ {m}) * ({x} @ {m}[::-1])).astype('float32') / 4 + {c.name}",
        f"jax.checkpoint(lambda a: jnp.tanh(a @ {m} + {c.name}.astype('bfloat16')))({x}).astype('float32')",
    )
    return b.add("half", b.rng.choice(forms), [h, w, c])


@_wider
def counted(b: Builder, h: Value) -> Value | None:
    """Layers that read integers and flags of the examples, and of the state."""
    ids, count = b.batch[2], b.state[1]
    mask = f"({ids.name} > 1)[..., None]"
    forms = (
        f"jnp.where({mask}, {h.name}, 0)", f"{h.name} * jnp.cumsum({mask}, -1) ",
        f"{h.name} / (1.0 + {count.name} % 4)", f"{h.name} + jax.nn.one_hot({ids.name} % 4, {h.shape[-1]})",
        f"jnp.take_along_axis({h.name}, ({ids.name} % {h.shape[-1]})[..., None], -1) + {h.name} * 0.5",
        f"{h.name}.at[..., 0].add({ids.name} * 0.1)", f"{h.name} * (jnp.sum({ids.name} > 0) > 2)",
    )  # fmt: skip
    return b.add("masked", b.rng.choice(forms), [h, ids, count])
