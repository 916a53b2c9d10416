"""Bytes that whole steps move on one device: predicted by the model of fusion, and compiled for an H100.

    python benchmarks/bytes_accessed.py --target h100.txtpb              every case of `bytes_cases.py`
    python benchmarks/bytes_accessed.py --target h100.txtpb bert gpt2    some; others keep their results

The steps are those of models that nobody here wrote, small, on one device, by shapes alone. They are compiled with
JAX's CUDA plugin (the extra `cuda-verify`) for the GPU that XLA's target configuration describes; no GPU is needed.
That is the compiler of most machines that plans are made for. The CPU's was not taken: it emits loops for a few
threads, and fuses by other rules; libtpu reports bytes, but of its own padded layouts, and with prefetches into on-chip
memory. Away from the hardware the CUDA compiler reports no bytes accessed, so that they are read off its program
(`hlo_bytes.py`).

Products that are small for an H100 are split along k by the compiler, which writes and adds up the parts. That is how a
kernel gets its parallelism, and comes and goes with the size: the compiler is told to leave it
(`xla_gpu_experimental_force_split_k=1`).

Writes benchmarks/results/bytes_accessed.json and bytes_accessed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from bytes_cases import CASES
from hlo_bytes import accessed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.cluster import Cluster
from alpa_lite.passes.ir import moving
from alpa_lite.passes.tracing import tracing
from alpa_lite.runtime import aot

RESULTS = Path(__file__).parent / "results"
WITHIN = 0.25


def measured(name: str, device: Any) -> dict[str, Any]:
    """One case: bytes predicted and compiled."""
    step, arguments = CASES[name]()
    graph = tracing.trace(step, arguments, {}).graph
    start = time.process_time()
    predicted = moving.moved_bytes(graph.block, graph.values)
    seconds = time.process_time() - start
    everywhere = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    jitted = jax.jit(step, in_shardings=everywhere, out_shardings=everywhere)
    lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    compiled = lowered.compile(compiler_options={"xla_gpu_experimental_force_split_k": 1})
    total, by = accessed(compiled.as_text() or "")
    return {
        "model": name, "operations": len(graph.block.ops), "predicted": predicted, "compiled": total,
        "ratio": predicted / total, "seconds": seconds, "by": dict(by.most_common(8)),
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in Markdown."""
    out = [
        "| model | operations | predicted | compiled | ratio | within 25 % | CPU ms of predicting |",
        "|---|--:|--:|--:|--:|---|--:|",
    ]
    for row in rows:
        near = "yes" if abs(row["ratio"] - 1) <= WITHIN else "no"
        out.append(
            f"| {row['model']} | {row['operations']} | {row['predicted'] / 1e6:.0f} MB "
            f"| {row['compiled'] / 1e6:.0f} MB | {row['ratio']:.2f} | {near} | {row['seconds'] * 1e3:.0f} |"
        )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True, help="XLA's target configuration of a GPU, a text file")
    parser.add_argument("names", nargs="*", default=[])
    given = parser.parse_args()
    target = aot.target_of(f"cuda:{given.target}", Cluster.preset("h100").part(1))
    (device,) = aot.devices_of(target)
    file = RESULTS / "bytes_accessed.json"
    known = {row["model"]: row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
    for name in given.names or CASES:
        known[name] = row = measured(name, device)
        print(f"{name}: {row['ratio']:.2f}", flush=True)
    rows = [known[name] for name in CASES if name in known]
    made = {
        "date": time.strftime("%Y-%m-%d"), "jax": jax.__version__, "python": platform.python_version(),
        "compiler": aot.compiler_version(target), "device": device.device_kind,
    }  # fmt: skip
    file.write_text(json.dumps({**made, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    near = sum(abs(row["ratio"] - 1) <= WITHIN for row in rows)
    lines = [
        "# Bytes accessed, predicted and compiled", "",
        f"`python benchmarks/bytes_accessed.py --target h100.txtpb`, {made['date']}, JAX {made['jax']}, Python "
        f"{made['python']}, {made['compiler']} for {made['device']}; no GPU.", "",
        "Whole train steps on one device: all that kernels read from memory and write to it. Predicted is "
        "`alpa_lite.passes.ir.fusion`; compiled is read off the program of XLA's GPU compiler. What is compared, and "
        "why with this compiler, is in the script.", "",
        *table(rows), "",
        f"{near} of {len(rows)} are within 25 %. Predictions are low where the compiler copies for the sake of layouts "
        "(transpositions before batched products, padding before convolutions), and where it expands an operation "
        "(the gradient of max pooling in `resnet` becomes a reduction of five operands, and a scatter).",
    ]  # fmt: skip
    (RESULTS / "bytes_accessed.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
