"""How well predicted seconds agree with published training steps.

`published_rows.json` lists the steps: source, configuration, what was measured, and why a row is left out. It was
written before the first of them was predicted. Each row that is not left out is planned as its source ran it: its model
in plain JAX (`gallery/outside/decoders.py`), the method, micro-batches, recomputation and precision of the source,
without a memory limit, on the preset of its devices with nodes of eight. A ratio is predicted over measured throughput.

Rows that were used to fit a rate say so (`fitted`). They are also scored with three rates, of products, attention and
memory operations, that are fitted to the rows of all other model sizes.

    python -m benchmarks.published                            every row, as `python -m benchmarks run published`
    python -m benchmarks.published mpt-7b                     rows whose names contain a text
    python -m benchmarks.published -o overlap=true --dry      with communication that hides, without keeping rows
    python -m benchmarks.published --tables FOLDER            scores XLA's measured tables (matmuls.json,
                                                              collectives.json) by the cost model
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Benchmark, Row, Rows, changed
from gallery.outside import decoders as models

DATA: dict[str, Any] = json.loads((Path(__file__).parent / "published_rows.json").read_text())
STEPS: Mapping[str, Row] = {row["name"]: row for row in DATA["rows"]}
TABLES = "tables"
"""The name of the row that has the scores of XLA's tables."""
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


def predicted(name: str, *, overlap: bool = False) -> Row:
    """The plan of a row: its seconds, and what they are made of."""
    import alpa_lite

    row = STEPS[name]
    step, args = models.step_of(row)
    plan = alpa_lite.make_plan(
        step, *args, cluster=cluster_of(row), method=method_of(row), num_microbatches=row["microbatches"], verify="off",
        memory_per_device=ENDLESS, overlap=overlap,
    )  # fmt: skip
    spent = [spending for stage in plan.stages for spending in stage.spending]
    rates = {name: sum(row.seconds - row.starts for row in spent if kind(row) == name) for name in RATES}
    rest = {name: sum(getattr(row, name) for row in spent) for name in ("links", "latency", "starts")}
    memory = plan.stages[0].memory.total / 2**30
    return {"seconds": plan.step_seconds, "memory_gib": memory, "terms": rates | rest}


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
        return alpa_lite.Sharded(mesh_shape=(row["devices"] // row["tensor"], row["tensor"]))
    return alpa_lite.Zero(3)


def within_replicas(row: Mapping[str, Any]) -> Any:
    """The state sharded over the devices of a slice or node and replicated over these, the batch sharded over all."""
    import alpa_lite

    shape = (row["replicas"], row["devices"] // row["replicas"])
    P = jax.sharding.PartitionSpec

    def spec(path: Any, leaf: Any) -> Any:
        first = int("layers" in jax.tree_util.keystr(path))  # the dim of a stack stays whole
        dims = [d for d in range(first, leaf.ndim) if leaf.shape[d] % shape[1] == 0]
        return P(*[None] * max(dims, key=leaf.shape.__getitem__), "x") if dims else P()

    (state, _) = models.step_of(row)[1]
    specs = jax.tree_util.tree_map_with_path(spec, state["params"])
    return alpa_lite.Manual({"state['params']": specs, "batch": P(("replica", "x"))}, shape, ("replica", "x"))


def measured_seconds(row: Mapping[str, Any]) -> float:
    """Seconds of the published step."""
    measured = row["measured"]
    if "seconds" in measured:
        return measured["seconds"]
    if "tokens_per_second_per_device" in measured:
        return row["batch"] * row["model"]["seq"] / row["devices"] / measured["tokens_per_second_per_device"]
    flops = models.flops_of(row["model"], row["batch"])
    return flops / row["devices"] / (measured["tflops_per_device"] * 1e12)


def utilisation(row: Mapping[str, Any], seconds: float) -> float:
    """FLOPs of the model over those of the devices at the data sheet's peak."""
    peak = cluster_of(row).peak("float16" if row["params"] == "float16" else "bfloat16")
    return models.flops_of(row["model"], row["batch"]) / (seconds * row["devices"] * peak)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's coefficient."""
    first, second = (np.argsort(np.argsort(x)) for x in (a, b))
    return float(np.corrcoef(first, second)[0, 1]) if len(a) > 2 else math.nan


# -- the page ---------------------------------------------------------------------------------------------------------


def groups(rows: Iterable[Mapping[str, Any]], found: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """The rows with a prediction by platform and source."""
    out: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["name"] in found and not row["excluded"]:
            out.setdefault(f"{row['preset']}, {row['source']}", []).append(row)
    return out


def summary(rows: Sequence[Mapping[str, Any]], real: Sequence[float], guess: Sequence[float]) -> Row:
    """How well some rows are predicted, given measured and predicted seconds."""
    ratios = [measured / predicted for measured, predicted in zip(real, guess, strict=True)]
    counts = [sum(abs(ratio - 1) <= share for ratio in ratios) for share in WITHIN]
    mfu = [[utilisation(row, t) for row, t in zip(rows, times, strict=True)] for times in (real, guess)]
    return {
        "count": len(rows), "within": counts, "median": statistics.median(ratios), "least": min(ratios),
        "greatest": max(ratios), "rank": rank_correlation(*mfu),
    }  # fmt: skip


def held_out(own: Sequence[Mapping[str, Any]], found: Rows) -> Row:
    """A summary of rows that were fitted, each scored with rates that are fitted to all other model sizes."""
    real = np.array([measured_seconds(row) for row in own])
    terms = np.array([[found[row["name"]]["terms"][rate] for rate in RATES] for row in own])
    rest = np.array([found[row["name"]]["seconds"] for row in own]) - terms.sum(1)
    sizes = np.array([row["model"]["size"] for row in own])
    guess = np.zeros(len(own))
    for size in set(sizes.tolist()):
        here = sizes == size
        guess[here] = terms[here] @ fitted(real[~here], terms[~here], rest[~here]) + rest[here]
    return summary(own, real.tolist(), guess.tolist()) | {"rates": fitted(real, terms, rest).tolist()}


def fitted(real: np.ndarray, terms: np.ndarray, rest: np.ndarray) -> np.ndarray:
    """Factors of the terms with the least mean |log(predicted / measured)|."""
    from scipy.optimize import minimize

    def loss(log: np.ndarray) -> float:
        return float(np.abs(np.log((terms @ np.exp(log) + rest) / real)).mean() + 0.01 * (log**2).sum())

    starts = [np.zeros(3), np.array([0.1, -0.1, 0.2]), np.array([-0.1, 0.1, -0.2])]
    found = [minimize(loss, start, method="Nelder-Mead", options={"maxiter": 4000}) for start in starts]
    return np.exp(min(found, key=lambda one: one.fun).x)


def view(found: Rows) -> Row:
    """The summaries of groups, and of those that were fitted."""
    usual = groups(DATA["rows"], found).items()
    fits = groups([row for row in DATA["rows"] if len(row["fitted"]) > 1], found).items()
    known = {
        name: summary(own, [*map(measured_seconds, own)], [found[row["name"]]["seconds"] for row in own])
        for name, own in usual
    }
    held = {name: held_out(own, found) for name, own in fits}
    return {"groups": known, "held_out": held, "data": DATA, "measured": measured_seconds}


BENCHMARKS = (
    Benchmark(
        "published", lambda: [name for name, row in STEPS.items() if not row["excluded"]], predicted, view, devices=1,
        together=lambda name: "all", sources=("alpa_lite", "passes"),
    ),
)  # fmt: skip


def main() -> None:
    """Scores tables, or runs the benchmark with the arguments of `run`."""
    from benchmarks.__main__ import app

    if sys.argv[1:2] == ["--tables"]:
        from benchmarks import published_tables

        lines = published_tables.scores(Path(sys.argv[2]))
        print("\n".join(lines))
        with changed(BENCHMARKS[0]) as rows:
            rows[TABLES] = {"lines": lines}
        return
    app(["run", "published", *sys.argv[1:]])


if __name__ == "__main__":
    main()
