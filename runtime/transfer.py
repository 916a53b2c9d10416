"""Arrays from one submesh to another, as planned, without the host and without waiting.

`jax.device_put` of an array to another mesh is asynchronous only if both shardings cut it into the same blocks, one for
each of equally many devices; otherwise JAX gathers the array on the host and waits for it. So blocks move singly, and
the work on them is done by small functions on one device each, which start without waiting too:

1. *cut*: where a device sends parts of its blocks, one function for each such device makes all the pieces;
2. *put*: one `jax.device_put` takes every piece, and every array that can go whole, to its device;
3. *join*: where a device receives its blocks in parts, one function for each such device joins them;
4. *assemble*: the blocks are made global arrays in the layouts in which they landed;
5. *reshard*: one function on the destination's submesh takes all arrays on from there.

Steps that a transfer has no use for are left out: the best case is the put alone. All functions are compiled when the
transfer is made. A block that stays on its device, and is not resharded after, is copied by the cut: `device_put` would
share its memory, which the receiver may donate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from alpa_lite.passes.local.types import in_bytes
from alpa_lite.passes.lowering.emission import change_layout
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.programs.transfers import Ranges, TransferPlan, blocks
from alpa_lite.program import Submesh
from alpa_lite.runtime import backpressure
from alpa_lite.runtime.compile import compile_lowered
from alpa_lite.runtime.meshes import mesh_of

Place = tuple[int, int]
"""An array by its position in the list, and a device by its position in the submesh."""


class Transfer:
    """The arrays of one edge of the pipeline, from their submesh to the next. Call it once for each transfer.

    Holds no arrays. Equal plans may share one.
    """

    def __init__(self, plans: Sequence[TransferPlan], devices: Sequence[Any]) -> None:
        """Compiles the executables of the plans.

        Args:
          plans: one for each array, all between the same two submeshes.
          devices: the devices of the cluster, by number.

        Raises:
          ValueError: the plans are between different submeshes.
        """
        if len({(plan.src_mesh, plan.dst_mesh) for plan in plans}) > 1:
            raise ValueError("plans of one transfer are between the same two submeshes; make a transfer for each pair")
        self._count = len(plans)
        self._whole = [i for i, plan in enumerate(plans) if plan.equal]
        self._split = [i for i, plan in enumerate(plans) if not plan.equal]
        self._plain: list[Place] = []
        self._cuts: list[tuple[Any, list[Place]]] = []
        self._joins: list[tuple[Any, list[int]]] = []
        self._assembled: list[tuple[int, tuple[int, ...], NamedSharding, list[int]]] = []
        self._reshard: Any = None
        self._resharded = [i for i, plan in enumerate(plans) if plan.steps]
        self._targets: list[Any] = []
        self._expected: list[NamedSharding] = []
        self._seen: list[Any] = [None] * len(plans)
        if not plans:
            return
        source = _jax_mesh(plans[0].src_mesh, devices)
        self._expected = [NamedSharding(source, spec_of(plan.src)) for plan in plans]
        self._mesh = _jax_mesh(plans[0].dst_mesh, devices)
        self._plan_pieces(plans, devices)
        if self._resharded:
            self._reshard = compile_reshard([plans[i] for i in self._resharded], self._mesh)

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays on the destination's submesh, each in its `dst` layout. Returns before they are there.

        Args:
          arrays: as planned: on the devices of the source's submesh, in its order, each in its `src` layout.

        Raises:
          ValueError: an array is sharded otherwise. (It would arrive permuted, or through the host.)
        """
        for i, array in enumerate(arrays):
            if array.sharding is not self._seen[i]:
                self._check(i, array)
        if not self._split and not self._resharded:
            return jax.device_put(list(arrays), self._targets)
        shards = {i: [shard.data for shard in arrays[i].addressable_shards] for i in self._split}
        sent = [arrays[i] for i in self._whole]
        sent += [shards[i][k] for i, k in self._plain]
        for cut, places in self._cuts:
            sent += cut(*[shards[i][k] for i, k in places])
        here = jax.device_put(sent, self._targets)
        for join, pieces in self._joins:
            here += join(*[here[n] for n in pieces])
        out: list[Any] = [None] * self._count
        for i, array in zip(self._whole, here, strict=False):
            out[i] = array
        for i, shape, sharding, numbers in self._assembled:
            out[i] = jax.make_array_from_single_device_arrays(shape, sharding, [here[n] for n in numbers])
        if self._resharded:
            for i, array in zip(self._resharded, self._reshard(*[out[i] for i in self._resharded]), strict=True):
                out[i] = array
        return out

    def _check(self, position: int, array: jax.Array) -> None:
        """Compares an array's sharding with the planned one. Executables hand out one object: it is met once."""
        expected = self._expected[position]
        if not array.sharding.is_equivalent_to(expected, array.ndim):
            raise ValueError(
                f"arrays[{position}] lies as {array.sharding}, but the transfer was planned from {expected}; give the "
                "executable that makes it these output shardings"
            )
        self._seen[position] = array.sharding

    def _plan_pieces(self, plans: Sequence[TransferPlan], devices: Sequence[Any]) -> None:
        """Numbers everything that is put, in the order of `__call__`, and compiles the cuts and joins."""
        source, destination = plans[0].src_mesh, plans[0].dst_mesh
        have = {i: blocks(plans[i].shape, plans[i].src, source.mesh) for i in self._split}
        need = {i: blocks(plans[i].shape, plans[i].landing, destination.mesh) for i in self._split}
        self._targets += [NamedSharding(self._mesh, spec_of(plans[i].landing)) for i in self._whole]
        plain: list[tuple[int, int]] = []
        cut: dict[int, list[tuple[int, int]]] = {}
        for i in self._split:
            for n, piece in enumerate(plans[i].pieces):
                k = piece.source - source.first
                stays = piece.source == piece.destination and not plans[i].steps  # steps make new arrays
                if piece.ranges == have[i][k] and not stays:
                    plain.append((i, n))
                else:
                    cut.setdefault(k, []).append((i, n))
        numbers: dict[tuple[int, int], int] = {}
        for i, n in (*plain, *(place for k in cut for place in cut[k])):
            numbers[i, n] = len(self._targets)
            self._targets.append(devices[plans[i].pieces[n].destination])
        self._plain = [(i, plans[i].pieces[n].source - source.first) for i, n in plain]
        for k, pieces in cut.items():
            self._cuts.append(self._compile_cut(plans, k, pieces, have, devices[source.first + k]))
        self._plan_joins(plans, need, numbers, devices)

    def _plan_joins(
        self,
        plans: Sequence[TransferPlan],
        need: dict[int, tuple[Ranges, ...]],
        numbers: dict[tuple[int, int], int],
        devices: Sequence[Any],
    ) -> None:
        """Compiles the joins of each device of the destination, and numbers the blocks of each array."""
        destination = plans[0].dst_mesh
        block: dict[Place, int] = {}
        count = len(self._targets)
        for k, device in enumerate(destination.devices):
            parts: list[tuple[Any, list[Ranges], Ranges]] = []
            taken: list[int] = []
            for i in self._split:
                arriving = [(n, piece) for n, piece in enumerate(plans[i].pieces) if piece.destination == device]
                if len(arriving) == 1:
                    block[i, k] = numbers[i, arriving[0][0]]
                    continue
                parts.append((plans[i].dtype, [piece.ranges for _, piece in arriving], need[i][k]))
                taken += [numbers[i, n] for n, _ in arriving]
                block[i, k] = count
                count += 1
            if parts:
                self._joins.append((_compile_join(parts, devices[device]), taken))
        for i in self._split:
            sharding = NamedSharding(self._mesh, spec_of(plans[i].landing))
            places = [block[i, k] for k in range(destination.mesh.size)]
            self._assembled.append((i, plans[i].shape, sharding, places))

    def _compile_cut(
        self,
        plans: Sequence[TransferPlan],
        position: int,
        pieces: Sequence[tuple[int, int]],
        have: dict[int, tuple[Ranges, ...]],
        device: Any,
    ) -> tuple[Any, list[Place]]:
        """One function of a device's blocks that makes all pieces that it sends but whole blocks."""
        used = list(dict.fromkeys(i for i, _ in pieces))
        wanted = [(used.index(i), _within(plans[i].pieces[n].ranges, have[i][position])) for i, n in pieces]

        def cut(*held: Any) -> list[Any]:
            return [_slice(held[which], ranges) for which, ranges in wanted]

        avals = [_single(plans[i].dtype, _sizes(have[i][position]), device) for i in used]
        return compile_lowered(jax.jit(cut).lower(*avals), [device]), [(i, position) for i in used]


def _compile_join(parts: Sequence[tuple[Any, list[Ranges], Ranges]], device: Any) -> Any:
    """One function from all pieces that a device receives in parts to its blocks."""

    def join(*pieces: Any) -> list[Any]:
        out, rest = [], list(pieces)
        for _, ranges, _ in parts:
            out.append(in_bytes(lambda *own, ranges=ranges: _join(own, ranges, 0), *rest[: len(ranges)]))
            del rest[: len(ranges)]
        return out

    avals = [_single(dtype, _sizes(piece), device) for dtype, ranges, _ in parts for piece in ranges]
    return compile_lowered(jax.jit(join).lower(*avals), [device])


def compile_reshard(plans: Sequence[TransferPlan], mesh: Mesh) -> Any:
    """One function from arrays as they landed to arrays as they are wanted, its communication written out."""
    logical = plans[0].dst_mesh.mesh

    def local(*held: Any) -> list[Any]:
        out = []
        for block, plan in zip(held, plans, strict=True):
            for step in plan.steps:
                block = change_layout(block, step, plan.shape, logical)
            out.append(block)
        return out

    specs = [spec_of(plan.landing) for plan in plans]
    wanted = [spec_of(plan.dst) for plan in plans]
    region = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=wanted, check_vma=False)
    avals = [
        jax.ShapeDtypeStruct(plan.shape, plan.dtype, sharding=NamedSharding(mesh, spec))
        for plan, spec in zip(plans, specs, strict=True)
    ]
    lowered = jax.jit(region, out_shardings=[NamedSharding(mesh, spec) for spec in wanted]).lower(*avals)
    return backpressure.throttle(compile_lowered(lowered, mesh.devices.flat), mesh.devices.flat)


def _jax_mesh(submesh: Submesh, devices: Sequence[Any]) -> Mesh:
    return mesh_of(submesh.mesh, [devices[k] for k in submesh.devices])


def _single(dtype: Any, shape: tuple[int, ...], device: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))


def _sizes(ranges: Ranges) -> tuple[int, ...]:
    return tuple(high - low for low, high in ranges)


def _within(piece: Ranges, block: Ranges) -> Ranges:
    """The piece in the block's own indices."""
    return tuple((low - start, high - start) for (low, high), (start, _) in zip(piece, block, strict=True))


def _slice(block: Any, ranges: Ranges) -> Any:
    """Part of a block, or a copy of all of it: without one, a jitted function hands its argument's memory on."""
    if _sizes(ranges) == block.shape:
        return jnp.copy(block)
    return lax.slice(block, [low for low, _ in ranges], [high for _, high in ranges])


def _join(pieces: Sequence[Any], ranges: Sequence[Ranges], dim: int) -> Any:
    """The block that pieces fill, which form a grid and come in its order: joined along the last dims first."""
    if len(pieces) == 1:
        return pieces[0]
    starts = list(dict.fromkeys(piece[dim] for piece in ranges))
    rows = []
    for start in starts:
        row = [n for n, piece in enumerate(ranges) if piece[dim] == start]
        rows.append(_join([pieces[n] for n in row], [ranges[n] for n in row], dim + 1))
    return rows[0] if len(rows) == 1 else lax.concatenate(rows, dim)
