"""What a call with 300 leaves costs more than under `jax.jit` or `nnx.jit` with equal shardings and donation.

Two steps are nearly empty, so that what is timed is the call: from calling until it returns, without waiting for the
devices, which are idle at every start. The third, "linen", is a train step as users have it, planned as they plan it:
50 layers of linen, Adam of Optax with its tuples, 302 leaves; its devices compute for as long as the call takes.

The contestants take turns in one process, in random order: ours, called as `parallelize` returns it, the `jit`, and the
`jit` again, compiled anew. Each has a state and an executable of its own: two that shared one would find it in the
caches of the cores more often than the third finds its own, which makes 80 us on eight devices.

Where its 300 arrays happen to lie in memory makes a call up to 100 us faster or slower, so all is repeated with fresh
states. `more_us` is the median over the repetitions of the difference of the medians, `more_us_of_each` are these
differences, and `noise_us` is what the `jit` again makes of it. The devices of a CPU compete with the call for its
cores; `more_cpu_us` is the difference in time that the calling thread was running.

    python benchmarks/overhead.py

writes benchmarks/results/overhead.json, each row with the load of the machine before it; rows of contests that are not
named stay. Run it on an idle machine: the numbers are tens of microseconds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
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

Calls = dict[str, Callable[[], Any]]
LAYERS = 100  # of three leaves each
RESULTS = Path(__file__).parent / "results" / "overhead.json"


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--contests", nargs="*", default=list(CONTESTS), choices=list(CONTESTS))
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(arguments.devices))
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    version = known.setdefault(f"jax {jax.__version__}", {"rows": []})
    version["machine"] = {
        "python": platform.python_version(),
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
    }
    for devices, name in itertools.product(arguments.devices, arguments.contests):
        row = {"arguments": name, "devices": devices, "load": os.getloadavg()[0]}
        contest = CONTESTS[name](mesh_of(LogicalMesh((devices,), ("d",))))
        row |= measure(contest, arguments.repetitions, arguments.rounds)
        print(row)
        others = [one for one in version["rows"] if (one["arguments"], one["devices"]) != (name, devices)]
        version["rows"] = [*others, row]
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def measure(contest: Callable[[], Calls], repetitions: int, rounds: int) -> dict[str, Any]:
    """Microseconds of a call, and how many more ours takes (the module's docstring says how).

    Args:
      contest: makes the contestants, each with a state of its own.
      repetitions: how often they are made.
      rounds: how often each is called.
    """
    found = [_medians(contest(), rounds, seed) for seed in range(repetitions)]

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


def _medians(calls: Calls, rounds: int, seed: int) -> dict[str, tuple[float, float]]:
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


def dict_contest(mesh: Any) -> Callable[[], Calls]:
    """A state in nested dicts, as Flax linen has them, and a placed batch."""

    def step(state: Any, batch: Any) -> Any:
        total = batch.sum()
        return jax.tree.map(lambda leaf: leaf + total, state), total

    def jitted() -> Any:
        own = functools.wraps(step)(lambda state, batch: step(state, batch))
        return jax.jit(own, donate_argnums=0, in_shardings=shardings, out_shardings=outputs)

    def make() -> Any:
        layer = {"attention": {"kernel": np.ones((8, 8), np.float32), "bias": np.ones(8, np.float32)}}
        return {f"layer_{i}": layer | {"norm": {"scale": np.ones(8, np.float32)}} for i in range(LAYERS)}

    ours, place, shardings, batch = parallel(mesh, step, make(), np.ones((8, 8), np.float32))
    outputs = (shardings[0], NamedSharding(mesh, P()))

    def contestant(run: Any) -> Callable[[], Any]:
        state = place(make(), batch)[0]

        def call() -> Any:
            nonlocal state
            state, total = run(state, batch)
            return total

        return call

    return lambda: {"ours": contestant(ours), "jit": contestant(jitted()), "jit again": contestant(jitted())}


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


def nnx_contest(mesh: Any) -> Callable[[], Calls]:
    """A model that the step updates in place."""

    def step(model: Any, batch: Any) -> Any:
        total = batch.sum()
        nnx.update(model, jax.tree.map(lambda leaf: leaf + total, nnx.state(model)))
        return total

    ours, place, _, batch = parallel(mesh, step, Model(), np.ones((8, 8), np.float32))

    def jitted() -> Any:
        return nnx.jit(functools.wraps(step)(lambda model, batch: step(model, batch)), donate_argnums=0)

    def contestant(run: Any) -> Callable[[], Any]:
        model = place(Model(), batch)[0]
        return lambda: run(model, batch)

    return lambda: {"ours": contestant(ours), "jit": contestant(jitted()), "jit again": contestant(jitted())}


class Dense50(linen.Module):
    """50 layers of two leaves."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(50):
            x = linen.tanh(linen.Dense(features=8)(x))
        return x


def linen_contest(mesh: Any) -> Callable[[], Calls]:
    """A train step as users have it: parameters, Adam's moments and its count, planned."""
    model, optimizer, batch = Dense50(), optax.adam(1e-3), np.ones((8, 8), np.float32)

    def loss_of(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(jnp.asarray(model.apply(params, batch))))

    def step(params: Any, moments: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def make() -> Any:
        params = model.init(jax.random.key(0), batch)
        return params, optimizer.init(params)

    ours = parallelize(step, cluster=Cluster.local(list(mesh.devices.flat)), method=DataParallel())
    shardings, outputs = ours.shardings(*make(), batch)
    placed = ours.place(*make(), batch)[-1]

    def jitted() -> Any:
        own = functools.wraps(step)(lambda params, moments, batch: step(params, moments, batch))
        return jax.jit(own, donate_argnums=(0, 1), in_shardings=shardings, out_shardings=outputs)

    def contestant(run: Any) -> Callable[[], Any]:
        params, moments, _ = ours.place(*make(), batch)

        def call() -> Any:
            nonlocal params, moments
            params, moments, loss = run(params, moments, placed)
            return loss

        return call

    return lambda: {"ours": contestant(ours), "jit": contestant(jitted()), "jit again": contestant(jitted())}


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

if __name__ == "__main__":
    main()
