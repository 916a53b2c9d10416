"""Plans against the compilers of their targets, without the hardware: collectives, and memory predicted and compiled.

    python benchmarks/target_compilers.py [--cuda h100.txtpb]

Needs libtpu beside JAX (`pip install 'alpa-lite[tpu-verify]'`); with `--cuda`, a file with XLA's target configuration
of a GPU, JAX's CUDA plugin (`cuda-verify`). Writes results/target_compilers.json or target_compilers_cuda.json, and
prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from alpa_lite import models, steps, verifying
from alpa_lite.api import make_plan
from alpa_lite.report import units
from alpa_lite.steps import NamedStep

WIDE = {"hidden": 512, "layers": 4, "vocab": 8192, "seq": 256}
STEPS = (
    NamedStep("gpt", "tiny", 32),
    NamedStep("moe", "tiny", 32),
    NamedStep("gpt", "tiny", 64, WIDE),
    NamedStep("moe", "tiny", 64, {**WIDE, "group": 256}),
    NamedStep("gpt", "small", 64, {"layers": 2}),
)
RESULTS = Path(__file__).parent / "results"


def measured(step: NamedStep, cluster: str, target: str, folder: Path) -> dict[str, Any]:
    """One step planned for a cluster, and compiled for a target."""
    fun, args = models.get(step.name).abstract(step.size, step.batch, **step.settings)
    start = time.perf_counter()
    plan = make_plan(fun, *args, cluster=cluster)
    file = folder / "plan.json"
    plan.save(file)
    steps.remember(file, step)
    seconds = time.perf_counter() - start
    found = verifying.verify(file, step, target, time_limit=1200.0)
    (memory,) = found["memory"]
    return {
        "step": f"{step.name} {step.size}", "batch": step.batch, "settings": dict(step.settings), "cluster": cluster,
        "target": found["target"] if target.startswith("v") else "cuda", "compiler": found["compiler"],
        "mesh": plan.stages[0].mesh_shape, "planning_seconds": seconds,
        "compiling_seconds": found["seconds"]["compiling"],
        "communicates": found["communicates"], "differences": found["differences"], "rewrites": found["rewrites"],
        "planned_collectives": sum(row["planned"] for row in found["collectives"]),
        "found_collectives": sum(row["found"] for row in found["collectives"]), "memory": memory,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in Markdown."""
    out = [
        "| step | batch | target | mesh | collectives planned | found | as planned | predicted | compiler | ratio |",
        "|---|--:|---|---|--:|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        memory = row["memory"]
        more = " ".join(f"{name}={value}" for name, value in row["settings"].items())
        cells = (
            f"{row['step']} {more}".strip(), row["batch"], row["target"], " x ".join(map(str, row["mesh"])),
            row["planned_collectives"], row["found_collectives"], "yes" if row["communicates"] else "no",
            units.nbytes(memory["predicted"]), units.nbytes(memory["compiler"]),
            f"{memory['predicted'] / memory['compiler']:.2f}",
        )  # fmt: skip
        out.append("| " + " | ".join(map(str, cells)) + " |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", help="a file with XLA's target configuration of a GPU")
    parser.add_argument("--steps", type=int, default=len(STEPS), help="how many of the steps, the smallest first")
    asked = parser.parse_args()
    targets = [("v5e", "v5e:2x4")] if asked.cuda is None else [("h100", f"cuda:{asked.cuda}")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cluster, target in targets:
            for step in STEPS[: asked.steps]:
                rows.append(measured(step, cluster, target, Path(folder)))
                print(table(rows[-1:])[-1], flush=True)
    name = "target_compilers" if asked.cuda is None else "target_compilers_cuda"
    import jax

    head = {"date": time.strftime("%Y-%m-%d"), "jax": jax.__version__, "python": platform.python_version()}
    (RESULTS / f"{name}.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
