"""Where the rates of a cluster are from, and how far predictions with them are from published steps.

The figures of `PUBLISHED` are those of benchmarks/results/published.json, which `python -m benchmarks.published` makes;
`tests/test_trust.py` compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa_lite.cluster import Cluster

GIVEN = "given by the caller"
"""`Cluster.source` where the caller names none."""


@dataclass(frozen=True)
class Agreement:
    """Published steps of a device, planned as their sources ran them.

    Attributes:
      rows: how many steps.
      within: how many of them are predicted within 15 % and within 30 % of the measured throughput.
      least, greatest: predicted over measured throughput.
      fitted: how many of the rows were used to fit a rate of this device.
    """

    rows: int
    within: tuple[int, int]
    least: float
    greatest: float
    fitted: int


PUBLISHED: Mapping[str, Agreement] = {
    "H100-SXM": Agreement(43, (39, 43), 0.98, 1.21, 36),
    "A100-SXM-80GB": Agreement(34, (32, 33), 0.97, 1.32, 34),
    "A100-SXM-40GB": Agreement(27, (27, 27), 1.00, 1.14, 0),
    "TPU v5e": Agreement(18, (16, 18), 0.98, 1.22, 3),
    "TPU v5p": Agreement(4, (3, 4), 1.06, 1.17, 0),
    "V100-SXM2-16GB": Agreement(1, (1, 1), 0.89, 0.89, 1),
}
"""By `Cluster.device`."""

MEASURED: Mapping[str, str] = {
    "H100-SXM": "products and memory in published steps, collectives of a node, attention",
    "H200-SXM": "large products on H100",
    "B200-SXM": "collectives of a node, attention on H100",
    "GB200-NVL72": "collectives of a node, attention on H100",
    "A100-SXM-80GB": "products and memory in published steps, attention",
    "A100-SXM-40GB": "products and memory in published steps of the 80 GB card, attention",
    "V100-SXM2-16GB": "products in a published step",
    "V100-SXM2-32GB": "products in a published step of the 16 GB card",
    "MI300X": "large products",
    "MI250X-GCD": "large products",
    "TPU v5e": "products in published steps",
    "TPU v4": "products in published steps of v5e",
    "TPU v5p": "products in published steps of v5e",
    "TPU v6e": "products in published steps of v5e",
    "TPU7x": "products in published steps of v5e",
    "cpu": "rates of virtual devices of one machine",
}
"""By `Cluster.device`, the preset figures from measurements; all others are of data sheets, or assumed."""


def origin(cluster: Cluster) -> str:
    """Where the rates of a cluster are from."""
    parts = [f"measured here: {', '.join(cluster.measured)}"] if cluster.measured else []
    if cluster.source == GIVEN:
        return "; ".join([*parts, GIVEN])
    if cluster.device in MEASURED:
        parts.append(f"measured elsewhere: {MEASURED[cluster.device]}")
    return "; ".join([*parts, "the rest of data sheets, or assumed"])


def agreement(cluster: Cluster) -> str:
    """How far predictions for the device of a cluster are from published steps."""
    found = PUBLISHED.get(cluster.device)
    if found is None or cluster.source == GIVEN:
        return "not compared with published steps"
    return (
        f"of {found.rows} published steps {found.within[0]} within 15 %, {found.within[1]} within 30 % of the measured "
        f"throughput ({found.least:.2f} to {found.greatest:.2f} of it; {found.fitted} of them used for rates)"
    )
