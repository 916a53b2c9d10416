"""Whether a tiny model gets a pipeline that is slower than one mesh: what Auto() takes, and what the two take when run.

Each model is planned by Auto(), on one mesh, and as a pipeline of two stages and four micro-batches, for eight virtual
CPU devices. The two last are run in turn. A row is wrong if Auto() takes a pipeline and one mesh is faster.

    python benchmarks/tiny_pipelines.py

writes benchmarks/results/tiny_pipelines.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import jax
from step_times import Run, alternating, timed

import alpa_lite
from alpa_lite import models

RESULTS = Path(__file__).parent / "results" / "tiny_pipelines.json"
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mlp 3 x 64": ("mlp", 64, {}),
    "mlp 4 x 180": ("mlp", 64, {"inputs": 180, "hidden": 180, "outputs": 180, "layers": 4}),
    "mlp 8 x 64": ("mlp", 64, {"inputs": 64, "outputs": 64, "layers": 8}),
    "gpt 2 x 128": ("gpt", 16, {}),
}


def main() -> None:
    """Plans, measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry-run", action="store_true", help="print only")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for name, case in CASES.items():
        rows.append({"model": name, **compared(*case, arguments.rounds)})
        print(rows[-1], flush=True)
    result = {"jax": jax.__version__, "cores": os.cpu_count(), "load": os.getloadavg()[0], "rows": rows}
    if not arguments.dry_run:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def compared(model: str, batch: int, sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """What Auto() takes, and the predicted and measured milliseconds of one mesh and of a pipeline."""
    fun, args = models.get(model).build("tiny", batch, 0, **sizes)
    auto = alpa_lite.parallelize(fun, verify="off").plan(*args)
    row: dict[str, Any] = {"auto": f"{auto.num_stages} stages" if auto.pipelined else "one mesh"}
    runs: dict[str, Run] = {}
    contestants: dict[str, dict[str, Any]] = {
        "mesh": {"method": alpa_lite.Sharded()},
        "pipeline": {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 4},
    }
    for name, options in contestants.items():
        step = alpa_lite.parallelize(fun, verify="off", **options)
        row[f"{name}_predicted_ms"] = 1e3 * step.plan(*args).step_seconds
        runs[name] = timed(step, list(step.place(*args)))
    times = alternating(runs, rounds)
    row |= {f"{name}_measured_ms": 1e3 * statistics.median(own) for name, own in times.items()}
    row["ratio"] = row["pipeline_measured_ms"] / row["mesh_measured_ms"]
    return row


if __name__ == "__main__":
    main()
