"""Pipelines in predictions: what Auto chooses against every fixed method, and how long a large pipeline takes to plan.

Part "choices": predicted seconds of a step for each method on each case; "-" where nothing fits or the batch does not
divide. Auto must be at most the best of them; a row where it is not is marked WORSE, and by how much. All seconds are
predictions of one cost model.

Part "planning": `make_plan` of GPT-39B (48 layers, hidden 8192, unrolled, float16) on 8 nodes of 8 V100, in this
process: stages, submeshes, schedule, rematerialisation and shardings are searched, and the plan is verified. Wall and
CPU seconds. Alpa reports 2,393 s for a model of this size on this cluster, its profiling of stages included.

    python benchmarks/pipelines.py choices
    python benchmarks/pipelines.py planning

write benchmarks/results/pipelines.json and pipelines.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import alpa_lite
from alpa_lite import models
from alpa_lite.errors import AlpaLiteError

RESULTS = Path(__file__).parent / "results"
METHODS = {
    "DataParallel": alpa_lite.DataParallel(),
    "Zero(3)": alpa_lite.Zero(3),
    "TensorParallel": alpa_lite.TensorParallel(),
    "Sharded": alpa_lite.Sharded(),
    "Pipeline": alpa_lite.Pipeline(),
    "Auto": alpa_lite.Auto(),
}


@dataclass(frozen=True)
class Case:
    """A model at a size with its batch, and a cluster."""

    model: str
    size: str
    batch: int
    cluster: str
    nodes: int
    overrides: dict[str, Any] = field(default_factory=dict)


HALF = {"dtype": jnp.float16}
CASES = {
    "fits one node": Case("gpt", "small", 64, "a100", 1),
    "fits, fast links": Case("gpt", "small", 256, "h100", 2),
    "slow links": Case("gpt", "small", 64, "p3.16xlarge", 2, HALF),
    "slow links, large": Case("gpt", "1.3B", 256, "p3.16xlarge", 2, HALF),
    "little memory": Case("gpt", "2.6B", 256, "p3.16xlarge", 1, HALF),
}
LARGE = Case("gpt", "39B", 1024, "p3.16xlarge", 8, HALF)


def main() -> None:
    """Runs one part and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("choices", "planning"))
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--microbatches", type=int, help="of the large pipeline; searched if not given")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    path = RESULTS / "pipelines.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    RESULTS.mkdir(exist_ok=True)

    def write() -> None:
        path.write_text(json.dumps(known, indent=1) + "\n")
        (RESULTS / "pipelines.md").write_text(table(known))

    if arguments.part == "planning":
        known["planning"] = planning("auto" if arguments.microbatches is None else arguments.microbatches)
        write()
        return
    for name in arguments.cases:
        known.setdefault("choices", {})[name] = compare(CASES[name])
        print(name, known["choices"][name]["verdict"], flush=True)
        write()


def planned(case: Case, method: Any, **options: Any) -> alpa_lite.Plan:
    """The plan of a case."""
    fun, args = models.get(case.model).abstract(case.size, case.batch, **case.overrides)
    cluster = alpa_lite.Cluster.preset(case.cluster, nodes=case.nodes)
    return alpa_lite.make_plan(fun, *args, cluster=cluster, method=method, **options)


def compare(case: Case) -> dict[str, Any]:
    """Predicted seconds of every method."""
    seconds: dict[str, float | None] = {}
    chosen = ""
    start = time.perf_counter()
    for name, method in METHODS.items():
        try:
            plan = planned(case, method, verify="off")
        except AlpaLiteError:
            seconds[name] = None
            continue
        seconds[name] = plan.step_seconds
        chosen = describe(plan)
    return {
        "case": f"{case.model} {case.size}, batch {case.batch}, {case.nodes} x 8 {case.cluster}",
        "seconds": seconds,
        "chosen": chosen,
        "verdict": verdict(seconds),
        "planning_seconds": time.perf_counter() - start,
        **environment(),
    }


def verdict(seconds: dict[str, float | None]) -> str:
    """Whether Auto is as fast as the best method, and by how much it is not."""
    auto, best = seconds["Auto"], min((s for s in seconds.values() if s is not None), default=math.inf)
    if auto is None:
        return "nothing fits" if math.isinf(best) else "WORSE: nothing found"
    return "at most the best" if auto <= best * (1 + 1e-9) else f"WORSE by {auto / best - 1:.2%}"


def planning(num_microbatches: int | Literal["auto"]) -> dict[str, Any]:
    """How long the large pipeline takes to plan."""
    fun, args = models.get(LARGE.model).abstract(LARGE.size, LARGE.batch, **LARGE.overrides)
    cluster = alpa_lite.Cluster.preset(LARGE.cluster, nodes=LARGE.nodes)
    start, cpu = time.perf_counter(), time.process_time()
    plan = alpa_lite.make_plan(
        fun, *args, cluster=cluster, method=alpa_lite.Pipeline(),
        num_microbatches=num_microbatches,
    )  # fmt: skip
    return {
        "case": f"gpt {LARGE.size}, batch {LARGE.batch}, {LARGE.nodes} x 8 {LARGE.cluster}",
        "asked_microbatches": num_microbatches,
        "wall_seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "parts": plan.planning_seconds,
        "chosen": describe(plan),
        "step_seconds": plan.step_seconds,
        "bytes_per_device": max(stage.memory.total for stage in plan.stages),
        "verification": plan.verification,
        **environment(),
    }


def describe(plan: alpa_lite.Plan) -> str:
    """What a plan consists of, in a few words."""
    if not plan.pipelined:
        shape = " x ".join(map(str, plan.stages[0].mesh_shape))
        parts = f", {plan.num_microbatches} micro-batches" if plan.num_microbatches > 1 else ""
        return f"one mesh {shape}{parts}"
    return f"{plan.num_stages} stages, {plan.num_microbatches} micro-batches, {plan.schedule}"


def environment() -> dict[str, Any]:
    """When and where a row was made."""
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def table(known: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["# Pipelines", "", "Predicted; `python benchmarks/pipelines.py` says what is measured.", ""]
    rows = known.get("choices", {})
    if rows:
        lines += ["Predicted milliseconds of a step:", ""]
        lines += [
            f"| case | | {' | '.join(METHODS)} | Auto chose | |",
            "|---|---|" + "--:|" * len(METHODS) + "---|---|",
        ]
        for name, row in rows.items():
            cells = ["-" if s is None else f"{1e3 * s:.1f}" for s in (row["seconds"].get(m) for m in METHODS)]
            lines.append(f"| {name} | {row['case']} | {' | '.join(cells)} | {row['chosen']} | {row['verdict']} |")
        lines.append("")
    large = known.get("planning")
    if large:
        parts = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in large["parts"].items())
        lines += [
            f"Planning {large['case']}: {large['wall_seconds']:.1f} s wall, {large['cpu_seconds']:.1f} s CPU, "
            f"{large['peak_gib']:.1f} GiB ({parts}); the target is 30 s. It found {large['chosen']}, predicted at "
            f"{large['step_seconds']:.1f} s a step and {large['bytes_per_device'] / 1e9:.1f} GB a device.",
            "",
        ]
    found = [*rows.values(), *([large] if large else [])]
    lines.append(
        f"Made {', '.join(sorted({r['date'] for r in found}))} with JAX {', '.join({r['jax'] for r in found})}."
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
