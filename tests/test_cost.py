"""Prices of collectives and products by hand, and what plans say of their rates is what the committed results have."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.cluster import Cluster, Curve, Link, trust
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.cluster.presets import DATA
from alpa_lite.errors import OptionError
from alpa_lite.ir.layout import LogicalMesh
from tests.plans import gpt_plan

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
FAST, SLOW = 1e10, 1e9
TWO_NODES = Cluster(
    device="x", devices_per_node=4, nodes=2, memory=2**30, peak_flops={"f32": 1e12, "bf16": 4e12},
    memory_bandwidth=1e11, node_link=Link(FAST, 1e-6), matmul_efficiency=0.5,
    network_link=Link(4 * SLOW, 1e-5),  # of a node: SLOW for each device when all four send
)  # fmt: skip
NODE = dataclasses.replace(TWO_NODES, nodes=1)


def prices(cluster, *shape):
    return MeshCost(cluster, LogicalMesh(shape, ("a", "b", "c")[: len(shape)]))


BOTH = (((8,), "a"), ((2, 2, 2), "cab"))
CUBE, LINE = (Cluster.preset("v5p", topology=(size,) * 3) for size in (4, 2))
CARDS, RING = Cluster.preset("mi250x"), Cluster.preset("v5e", topology=(1, 16))
SLICES, THREE_NODES = Cluster.preset("v5e", nodes=2, topology=(4, 4)), dataclasses.replace(TWO_NODES, nodes=3)
JOINED = 2e-6 + 1e-5, 3 / 4 / FAST + 1 / 2 / SLOW / 4
"""Latency, and seconds a byte, of a gathering within two nodes and between them."""


@pytest.mark.parametrize(
    ("cluster", "shape", "kind", "axes", "latency", "slope"),
    [
        # One switch.
        (NODE, (4,), "all_reduce", "a", 4e-6, 2 * 3 / 4 / FAST),
        (NODE, (4,), "all_gather", "a", 2e-6, 3 / 4 / FAST),
        (NODE, (4,), "reduce_scatter", "a", 2e-6, 3 / 4 / FAST),
        (NODE, (4,), "all_to_all", "a", 2e-6, 3 / 4 / FAST),
        (NODE, (4,), "collective_permute", "a", 1e-6, 1 / FAST),
        (TWO_NODES, (4,), "all_gather", "a", 2e-6, 3 / 4 / FAST),
        # Two nodes, over one axis or three.
        *((TWO_NODES, shape, "all_reduce", axes, 2 * JOINED[0], 2 * JOINED[1]) for shape, axes in BOTH),
        *((TWO_NODES, shape, "all_gather", axes, *JOINED) for shape, axes in BOTH),
        *((TWO_NODES, shape, "all_to_all", axes, JOINED[0], 3 / 8 / FAST + 4 / 8 / SLOW) for shape, axes in BOTH),
        *((TWO_NODES, shape, "collective_permute", axes, 1e-5, 1 / SLOW) for shape, axes in BOTH),
        (TWO_NODES, (2, 4), "all_gather", "a", 1e-5, 1 / 2 / SLOW),
        (TWO_NODES, (2, 4), "all_gather", "b", 2e-6, 3 / 4 / FAST),
        # A group of two on each node shares the node's network with one other group.
        (TWO_NODES, (4, 2), "all_gather", "a", 1.1e-5, 1 / 2 / FAST + 1 / 2 / SLOW / 2),
        (THREE_NODES, (2, 6), "all_gather", "b", None, 5 / 6 / SLOW),  # straddles two nodes
        (CARDS, (4, 2), "all_gather", "b", None, 1 / 2 / 200e9),
        (CARDS, (4, 2), "all_gather", "ab", None, 1 / 2 / 200e9 + 3 / 4 / 50e9 / 2),
        # A ring has two links, a line one.
        (CUBE, (4, 4, 4), "all_gather", "a", 2e-6, 3 / 4 / 2e11),
        (CUBE, (4, 4, 4), "all_gather", "ab", 4e-6, 15 / 16 / 4e11),
        (CUBE, (4, 4, 4), "all_to_all", "a", None, 4 / 8 / 1e11),
        (CUBE, (4, 4, 4), "all_to_all", "ab", None, 4 / 8 / 1e11),
        (LINE, (2, 2, 2), "all_gather", "a", 1e-6, 1 / 2 / 1e11),
        (RING, (8, 2), "all_gather", "b", None, 1 / 2 / 5e10),  # neighbours
        (RING, (8, 2), "all_gather", "a", None, 7 / 8 / 5e10),  # two groups interleaved
        (RING, (8, 2), "all_gather", "ab", None, 15 / 16 / 1e11),
        (SLICES, (2, 16), "all_gather", "a", None, 1 / 2 / (2.5e10 / 4)),  # the network of the hosts
    ],
)
def test_collectives_by_hand(cluster, shape, kind, axes, latency, slope):
    cost = prices(cluster, *shape)
    found = cost.coefficients(kind, tuple(axes))
    assert found[1] == pytest.approx(slope)
    if latency is not None:
        assert found[0] == pytest.approx(1e-6 + latency)  # to start it
        assert cost.collective(kind, tuple(axes), 1000) == pytest.approx(1e-6 + latency + 1000 * slope)


def test_joint_axes_cost_no_more_than_one_after_the_other():
    for cluster, shape in ((TWO_NODES, (2, 4)), (NODE, (2, 2)), (Cluster.preset("v5p", topology=(4, 4, 4)), (4, 16))):
        cost = prices(cluster, *shape)
        for kind in ("all_reduce", "all_to_all"):
            single = cost.collective(kind, ("a",), 10**6) + cost.collective(kind, ("b",), 10**6)
            assert cost.collective(kind, ("a", "b"), 10**6) <= single


def test_nothing_is_sent_over_no_axes_or_axes_of_one_device():
    cost = prices(NODE, 4, 1)
    for kind in KINDS:
        assert cost.collective(kind, (), 100) == cost.collective(kind, ("b",), 100) == 0
    assert cost.collective("slice", ("a",), 100) == 0
    assert cost.collective("all_reduce", ("a", "b"), 100) == cost.collective("all_reduce", ("a",), 100)


presets = st.sampled_from(
    [
        TWO_NODES, NODE, Cluster.preset("p3.16xlarge"), Cluster.preset("mi250x", nodes=2), Cluster.preset("cpu"),
        Cluster.preset("v5p", topology=(4, 4, 4)), Cluster.preset("v5e", nodes=2, topology=(4, 4)),
    ]
)  # fmt: skip


@given(presets, st.data(), st.integers(0, 10**10), st.integers(1, 10**9))
def test_collectives_are_ordered_as_they_must_be(cluster, data, payload, more):
    shape = data.draw(st.sampled_from(cluster.mesh_shapes()))
    cost = prices(cluster, *shape)
    names = cost.mesh.axis_names
    axes = data.draw(st.sampled_from([c for n in range(1, len(names) + 1) for c in itertools.combinations(names, n)]))
    seconds = {kind: cost.collective(kind, axes, payload) for kind in KINDS}
    assert all(value > 0 and math.isfinite(value) for value in seconds.values())
    assert all(cost.collective(kind, axes, payload + more) > seconds[kind] for kind in KINDS)
    start = cluster.node_link.latency  # paid once instead of twice
    assert seconds["all_reduce"] == pytest.approx(seconds["all_gather"] + seconds["reduce_scatter"] - start)
    assert all(cost.collective(kind, axes[::-1], payload) == seconds[kind] for kind in KINDS)


@given(presets, st.tuples(*[st.integers(1, 5000)] * 3), st.integers(1, 64), st.integers(0, 3), st.integers(1, 500))
def test_larger_products_never_take_less_time(cluster, dims, batch, which, more):
    cost = prices(cluster, *cluster.mesh_shapes()[0])
    m, n, k = dims
    grown = [m, n, k, batch]
    grown[which] += more
    before = cost.matmul(m, n, k, batch, "bfloat16", 2)
    assert cost.matmul(grown[0], grown[1], grown[2], grown[3], "bfloat16", 2) >= before * (1 - 1e-12)
    reached = cost.matmul_efficiency(m, n, k, batch)
    assert (reached is None) == (1 in dims)
    assert reached is None or 0 < reached <= cluster.matmul_efficiency


def test_efficiency_by_hand():
    cost = prices(NODE, 4)  # tile 128, one unit
    assert cost.matmul_efficiency(1024, 1024, 128) == pytest.approx(0.5 / 2)
    assert cost.matmul_efficiency(65, 1024, 128 * 7) == pytest.approx(0.5 * 65 / 128 * 7 / 8)
    units = prices(dataclasses.replace(NODE, parallel_units=4), 4)
    # One tile, four units, k of two times eight tiles: split in two.
    assert units.matmul_efficiency(128, 128, 2048) == pytest.approx(0.5 * 8 / 9 * 2 / 4)
    assert units.matmul_efficiency(128, 128, 0) == 0.5
    # Tiles of 64 keep the unit as busy; of 16 x 16 and 16 x 128 their loads take 4 and 9/4 times their products.
    assert cost.matmul_efficiency(64, 64, 64 * 7) == pytest.approx(0.5 * 7 / 8)
    assert cost.matmul_efficiency(16, 16, 16 * 7) == pytest.approx(0.5 * 7 / 8 / 4)
    assert cost.matmul_efficiency(16, 1024, 128 * 7) == pytest.approx(0.5 * 7 / 8 * 4 / 9)
    assert cost.matmul_efficiency(8, 8, 16 * 7) == pytest.approx(0.5 * 7 / 8 / 16)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 512, 512), (512, 1, 512), (512, 512, 1), (1, 1, 512)])
def test_vectors_are_bound_by_their_bytes(m, n, k):
    cost = prices(NODE, 4)
    moved = 4 * 1000 * (m * k + k * n + m * n)
    assert cost.matmul(m, n, k, 1000, "float32", 4) == pytest.approx(cost.compute(0, moved, "float32"))


def test_roofline():
    cost = prices(NODE, 4)
    assert cost.compute(1e12, 0, "float32") == pytest.approx(2.0)  # half the peak is reached
    assert cost.compute(1e12, 0, "bfloat16") == pytest.approx(0.5)
    assert cost.compute(1e12, 0, "float32", efficiency=0.25) == pytest.approx(4.0)
    assert cost.compute(1.0, 1e11, "float32") == pytest.approx(1.0)


def test_rates_of_steps_are_below_those_of_operations_by_themselves():
    steps = dataclasses.replace(
        NODE, sustained_efficiency=0.5, memory_efficiency=0.25, kernel_start=1e-6, kernel_start_alone=3e-6
    )
    cost = prices(steps, 4)
    assert cost.compute(1e12, 0, "float32") == pytest.approx(4.0)
    assert cost.compute(1.0, 1e11, "float32") == pytest.approx(4.0)
    alone, bare = cost.matmul(512, 512, 512, 1, "float32", 4), prices(NODE, 4).matmul(512, 512, 512, 1, "float32", 4)
    assert alone == pytest.approx(bare + 3e-6)


MEASURED = dataclasses.replace(
    TWO_NODES,
    collectives=(
        Curve("all_gather", (2,), ((1e3, 1e-6), (2e3, 3e-6), (8e3, 4e-6))),
        Curve("all_gather", (4,), ((1e3, 5e-6), (1e6, 9e-6))),
    ),
)


@pytest.mark.parametrize(
    ("payload", "seconds"), [(1, 1e-6), (1e3, 1e-6), (1500, 2e-6), (2e3, 3e-6), (5e3, 3.5e-6), (16e3, 8e-6)]
)
def test_measured_collectives_are_interpolated(payload, seconds):
    cost = prices(MEASURED, 2, 2, 2)
    assert cost.collective("all_gather", ("c",), payload) == pytest.approx(seconds)
    alpha, beta = cost.coefficients("all_gather", ("c",), payload)
    assert alpha >= 0 and beta >= 0 and alpha + beta * payload == pytest.approx(seconds)


def test_groups_over_nodes_take_what_was_measured_within_one():
    cost, bare = prices(MEASURED, 2, 4), prices(TWO_NODES, 2, 4)
    inner, outer = cost.collective("all_gather", ("b",), 1e6), 1e-5 + 1e6 / 4 * (1 / 2) / SLOW
    assert inner == 9e-6
    assert cost.collective("all_gather", ("a", "b"), 1e6) == pytest.approx(inner + outer)
    assert cost.collective("all_reduce", ("a", "b"), 1e6) == bare.collective("all_reduce", ("a", "b"), 1e6)
    three = prices(dataclasses.replace(MEASURED, devices_per_node=3, nodes=1), 3)
    assert three.collective("all_gather", ("a",), 1e6) == 9e-6  # the next larger group


@pytest.mark.parametrize("points", [(), ((1e3, 0.0),), ((2e3, 1e-6), (1e3, 2e-6)), ((1e3, 2e-6), (2e3, 1e-6))])
def test_measured_collectives_ascend(points):
    with pytest.raises(OptionError, match="needs points"):
        dataclasses.replace(NODE, collectives=(Curve("all_gather", (2,), points),))


BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def agreements() -> dict[str, dict[str, object]]:
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
        device: {
            "rows": len(each),
            "within": [sum(abs(r - 1) <= 0.15 for r, _ in each), sum(abs(r - 1) <= 0.3 for r, _ in each)],
            "least": round(min(each)[0], 2),
            "greatest": round(max(each)[0], 2),
            "fitted": sum(fitted for _, fitted in each),
        }
        for device, each in by.items()
    }


def test_published_steps_agree_as_the_results_say_and_as_they_must():
    """At least 80 % within 15 % for the large table, and no device whose steps are mostly wrong."""
    published = DATA["published"]
    assert published == agreements()
    for found in published.values():
        assert found["within"][1] >= 0.7 * found["rows"]
    for device in ("H100-SXM", "A100-SXM-80GB"):
        assert published[device]["within"][0] >= 0.8 * published[device]["rows"]


def test_rates_that_were_measured_elsewhere_or_here_or_given_are_told_apart():
    for name in Cluster.preset_names():
        cluster = Cluster.preset(name)
        assert cluster.device in DATA["measured"]
        assert "measured elsewhere" in trust.origin(cluster)
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
