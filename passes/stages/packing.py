"""Joins the small values that go between the segments of a stage, so that a task has few arguments.

Problem. A call of a compiled executable costs the host time for each argument and each result: measured, from one to
several microseconds an array on each device. A stage of many layers has hundreds: parameters, sums of gradients, values
of the forward pass that the backward pass reads. Most are small (biases, scales, statistics).

Answer. Small values of one dtype that the same segments make and the same segments read share a buffer, a *pack*: on
each device their blocks, flat, end to end. Arguments that the micro-batches read are packed once a step, by the
prologue; the update reads them where they are. A pack costs a copy on the device. So a value counts as small if
reading and writing it takes no longer than an array takes the host,

    2 * bytes / memory bandwidth <= ARGUMENT_SECONDS.

Larger values keep buffers of their own: a weight matrix that is copied for each micro-batch would cost more than it
saves. Values that cross to other stages are not packed, because a transfer may change the layout of each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax

from alpa_lite.ir.layout import Layout, local_shape
from alpa_lite.passes.stages.segments import ArrayType, Pack, Segment, Segments, Wire

ARGUMENT_SECONDS = 1e-6
"""Host seconds of one array in a call, as argument or result, of one device (`benchmarks/runtime/tasks.py`)."""
FEWEST = 4
"""Fewer values than these are not worth the copies."""

_LOOP = ("forward", "backward", "weight")


@dataclass(frozen=True)
class Slot:
    """One array that a segment takes or gives ("pieces": one for each micro-batch).

    Attributes:
      wire: its name among the buffers.
      positions: of `Segment.inputs` or `outputs`: one, or the members of a pack.
      pack: or None.
      kind: of the global array.
    """

    wire: Wire
    positions: tuple[int, ...]
    pack: Pack | None
    kind: ArrayType


def limit(memory_bandwidth: float) -> float:
    """Returns the most bytes of one device's block of a value that is packed. `memory_bandwidth` in bytes/s."""
    return ARGUMENT_SECONDS * memory_bandwidth / 2


def pack_segments(parts: Segments, most: float) -> Segments:
    """Returns the segments with packs. `most`: bytes per device of a value that is packed (`limit`)."""
    if parts.find("prologue") is None or not any(segment.kind in _LOOP for segment in parts.items):
        return parts
    groups: dict[tuple[Any, ...], list[Wire]] = {}
    sizes: dict[Wire, int] = {}
    arguments = set(parts.program.body.inputs)
    finals = set(parts.finals)
    kinds = [segment.kind for segment in parts.items]
    for wire, ((segment, position, output), makers, readers) in _internal(parts).items():
        given = wire.kind == "top" and wire.number in arguments
        if wire.kind == "top" and not given and wire.number in finals:
            continue
        if given:
            readers = [n for n in readers if kinds[n] in _LOOP]
        if not readers or not any(kinds[n] in _LOOP for n in (*makers, *readers)):
            continue
        shape, dtype, layout = parts.type_of(segment, position, output=output)
        if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
            continue
        sizes[wire] = math.prod(local_shape(shape, layout, parts.program.mesh))
        if sizes[wire] * dtype.itemsize <= most:
            groups.setdefault((wire.kind, dtype, given, tuple(makers), tuple(readers)), []).append(wire)
    packs: list[Pack] = []
    added: list[Wire] = []
    for (kind, dtype, given, _, readers), wires in groups.items():
        if len(wires) < FEWEST:
            continue
        reading = frozenset(kinds[n] for n in readers)
        packs.append(Pack(Wire(kind, -1 - len(packs)), tuple(wires), tuple(sizes[w] for w in wires), dtype, reading))
        added += wires if given else []
    items = tuple(_with(s, added) if s.kind == "prologue" else s for s in parts.items)
    return replace(parts, items=items, packs=tuple(packs))


def slots(parts: Segments, segment: Segment, *, output: bool = False) -> tuple[Slot, ...]:
    """Returns the arrays of a segment, in the order of its wires; a pack where its first member is."""
    wires = segment.outputs if output else segment.inputs
    place = {wire: i for i, wire in enumerate(wires)}
    pack_of = {w: pack for pack in parts.packs if output or segment.kind in pack.readers for w in pack.members}
    mesh = parts.program.mesh
    axes = tuple(name for name in mesh.axis_names if mesh.axis_size(name) > 1)
    found: dict[Wire, Slot] = {}
    for i, wire in enumerate(wires):
        pack = pack_of.get(wire)
        if pack is None:
            found[wire] = Slot(wire, (i,), None, parts.type_of(segment, i, output=output))
        elif pack.wire not in found:
            positions = tuple(place[w] for w in pack.members if w in place)
            kind = (mesh.size * sum(pack.sizes),), pack.dtype, Layout((axes,))
            found[pack.wire] = Slot(pack.wire, positions, pack, kind)
    return tuple(found.values())


_Place = tuple[Segment, int, bool]
"""A segment, a position among its inputs or outputs, and whether these are outputs."""


def _internal(parts: Segments) -> dict[Wire, tuple[_Place, list[int], list[int]]]:
    """The wires within the stage, with a place, and the numbers of the segments that make them and that read them."""
    found: dict[Wire, tuple[_Place, list[int], list[int]]] = {}
    for n, segment in enumerate(parts.items):
        for output, wires in ((False, segment.inputs), (True, segment.outputs)):
            for i, wire in enumerate(wires):
                if wire.kind in ("carry", "saved", "top"):
                    if wire not in found:
                        found[wire] = (segment, i, output), [], []
                    _, makers, readers = found[wire]
                    (makers if output else readers).append(n)
    return found


def _with(prologue: Segment, arguments: list[Wire]) -> Segment:
    """Returns the prologue that also gives out some arguments."""
    known = set(prologue.inputs)
    new = [wire for wire in arguments if wire not in known]
    return replace(
        prologue,
        inputs=(*prologue.inputs, *new),
        binds=(*prologue.binds, *((wire.number,) for wire in new)),
        outputs=(*prologue.outputs, *arguments),
        reads=(*prologue.reads, *(wire.number for wire in arguments)),
    )
