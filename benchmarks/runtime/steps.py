"""Steps of several plans that take turns in one process on virtual CPU devices, beside what was predicted of them.

Turns, in random order, disturb all plans alike by what else the machine does. Virtual devices share the machine's
cores and have no network: seconds show the work done and the bytes copied, not what a cluster would gain; bytes per
device do not depend on that.

`by_hand`: plans against shardings that are written by hand (`hand_written.py`). Of each contestant the collectives of
the compiled program by kind, the compiler's own memory, the loss of three steps, and the seconds of a step.

`calibration`: ten steps are planned with the figures of `alpa-lite calibrate`. Spearman's rank correlation of the
predicted with the measured seconds says whether the order is right, with those figures and with the preset's.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from scipy import stats

import alpa_lite
from alpa_lite import models
from alpa_lite.calibration import measuring
from alpa_lite.calibration.fitting import Calibration
from alpa_lite.cluster import Cluster
from alpa_lite.ir import json_codec
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks.hlo_text import read_hlo
from alpa_lite.passes.checks.verification import memory_of
from benchmarks.harness import Benchmark, Row
from benchmarks.runtime import hand_written

DEVICES = 8
Model = tuple[str, int, Mapping[str, Any]]
"""A model's name, its batch and its sizes."""
Run = Callable[[], float]
"""Runs a step once more, waits for it, and returns its loss."""


def runner(call: Callable[..., Any], state: Any, *batch: Any) -> Run:
    """A function that replaces the state by that after one more step."""

    def advance() -> float:
        nonlocal state
        state, metrics = call(state, *batch)
        jax.block_until_ready((state, metrics))
        return float(metrics["loss"])

    return advance


def alternating(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, in turns of four of which the first does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, rng = list(runs), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            for number in range(4):
                start = time.perf_counter()
                runs[name]()
                times[name] += [time.perf_counter() - start] * (number > 0)
    return times


def built(model: Model) -> tuple[Any, Any]:
    """The step of a model and its arguments."""
    name, batch, sizes = model
    return models.get(name).build("tiny", batch, 0, **sizes)


def described(plan: Any) -> str:
    """The mesh or the stages of a plan."""
    if plan.is_pipelined:
        return f"{plan.num_stages} stages x {plan.num_microbatches}"
    return " x ".join(map(str, plan.stages[0].mesh_shape))


# -- by hand ----------------------------------------------------------------------------------------------------------

WIDE_MLP = {"inputs": 512, "hidden": 1024, "outputs": 512, "layers": 4}
BY_HAND: dict[str, Model] = {
    "gpt 2 x 128": ("gpt", 16, {}),
    "mlp 4 x 1024": ("mlp", 64, WIDE_MLP),
    "gpt 4 x 256": ("gpt", 16, {"vocab": 1024, "seq": 128, "hidden": 256, "layers": 4}),
}
METHODS = ("Auto()", "DataParallel()", "Zero(1)", "Zero(3)", "TensorParallel()")


def by_hand(name: str, rounds: int = 20) -> Row:
    """All contestants, each with the same initial state."""
    step, args = built(BY_HAND[name])
    rows: list[Row] = []
    runs: dict[str, Run] = {}
    for plan, (axes, *_) in hand_written.PLANS.items():
        jitted, *placed = hand_written.shard(step, plan, *args)
        compiled = jitted.lower(*placed).compile()
        rows.append({"contestant": f"hand: {plan}", "mesh": " x ".join(map(str, axes.values()))} | weigh(compiled))
        runs[rows[-1]["contestant"]] = runner(compiled, *placed)
    for method in METHODS:
        parallel = alpa_lite.parallelize(step, method=eval(method, dict(vars(alpa_lite))))
        plan = parallel.plan(*args)
        executable: Any = parallel.prepare_call(args, {})[1]
        contestant = f"alpa_lite: {method.removesuffix('()')}"
        rows.append({"contestant": contestant, "mesh": described(plan)} | weigh(*executable.compiled_executables()))
        rows[-1] |= {"predicted_bytes": plan.stages[0].memory.total, "predicted_seconds": plan.step_seconds}
        runs[contestant] = runner(executable, *executable.place(*args))
    losses = {name: [run() for _ in range(3)] for name, run in runs.items()}
    times = alternating(runs, rounds)
    for row in rows:
        own, base = times[row["contestant"]], times["alpa_lite: Auto"]
        row |= {
            "seconds": statistics.median(own), "fastest_seconds": min(own), "losses": losses[row["contestant"]],
            "times_auto": statistics.median(mine / other for mine, other in zip(own, base, strict=True)),
        }  # fmt: skip
    return {"rows": rows, "rounds": rounds}


def weigh(compiled: Any) -> Row:
    """The compiled collectives by kind ("count", "bytes" per device and step), and the peak bytes per device."""
    kinds: dict[str, dict[str, int]] = {}
    for c in read_hlo(compiled.as_text(), LogicalMesh((DEVICES,), ("devices",))).collectives:
        entry = kinds.setdefault(c.kind, {"count": 0, "bytes": 0})
        entry["count"] += c.count
        entry["bytes"] += c.bytes * c.count
    memory = memory_of(compiled)
    total = sum(kind["bytes"] for kind in kinds.values())
    return {"collectives": kinds, "collective_bytes": total, "peak_bytes": None if memory is None else memory.peak}


# -- calibrated -------------------------------------------------------------------------------------------------------

MLP: Model = ("mlp", 256, WIDE_MLP)
DEEP: Model = ("mlp", 1024, {"inputs": 256, "hidden": 256, "outputs": 256, "layers": 8})
GPT: Model = ("gpt", 32, {"layers": 4})
CALIBRATED: dict[str, tuple[Model, Any, int | str]] = {
    "MLP 4 x 1024, data parallel": (MLP, alpa_lite.DataParallel(), "auto"),
    "MLP 4 x 1024, ZeRO-3": (MLP, alpa_lite.Zero(3), "auto"),
    "MLP 4 x 1024, tensor parallel": (MLP, alpa_lite.TensorParallel(), "auto"),
    "MLP 4 x 1024, auto": (MLP, alpa_lite.Auto(), "auto"),
    "MLP 8 x 256, data parallel": (DEEP, alpa_lite.DataParallel(), "auto"),
    "MLP 8 x 256, sharded 2 x 4": (DEEP, alpa_lite.Sharded((2, 4)), "auto"),
    "MLP 8 x 256, pipeline of 4": (DEEP, alpa_lite.Pipeline(num_stages=4), 8),
    "GPT 4 x 128, auto": (GPT, alpa_lite.Auto(), "auto"),
    "GPT 4 x 128, tensor parallel": (GPT, alpa_lite.TensorParallel(), "auto"),
    "GPT 4 x 128, pipeline of 2": (GPT, alpa_lite.Pipeline(num_stages=2), 4),
}


def calibrated(case: str, calibration: str | None = None, seconds: float = 60.0, rounds: int = 15) -> Row:
    """Calibrates, unless a file of `alpa-lite calibrate` is given, and times the ten plans."""
    found = Calibration.load(calibration) if calibration else measuring.calibrate(DEVICES, seconds=seconds)
    rows, runs = [], {}
    for name, (model, method, microbatches) in CALIBRATED.items():
        fun, args = built(model)
        options: dict[str, Any] = {"num_microbatches": microbatches, "verify": "off"}
        step = alpa_lite.parallelize(fun, method=method, cluster=found.cluster, **options)
        plan = step.plan(*args)
        usual = Cluster.local(jax.devices()[: found.cluster.num_devices], calibration=None)
        preset = alpa_lite.make_plan(fun, *args, cluster=usual, plan=plan, verify="off")
        runs[name] = runner(step, *step.place(*args))
        rows.append({
            "plan": name, "mesh": described(plan), "predicted_ms": 1e3 * plan.step_seconds,
            "preset_ms": 1e3 * preset.step_seconds,
        })  # fmt: skip
    for row, own in zip(rows, alternating(runs, rounds).values(), strict=True):
        row |= {"measured_ms": 1e3 * statistics.median(own), "least_ms": 1e3 * min(own)}
    ranks = {"calibrated": ("predicted_ms", "measured_ms"), "preset": ("preset_ms", "measured_ms"),
             "calibrated, least times": ("predicted_ms", "least_ms")}  # fmt: skip
    return {
        "calibration": {"date": found.date, "seconds": found.seconds, "samples": len(found.samples)},
        "fits": [json_codec.encode_fields(fit) for fit in found.fits],
        "rank_correlation": {name: rank(rows, *columns) for name, columns in ranks.items()},
        "rows": sorted(rows, key=lambda row: row["measured_ms"]), "rounds": rounds,
    }  # fmt: skip


def rank(rows: list[Row], one: str, other: str) -> float:
    """Spearman's correlation of two columns."""
    ranks = [stats.rankdata([row[name] for row in rows]) for name in (one, other)]
    return float(np.corrcoef(ranks)[0, 1])


BENCHMARKS = (
    Benchmark("by_hand", lambda: BY_HAND, by_hand, devices=DEVICES),
    Benchmark("calibration", lambda: ["ten plans"], calibrated, devices=DEVICES),
)  # fmt: skip
