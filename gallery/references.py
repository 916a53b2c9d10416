"""Train steps that use mutable references (`jax.new_ref`): in plain JAX and in Flax linen."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

from gallery import steps
from gallery.batches import initial, random_arrays
from gallery.registry import Built, Case, parse_tags
from gallery.steps import updated

WIDTH, ROWS = 16, 16


def batch() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


def weights() -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) * 0.3, jnp.float32) for _ in range(4)]


model = steps.layers


def gradients(state, x):
    return jax.value_and_grad(lambda state: jnp.square(model(state, x)).mean())(state)


def descent(loss: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The step of a loss, which has its name."""
    step = steps.sgd(loss)
    step.__name__ = loss.__name__
    return step


def metrics(state, x):
    """Metrics are written one by one."""
    found = jax.new_ref(jnp.zeros(2))
    loss, grads = gradients(state, x)
    found[0] += loss
    found[1] = jnp.abs(grads[0]).max()
    return updated(state, grads), found[...]


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
    return updated(state, grads), loss, best[...]


def counted(state, x):
    """A branch counts."""
    skipped = jax.new_ref(jnp.zeros((), jnp.int32))
    loss, grads = gradients(state, x)

    def skip():
        skipped[...] += 1

    jax.lax.cond(loss > 1e3, lambda: None, skip)
    return updated(state, grads), skipped[...]


def within_branches(state, x):
    """Branches create their own."""
    loss, grads = gradients(state, x)

    def doubled():
        total = jax.new_ref(loss)
        total[...] *= 2
        return total[...]

    return updated(state, grads), jax.lax.cond(loss > 1e3, lambda: loss, doubled)


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

    return updated(state, grads), loss, jax.lax.scan(body, grads[0][0], grads[1])


@jax.jit
def log(ref, value):
    ref[...] += value


def logged(state, x):
    """A jitted function writes into its argument."""
    found = jax.new_ref(jnp.zeros(()))
    loss, grads = gradients(state, x)
    log(found, loss)
    log(found, jnp.abs(grads[1]).max())
    return updated(state, grads), found[...]


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
    return updated(state, grads), loss, sizes


def build(step: Callable[..., Any]) -> Built:
    """A step, its state and its batch."""
    x, state = batch(), weights()
    if step is momentum:
        state = (state, jax.tree.map(jnp.zeros_like, state))
    return step, (random_arrays(initial(Mlp(), x)) if step is in_linen else state, x)


CASES = [
    Case(step.__name__, partial(build, step), tags=parse_tags(tags), notes=step.__doc__ or "")
    for tags, some in {
        "plain": (metrics, logged, overwritten, momentum),
        "plain, accumulation": (accumulation,),
        "plain, accumulation, scan": (scanned,),
        "plain, loop": (searched,),
        "plain, branch": (counted, within_branches),
        "plain, loop, branch": (within_loops,),
        "plain, custom derivative, rematerialisation": (with_own_derivative,),
        "linen": (in_linen,),
    }.items()
    for step in some
]
