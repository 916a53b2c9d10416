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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite import Cluster, DataParallel, parallelize
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.ir.evaluation import evaluate_block
from alpa_lite.passes.tracing.tracing import trace
from alpa_lite.runtime.meshes import mesh_of
from alpa_lite.runtime.single import SingleExecutable
from benchmarks.harness import Benchmark, Row, Rows, by_variant, table

Contest = tuple[Any, Callable[[], Any], Callable[[Any], Callable[[], Any]]]
"""Our step, a maker of a `jit` of its own, and a maker of a contestant of either, with a state of its own."""
LAYERS = 100  # of three leaves each
BATCH = np.ones((8, 8), np.float32)


def measure(case: str, repetitions: int = 9, rounds: int = 200) -> Row:
    """Microseconds of a call, and how many more ours takes (the module's docstring says how).

    Args:
      repetitions: how often the contestants are made.
      rounds: how often each is called.
    """
    name, _, devices = case.partition(", ")
    ours, jitted, contestant = CONTESTS[name](mesh_of(LogicalMesh((int(devices.split()[0]),), ("d",))))
    found = []
    for seed in range(repetitions):
        calls = {"ours": ours, "jit": jitted(), "jit again": jitted()}
        found.append(_medians({name: contestant(call) for name, call in calls.items()}, rounds, seed))

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


def calling(run: Any, state: tuple[Any, ...], batch: Any) -> Callable[[], Any]:
    """A function that calls a step on the state that it returned last, and gives what else it returns."""

    def call() -> Any:
        nonlocal state
        *state, rest = run(*state, batch)  # type: ignore[assignment]
        return rest

    return call


def anew(wrap: Callable[..., Any], step: Callable[..., Any], **options: Any) -> Any:
    """A `jit` that shares no executable with another one of the same step."""
    return wrap(functools.wraps(step)(lambda *args: step(*args)), **options)


def dict_contest(mesh: Any) -> Contest:
    """A state in nested dicts, as Flax linen has them, and a placed batch."""

    def step(state: Any, batch: Any) -> Any:
        total = batch.sum()
        return jax.tree.map(lambda leaf: leaf + total, state), total

    def make() -> Any:
        layer = {"attention": {"kernel": np.ones((8, 8), np.float32), "bias": np.ones(8, np.float32)}}
        return {f"layer_{i}": layer | {"norm": {"scale": np.ones(8, np.float32)}} for i in range(LAYERS)}

    ours, place, shardings, batch = parallel(mesh, step, make(), BATCH)
    options: dict[str, Any] = {"in_shardings": shardings, "out_shardings": (shardings[0], NamedSharding(mesh, P()))}
    return (
        ours,
        lambda: anew(jax.jit, step, donate_argnums=0, **options),
        lambda run: calling(run, (place(make(), batch)[0],), batch),
    )


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


def nnx_contest(mesh: Any) -> Contest:
    """A model that the step updates in place."""

    def step(model: Any, batch: Any) -> Any:
        total = batch.sum()
        nnx.update(model, jax.tree.map(lambda leaf: leaf + total, nnx.state(model)))
        return total

    ours, place, _, batch = parallel(mesh, step, Model(), BATCH)

    def contestant(run: Any) -> Callable[[], Any]:
        model = place(Model(), batch)[0]
        return lambda: run(model, batch)

    return ours, lambda: anew(nnx.jit, step, donate_argnums=0), contestant


class Dense50(linen.Module):
    """50 layers of two leaves."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """[batch, features] to the same."""
        for _ in range(50):
            x = linen.tanh(linen.Dense(features=8)(x))
        return x


def linen_contest(mesh: Any) -> Contest:
    """A train step as users have it: parameters, Adam's moments and its count, planned."""
    model, optimizer = Dense50(), optax.adam(1e-3)

    def loss_of(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(jnp.asarray(model.apply(params, batch))))

    def step(params: Any, moments: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def make() -> Any:
        params = model.init(jax.random.key(0), BATCH)
        return params, optimizer.init(params)

    ours = parallelize(step, cluster=Cluster.local(list(mesh.devices.flat)), method=DataParallel())
    inputs, outputs = ours.shardings(*make(), BATCH)
    batch = ours.place(*make(), BATCH)[-1]
    return (
        ours,
        lambda: anew(jax.jit, step, donate_argnums=(0, 1), in_shardings=inputs, out_shardings=outputs),
        lambda run: calling(run, tuple(ours.place(*make(), BATCH)[:2]), batch),
    )


def parallel(mesh: Any, step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, Any, Any, Any]:
    """The step with every array sharded by its leading dim: the step, its `place`, the shardings, and a placed batch.

    Not planned, so that the shardings are the `jit`'s.
    """
    traced = trace(step, (state, batch), {})
    inputs = [P("d")] * len(traced.arguments)
    outputs = [P("d") if output.role == "state" else P() for output in traced.outputs]
    run = SingleExecutable(traced, lambda *leaves: evaluate_block(traced.graph.block, leaves), mesh, inputs, outputs)
    ours = parallelize(step)
    ours._current = run
    sharding = NamedSharding(mesh, P("d"))
    return ours, run.place, (jax.tree.map(lambda _: sharding, state), sharding), jax.device_put(batch, sharding)


CONTESTS = {"dict": dict_contest, "nnx": nnx_contest, "linen": linen_contest}


def page(rows: Rows) -> list[str]:
    """Microseconds of each version."""
    names = ("ours_us", "jit_us", "more_us", "noise_us", "more_cpu_us", "noise_cpu_us")
    lines = []
    for version, found in by_variant(rows).items():
        cells = [[case, *(row.get(name) for name in names)] for case, row in sorted(found.items())]
        lines += [f"## {version}", "", *table(f"arguments | {' | '.join(names)}", cells), ""]
    return lines[:-1]


BENCHMARKS = (
    Benchmark(
        "overhead", "The cost of a call beyond that of `jit`",
        "Microseconds of a call, and how many more ours takes; the noise is what a second `jit` takes more than the "
        "first. `benchmarks/runtime/calls.py` says how. Measure on an idle machine.",
        lambda: [f"{name}, {count} devices" for count in (1, 8) for name in CONTESTS], measure, page, devices=8,
        versions=True, sources=("runtime", "alpa_lite/_jax", "alpa_lite/api.py"),
    ),
)  # fmt: skip
