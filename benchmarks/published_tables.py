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

from benchmarks.harness import table

LEAST = 2**16  # bytes: below, the table is noisy
DEVICES = {"sm_90": "h100", "sm_100_B200": "b200", "sm_100_GB200": "gb200", "sm_103": "gb300"}
TYPES = {"bf16xbf16->bf16": ("bf16", 2), "f32xf32->f32": ("f32", 4)}
STARTS = np.arange(0, 10.5e-6, 0.5e-6)


def scores(folder: Path) -> list[str]:
    """The part of the page on these tables."""
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("matmuls", "collectives")}
    return [
        "## XLA's measured tables", "",
        f"Of {found['matmuls']['source']}. Each figure is of the sizes that were left out.", "",
        *table("products | sizes | within 20 % | 30 % | start of a kernel, us", products(found["matmuls"]["rows"])),
        "",
        *table("collectives | payloads | within 20 % | 30 %", collectives(found["collectives"]["rows"])),
    ]  # fmt: skip


def products(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The cells of each device and dtype."""
    from alpa_lite.cluster import Cluster
    from alpa_lite.cluster.cost import MeshCost
    from alpa_lite.ir.layout import LogicalMesh

    cells = []
    for device, kind in sorted({(row[0], row[5]) for row in rows if row[0] in DEVICES and row[5] in TYPES}):
        own, (dtype, itemsize) = [row for row in rows if (row[0], row[5]) == (device, kind)], TYPES[kind]
        cluster = dataclasses.replace(Cluster.preset(DEVICES[device]), kernel_start_alone=0.0)
        cost = MeshCost(cluster, LogicalMesh((1,), ("x",)))
        bare = np.array([cost.matmul(m, n, k, batch, dtype, itemsize) for _, batch, m, n, k, *_ in own])
        real = np.array([2.0 * batch * m * n * k / rate for _, batch, m, n, k, _, rate in own])
        start = min(STARTS, key=lambda start: np.abs(np.log((bare[::2] + start) / real[::2])).mean())
        cells.append([f"{DEVICES[device]}, {dtype}", *score((bare[1::2] + start) / real[1::2]), f"{1e6 * start:.1f}"])
    return cells


def collectives(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The cells of each device, and those of all."""
    from alpa_lite.calibration.fitting import curve_of
    from alpa_lite.cluster import Cluster

    tables: dict[tuple[str, str, int, int], dict[float, float]] = {}
    for device, kind, _, elements, count, size, rate in rows:
        if size is not None and device in DEVICES:
            name = kind.replace("-", "_")
            payload = 4.0 * elements * (size if name == "reduce_scatter" else 1)
            tables.setdefault((DEVICES[device], name, size, count), {})[payload] = payload / rate
    ratios: dict[str, list[float]] = {}
    for (preset, kind, size, _), seconds in tables.items():
        payloads = [payload for payload in sorted(seconds) if payload >= LEAST]
        if preset in Cluster.preset_names():
            curves = Cluster.preset(preset).collectives
            curve = next(curve for curve in curves if (curve.kind, curve.group) == (kind, (size,)))
        else:
            curve = curve_of(kind, (size,), payloads[::2], [seconds[payload] for payload in payloads[::2]])
        known = {round(payload) for payload, _ in curve.points}
        for payload in (payload for payload in payloads if round(payload) not in known):
            alpha, beta = curve.tangent(payload)
            ratios.setdefault(preset, []).append((alpha + beta * payload) / seconds[payload])
    ratios["all"] = [ratio for found in ratios.values() for ratio in found]
    return [[preset, *score(np.array(found))] for preset, found in ratios.items()]


def score(ratios: np.ndarray) -> list[Any]:
    """How many ratios there are, and the shares near 1."""
    return [len(ratios), *(f"{100 * np.mean(np.abs(ratios - 1) <= share):.0f} %" for share in (0.2, 0.3))]
