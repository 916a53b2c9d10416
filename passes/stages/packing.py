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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax

from alpa_lite.ir.layout import local_shape
from alpa_lite.passes.lowering.program import Operand
from alpa_lite.passes.stages.segments import Pack, Segments, Wire

T = TypeVar("T")

ARGUMENT_SECONDS = 1e-6
"""Host seconds of one array in a call, as argument or result, of one device (`benchmarks/runtime/tasks.py`)."""
FEWEST = 4
"""Fewer values than these are not worth the copies."""

_LOOP = ("forward", "backward", "weight")


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
    for wire, (operands, makers, readers) in _internal(parts).items():
        given = wire.kind == "top" and wire.number in arguments
        if wire.kind == "top" and not given and wire.number in finals:
            continue
        if given:  # the update reads them where they are
            makers, readers = [kinds.index("prologue")], [n for n in readers if kinds[n] in _LOOP]
        if not readers or not any(kinds[n] in _LOOP for n in (*makers, *readers)):
            continue
        shape, dtype, layout = parts.type_of(wire, operands)
        if len(operands) > 1 or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
            continue
        sizes[wire] = math.prod(local_shape(shape, layout, parts.program.mesh))
        if sizes[wire] * dtype.itemsize <= most:
            groups.setdefault((wire.kind, dtype, given, tuple(makers), tuple(readers)), []).append(wire)
    packs: dict[Wire, Pack] = {}
    items = list(parts.items)
    for (kind, dtype, given, makers, readers), wires in groups.items():
        if len(wires) < FEWEST:
            continue
        name, pack = Wire(kind, -1 - len(packs)), Pack(tuple(wires), tuple(sizes[wire] for wire in wires), dtype)
        packs[name] = pack
        if given:
            prologue, own = items[makers[0]], {wire: (wire.number,) for wire in wires}
            items[makers[0]] = replace(prologue, inputs=prologue.inputs | own, outputs=prologue.outputs | own)
        for n in makers:
            items[n] = replace(items[n], outputs=_joined(items[n].outputs, name, pack))
        for n in readers:
            items[n] = replace(items[n], inputs=_joined(items[n].inputs, name, pack))
    return replace(parts, items=tuple(items), packs=packs)


def _joined(wires: Mapping[Wire, tuple[T, ...]], name: Wire, pack: Pack) -> dict[Wire, tuple[T, ...]]:
    """Returns wires with a pack in the place of the first of its members."""
    members, found = dict.fromkeys(pack.members), dict[Wire, tuple[T, ...]]()
    registers = tuple(register for member in members for register in wires[member])
    for wire, some in wires.items():
        found |= {name: registers} if wire in members else {wire: some}
    return found


def _internal(parts: Segments) -> dict[Wire, tuple[Sequence[Operand], list[int], list[int]]]:
    """The wires within the stage, with their operands, and the numbers of the segments that make and read them."""
    found: dict[Wire, tuple[Sequence[Operand], list[int], list[int]]] = {}
    for n, segment in enumerate(parts.items):
        for output, wires in ((False, segment.inputs), (True, segment.outputs)):
            for wire, operands in wires.items():
                if wire.kind in ("carry", "saved", "top"):
                    known, makers, readers = found.get(wire, (operands, [], []))
                    found[wire] = max(known, operands, key=len), makers, readers
                    (makers if output else readers).append(n)
    return found
