"""Small steps in stages that tests of staging, segments and programs of pipelines share, planned once each."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from gallery.batches import normal
from gallery.steps import updated
from tests import pipeline_driver
from tests.pipeline_driver import Driven, Staged

SIZE = 8


def deep(layers: int, *, tied: bool = False, norm: bool = False) -> tuple[Any, Any]:
    """A step of products and tanh under a mask, and its arguments.

    Args:
      tied: one more matrix stands before and after all layers.
      norm: the update is divided by the norm of all gradients.
    """

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> jax.Array:
            x, mask = batch["x"], batch["x"][:, :1] > 0
            x = x @ params["tied"] if tied else x
            for w in params["layers"]:
                x = jnp.where(mask, jnp.tanh(x @ w), x)
            x = x @ params["tied"].T if tied else x
            return ((x - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state)
        scale = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))) if norm else 1.0
        return updated(state, jax.tree.map(lambda g: g / scale, grads)), {"loss": loss}

    params: dict[str, Any] = {"layers": [normal(i, SIZE, SIZE) / SIZE**0.5 for i in range(layers)]}
    if tied:
        params["tied"] = normal(99, SIZE, SIZE) / SIZE**0.5
    return step, (params, {"x": normal(100, 16, SIZE), "y": normal(101, 16, SIZE)})


KINDS: dict[str, dict[str, bool]] = {"plain": {}, "tied": {"tied": True}, "norm": {"norm": True}}


@functools.cache
def staged(kind: str, stages: int) -> Staged:
    """A kind of `deep` in two micro-batches and in stages of one layer; the last has the loss too."""
    return pipeline_driver.staged(*deep(stages, **KINDS[kind]), stages, 2, cuts=range(1, stages))


@functools.cache
def driven(kind: str, meshes: int, schedule: str, virtual: int = 1, devices: int = 1) -> Driven:
    """A kind of `deep`, planned for as many micro-batches as submeshes of some devices each."""
    return pipeline_driver.drive(
        *deep(meshes * virtual, **KINDS[kind]),
        devices=(devices,) * meshes, microbatches=meshes, schedule=schedule, virtual=virtual,
        cuts=range(1, meshes * virtual),
    )  # fmt: skip
