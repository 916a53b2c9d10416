"""Stacked leaves, which the user holds as one array and of which each stage owns a part.

A stacked leaf that a step returns is a `StackedArray`: its parts, each where its stage has it. The next call takes the
parts, and nothing is moved or copied. It is a `jax.Array` for its readers, and is joined when one reads it, once,
over all devices that have a part: equal parts of equal submeshes are the blocks of one array as they are, others are
sent. Any other array is sliced where it is, and its parts are copied to their stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.ir.graph import Pieces, StackedArguments, Traced
from alpa_lite.runtime.buffers import ProgramBuffers
from alpa_lite.runtime.multihost import global_array


class StackedArray(_jax.LazyArray):
    """An array in parts along dim 0, each on the submesh of its stage, joined when somebody reads it.

    Parts that are donated are deleted, and the array with them; one that was joined from copies can still be read.

    Attributes:
      parts: in order.
      leaf: of which they are the parts.
    """

    def __init__(self, parts: Sequence[Any], leaf: StackedLeaf, weak: bool) -> None:
        """Args: the parts, what they are parts of, and whether the dtype of the whole is weak."""
        super().__init__(leaf.shape, parts[0].dtype, weak, leaf.whole)
        self.parts, self.leaf = list(parts), leaf

    def make_array(self) -> Any:
        """Returns the parts joined."""
        return self.leaf.join(self.parts)

    def is_deleted(self) -> bool:
        """Returns whether a part was donated or deleted."""
        return any(part.is_deleted() for part in self.parts)

    def is_ready(self) -> bool:
        """Returns whether all parts are computed."""
        return all(part.is_ready() for part in self.parts)

    def block_until_ready(self) -> StackedArray:
        """Waits for the parts."""
        jax.block_until_ready(self.parts)
        return self


class StackedLeaf:
    """A stacked argument or result of the user's step: the shardings of its parts, and of the whole. Holds no arrays.

    Attributes:
      bounds: of the parts in dim 0, from 0 to its size.
      shape: of the whole.
      shardings: of the parts.
      whole: the sharding of the whole.
    """

    def __init__(self, bounds: Sequence[int], numbers: Sequence[int], buffers: ProgramBuffers) -> None:
        """Args: `numbers` are those of the buffers of the parts."""
        program = buffers.program
        places = [program.buffers[b] for b in numbers]
        self.bounds = tuple(bounds)
        self.shape = (bounds[-1], *places[0].shape[1:])
        self.shardings = list(map(buffers.sharding, numbers))
        alike = {(place.layout, place.shape, program.submeshes[place.mesh].mesh) for place in places}
        self._is_in_place = len(alike) == 1 and len({place.mesh for place in places}) == len(places)
        if self._is_in_place:
            self.whole = _over_stages(self.shardings)
        else:
            devices = dict.fromkeys(d for one in self.shardings for d in np.array(one.mesh.devices).flat)
            self.whole = global_array.even_sharding(self.shape, list(devices))

    def parts_of(self, leaf: Any) -> list[Any] | None:
        """Returns the parts of an array that a step returned, or whose blocks are these; None if it has none."""
        if isinstance(leaf, StackedArray):
            return leaf.parts if leaf.leaf.bounds == self.bounds else None
        if not self._is_in_place or not isinstance(leaf, jax.Array) or leaf.sharding != self.whole:
            return None
        shapes = [(high - low, *self.shape[1:]) for low, high in itertools.pairwise(self.bounds)]
        return [
            jax.make_array_from_single_device_arrays(shape, goal, _blocks(leaf, goal), dtype=leaf.dtype)
            for shape, goal in zip(shapes, self.shardings, strict=True)
        ]

    def array_of(self, parts: Sequence[Any], weak: bool | None = None) -> Any:
        """Returns the whole of some parts, with a weak dtype or not, by default as theirs.

        Random keys are joined at once.
        """
        if type(parts[0]) is not _jax.PlainArray:
            return self.join(parts)
        return StackedArray(parts, self, parts[0].weak_type if weak is None else weak)

    def join(self, parts: Sequence[Any]) -> Any:
        """Joins parts into the whole. In a multi-process run, all processes that have a part call this."""
        if not self._is_in_place:
            return _joined(parts, self.whole)
        blocks = [block for part, goal in zip(parts, self.shardings, strict=True) for block in _blocks(part, goal)]
        return jax.make_array_from_single_device_arrays(self.shape, self.whole, blocks, dtype=parts[0].dtype)


def leaves_of(traced: Traced) -> StackedArguments:
    """Returns the flat arguments and results of the user's step in terms of the traced one, which may be cut."""
    each_whole = (tuple(Pieces((n,)) for n in range(len(some))) for some in (traced.arguments, traced.outputs))
    return traced.stacked or StackedArguments(*each_whole)


def pieces(traced: Traced, leaves: Sequence[Any]) -> list[Any]:
    """Returns the flat arguments of a traced step from those of the user's, of which stacked ones are cut."""
    found: dict[int, Any] = {}
    for leaf, one in zip(leaves, leaves_of(traced).arguments, strict=True):
        own = leaf.parts if isinstance(leaf, StackedArray) and leaf.leaf.bounds == one.bounds else []
        parts = own or [leaf[low:high] for low, high in itertools.pairwise(one.bounds)] or [leaf]
        found.update(zip(one.numbers, parts, strict=True))
    return [found[number] for number in sorted(found)]


def _blocks(array: Any, sharding: NamedSharding) -> list[Any]:
    """Returns the blocks of an array that are here on the devices of a sharding, in the order of these."""
    there = {shard.device: shard.data for shard in array.addressable_shards}
    return [there[device] for device in np.array(sharding.mesh.devices).flat if device in there]


def _over_stages(shardings: Sequence[NamedSharding]) -> NamedSharding:
    """Returns the sharding of an array whose blocks are those of equal parts on equal submeshes, one after another."""
    first = shardings[0]
    names, spec = first.mesh.axis_names, tuple(first.spec)
    axis = next(name for name in ("stage", *(f"stage{i}" for i in range(len(names)))) if name not in names)
    head, rest = (spec[0], spec[1:]) if spec else (None, ())
    over = () if head is None else (head,) if isinstance(head, str) else tuple(head)
    devices = np.stack([np.array(sharding.mesh.devices) for sharding in shardings])
    return NamedSharding(Mesh(devices, (axis, *names)), PartitionSpec((axis, *over), *rest))


@_jax.clear_mesh_context()
def _joined(parts: Sequence[Any], whole: NamedSharding) -> Any:
    """Returns the whole of some parts: each is sent to all devices in the layout of the whole, which has all rows."""
    return jax.jit(_concatenate, out_shardings=whole)(global_array.put(parts, [whole] * len(parts)))


def _concatenate(parts: Sequence[Any]) -> Any:  # one function: it is compiled once for each sharding
    return lax.concatenate(parts, 0)
