"""Dynamic loss scaling as jmp has it: the scale is state, and a step with gradients that are not finite is skipped.

The scale starts so large that the first steps overflow float32, as they do float16 with usual scales.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from flax import linen as nn
from flax import struct

from tests.loops.base import Arrays, Loop, rng_of

INPUTS, CLASSES = 12, 5


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 16):
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(CLASSES)(x)


MODEL: Any = MLP()
TX = optax.sgd(0.1, momentum=0.9)


class State(struct.PyTreeNode):
    params: Any
    opt_state: Any
    scale: jmp.DynamicLossScale


def loss_fn(params: Any, batch: Arrays) -> jax.Array:
    logits = MODEL.apply({"params": params}, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def train_step(state: State, batch: Arrays) -> tuple[State, dict[str, jax.Array]]:
    def scaled(params: Any) -> tuple[jax.Array, jax.Array]:
        loss = loss_fn(params, batch)
        return state.scale.scale(loss), loss

    grads, loss = jax.grad(scaled, has_aux=True)(state.params)
    grads = state.scale.unscale(grads)
    finite = jmp.all_finite(grads)
    scale = state.scale.adjust(finite)

    def update(_: None) -> tuple[Any, Any]:
        updates, opt_state = TX.update(grads, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state

    params, opt_state = jax.lax.cond(finite, update, lambda _: (state.params, state.opt_state), None)
    return State(params=params, opt_state=opt_state, scale=scale), {"loss": loss, "finite": finite}


def make_state() -> tuple[Any, ...]:
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, INPUTS)))["params"]
    scale = jmp.DynamicLossScale(jnp.float32(2.0**127), period=5)
    return (State(params=params, opt_state=TX.init(params), scale=scale),)


def make_batch(seed: int, rows: int) -> Arrays:
    rng = rng_of(seed)
    x = 8 * rng.standard_normal((rows, INPUTS), "float32")
    return {"x": x, "y": (x[:, :CLASSES]).argmax(1).astype("int32")}


LOOP = Loop(
    "loss_scaling", make_state, train_step, loss_fn, make_batch,
    evaluate=lambda step, carried, batch: step(carried[0].params, batch),
)  # fmt: skip
