"""Leaves of fewer than eight bits: a planned step takes, moves and returns them, with the values of plain `jit`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite
from tests.marks import slow_one_in
from tests.runtime.cases import METHODS, descend, draw, equal_leaves

WIDTH, ROWS = 16, 16
TYPES = ["int4", "uint4", "int2", "uint2", "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2"]
WHERE = ("zero", "replicated microbatches", "tensor", "pipeline")


def low(dtype: str, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 2, shape), jnp.dtype(dtype))


def wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


def adapters_on_frozen(dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Frozen quantised weights as an argument of their own."""

    def step(params: Any, frozen: Any, x: jax.Array) -> Any:
        def loss(p: Any) -> jax.Array:
            return jnp.square(jnp.tanh(x @ wide(frozen["a"]) + x @ p["a"]) @ wide(frozen["b"]) + p["b"]).mean()

        return descend(loss, params)

    frozen = {"a": low(dtype, WIDTH, WIDTH), "b": low(dtype, WIDTH, WIDTH)}
    return step, ({"a": draw(WIDTH, WIDTH), "b": draw(WIDTH)}, frozen, draw(ROWS, WIDTH))


def quantised_state(dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Weights that are quantised again in each step: new buffers of the type take the place of the old ones."""

    def step(state: Any, x: jax.Array) -> Any:
        master, value = descend(lambda m: jnp.square(jnp.tanh(x @ wide(state["q"])) @ m).mean(), state["master"])
        return {"q": (jnp.abs(master) > 0.3).astype(state["q"].dtype), "master": master}, value

    return step, ({"q": low(dtype, WIDTH, WIDTH), "master": draw(WIDTH, WIDTH)}, draw(ROWS, WIDTH))


def quantised_activations(dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Values of the type between layers, so that what a pipeline sends on can be one, and a result."""

    def step(params: Any, x: jax.Array) -> Any:
        hidden = (jnp.tanh(x @ params["a"]) > 0).astype(dtype)
        new, value = descend(lambda p: jnp.square(jnp.tanh(wide(hidden) @ p["b"]) @ p["c"]).mean(), params)
        return new, {"loss": value, "hidden": hidden}

    return step, ({name: draw(WIDTH, WIDTH) for name in "abc"}, draw(ROWS, WIDTH))


def changed_layouts(dtype: str) -> tuple[Any, tuple[Any, ...]]:
    """Constraints that have a value gathered, exchanged and cut."""

    def step(params: Any, x: jax.Array) -> Any:
        q = (x > 0).astype(dtype)
        for spec in (P("x"), P(None, "x"), P(), P("x")):
            mesh = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
            q = jax.lax.with_sharding_constraint(q, jax.sharding.NamedSharding(mesh, spec))
            q = jnp.flip(q, 0)
        return descend(lambda p: jnp.square(wide(q) @ p).mean(), params)

    return step, (draw(WIDTH, WIDTH), draw(ROWS, WIDTH))


PROGRAMS = [adapters_on_frozen, quantised_state, quantised_activations]
FAST = {("adapters_on_frozen", "int4", "zero"), ("changed_layouts", "int2", "zero")}


def cases() -> Iterator[Any]:
    """Each program with each method, by types in turn; and changes of layout of all types."""
    types = itertools.cycle(TYPES)
    for program, where in itertools.product(PROGRAMS, WHERE):
        yield program, next(types), where
    for dtype in TYPES:
        yield changed_layouts, dtype, "zero"


@pytest.mark.parametrize("program, dtype, where", slow_one_in(3, [
    pytest.param(p, t, w, id=f"{p.__name__}-{t}-{w}", marks=[] if (p.__name__, t, w) in FAST else pytest.mark.slow)
    for p, t, w in cases()
]))  # fmt: skip
def test_leaves_of_few_bits_run_as_under_jit(program: Any, dtype: str, where: str) -> None:
    step, (state, *rest) = program(dtype)
    verify = "hlo" if where == "zero" else "shardy"
    run = alpa_lite.parallelize(step, batch_argnums=len(rest), verify=verify, **METHODS[where]())
    want, jitted = state, jax.jit(step)
    for _ in range(3):
        state, found = run(state, *rest)
        want, expected = jitted(want, *rest)
        equal_leaves((state, found), (want, expected), rtol=2e-5, atol=1e-6)
