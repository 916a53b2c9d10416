"""NumPy arguments need not change during a call, and may before and after it, as under plain `jit`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

import alpa_lite
from tests.marks import slow_but, slow_one_in
from tests.runtime.cases import METHODS, descend, equal_leaves

WHERE = ("one mesh", "two microbatches", "pipeline")
WIDTH, ROWS = 64, 128


def adapt(params: Any, frozen: Any, x: jax.Array) -> Any:
    return descend(lambda p: jnp.square(jnp.tanh(jnp.tanh(x @ p["a"]) @ frozen["t"]) @ p["b"]).mean(), params)


def numbers(count: int) -> np.ndarray:
    return np.linspace(0.1, 1, count, dtype=np.float32)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def mapped(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    numbers(40).tofile(folder / "weights")
    maps = [np.memmap(folder / "weights", np.float32, mode, shape=(8, 5)) for mode in ("r+", "r")]
    return maps[0], maps[1]


def shared_bytes(_: Path) -> tuple[np.ndarray, np.ndarray]:
    raw = bytearray(numbers(40).tobytes())
    return np.frombuffer(raw, "f4"), np.frombuffer(memoryview(raw).toreadonly(), "f4").reshape(8, 5)


def view_made_before(_: Path) -> tuple[np.ndarray, np.ndarray]:
    own = numbers(40).reshape(8, 5)
    view = own[:]
    return view, read_only(own)


def over(make: Callable[[np.ndarray], np.ndarray], count: int) -> Callable[[Path], tuple[np.ndarray, np.ndarray]]:
    return lambda _: (lambda own: (own, make(own)))(numbers(count))


MEMORIES: dict[str, Callable[[Path], tuple[np.ndarray, np.ndarray]]] = {
    "sliding window": over(lambda a: sliding_window_view(a, 5), 12),
    "broadcast": over(lambda a: np.broadcast_to(a, (8, 5)), 5),
    "bytes": shared_bytes,
    "view made before": view_made_before,
    "memory map": mapped,
}
"""An array that is written, and one that is read-only and reads its memory."""


@pytest.mark.parametrize("where", slow_but(["one mesh"], WHERE))
@pytest.mark.parametrize("memory", slow_but(["view made before", "bytes"], MEMORIES))
def test_read_only_arrays_are_read_in_every_call(memory: str, where: str, tmp_path: Path) -> None:
    def losses(run: Any) -> list[float]:
        written, frozen = MEMORIES[memory](tmp_path)
        params = {"a": jnp.ones((16, 8)) / 8, "b": jnp.ones((5, 4)) / 4}
        out = []
        for _ in range(3):
            params, loss = run(params, {"t": frozen}, np.ones((16, 16), np.float32))
            out.append(float(loss))
            written *= 2
        return out

    run = alpa_lite.parallelize(adapt, batch_argnums=2, **METHODS[where]())
    np.testing.assert_allclose(losses(run), losses(jax.jit(adapt)), rtol=1e-5)


def regress(params: Any, batch: Any) -> Any:
    """Returns a leaf of the batch, too."""

    def loss(p: Any) -> jax.Array:
        h = batch["x"]
        for _ in range(2):
            h = jnp.tanh(h @ p["a"]) @ p["b"]
        return jnp.square(h - batch["y"]).mean()

    params, value = descend(loss, params)
    return params, {"loss": value, "y": batch["y"]}


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Memory that JAX would read without copying it."""
    memory = np.empty(4 * int(np.prod(shape)) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * int(np.prod(shape))].view(np.float32).reshape(shape)


LOADERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "aligned": lambda memory: memory,
    "copied": np.array,
    "part of a pool": lambda memory: np.stack([memory] * 3)[1],
    "transposed": lambda memory: memory.reshape(memory.shape[::-1]).T,
    "read-only": lambda memory: read_only(memory[:]),
}
"""The array that a loader gives in each step."""
FAST = {("aligned", "one mesh"), ("copied", "pipeline")}


@pytest.mark.parametrize("loader, where", slow_one_in(2, slow_but(FAST, itertools.product(LOADERS, WHERE))))
def test_a_batch_may_be_refilled_when_the_call_returns(loader: str, where: str) -> None:
    draw = np.random.default_rng(0)
    run, jitted = alpa_lite.parallelize(regress, batch_argnums=1, **METHODS[where]()), jax.jit(regress)
    state = want = {name: jnp.asarray(draw.normal(size=(WIDTH, WIDTH)) / 8, jnp.float32) for name in "ab"}
    memory = {name: aligned((ROWS, WIDTH)) for name in "xy"}
    batch = {name: LOADERS[loader](one) for name, one in memory.items()}
    written = memory if loader in ("aligned", "transposed", "read-only") else batch
    found, expected = [], []
    for _ in range(8):
        for one in written.values():
            one[...] = draw.normal(size=(ROWS, WIDTH))
        fresh = {name: one.copy() for name, one in batch.items()}
        state, metrics = run(state, batch)
        for one in written.values():
            one[...] = 255  # at once
        want, value = jitted(want, fresh)
        found.append(metrics)
        expected.append(value)
    equal_leaves((state, found), (want, expected), rtol=2e-4, atol=2e-5)
