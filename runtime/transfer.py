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

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from alpa_lite.passes.local.types import in_bytes
from alpa_lite.passes.lowering.emission import change_layout
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.programs.transfers import Ranges, TransferPlan, blocks
from alpa_lite.runtime import backpressure
from alpa_lite.runtime.compile import compile_lowered
from alpa_lite.runtime.meshes import submesh_of


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
        source, destination = submesh_of(plans[0].src_mesh, devices), submesh_of(plans[0].dst_mesh, devices)
        self._expected = [NamedSharding(source, spec_of(plan.src)) for plan in plans]
        self._landings = [NamedSharding(destination, spec_of(plan.landing)) for plan in plans]
        self._shapes = [plan.shape for plan in plans]
        self._whole = [i for i, plan in enumerate(plans) if plan.equal]
        self._split = [i for i, plan in enumerate(plans) if not plan.equal]
        self._cuts: list[tuple[Any, list[int]]] = []
        self._joins: list[tuple[Any, list[int]]] = []
        sources = self._plan_cuts(plans, devices)
        pieces = [(i, n, piece.destination) for i in self._split for n, piece in enumerate(plans[i].pieces)]
        self._sent = [sources[i, n] for i, n, _ in pieces]
        self._targets = [*(self._landings[i] for i in self._whole), *(devices[number] for _, _, number in pieces)]
        landed = {(i, n): k for k, (i, n, _) in enumerate(pieces, len(self._whole))}
        self._assembled = self._plan_joins(plans, devices, landed)
        self._reshard = compile_reshard(plans, destination)

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays on the destination's submesh, each in its `dst` layout. Returns before they are there.

        Args:
          arrays: as planned: on the devices of the source's submesh, in its order, each in its `src` layout.

        Raises:
          ValueError: an array is sharded otherwise. (It would arrive permuted, or through the host.)
        """
        for i, (array, expected) in enumerate(zip(arrays, self._expected, strict=True)):
            if not array.sharding.is_equivalent_to(expected, array.ndim):
                raise ValueError(
                    f"arrays[{i}] lies as {array.sharding}, but the transfer was planned from {expected}; give the "
                    "executable that makes it these output shardings"
                )
        held: list[Any] = [shard.data for i in self._split for shard in arrays[i].addressable_shards]
        for cut, numbers in self._cuts:
            held += cut(*[held[n] for n in numbers])
        sent = [*(arrays[i] for i in self._whole), *(held[n] for n in self._sent)]
        here: list[Any] = jax.device_put(sent, self._targets)
        for join, numbers in self._joins:
            here += join(*[here[n] for n in numbers])
        out: list[Any] = [None] * len(arrays)
        for i, array in zip(self._whole, here, strict=False):
            out[i] = array
        for i, numbers in self._assembled.items():
            parts = [here[n] for n in numbers]
            out[i] = jax.make_array_from_single_device_arrays(self._shapes[i], self._landings[i], parts)
        return out if self._reshard is None else self._reshard(out)

    def _plan_cuts(self, plans: Sequence[TransferPlan], devices: Sequence[Any]) -> dict[tuple[int, int], int]:
        """Compiles one function for each device that sends parts of its blocks.

        Returns:
          (array, piece) -> its number among the blocks of all arrays that are split, in order, then what is cut.
        """
        source = plans[0].src_mesh
        have = {i: blocks(plans[i].shape, plans[i].src, source.mesh) for i in self._split}
        block = {place: n for n, place in enumerate(itertools.product(self._split, range(source.mesh.size)))}
        sources: dict[tuple[int, int], int] = {}
        cut: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for i in self._split:
            for n, piece in enumerate(plans[i].pieces):
                k = piece.source - source.first
                stays = piece.source == piece.destination and not plans[i].steps  # steps make new arrays
                if piece.ranges == have[i][k] and not stays:
                    sources[i, n] = block[i, k]
                else:
                    cut[k].append((i, n))
        count = itertools.count(len(block))
        for k, pieces in cut.items():
            used = list(dict.fromkeys(i for i, _ in pieces))
            wanted = [(used.index(i), _within(plans[i].pieces[n].ranges, have[i][k])) for i, n in pieces]

            def function(*held: Any, wanted: Any = wanted) -> list[Any]:
                return [_slice(held[which], ranges) for which, ranges in wanted]

            types = [(plans[i].dtype, have[i][k]) for i in used]
            self._cuts.append((_compile_on(devices[source.devices[k]], function, types), [block[i, k] for i in used]))
            sources.update(zip(pieces, count, strict=False))
        return sources

    def _plan_joins(
        self, plans: Sequence[TransferPlan], devices: Sequence[Any], landed: dict[tuple[int, int], int]
    ) -> dict[int, list[int]]:
        """Compiles one function for each device that receives its blocks in parts.

        Args:
          landed: (array, piece) -> its number among all that is put.

        Returns:
          For each array that is split the numbers of its blocks, in mesh order, among these and what is joined then.
        """
        assembled: dict[int, list[int]] = {i: [] for i in self._split}
        count = itertools.count(len(self._targets))
        for device in plans[0].dst_mesh.devices:
            types: list[tuple[Any, Ranges]] = []
            taken: list[int] = []
            groups: list[list[Ranges]] = []
            for i in self._split:
                arriving = [(n, piece.ranges) for n, piece in enumerate(plans[i].pieces) if piece.destination == device]
                if len(arriving) == 1:
                    assembled[i].append(landed[i, arriving[0][0]])
                    continue
                groups.append([ranges for _, ranges in arriving])
                types += [(plans[i].dtype, ranges) for _, ranges in arriving]
                taken += [landed[i, n] for n, _ in arriving]
                assembled[i].append(next(count))

            def function(*pieces: Any, groups: Any = groups) -> list[Any]:
                rest = iter(pieces)
                return [
                    in_bytes(lambda *own, ranges=ranges: _join(own, ranges, 0), *itertools.islice(rest, len(ranges)))
                    for ranges in groups
                ]

            if groups:
                self._joins.append((_compile_on(devices[device], function, types), taken))
        return assembled


def _compile_on(device: Any, function: Callable[..., Any], types: Sequence[tuple[Any, Ranges]]) -> Any:
    """A function of blocks on one device, of these dtypes and ranges."""
    where = SingleDeviceSharding(device)
    avals = [jax.ShapeDtypeStruct(_sizes(ranges), dtype, sharding=where) for dtype, ranges in types]
    return compile_lowered(jax.jit(function).lower(*avals), [device])


def compile_reshard(plans: Sequence[TransferPlan], mesh: Mesh) -> Callable[[list[Any]], list[Any]] | None:
    """Returns a function from arrays as they landed to arrays as they are wanted; None where they landed so.

    One executable does it for all arrays of a transfer, its communication written out.

    Args:
      mesh: the destination.
    """
    logical, numbers = plans[0].dst_mesh.mesh, [n for n, plan in enumerate(plans) if plan.steps]
    if not numbers:
        return None
    plans = [plans[n] for n in numbers]

    def local(*held: Any) -> list[Any]:
        out = []
        for block, plan in zip(held, plans, strict=True):
            for step in plan.steps:
                block = change_layout(block, step, plan.shape, logical)
            out.append(block)
        return out

    specs, wanted = [spec_of(plan.landing) for plan in plans], [spec_of(plan.dst) for plan in plans]
    region = jax.shard_map(local, mesh=mesh, in_specs=tuple(specs), out_specs=wanted, check_vma=False)
    avals = [
        jax.ShapeDtypeStruct(plan.shape, plan.dtype, sharding=NamedSharding(mesh, spec))
        for plan, spec in zip(plans, specs, strict=True)
    ]
    lowered = jax.jit(region, out_shardings=[NamedSharding(mesh, spec) for spec in wanted]).lower(*avals)
    call = backpressure.throttle(compile_lowered(lowered, mesh.devices.flat), mesh.devices.flat)

    def reshard(arrays: list[Any]) -> list[Any]:
        out = list(arrays)
        for n, array in zip(numbers, call(*[arrays[n] for n in numbers]), strict=True):
            out[n] = array
        return out

    return reshard


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
