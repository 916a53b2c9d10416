"""Transfer plans: pieces that fill every block once, senders that share the work, landings that the links favour."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alpa_lite.cluster import Cluster, Link
from alpa_lite.ir.layout import Layout, LogicalMesh, local_shape, replicated
from alpa_lite.ir.program import Program, Submesh, Transfer, buffer
from alpa_lite.passes.programs import links, transfers
from alpa_lite.passes.programs.transfers import blocks, plan_transfer, plans_of, price

F32 = jnp.dtype("float32")


def two_nodes(uplink: float = 1e9, per_node: int = 8, latency: float = 1e-5) -> Cluster:
    return Cluster(
        device="test",
        devices_per_node=per_node,
        nodes=2,
        memory=2**34,
        peak_flops={"f32": 1e13},
        memory_bandwidth=1e12,
        node_link=Link(1e11, 1e-6),
        network_link=Link(uplink, latency),
    )


FAST = dataclasses.replace(two_nodes(), nodes=1, devices_per_node=16, network_link=None)
CARDS = dataclasses.replace(two_nodes(), card_link=Link(4e11, 1e-6), devices_per_card=2)
TORUS = Cluster.preset("v5p", topology=(2, 2, 4))
CLUSTERS = (two_nodes(), FAST, CARDS, TORUS)


@st.composite
def submeshes(draw, axis: str):
    shape = draw(st.sampled_from([(1,), (2,), (4,), (8,), (2, 2), (4, 2), (2, 2, 2)]))
    mesh = LogicalMesh(shape, tuple(f"{axis}{i}" for i in range(len(shape))))
    return Submesh(mesh, draw(st.integers(0, 16 // mesh.size - 1)) * mesh.size)


@st.composite
def layouts(draw, mesh: LogicalMesh, rank: int):
    dims: list[tuple[str, ...]] = [()] * rank
    for axis in draw(st.permutations(mesh.axis_names)):
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            dims[place] = (*dims[place], axis)
    return Layout(tuple(dims))


@st.composite
def edges(draw):
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.sampled_from([8, 16, 24, 0])) for _ in range(rank))
    source, destination = draw(submeshes("s")), draw(submeshes("d"))
    src, dst = draw(layouts(source.mesh, rank)), draw(layouts(destination.mesh, rank))
    return shape, F32, src, source, dst, destination, draw(st.sampled_from(CLUSTERS))


def covers(plan: transfers.TransferPlan) -> None:
    """Asserts that the pieces of each destination fill its block of the landing, each element once."""
    held = dict(zip(plan.src_mesh.devices, blocks(plan.shape, plan.src, plan.src_mesh.mesh), strict=True))
    needs = blocks(plan.shape, plan.landing, plan.dst_mesh.mesh)
    assert {piece.destination for piece in plan.pieces} == set(plan.dst_mesh.devices)
    for device, need in zip(plan.dst_mesh.devices, needs, strict=True):
        filled = np.zeros(plan.shape, np.int8)
        for piece in plan.pieces:
            if piece.destination == device:
                assert all(
                    a <= low and high <= b for (low, high), (a, b) in zip(piece.ranges, held[piece.source], strict=True)
                )
                part = tuple(slice(low, high) for low, high in piece.ranges)
                filled[part] += 1
                assert piece.bytes == filled[part].size * plan.dtype.itemsize
        wanted = np.zeros(plan.shape, np.int8)
        wanted[tuple(slice(low, high) for low, high in need)] = 1
        np.testing.assert_array_equal(filled, wanted)


@given(edges())
@settings(max_examples=120, deadline=None)
def test_pieces_fill_every_block_once(edge):
    plan = plan_transfer(*edge)
    covers(plan)
    assert plan.bytes == sum(piece.bytes for piece in plan.pieces if piece.source != piece.destination)
    assert plan.seconds >= 0 and math.isfinite(plan.seconds)
    assert (plan.landing == plan.dst) == (plan.steps == ())
    if plan.steps:
        assert plan.steps[0].before == plan.landing and plan.steps[-1].after == plan.dst
        for step in plan.steps:
            local_shape(plan.shape, step.after, plan.dst_mesh.mesh)
    if plan.equal:
        assert blocks(plan.shape, plan.src, plan.src_mesh.mesh) == blocks(plan.shape, plan.landing, plan.dst_mesh.mesh)


@given(edges())
@settings(max_examples=120, deadline=None)
def test_no_landing_is_much_cheaper_than_the_chosen_one(edge):
    *arguments, cluster = edge
    array = transfers._Array(*arguments)
    assert 0 not in array.shape or transfers._landings(array) == (array.dst,)  # nothing is sent
    best = min(transfers._plan(array, landing, cluster).seconds for landing in transfers._landings(array))
    assert plan_transfer(*edge).seconds <= 1.25 * best


@given(edges(), st.integers(1, 3))
@settings(deadline=None)
def test_a_plan_between_later_nodes_is_the_same_plan_there(edge, nodes):
    """Submeshes that begin so many nodes later are as far apart: every piece is of the devices that stand there."""
    shape, dtype, src, source, dst, destination, cluster = edge
    link = cluster.network_link or Link(1e9, 1e-5)
    cluster = dataclasses.replace(cluster, nodes=cluster.nodes + nodes, network_link=link)
    by = nodes * cluster.devices_per_node
    there = [dataclasses.replace(one, first=one.first + by) for one in (source, destination)]
    plan = plan_transfer(shape, dtype, src, source, dst, destination, cluster)
    moved = plan_transfer(shape, dtype, src, there[0], dst, there[1], cluster)
    direct = transfers._cheapest(transfers._Array(shape, dtype, src, there[0], dst, there[1]), cluster)
    assert moved == direct
    assert [p.source + by for p in plan.pieces] == [p.source for p in moved.pieces]
    assert plan.seconds == moved.seconds


@given(edges(), st.sampled_from([1, 1 << 8, 1 << 14]))
@settings(max_examples=150, deadline=None)
def test_price_is_near_the_plan(edge, scale):
    """Of submeshes that are the same or apart, as stages' are. A torus shares its links, which the price leaves out."""
    shape, _, src, source, dst, destination, cluster = edge
    assume(0 not in shape)  # what an empty array costs is nobody's concern
    assume(source == destination or not set(source.devices) & set(destination.devices))
    arguments = (shape[0] * scale, *shape[1:]), F32, src, source, dst, destination, cluster
    plan = plan_transfer(*arguments)
    factor = 4 if cluster is TORUS else 2
    assert plan.seconds / factor <= price(*arguments) <= factor * plan.seconds


SOURCE = Submesh(LogicalMesh((8,), ("x",)), 0)
TARGET = Submesh(LogicalMesh((8,), ("y",)), 8)


@pytest.mark.parametrize("src", [Layout((("x",), ())), replicated(2), Layout(((), ("x",)))])
def test_slow_uplinks_are_crossed_once_and_gathered_behind(src):
    shape = (1024, 1024)
    slow = plan_transfer(shape, F32, src, SOURCE, replicated(2), TARGET, two_nodes(1e9))
    assert slow.landing.used == {"y"}
    assert [step.kind for step in slow.steps] == ["all_gather"]
    assert slow.bytes == 4 * 2**20
    direct = transfers._plan(
        transfers._Array(shape, F32, src, SOURCE, replicated(2), TARGET), replicated(2), two_nodes(1e9)
    )
    assert direct.bytes == 8 * slow.bytes
    assert direct.seconds > 7 * slow.seconds


def test_one_device_sends_each_element_once_to_many():
    one = Submesh(LogicalMesh((1,), ("x",)), 0)
    plan = plan_transfer((1024, 1024), F32, replicated(2), one, replicated(2), TARGET, two_nodes())
    assert plan.bytes == 4 * 2**20 and plan.landing.used == {"y"}


def test_small_arrays_are_sent_whole():
    """A gather costs its latency: below some size, sending more bytes is cheaper."""
    plan = plan_transfer((8,), F32, replicated(1), SOURCE, replicated(1), TARGET, two_nodes(1e11, latency=1e-6))
    assert plan.landing == plan.dst and plan.equal and plan.bytes == 8 * 32


def test_many_small_messages_become_whole_blocks_and_an_all_to_all():
    plan = plan_transfer((64, 64), F32, Layout((("x",), ())), SOURCE, Layout(((), ("y",))), TARGET, two_nodes(1e11))
    assert plan.landing == Layout((("y",), ())) and plan.equal and len(plan.pieces) == 8
    assert [step.kind for step in plan.steps] == ["all_to_all"]


def test_an_odd_split_has_uneven_pieces():
    three = Submesh(LogicalMesh((3,), ("y",)), 8)
    two = Submesh(LogicalMesh((2,), ("x",)), 0)
    plan = plan_transfer((6, 2), F32, Layout((("x",), ())), two, Layout((("y",), ())), three, FAST)
    covers(plan)
    assert [piece.ranges[0] for piece in plan.pieces] == [(0, 2), (2, 3), (3, 4), (4, 6)]
    assert plan.seconds > 0


def test_replicas_share_the_sending():
    plan = plan_transfer((64, 64), F32, replicated(2), SOURCE, Layout((("y",), ())), TARGET, two_nodes())
    assert sorted(piece.source for piece in plan.pieces) == list(range(8))


def test_a_replica_in_the_same_node_sends():
    """The source lies over both nodes, replicated: nothing needs to cross."""
    both = Submesh(LogicalMesh((2, 4), ("n", "x")), 0)
    target = Submesh(LogicalMesh((4,), ("y",)), 8)
    cluster = two_nodes(per_node=4)
    cluster = dataclasses.replace(cluster, nodes=3)
    second_node = Submesh(LogicalMesh((4,), ("y",)), 4)
    plan = plan_transfer((8, 8), F32, Layout(((), ("x",))), both, Layout(((), ("y",))), second_node, cluster)
    assert plan.bytes == 0 and all(piece.source == piece.destination for piece in plan.pieces)
    plan = plan_transfer((8, 8), F32, replicated(2), both, Layout((("y",), ())), target, cluster)
    assert len({piece.source for piece in plan.pieces}) == 4
    nodes = [piece.source // 4 for piece in plan.pieces]
    assert nodes.count(0) == nodes.count(1) == 2  # both uplinks


def test_on_one_submesh_nothing_is_sent():
    plan = plan_transfer((64, 64), F32, Layout((("x",), ())), SOURCE, replicated(2), SOURCE, two_nodes())
    assert plan.bytes == 0 and [step.kind for step in plan.steps] == ["all_gather"] and not plan.equal


def test_seconds_by_hand():
    """Eight devices send 1/8 of 4 MiB each through one uplink of 1 GB/s; then they gather at 100 GB/s."""
    plan = plan_transfer((1024, 1024), F32, Layout((("x",), ())), SOURCE, Layout((("y",), ())), TARGET, two_nodes())
    assert plan.seconds == pytest.approx(1e-6 + 2**22 / 1e9)  # the start, and the uplink
    gathered = plan_transfer((1024, 1024), F32, Layout((("x",), ())), SOURCE, replicated(2), TARGET, two_nodes())
    assert gathered.seconds - plan.seconds == pytest.approx(1e-6 + 3e-6 + 2**22 * 7 / 8 / 1e11)


def test_within_a_node_ports_are_the_bottleneck():
    plan = plan_transfer((1024, 1024), F32, Layout((("x",), ())), SOURCE, Layout((("y",), ())), TARGET, FAST)
    assert plan.seconds == pytest.approx(1e-6 + 1e-6 + 2**19 / 1e11)


def test_links_of_a_torus():
    cluster = Cluster.preset("v5p", topology=(4, 4, 4))
    assert cluster.wraparound == (True, True, True)

    def hops(source, destination):
        route = links.route(cluster, source, destination)
        return [resource[2:] for resource, *_ in route if resource[0] == "link"]

    assert hops(0, 1) == [(0, 2, True)]
    assert hops(0, 3) == [(0, 2, False)]  # the shorter way round
    assert hops(0, 16 + 4) == [(0, 0, True), (16, 1, True)]
    assert len(hops(0, 32 + 8 + 2)) == 6
    line = Cluster.preset("v5p", topology=(2, 2, 2))
    assert line.wraparound == (False, False, False)
    assert [r[2:] for r, *_ in links.route(line, 7, 0) if r[0] == "link"] == [
        (7, 0, False),
        (3, 1, False),
        (1, 2, False),
    ]


def test_shared_torus_links_add_up():
    """Devices 0 and 1 of a line of four send over the link from 1 to 2."""
    cluster = dataclasses.replace(FAST, devices_per_node=4, topology=(4,), wraparound=(False,), platform="tpu")
    loads = links.Loads(cluster)
    loads.add(0, 2, 10**8)
    loads.add(1, 3, 10**8)
    assert loads.seconds == pytest.approx(1e-6 + 2e-3)


def test_cards_are_faster_than_the_node():
    near = links.route(CARDS, 0, 1)
    far = links.route(CARDS, 1, 2)
    assert near[0][1] == pytest.approx(far[0][1] / 4)


def test_plans_of_a_program():
    sent = buffer(0, SOURCE, Layout((("x",), ())), (64, 32), F32)
    received = buffer(1, TARGET, replicated(2), (64, 32), F32)
    program = Program((SOURCE, TARGET), (), (sent, received), (Transfer(0, 1, (0,), (1,)),), ((), ()), (), (), ())
    assert plans_of(program, 0, two_nodes()) == (
        plan_transfer((64, 32), F32, sent.layout, SOURCE, received.layout, TARGET, two_nodes()),
    )
    assert len({*plans_of(program, 0, two_nodes()), *plans_of(program, 0, two_nodes())}) == 1


def test_scalars_and_empty_arrays():
    scalar = plan_transfer((), F32, replicated(0), SOURCE, replicated(0), TARGET, two_nodes())
    covers(scalar)
    assert {piece.bytes for piece in scalar.pieces} == {4}
    empty = plan_transfer((0, 8), F32, Layout((("x",), ())), SOURCE, Layout(((), ("y",))), TARGET, two_nodes())
    covers(empty)
    assert empty.bytes == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="partial sums cannot be sent"):
        plan_transfer((8,), F32, Layout(((),), ("x",)), SOURCE, replicated(1), TARGET, two_nodes())
    with pytest.raises(ValueError, match="does not divide"):
        plan_transfer((9,), F32, Layout((("x",),)), SOURCE, replicated(1), TARGET, two_nodes())
    with pytest.raises(ValueError, match="dst_mesh has devices to 23"):
        beyond = Submesh(TARGET.mesh, 16)
        plan_transfer((8,), F32, Layout((("x",),)), SOURCE, replicated(1), beyond, two_nodes())
