"""Whether calibrated predictions order plans as running them does: ten plans on eight virtual CPU devices.

The devices are calibrated (`alpa-lite calibrate`), ten steps are planned with the figures found, each is compiled, and
all are run in turn, a few steps each time, so that what else the machine does disturbs all of them. A step's time is
from its call until its results are there. Spearman's rank correlation of the predicted with the measured seconds says
whether the order is right; the same plans priced with the preset's figures are beside them.

    python benchmarks/calibration.py
    python benchmarks/calibration.py --calibration here.json     with the figures of a file

writes benchmarks/results/calibration.json and calibration.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import stats
from step_times import Run, alternating, timed

import alpa_lite
from alpa_lite import models
from alpa_lite.calibration import measuring
from alpa_lite.calibration.storing import Calibration
from alpa_lite.cluster import Cluster
from alpa_lite.options import Method
from alpa_lite.plan import json_codec

RESULTS = Path(__file__).parent / "results"

MLP = ("mlp", 256, {"inputs": 512, "hidden": 1024, "outputs": 512, "layers": 4})
DEEP = ("mlp", 1024, {"inputs": 256, "hidden": 256, "outputs": 256, "layers": 8})
GPT = ("gpt", 32, {"layers": 4})


@dataclass(frozen=True)
class Case:
    """A step and a method: a model's name, its batch and its sizes."""

    model: tuple[str, int, Mapping[str, Any]]
    method: Method
    microbatches: int | str = "auto"


CASES = {
    "MLP 4 x 1024, data parallel": Case(MLP, alpa_lite.DataParallel()),
    "MLP 4 x 1024, ZeRO-3": Case(MLP, alpa_lite.Zero(3)),
    "MLP 4 x 1024, tensor parallel": Case(MLP, alpa_lite.TensorParallel()),
    "MLP 4 x 1024, auto": Case(MLP, alpa_lite.Auto()),
    "MLP 8 x 256, data parallel": Case(DEEP, alpa_lite.DataParallel()),
    "MLP 8 x 256, sharded 2 x 4": Case(DEEP, alpa_lite.Sharded((2, 4))),
    "MLP 8 x 256, pipeline of 4": Case(DEEP, alpa_lite.Pipeline(num_stages=4), 8),
    "GPT 4 x 128, auto": Case(GPT, alpa_lite.Auto()),
    "GPT 4 x 128, tensor parallel": Case(GPT, alpa_lite.TensorParallel()),
    "GPT 4 x 128, pipeline of 2": Case(GPT, alpa_lite.Pipeline(num_stages=2), 4),
}


def main() -> None:
    """Calibrates, plans, measures, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", help="a file of alpa-lite calibrate, in place of calibrating")
    parser.add_argument("--seconds", type=float, default=60.0, help="of calibrating")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dry-run", action="store_true", help="print only")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if arguments.calibration is None:
        found = measuring.calibrate(8, seconds=arguments.seconds)
    else:
        found = Calibration.load(arguments.calibration)
    rows, steps = [], {}
    for name, case in CASES.items():
        row, steps[name] = planned(case, found.cluster)
        rows.append({"plan": name, **row})
        print(rows[-1], flush=True)
    times = alternating(steps, arguments.rounds)
    for row in rows:
        own = times[row["plan"]]
        row["measured_ms"], row["least_ms"] = 1e3 * statistics.median(own), 1e3 * min(own)
    result = summary(rows, found, arguments.rounds)
    print(markdown(result))
    if not arguments.dry_run:
        (RESULTS / "calibration.json").write_text(json.dumps(result, indent=1) + "\n")
        (RESULTS / "calibration.md").write_text(markdown(result))


def planned(case: Case, cluster: Cluster) -> tuple[dict[str, Any], Run]:
    """What a plan predicts, with the figures of the calibration and of the preset, and what times one step of it."""
    name, batch, sizes = case.model
    fun, args = models.get(name).build("tiny", batch, 0, **sizes)
    options: dict[str, Any] = {"num_microbatches": case.microbatches, "verify": "off"}
    step = alpa_lite.parallelize(fun, method=case.method, cluster=cluster, **options)
    plan = step.plan(*args)
    usual = Cluster.local(jax.devices()[: cluster.num_devices], calibration=None)
    preset = alpa_lite.make_plan(fun, *args, cluster=usual, plan=plan, verify="off")
    run = timed(step, list(step.place(*args)))
    shape = f"{plan.num_stages} stages x {plan.num_microbatches}" if plan.pipelined else str(plan.stages[0].mesh_shape)
    row = {"mesh": shape, "predicted_ms": 1e3 * plan.step_seconds, "preset_ms": 1e3 * preset.step_seconds}
    return row, run


def summary(rows: list[dict[str, Any]], found: Calibration, rounds: int) -> dict[str, Any]:
    """The rows in measured order, with the rank correlations."""
    rows = sorted(rows, key=lambda row: row["measured_ms"])

    def rank(one: str, other: str) -> float:
        ranks = [stats.rankdata([row[name] for row in rows]) for name in (one, other)]
        return float(np.corrcoef(ranks)[0, 1])

    return {
        "jax": jax.__version__,
        "machine": {
            "python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "rounds": rounds,
        },
        "calibration": {"date": found.date, "seconds": found.seconds, "samples": len(found.samples)},
        "fits": [json_codec.encode_fields(fit) for fit in found.fits],
        "rank_correlation": {
            "calibrated": rank("predicted_ms", "measured_ms"), "preset": rank("preset_ms", "measured_ms"),
            "calibrated, least times": rank("predicted_ms", "least_ms"),
        },
        "rows": rows,
    }  # fmt: skip


def markdown(result: Mapping[str, Any]) -> str:
    """The results as a page."""
    ranks, machine = result["rank_correlation"], result["machine"]
    lines = [
        "# Predicted and measured order of ten plans",
        "",
        f"Eight virtual CPU devices on {machine['cores']} cores, JAX {result['jax']}, load {machine['load']:.1f} at "
        f"the end; {3 * machine['rounds']} steps of each plan, in turn. Made by `benchmarks/calibration.py`.",
        "",
        f"Spearman's rank correlation of predicted and measured seconds: **{ranks['calibrated']:.2f}** with the "
        f"figures of `alpa-lite calibrate` ({ranks['calibrated, least times']:.2f} with the least measured seconds), "
        f"{ranks['preset']:.2f} with those of the preset.",
        "",
        "| plan | mesh | measured (median) | least | predicted, calibrated | predicted, preset |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = (f"{row[name]:.2f} ms" for name in ("measured_ms", "least_ms", "predicted_ms", "preset_ms"))
        lines.append(f"| {row['plan']} | {row['mesh']} | {' | '.join(cells)} |")
    lines += ["", "| fit | samples | median error | worst |", "|---|---|---|---|"]
    for fit in result["fits"]:
        lines.append(f"| {fit['name']} | {fit['count']} | {fit['error']:.0%} | {fit['worst']:.0%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
