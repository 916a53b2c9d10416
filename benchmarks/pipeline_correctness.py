"""Whether pipelines compute what one device computes: models x stages x micro-batches x schedules, all of them.

Every model of the list, in linen and in NNX, in 2, 3 and 4 stages on eight virtual CPU devices, with every number of
micro-batches from 1 to 8 that divides its batch of eight, under every schedule that allows it (interleaved: with two
stages on each submesh, where the model has as many layers). Three consecutive steps: losses, metrics, gradients and
updated states, leaf by leaf. An error of 1 is what is allowed, ||a - b|| = 1e-5 * max(||b||, 1e-3 * ||all gradients||)
in float32; `tests/comparing.py` has the rest. The tests run a covering design of this product
(`tests/test_pipelines.py`).

    PYTHONPATH=. python benchmarks/pipeline_correctness.py              what the results lack for this JAX
    PYTHONPATH=. python benchmarks/pipeline_correctness.py linen_gpt    of these models

writes benchmarks/results/pipeline_correctness.json after every case, and pipeline_correctness.md. Remove the version's
entry to begin anew. Executables are kept in a cache of JAX's, which `--cache` names, since schedules share them.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from alpa_lite.ir import schedules
from benchmarks import kept_rows
from tests import comparing, pipeline_driver, zoo

RESULTS = Path(__file__).parent / "results" / "pipeline_correctness.json"
VERSION = f"jax {jax.__version__}"
KINDS = ("gpt", "gpt_tied", "gpt_scan", "unet", "translator", "moe", "resnet")
MODELS = [f"{library}_{kind}" for kind in KINDS for library in ("linen", "nnx")]
STAGES, MICROBATCHES = (2, 3, 4), (1, 2, 4, 8)
Case = tuple[str, int, int, str]


def main() -> None:
    """Runs the cases that the results lack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--cache", type=Path, help="a folder for compiled executables")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    if arguments.cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(arguments.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    for model in arguments.models:
        want: list[Any] = []
        driven: pipeline_driver.Driven | None = None  # stages of the same number and micro-batches
        for case in cases(model):
            if key(case) in kept_rows.known(RESULTS, VERSION):
                continue
            found = zoo.get(model)
            step, args = found.make()
            want = want or pipeline_driver.on_one_device(step, args, found.style)
            try:
                driven = planned(step, args, case, driven)
                row = worst(driven, args, found.style, want)
            except pipeline_driver.TooFewLayers as refusal:
                row = {"skipped": str(refusal)}
            print(*case, row, flush=True)
            keep(case, row)
            if case[-1] == schedules.NAMES[-1]:
                jax.clear_caches()  # executables take memory mappings, of which a process may have 65,530


def cases(model: str) -> Iterator[Case]:
    """What a model is run with."""
    for stages in STAGES:
        for microbatches in MICROBATCHES:
            for schedule in schedules.NAMES:
                if schedule != "interleaved-1f1b" or microbatches % stages == 0:
                    yield model, stages, microbatches, schedule


def planned(step: Any, args: Any, case: Case, last: pipeline_driver.Driven | None) -> pipeline_driver.Driven:
    """The pipeline of a case; with the stages of the last case, where they are the same."""
    _, stages, microbatches, schedule = case
    if last is not None and schedule not in ("interleaved-1f1b", "zb-h1"):
        before = last.schedule
        same = (before.num_meshes, before.num_stages, before.num_microbatches) == (stages, stages, microbatches)
        if same and not before.splits_backward:
            return pipeline_driver.rescheduled(last, schedule)
    return pipeline_driver.drive(
        step, args, devices=pipeline_driver.DEVICES[stages], microbatches=microbatches, schedule=schedule,
        virtual=2 if schedule == "interleaved-1f1b" else 1,
    )  # fmt: skip


def worst(driven: pipeline_driver.Driven, args: Any, style: str, want: list[Any]) -> dict[str, Any]:
    """The largest error of three steps, and the leaf that has it."""
    errors: dict[str, float] = {}
    for number, (got, one) in enumerate(
        zip(pipeline_driver.consecutive(driven.executable(), args, style), want, strict=True)
    ):
        errors |= {f"step {number} {name}": error for name, error in comparing.errors(got, one).items()}
    leaf = max(errors, key=errors.__getitem__)
    return {"error": round(float(errors[leaf]), 4), "leaf": leaf, "leaves": len(errors)}


def key(case: Case) -> str:
    """The case's name in the results."""
    return " ".join(map(str, case))


def keep(case: Case, row: dict[str, Any]) -> None:
    """Adds a row. Several processes may run at once."""
    with kept_rows.changed(RESULTS, table) as rows:
        rows.setdefault(VERSION, {})[key(case)] = row


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The results as a page."""
    lines = kept_rows.of_errors("Pipelines against one device", "three", "pipeline_correctness", rows)
    for model in MODELS:
        cells = []
        for found in rows.values():
            rows_of = [row for name, row in found.items() if name.split()[0] == model]
            some = [row["error"] for row in rows_of if "error" in row]
            count = sum(1 for _ in cases(model)) - (len(rows_of) - len(some))
            cells += [f"{len(some)} of {count}", f"{max(some):.3f}" if some else "-"]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    said = []
    for version, found in rows.items():
        errors = [row["error"] for row in found.values() if "error" in row]
        wrong = sum(error > 1 for error in errors)
        few = len(found) - len(errors)
        said.append(f"{version}: {len(errors)} cases, {wrong} above 1; {few} need more layers than their model has.")
    return "\n".join([*lines, "", *said, "", f"Made {datetime.date.today()}.", ""])


if __name__ == "__main__":
    main()
