"""How well predicted seconds agree with published training steps.

`published_rows.json` lists the steps: source, configuration, what was measured, and why a row is left out. It was
written before the first of them was predicted. Each row that is not left out is planned as its source ran it: its model
in plain JAX (`published_models.py`), the method, micro-batches, recomputation and precision of the source, without a
memory limit, on the preset of its devices with nodes of eight. A ratio is predicted over measured throughput.

Rows that were used to fit a rate say so (`fitted`). They are also scored with three rates, of products, attention and
memory operations, that are fitted to the rows of all other model sizes.

    python -m benchmarks.published                   every row; writes results/published.json and published.md
    python -m benchmarks.published mpt-7b            rows whose names contain a text; others keep their results
    python -m benchmarks.published --overlap NAME    the same with communication that hides; prints, and writes nothing
    python -m benchmarks.published --tables FOLDER   scores XLA's measured tables (matmuls.json, collectives.json) alone
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

from benchmarks import published_tables

HERE = Path(__file__).parent
ROWS, RESULTS = HERE / "published_rows.json", HERE / "results"
WITHIN = (0.15, 0.3, 0.5)
ENDLESS = 2**45  # bytes per device
RATES = ("product", "attention", "memory")
"""The terms of a step whose rates are fitted."""

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
    parser.add_argument("--tables", type=Path, help="the folder of XLA's measured tables")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    parser.add_argument("--overlap", action="store_true", help="with communication that hides; writes nothing")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    data = json.loads(ROWS.read_text())
    path = RESULTS / "published.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": {}, "tables": []}
    found = results["rows"]
    if arguments.tables:
        results["tables"] = published_tables.scores(arguments.tables)
        print("\n".join(results["tables"]))
    for row in [] if arguments.tables else data["rows"]:
        if row["excluded"] or (arguments.names and not any(text in row["name"] for text in arguments.names)):
            continue
        found[row["name"]] = one = predicted(row, overlap=arguments.overlap)
        ratio = measured_seconds(row) / one["seconds"]
        print(f"{row['name']:34} {measured_seconds(row):9.4g} s {one['seconds']:9.4g} s  {ratio:.3f}", flush=True)
    results["rows"] = {row["name"]: found[row["name"]] for row in data["rows"] if row["name"] in found}
    lines = page(data, results)
    print("\n".join(lines[: lines.index("## Rows")]))
    if not (arguments.dry or arguments.overlap):
        path.write_text(json.dumps(results, indent=1) + "\n")
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")


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


def predicted(row: Mapping[str, Any], *, overlap: bool = False) -> dict[str, Any]:
    """The plan of a row: its seconds, and what they are made of."""
    import alpa_lite
    from benchmarks import published_models

    step, args = published_models.step_of(row)
    plan = alpa_lite.make_plan(
        step, *args, cluster=cluster_of(row), method=method_of(row), num_microbatches=row["microbatches"], verify="off",
        memory_per_device=ENDLESS, overlap=overlap,
    )  # fmt: skip
    spent = [spending for stage in plan.stages for spending in stage.spending]
    rates = {name: sum(row.seconds - row.starts for row in spent if kind(row) == name) for name in RATES}
    return {
        "seconds": plan.step_seconds,
        "memory_gib": plan.stages[0].memory.total / 2**30,
        "terms": rates | {
            "links": sum(row.links for row in spent),
            "latency": sum(row.latency for row in spent),
            "starts": sum(row.starts for row in spent),
        },
    }  # fmt: skip


def kind(spending: Any) -> str:
    """What operations are: products, attention, or bound by memory."""
    if "dot_product_attention" in spending.operation or spending.operation == "pallas_call":
        return "attention"
    return "product" if spending.operation == "dot_general" and spending.flops > spending.bytes else "memory"


def method_of(row: Mapping[str, Any]) -> Any:
    """The method of a source."""
    import alpa_lite

    if "replicas" in row:
        return within_replicas(row)
    if "tensor" in row:
        shape = (row["devices"] // row["tensor"], row["tensor"])
        return alpa_lite.Sharded(mesh_shape=shape)
    return alpa_lite.Zero(3)


def within_replicas(row: Mapping[str, Any]) -> Any:
    """The state sharded over the devices of a slice or node and replicated over these, the batch sharded over all."""
    import alpa_lite
    from benchmarks import published_models

    shape = (row["replicas"], row["devices"] // row["replicas"])
    P = jax.sharding.PartitionSpec

    def spec(path: Any, leaf: Any) -> Any:
        first = int("layers" in jax.tree_util.keystr(path))  # the dim of a stack stays whole
        dims = [d for d in range(first, leaf.ndim) if leaf.shape[d] % shape[1] == 0]
        return P(*[None] * max(dims, key=leaf.shape.__getitem__), "x") if dims else P()

    (state, _) = published_models.step_of(row)[1]
    specs = jax.tree_util.tree_map_with_path(spec, state["params"])
    return alpa_lite.Manual({"state['params']": specs, "batch": P(("replica", "x"))}, shape, ("replica", "x"))


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
    first, second = (np.argsort(np.argsort(x)) for x in (a, b))
    return float(np.corrcoef(first, second)[0, 1]) if len(a) > 2 else math.nan


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


def held_out(rows: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> list[str]:
    """A table of the rows that were fitted, each scored with rates that are fitted to all other model sizes."""
    lines = [
        "| platform | rows | within 15 % | 30 % | 50 % | median | least, greatest | rank correlation of MFU "
        "| seconds of products, attention, memory over those of the preset, fitted to all rows |",
        "|---|--:|--:|--:|--:|--:|---|--:|---|",
    ]
    for name, own in groups([row for row in rows if len(row["fitted"]) > 1], found).items():
        real = np.array([measured_seconds(row) for row in own])
        terms = np.array([[found[row["name"]]["terms"][rate] for rate in RATES] for row in own])
        rest = np.array([found[row["name"]]["seconds"] for row in own]) - terms.sum(1)
        sizes = np.array([row["model"]["size"] for row in own])
        guess = np.zeros(len(own))
        for size in set(sizes.tolist()):
            here = sizes == size
            guess[here] = terms[here] @ fitted(real[~here], terms[~here], rest[~here]) + rest[here]
        rates = ", ".join(f"{factor:.2f}" for factor in fitted(real, terms, rest))
        lines.append(f"| {name} | {summary(own, list(zip(real, guess, strict=True)))} | {rates} |")
    return lines


def fitted(real: np.ndarray, terms: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Factors of the terms with the least mean |log(predicted / measured)|."""
    from scipy.optimize import minimize

    def loss(log: np.ndarray) -> float:
        return float(np.abs(np.log((terms @ np.exp(log) + rest) / real)).mean() + 0.01 * (log**2).sum())

    starts = [np.zeros(3), np.array([0.1, -0.1, 0.2]), np.array([-0.1, 0.1, -0.2])]
    found = [minimize(loss, start, method="Nelder-Mead", options={"maxiter": 4000}) for start in starts]
    return np.exp(min(found, key=lambda one: one.fun).x)


def page(data: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """The page of the results."""
    found = results["rows"]
    return [
        "# Predicted against published steps", "",
        "Ratios are throughput, predicted over measured. `python -m benchmarks.published` makes this page; its",
        "docstring says how, and `published_rows.json` has the configurations.", "",
        *summaries(data["rows"], found), "",
        "## Rates fitted without the rows that they predict", "",
        "The rows of llm-foundry on H100 and A100-80GB were used to fit rates. Here each is predicted with rates that",
        "are fitted to the rows of all other model sizes. Of the other rows, those marked * were used for a rate.", "",
        *held_out(data["rows"], found), "",
        *results["tables"], "",
        "## Sources", "",
        *(f"- {name}: {text}" for name, text in data["sources"].items()), "",
        "## Rows", "",
        "Those marked * were used to fit a rate. Rows without a prediction say why.", "",
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
