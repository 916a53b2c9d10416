"""What one device does: the rates that predictions rest on, and three train steps under plain `jit` and under plans.

    python benchmarks/on_device.py -o benchmarks/results/on_device.json               a GPU, at most 8 minutes
    python benchmarks/on_device.py --small -o /tmp/here.json                          the same program on a CPU

One command, no network; the output is one JSON file, which is written anew after each part, so that a run that is cut
off keeps what it has. The parts, the most important first:

    products    seconds of products by shape, by themselves, and FLOP/s of a large one second by second for 60 s
    kernels     seconds that a kernel takes to start, in a chain within one program and in calls of their own
    copies      bytes/s of an elementwise operation by size of the array
    attention   seconds of cuDNN's passes by length and direction, and their share of the peak
    steps       three models: seconds a step under plain `jit` and under `parallelize`, what a call costs more, and
                predicted against measured seconds, with the preset and with the rates found above, and memory

Without a GPU, attention runs by XLA's operations, sizes are small, and figures mean nothing but that the program works.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite
from alpa_lite import models
from alpa_lite.calibration import fitting, measuring
from alpa_lite.calibration.samples import PASSES, Sample
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.costs.attention import pairs

Found = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      products: dtype and (m, n, k). sustained: seconds of the largest.
      arrays: bytes. lengths: tokens of sequences, `tokens` in all.
      steps: model, size, batch and overrides. rounds: timed steps.
    """

    products: tuple[tuple[str, tuple[int, int, int]], ...]
    sustained: float
    arrays: tuple[int, ...]
    lengths: tuple[int, ...]
    tokens: int
    steps: tuple[tuple[str, str, int, Mapping[str, Any]], ...]
    rounds: int


LARGE = Sizes(
    products=tuple(
        (dtype, shape)
        for dtype in ("bf16", "f32")
        for shape in (*((n, n, n) for n in (512, 1024, 2048, 4096, 8192)), (16384, 4096, 4096), (8192, 1024, 4096))
    ),
    sustained=60.0,
    arrays=(2**20, 2**24, 2**27, 2**30),
    lengths=(512, 1024, 2048, 4096, 8192, 16384),
    tokens=32768,
    steps=(
        ("gpt", "350M", 16, {"seq": 1024}),
        ("llama", "8B", 2, {"seq": 4096, "layers": 4}),
        ("wide_resnet", "250M", 64, {}),
    ),
    rounds=20,
)
SMALL = Sizes(
    products=(("f32", (128, 128, 128)), ("bf16", (128, 128, 128))), sustained=0.3, arrays=(2**16, 2**20),
    lengths=(16, 64), tokens=64, steps=(("gpt", "tiny", 8, {}), ("llama", "tiny", 8, {}), ("mlp", "tiny", 8, {})),
    rounds=3,
)  # fmt: skip
HEADS, FEATURES = 16, 128


def main() -> None:
    """Measures, and writes what was found after each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--seconds", type=float, default=450.0, help="no part begins later than that")
    arguments = parser.parse_args()
    measure(SMALL if arguments.small else LARGE, arguments.output, arguments.seconds)


def measure(sizes: Sizes, output: Path, limit: float) -> Found:
    """All parts, each written when it is done; a part that fails is written with its error."""
    start = time.perf_counter()
    device = jax.devices()[0]
    found: Found = {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}
    found["date"] = time.strftime("%Y-%m-%d")
    cluster = Cluster.local([device], calibration=None)
    parts: dict[str, Callable[[], Found]] = {
        "products": lambda: products(sizes, device, cluster),
        "kernels": lambda: kernels(device),
        "copies": lambda: copies(sizes, device, cluster),
        "attention": lambda: attention(sizes, device, cluster),
    }
    for number, (model, size, batch, overrides) in enumerate(sizes.steps):
        parts[f"step {number}"] = lambda m=model, s=size, b=batch, o=overrides: step(m, s, b, o, sizes, found, cluster)
    for name, part in parts.items():
        if time.perf_counter() - start > limit:
            found[name] = {"error": "there was no time left"}
        else:
            began = time.perf_counter()
            try:
                found[name] = part()
            except Exception as error:  # the other parts are worth having
                found[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
            found[name]["took"] = time.perf_counter() - began
        output.write_text(json.dumps(found, indent=1, default=float) + "\n")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    return found


def seconds(sample: Sample, device: Any) -> float:
    """The lower quartile of some timings."""
    return quartile(measuring.case(sample, [device], None, ()))


def quartile(timed: Callable[[], float]) -> float:
    """The lower quartile of some timings."""
    return float(np.quantile([timed() for _ in range(8)], 0.25))


def products(sizes: Sizes, device: Any, cluster: Cluster) -> Found:
    """Products by themselves, predicted and measured, and a large one for a minute."""
    cost = MeshCost(cluster, LogicalMesh((1,), ("x",)))
    rows = []
    for dtype, shape in sizes.products:
        taken = seconds(Sample("product", shape, dtype=dtype), device)
        guess = cost.matmul(*shape, 1, dtype, fitting._ITEMSIZE[dtype])
        work = 2.0 * np.prod([float(n) for n in shape])
        rows.append({"dtype": dtype, "shape": shape, "seconds": taken, "predicted": guess, "flops": work / taken})
    largest = max((shape for dtype, shape in sizes.products if dtype == "bf16"), key=lambda shape: np.prod(shape))
    once = measuring.case(Sample("product", largest, dtype="bf16"), [device], None, ())
    start, trace = time.perf_counter(), []
    while time.perf_counter() - start < sizes.sustained:
        work = 2.0 * np.prod([float(n) for n in largest])
        trace.append((time.perf_counter() - start, work / max(once(), 1e-12)))
    tail = [rate for at, rate in trace if at > sizes.sustained / 2] or [trace[-1][1]]
    own = next(row["flops"] for row in rows if row["shape"] == largest and row["dtype"] == "bf16")
    return {
        "rows": rows, "trace": trace[:: max(1, len(trace) // 120)], "shape": largest,
        "sustained": statistics.median(tail), "sustained_efficiency": min(1.0, statistics.median(tail) / own),
        "share_of_peak": statistics.median(tail) / cluster.peak("bf16"),
    }  # fmt: skip


def kernels(device: Any) -> Found:
    """The start of a kernel within a program, and of a program of one kernel."""
    chain = {count: seconds(Sample("kernel", (count,)), device) for count in (16, 256)}
    x = jax.device_put(np.ones(256, np.float32), device)
    call = jax.jit(lambda x: x * 0.999 + 0.001)
    call(x).block_until_ready()

    def calls(count: int = 200) -> float:
        start, y = time.perf_counter(), x
        for _ in range(count):
            y = call(y)
        y.block_until_ready()
        return (time.perf_counter() - start) / count

    return {"within a program": chain, "calls of their own": quartile(calls)}


def copies(sizes: Sizes, device: Any, cluster: Cluster) -> Found:
    """Bytes/s of reading and writing an array."""
    rows = []
    for size in sizes.arrays:
        taken = seconds(Sample("elementwise", (size,)), device)
        rate = 2 * size / taken
        rows.append({"bytes": size, "seconds": taken, "rate": rate, "share": rate / cluster.memory_bandwidth})
    return {"rows": rows}


def attention(sizes: Sizes, device: Any, cluster: Cluster) -> Found:
    """Seconds of both passes by length; the backward pass less the forward pass that it runs, too."""
    implementation = "cudnn" if device.platform == "gpu" else "xla"
    rows = []
    for tokens in sizes.lengths:
        shape = (max(1, sizes.tokens // tokens), tokens, HEADS, FEATURES)
        taken = {}
        for kind in PASSES:
            sample = Sample("attention", shape, dtype="bf16", kind=kind)
            taken[kind] = quartile(measuring._loop([device], None, *measuring.attention(sample, implementation)))
        taken["backward"] -= taken["forward"]
        work = shape[0] * HEADS * FEATURES * pairs(tokens, tokens, causal=True)
        share = {
            kind: count * work / taken[kind] / cluster.peak("bf16") for kind, count in zip(PASSES, (4, 10), strict=True)
        }
        rows.append({"tokens": tokens, "seconds": taken, "share_of_peak": share})
    return {"implementation": implementation, "rows": rows}


def step(
    name: str, size: str, batch: int, overrides: Mapping[str, Any], sizes: Sizes, found: Found, cluster: Cluster
) -> Found:
    """A train step under plain `jit` and under `parallelize`."""
    fun, (state, data) = models.get(name).build(size, batch, **overrides)
    out: Found = {"model": f"{name} {size}", "batch": batch}
    plain = jax.jit(fun, donate_argnums=0)
    compiled = plain.lower(state, data).compile()
    out["compiled_memory"] = compiled_bytes(compiled)
    out["jit"] = timed_steps(compiled, jax.tree.map(jnp.array, state), data, sizes.rounds)
    ours = alpa_lite.parallelize(fun, cluster=cluster)
    out["ours"] = timed_steps(ours, jax.tree.map(jnp.array, state), data, sizes.rounds)
    plan = ours.plan(state, data)
    out["predicted"], out["predicted_memory"] = plan.step_seconds, plan.stages[0].memory.total
    rates = measured_rates(found, cluster)
    again = alpa_lite.make_plan(fun, state, data, cluster=rates, verify="off")
    out["predicted with the rates found here"] = again.step_seconds
    stats = jax.devices()[0].memory_stats() or {}
    out["peak_bytes_in_use"] = stats.get("peak_bytes_in_use")
    out["overhead"] = out["ours"]["median"] / out["jit"]["median"] - 1
    out["predicted over measured"] = plan.step_seconds / out["ours"]["median"]
    return out


def compiled_bytes(compiled: Any) -> int | None:
    """Bytes of arguments, results that are no arguments, and temporaries."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + results + stats.temp_size_in_bytes


def timed_steps(call: Callable[..., Any], state: Any, data: Any, rounds: int) -> Found:
    """Seconds of a step: each awaited, and of many that are started one after another."""
    state, _ = call(state, data)
    jax.block_until_ready(state)
    each = []
    for _ in range(rounds):
        start = time.perf_counter()
        state, _ = call(state, data)
        jax.block_until_ready(state)
        each.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(rounds):
        state, _ = call(state, data)
    jax.block_until_ready(state)
    return {
        "median": statistics.median(each),
        "least": min(each),
        "started together": (time.perf_counter() - start) / rounds,
    }


def measured_rates(found: Found, cluster: Cluster) -> Cluster:
    """The cluster with the rates that were found, as far as they were."""
    changes: dict[str, Any] = {}
    made = found.get("products", {})
    if "sustained" in made:
        share = min(1.0, made["share_of_peak"])
        changes |= {"matmul_efficiency": share, "sustained_efficiency": 1.0}
    if "within a program" in found.get("kernels", {}):
        changes["kernel_start"] = min(found["kernels"]["within a program"].values())
    if rows := found.get("copies", {}).get("rows"):
        changes |= {"memory_bandwidth": rows[-1]["rate"], "memory_efficiency": 1.0}
    if found.get("attention", {}).get("implementation") == "cudnn":
        rows = found["attention"]["rows"]
        shares = [statistics.median(row["share_of_peak"][kind] for row in rows) for kind in PASSES]
        if all(0 < share <= 1 for share in shares):
            changes["attention_efficiency"] = {"cudnn": tuple(shares)}
    return dataclasses.replace(cluster, **changes)


if __name__ == "__main__":
    main()
