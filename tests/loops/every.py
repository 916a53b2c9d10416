"""All train loops of this folder by name."""

from __future__ import annotations

import importlib

from tests.loops.base import Loop

NAMES = (
    "linen_train_state", "nnx_optimizer", "multi_steps", "ema", "loss_scaling", "lora", "gan", "actor_critic",
    "haiku_state", "equinox_partition", "vision_batch_norm", "two_towers",
)  # fmt: skip


def loop(name: str) -> Loop:
    """The loop of one module: only its own imports are loaded."""
    return importlib.import_module(f"tests.loops.{name}").LOOP
