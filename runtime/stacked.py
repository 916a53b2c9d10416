"""Stacked leaves between the user, who holds them whole, and the stages, which own a part each.

A whole leaf that a step returns is one `jax.Array` over all submeshes that hold a part of it. Where the parts are
equal (`layers.stacked_arguments.arrangement`) its blocks are those of the parts themselves: no byte is moved or copied,
and the next call takes the leaf apart in the same way. (Both views share their buffers: once one is donated, the other
is deleted too. Measured on JAX 0.10.2 and 0.12.) Otherwise the parts change their layout first, or the leaf is cut
evenly over all devices, each of which is sent what it lacks.

A leaf that comes from elsewhere is sliced where it lies, and its parts are copied to their stages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.graph import Bounds, Pieces, Traced
from alpa_lite.passes.layers.stacked_arguments import Arrangement, arrangement
from alpa_lite.program import Program
from alpa_lite.runtime import placement, presence, spreading
from alpa_lite.runtime.signatures import STRUCTURE, NewSignature, check_leaf

Box = tuple[tuple[int, int], ...]


class StackedLeaves:
    """Takes the user's flat arguments apart, and puts the flat results together. Holds no arrays."""

    def __init__(self, traced: Traced, program: Program, sharding: Callable[[int], NamedSharding]):
        """Prepares the shardings of whole leaves.

        Args:
          traced: a step with `extra["stacked"]`.
          program: of the same step.
          sharding: of a buffer.
        """
        stacked = traced.stacked
        assert stacked is not None
        self._avals = [traced.graph.values[v].aval for v in traced.graph.block.inputs]
        self._arguments = [
            _Leaf(
                pieces, [program.inputs[n][0] if program.inputs[n] else -1 for n in pieces.numbers], program, sharding
            )
            for pieces in stacked.arguments
        ]
        self._results = [
            _Leaf(pieces, [program.outputs[n] for n in pieces.numbers], program, sharding) for pieces in stacked.results
        ]

    @property
    def cut(self) -> list[slice]:
        """Where the parts of each stacked leaf are among the arguments of the cut step."""
        return [slice(one.numbers[0], one.numbers[-1] + 1) for one in self._arguments if one.bounds]

    def apart(self, leaves: Sequence[Any], ours: Callable[[Any], bool]) -> list[Any]:
        """The arguments of the cut step. Parts of a leaf that is ours may share memory with it; others are copies.

        Args:
          leaves: the user's flat arguments.
          ours: whether an array may be overwritten.

        Raises:
          NewSignature: a stacked leaf has not the planned shape or dtype.
        """
        if len(leaves) != len(self._arguments):
            raise NewSignature(STRUCTURE)
        out: list[Any] = []
        foreign: dict[Any, list[tuple[int, Any, NamedSharding]]] = {}
        for leaf, one in zip(leaves, self._arguments, strict=True):
            if not one.bounds:
                out.append(leaf)
                continue
            aval = self._avals[one.numbers[0]]
            check_leaf(leaf, aval, (one.bounds[-1], *aval.shape[1:]))
            parts = one.apart(leaf) if ours(leaf) else None
            if parts is None:
                spans = itertools.pairwise(one.bounds)
                parts = [leaf[low:high] for low, high in spans]
                for k, (part, goal) in enumerate(zip(parts, one.shardings, strict=True)):
                    if goal is not None:
                        foreign.setdefault(goal.mesh, []).append((len(out) + k, part, goal))
            out += parts
        for group in foreign.values():
            copied = placement.copies([part for _, part, _ in group], [goal for _, _, goal in group])
            for (place, _, _), array in zip(group, copied, strict=True):
                out[place] = array
        return out

    def shardings(
        self, arguments: Sequence[NamedSharding], results: Sequence[NamedSharding], anywhere: NamedSharding
    ) -> tuple[list[NamedSharding], list[NamedSharding]]:
        """Those of the user's leaves, of those of the cut step; `anywhere` for leaves that lie nowhere."""

        def whole(leaves: Sequence[_Leaf], parts: Sequence[NamedSharding]) -> list[NamedSharding]:
            return [(one.whole or anywhere) if one.bounds else parts[one.numbers[0]] for one in leaves]

        return whole(self._arguments, arguments), whole(self._results, results)

    def together(self, outputs: Sequence[Any], *, arguments: bool = False) -> list[Any]:
        """The user's results, of those of the cut step; or the arguments, of its arguments."""
        out: list[Any] = []
        for one in self._arguments if arguments else self._results:
            parts = [outputs[n] for n in one.numbers]
            out.append(one.together(parts) if one.bounds else parts[0])
        return out


class _Leaf:
    """One leaf: where its parts lie, and how the whole does."""

    def __init__(
        self,
        pieces: Pieces,
        buffers: Sequence[int],
        program: Program,
        sharding: Callable[[int], NamedSharding],
    ) -> None:
        self.numbers = pieces.numbers
        self.bounds: Bounds = pieces.bounds
        if not pieces.bounds:
            return
        self.whole: NamedSharding | None = None
        self.shardings: list[Any] = [sharding(b) if b >= 0 else None for b in buffers]
        if min(buffers) < 0:  # the step does not read all of it, so that it lies nowhere
            return
        places = [program.buffers[b] for b in buffers]
        self.kind: Arrangement = arrangement(places, program.submeshes)
        self.shape = (pieces.bounds[-1], *places[0].shape[1:])
        devices: list[np.ndarray] = [s.mesh.devices for s in self.shardings]
        if self.kind == "spread":
            own = list(dict.fromkeys(d for mesh in devices for d in mesh.flat))
            self.alone = len({device.process_index for device in own}) == 1
            self.whole = _even(self.shape, own, first=0 if self.alone else 1)
            return
        first: Any = self.shardings[0]
        shape, names, spec = first.mesh.devices.shape, first.mesh.axis_names, tuple(first.spec)
        axis = next(name for name in ("stage", *(f"stage{i}" for i in range(len(names)))) if name not in names)
        stacked = np.stack([mesh.reshape(shape) for mesh in devices])
        head, rest = (spec[0], spec[1:]) if spec else (None, ())
        over = () if head is None else (head,) if isinstance(head, str) else tuple(head)
        self.whole = NamedSharding(Mesh(stacked, (axis, *names)), PartitionSpec((axis, *over), *rest))
        # Each part in the layout of the first: what it must be in to be a part of the whole.
        self.landed: list[Any] = [
            own if self.kind == "in place" else NamedSharding(Mesh(mesh.reshape(shape), names), first.spec)
            for own, mesh in zip(self.shardings, devices, strict=True)
        ]

    def apart(self, leaf: Any) -> list[Any] | None:
        """The parts of a leaf that lies as one that a step returned; None if it does not."""
        if self.whole is None or not isinstance(leaf, jax.Array) or leaf.sharding != self.whole:
            return None
        if self.kind == "spread" and not self.alone:
            return spreading.apart(leaf, self.bounds, self.shardings)
        if self.kind == "spread":
            spans = zip(itertools.pairwise(self.bounds), self.shardings, strict=True)
            return [_gathered([(0, leaf)], (high - low, *self.shape[1:]), goal, low) for (low, high), goal in spans]
        there = {shard.device: shard.data for shard in leaf.addressable_shards}
        out = []
        for (low, high), landed, goal in zip(itertools.pairwise(self.bounds), self.landed, self.shardings, strict=True):
            blocks = [there[device] for device in landed.mesh.devices.flat if device in there]
            shape = (high - low, *self.shape[1:])
            part = jax.make_array_from_single_device_arrays(shape, landed, blocks, dtype=leaf.dtype)
            out.append(part if landed is goal else presence.put([part], [goal])[0])
        return out

    def together(self, parts: Sequence[Any]) -> jax.Array:
        """The whole of some parts."""
        if self.whole is None:
            return lax.concatenate(list(parts), 0)
        if self.kind == "spread" and not self.alone:
            return spreading.together(parts, self.whole)
        if self.kind == "spread":
            return _gathered(list(zip(self.bounds, parts, strict=False)), self.shape, self.whole, 0)
        if self.kind == "resharded":
            parts = presence.put(parts, self.landed)
        blocks = []
        for part, landed in zip(parts, self.landed, strict=True):
            there = {shard.device: shard.data for shard in part.addressable_shards}
            blocks += [there[device] for device in landed.mesh.devices.flat if device in there]
        return jax.make_array_from_single_device_arrays(self.shape, self.whole, blocks, dtype=parts[0].dtype)


def _even(shape: tuple[int, ...], devices: Sequence[Any], first: int = 0) -> NamedSharding:
    """A sharding over some devices that cuts one dim as often as it can be cut evenly, one from `first` on."""
    best = max(
        ((count, -dim) for dim, size in enumerate(shape) for count in range(1, len(devices) + 1)
         if dim >= first and len(devices) % count == 0 and size % count == 0),
        default=(1, 0),
    )  # fmt: skip
    count, dim = best[0], -best[1]
    mesh = Mesh(np.array(devices).reshape(count, -1), ("cut", "copy"))
    return NamedSharding(mesh, PartitionSpec(*(None,) * dim, "cut"))


def _gathered(sources: Sequence[tuple[int, jax.Array]], shape: Sequence[int], goal: NamedSharding, low: int) -> Any:
    """An array of the blocks of others, whose first index on dim 0 is given; `low` is that of the new one.

    Every device is sent what it lacks, directly by a device that has it.
    """
    shape = tuple(shape)
    held = [
        (_box(shard.index, array.shape, first), shard.device, shard.data)
        for first, array in sources
        for shard in array.addressable_shards
    ]
    blocks = []
    for device, index in goal.addressable_devices_indices_map(shape).items():
        assert index is not None
        want = _box(index, shape, low)
        found: dict[Box, tuple[Any, Box, Any]] = {}
        for box, owner, data in held:
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, want, strict=True))
            if all(a < b for a, b in common) and (common not in found or owner == device):
                found[common] = owner, box, data
        blocks.append(_joined([_sent(common, *found[common], device) for common in sorted(found)], 0))
    return jax.make_array_from_single_device_arrays(shape, goal, blocks)


def _box(index: Sequence[slice], shape: Sequence[int], first: int) -> Box:
    spans = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
    return tuple((a + first, b + first) if dim == 0 else (a, b) for dim, (a, b) in enumerate(spans))


def _sent(common: Box, owner: Any, box: Box, data: jax.Array, device: Any) -> tuple[Box, jax.Array]:
    """A part of a block on another device; never the block itself, which may be donated."""
    starts = [c - b for (c, _), (b, _) in zip(common, box, strict=True)]
    sizes = [high - low for low, high in common]
    if math.prod(sizes) < data.size:
        data = lax.slice(data, starts, [a + n for a, n in zip(starts, sizes, strict=True)])
    elif owner == device:
        data = data.copy()
    return common, jax.device_put(data, device)


def _joined(parts: Sequence[tuple[Box, jax.Array]], dim: int) -> jax.Array:
    """The box that some boxes fill."""
    if len(parts) == 1:
        return parts[0][1]
    groups = [list(group) for _, group in itertools.groupby(parts, key=lambda part: part[0][dim])]
    rows = [_joined(group, dim + 1) for group in groups]
    return rows[0] if len(rows) == 1 else lax.concatenate(rows, dim)
