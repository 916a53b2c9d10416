"""Memory of executables, predicted and compiled: temporaries of the stages of pipelines, and all of one mesh.

    python benchmarks/stage_memory.py                        every case of `bytes_cases.py`, with the CPU compiler
    python benchmarks/stage_memory.py equinox gpt2           some; others keep their results
    python benchmarks/stage_memory.py --target h100.txtpb    for the GPU that XLA's target configuration describes

Each step is planned for two devices, as a pipeline of two stages with four micro-batches, and as one mesh, and compiled
with the CPU compiler, or with JAX's CUDA plugin (the extra `cuda-verify`), which needs no GPU. Of a stage the
executable with most temporaries counts, since a stage needs memory for one at a time; of one mesh the peak. A step that
cannot be cut into four has no stages. Nothing runs.

Products that are small for an H100 are split along k by the CUDA compiler, whose parts are temporaries; as in
`bytes_accessed.py`, it is told to leave that (`xla_gpu_experimental_force_split_k=1`).

Writes benchmarks/results/stage_memory.json and stage_memory.md, which have a section for each compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2" + (
    " --xla_gpu_experimental_force_split_k=1" if "--target" in sys.argv else ""  # not known to every CPU compiler
)

import jax
from bytes_cases import CASES

from alpa_lite import Pipeline, Sharded
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import compile_step
from alpa_lite.errors import MicrobatchError
from alpa_lite.passes.checks.verification import compiled_reports
from alpa_lite.report import units
from alpa_lite.runtime import aot

RESULTS = Path(__file__).parent / "results"
WITHIN = 0.25


def measured(name: str, cluster: Cluster, devices: Sequence[Any]) -> dict[str, Any]:
    """One case: for each stage the predicted and compiled bytes, and those of one mesh."""
    step, arguments = CASES[name]()
    out: dict[str, Any] = {"model": name, "stages": []}
    methods = {
        "pipeline": {
            "method": Pipeline(num_stages=2, schedule="1f1b", remat="none"), "num_microbatches": 4,
            "allow_inexact": True,
        },
        "mesh": {"method": Sharded()},
    }  # fmt: skip
    for kind, options in methods.items():
        try:
            compiled = compile_step(step, arguments, {}, make_options({**options, "cluster": cluster}), cluster)
        except MicrobatchError:  # such as a loss that compares every example with every other
            continue
        executables = list(aot.compiled_for(compiled.staged, compiled.plan, devices))
        most: dict[int, list[int]] = {}
        for found in compiled_reports(compiled.plan, compiled.staged, executables, cluster.platform):
            assert found.memory is not None
            if kind == "mesh":
                out["mesh"] = [found.memory.predicted, found.memory.data]
                continue
            pair = most.setdefault(found.submesh, [0, 0])
            pair[0] = max(pair[0], found.memory.predicted or 0)
            pair[1] = max(pair[1], found.memory.temporaries)
        if kind == "pipeline":
            out["stages"] = [most[key] for key in sorted(most)]
    return out


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in Markdown."""
    out = ["| model | what | predicted | compiled | ratio | within 25 % |", "|---|---|--:|--:|--:|---|"]
    for row in rows:
        named = [(f"stage {i}, temporaries", pair) for i, pair in enumerate(row["stages"])]
        for what, (predicted, compiled) in [*named, ("one mesh, peak", row["mesh"])]:
            ratio = predicted / compiled
            cells = row["model"], what, units.nbytes(predicted), units.nbytes(compiled), f"{ratio:.2f}"
            out.append(f"| {' | '.join(cells)} | {'yes' if abs(ratio - 1) <= WITHIN else 'no'} |")
    return out


def within(pairs: Iterable[Sequence[int]]) -> int:
    """How many predictions are near what was compiled."""
    return sum(abs(predicted / compiled - 1) <= WITHIN for predicted, compiled in pairs)


def section(compiler: str, run: dict[str, Any]) -> list[str]:
    """What was measured with a compiler, in Markdown."""
    rows = run["rows"]
    pairs = [pair for row in rows for pair in row["stages"]]
    return [
        f"## {compiler}", "", f"{run['date']}, Python {run['python']}.", "", *table(rows), "",
        f"{within(pairs)} of {len(pairs)} stages and {within(row['mesh'] for row in rows)} of {len(rows)} steps on one "
        "mesh are within 25 %.", "",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", help="XLA's target configuration of a GPU, a text file")
    parser.add_argument("names", nargs="*", default=[])
    given = parser.parse_args()
    cluster, compiler = Cluster.preset("h100").part(2), f"CPU compiler of JAX {jax.__version__}"
    if given.target is None:
        cluster, devices = dataclasses.replace(cluster, platform="cpu"), jax.devices()[:2]
    else:
        target = aot.target_of(f"cuda:{given.target}", cluster)
        devices = aot.devices_of(target)
        compiler = f"{aot.compiler_version(target)} for {devices[0].device_kind}"
    file = RESULTS / "stage_memory.json"
    runs = json.loads(file.read_text()) if file.exists() else {}
    known = {row["model"]: row for row in runs.get(compiler, {"rows": []})["rows"]}
    for name in given.names or CASES:
        known[name] = row = measured(name, cluster, devices)
        print(name, row["stages"], row["mesh"], flush=True)
    rows = [known[name] for name in CASES if name in known]
    runs[compiler] = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "rows": rows}
    file.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    lines = [
        "# Memory of executables, predicted and compiled", "",
        "`python benchmarks/stage_memory.py [--target h100.txtpb]`; two devices. No GPU: JAX's CUDA plugin compiles "
        "for one that a file describes.", "",
        "The temporaries of a stage are those of its executable that needs most: bytes per device beyond inputs and "
        "outputs. Those of one mesh are all bytes of its step at the peak.", "",
        *(line for compiler in sorted(runs, reverse=True) for line in section(compiler, runs[compiler])),
    ]  # fmt: skip
    (RESULTS / "stage_memory.md").write_text("\n".join(lines[:-1]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
