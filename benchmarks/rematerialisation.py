"""Whether the TPU compiler keeps what a plan computes again: memory of one mesh, predicted and compiled.

    python benchmarks/rematerialisation.py

Each case is planned for one slice of v5e without rematerialisation (`remat="none"`) and with it (`"layer"`), and
compiled with libtpu, without a TPU (`pip install 'alpa-lite[tpu-verify]'`). What compilers may do is to merge what is
computed again with the first time, which shows in the products of the compiled program: those of the backward pass that
are computed again have `rematted_computation` in their names. They may also run something so late that what it reads is
kept: that shows in the memory alone. Writes results/rematerialisation.json and rematerialisation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import alpa_lite
from alpa_lite import models
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import compile_step
from alpa_lite.passes.checks.verification import memory_of
from alpa_lite.report import units
from alpa_lite.runtime import aot

RESULTS = Path(__file__).parent / "results"
PRODUCT = re.compile(r'^.* = .* (?:convolution|dot)\(.*op_name="([^"]*)"', re.MULTILINE)
WIDTH, INNER = 256, 1024


def residual(state: Any, batch: Any) -> Any:
    """One step of residual layers, each wide within and narrow between."""

    def loss(layers: Any) -> Any:
        h = batch["x"]
        for layer in layers:
            h = h + jax.nn.gelu(h @ layer["up"]) @ layer["down"]
        return ((h - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def residual_of(layers: int, examples: int) -> tuple[Callable[..., Any], Any]:
    """The step and its arguments."""

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    state = [{"up": f32(WIDTH, INNER), "down": f32(INNER, WIDTH)} for _ in range(layers)]
    return residual, (state, {"x": f32(examples, WIDTH), "y": f32(examples, WIDTH)})


CASES: dict[str, Callable[[], Any]] = {
    "gpt hidden=128 layers=4 vocab=256 seq=256, batch 256": lambda: models.get("gpt").abstract(
        "tiny", 256, hidden=128, layers=4, vocab=256, seq=256
    ),
    "6 residual layers of 256 and 1024, 6,291,456 examples": lambda: residual_of(6, 96 * 65536),
    "6 residual layers of 256 and 1024, 65,536 examples": lambda: residual_of(6, 65536),
}
ROOM = "1000 GiB"
"""Of a device when a case is planned, so that what does not fit is for the compiler to say."""


def compiled(case: str, remat: str) -> dict[str, Any]:
    """One case, planned with a rematerialisation and compiled."""
    fun, args = CASES[case]()
    cluster = Cluster.preset("v5e")
    method = alpa_lite.Sharded((8,), remat=remat)
    found = compile_step(
        fun, args, {}, make_options({"method": method, "num_microbatches": 1, "memory_per_device": ROOM}), cluster
    )
    devices = aot.devices_of(aot.target_of("v5e:2x4", cluster))
    predicted = found.plan.stages[0].memory.total
    row = {"case": case, "remat": remat, "predicted": predicted}
    try:
        (program,) = aot.compiled_for(found.staged, found.plan, devices)
    except jax.errors.JaxRuntimeError as error:
        return {**row, "error": str(error).splitlines()[0][:200]}
    memory = memory_of(program, predicted)
    assert memory is not None
    names = PRODUCT.findall(program.as_text())
    again = sum("rematted_computation" in name for name in names)
    return {**row, "compiled": memory.data, "products": len(names), "again": again}


def page(rows: list[dict[str, Any]], head: dict[str, Any]) -> str:
    """The rows in Markdown."""
    lines = [
        "# Rematerialisation under the TPU compiler", "",
        f"`python benchmarks/rematerialisation.py`, {head['date']}, JAX {head['jax']}, Python {head['python']}, "
        f"{head['compiler']}, compiled for v5e:2x4; no TPU.", "",
        "Memory is per device, without the program's code; products are convolutions and `dot`s of the program.",
        "", "| case | remat | predicted | compiled | predicted / compiled | products | of them again |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for row in rows:
        cells = [row["case"], row["remat"], units.nbytes(row["predicted"])]
        if "error" in row:
            cells += [row["error"].replace("|", "/"), "", "", ""]
        else:
            ratio = f"{row['predicted'] / row['compiled']:.2f}"
            cells += [units.nbytes(row["compiled"]), ratio, str(row["products"]), str(row["again"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compiles the cases and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases")
    parser.add_argument("--dry-run", action="store_true", help="print only")
    asked = parser.parse_args()
    rows = []
    for case in list(CASES)[: asked.cases]:
        for remat in ("none", "layer"):
            rows.append(compiled(case, remat))
            print(rows[-1], flush=True)
    head = {"date": time.strftime("%Y-%m-%d"), "jax": jax.__version__, "python": platform.python_version()}
    head["compiler"] = aot.compiler_version(aot.Target("tpu", "v5e", (2, 4)))
    text = page(rows, head)
    print(text)
    if not asked.dry_run:
        (RESULTS / "rematerialisation.json").write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
        (RESULTS / "rematerialisation.md").write_text(text)


if __name__ == "__main__":
    main()
