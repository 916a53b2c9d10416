"""LoRA: base weights that the step reads and does not return, and small adapters that are trained.

The plan calls the base weights frozen: they are placed with the first call and stay, and have no gradients and no
optimizer state. Neither the base nor the batch comes back: which is which follows from how the step reads them.

python examples/lora.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_lite

WIDTH, RANK, LAYERS, BATCH = 64, 4, 3, 32
tx = optax.adam(1e-2)
Tree = dict[str, Any]


def make_weights(key: jax.Array) -> tuple[Tree, Tree]:
    """Base weights, which stand for a download, and adapters that change nothing at first."""
    keys = jax.random.split(key, 2 * LAYERS)
    names = [f"layer_{i}" for i in range(LAYERS)]
    base = {name: jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for name, k in zip(names, keys, strict=False)}
    adapters = {
        name: {"a": jax.random.normal(k, (WIDTH, RANK)) / WIDTH**0.5, "b": jnp.zeros((RANK, WIDTH))}
        for name, k in zip(names, keys[LAYERS:], strict=True)
    }
    return base, adapters


@alpa_lite.parallelize
def train_step(adapters: Tree, opt_state: Any, base: Tree, batch: Tree) -> tuple[Any, Any, jax.Array]:
    """One step, written for one device: only the adapters change."""

    def loss_fn(adapters: Tree) -> jax.Array:
        x = batch["x"]
        for name, weight in base.items():
            adapter = adapters[name]
            x = jnp.tanh(x @ weight + (x @ adapter["a"]) @ adapter["b"])
        return ((x - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(adapters)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(adapters, updates), opt_state, loss


def make_batch(seed: int) -> Tree:
    """The target is another order of the features."""
    x = np.random.default_rng(seed).uniform(-1, 1, (BATCH, WIDTH)).astype("float32")
    return {"x": x, "y": 0.5 * np.roll(x, 1, axis=1)}


def main(steps: int = 30) -> list[float]:
    """The losses of training."""
    base, adapters = make_weights(jax.random.key(0))
    opt_state, losses = tx.init(adapters), []
    for step in range(steps):
        adapters, opt_state, loss = train_step(adapters, opt_state, base, make_batch(step))
        losses.append(float(loss))
    plan = train_step.plan(adapters, opt_state, base, make_batch(0))
    frozen = [argument.path for argument in plan.stages[0].arguments if argument.role == "frozen"]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; frozen: {', '.join(frozen)}")
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
