import dataclasses
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.cluster import ALLOCATOR_RESERVE, DEVICE_RESERVE, HOST_RESERVE, Cluster, Dispatch, Link, presets
from alpa_lite.cluster.topology import decompose, fit_sizes, mesh_shapes
from alpa_lite.errors import OptionError

SMALL = Cluster(
    device="x", devices_per_node=4, nodes=2, memory=1000, peak_flops={"f32": 1e12, "bf16": 4e12},
    memory_bandwidth=1e11, node_link=Link(1e10, 1e-6), network_link=Link(1e9, 1e-5),
)  # fmt: skip


@dataclass
class FakeDevice:
    """As much of `jax.Device` as `Cluster.local` reads."""

    device_kind: str
    platform: str = "gpu"
    process_index: int = 0
    coords: tuple[int, ...] = ()
    slice_index: int = 0
    limit: int | None = None

    def memory_stats(self):
        return None if self.limit is None else {"bytes_limit": self.limit}


@pytest.mark.parametrize("name", Cluster.preset_names())
def test_presets_are_complete(name):
    cluster = Cluster.preset(name)
    assert cluster.source and cluster.num_devices >= 8
    assert cluster.network_link is not None
    assert cluster.peak("bfloat16") >= cluster.peak("float32") or "V100" in cluster.device
    again = Cluster.from_json(json.loads(json.dumps(cluster.to_json())))
    assert again == cluster and again.fingerprint == cluster.fingerprint and hash(again) == hash(cluster)
    assert len(str(cluster)) < 100


def test_numbers_of_presets_count_one_direction_and_whole_nodes_under_names_in_any_case():
    v100 = Cluster.preset("p3.16xlarge")
    assert (v100.nodes, v100.devices_per_node) == (8, 8)
    assert v100.node_link.bandwidth == 6 * 25e9
    assert v100.network_link is not None and v100.network_link.bandwidth == 25e9 / 8
    assert Cluster.preset("v100") == v100 and Cluster.preset("H100") == Cluster.preset("h100")
    assert Cluster.preset("Ironwood", topology=(4, 4, 4)) == Cluster.preset("v7", topology=(4, 4, 4))
    assert Cluster.preset("h100").node_link.bandwidth == 900e9 / 2
    frontier = Cluster.preset("frontier", nodes=16)
    assert (frontier.num_devices, frontier.devices_per_card) == (128, 2)
    assert frontier.peak("bf16") < 383e12 / 1.9


def test_tpu_slices():
    slice_ = Cluster.preset("v5p", topology=(4, 4, 4))
    assert slice_.num_devices == 64 and slice_.wraparound == (True, True, True)
    assert Cluster.preset("v5p", topology=(2, 4, 4)).wraparound == (False, True, True)
    assert Cluster.preset("v5e", topology=(8, 16)).wraparound == (False, True)
    two = Cluster.preset("v5e", nodes=2, topology=(4, 4))
    assert two.num_devices == 32
    assert two.network_link is not None and two.network_link.bandwidth == 4 * 2.5e10  # sixteen chips have four hosts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "h1000"}, "p3.16xlarge"), ({"name": "h100", "nodes": 0}, "positive"),
        ({"name": "h100", "topology": (2, 4)}, "nodes="), ({"name": "v5p", "topology": (4, 4)}, "3 dims"),
        ({"name": "v5e", "topology": (4, 0)}, "1 to 16"), ({"name": "v5e", "topology": (32, 1)}, "1 to 16"),
    ],
)  # fmt: skip
def test_bad_presets(arguments, message):
    with pytest.raises(OptionError, match=message):
        Cluster.preset(**arguments)


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": 0}, {"memory": 1.5}, {"reserve": 1.0}, {"matmul_efficiency": 0}, {"sustained_efficiency": 1.5},
        {"memory_efficiency": 0}, {"kernel_start": -1e-6}, {"peak_flops": {"bf16": 1e12}}, {"network_link": None},
        {"devices_per_card": 2}, {"devices_per_card": 3, "card_link": Link(1e9)}, {"node_link": Link(0)},
        {"topology": (2, 3), "wraparound": (False, False)}, {"topology": (2, 2)},
    ],
)  # fmt: skip
def test_impossible_clusters_are_refused(changes):
    with pytest.raises(OptionError, match="Cluster "):
        dataclasses.replace(SMALL, **changes)


def test_fingerprint_depends_on_everything_but_the_source_and_data_are_complete():
    data = SMALL.to_json()
    del data["memory"]
    with pytest.raises(OptionError, match="memory"):
        Cluster.from_json(data)
    assert dataclasses.replace(SMALL, source="elsewhere").fingerprint == SMALL.fingerprint
    for changes in ({"memory": 1001}, {"nodes": 3}, {"node_link": Link(1e10, 2e-6)}, {"reserve": 0.2}):
        assert dataclasses.replace(SMALL, **changes).fingerprint != SMALL.fingerprint


def test_usable_memory_and_peaks_of_dtypes():
    assert SMALL.usable_memory == 1000 * (1 - DEVICE_RESERVE)
    assert SMALL.peak(np.dtype("float32")) == SMALL.peak("f32") == 1e12
    assert SMALL.peak(jnp.dtype("bfloat16")) == SMALL.peak("float16") == 4e12
    assert SMALL.peak("float64") == 0.5e12 and SMALL.peak(np.dtype("int32")) == 1e12 / 8
    assert SMALL.peak("float8_e4m3fn") == SMALL.peak("bool") == SMALL.peak("uint8") == 4e12


def test_local_cpu_divides_the_machine():
    cluster = Cluster.local()
    assert cluster.platform == "cpu" and cluster.num_devices == jax.device_count() == 8
    assert cluster.reserve == HOST_RESERVE
    one = Cluster.local(jax.devices()[:1])
    assert one.num_devices == 1 and abs(one.memory - 8 * cluster.memory) < 8
    assert one.peak("f32") == pytest.approx(8 * cluster.peak("f32"))
    assert cluster.mesh_shapes() == ((8,), (4, 2), (2, 2, 2))


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"), ("Tesla V100-SXM2-16GB", "p3.16xlarge"),
        ("Tesla V100-SXM2-32GB", "p3dn"), ("AMD Instinct MI250X", "mi250x"),
    ],
)  # fmt: skip
def test_local_gpus(kind, preset):
    devices = [FakeDevice(kind, process_index=i // 4, limit=70_000) for i in range(8)]
    cluster = Cluster.local(devices)
    expected = Cluster.preset(preset)
    assert (cluster.nodes, cluster.devices_per_node) == (2, 4)
    assert (cluster.memory, cluster.reserve) == (70_000, ALLOCATOR_RESERVE)
    assert (cluster.device, cluster.peak_flops) == (expected.device, expected.peak_flops)
    assert Cluster.local([FakeDevice(kind)]).memory == expected.memory


def test_local_tpus_take_their_coordinates():
    box = [FakeDevice("TPU v5 lite", "tpu", coords=(x, y, 0)) for x in range(2) for y in range(4)]
    assert Cluster.local(box).topology == (2, 4)
    two = Cluster.local([dataclasses.replace(one, slice_index=i, process_index=i) for i in range(2) for one in box])
    assert two.network_link == Cluster.preset("v5e", nodes=2, topology=(2, 4)).network_link  # of two hosts each
    scattered = Cluster.local([box[0], box[5], box[6]])
    assert scattered.topology == (3, 1) and scattered.wraparound == (False, False)
    assert Cluster.local([FakeDevice("TPU v4", "tpu", coords=(0, 0, z)) for z in range(4)]).topology == (1, 1, 4)


def test_known_local_devices_have_presets_and_others_are_refused():
    assert set(presets.DATA["device_kinds"].values()) <= set(Cluster.preset_names())
    with pytest.raises(OptionError, match="GTX 1080"):
        Cluster.local([FakeDevice("NVIDIA GTX 1080")])


def test_presets_need_no_devices():
    """JAX is told to use a platform that does not exist: whatever looks for devices fails."""
    code = "from alpa_lite import Cluster; print(Cluster.preset('h100').mesh_shapes()[0]); Cluster.local()"
    environment = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    run = [sys.executable, "-c", code]
    found = subprocess.run(run, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert found.stdout == "(8,)\n"
    assert found.returncode and "no_such_platform" in found.stderr


def test_mesh_shapes_of_switches():
    with pytest.raises(OptionError, match="the cluster has 8"):
        SMALL.mesh_shapes(num_devices=9)
    assert Cluster.preset("h100").mesh_shapes() == ((8,), (4, 2), (2, 2, 2))
    assert Cluster.preset("h100").mesh_shapes(max_axes=1) == ((8,),)
    assert Cluster.preset("h100").mesh_shapes(num_devices=6) == ((6,), (3, 2))
    assert Cluster.preset("h100").mesh_shapes(num_devices=1) == ((1,),)
    shapes = Cluster.preset("p3.16xlarge").mesh_shapes()
    two, three = [s for s in shapes if len(s) == 2], [s for s in shapes if len(s) == 3]
    assert two == [(32, 2), (16, 4), (8, 8), (4, 16), (2, 32)]
    assert three == [(8, 4, 2), (4, 4, 4), (4, 2, 8)]  # (2, 4, 8) costs what (4, 2, 8) does


def test_mesh_shapes_of_cards_and_tori():
    assert Cluster.preset("mi250x").mesh_shapes(max_axes=2) == ((8,), (4, 2), (2, 4))
    torus = Cluster.preset("v5p", topology=(4, 4, 4)).mesh_shapes()
    assert (4, 4, 4) in torus and (16, 4) in torus and (4, 16) not in torus
    uneven = Cluster.preset("v5p", topology=(4, 4, 8)).mesh_shapes()
    assert (16, 8) in uneven and (4, 32) in uneven


@given(st.integers(1, 200), st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_fitted_sizes_multiply_to_the_count(count, sizes):
    if count > 1 and max(sizes) == 1:
        return
    assert math.prod(fit_sizes(tuple(sizes), count)) == count


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_every_mesh_shape_uses_every_device_once(nodes, cards, a, b, torus):
    shape = {"topology": (2**a, 2**b), "wraparound": (False, False)} if torus else {}
    cluster = dataclasses.replace(SMALL, nodes=nodes, devices_per_node=2 ** (a + b) * (1 if torus else cards), **shape)
    shapes = cluster.mesh_shapes()
    assert len(set(shapes)) == len(shapes) and shapes[0] == (cluster.num_devices,)
    sizes = tuple(level.size for level in cluster.levels())
    for mesh in shapes:
        assert math.prod(mesh) == cluster.num_devices
        pieces = decompose(mesh, sizes)
        assert pieces is not None
        assert [math.prod(p.size for p in axis) for axis in pieces] == list(mesh)


def test_pieces():
    axes = decompose((16, 4), (8, 8))
    assert axes is not None
    outer, inner = axes
    assert [(p.level, p.size, p.stride) for p in outer] == [(1, 2, 4), (0, 8, 1)]
    assert [(p.level, p.size, p.stride) for p in inner] == [(1, 4, 1)]
    assert decompose((2, 12), (3, 8)) is None


@pytest.mark.parametrize("devices", [64, 128, 256, 1024, 4096])
def test_the_list_stays_short(devices):
    assert len(Cluster.preset("h100", nodes=devices // 8).mesh_shapes()) <= 20
    levels = Cluster.preset("h100", nodes=devices // 8).levels()
    assert len(mesh_shapes(levels, 2)) == math.log2(devices)


def test_chips_of_two_devices_are_cards_at_the_end_of_the_torus():
    cluster = Cluster.preset("v7", topology=(4, 4, 8))
    assert (cluster.topology, cluster.wraparound) == ((4, 4, 8, 2), (True, True, True, False))
    assert (cluster.num_devices, cluster.devices_per_card) == (256, 2)
    levels = cluster.levels()
    assert [level.kind for level in levels[1:]] == ["ring", "ring", "ring", "switch"]
    assert levels[-1].bandwidth == 12 * levels[-2].bandwidth
    assert cluster.part(2).card_link == cluster.card_link and cluster.part(1).card_link is None
    assert Cluster.from_json(cluster.to_json()) == cluster


def test_local_chips_of_two_devices():
    at = [(x, y, 0) for y in range(2) for x in range(2)]
    box = [FakeDevice("TPU7x", "tpu", coords=c) for c in at for _ in range(2)]
    cluster = Cluster.local(box)
    assert (cluster.topology, cluster.devices_per_card) == ((2, 2, 1, 2), 2)
    one_each = Cluster.local(box[::2])
    assert (one_each.topology, one_each.card_link, one_each.num_devices) == ((4, 1, 1), None, 4)


@pytest.mark.parametrize(
    ("name", "devices", "bf16", "gib"),
    [("b200", 8, 2250e12, 178), ("gb200", 72, 2500e12, 184), ("mi300x", 8, 1307.4e12, 191), ("v7", 8, 1153.5e12, 96)],
)
def test_new_machines(name, devices, bf16, gib):
    cluster = Cluster.preset(name)
    assert (cluster.num_devices, cluster.peak("bfloat16")) == (devices, bf16)
    assert cluster.memory == gib * 2**30
    assert cluster.mesh_shapes(max_axes=1) == ((devices,),)


def test_processes_dispatch_the_devices_of_a_node_or_of_a_host_of_tpus():
    nodes = [Cluster.preset("h100", nodes=2).controller(device) for device in range(16)]
    assert nodes == [0] * 8 + [1] * 8
    slices = Cluster.preset("v5e", nodes=2, topology=(2, 4))
    assert [slices.controller(device) for device in range(16)] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert Cluster.preset("v7", topology=(2, 2, 2)).controller(15) == 1  # chips with two devices each


def test_seconds_of_a_task_may_be_given_as_a_number():
    assert dataclasses.replace(SMALL, dispatch=2e-5).dispatch == Dispatch(2e-5)
    assert Dispatch(1.0, 0.25).seconds(4) == 2.0
    with pytest.raises(OptionError, match="dispatch"):
        dataclasses.replace(SMALL, dispatch=Dispatch(-1.0))
