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
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from alpa_lite import _jax
from alpa_lite.passes.local.types import in_bytes
from alpa_lite.passes.programs.rounds import Part, Round, rounds
from alpa_lite.passes.programs.transfers import Ranges
from alpa_lite.runtime import compiling, pacing, relabelling


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
    """Moves arrays between two sets of devices, as planned. Holds no arrays but zeros.

    Attributes:
      lands_here: whether this process has a device where they land.
      labels: for each array the sharding that its program takes, if arrays on the source may have it as they are: all
        their blocks here in their order. Given such an array, nothing is made of it first.
    """

    def __init__(
        self, ways: Sequence[Way], sources: Sequence[Any], union: Sequence[Any], zeros: dict[Any, Any] | None = None,
        for_runs: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Compiles the program of the union.

        Args:
          ways: of each array.
          sources: the devices where all arrays lie, in the order of their sharding.
          union: these and the devices where they land, in one order for all processes.
          zeros: blocks of zeros by shape, dtype and device, which those of one program share; takes what is new.
          for_runs: the numbers of arrays that nothing but compiled programs reads where they land.
        """
        here = jax.process_index()
        mine = [device for device in union if device.process_index == here]
        given = {device: n for n, device in enumerate(d for d in sources if d.process_index == here)}
        positions = [given.get(device, -1) for device in mine]  # among the blocks of an array; -1: zeros
        goals = [device for device in np.array(ways[0].landing.mesh.devices).flat if device.process_index == here]
        self.lands_here = bool(goals)
        self._nothing: list[Any] = [None] * len(ways)
        taken = [mine.index(device) for device in goals]
        in_order = list(range(len(mine)))
        mesh = relabelling.mesh_over(union)
        sent, landed = [], []
        self._give: list[tuple[NamedSharding, Callable[[Any], Any]]] = []
        self._take: list[tuple[NamedSharding, Callable[[Any], Any]]] = []
        self.labels: list[NamedSharding | None] = []
        labelled: dict[int, NamedSharding] = {}
        for n, way in enumerate(ways):
            one = relabelling.label(way.shape, way.given, way.dtype, mesh)
            self.labels.append(one.sharding if one.same and positions == in_order else None)
            absent = [_zeros(way, d, {} if zeros is None else zeros) for d in mine if d not in given]
            give = relabelling.relabelling(one.aval, one.sharding, positions, same=one.same, stand_ins=absent)
            self._give.append((one.sharding, give))
            sent.append(one)
            one = relabelling.label(way.shape, way.taken, way.dtype, mesh)
            if self.lands_here:
                aval, same = _jax.aval_of(way.shape, way.dtype), one.same and len(goals) == len(mine)
                self._take.append((way.landing, relabelling.relabelling(aval, way.landing, taken, same=same)))
                if n in for_runs and same and taken == in_order and way.landing.num_devices > 1:
                    labelled[n] = way.landing
            landed.append(one)
        region = jax.shard_map(
            functools.partial(_moved, ways, mesh.axis_names, mesh.size), mesh=mesh, check_vma=False,
            in_specs=tuple(one.sharding.spec for one in sent), out_specs=[one.sharding.spec for one in landed],
        )  # fmt: skip
        avals = [jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype, sharding=one.sharding) for one in sent]
        jitted = jax.jit(region, out_shardings=[one.sharding for one in landed])
        with _jax.without_mesh():
            compiled = compiling.compiled(jitted.lower(*avals), union)
        _jax.call_results(compiled, labelled)
        self._call = pacing.paced(compiled, union, unread=True)
        # What a process gives that sends nothing is the same each time.
        self._same = None if given else [give(None) for _, give in self._give]

    def __call__(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The arrays where they land; None for each in a process that has no device there.

        Args:
          arrays: as planned; where this process has no device of the source, anything.
        """
        given = self._same
        if given is None:
            given = _labelled(arrays, self._give)
        moved = self._call(*given)
        return _labelled(moved, self._take) if self.lands_here else self._nothing


def _labelled(arrays: Sequence[Any], labels: Sequence[tuple[Any, Callable[[Any], Any]]]) -> Sequence[Any]:
    """Arrays by the labels that they are wanted with, which most are made with (`_jax.call_results`)."""
    for array, (label, _) in zip(arrays, labels, strict=True):
        if array.sharding is not label:
            break
    else:
        return arrays
    return [
        array if array.sharding is label else relabel(array)
        for array, (label, relabel) in zip(arrays, labels, strict=True)
    ]


def _zeros(way: Way, device: Any, known: dict[Any, Any]) -> Any:
    """What a device gives that has nothing to send."""
    key = way.given, str(way.dtype), device
    if key not in known:
        known[key] = jax.device_put(np.zeros(way.given, way.dtype), device)
    return known[key]


def _moved(ways: Sequence[Way], axes: tuple[str, ...], size: int, *blocks: Any) -> list[Any]:
    """What each of `size` devices does."""
    return [
        in_bytes(lambda block, way=way: _one(way, block, axes, size), block)
        for way, block in zip(ways, blocks, strict=True)
    ]


def _one(way: Way, block: Any, axes: tuple[str, ...], size: int) -> Any:
    receivers = {hop.destination for one in way.rounds for hop in one.hops}

    def of_this_device(values: dict[int, Any], other: Any, dtype: Any) -> Any:
        """Its entry of a table of all devices."""
        table = np.stack([np.asarray(values.get(n, other), dtype) for n in range(size)])
        return jnp.asarray(table)[lax.axis_index(axes)]

    def starts(of: dict[int, tuple[int, ...]], rank: int) -> list[Any]:
        """Where a device's piece begins; of a device that has none, at 0."""
        if len(set(of.values())) == 1:
            return list(next(iter(of.values())))
        mine = of_this_device(of, (0,) * rank, np.int32)
        return [mine[dim] for dim in range(rank)]

    def chosen(devices: set[int], new: Any, old: Any) -> Any:
        return jnp.where(of_this_device(dict.fromkeys(devices, True), False, np.bool_), new, old)

    out = None
    for one in way.rounds:
        piece = block
        if one.shape != way.given:
            piece = lax.dynamic_slice(block, starts({h.source: h.taken for h in one.hops}, len(way.given)), one.shape)
        piece = lax.ppermute(piece, axes, one.pairs)
        if one.shape == way.taken:  # whole blocks: each receiver gets one, in this round or in another
            out = piece if out is None else chosen({h.destination for h in one.hops}, piece, out)
            continue
        old = jnp.zeros(way.taken, block.dtype) if out is None else out
        new = lax.dynamic_update_slice(old, piece, starts({h.destination: h.put for h in one.hops}, len(way.taken)))
        receive = {hop.destination for hop in one.hops}
        out = new if receive == receivers else chosen(receive, new, old)
    return jnp.zeros(way.taken, block.dtype) if out is None else out


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
