"""A pipeline in slices of the sequence beside the same pipeline of whole sequences: predicted, run, and in memory.

A GPT of 4 layers on 4 stages of one virtual CPU device each, two micro-batches of one example, sequences of 256 tokens.
Predicted seconds are the plan's, for these devices; measured ones are medians of steps that take turns, and
executed timelines are of one step each. Virtual devices share the machine's cores, so that the measured seconds show
what is computed and dispatched, and not what a cluster would gain. Memory is the most bytes that live arrays of a step
take on a device of the fullest submesh, counted after every instruction, beside what the plan says of buffers.

    python benchmarks/token_pipelines.py

writes benchmarks/results/token_pipelines.json and token_pipelines.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import jax
from step_times import Run, alternating, timed

import alpa_lite
from alpa_lite import models
from alpa_lite.runtime.pipeline import PipelineExecutable

RESULTS = Path(__file__).parent / "results"
COMMAND = "python benchmarks/token_pipelines.py"
STAGES, EXAMPLES, TOKENS, ROUNDS = 4, 2, 256, 10
SLICES = {"whole": None, "2 of 128": (128, 128), "4 of 64": (64,) * 4, "8 of 32": (32,) * 8, "auto": "auto"}


def main() -> None:
    """Plans, runs and writes."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    RESULTS.mkdir(exist_ok=True)
    step, args = models.get("gpt").build("tiny", EXAMPLES, layers=STAGES, seq=TOKENS)
    rows: list[dict[str, Any]] = []
    runs: dict[str, Run] = {}
    for name, slices in SLICES.items():
        method = alpa_lite.Pipeline(num_stages=STAGES, schedule="1f1b", remat="none", token_slices=slices)
        sliced = alpa_lite.parallelize(step, method=method, num_microbatches=EXAMPLES)
        plan = sliced.plan(*args)
        executed = sliced.trace(None, *args)
        executable = sliced.planned(args, {})[1]
        assert isinstance(executable, PipelineExecutable)
        rows.append(
            {
                "slices": name if slices != "auto" else f"auto: {', '.join(map(str, plan.division.token_slices))}",
                "predicted": plan.step_seconds,
                "executed": executed.seconds,
                "buffers": max(plan.division.buffer_bytes),
                "peak": max(executable.measure_peak(*args)),
            }
        )
        runs[name] = timed(sliced, list(args))
    for row, seconds in zip(rows, alternating(runs, ROUNDS).values(), strict=True):
        row["measured"] = statistics.median(seconds)
    known = {"jax": jax.__version__, "python": platform.python_version(), "command": COMMAND, "rows": rows}
    (RESULTS / "token_pipelines.json").write_text(json.dumps(known, indent=1) + "\n")
    (RESULTS / "token_pipelines.md").write_text(table(known))


def table(known: dict[str, Any]) -> str:
    """The page."""
    lines = [
        "# Pipelines in slices of the sequence",
        "",
        f"Written by `{COMMAND}` with JAX {known['jax']}, Python {known['python']};",
        "the script says what runs, and what the figures mean: virtual devices share the machine's cores.",
        "",
        "| slices | predicted, ms | executed once, ms | measured, ms | buffers, MiB | peak run, MiB |",
        "|---|---|---|---|---|---|",
    ]
    for row in known["rows"]:
        lines.append(
            f"| {row['slices']} | {1e3 * row['predicted']:.1f} | {1e3 * row['executed']:.1f} "
            f"| {1e3 * row['measured']:.1f} | {row['buffers'] / 2**20:.2f} "
            f"| {row['peak'] / 2**20:.2f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
