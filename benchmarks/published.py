"""How well predicted seconds agree with published training steps.

`published_rows.json` lists the steps: source, configuration, what was measured, and why a row is left out. It was
written before the first of them was predicted. Each row that is not left out is planned as its source ran it: its model
in plain JAX (`published_models.py`), the method, micro-batches, recomputation and precision of the source, without a
memory limit, on the preset of its devices with nodes of eight. A ratio is predicted over measured throughput. Rates to
which rows were fitted say so (`fitted`), and `--held-out` scores these with rates fitted to all other model sizes.

    python -m benchmarks.published                   every row; writes results/published.json and published.md
    python -m benchmarks.published mpt-7b            rows whose names contain a text; others keep their results
    python -m benchmarks.published --tables FOLDER   also XLA's measured tables (matmuls.json, collectives.json)
    python -m benchmarks.published --held-out        fits the rates without one model size at a time (no planning)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

HERE = Path(__file__).parent
ROWS, RESULTS = HERE / "published_rows.json", HERE / "results"
WITHIN = (0.15, 0.3, 0.5)
ENDLESS = 2**45  # bytes per device

KERNELS: Mapping[str, Mapping[str, float | tuple[float, float]]] = {
    "flash_attention_1 h100": {"cudnn": 0.18},
    "flash_attention_1 a100": {"cudnn": 0.32},
    "flash_attention_1 a100-40gb": {"cudnn": 0.32},
    "flash_attention_2 h100": {"cudnn": 0.35},
}
"""Kernels that are not those of stock JAX, with the shares of the peak that they reach. cuDNN's operation stands in.

FlashAttention-1 (Triton) is fitted to the rows of llm-foundry. FlashAttention-2 on H100: up to 335 TFLOP/s, 0.34, both
passes together (Dao 2023, arXiv 2307.08691, section 4.1), 0.35 forward (Shah et al. 2024, arXiv 2407.08608).
"""


def main() -> None:
    """Plans rows and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="texts that the names of rows contain")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    data = json.loads(ROWS.read_text())
    path = RESULTS / "published.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for row in data["rows"]:
        if row["excluded"] or (arguments.names and not any(text in row["name"] for text in arguments.names)):
            continue
        found[row["name"]] = one = predicted(row)
        ratio = measured_seconds(row) / one["seconds"]
        print(f"{row['name']:34} {measured_seconds(row):9.4g} s {one['seconds']:9.4g} s  {ratio:.3f}", flush=True)
    print("\n".join(summaries(data["rows"], found)))
    if not arguments.dry:
        path.write_text(
            json.dumps({r["name"]: found[r["name"]] for r in data["rows"] if r["name"] in found}, indent=1) + "\n"
        )
        path.with_suffix(".md").write_text("\n".join(page(data, found)) + "\n")


def cluster_of(row: Mapping[str, Any]) -> Any:
    """The devices of a row, with the attention kernel that ran."""
    from alpa_lite.cluster import Cluster, Link

    if "topology" in row:
        return Cluster.preset(row["preset"], nodes=row["slices"], topology=row["topology"])
    cluster = Cluster.preset(row["preset"], nodes=max(1, row["devices"] // 8))
    if row["devices"] < 8:
        cluster = cluster.part(row["devices"])
    kernel = KERNELS.get(f"{row['kernel']} {row['preset']}")
    changes: dict[str, Any] = {} if kernel is None else {"attention_efficiency": kernel}
    if "memory_bandwidth" in row:
        changes["memory_bandwidth"] = row["memory_bandwidth"]
    if "network_bandwidth" in row:
        changes["network_link"] = Link(row["network_bandwidth"], 1e-5)
    return dataclasses.replace(cluster, **changes)


def predicted(row: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of a row: its seconds, and what they are made of."""
    import alpa_lite
    from benchmarks import published_models

    step, args = published_models.step_of(row)
    plan = alpa_lite.make_plan(
        step, *args, cluster=cluster_of(row), method=method_of(row), num_microbatches=row["microbatches"], verify="off",
        memory_per_device=ENDLESS,
    )  # fmt: skip
    spent = [spending for stage in plan.stages for spending in stage.spending]
    terms = {name: sum(row.total for row in spent if kind(row) == name) for name in ("product", "attention", "memory")}
    waiting = sum(row.links for row in spent)
    return {
        "seconds": plan.step_seconds,
        "memory_gib": plan.stages[0].memory.total / 2**30,
        "terms": {**terms, "links": waiting, "latency": sum(row.latency for row in spent)},
    }


def kind(spending: Any) -> str:
    """What operations are: products, attention, or bound by memory."""
    if "dot_product_attention" in spending.operation:
        return "attention"
    return "product" if spending.operation == "dot_general" and spending.flops > spending.bytes else "memory"


def method_of(row: Mapping[str, Any]) -> Any:
    """The method of a source."""
    import alpa_lite

    if "tensor" in row:
        shape = (row["devices"] // row["tensor"], row["tensor"])
        return alpa_lite.Sharded(mesh_shape=shape)
    return alpa_lite.Zero(3)


def measured_seconds(row: Mapping[str, Any]) -> float:
    """Seconds of the published step."""
    from benchmarks import published_models

    measured = row["measured"]
    if "seconds" in measured:
        return measured["seconds"]
    if "tokens_per_second_per_device" in measured:
        return row["batch"] * row["model"]["seq"] / row["devices"] / measured["tokens_per_second_per_device"]
    flops = published_models.flops_of(row["model"], row["batch"])
    return flops / row["devices"] / (measured["tflops_per_device"] * 1e12)


def utilisation(row: Mapping[str, Any], seconds: float) -> float:
    """FLOPs of the model over those of the devices at the data sheet's peak."""
    from benchmarks import published_models

    peak = cluster_of(row).peak("float16" if row["params"] == "float16" else "bfloat16")
    return published_models.flops_of(row["model"], row["batch"]) / (seconds * row["devices"] * peak)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's coefficient."""
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1]) if len(a) > 2 else math.nan


def groups(rows: Iterable[Mapping[str, Any]], found: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """The rows with a prediction by platform and source."""
    out: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["name"] in found and not row["excluded"]:
            out.setdefault(f"{row['preset']}, {row['source']}", []).append(row)
    return out


def summaries(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> list[str]:
    """A table with a line for each platform and source."""
    lines = [
        "| platform, source | rows | within 15 % | 30 % | 50 % | median | least, greatest | rank correlation of MFU |",
        "|---|--:|--:|--:|--:|--:|---|--:|",
    ]
    for name, own in groups(rows, found).items():
        times = [(measured_seconds(row), found[row["name"]]["seconds"]) for row in own]
        lines.append(f"| {name} | {summary(own, times)} |")
    return lines


def summary(rows: Sequence[Mapping[str, Any]], times: Sequence[tuple[float, float]]) -> str:
    """The cells of a summary, given measured and predicted seconds."""
    ratios = [real / guess for real, guess in times]
    counts = " | ".join(str(sum(abs(ratio - 1) <= share for ratio in ratios)) for share in WITHIN)
    mfu = [[utilisation(row, t[i]) for row, t in zip(rows, times, strict=True)] for i in (0, 1)]
    rank = rank_correlation(*mfu)
    shown = "" if math.isnan(rank) else f"{rank:.2f}"
    extremes = f"{min(ratios):.2f}, {max(ratios):.2f}"
    return f"{len(rows)} | {counts} | {statistics.median(ratios):.2f} | {extremes} | {shown}"


def page(data: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """The page of the results."""
    return [
        "# Predicted against published steps", "",
        "Throughput predicted over measured; `python -m benchmarks.published` says how, `published_rows.json` has the",
        "configurations. Rows marked * were used to fit a rate; the held-out scores are below. Rows without a",
        "prediction say why.", "",
        *summaries(data["rows"], found), "",
        *(f"- {name}: {text}" for name, text in data["sources"].items()), "",
        "| row | source | measured, s | predicted, s | ratio |", "|---|---|--:|--:|--:|",
        *(line(row, found) for row in data["rows"]),
    ]  # fmt: skip


def line(row: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """A row of the table."""
    mark = " *" if row["fitted"] else ""
    if row["excluded"] or row["name"] not in found:
        return f"| {row['name']} | {row['source']} | | | {row['excluded'] or 'not planned'} |"
    real, guess = measured_seconds(row), found[row["name"]]["seconds"]
    return f"| {row['name']}{mark} | {row['source']} | {real:.4g} | {guess:.4g} | {real / guess:.2f} |"


if __name__ == "__main__":
    main()
