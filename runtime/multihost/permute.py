"""Transfers between devices of several processes: `ppermute` over all devices that take part (`docs/processes.md`).

Every device of the union gives a block and gets one: a device that sends nothing gives a block of zeros, which is made
once and kept; a block of a device that receives nothing is dropped at once. The pieces travel in rounds
(`programs.rounds`). An array of the union is a list of blocks along dim 0, so that arrays of either end become arrays
of the union, and back, without a copy. (An array without dims has no such dim: it is called replicated, which nobody
relies on.)
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.passes.local.types import apply_in_bytes
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.passes.programs.rounds import Part, Round, rounds
from alpa_lite.passes.programs.transfers import Ranges, TransferPlan
from alpa_lite.runtime.compile import compile_lowered, throttle
from alpa_lite.runtime.meshes import lower_region, submesh_of
from alpa_lite.runtime.transfer import compile_reshard

_AXIS = "union"
_known_zeros: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class TransferSpec:
    """The route of one global array, which is not an array of random keys."""

    shape: tuple[int, ...]
    dtype: Any
    source_block: tuple[int, ...]  # the shape of a block at the source
    destination_block: tuple[int, ...]
    rounds: tuple[Round, ...]
    landing_sharding: NamedSharding


class UnionProgram:
    """The arguments of a program over devices of several processes, of which each gives a block, and gets one.

    Attributes:
      mesh: the devices, in one dim.
      here: those of this process.
      given: the types of the arguments.
    """

    def __init__(
        self, union: Sequence[Any], sources: Sequence[Any], blocks: Sequence[tuple[tuple[int, ...], Any]]
    ) -> None:
        """Args:
        union: the devices, in one order for all processes.
        sources: those that have something to give, in the order of the sharding of all arrays.
        blocks: shape and dtype of what a device gives of each array.
        """
        self.mesh = Mesh(np.array(list(union)), (_AXIS,), axis_types=(AxisType.Auto,))
        self.here, self._held, self._blocks = local_devices(union), local_devices(sources), blocks
        self._gives = [self._held.index(device) if device in self._held else -1 for device in self.here]
        self.given = [self.type_of(*block) for block in blocks]

    def type_of(self, block: tuple[int, ...], dtype: Any) -> Any:
        """Returns the type of an array of which each device has a block of this shape."""
        shape = (self.mesh.size * block[0], *block[1:]) if block else ()
        spec = PartitionSpec(*(_AXIS,) * bool(block))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def give(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the arguments, made of the arrays of the sources; a process that has no source gives any arrays."""
        blocks = map(_jax.blocks_of, arrays)
        return [self._argument(n, one) for n, one in enumerate(blocks)] if self._held else self._same

    @functools.cached_property
    def _same(self) -> list[Any]:
        return [self._argument(n, []) for n in range(len(self._blocks))]

    @functools.cached_property
    def _zeros(self) -> list[list[Any]]:
        return [[_zeros(*block, d) for d in self.here if d not in self._held] for block in self._blocks]

    def _argument(self, number: int, blocks: Sequence[Any]) -> Any:
        """Returns an array with these blocks, and zeros where this process has none."""
        none = iter(self._zeros[number])
        kind = self.given[number]
        given = [blocks[n] if n >= 0 else next(none) for n in self._gives]
        return _jax.array_of_blocks(kind.shape, kind.dtype, kind.sharding, given)


class PermuteTransfer:
    """Moves arrays between two sets of devices, as planned. Holds no arrays but zeros.

    Attributes:
      lands_here: whether this process has a device of the destination.
    """

    def __init__(self, specs: Sequence[TransferSpec], sources: Sequence[Any], union: Sequence[Any]) -> None:
        """Compiles the program of the union.

        Args:
          sources: the devices of all arrays, in the order of their sharding.
          union: these and the devices of the destination, in one order for all processes.
        """
        self._union = UnionProgram(union, sources, [(spec.source_block, spec.dtype) for spec in specs])
        goals = local_devices(np.array(specs[0].landing_sharding.mesh.devices).flat)
        self.lands_here = bool(goals)
        self._takes = [self._union.here.index(device) for device in goals]
        self._landed = [(spec.shape, spec.dtype, spec.landing_sharding) for spec in specs]
        mesh, landed = self._union.mesh, [self._union.type_of(spec.destination_block, spec.dtype) for spec in specs]

        def move(*blocks: Any) -> list[Any]:
            permute = functools.partial(_permute, size=mesh.size)
            return [
                apply_in_bytes(functools.partial(permute, spec), one) for spec, one in zip(specs, blocks, strict=True)
            ]

        compiled = compile_lowered(lower_region(move, mesh, self._union.given, landed), union)
        self._call = throttle(compiled, union)

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns the arrays at the destination; None for each in a process that has no device there.

        Args:
          arrays: as planned; where this process has no device of the source, anything.
        """
        moved = self._call(*self._union.give(arrays))
        if not self.lands_here:
            return [None] * len(moved)
        taken = ([blocks[n] for n in self._takes] for blocks in map(_jax.blocks_of, moved))
        return [_jax.array_of_blocks(*kind, blocks) for kind, blocks in zip(self._landed, taken, strict=True)]


def local_devices(devices: Iterable[Any]) -> list[Any]:
    """Returns the devices that this process has."""
    return [device for device in devices if device.process_index == jax.process_index()]


def _zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    """Returns a block of zeros on a device, which all share that hold one of this type."""
    key = shape, str(dtype), device
    block = _known_zeros.get(key)
    if block is None:
        block = _known_zeros[key] = jax.device_put(np.zeros(shape, dtype), device)
    return block


def _permute(spec: TransferSpec, block: Any, size: int) -> Any:
    """Returns the block that each of `size` devices gets."""
    receivers = {hop.destination for one in spec.rounds for hop in one.hops}

    def of_this_device(values: dict[int, Any], other: Any, dtype: Any) -> Any:
        """Its entry of a table of all devices."""
        table = np.stack([np.asarray(values.get(n, other), dtype) for n in range(size)])
        return jnp.asarray(table)[lax.axis_index(_AXIS)]

    def starts(of: dict[int, tuple[int, ...]], rank: int) -> list[Any]:
        """Returns the start of a device's piece; of a device that has none, 0."""
        if len(set(of.values())) == 1:
            return list(next(iter(of.values())))
        mine = of_this_device(of, (0,) * rank, np.int32)
        return [mine[dim] for dim in range(rank)]

    def select(devices: Iterable[int], new: Any, old: Any) -> Any:
        return jnp.where(of_this_device(dict.fromkeys(devices, True), False, np.bool_), new, old)

    out = None
    for one in spec.rounds:
        piece = block
        if one.shape != spec.source_block:
            places = {hop.source: hop.source_start for hop in one.hops}
            piece = lax.dynamic_slice(block, starts(places, block.ndim), one.shape)
        piece = lax.ppermute(piece, _AXIS, one.pairs)
        old = jnp.zeros(spec.destination_block, block.dtype) if out is None else out
        places = {hop.destination: hop.destination_start for hop in one.hops}
        is_whole = one.shape == spec.destination_block  # each receiver gets one such block, in this round or in another
        new = piece if is_whole else lax.dynamic_update_slice(old, piece, starts(places, old.ndim))
        is_first = is_whole and out is None
        out = new if is_first or places.keys() == receivers else select(places.keys(), new, old)
    return jnp.zeros(spec.destination_block, block.dtype) if out is None else out


def spec_between(
    shape: tuple[int, ...], dtype: Any, source: NamedSharding, landing: NamedSharding, union: Sequence[Any],
    parts: Sequence[Part] | None = None,
) -> TransferSpec:  # fmt: skip
    """Returns the route of an array from one sharding to another.

    Args:
      union: as for `PermuteTransfer`.
      parts: the pieces, if they are planned; by default each comes from a device of the receiver's process if that has
        it, else from the holder that has sent least.
    """
    have, need = _blocks(source, shape, union), _blocks(landing, shape, union)
    found = rounds(_parts(have, need, union) if parts is None else parts, have, need)
    return TransferSpec(tuple(shape), dtype, source.shard_shape(shape), landing.shard_shape(shape), found, landing)


def _blocks(sharding: NamedSharding, shape: tuple[int, ...], union: Sequence[Any]) -> dict[int, Ranges]:
    """Returns the block of each device, by its number in the union."""
    number = {device: n for n, device in enumerate(union)}
    return {
        number[device]: tuple(s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _parts(have: dict[int, Ranges], need: dict[int, Ranges], union: Sequence[Any]) -> list[Part]:
    """Returns the pieces of an array of which devices have, and need, these blocks."""
    holders: defaultdict[Ranges, list[int]] = defaultdict(list)
    for device, block in have.items():
        holders[block].append(device)
    sent = dict.fromkeys(have, 0)
    out = []
    for device, wanted in need.items():
        for block, owners in holders.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, wanted, strict=True))
            if any(low >= high for low, high in common):
                continue
            process = union[device].process_index
            source = min(owners, key=lambda n: (union[n].process_index != process, sent[n], n))
            sent[source] += 1
            out.append(Part(source, device, common))
    return out


class CrossProcessTransfer(PermuteTransfer):
    """The arrays of one edge of the pipeline, from their submesh to one of other processes. As `transfer.Transfer`.

    One more program on the destination's submesh takes the arrays on from the layouts in which they landed. Arrays of
    random keys travel as the integers that they are made of.
    """

    def __init__(self, plans: Sequence[TransferPlan], devices: Sequence[Any]) -> None:
        """Compiles the executables of the plans. Every process with devices at either end makes one, and no other.

        Args: as of `transfer.Transfer`.
        """
        start, end = submesh_of(plans[0].src_mesh, devices), submesh_of(plans[0].dst_mesh, devices)
        numbers = sorted({*plans[0].src_mesh.devices, *plans[0].dst_mesh.devices})
        union = [devices[n] for n in numbers]
        self._keys = {n: plan.dtype for n, plan in enumerate(plans) if jnp.issubdtype(plan.dtype, jax.dtypes.extended)}
        specs = []
        for n, plan in enumerate(plans):
            integers = _jax.key_kind(plan.dtype)[1] if n in self._keys else ()
            whole = tuple((0, size) for size in integers)
            parts = [
                Part(numbers.index(p.source), numbers.index(p.destination), (*p.ranges, *whole)) for p in plan.pieces
            ]
            ends = NamedSharding(start, spec_of(plan.src)), NamedSharding(end, spec_of(plan.landing_layout))
            dtype = np.dtype(np.uint32) if integers else plan.dtype
            specs.append(spec_between((*plan.shape, *integers), dtype, *ends, union, parts))
        super().__init__(specs, list(start.devices.flat), union)
        self._reshard = compile_reshard(plans, end) if self.lands_here else None

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Returns the arrays on the destination's submesh, each in its `dst` layout. As of `PermuteTransfer`."""
        if self._keys:
            arrays = [_jax.data_of_keys(array) if n in self._keys else array for n, array in enumerate(arrays)]
        out = list(super().__call__(arrays))
        if not self.lands_here:
            return out
        for n, dtype in self._keys.items():
            out[n] = _jax.keys_of_data(out[n], dtype)
        return out if self._reshard is None else self._reshard(out)
