"""A small GPT in plain Flax NNX, trained on the sources of Python's standard library on all devices.

    python examples/train_gpt.py [STEPS]

Without an accelerator it creates eight virtual CPU devices, to show the sharding; otherwise it uses the accelerators.
"""

from __future__ import annotations

import pathlib
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import alpa_lite

SEQ, BATCH, HIDDEN, HEADS, LAYERS, VOCAB = 64, 32, 64, 4, 2, 256


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, HIDDEN, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.positions = nnx.Embed(SEQ, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@alpa_lite.parallelize
def train_step(model: GPT, optimizer: nnx.Optimizer, batch: Mapping[str, Any]) -> jax.Array:
    """One step, written for one device; the model and the optimizer are updated in place."""

    def loss_fn(model: GPT) -> jax.Array:
        logits = model(batch["inputs"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def main(steps: int) -> list[float]:
    """The losses of training."""
    model = GPT(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    rng, losses = np.random.default_rng(0), []
    for step in range(steps):
        starts = rng.integers(0, len(text) - SEQ - 1, BATCH)
        window = text[starts[:, None] + np.arange(SEQ + 1)].astype(np.int32)
        batch = {"inputs": window[:, :-1], "targets": window[:, 1:]}
        if step == 0:
            print(train_step.plan(model, optimizer, batch))
        losses.append(train_step(model, optimizer, batch))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {float(losses[-1]):.4f}")
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
