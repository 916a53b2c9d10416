"""Which block of an array goes from which device to which, when the array goes from one submesh to another.

Each device of a submesh holds a block: an interval of every dim. A device of the destination needs its own block, which
is cut into pieces by the blocks of the source: one piece for every distinct source block that it meets. A piece is sent
by one of the devices that hold that source block, the one whose way is the least busy (`programs.links`), devices of
the destination taking turns in order of their number.

Blocks need not be received as they are needed. The array may *land* in another layout of the destination, and reach the
wanted one by the collectives of `layout.reshard_steps`, which the destination runs on its own links. Two kinds of
landing are tried in addition to the wanted layout:

1. Where the wanted layout leaves axes of the destination unused, landings that shard dims over these too: each device
   receives a part, and an all-gather makes the whole. Less crosses between the submeshes, more within one.
2. The source's own layout, where both submeshes have the same shape: whole blocks are sent, one message a device, and
   an all-to-all or the like follows.

With l the landing, the seconds are

    seconds(l)  =  messages(l)                                    the busiest resource of `programs.links`
                +  2 bytes / memory bandwidth                      of the most that one device cuts, and joins
                +  sum of the collectives from l to the layout     `cost.MeshCost`

and the cheapest l is taken: `price` estimates all of them in closed form, and the best few are planned in full.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import Layout, LogicalMesh, Step, local_shape, reshard_steps
from alpa_lite.ir.program import Program, Submesh
from alpa_lite.passes.programs.links import Loads, route

Ranges = tuple[tuple[int, int], ...]
"""A block or a piece of an array: for each dim the first index and the one after the last."""

_PLANNED = 4  # this many landings, the best by the estimate, are planned in full


@dataclass(frozen=True)
class Piece:
    """A piece of an array that one device sends to another.

    Attributes:
      source, destination: numbers of devices in the cluster; equal where the piece is already in place.
      ranges: the part of the global array.
      bytes: its size.
    """

    source: int
    destination: int
    ranges: Ranges
    bytes: int


@dataclass(frozen=True)
class _Array:
    """An array with its source and destination layouts: the arguments of `plan_transfer`."""

    shape: tuple[int, ...]
    dtype: Any
    src: Layout
    src_mesh: Submesh
    dst: Layout
    dst_mesh: Submesh


@dataclass(frozen=True)
class TransferPlan(_Array):
    """How one array goes from one submesh to another. Plans are hashable: equal plans move arrays in the same way.

    Attributes:
      landing_layout: the layout on the destination in which the pieces arrive.
      pieces: ordered by destination, then by place in its block. The pieces of one destination fill its block of the
        landing, each part of it once.
      steps: what the destination does from the landing to `dst`.
      is_equal: device k of the source sends all that it holds to device k of the destination, another device, so the
        whole array is one `jax.device_put` to an equal sharding.
      bytes: of all pieces that go to another device.
      seconds: predicted.
    """

    landing_layout: Layout
    pieces: tuple[Piece, ...]
    steps: tuple[Step, ...]
    is_equal: bool
    bytes: int
    seconds: float


@functools.lru_cache(maxsize=1000)
def plan_transfer(
    shape: tuple[int, ...], dtype: Any, src: Layout, src_mesh: Submesh, dst: Layout, dst_mesh: Submesh, cluster: Cluster
) -> TransferPlan:
    """Returns the cheapest way found for one array.

    Args:
      shape, dtype: of the global array; a random key has its logical shape and its key dtype.
      src, dst: layouts without partial sums.
      src_mesh, dst_mesh: the submeshes; they may overlap, or be the same.
      cluster: the machine, whose links are priced.

    Raises:
      ValueError: a layout is partial or does not divide the shape, or a submesh is not within the cluster.
    """
    for name, layout, submesh in (("src", src, src_mesh), ("dst", dst, dst_mesh)):
        if layout.partial:
            raise ValueError(f"{name}={layout}: partial sums cannot be sent; reduce them, or give them a leading dim")
        if submesh.first < 0 or submesh.devices.stop > cluster.num_devices:
            raise ValueError(
                f"{name}_mesh has devices to {submesh.devices.stop - 1}; the cluster {cluster.num_devices}"
            )
        local_shape(shape, layout, submesh.mesh)
    array = _Array(tuple(shape), dtype, src, src_mesh, dst, dst_mesh)
    choices = _landings(array)
    if len(choices) > _PLANNED:
        rest = sorted(choices[1:], key=lambda landing: _estimate(array, landing, cluster))
        choices = (choices[0], *rest[: _PLANNED - 1])
    return min((_plan(array, landing, cluster) for landing in choices), key=lambda plan: plan.seconds)


def plans_of(program: Program, number: int, cluster: Cluster) -> tuple[TransferPlan, ...]:
    """Returns the plans of a program's transfer, one for each of its arrays."""
    transfer = program.transfers[number]
    source, destination = program.submeshes[transfer.source], program.submeshes[transfer.destination]
    pairs = [
        (program.buffers[a], program.buffers[b])
        for a, b in zip(transfer.sent_buffers, transfer.received_buffers, strict=True)
    ]
    return tuple(
        plan_transfer(have.shape, have.dtype, have.layout, source, want.layout, destination, cluster)
        for have, want in pairs
    )


def price(
    shape: tuple[int, ...], dtype: Any, src: Layout, src_mesh: Submesh, dst: Layout, dst_mesh: Submesh, cluster: Cluster
) -> float:
    """Estimates the seconds of `plan_transfer` in closed form: every sender is taken to have an equal share.

    The arguments must be valid for `plan_transfer`.
    """
    array = _Array(tuple(shape), dtype, src, src_mesh, dst, dst_mesh)
    return min(_estimate(array, landing, cluster) for landing in _landings(array))


def itemsize(dtype: Any) -> int:
    """Returns bytes of one element; of a random key those of its data."""
    return int(getattr(dtype, "itemsize", 4))


def blocks(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> tuple[Ranges, ...]:
    """Returns the block of each device, in mesh order."""
    sizes = local_shape(shape, layout, mesh)
    return tuple(
        tuple((n * size, (n + 1) * size) for n, size in zip(numbers, sizes, strict=True))
        for numbers in _block_numbers(layout, mesh)
    )


def _block_numbers(layout: Layout, mesh: LogicalMesh) -> list[tuple[int, ...]]:
    """Returns the number of each device's block along every dim, in mesh order: its place along the dim's axes."""
    places = np.unravel_index(np.arange(mesh.size), mesh.shape)
    place = dict(zip(mesh.axis_names, places, strict=True))
    numbers = np.zeros((mesh.size, len(layout.dims)), int)
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            numbers[:, dim] = numbers[:, dim] * mesh.axis_size(axis) + place[axis]
    return [tuple(row) for row in numbers.tolist()]


# --- landings ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=50_000)
def _landings(array: _Array) -> tuple[Layout, ...]:
    """Returns the layouts to land in, the wanted one first."""
    found = dict.fromkeys([array.dst])
    # A random key is small, and collectives on keys are not worth their special cases; of no elements nothing is sent.
    if 0 not in array.shape and not jnp.issubdtype(array.dtype, jax.dtypes.extended):
        found.update(dict.fromkeys(_finer(array.shape, array.dst, array.dst_mesh.mesh)))
        if array.src_mesh.mesh.shape == array.dst_mesh.mesh.shape:
            found[_renamed(array.src, array.src_mesh.mesh, array.dst_mesh.mesh)] = None
    mesh = array.dst_mesh.mesh
    return tuple(landing for landing in found if _is_reachable(array.shape, landing, array.dst, mesh))


def _finer(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> Iterator[Layout]:
    """The layouts that shard over some of the axes that `layout` leaves unused too, each as the minor axes of a dim."""
    unused = [axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1 and axis not in layout.used_axes]
    for places in itertools.product(range(-1, len(shape)), repeat=len(unused)):
        dims = list(layout.dims)
        for axis, dim in zip(unused, places, strict=True):
            if dim >= 0:
                dims[dim] = (*dims[dim], axis)
        if _divides(shape, Layout(tuple(dims)), mesh):
            yield Layout(tuple(dims))


def _renamed(layout: Layout, have: LogicalMesh, want: LogicalMesh) -> Layout:
    """Returns the layout with the axes of one mesh replaced by those of another of the same shape."""
    names = dict(zip(have.axis_names, want.axis_names, strict=True))
    return Layout(tuple(tuple(names[axis] for axis in axes) for axes in layout.dims))


def _divides(shape: tuple[int, ...], layout: Layout, mesh: LogicalMesh) -> bool:
    return all(size % mesh.product(axes) == 0 for size, axes in zip(shape, layout.dims, strict=True))


def _is_reachable(shape: tuple[int, ...], landing: Layout, dst: Layout, mesh: LogicalMesh) -> bool:
    """Returns whether steps lead from the landing to `dst`, and every layout between divides the shape."""
    steps = reshard_steps(landing, dst)
    return steps is not None and all(_divides(shape, step.target, mesh) for step in steps)


# --- one landing in full ----------------------------------------------------------------------------------------------


def _plan(array: _Array, landing: Layout, cluster: Cluster) -> TransferPlan:
    """Returns the plan for one landing."""
    have = blocks(array.shape, array.src, array.src_mesh.mesh)
    need = blocks(array.shape, landing, array.dst_mesh.mesh)
    pairs = list(zip(array.src_mesh.devices, array.dst_mesh.devices, strict=False))
    equal = have == need and all(source != destination for source, destination in pairs)
    loads = Loads(cluster)
    pieces = _pieces(array, need, loads, {d: s for s, d in pairs} if equal else {})
    steps = reshard_steps(landing, array.dst)
    assert steps is not None, (landing, array.dst)
    sent = sum(piece.bytes for piece in pieces if piece.source != piece.destination)
    local = _local_seconds(array, landing, pieces, cluster)
    seconds = loads.seconds + local + _reshard_seconds(array, steps, cluster)
    return TransferPlan(
        **vars(array),
        landing_layout=landing,
        pieces=tuple(pieces),
        steps=steps,
        is_equal=equal,
        bytes=sent,
        seconds=seconds,
    )


def _pieces(array: _Array, need: Sequence[Ranges], loads: Loads, senders: Mapping[int, int]) -> list[Piece]:
    """Returns every piece, with its destination's sender, or if none are given, that which keeps links evenly busy."""
    size = itemsize(array.dtype)
    sizes = local_shape(array.shape, array.src, array.src_mesh.mesh)
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, numbers in zip(array.src_mesh.devices, _block_numbers(array.src, array.src_mesh.mesh), strict=True):
        holders.setdefault(numbers, []).append(device)
    pieces = []
    for destination, block in zip(array.dst_mesh.devices, need, strict=True):
        for numbers in itertools.product(*(_met(low, high, n) for (low, high), n in zip(block, sizes, strict=True))):
            ranges = tuple(
                (max(low, number * n), min(high, (number + 1) * n))
                for (low, high), number, n in zip(block, numbers, sizes, strict=True)
            )
            count = _volume(ranges) * size
            source = loads.sender([senders[destination]] if senders else holders[numbers], destination, count)
            loads.add(source, destination, count)
            pieces.append(Piece(source, destination, ranges, count))
    return pieces


def _met(low: int, high: int, size: int) -> range:
    """Returns the numbers of the source's blocks, of `size`, that an interval meets; of an empty dim the first."""
    return range(low // size, (high - 1) // size + 1) if size else range(1)


def _volume(ranges: Ranges) -> int:
    return math.prod(high - low for low, high in ranges)


def _local_seconds(array: _Array, landing: Layout, pieces: Sequence[Piece], cluster: Cluster) -> float:
    """Cutting pieces out of blocks at the source, and joining them at the destination: each is read and written."""
    have = math.prod(local_shape(array.shape, array.src, array.src_mesh.mesh)) * itemsize(array.dtype)
    need = math.prod(local_shape(array.shape, landing, array.dst_mesh.mesh)) * itemsize(array.dtype)
    cut, joined = Counter[int](), Counter[int]()
    for piece in pieces:
        if piece.bytes < have:
            cut[piece.source] += piece.bytes
        if piece.bytes < need:
            joined[piece.destination] += piece.bytes
    worst = max(cut.values(), default=0) + max(joined.values(), default=0)
    return 2 * worst / cluster.memory_bandwidth


def _reshard_seconds(array: _Array, steps: Sequence[Step], cluster: Cluster) -> float:
    """Returns the collectives on the destination. A submesh is priced as the first devices of the cluster are."""
    mesh, size = array.dst_mesh.mesh, itemsize(array.dtype)
    cost = _mesh_cost(cluster, mesh)
    return sum(
        cost.collective(step.kind, step.communication_axes(mesh), step.payload(array.shape, size, mesh))
        for step in steps
    )


_mesh_cost = functools.lru_cache(maxsize=1000)(MeshCost)


# --- the estimate -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=200_000)
def _estimate(array: _Array, landing: Layout, cluster: Cluster) -> float:
    """Estimates the seconds of `_plan`.

    Each of the n destinations receives its block of b bytes in k pieces, one for every source block that it meets; each
    of the m sources sends n b / m bytes, in n k / m messages. Every link is like the one between the nearest devices of
    the two submeshes, and the uplinks of the submesh with fewer nodes carry all that crosses.
    """
    src_mesh, dst_mesh, mesh = array.src_mesh, array.dst_mesh, array.dst_mesh.mesh
    after = _reshard_seconds(array, reshard_steps(landing, array.dst) or (), cluster)
    same = src_mesh.mesh.shape == mesh.shape and _renamed(array.src, src_mesh.mesh, mesh) == landing
    if same and src_mesh.first == dst_mesh.first:
        return after
    block = math.prod(array.shape) * itemsize(array.dtype) / math.prod(mesh.product(axes) for axes in landing.dims)
    pieces, whole = 1, True
    for have, want in zip(array.src.dims, landing.dims, strict=True):
        parts, wanted = src_mesh.mesh.product(have), mesh.product(want)
        pieces *= max(1, math.ceil(parts / wanted))
        whole = whole and wanted <= parts
    senders, receivers = src_mesh.mesh.size, mesh.size
    sent = math.ceil(receivers * pieces / senders)
    forwards = src_mesh.first <= dst_mesh.first
    near = (src_mesh.devices[-1], dst_mesh.first) if forwards else (src_mesh.first, dst_mesh.devices[-1])
    way = route(cluster, *near)
    own = [(slow, latency) for (kind, *_), slow, latency in way if kind in ("send", "link")]
    slowness, latency = max((s for s, _ in own), default=0.0), max((t for _, t in own), default=0.0)
    busiest = max(
        pieces * latency + block * slowness,
        sent * latency + max(receivers * block / senders, block / pieces) * slowness,
    )
    if any(kind == "up" for (kind, *_), _, _ in way):
        fewest = min(_num_nodes(src_mesh, cluster), _num_nodes(dst_mesh, cluster))
        assert cluster.network_link is not None
        busiest = max(busiest, receivers * block / fewest / cluster.network_link.bandwidth)
    local = (0 if whole else receivers * block / senders) + (block if pieces > 1 else 0)
    return cluster.node_link.latency + busiest + 2 * local / cluster.memory_bandwidth + after


def _num_nodes(submesh: Submesh, cluster: Cluster) -> int:
    per_node = cluster.devices_per_node
    return submesh.devices[-1] // per_node - submesh.first // per_node + 1
