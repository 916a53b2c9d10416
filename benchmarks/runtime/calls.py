"""The cost of a call with 300 leaves beyond that under `jax.jit` or `nnx.jit` with equal shardings and donation.

Two steps are nearly empty, so that the call is timed: from calling until it returns, without waiting for the devices,
which are idle at every start. The third, "linen", is a train step as users have it, planned as they plan it: 50 layers
of linen, Adam of Optax with its tuples, 302 leaves; its devices compute for as long as the call takes.

The contestants take turns in one process, in random order: ours, called as `parallelize` returns it, the `jit`, and the
`jit` again, compiled anew. Each has a state and an executable of its own: two that shared one would find it in the
caches of the cores more often than the third finds its own, which makes 80 us on eight devices.

Where its 300 arrays happen to be placed in memory makes a call up to 100 us faster or slower, so all is repeated with
fresh states. `more_us` is the median over the repetitions of the difference of the medians, `more_us_of_each` are these
differences, and `noise_us` is what the `jit` again makes of it. The devices of a CPU compete with the call for its
cores; `more_cpu_us` is the difference in time that the calling thread was running. Measure on an idle machine.
"""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

from alpa_lite import Cluster, DataParallel, Manual, parallelize
from benchmarks.harness import Benchmark, Row
from gallery.steps import optimizer_step

JITTED = "jit", "jit again"
LAYERS = 100  # of three leaves each
BATCH = np.ones((8, 8), np.float32)


class Layer(nnx.Module):
    """Three leaves."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((8, 8)))
        self.bias = nnx.Param(jnp.ones(8))
        self.scale = nnx.Param(jnp.ones(8))


class Model(nnx.Module):
    """`LAYERS` layers."""

    def __init__(self) -> None:
        self.layers = nnx.List([Layer() for _ in range(LAYERS)])


class Dense50(linen.Module):
    """50 layers of two leaves."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """[batch, features] to the same."""
        for _ in range(50):
            x = linen.tanh(linen.Dense(features=8)(x))
        return x


def added(state: Any, batch: Any) -> Any:
    """A state in nested dicts, as linen has them, of which the step makes another one."""
    total = batch.sum()
    return jax.tree.map(lambda leaf: leaf + total, state), total


def updated(model: Any, batch: Any) -> Any:
    """A model of NNX that the step updates in place."""
    total = batch.sum()
    nnx.update(model, jax.tree.map(lambda leaf: leaf + total, nnx.state(model)))
    return total


def trained(params: Any, moments: Any, batch: Any) -> Any:
    """A train step as users have it: parameters, Adam's moments and its count."""
    step = optimizer_step(lambda p, x: jnp.square(jnp.asarray(Dense50().apply(p, x))).mean(), optax.adam(1e-3))
    return step(params, moments, batch)


def nested() -> tuple[Any]:
    """The state of `added`."""
    layer = {"attention": {"kernel": np.ones((8, 8), np.float32), "bias": np.ones(8, np.float32)}}
    return ({f"layer_{i}": layer | {"norm": {"scale": np.ones(8, np.float32)}} for i in range(LAYERS)},)


def initial() -> tuple[Any, Any]:
    """The state of `trained`."""
    params = Dense50().init(jax.random.key(0), BATCH)
    return params, optax.adam(1e-3).init(params)


CONTESTS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "dict": (added, nested), "nnx": (updated, lambda: (Model(),)), "linen": (trained, initial),
}  # fmt: skip
"""Steps, and what makes their states."""


def measure(case: str, repetitions: int = 9, rounds: int = 200) -> Row:
    """Microseconds of a call, and how many more ours takes (the module's docstring says how).

    Args:
      repetitions: how often the contestants are made.
      rounds: how often each is called.
    """
    name, devices = case.removesuffix(" devices").split(", ")
    step, make = CONTESTS[name]
    method: Any = DataParallel() if name == "linen" else Manual({"*": P("d")}, (int(devices),), ("d",))
    ours = parallelize(step, cluster=Cluster.local(jax.devices()[: int(devices)]), method=method)
    *state, batch = ours.place(*make(), BATCH)
    wrap: Any = functools.partial(jax.jit, donate_argnums=tuple(range(len(state))))
    if name == "nnx":
        wrap = functools.partial(nnx.jit, donate_argnums=0)
    else:
        inputs, outputs = ours.shardings(*make(), BATCH)
        wrap = functools.partial(wrap, in_shardings=inputs, out_shardings=outputs)

    def contestant(run: Any) -> Callable[[], Any]:
        """Calls a step on the state that it returned last."""
        state: Any = ours.place(*make(), BATCH)[:-1]
        if name == "nnx":
            return lambda: run(*state, batch)

        def call() -> Any:
            nonlocal state
            *state, rest = run(*state, batch)
            return rest

        return call

    found = []
    for seed in range(repetitions):
        # Each `jit` wraps a function of its own, so that it shares no executable with another one.
        runs = {"ours": ours} | {name: wrap(functools.wraps(step)(lambda *args: step(*args))) for name in JITTED}
        found.append(_medians({name: contestant(run) for name, run in runs.items()}, rounds, seed))

    def more(name: str, clock: int) -> list[float]:
        return [1e6 * (medians[name][clock] - medians["jit"][clock]) for medians in found]

    return {
        "ours_us": round(1e6 * statistics.median(medians["ours"][0] for medians in found), 1),
        "jit_us": round(1e6 * statistics.median(medians["jit"][0] for medians in found), 1),
        "more_us": round(statistics.median(more("ours", 0)), 1),
        "noise_us": round(statistics.median(more("jit again", 0)), 1),
        "more_cpu_us": round(statistics.median(more("ours", 1)), 1),
        "noise_cpu_us": round(statistics.median(more("jit again", 1)), 1),
        "more_us_of_each": [round(value) for value in more("ours", 0)],
        "noise_us_of_each": [round(value) for value in more("jit again", 0)],
    }


def _medians(calls: dict[str, Callable[[], Any]], rounds: int, seed: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each contestant's calls: by the clock, and of the calling thread."""
    for call in calls.values():
        for _ in range(5):
            jax.block_until_ready(call())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names = list(calls)
    gc.collect()
    gc.disable()
    order = random.Random(seed)
    for _ in range(rounds):
        order.shuffle(names)  # what runs before a call changes its time
        for name in names:
            start, busy = time.perf_counter(), time.thread_time()
            result = calls[name]()
            times[name].append((time.perf_counter() - start, time.thread_time() - busy))
            jax.block_until_ready(result)
    gc.enable()
    return {
        name: (statistics.median(wall for wall, _ in taken), statistics.median(cpu for _, cpu in taken))
        for name, taken in times.items()
    }


BENCHMARKS = (
    Benchmark(
        "overhead", lambda: [f"{name}, {count} devices" for count in (1, 8) for name in CONTESTS], measure, devices=8,
        versions=True, sources=("runtime", "alpa_lite/_jax", "alpa_lite/api.py"),
    ),
)  # fmt: skip
