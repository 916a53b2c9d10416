"""A linen MLP with a `TrainState`; three methods side by side, then a plan that is saved and run again.

python examples/linen_mlp.py
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import alpa_lite


class MLP(nn.Module):
    """Two hidden layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (256, 256):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(10)(x)


def train_step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, jax.Array]:
    """One step, written for one device."""

    def loss_fn(params: dict) -> jax.Array:
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=gradients), loss


def main(steps: int = 20) -> dict[str, list[float]]:
    """The losses under each method, and under a plan from a file."""
    model = MLP()
    params = model.init(jax.random.key(0), jnp.zeros((1, 64)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(128, 64)).astype(np.float32),
        "y": rng.integers(0, 10, 128).astype(np.int32),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "plan.json"
        options = {
            "auto": {},
            "data parallel": {"method": alpa_lite.DataParallel()},
            "ZeRO-3": {"method": alpa_lite.Zero(stage=3)},
            "from a file": {"plan": file},
        }
        losses = {}
        for name, chosen in options.items():
            step = alpa_lite.parallelize(train_step, **chosen)
            plan = step.plan(state, batch)
            if name == "auto":
                plan.save(file)
            losses[name] = train(step, state, batch, steps)
            kinds = sorted({c.kind for c in plan.collectives})
            print(f"{name:14s} loss {losses[name][-1]:.5f}  predicted {plan.step_seconds * 1e3:.3f} ms  {kinds}")
    return losses


def train(step: Callable[..., Any], state: TrainState, batch: dict, steps: int) -> list[float]:
    """The losses of some steps; the first step copies `state`, so the caller's arrays are not changed."""
    losses = []
    for _ in range(steps):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
