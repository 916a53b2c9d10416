"""Training steps that accumulate gradients in a `lax.scan` over micro-batches, written by hand in JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from alpa_lite import models
from alpa_lite.ir.graph import Block, Op, Traced
from alpa_lite.passes.tracing import tracing
from gallery.batches import random_arrays

Loss = Callable[[Any, Any], Any]


def step_of(
    loss_fn: Loss, params: Any, count: int, tx: optax.GradientTransformation
) -> tuple[Callable[[Any, Any], Any], Any]:
    """A step over `count` micro-batches of a loss of (params, batch), and its state."""

    def step(state: Any, batch: Any) -> Any:
        xs = jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)

        def body(carry: Any, x: Any) -> Any:
            total, sums = carry
            loss, grads = jax.value_and_grad(loss_fn)(state["params"], x)
            return (total + loss, jax.tree.map(jnp.add, sums, grads)), None

        zeros = jax.tree.map(jnp.zeros_like, state["params"])
        (total, sums), _ = lax.scan(body, (jnp.zeros(()), zeros), xs)
        grads = jax.tree.map(lambda g: g / count, sums)
        updates, opt_state = tx.update(grads, state["opt"], state["params"])
        new = {"params": optax.apply_updates(state["params"], updates), "opt": opt_state}
        return new, {"loss": total / count}

    return step, {"params": params, "opt": tx.init(params)}


def scan_of(traced: Traced) -> int:
    """The position in the top block of the scan over micro-batches: the one that holds the most operations."""

    def size(op: Op) -> int:
        return sum(1 + size(inner) for body in op.bodies for inner in body.ops)

    ops = traced.graph.block.ops
    return max((op.index for op in ops if op.name == "scan"), key=lambda index: size(op_of(traced.graph.block, index)))


def op_of(block: Block, index: int) -> Op:
    """The op of a block with this index."""
    return next(op for op in block.ops if op.index == index)


def zoo(
    name: str,
    count: int,
    size: str = "tiny",
    batch: int = 8,
    tx: optax.GradientTransformation | None = None,
    **overrides: Any,
) -> tuple[Callable[[Any, Any], Any], Any, Any]:
    """(step, state, batch) of a model of `alpa_lite.models`, accumulated over `count` micro-batches."""
    spec = models.get(name)
    config = spec.config(size, **overrides)
    module = nnx.eval_shape(lambda: spec.model(config, rngs=nnx.Rngs(0)))
    graphdef, shapes, rest = nnx.split(module, nnx.Param, ...)
    rest = random_arrays(rest)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return spec.loss(nnx.merge(graphdef, params, rest), batch)

    step, state = step_of(loss_fn, random_arrays(nnx.to_pure_dict(shapes)), count, tx or optax.adam(1e-3))
    return step, state, jax.tree.map(jnp.asarray, spec.sample(config, batch))


def traced_of(step: Callable[..., Any], *args: Any) -> Traced:
    """The traced step; its last argument is the batch."""
    return tracing.trace(step, args, {}, batch_argnums=(len(args) - 1,))
