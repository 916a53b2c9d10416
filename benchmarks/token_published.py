"""The published models of TeraPipe, planned whole: what a step in slices is predicted to take beside whole sequences.

`token_slices.py` prices a stage by a formula, as the paper does. Here the pipelines are planned: a GPT of the paper's
layers, width, heads and tokens (Li et al., ICML 2021) is traced, cut into the paper's stages of the paper's devices,
sharded, written in slices and simulated, for one replica and its examples, one to a micro-batch. The paper's stages
have layers alone: the vocabulary is 256. Adam's state is held, in float32; layers compute in float16. Of each setting:

    whole     Pipeline(...)
    paper     Pipeline(token_slices=the paper's lengths)
    auto      Pipeline(token_slices="auto"), with as much time as it takes
    Auto      Auto(), which is free to choose another division or no pipeline, in the time that it has by default

All seconds of steps are predictions of this project's cost model. Planning takes CPU seconds, of a machine with other
work. Rows that are not there have not been planned.

    python benchmarks/token_published.py "1 (GPT-3 1B)" whole paper auto

adds rows to benchmarks/results/token_published.json and writes token_published.md. With `long` in place of a setting it
plans GPTs with long sequences and few micro-batches by `Auto()`, each in the time that a search has by default and in
four times that, and says what it chose and what else it compared.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import kept_rows
from token_slices import SETTINGS, Setting

import alpa_lite
from alpa_lite import models
from alpa_lite.errors import AlpaLiteError

RESULTS = Path(__file__).parent / "results"
ROWS = ("whole", "paper", "auto", "Auto")


LONG = {
    "1 x 8,192 tokens, 8 layers of 2,048, 4 nodes": (8, 2048, 16, 8192, 1, 4),
    "1 x 16,384 tokens, 8 layers of 1,024, 2 nodes": (8, 1024, 16, 16384, 1, 2),
    "4 x 4,096 tokens, 8 layers of 2,048, 4 nodes": (8, 2048, 16, 4096, 4, 4),
    "4 x 4,096 tokens, GPT 2.6B (32 layers of 2,560), 4 nodes": (32, 2560, 32, 4096, 4, 4),
}
"""Layers, hidden, heads, tokens, examples and nodes of eight V100, of models that `Auto()` plans."""
EFFORTS = "normal", "thorough"


def planned_long(shape: tuple[int, ...], effort: Literal["quick", "normal", "thorough"]) -> dict[str, Any]:
    """What `Auto()` chooses for a model of `LONG` in some time."""
    layers, hidden, heads, tokens, examples, nodes = shape
    step, args = models.get("gpt").abstract(
        "2.6B", examples, layers=layers, hidden=hidden, heads=heads, seq=tokens, vocab=256, dtype=jnp.float16
    )
    cluster = alpa_lite.Cluster.preset("p3.16xlarge", nodes=nodes)
    start = time.perf_counter()
    plan = alpa_lite.make_plan(step, *args, cluster=cluster, effort=effort)
    return {
        "seconds": plan.step_seconds,
        "took": time.perf_counter() - start,
        "stages": len(plan.stages),
        "microbatches": plan.num_microbatches,
        "slices": list(plan.division.token_slices) if plan.division else [],
        "others": {row.name: row.step_seconds for row in plan.comparisons},
        "notes": [note for note in plan.notes if "slices" in note or "slicings" in note],
    }


def long_table(known: dict[str, dict[str, Any]]) -> list[str]:
    """The part of the page on long sequences."""
    lines = [
        "",
        "## Long sequences with few micro-batches",
        "",
        "What `Auto()` chooses on nodes of eight V100 (`p3.16xlarge`). The effort is that of",
        "the search; planning takes wall seconds, tracing and checks included.",
        "",
        "| model | effort | step, s | stages | micro-batches | slices | whole sequences, s | one mesh, s "
        "| planning, s |",
        "|---|---|--:|--:|--:|---|--:|--:|--:|",
    ]
    for name in LONG:
        rows = known.get(name, {})
        for effort in EFFORTS:
            found = rows.get(effort)
            if found is None:
                continue
            others = [found["others"].get(other) for other in ("whole sequences", "one mesh")]
            whole, mesh = ("" if seconds is None else f"{seconds:.3f}" for seconds in others)
            slices = ", ".join(map(str, found["slices"])) or "none"
            lines.append(
                f"| {name} | {effort} | {found['seconds']:.3f} | {found['stages']} | {found['microbatches']} "
                f"| {slices} | {whole} | {mesh} | {found['took']:.0f} |"
            )
    return lines


def planned(setting: Setting, row: str) -> dict[str, Any]:
    """What one way of running a setting is predicted to take, and how it was planned."""
    step, args = models.get("gpt").abstract(
        "2.6B", setting.batch, layers=setting.stages * setting.layers, hidden=setting.hidden, heads=setting.heads,
        seq=setting.sequence, vocab=256, dtype=jnp.float16,
    )  # fmt: skip
    cluster = alpa_lite.Cluster.preset("p3.16xlarge", nodes=setting.stages * setting.tensor // 8)
    method: Any = alpa_lite.Auto()
    options: dict[str, Any] = {}
    if row != "Auto":
        method = alpa_lite.Pipeline(
            num_stages=setting.stages, submesh_shapes=((1, setting.tensor),) * setting.stages, schedule="1f1b",
            token_slices={"whole": None, "paper": setting.slices, "auto": "auto"}[row],
        )  # fmt: skip
        options = {"num_microbatches": setting.batch, "effort": "thorough"}
    start = time.process_time()
    try:
        plan = alpa_lite.make_plan(step, *args, cluster=cluster, method=method, verify="off", **options)
    except AlpaLiteError as error:
        return {"refused": str(error)}
    division = plan.division
    return {
        "seconds": plan.step_seconds,
        "stages": len(plan.stages),
        "microbatches": plan.num_microbatches,
        "slices": list(division.token_slices) if division else [],
        "memory": max(stage.memory.total for stage in plan.stages),
        "notes": [note for note in plan.notes if "token_slices" in note],
        "planning": time.process_time() - start,
    }


def table(known: dict[str, dict[str, Any]]) -> str:
    """The page."""
    lines = [
        "# TeraPipe's published models, planned",
        "",
        "Written by `python benchmarks/token_published.py`, which says what is planned. Steps are predicted; the",
        "paper's speed-up, of its slices over whole sequences, is measured. Planning takes CPU seconds of a machine",
        "with other work.",
        "",
        "| setting | way | step, s | speed-up | paper's speed-up | stages | micro-batches | slices | GiB per device "
        "| planning, s |",
        "|---|---|--:|--:|--:|--:|--:|---|--:|--:|",
    ]
    for setting in SETTINGS:
        rows = known.get(setting.name, {})
        whole = rows.get("whole", {}).get("seconds")
        for row in ROWS:
            if row not in rows:
                continue
            found = rows[row]
            if "refused" in found:
                lines.append(f"| {setting.name} | {row} | {found['refused']} | | | | | | | |")
                continue
            gain = f"{whole / found['seconds']:.2f}" if whole else "-"
            paper = f"{setting.measured[0] / setting.measured[1]:.2f}" if row == "paper" else ""
            slices = ", ".join(map(str, found["slices"])) or "none"
            lines.append(
                f"| {setting.name} | {row} | {found['seconds']:.3f} | {gain} | {paper} | {found['stages']} "
                f"| {found['microbatches']} | {slices} | {found['memory'] / 2**30:.1f} | {found['planning']:.0f} |"
            )
    return "\n".join(lines + long_table(known)) + "\n"


def main() -> None:
    """Plans some ways of one setting, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=[*(setting.name for setting in SETTINGS), "long"])
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if arguments.setting == "long":
        for name, shape in LONG.items():
            for effort in EFFORTS:
                keep(name, effort, planned_long(shape, effort))
        return
    setting = next(s for s in SETTINGS if s.name == arguments.setting)
    for row in arguments.rows:
        keep(setting.name, row, planned(setting, row))


def keep(name: str, row: str, found: dict[str, Any]) -> None:
    """Writes one row, and the page."""
    print(name, row, found, flush=True)
    with kept_rows.changed(RESULTS / "token_published.json", table) as known:
        known.setdefault(name, {})[row] = found


if __name__ == "__main__":
    main()
