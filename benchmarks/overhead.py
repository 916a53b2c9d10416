"""What a call with 300 leaves costs more than under `jax.jit` or `nnx.jit` with equal shardings and donation.

The step is nearly empty, so that what is timed is the call: from calling until it returns, without waiting for the
devices, which are idle at every start. The contestants take turns in one process, in random order; the result is the
difference of the medians. `noise_us` is that difference between two identical `jit`s.

    python benchmarks/overhead.py --rounds 1500

writes benchmarks/results/overhead.json. Run it on an idle machine: the numbers are tens of microseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.evaluation import evaluate_block
from alpa_lite.passes.tracing import trace
from alpa_lite.runtime.executor import Executable, mesh_of

LAYERS = 100  # of three leaves each
RESULTS = Path(__file__).parent / "results" / "overhead.json"


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 8])
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(arguments.devices))
    rows = []
    for devices in arguments.devices:
        mesh = mesh_of(LogicalMesh((devices,), ("d",)))
        for name, contest in (("dict", dict_contest), ("nnx", nnx_contest)):
            rows.append({"arguments": name, "devices": devices, **measure(contest(mesh), arguments.rounds)})
            print(rows[-1])
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {
        "python": platform.python_version(),
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "leaves": 3 * LAYERS,
    }
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[f"jax {jax.__version__}"] = {"machine": machine, "rows": rows}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def measure(contest: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median microseconds of each contestant's call; differences, also of 10th percentiles (less moved by load)."""
    for call in contest.values():
        for _ in range(5):
            jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in contest}
    names = list(contest)
    gc.collect()
    gc.disable()
    order = random.Random(0)
    for _ in range(rounds):
        order.shuffle(names)  # what runs before a call changes its time
        for name in names:
            start = time.perf_counter()
            result = contest[name]()
            times[name].append(time.perf_counter() - start)
            jax.block_until_ready(result)
    gc.enable()
    medians = {name: 1e6 * statistics.median(found) for name, found in times.items()}
    ours, theirs = medians["ours"], medians["jit"]
    return {
        **{f"{name}_us": round(value, 1) for name, value in medians.items()},
        "more_us": round(ours - theirs, 1),
        "noise_us": round(medians["jit again"] - theirs, 1),
        "more_p10_us": round(1e6 * float(np.percentile(times["ours"], 10) - np.percentile(times["jit"], 10)), 1),
    }


def dict_contest(mesh: Any) -> dict[str, Callable[[], Any]]:
    """A state in nested dicts, as Flax linen has them, and a placed batch."""

    def step(state: Any, batch: Any) -> Any:
        total = batch.sum()
        return jax.tree.map(lambda leaf: leaf + total, state), total

    def make() -> Any:
        layer = {"attention": {"kernel": np.ones((8, 8), np.float32), "bias": np.ones(8, np.float32)}}
        return {f"layer_{i}": layer | {"norm": {"scale": np.ones(8, np.float32)}} for i in range(LAYERS)}

    ours, shardings, batch = executable(mesh, step, make(), np.ones((8, 8), np.float32))
    outputs = (shardings[0], NamedSharding(mesh, P()))

    def jitted() -> Any:
        return jax.jit(partial(step), donate_argnums=0, in_shardings=shardings, out_shardings=outputs)

    def contestant(run: Any) -> Callable[[], Any]:
        state = ours.place(make(), batch)[0]

        def call() -> Any:
            nonlocal state
            state, total = run(state, batch)
            return total

        return call

    return {"ours": contestant(ours), "jit": contestant(jitted()), "jit again": contestant(jitted())}


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


def nnx_contest(mesh: Any) -> dict[str, Callable[[], Any]]:
    """A model that the step updates in place."""

    def step(model: Any, batch: Any) -> Any:
        total = batch.sum()
        nnx.update(model, jax.tree.map(lambda leaf: leaf + total, nnx.state(model)))
        return total

    ours, _, batch = executable(mesh, step, Model(), np.ones((8, 8), np.float32))

    def jitted() -> Any:
        return nnx.jit(partial(step), donate_argnums=0)

    def contestant(run: Any) -> Callable[[], Any]:
        model = ours.place(Model(), batch)[0]
        return lambda: run(model, batch)

    return {"ours": contestant(ours), "jit": contestant(jitted()), "jit again": contestant(jitted())}


def executable(mesh: Any, step: Callable[..., Any], state: Any, batch: Any) -> tuple[Executable, Any, Any]:
    """The executor on a step, with every array sharded by its leading dim, and the shardings of (state, batch)."""
    traced = trace(step, (state, batch), {})
    inputs = [P("d")] * len(traced.arguments)
    outputs = [P("d") if output.role == "state" else P() for output in traced.outputs]
    run = Executable(traced, lambda *leaves: evaluate_block(traced.graph.block, leaves), mesh, inputs, outputs)
    sharding = NamedSharding(mesh, P("d"))
    return run, (jax.tree.map(lambda _: sharding, state), sharding), jax.device_put(batch, sharding)


if __name__ == "__main__":
    main()
