"""Arrays from some devices to others of several processes: `ppermute` over all devices that take part.

`jax.device_put` between meshes of different processes needs a side channel that backends may lack; a permutation over
the union of both meshes is an ordinary program. All processes with devices at either end enter it, and no others, in
the one order of the plan (`processes.ordering`).

Every device of the union gives a block and gets one, since all run one program: a device that sends nothing gives a
block of zeros, which is made once and kept; what a device gets that receives nothing is dropped at once. The pieces
travel in rounds (`programs.rounds`). Blocks become a global array of the union, and of the destination after, without a
copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.passes.programs.rounds import Part, Round, rounds
from alpa_lite.passes.programs.transfers import Ranges
from alpa_lite.runtime import compiling, pacing

AXIS = "all"


@dataclass(frozen=True)
class Way:
    """How one array goes.

    Attributes:
      shape, dtype: of the global array, which is no array of random keys.
      given, taken: the shape of a block at the source, and where it lands.
      rounds: the permutations.
      landing: where it lies then.
    """

    shape: tuple[int, ...]
    dtype: Any
    given: tuple[int, ...]
    taken: tuple[int, ...]
    rounds: tuple[Round, ...]
    landing: NamedSharding


class Crossing:
    """Moves arrays between two sets of devices, as planned. Holds no arrays but zeros."""

    def __init__(
        self, ways: Sequence[Way], sources: Sequence[Any], union: Sequence[Any], zeros: dict[Any, Any] | None = None
    ) -> None:
        """Compiles the program of the union.

        Args:
          ways: of each array.
          sources: the devices where all arrays lie, in the order of their sharding.
          union: these and the devices where they land, in one order for all processes.
          zeros: blocks of zeros by shape, dtype and device, which those of one program share; takes what is new.
        """
        here = jax.process_index()
        mine = [device for device in union if device.process_index == here]
        given = {device: n for n, device in enumerate(d for d in sources if d.process_index == here)}
        self._given = [given.get(device, -1) for device in mine]  # position among the blocks of an array; -1: zeros
        goals = np.array(ways[0].landing.mesh.devices).flat
        self._taken = [mine.index(device) for device in goals if device.process_index == here]
        self.lands_here = bool(self._taken)
        mesh = Mesh(np.array(list(union)), (AXIS,), axis_types=(AxisType.Auto,))
        self._specs = [PartitionSpec(AXIS) if way.given else PartitionSpec() for way in ways]
        landed = [PartitionSpec(AXIS) if way.taken else PartitionSpec() for way in ways]
        self._operands = []
        for way, spec in zip(ways, self._specs, strict=True):
            absent = [
                None if n >= 0 else _zeros(way, device, {} if zeros is None else zeros)
                for n, device in zip(self._given, mine, strict=True)
            ]
            aval = _jax.aval_of(_global(way.given, len(union)), way.dtype)
            self._operands.append((aval, NamedSharding(mesh, spec), absent))
        self._results = [(_jax.aval_of(way.shape, way.dtype), way.landing) for way in ways]
        local = functools.partial(_moved, ways)
        region = jax.shard_map(local, mesh=mesh, in_specs=tuple(self._specs), out_specs=landed, check_vma=False)
        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s, _ in self._operands]
        out = [NamedSharding(mesh, spec) for spec in landed]
        with _jax.without_mesh():
            compiled = compiling.compiled(jax.jit(region, out_shardings=out).lower(*avals), union)
        self._call = pacing.paced(compiled, union)

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays where they land; None for each in a process that has no device there.

        Args:
          arrays: as planned; where this process has no device of the source, anything.
        """
        operands = []
        for array, (aval, sharding, absent) in zip(arrays, self._operands, strict=True):
            blocks = _jax.blocks_of(array) if self._given and max(self._given) >= 0 else ()
            held = [blocks[n] if n >= 0 else zero for n, zero in zip(self._given, absent, strict=True)]
            operands.append(_jax.assembled(aval, sharding, held))
        moved = self._call(*operands)
        if not self.lands_here:
            return [None] * len(arrays)
        out = []
        for array, (aval, sharding) in zip(moved, self._results, strict=True):
            blocks = _jax.blocks_of(array)
            out.append(_jax.assembled(aval, sharding, [blocks[n] for n in self._taken]))
        return out


def _zeros(way: Way, device: Any, known: dict[Any, Any]) -> Any:
    """What a device gives that has nothing to send."""
    key = way.given, str(way.dtype), device
    if key not in known:
        known[key] = jax.device_put(np.zeros(way.given, way.dtype), device)
    return known[key]


def _global(block: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape of an array of `count` blocks along its first dim. One without dims is called replicated."""
    return (count * block[0], *block[1:]) if block else ()


def _moved(ways: Sequence[Way], *blocks: Any) -> list[Any]:
    """What each device does."""
    return [_one(way, block) for way, block in zip(ways, blocks, strict=True)]


def _one(way: Way, block: Any) -> Any:
    receivers = {hop.destination for one in way.rounds for hop in one.hops}
    out = None
    for one in way.rounds:
        piece = block
        if one.shape != way.given:
            piece = lax.dynamic_slice(block, _starts({h.source: h.taken for h in one.hops}, len(way.given)), one.shape)
        piece = lax.ppermute(piece, AXIS, one.pairs)
        if one.shape == way.taken:  # whole blocks: each receiver gets one, in this round or in another
            out = piece if out is None else jnp.where(_among({h.destination for h in one.hops}), piece, out)
            continue
        old = jnp.zeros(way.taken, way.dtype) if out is None else out
        new = lax.dynamic_update_slice(old, piece, _starts({h.destination: h.put for h in one.hops}, len(way.taken)))
        receive = {hop.destination for hop in one.hops}
        out = new if receive == receivers else jnp.where(_among(receive), new, old)
    return jnp.zeros(way.taken, way.dtype) if out is None else out


def _starts(starts: dict[int, tuple[int, ...]], rank: int) -> list[Any]:
    """Where a device's piece begins, from a table of all; of a device that has none, at 0."""
    if len(set(starts.values())) == 1:
        return list(next(iter(starts.values())))
    table = np.zeros((lax.axis_size(AXIS), rank), np.int32)
    for device, start in starts.items():
        table[device] = start
    mine = jnp.asarray(table)[lax.axis_index(AXIS)]
    return [mine[dim] for dim in range(rank)]


def _among(devices: set[int]) -> Any:
    """Whether this device is one of some."""
    table = np.zeros(lax.axis_size(AXIS), np.bool_)
    table[list(devices)] = True
    return jnp.asarray(table)[lax.axis_index(AXIS)]


def way_between(
    shape: tuple[int, ...], dtype: Any, source: NamedSharding, landing: NamedSharding, union: Sequence[Any],
    parts: Sequence[Part] | None = None,
) -> Way:  # fmt: skip
    """How an array goes from one sharding to another.

    Args:
      union: as for `Crossing`.
      parts: the pieces, if they are planned; by default each comes from a device of the receiver's process if that has
        it, else from the holder that has sent least.
    """
    have, need = _blocks(source, shape), _blocks(landing, shape)
    number = {device: n for n, device in enumerate(union)}
    if parts is None:
        parts = _parts(have, need, number)
    given = source.shard_shape(shape)
    taken = landing.shard_shape(shape)
    found = rounds(parts, {number[d]: r for d, r in have.items()}, {number[d]: r for d, r in need.items()})
    return Way(tuple(shape), dtype, given, taken, found, landing)


def _blocks(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[Any, Ranges]:
    """The block of each device."""
    return {
        device: tuple(s.indices(size)[:2] for s, size in zip(index or (), shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _parts(have: dict[Any, Ranges], need: dict[Any, Ranges], number: dict[Any, int]) -> list[Part]:
    holders: dict[Ranges, list[Any]] = {}
    for device, block in have.items():
        holders.setdefault(block, []).append(device)
    sent = dict.fromkeys(have, 0)
    out = []
    for device, wanted in need.items():
        for block, owners in holders.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, wanted, strict=True))
            if any(low >= high for low, high in common):
                continue
            source = min(owners, key=lambda o: (o.process_index != device.process_index, sent[o], number[o]))
            sent[source] += 1
            out.append(Part(number[source], number[device], common))
    return out
