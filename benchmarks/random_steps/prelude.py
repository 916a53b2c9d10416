"""The beginning of the source of random programs: functions that their lines call."""

PRELUDE = '''
import functools
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P


@jax.custom_vjp
def own_gradient(x):
    return jnp.sin(x)

own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) * 0.5,))


@jax.custom_jvp
def own_tangent(x, y):
    return x * jnp.tanh(y)

own_tangent.defjvp(lambda p, t: (own_tangent(*p), t[0] * jnp.tanh(p[1]) + 0.5 * t[1]))


def scanned(x, axis, reverse):
    """A recurrence along an axis, and its last value."""
    rows = jnp.moveaxis(x, axis, 0)
    def body(carry, row):
        carry = jnp.tanh(0.5 * carry + row)
        return carry, carry * row
    last, out = lax.scan(body, jnp.zeros(rows.shape[1:], x.dtype), rows, reverse=reverse)
    return jnp.moveaxis(out, 0, axis), last


def looped(x, w, count):
    """A loop of products with a matrix."""
    return lax.fori_loop(0, count, lambda i, a: jnp.tanh(a @ w) + 0.1 * i, x)


def while_below(x, limit):
    """A loop whose length is that of an integer, with a sum in its condition."""
    def more(carry):
        return (carry[0] < limit) & (jnp.sum(carry[2]) >= 0)
    def body(carry):
        return carry[0] + 1, 0.5 * carry[1] + jnp.mean(carry[1]), carry[2] + 1
    start = (jnp.zeros((), limit.dtype), x, jnp.zeros(x.shape, jnp.int32))
    return lax.while_loop(more, body, start)[1]


def loss_of(values):
    """The mean squares of what has a gradient."""
    floats = [v for v in jax.tree.leaves(values) if jnp.issubdtype(v.dtype, jnp.inexact) and v.size]
    return sum((jnp.mean(jnp.real(v * jnp.conj(v)).astype(jnp.float32)) for v in floats), jnp.zeros(()))


def descended(state, gradients):
    """Gradient descent on the leaves that have gradients."""
    new = {k: (state[k] - 0.1 * jnp.conj(g)).astype(state[k].dtype) for k, g in gradients.items()}
    return {**state, **new}


def momentum(state, gradients):
    """Descent along moments, which are part of the state."""
    moments = {k: 0.5 * state["moments"][k] + jnp.conj(g).astype(state[k].dtype) for k, g in gradients.items()}
    new = {k: (state[k] - 0.1 * m).astype(state[k].dtype) for k, m in moments.items()}
    return {**state, **new, "moments": moments}


def clipped(state, gradients):
    """Descent along gradients of a bounded norm."""
    norm = jnp.sqrt(sum(jnp.sum(jnp.abs(g.astype(jnp.float32)) ** 2) for g in gradients.values()) + 1e-3)
    scale = jnp.minimum(1.0, 0.5 / norm)
    return descended(state, {k: (g.astype(jnp.float32) * scale).astype(g.dtype) for k, g in gradients.items()})


def skipped(state, gradients):
    """Descent where all gradients are finite."""
    fine = jnp.all(jnp.stack([jnp.all(jnp.isfinite(jnp.abs(g))) for g in gradients.values()]))
    new = descended(state, gradients)
    return {**new, **{k: jnp.where(fine, new[k], state[k]) for k in gradients}}


def branched(state, gradients):
    """The same, as a branch."""
    fine = jnp.all(jnp.stack([jnp.all(jnp.isfinite(jnp.abs(g))) for g in gradients.values()]))
    old = {k: state[k] for k in gradients}
    return {**state, **lax.cond(fine, lambda old, gs: descended(old, gs), lambda old, gs: old, old, gradients)}


def aliased(state, batch):
    """The arguments, equal leaves of which are one array."""
    known = {}
    def one(leaf):
        return known.setdefault((leaf.shape, leaf.dtype), leaf)
    return jax.tree.map(one, state), jax.tree.map(one, batch)


def on_host(state, batch):
    """The arguments, with a batch of NumPy arrays."""
    return state, jax.tree.map(np.asarray, batch)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def scaled_product(x, w, scale):
    return jnp.tanh(x @ w) * scale

def _scaled_forward(x, w, scale):
    out = jnp.tanh(x @ w)
    return out * scale, (x.astype(jnp.bfloat16), w, out)

def _scaled_backward(scale, residuals, g):
    x, w, out = residuals
    g = g * scale * (1 - out * out)
    return g @ w.T, jnp.tensordot(x.astype(g.dtype), g, (tuple(range(g.ndim - 1)),) * 2)

scaled_product.defvjp(_scaled_forward, _scaled_backward)


def mixed_scan(x, axis, unroll):
    """A loop over an axis that carries a float32, a bfloat16, a count and a flag, and stacks two of them."""
    rows = jnp.moveaxis(x, axis, 0)
    def body(carry, row):
        total, half, count, seen = carry
        total = 0.5 * total + row
        half = (half.astype(jnp.float32) * 0.5 + row).astype(jnp.bfloat16)
        return (total, half, count + 1, seen | (count > 2)), (total * count, half)
    zero = jnp.zeros(rows.shape[1:])
    start = (zero, zero.astype(jnp.bfloat16), jnp.int32(0), jnp.zeros((), bool))
    (total, half, count, seen), (stack, halves) = lax.scan(body, start, rows, unroll=unroll)
    last = jnp.where(seen, total, total + 1) + half.astype(jnp.float32) / (1 + count)
    return jnp.moveaxis(stack, 0, axis) / (1 + rows.shape[0]) + jnp.expand_dims(last, axis)


def bounded_loop(x, count):
    """A loop whose length is data, with a row that is written in each iteration."""
    def body(i, carry):
        x, key = carry
        row = lax.dynamic_index_in_dim(x, i % x.shape[0], 0)
        return lax.dynamic_update_index_in_dim(x, row * 0.5 + 1, (i + 1) % x.shape[0], 0), jax.random.split(key)[0]
    x, key = lax.fori_loop(0, count, body, (x, jax.random.key(3)))
    return x + jax.random.uniform(key)


def recurrence(decay, x, axis, reverse):
    """h_t = a_t h_(t-1) + x_t by an associative scan over pairs."""
    def combine(one, two):
        return one[0] * two[0], two[0] * one[1] + two[1]
    return lax.associative_scan(combine, (decay, x), axis=axis, reverse=reverse)[1]


def gated(x, w, u):
    """A gated recurrence over time, with a float32 cell and a bfloat16 hidden state."""
    def body(carry, row):
        cell, hidden = carry
        gates = row @ w + hidden.astype(row.dtype) @ u
        cell = jax.nn.sigmoid(gates) * cell + jnp.tanh(gates)
        return (cell, jnp.tanh(cell).astype(jnp.bfloat16)), cell
    start = jnp.zeros_like(x[:, 0]), jnp.zeros_like(x[:, 0], jnp.bfloat16)
    return jnp.swapaxes(lax.scan(body, start, jnp.swapaxes(x, 0, 1))[1], 0, 1)


def blocks(h, stack, key, policy):
    """A scan over layers, each rematerialised, with a key of its own."""
    def layer(carry, params):
        h, key = carry
        w, c = params
        key, mine = jax.random.split(key)
        return (h + jnp.tanh(h @ w + c) * jax.random.bernoulli(mine, 0.9, h.shape), key), jnp.mean(h, -1)
    layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    (h, _), means = lax.scan(layer, (h, key), stack)
    return h + jnp.sum(means, 0)[..., None] * 0.1


def routed(h, gate, experts, k):
    """The k best experts of each example, by one-hot weights."""
    scores = jax.nn.softmax(h @ gate)
    best, places = lax.top_k(scores, k)
    weights = jnp.sum(jax.nn.one_hot(places, gate.shape[-1]) * best[..., None], -2)
    return jnp.einsum('...e,...d,edf->...f', weights, h, experts)


def attended(h, w, heads):
    """Attention with several heads and rotated positions."""
    q = (h @ w).reshape(*h.shape[:2], heads, -1)
    k = h.reshape(q.shape)
    angle = jnp.arange(h.shape[1])[:, None, None] / 8.0
    q = q * jnp.cos(angle) + jnp.roll(q, 1, -1) * jnp.sin(angle)
    scores = jnp.einsum('bqhd,bkhd->bhqk', q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(scores), k).reshape(h.shape)



CALLS = []


def noted(x):
    CALLS.append(1)


def answered(x):
    CALLS.append(1)
    return np.asarray(x)


def debugged(x, ordered):
    """A value, with a callback that sees its sum."""
    jax.debug.callback(noted, jnp.sum(lax.stop_gradient(x)), ordered=ordered)
    return x * 1


def called_out(x, ordered):
    """What a callback returns of a value."""
    kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return lax.stop_gradient(io_callback(answered, kind, lax.stop_gradient(x), ordered=ordered))


def called_out_once(x, ordered):
    """A callback on nothing."""
    kind = jax.ShapeDtypeStruct((), jnp.float32)
    io_callback(answered, kind, np.float32(1), ordered=ordered)
    return x * 1


def summed_in_ref(x):
    ref = jax.new_ref(jnp.zeros(x.shape[1:], x.dtype))
    ref[...] += jnp.mean(x, 0)
    return x + ref[...]


def scanned_in_ref(x):
    ref = jax.new_ref(jnp.zeros(x.shape[1:], x.dtype))
    def body(carry, row):
        ref[...] += 0.1 * row
        return carry, None
    lax.scan(body, 0, x)
    return jnp.tanh(x) + ref[...]


def looped_in_ref(x):
    ref = jax.new_ref(lax.stop_gradient(x))
    def body(i, carry):
        ref[...] = 0.5 * ref[...] + jnp.mean(ref[...])
        return carry
    lax.fori_loop(0, 3, body, 0)
    return x + ref[...]


def branched_in_ref(x):
    ref = jax.new_ref(lax.stop_gradient(x))
    def changed():
        ref[...] = ref[...] * 0.5
    lax.cond(lax.stop_gradient(jnp.sum(x)) > 1e9, lambda: None, changed)
    return x + ref[...]


def _moved(x):
    """A matrix that a loop moves a vector with: a product over all rows of x."""
    x = lax.stop_gradient(x)
    return (lambda v: v - 0.1 * (x.T @ (x @ v)) / x.shape[0]), jnp.mean(x, 0)


def counted_up(x):
    move, v = _moved(x)
    return x + lax.while_loop(lambda c: c[1] < 5, lambda c: (move(c[0]), c[1] + 1), (v, 0))[0]


def counted_down(x):
    move, v = _moved(x)
    return x + lax.while_loop(lambda c: c[1] >= 1, lambda c: (move(c[0]), c[1] - 2), (v, 7))[0]


def counted_in_scan(x):
    move, v = _moved(x)
    inner = lambda u: lax.fori_loop(0, jnp.minimum(2, 3), lambda i, u: move(u), u)
    return x + lax.scan(lambda u, _: (inner(u), None), v, None, length=2)[0]


def counted_with_branch(x):
    move, v = _moved(x)
    body = lambda c: (lax.cond(c[1] % 2 == 0, move, lambda u: u * 0.5, c[0]), c[1] + 1)
    return x + lax.while_loop(lambda c: c[1] < 4, body, (v, 0))[0]


def counted_until_small(x):
    move, v = _moved(x)
    body = lambda c: (move(c[0]), c[1] + 1)
    return x + lax.while_loop(lambda c: (c[1] < 4) & (jnp.sum(jnp.abs(c[0])) < 1e6), body, (v, 0))[0]
'''
