"""How well the cost model agrees with the tables of products and collectives that XLA has measured.

Products: `MeshCost.matmul` of the preset, its start of a kernel fitted to every other shape of the table, on the other
shapes. Collectives: the curves of the preset, which has every other payload from 64 KiB on, on the other payloads;
permutations are left out, since the table does not say over which groups they run. GB300 has no preset: its curves are
made here, from every other payload of its table.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

LEAST = 2**16  # bytes: below, the table is noisy
DEVICES = {"sm_90": "h100", "sm_100_B200": "b200", "sm_100_GB200": "gb200", "sm_103": "gb300"}
TYPES = {"bf16xbf16->bf16": ("bf16", 2), "f32xf32->f32": ("f32", 4)}
STARTS = np.arange(0, 10.5e-6, 0.5e-6)


def scores(folder: Path) -> list[str]:
    """The part of the page on these tables."""
    products = json.loads((folder / "matmuls.json").read_text())
    collectives = json.loads((folder / "collectives.json").read_text())
    return [
        "## XLA's measured tables", "",
        f"Of {products['source']}. Each figure is of the sizes that were left out.", "",
        "| products | sizes | within 20 % | 30 % | start of a kernel, us |", "|---|--:|--:|--:|--:|",
        *products_table(products["rows"]), "",
        "| collectives | payloads | within 20 % | 30 % |", "|---|--:|--:|--:|",
        *collectives_table(collectives["rows"]),
    ]  # fmt: skip


def products_table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """A line for each device and dtype."""
    from alpa_lite.cluster import Cluster
    from alpa_lite.cluster.cost import MeshCost
    from alpa_lite.ir.layout import LogicalMesh

    lines = []
    for device, preset in DEVICES.items():
        for kind, (dtype, itemsize) in TYPES.items():
            own = [row for row in rows if row[0] == device and row[5] == kind]
            if not own:
                continue
            cluster = dataclasses.replace(Cluster.preset(preset), kernel_start_alone=0.0)
            cost = MeshCost(cluster, LogicalMesh((1,), ("x",)))
            bare = np.array([cost.matmul(m, n, k, batch, dtype, itemsize) for _, batch, m, n, k, *_ in own])
            real = np.array([2.0 * batch * m * n * k / rate for _, batch, m, n, k, _, rate in own])
            losses = [np.abs(np.log((bare[::2] + start) / real[::2])).mean() for start in STARTS]
            start = STARTS[int(np.argmin(losses))]
            lines.append(f"| {preset}, {dtype} | {score((bare[1::2] + start) / real[1::2])} | {1e6 * start:.1f} |")
    return lines


def collectives_table(rows: Sequence[Sequence[Any]]) -> list[str]:
    """A line for each device, and one for all."""
    from alpa_lite.calibration.fitting import curve_of
    from alpa_lite.cluster import Cluster

    tables: dict[tuple[str, str, int, int], dict[float, float]] = {}
    for device, kind, _, elements, count, size, rate in rows:
        if size is not None and device in DEVICES:
            name = kind.replace("-", "_")
            payload = 4.0 * elements * (size if name == "reduce_scatter" else 1)
            tables.setdefault((DEVICES[device], name, size, count), {})[payload] = payload / rate
    ratios: dict[str, list[float]] = {}
    for (preset, kind, size, _), table in tables.items():
        payloads = [payload for payload in sorted(table) if payload >= LEAST]
        if preset in Cluster.preset_names():
            curves = Cluster.preset(preset).collectives
            curve = next(curve for curve in curves if (curve.kind, curve.group) == (kind, (size,)))
        else:
            curve = curve_of(kind, (size,), payloads[::2], [table[payload] for payload in payloads[::2]])
        known = {round(payload) for payload, _ in curve.points}
        for payload in payloads:
            if round(payload) not in known:
                alpha, beta = curve.tangent(payload)
                ratios.setdefault(preset, []).append((alpha + beta * payload) / table[payload])
    lines = [f"| {preset} | {score(np.array(found))} |" for preset, found in ratios.items()]
    return [*lines, f"| all | {score(np.concatenate([np.array(found) for found in ratios.values()]))} |"]


def score(ratios: np.ndarray) -> str:
    """The cells of a line."""
    shares = " | ".join(f"{100 * np.mean(np.abs(ratios - 1) <= share):.0f} %" for share in (0.2, 0.3))
    return f"{len(ratios)} | {shares}"
