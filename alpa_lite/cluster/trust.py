"""Where the rates of a cluster are from, and how far predictions with them are from published steps.

`tests/test_cost.py` compares the figures of `PUBLISHED` with the results of `python -m benchmarks.published`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa_lite.cluster import Cluster, presets
from alpa_lite.cluster.machine import GIVEN as GIVEN


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
    device: Agreement(**(row | {"within": tuple(row["within"])})) for device, row in presets.DATA["published"].items()
}
"""By `Cluster.device`."""

MEASURED: Mapping[str, str] = presets.DATA["measured"]
"""By `Cluster.device`, the preset figures from measurements; all others are of data sheets, or assumed."""


def origin(cluster: Cluster) -> str:
    """Returns where the rates of a cluster are from."""
    parts = [f"measured here: {', '.join(cluster.measured)}"] if cluster.measured else []
    if cluster.source == GIVEN:
        return "; ".join([*parts, GIVEN])
    if cluster.device in MEASURED:
        parts.append(f"measured elsewhere: {MEASURED[cluster.device]}")
    return "; ".join([*parts, "the rest of data sheets, or assumed"])


def agreement(cluster: Cluster) -> str:
    """Returns how far predictions for the device of a cluster are from published steps."""
    found = PUBLISHED.get(cluster.device)
    if found is None or cluster.source == GIVEN:
        return "not compared with published steps"
    return (
        f"of {found.rows} published steps {found.within[0]} within 15 %, {found.within[1]} within 30 % of the measured "
        f"throughput ({found.least:.2f} to {found.greatest:.2f} of it; {found.fitted} of them used for rates)"
    )
