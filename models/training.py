"""Training steps: the update in NNX's own style, and as a function of pure pytrees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

Loss = Callable[[Any, Any], jax.Array]


def make_optimizer(
    optimizer: str | optax.GradientTransformation, learning_rate: float | None = None
) -> optax.GradientTransformation:
    """An Optax transformation by name: "adamw" (moments in the parameters' float32) or "sgd" (no state).

    Raises:
      ValueError: for another name.
    """
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer == "adamw":
        return optax.adamw(3e-4 if learning_rate is None else learning_rate, b2=0.95, weight_decay=0.01)
    if optimizer == "sgd":
        return optax.sgd(1e-2 if learning_rate is None else learning_rate)
    raise ValueError(f"there is no optimizer {optimizer!r}; choose adamw or sgd, or pass an Optax transformation")


def module_step(loss_fn: Loss) -> Callable[[nnx.Module, nnx.Optimizer, Any], jax.Array]:
    """`train_step(model, optimizer, batch) -> loss`, which updates the model and the optimizer in place."""

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return train_step


def functional_step(
    graphdef: nnx.GraphDef, tx: optax.GradientTransformation, loss_fn: Loss
) -> Callable[[dict[str, Any], Any], tuple[dict[str, Any], dict[str, jax.Array]]]:
    """`train_step(state, batch) -> (state, {"loss": ...})` on dictionaries "params", "rest" and "opt_state"."""

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def loss_and_rest(params: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graphdef, params, state["rest"])
            loss = loss_fn(model, batch)
            return loss, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

        (loss, rest), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "rest": rest, "opt_state": opt_state}, {"loss": loss}

    return train_step
