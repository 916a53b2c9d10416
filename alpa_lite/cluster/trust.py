"""Where the rates of a cluster are from, and how far predictions with them are from published steps.

`tests/test_cost.py` compares the table `published` of `presets.toml` with the results of `python -m
benchmarks.published`.
"""

from __future__ import annotations

from alpa_lite.cluster import Cluster, presets
from alpa_lite.cluster.machine import GIVEN as GIVEN


def origin(cluster: Cluster) -> str:
    """Returns where the rates of a cluster are from."""
    parts = [f"measured here: {', '.join(cluster.measured)}"] if cluster.measured else []
    if cluster.source == GIVEN:
        return "; ".join([*parts, GIVEN])
    if cluster.device in presets.DATA["measured"]:
        parts.append(f"measured elsewhere: {presets.DATA['measured'][cluster.device]}")
    return "; ".join([*parts, "the rest of data sheets, or assumed"])


def agreement(cluster: Cluster) -> str:
    """Returns how far predictions for the device of a cluster are from published steps."""
    found = presets.DATA["published"].get(cluster.device)
    if found is None or cluster.source == GIVEN:
        return "not compared with published steps"
    return (
        "of {rows} published steps {within[0]} within 15 %, {within[1]} within 30 % of the measured throughput "
        "({least:.2f} to {greatest:.2f} of it; {fitted} of them used for rates)".format(**found)
    )
