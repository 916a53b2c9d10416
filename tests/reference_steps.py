"""Train steps that use mutable references (`jax.new_ref`): in plain JAX and in Flax linen."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from tests import gallery
from tests.zoo_base import filled

WIDTH, ROWS = 16, 16


def batch() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


def weights() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) * 0.3, jnp.float32) for _ in range(4)]


model = gallery.layers


def gradients(state, x):
    return jax.value_and_grad(lambda state: jnp.square(model(state, x)).mean())(state)


def sgd(state, grads):
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads)


def descent(loss: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The step of a loss, which has its name."""
    step = gallery.sgd(loss)
    step.__name__ = loss.__name__
    return step


def metrics(state, x):
    """Metrics are written one by one."""
    found = jax.new_ref(jnp.zeros(2))
    loss, grads = gradients(state, x)
    found[0] += loss
    found[1] = jnp.abs(grads[0]).max()
    return sgd(state, grads), found[...]


def accumulation(state, x):
    """Gradients of parts of the batch are added up in a Python loop."""
    total = jax.new_ref(jnp.zeros_like(state[0]))
    for half in (x[: ROWS // 2], x[ROWS // 2 :]):
        total[...] += gradients(state, half)[1][0]
    return [state[0] - 0.1 * total[...], *state[1:]], total[...].sum()


def scanned(state, x):
    """The same in a scan."""
    total = jax.new_ref(jnp.zeros_like(state[0]))

    def body(count, part):
        total[...] += gradients(state, part)[1][0]
        return count + 1, None

    jax.lax.scan(body, 0, jnp.stack([x, 0.5 * x, 2 * x]))
    return [state[0] - 0.1 * total[...], *state[1:]], total[...].sum()


def searched(state, x):
    """A while loop keeps the best that it has seen."""
    best = jax.new_ref(jnp.zeros(()))
    loss, grads = gradients(state, x)

    def body(count):
        best[...] = jnp.maximum(best[...], jnp.abs(grads[0]).max() * count)
        return count + 1

    jax.lax.while_loop(lambda count: count < 3, body, 0)
    return sgd(state, grads), loss, best[...]


def counted(state, x):
    """A branch counts."""
    skipped = jax.new_ref(jnp.zeros((), jnp.int32))
    loss, grads = gradients(state, x)

    def skip():
        skipped[...] += 1

    jax.lax.cond(loss > 1e3, lambda: None, skip)
    return sgd(state, grads), skipped[...]


def within_branches(state, x):
    """Branches create their own."""
    loss, grads = gradients(state, x)

    def doubled():
        total = jax.new_ref(loss)
        total[...] *= 2
        return total[...]

    return sgd(state, grads), jax.lax.cond(loss > 1e3, lambda: loss, doubled)


def within_loops(state, x):
    """Iterations create their own, and a branch in them."""
    loss, grads = gradients(state, x)

    def body(total, row):
        found = jax.new_ref(row)
        found[0] = found[1]

        def changed():
            own = jax.new_ref(found[...])
            own[...] *= 2
            return own[...]

        new = jax.lax.cond(row[0] > 0, changed, lambda: row)
        return total + new, found[0]

    return sgd(state, grads), loss, jax.lax.scan(body, grads[0][0], grads[1])


@jax.jit
def log(ref, value):
    ref[...] += value


def logged(state, x):
    """A jitted function writes into its argument."""
    found = jax.new_ref(jnp.zeros(()))
    loss, grads = gradients(state, x)
    log(found, loss)
    log(found, jnp.abs(grads[1]).max())
    return sgd(state, grads), found[...]


@descent
def overwritten(state, x):
    """Activations go through a reference that is differentiated."""
    h = jax.new_ref(x)
    for w in state:
        h[...] = jnp.tanh(h[...] @ w)
    return jnp.square(jax.freeze(h)).mean()


@jax.custom_vjp
def straight_through(x):
    found = jax.new_ref(x)
    found[...] = jnp.sign(found[...]) * 0.1 + found[...]
    return found[...]


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, g: (g,))


@descent
def with_own_derivative(state, h):
    """Within a function with its own derivative, under `jax.checkpoint`."""
    for w in state:
        h = jax.checkpoint(lambda w, h: straight_through(jnp.tanh(h @ w)))(w, h)
    return jnp.square(h).mean()


def momentum(state, x):
    """State is updated through references."""
    loss, grads = gradients(state[0], x)
    params, velocity = jax.tree.map(jax.new_ref, state)
    for w, v, g in zip(params, velocity, grads, strict=True):
        v[...] = 0.9 * v[...] + g
        w[...] -= 0.1 * v[...]
    return ([w[...] for w in params], [v[...] for v in velocity]), loss


class Mlp(linen.Module):
    """Layers that note the size of their activations."""

    @linen.compact
    def __call__(self, x):
        sizes = jax.new_ref(jnp.zeros(3))
        for i in range(3):
            x = linen.tanh(linen.Dense(WIDTH)(x))
            sizes[i] = jax.lax.stop_gradient(jnp.abs(x).mean())
        return x, sizes[...]


def in_linen(state, x):
    def loss_of(state):
        y, sizes = Mlp().apply(state, x)
        return jnp.square(y).mean(), sizes

    (loss, sizes), grads = jax.value_and_grad(loss_of, has_aux=True)(state)
    return sgd(state, grads), loss, sizes


PLAIN = (
    metrics, accumulation, scanned, searched, counted, within_branches, within_loops, logged, overwritten,
    with_own_derivative, momentum,
)  # fmt: skip
STEPS = (*PLAIN, in_linen)


def arguments(step: Any) -> tuple[Any, jax.Array]:
    """State and batch of a step."""
    x = batch()
    if step is momentum:
        return (weights(), jax.tree.map(jnp.zeros_like, weights())), x
    return filled(jax.eval_shape(Mlp().init, jax.random.key(0), x)) if step is in_linen else weights(), x
