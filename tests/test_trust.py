"""What plans say of their rates is what the committed results have."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from alpa_lite.cluster import Cluster, Link, trust
from tests.plans import gpt_plan

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def agreements() -> dict[str, trust.Agreement]:
    """The figures of each device, from the results of `python -m benchmarks.published`."""
    from benchmarks import published

    rows = json.loads((BENCHMARKS / "published_rows.json").read_text())["rows"]
    found = json.loads((BENCHMARKS / "results" / "published.json").read_text())
    by: dict[str, list[tuple[float, bool]]] = {}
    for row in rows:
        if row["name"] in found and not row["excluded"]:
            ratio = published.measured_seconds(row) / found[row["name"]]["seconds"]
            by.setdefault(Cluster.preset(row["preset"]).device, []).append((ratio, bool(row["fitted"])))
    return {
        device: trust.Agreement(
            len(each),
            (sum(abs(r - 1) <= 0.15 for r, _ in each), sum(abs(r - 1) <= 0.3 for r, _ in each)),
            round(min(each)[0], 2),
            round(max(each)[0], 2),
            sum(fitted for _, fitted in each),
        )
        for device, each in by.items()
    }


def test_agreements_are_those_of_the_results():
    assert dict(trust.PUBLISHED) == agreements()


def test_published_steps_agree_as_they_must():
    """At least 80 % within 15 % for the large table, and no device whose steps are mostly wrong."""
    for found in trust.PUBLISHED.values():
        assert found.within[1] >= 0.7 * found.rows
    for device in ("H100-SXM", "A100-SXM-80GB"):
        found = trust.PUBLISHED[device]
        assert found.within[0] >= 0.8 * found.rows


def test_every_preset_says_where_its_rates_are_from():
    for name in Cluster.preset_names():
        cluster = Cluster.preset(name)
        assert cluster.device in trust.MEASURED
        assert "measured elsewhere" in trust.origin(cluster)


def test_rates_that_were_measured_or_given_are_told_apart():
    preset = Cluster.preset("h100")
    assert "not compared" not in trust.agreement(preset)
    assert trust.origin(dataclasses.replace(preset, measured=("attention",))).startswith("measured here: attention; ")
    own = Cluster(
        device="H100-SXM", devices_per_node=1, memory=1, peak_flops={"f32": 1.0}, memory_bandwidth=1.0,
        node_link=Link(1.0),
    )  # fmt: skip
    assert trust.origin(own) == trust.GIVEN and "not compared" in trust.agreement(own)


@pytest.mark.parametrize("name", ["h100", "v6e"])
def test_plans_say_it(name):
    plan = dataclasses.replace(gpt_plan(), cluster=Cluster.preset(name))
    text = " ".join(str(plan).split())
    assert f"rates {trust.origin(plan.cluster)}" in text
    assert trust.agreement(plan.cluster) in text
