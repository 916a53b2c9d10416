"""Arrays cross between submeshes bit for bit, in the planned bytes, without waiting and without the host."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_lite.ir.layout import Layout, LogicalMesh, replicated_layout
from alpa_lite.ir.program import Submesh
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.programs import transfers
from alpa_lite.passes.programs.transfers import TransferPlan, plan_transfer
from alpa_lite.runtime import placement
from alpa_lite.runtime.meshes import mesh_of
from alpa_lite.runtime.transfer import Transfer
from gallery.batches import f32
from tests.helpers import two_machines
from tests.marks import one_in

F32 = jnp.dtype("float32")
SHAPES = ((1,), (2,), (4,), (8,), (2, 2), (4, 2), (2, 2, 2))
CLUSTER = two_machines(memory=2**30, network=1e9)
ROWS = (("s0",), ())


def submesh(shape: tuple[int, ...], axis: str, *, last: bool = False) -> Submesh:
    mesh = LogicalMesh(shape, tuple(f"{axis}{i}" for i in range(len(shape))))
    return Submesh(mesh, 8 - mesh.size if last else 0)


def layouts(mesh: LogicalMesh, rank: int) -> Iterator[Layout]:
    """Every layout of one and two dims, with axes in every order."""
    for places in itertools.product(range(-1, rank), repeat=len(mesh.axis_names)):
        orders = []
        for dim in range(rank):
            held = [axis for axis, place in zip(mesh.axis_names, places, strict=True) if place == dim]
            orders.append(list(itertools.permutations(held)))
        yield from (Layout(dims) for dims in itertools.product(*orders))


def place(value, layout: Layout, on: Submesh) -> jax.Array:
    sharding = NamedSharding(mesh_of(on.mesh, jax.devices()[on.first :]), spec_of(layout))
    return jax.device_put(value, sharding)


def bits(array) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jax.dtypes.extended):
        array = jax.random.key_data(array)
    return np.frombuffer(np.asarray(array).tobytes(), np.uint8)


def move(plans: list[TransferPlan], values: list) -> list[jax.Array]:
    """Moves the values, and asserts that they arrive as planned."""
    arrays = [place(value, plan.src, plan.src_mesh) for plan, value in zip(plans, values, strict=True)]
    moved = Transfer(plans, jax.devices())(arrays)
    for plan, value, array in zip(plans, values, moved, strict=True):
        on = plan.dst_mesh
        want = NamedSharding(mesh_of(on.mesh, jax.devices()[on.first :]), spec_of(plan.dst))
        assert placement.is_placed(array, want)
        assert array.shape == plan.shape and array.dtype == plan.dtype
        np.testing.assert_array_equal(bits(array), bits(value))
        index = want.addressable_devices_indices_map(plan.shape)
        for shard in array.addressable_shards:  # every replica, not one of each
            np.testing.assert_array_equal(bits(shard.data), bits(value[index[shard.device]] if value.ndim else value))
    return moved


def move_all(plans: list[TransferPlan]) -> None:
    move(plans, [np.random.default_rng(0).standard_normal(plan.shape).astype(np.float32) for plan in plans])


def pairs(source: Submesh, destination: Submesh, rank: int) -> Iterator[TransferPlan]:
    shape = (16, 8)[:rank]
    for src, dst in itertools.product(layouts(source.mesh, rank), layouts(destination.mesh, rank)):
        yield plan_transfer(shape, F32, src, source, dst, destination, CLUSTER)


def every_landing(plan: TransferPlan) -> Iterator[TransferPlan]:
    array = transfers._Array(plan.shape, plan.dtype, plan.src, plan.src_mesh, plan.dst, plan.dst_mesh)
    return (transfers._plan(array, landing, CLUSTER) for landing in transfers._landings(array))


EDGES = [((4,), (4,)), ((1,), (4,)), ((2, 2), (4,)), ((8,), (2, 2)), ((4, 2), (4, 2))]


@pytest.mark.parametrize(("have", "want"), EDGES)
def test_pairs_of_layouts(have, want):
    """A sample; submeshes of eight devices overlap with, or are, the other."""
    source, destination = submesh(have, "s"), submesh(want, "d", last=True)
    plans = [plan for rank in (1, 2) for plan in pairs(source, destination, rank)]
    move_all(random.Random(0).sample(plans, min(10, len(plans))))


@pytest.mark.slow
@pytest.mark.parametrize(("have", "want"), one_in(5, itertools.product(SHAPES, SHAPES)))
def test_all_pairs_of_layouts(have, want):
    """Every pair as it is planned (of meshes of three axes 100), and a sample in every landing that was not chosen."""
    source, destination = submesh(have, "s"), submesh(want, "d", last=True)
    plans = [plan for rank in (1, 2) for plan in pairs(source, destination, rank)]
    if len(have) == 3 or len(want) == 3:
        plans = random.Random(0).sample(plans, min(100, len(plans)))
    sample = random.Random(1).sample(plans, min(8, len(plans)))
    plans = list(dict.fromkeys([*plans, *(other for plan in sample for other in every_landing(plan))]))
    for start in range(0, len(plans), 100):
        move_all(plans[start : start + 100])


@pytest.mark.slow
def test_submeshes_that_overlap_in_part():
    source = submesh((4,), "s")
    for first in (1, 2, 3):
        move_all(list(pairs(source, Submesh(LogicalMesh((4,), ("d",)), first), 2)))


@pytest.mark.parametrize("want", [(2, 2), (1,)])
def test_every_kind_of_array(want):
    source, destination = submesh((4,), "s"), submesh(want, "d", last=True)
    dtypes = ("bfloat16", "int8", "bool", "complex64", "float8_e4m3fn")
    values = [jnp.arange(128).reshape(16, 8).astype(dtype) for dtype in dtypes]
    values += [jax.random.split(jax.random.key(3), (16, 8)), jax.random.split(jax.random.key(4, impl="rbg"), (16, 8))]
    values += [jnp.zeros((0, 8), jnp.float32)]
    across, apart, src = Layout(((), destination.mesh.axis_names)), replicated_layout(2), Layout(ROWS)
    cases = [(value, src, across) for value in values] + [(value, src, apart) for value in values[::2]]
    scalars = (jnp.float32(1.5), jax.random.key(7), jnp.bool_(True), jnp.int32(-3))
    cases += [(value, replicated_layout(0), replicated_layout(0)) for value in scalars]
    plans = [plan_transfer(v.shape, v.dtype, src, source, dst, destination, CLUSTER) for v, src, dst in cases]
    move(plans, [value for value, *_ in cases])


def test_uneven_pieces_and_a_gather_behind_a_slow_uplink():
    source, destination = submesh((2,), "s"), submesh((3,), "d", last=True)
    both = [Layout((("d0",), ())), Layout(((), ("d0",)))]
    move_all([plan_transfer((6, 6), F32, Layout(ROWS), source, dst, destination, CLUSTER) for dst in both])
    source, destination = submesh((4,), "s"), submesh((4,), "d", last=True)
    plan = plan_transfer((512, 512), F32, Layout(ROWS), source, replicated_layout(2), destination, CLUSTER)
    assert plan.landing_layout.used_axes == {"d0"} and plan.bytes == 4 * 512 * 512
    move_all([plan])


def test_bytes_are_those_of_the_plan(monkeypatch):
    source, destination = submesh((4,), "s"), submesh((2, 2), "d", last=True)
    plans = random.Random(0).sample([*pairs(source, destination, 2)], 10)
    arrays = [place(np.ones(plan.shape, np.float32), plan.src, source) for plan in plans]
    mover, calls, put = Transfer(plans, jax.devices()), [], jax.device_put

    def counted(values, targets):
        calls.append(sum(s.data.nbytes for value in values for s in value.addressable_shards))
        return put(values, targets)

    monkeypatch.setattr(jax, "device_put", counted)
    mover(arrays)
    assert calls == [sum(plan.bytes for plan in plans)]


def blocked(on: Submesh, layout: Layout, release: threading.Event) -> jax.Array:
    """An array whose first block is computed only once `release` is set, or after 200 s."""

    def wait() -> np.float32:
        release.wait(200)
        return np.float32(0)

    def local(block):
        return block + io_callback(wait, f32(), ordered=False)

    spec = spec_of(layout)
    mesh = mesh_of(on.mesh, jax.devices()[on.first :])
    array = place(np.arange(64, dtype=np.float32).reshape(8, 8), layout, on)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return run(array)


def assert_moves_without_waiting(plan: TransferPlan) -> None:
    """The mover returns before the source is computed; reading it on the host would wait."""
    release = threading.Event()
    mover, source = Transfer([plan], jax.devices()), blocked(plan.src_mesh, plan.src, release)
    arrays: list[Any] = [source]  # jax.Array's annotations lack is_ready
    try:
        arrays += mover([source])
        assert not any(array.is_ready() for array in arrays)
    finally:
        release.set()
    np.testing.assert_array_equal(np.asarray(arrays[-1]), np.arange(64, dtype=np.float32).reshape(8, 8))


@pytest.mark.parametrize("want", [Layout((("d0",), ())), Layout(((), ("d0",))), replicated_layout(2)])
@pytest.mark.parametrize("size", [1, 2])
def test_moving_does_not_wait(want, size):
    source, destination = submesh((2,), "s"), submesh((size,), "d", last=True)
    for landing in every_landing(plan_transfer((8, 8), F32, Layout(ROWS), source, want, destination, CLUSTER)):
        assert_moves_without_waiting(landing)


@pytest.mark.parametrize(
    ("have", "src", "want", "dst"),
    [
        ((4,), (("s0",), ()), (2, 2), (("d0", "d1"), ())),
        ((2, 2), ((), ("s1", "s0")), (2, 2), ((), ("d1", "d0"))),
        ((2, 2), (("s1",), ()), (2, 2), (("d1",), ())),
        ((2, 2), ((), ()), (4,), ((), ())),
    ],
)
def test_an_equal_put_does_not_wait(have, src, want, dst):
    """Also between meshes of different shapes, with axes in another order, and with replicas."""
    source, destination = submesh(have, "s"), submesh(want, "d", last=True)
    array = transfers._Array((8, 8), F32, Layout(src), source, Layout(dst), destination)
    plan = transfers._plan(array, Layout(dst), CLUSTER)
    assert plan.is_equal
    assert_moves_without_waiting(plan)


@pytest.mark.parametrize("first", [0, 2])
def test_arrivals_may_be_donated_and_sources_deleted(first):
    """Also where source and destination share devices."""
    source, destination = submesh((4,), "s"), Submesh(LogicalMesh((4,), ("d0",)), first)
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    for src, dst in [
        (Layout(ROWS), Layout((("d0",), ()))), (replicated_layout(2), replicated_layout(2)),
        (Layout(ROWS), Layout(((), ("d0",)))),
    ]:  # fmt: skip
        for landing in every_landing(plan_transfer((8, 8), F32, src, source, dst, destination, CLUSTER)):
            array, mover = place(value, src, source), Transfer([landing], jax.devices())
            (moved,) = mover([array])
            np.testing.assert_array_equal(np.asarray(double(moved)), 2 * value)
            np.testing.assert_array_equal(np.asarray(array), value)
            (moved,) = mover([array])
            array.delete()
            np.testing.assert_array_equal(np.asarray(moved), value)


def test_plans_of_different_edges_and_other_placements_are_refused():
    source, destination = submesh((4,), "s"), submesh((4,), "d", last=True)
    whole = replicated_layout(1)
    plans = [plan_transfer((8,), F32, whole, source, whole, submesh((n,), "d", last=True), CLUSTER) for n in (1, 2)]
    with pytest.raises(ValueError, match="make a transfer for each pair"):
        Transfer(plans, jax.devices())
    plan = plan_transfer((8, 8), F32, Layout(ROWS), source, Layout((("d0",), ())), destination, CLUSTER)
    mover, value = Transfer([plan], jax.devices()), np.zeros((8, 8), np.float32)
    backwards = Mesh(np.array(jax.devices()[3::-1]), ("s0",), axis_types=(AxisType.Auto,))
    there = jax.device_put(value, NamedSharding(backwards, PartitionSpec("s0")))
    for wrong in (place(value, Layout(((), ("s0",))), source), there):
        with pytest.raises(ValueError, match=r"arrays\[0\] has the sharding"):
            mover([wrong])
