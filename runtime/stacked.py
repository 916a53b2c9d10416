"""Stacked leaves, which the user holds as one array and of which each stage owns a part.

A stacked leaf that a step returns is a `StackedArray`: its parts, each where its stage has it. The next call takes the
parts, and nothing is moved or copied. It is a `jax.Array` for its readers, and is joined when one reads it, once,
over all devices that have a part: equal parts of equal submeshes are the blocks of one array as they are, others are
sent. Any other array is sliced where it is, and its parts are copied to their stages.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.ir.graph import Bounds, Pieces, Traced
from alpa_lite.ir.program import Program
from alpa_lite.runtime import placement
from alpa_lite.runtime.binding import NewSignature, check_leaf
from alpa_lite.runtime.multihost import global_array


class StackedArray(_jax.LazyArray):
    """An array in parts along dim 0, each on the submesh of its stage, joined when somebody reads it.

    Parts that are donated are deleted, and the array with them; one that was joined from copies can still be read.

    Attributes:
      parts: in order.
    """

    def __init__(self, parts: Sequence[Any], leaf: _Leaf, weak: bool) -> None:
        """Args: the parts, what they are parts of, and whether the dtype of the whole is weak."""
        super().__init__(leaf.shape, parts[0].dtype, weak, leaf.whole)
        self.parts, self._leaf = list(parts), leaf

    def make_array(self) -> Any:
        """The parts joined."""
        return self._leaf.join(self.parts)

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


class StackedLeaves:
    """Splits the user's flat arguments, and joins the flat results. Holds no arrays."""

    def __init__(self, traced: Traced, program: Program, sharding: Callable[[int], NamedSharding]):
        """Prepares the shardings of whole leaves of a step, from that of each buffer of its program."""
        stacked = traced.stacked
        assert stacked is not None
        self._avals = [traced.graph.values[v].aval for v in traced.graph.block.inputs]
        read = [group[0] if group else -1 for group in program.inputs]
        self._arguments = [_Leaf(one, read, program, sharding) for one in stacked.arguments]
        self._results = [_Leaf(one, program.outputs, program, sharding) for one in stacked.results]

    @property
    def cut(self) -> list[slice]:
        """The positions of the parts of each stacked leaf among the arguments of the cut step."""
        return [slice(one.numbers[0], one.numbers[-1] + 1) for one in self._arguments if one.bounds]

    def split(self, leaves: Sequence[Any], may_overwrite: Callable[[Any], bool]) -> list[Any]:
        """Returns the arguments of the cut step. Parts of a leaf that may be overwritten may share its memory.

        Raises:
          NewSignature: a stacked leaf has another shape or dtype than planned.
        """
        if len(leaves) != len(self._arguments):
            raise NewSignature("the structure of the arguments")
        out: list[Any] = []
        foreign: defaultdict[Any, list[tuple[int, NamedSharding]]] = defaultdict(list)
        for leaf, one in zip(leaves, self._arguments, strict=True):
            if not one.bounds:
                out.append(leaf)
                continue
            aval = self._avals[one.numbers[0]]
            check_leaf(leaf, aval, (one.bounds[-1], *aval.shape[1:]))
            own = one.parts_of(leaf)
            parts: Any = own or [leaf[low:high] for low, high in itertools.pairwise(one.bounds)]
            if own is None or not may_overwrite(leaf):
                for place, goal in enumerate(one.shardings, len(out)):
                    if goal is not None:
                        foreign[goal.mesh].append((place, goal))
            out += parts
        for group in foreign.values():
            copied = placement.copies([out[place] for place, _ in group], [goal for _, goal in group])
            for (place, _), array in zip(group, copied, strict=True):
                out[place] = array
        return out

    def parts(self, state: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
        """Returns the arrays of some state that was returned; none if an array of it is also among the rest."""
        if not {id(leaf) for leaf in rest}.isdisjoint(map(id, state)):
            return []
        return [part for leaf in state for part in (leaf.parts if isinstance(leaf, StackedArray) else [leaf])]

    def shardings(
        self, arguments: Sequence[NamedSharding], results: Sequence[NamedSharding], anywhere: NamedSharding
    ) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Returns those of the user's leaves, from those of the cut step; `anywhere` for leaves that no stage reads."""

        def whole(leaves: Sequence[_Leaf], parts: Sequence[NamedSharding]) -> list[NamedSharding]:
            return [(one.whole or anywhere) if one.bounds else parts[one.numbers[0]] for one in leaves]

        return whole(self._arguments, arguments), whole(self._results, results)

    def join(self, outputs: Sequence[Any], weak: Sequence[bool] | None = None, *, arguments: bool = False) -> list[Any]:
        """Returns the user's results, from those of the cut step; or the arguments, from its arguments.

        Each has a weak dtype as `weak` says, by default as its parts.
        """
        leaves = self._arguments if arguments else self._results
        out: list[Any] = []
        for n, one in enumerate(leaves):
            parts = [outputs[k] for k in one.numbers]
            if one.bounds and one.whole is not None and type(parts[0]) is _jax.PlainArray:
                out.append(StackedArray(parts, one, parts[0].weak_type if weak is None else weak[n]))
                continue
            array = one.join(parts) if one.bounds else parts[0]
            out.append(array if weak is None else _jax.array_with_weak_type(array, weak[n]))
        return out


class _Leaf:
    """One leaf: the shardings of its parts, and of the whole."""

    def __init__(
        self, pieces: Pieces, buffer_of: Sequence[int], program: Program, sharding: Callable[[int], NamedSharding]
    ) -> None:
        """Args: of the leaf, and of each argument or result of the cut step the buffer, -1 if none is read."""
        self.numbers = pieces.numbers
        self.bounds: Bounds = pieces.bounds
        if not pieces.bounds:
            return
        buffers = [buffer_of[n] for n in pieces.numbers]
        self.whole: NamedSharding | None = None
        self.shardings: list[Any] = [sharding(b) if b >= 0 else None for b in buffers]
        if min(buffers) < 0:  # the step does not read all of it, so that it has no sharding
            return
        places = [program.buffers[b] for b in buffers]
        self.shape = (pieces.bounds[-1], *places[0].shape[1:])
        alike = {(place.layout, place.shape, program.submeshes[place.mesh].mesh) for place in places}
        self.in_place = len(alike) == 1 and len({place.mesh for place in places}) == len(places)
        if self.in_place:
            self.whole = _over_stages(self.shardings)
        else:
            devices = dict.fromkeys(d for one in self.shardings for d in np.array(one.mesh.devices).flat)
            self.whole = global_array.even_sharding(self.shape, list(devices))

    def parts_of(self, leaf: Any) -> list[Any] | None:
        """The parts of a leaf that a step returned, or whose blocks are these; None if it has none."""
        if isinstance(leaf, StackedArray):
            return leaf.parts if leaf._leaf.bounds == self.bounds else None
        if self.whole is None or not self.in_place or not isinstance(leaf, jax.Array) or leaf.sharding != self.whole:
            return None
        shapes = [(high - low, *self.shape[1:]) for low, high in itertools.pairwise(self.bounds)]
        return [
            jax.make_array_from_single_device_arrays(shape, goal, _blocks(leaf, goal), dtype=leaf.dtype)
            for shape, goal in zip(shapes, self.shardings, strict=True)
        ]

    def join(self, parts: Sequence[Any]) -> Any:
        """Joins parts of a leaf into the whole. In a multi-process run, all processes that have a part call this."""
        if self.whole is None:
            return _concatenate(parts)
        if not self.in_place:
            return _joined(parts, self.whole)
        blocks = [block for part, goal in zip(parts, self.shardings, strict=True) for block in _blocks(part, goal)]
        return jax.make_array_from_single_device_arrays(self.shape, self.whole, blocks, dtype=parts[0].dtype)


def _blocks(array: Any, sharding: NamedSharding) -> list[Any]:
    """The blocks of an array that are here on the devices of a sharding, in the order of these."""
    there = {shard.device: shard.data for shard in array.addressable_shards}
    return [there[device] for device in np.array(sharding.mesh.devices).flat if device in there]


def _over_stages(shardings: Sequence[NamedSharding]) -> NamedSharding:
    """The sharding of an array whose blocks are those of equal parts on equal submeshes, one after another."""
    first = shardings[0]
    names, spec = first.mesh.axis_names, tuple(first.spec)
    axis = next(name for name in ("stage", *(f"stage{i}" for i in range(len(names)))) if name not in names)
    head, rest = (spec[0], spec[1:]) if spec else (None, ())
    over = () if head is None else (head,) if isinstance(head, str) else tuple(head)
    devices = np.stack([np.array(sharding.mesh.devices) for sharding in shardings])
    return NamedSharding(Mesh(devices, (axis, *names)), PartitionSpec((axis, *over), *rest))


@_jax.without_mesh()
def _joined(parts: Sequence[Any], whole: NamedSharding) -> Any:
    """The whole of some parts: each is sent to all devices in the layout of the whole, which has all rows."""
    return jax.jit(_concatenate, out_shardings=whole)(global_array.put(parts, [whole] * len(parts)))


def _concatenate(parts: Sequence[Any]) -> Any:
    return lax.concatenate(list(parts), 0)
