"""Transfers: pieces that fill every block once, landings that the links favour, rounds, and bytes between processes."""

import dataclasses
import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alpa_lite.cluster import Cluster, Link
from alpa_lite.ir.layout import Layout, LogicalMesh, local_shape, replicated_layout
from alpa_lite.ir.program import Program, Submesh, peak_bytes
from alpa_lite.passes.programs import links, staged, transfers
from alpa_lite.passes.programs.crossings import crossing_bytes
from alpa_lite.passes.programs.rounds import Part, rounds
from alpa_lite.passes.programs.transfers import blocks, plan_transfer, price
from alpa_lite.runtime.multihost.permute import CrossProcessTransfer
from tests import pipeline_driver
from tests.passes.layers.division_cases import deep, driven

F32 = jnp.dtype("float32")


def two_nodes(uplink: float = 1e9, per_node: int = 8, latency: float = 1e-5) -> Cluster:
    return Cluster(
        device="test", devices_per_node=per_node, nodes=2, memory=2**34, peak_flops={"f32": 1e13},
        memory_bandwidth=1e12, node_link=Link(1e11, 1e-6), network_link=Link(uplink, latency),
    )  # fmt: skip


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
    needs = blocks(plan.shape, plan.landing_layout, plan.dst_mesh.mesh)
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
    assert (plan.landing_layout == plan.dst) == (plan.steps == ())
    if plan.steps:
        assert plan.steps[0].source == plan.landing_layout and plan.steps[-1].target == plan.dst
        for step in plan.steps:
            local_shape(plan.shape, step.target, plan.dst_mesh.mesh)
    if plan.is_equal:
        assert blocks(plan.shape, plan.src, plan.src_mesh.mesh) == blocks(
            plan.shape, plan.landing_layout, plan.dst_mesh.mesh
        )


@given(edges())
@settings(max_examples=120, deadline=None)
def test_no_landing_is_much_cheaper_than_the_chosen_one(edge):
    *arguments, cluster = edge
    array = transfers._Array(*arguments)
    assert 0 not in array.shape or transfers._landings(array) == (array.dst,)  # nothing is sent
    best = min(transfers._plan(array, landing, cluster).seconds for landing in transfers._landings(array))
    assert plan_transfer(*edge).seconds <= 1.25 * best


@given(edges(), st.sampled_from([1, 1 << 8, 1 << 14]))
@settings(max_examples=100, deadline=None)
def test_price_is_near_the_plan(edge, scale):
    """Of submeshes that are the same or apart, as stages' are. A torus shares its links, which the price leaves out."""
    shape, _, src, source, dst, destination, cluster = edge
    assume(0 not in shape)  # what an empty array costs is nobody's concern
    assume(source == destination or not set(source.devices) & set(destination.devices))
    arguments = (shape[0] * scale, *shape[1:]), F32, src, source, dst, destination, cluster
    plan = plan_transfer(*arguments)
    factor = 4 if cluster is TORUS else 2
    assert plan.seconds / factor <= price(*arguments) <= factor * plan.seconds


def submesh(size: int, axis: str, first: int) -> Submesh:
    return Submesh(LogicalMesh((size,), (axis,)), first)


SOURCE, TARGET = submesh(8, "x", 0), submesh(8, "y", 8)
ROWS, COLUMNS, NEW_ROWS, NEW_COLUMNS = (Layout(d) for axis in "xy" for d in (((axis,), ()), ((), (axis,))))


def planned(shape, src, dst, *, source=SOURCE, target=TARGET, cluster=None):
    return plan_transfer(shape, F32, src, source, dst, target, cluster or two_nodes())


@pytest.mark.parametrize(
    ("src", "size"), [(ROWS, 8), (replicated_layout(2), 8), (COLUMNS, 8), (replicated_layout(2), 1)], ids=str
)
def test_slow_uplinks_are_crossed_once_and_gathered_behind(src, size):
    plan = planned((1024, 1024), src, replicated_layout(2), source=submesh(size, "x", 0))
    assert plan.landing_layout.used_axes == {"y"} and plan.bytes == 4 * 2**20
    assert [step.kind for step in plan.steps] == ["all_gather"]


def test_small_arrays_are_sent_whole():
    """A gather costs its latency: below some size, sending more bytes is cheaper."""
    plan = planned((8,), replicated_layout(1), replicated_layout(1), cluster=two_nodes(1e11, latency=1e-6))
    assert plan.landing_layout == plan.dst and plan.is_equal and plan.bytes == 8 * 32


def test_many_small_messages_become_whole_blocks_and_an_all_to_all():
    plan = planned((64, 64), ROWS, NEW_COLUMNS, cluster=two_nodes(1e11))
    assert plan.landing_layout == NEW_ROWS and plan.is_equal and len(plan.pieces) == 8
    assert [step.kind for step in plan.steps] == ["all_to_all"]


def test_replicas_share_the_sending_and_send_within_their_node():
    plan = planned((64, 64), replicated_layout(2), NEW_ROWS)
    assert sorted(piece.source for piece in plan.pieces) == list(range(8))
    both = Submesh(LogicalMesh((2, 4), ("n", "x")), 0)  # on two of three nodes
    cluster = dataclasses.replace(two_nodes(per_node=4), nodes=3)
    plan = planned((8, 8), COLUMNS, NEW_COLUMNS, source=both, target=submesh(4, "y", 4), cluster=cluster)
    assert plan.bytes == 0 and all(piece.source == piece.destination for piece in plan.pieces)
    plan = planned((8, 8), replicated_layout(2), NEW_ROWS, source=both, target=submesh(4, "y", 8), cluster=cluster)
    assert len({piece.source for piece in plan.pieces}) == 4
    nodes = [piece.source // 4 for piece in plan.pieces]
    assert nodes.count(0) == nodes.count(1) == 2  # both uplinks


def test_seconds_by_hand():
    """Eight devices send 1/8 of 4 MiB each through one uplink of 1 GB/s; then they gather at 100 GB/s."""
    plan, gathered = (planned((1024, 1024), ROWS, dst) for dst in (NEW_ROWS, replicated_layout(2)))
    assert plan.seconds == pytest.approx(1e-6 + 2**22 / 1e9)  # the start, and the uplink
    assert gathered.seconds - plan.seconds == pytest.approx(1e-6 + 3e-6 + 2**22 * 7 / 8 / 1e11)
    near = planned((1024, 1024), ROWS, NEW_ROWS, cluster=FAST)  # within a node, where ports are the bottleneck
    assert near.seconds == pytest.approx(1e-6 + 1e-6 + 2**19 / 1e11)


def test_links_of_a_torus():
    def hops(cluster, source, destination):
        return [resource[2:] for resource, *_ in links.route(cluster, source, destination) if resource[0] == "link"]

    cluster = Cluster.preset("v5p", topology=(4, 4, 4))
    assert cluster.wraparound == (True, True, True)
    assert hops(cluster, 0, 1) == [(0, 2, True)]
    assert hops(cluster, 0, 3) == [(0, 2, False)]  # the shorter way round
    assert hops(cluster, 0, 16 + 4) == [(0, 0, True), (16, 1, True)]
    assert len(hops(cluster, 0, 32 + 8 + 2)) == 6
    line = Cluster.preset("v5p", topology=(2, 2, 2))
    assert line.wraparound == (False, False, False)
    assert hops(line, 7, 0) == [(7, 0, False), (3, 1, False), (1, 2, False)]


def test_shared_torus_links_add_up():
    """Devices 0 and 1 of a line of four send over the link from 1 to 2."""
    cluster = dataclasses.replace(FAST, devices_per_node=4, topology=(4,), wraparound=(False,), platform="tpu")
    loads = links.Loads(cluster)
    loads.add(0, 2, 10**8)
    loads.add(1, 3, 10**8)
    assert loads.seconds == pytest.approx(1e-6 + 2e-3)


def test_cards_are_faster_than_the_node():
    near, far = (links.route(CARDS, source, source + 1) for source in (0, 1))
    assert near[0][1] == pytest.approx(far[0][1] / 4)


def test_scalars_and_empty_arrays():
    scalar = planned((), replicated_layout(0), replicated_layout(0))
    covers(scalar)
    assert {piece.bytes for piece in scalar.pieces} == {4}
    empty = planned((0, 8), ROWS, NEW_COLUMNS)
    covers(empty)
    assert empty.bytes == 0


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="partial sums cannot be sent"):
        planned((8,), Layout(((),), ("x",)), replicated_layout(1))
    with pytest.raises(ValueError, match="does not divide"):
        planned((9,), Layout((("x",),)), replicated_layout(1))
    with pytest.raises(ValueError, match="dst_mesh has devices to 23"):
        planned((8,), Layout((("x",),)), replicated_layout(1), target=submesh(8, "y", 16))


SHAPE = (12, 8)


def cut_blocks(cuts: tuple[int, int], copies: int, first: int) -> dict[int, tuple[tuple[int, int], ...]]:
    """The cut_blocks of devices numbered from `first`: the array cut along both dims, each block on some devices."""
    sizes = [size // cut for size, cut in zip(SHAPE, cuts, strict=True)]
    grid = itertools.product(*map(range, cuts), range(copies))
    return {
        first + n: tuple((i * size, (i + 1) * size) for i, size in zip(place[:2], sizes, strict=True))
        for n, place in enumerate(grid)
    }


def parts_between(have, need):
    """Each piece from the first device that has it."""
    out = []
    for receiver, wanted in need.items():
        seen = set()
        for sender, block in have.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, wanted, strict=True))
            if all(low < high for low, high in common) and common not in seen:
                seen.add(common)
                out.append(Part(sender, receiver, common))
    return out


CUTS = [((1, 1), 1), ((1, 1), 2), ((2, 1), 1), ((4, 1), 1), ((1, 4), 1), ((2, 2), 1), ((3, 1), 1), ((2, 1), 2)]


@pytest.mark.parametrize("source", CUTS)
@pytest.mark.parametrize("goal", CUTS)
def test_all_arrives(source, goal):
    have = cut_blocks(*source, first=0)
    need = cut_blocks(*goal, first=len(have))
    parts = parts_between(have, need)
    made = rounds(parts, have, need)
    whole = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    got = {device: np.full([high - low for low, high in block], -1) for device, block in need.items()}
    for one in made:
        senders, receivers = zip(*one.pairs, strict=True)
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
        for hop in one.hops:
            block = whole[tuple(slice(*span) for span in have[hop.source])]
            taken = tuple(slice(start, start + size) for start, size in zip(hop.source_start, one.shape, strict=True))
            put = tuple(
                slice(start, start + size) for start, size in zip(hop.destination_start, one.shape, strict=True)
            )
            got[hop.destination][put] = block[taken]
    for device, block in need.items():
        assert np.array_equal(got[device], whole[tuple(slice(*span) for span in block)])
    assert sum(len(one.hops) for one in made) == len(parts)
    shapes = {tuple(high - low for low, high in part.ranges) for part in parts}
    if len(shapes) == 1:
        ends = Counter(p.source for p in parts), Counter(p.destination for p in parts)
        assert len(made) == max(max(one.values()) for one in ends)


def nodes(count: int, devices: int) -> Cluster:
    return dataclasses.replace(Cluster.preset("h100", nodes=count), devices_per_node=devices)


def kept(program: Program, cluster: Cluster) -> Counter[int]:
    """Bytes of zeros that the runtime keeps on each device, were every transfer one between processes."""
    edges = {transfers.plans_of(program, number, cluster) for number in range(len(program.transfers))}
    movers = [CrossProcessTransfer(plans, jax.devices()) for plans in edges]
    blocks = {id(block): block for mover in movers for one in mover._union._zeros for block in one}
    found: Counter[int] = Counter()
    for block in blocks.values():
        found[block.device.id] += block.nbytes
    return found


@pytest.mark.parametrize("devices", [1, 2])
def test_blocks_that_stay_are_those_of_the_runtime(devices: int) -> None:
    """The plain model's stages hand on an activation of 8 x 8 floats; each device has a part of its rows or all."""
    cluster = nodes(2, devices)
    pipeline = pipeline_driver.drive(*deep(2), devices=(devices, devices), cuts=(1,), cluster=cluster)
    program = pipeline.pipeline.program
    found = crossing_bytes(program, cluster)
    zeros = kept(program, cluster)
    for mesh, submesh in enumerate(program.submeshes):
        assert {zeros[device] for device in submesh.devices} == {found[mesh][0]}
        assert found[mesh][0] > 0
        assert found[mesh][1] == 8 * 8 * 4 // devices  # it lands in parts, which the destination gathers


def test_submeshes_of_one_process_need_none_and_those_of_two_add_to_their_memory() -> None:
    pipeline = driven("plain", 2, "1f1b")
    program = pipeline.pipeline.program
    assert crossing_bytes(program, nodes(1, 8)) == ((0, 0), (0, 0))
    plain = peak_bytes(program)
    for cluster in (nodes(1, 8), nodes(2, 1)):
        used = staged._bytes(pipeline.pipeline, pipeline.stages, cluster)
        blocks = crossing_bytes(program, cluster)
        assert [peak for peak, _ in used] == [a + b for a, (b, _) in zip(plain, blocks, strict=True)]
        assert all(rest >= dropped for (_, rest), (_, dropped) in zip(used, blocks, strict=True))
