"""The bytes that one run of a segment needs in addition to its inputs and outputs.

Registers live from where they are written to where they are last read. Those that the compiled program holds in memory
(`ir.fusion`) take it: what products, collectives and loops read, what reductions and products make, and what several
kernels read. A loop kernel writes its result over an operand of equal size that nobody needs after it. The buffers of
outputs hold other values until they are written, but for those that are given as inputs and added to.

What goes out in a pack is made apart and joined at the end, when the pack and all its members are there; so are sums
that are added to in a pack.

On CPUs reductions are library calls, too; products copy operands whose dims they want in another order; what is copied
out of a pack is copied first; and the gradient of a maximum over windows finds its place by an index for each dim.
(JAX 0.10's CPU compiler also brings all values of half precision to float32, which is not predicted.)
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence

import numpy as np

from alpa_lite.graph import Lit, Op, Value
from alpa_lite.passes.ir import fusion
from alpa_lite.passes.ir.fusion import Item
from alpa_lite.passes.ir.primitives import PRODUCTS
from alpa_lite.passes.lowering.program import (
    Body,
    Compute,
    Instruction,
    Loop,
    Operand,
    Reshard,
    block_count,
    reads,
    writes,
)
from alpa_lite.passes.stages.segments import Segment, Segments


def temporary_bytes(
    segments: Segments, segment: Segment, platform: str, *, of: Container[int] | None = None,
    again: Sequence[Instruction] = (),
) -> int:  # fmt: skip
    """Predicted bytes per device that a run needs beyond its inputs and outputs, at the fullest point.

    Args:
      platform: of the devices, as `Cluster.platform`.
      of: the values whose bytes are counted; None for all.
      again: instructions that are done first, whose results are no inputs then.
    """
    given = set(segment.inputs)
    members = {wire for pack in segments.packs for wire in pack.members}
    outputs = [(r, w) for r, w in zip(segment.reads, segment.outputs, strict=True) if not isinstance(r, Lit)]
    sizes = _Sizes(segments, platform, of)
    packed = {register: wire in given for register, wire in outputs if wire in members}
    kept = {register for register, wire in outputs if wire in given and wire not in members}
    apart = _copied(segments, segment)
    instructions = (*again, *segment.instructions)
    return int(sizes.peak(instructions, {register for register, _ in outputs}, kept, packed, apart))


def _copied(segments: Segments, segment: Segment) -> set[int]:
    """The registers of inputs that are part of a pack or of the whole batch: some readers want them copied out."""
    members = {w for pack in segments.packs if segment.kind in pack.readers for w in pack.members}
    parts = [b for w, b in zip(segment.inputs, segment.binds, strict=True) if w in members or w.kind == "slice"]
    return {register for registers in parts for register in registers}


def _turned(op: Op, ranks: Sequence[int]) -> set[int]:
    """The operands and the result (2) of a product whose dims a library call on CPUs wants in another order."""
    numbers = op.params["dimension_numbers"]
    if op.name == "dot_general":
        found = set()
        for n, (contracted, batch) in enumerate(zip(*numbers, strict=True)):
            first, last = len(batch), ranks[n] - len(contracted)
            places = [tuple(range(at, at + len(contracted))) for at in ((last,), (first, last))[n]]
            if tuple(batch) != tuple(range(first)) or tuple(contracted) not in places:
                found.add(n)
        return found
    last = ranks[0] - 1
    images, kernel = (0, last, *range(1, last)), (last, last - 1, *range(last - 1))
    asked = zip(numbers, (images, kernel, images), strict=True)
    return {n for n, (given, wanted) in enumerate(asked) if tuple(given) != wanted}


class _Sizes:
    """Bytes of registers."""

    def __init__(self, segments: Segments, platform: str, of: Container[int] | None) -> None:
        self.of = of
        self.values: Sequence[Value] = segments.stage.traced.graph.values
        self.value_of = segments.value_of
        self.registers = segments.program.registers
        self.mesh = segments.program.mesh
        self.on_cpu = platform == "cpu"

    def bytes(self, register: int) -> int:
        """That are counted."""
        return self.size(register) if self.of is None or self.value_of[register] in self.of else 0

    def size(self, register: int) -> int:
        layout = self.registers[register]
        return self.values[self.value_of[register]].nbytes // block_count(layout, self.mesh)

    def shape(self, operand: Operand) -> tuple[int, ...]:
        """Of the whole value."""
        return operand.aval.shape if isinstance(operand, Lit) else self.values[self.value_of[operand]].shape

    def elements(self, register: int) -> int:
        return self.size(register) // max(1, self.values[self.value_of[register]].itemsize)

    def peak(
        self,
        instructions: Sequence[Instruction],
        outputs: set[int],
        kept: set[int],
        packed: Mapping[int, bool],
        apart: Collection[int],
    ) -> float:
        """The most bytes of registers that are written here and in memory, beyond those of the outputs.

        Args:
          outputs: registers that are needed afterwards.
          kept: those of them whose buffers are given, with what is added to.
          packed: those that are joined at the end, and whether the buffer that they are joined in is given.
          apart: registers that are given as a part of something, and are copied out of it where more than loops read
            them: from the first such instruction, or on CPUs from the start, to the last.
        """
        items = [self.item(instruction) for instruction in instructions]
        sizes = {r: self.bytes(r) for r in {r for i in instructions for r in (*reads(i), *writes(i))} | outputs}
        change = np.zeros(len(items) + 2)
        inner = np.array([self.inside(i) for i in instructions] + [0.0, 0.0])
        lives = fusion.lifetimes(items, sizes, outputs)
        for n, item in enumerate(items if apart else ()):
            for register in item.operands:
                if register in apart and item.kind in ("library", "control"):
                    lives[register] = (0 if self.on_cpu else lives.get(register, (n, n))[0]), n
        ending: dict[int, list[int]] = {}
        for register, (_, end) in lives.items():
            if end < len(items):
                ending.setdefault(end, []).append(sizes[register])
        own = sum(sizes[register] for register, given in packed.items() if not given)
        change[len(items)] += own
        for register, (start, end) in lives.items():
            if register in kept:
                continue
            own += sizes[register] * (end == len(items) and register not in packed)
            change[start] += sizes[register]
            change[end + 1] -= sizes[register]
            free = ending.get(start, [])
            if items[start].kind == "loop" and sizes[register] in free:
                free.remove(sizes[register])
                change[start] -= sizes[register]
                change[start + 1] += sizes[register]
        return float(max(0.0, np.max(np.cumsum(change) + inner, initial=0.0) - own))

    def inside(self, instruction: Instruction) -> float:
        """The bytes that an instruction needs for itself while it runs."""
        if isinstance(instruction, Loop):
            return max((self.body(body) for body in instruction.bodies), default=0.0)
        if not self.on_cpu or not isinstance(instruction, Compute):
            return 0.0
        op = instruction.op
        if op.name == "select_and_scatter_add":
            source, operand = (0 if isinstance(o, Lit) else self.elements(o) for o in instruction.operands[:2])
            rank = len(self.shape(instruction.results[0]))
            return 4.0 * ((rank + 1) * operand + 2 * rank * source)  # indices, and the operand with its border
        if op.name in PRODUCTS:
            atoms = (*instruction.operands, *instruction.results)
            turned = [atoms[n] for n in _turned(op, [len(self.shape(atom)) for atom in atoms])]
            return float(sum(self.bytes(atom) for atom in turned if not isinstance(atom, Lit)))
        return 0.0

    def body(self, body: Body) -> float:
        """The bytes of one trip of a loop: what it makes for the next one is in memory beside what it was given."""
        outputs = {o for o in body.outputs if not isinstance(o, Lit)}
        own = sum(self.bytes(r) for r in outputs & {r for i in body.instructions for r in writes(i)})
        return own + self.peak(body.instructions, outputs, set(), {}, ())

    def item(self, instruction: Instruction) -> Item:
        """An instruction, for the rule of fusion: blocks in place of whole values."""
        operands, results = tuple(reads(instruction)), writes(instruction)
        if isinstance(instruction, Loop):
            return Item("control", operands, results, 0)
        if isinstance(instruction, Reshard):
            moves = any(step.kind != "slice" for step in instruction.steps)
            return Item("library" if moves else "loop", operands, results, self.elements(results[0]), partly=not moves)
        if not isinstance(instruction, Compute):
            return Item("library", operands, results, 0)
        found = fusion.item_of(instruction.op, self.values)
        kind = "library" if found.kind == "reduce" and self.on_cpu else found.kind
        through = operands if kind == "reduce" else results
        update = found.update
        if update[1]:
            place = instruction.op.operands.index(update[0])
            written = instruction.operands[place]
            update = (-1, 0) if isinstance(written, Lit) else (written, update[1])
        elements = max([self.elements(r) for r in through], default=0)
        return Item(kind, operands, results, elements, found.partly, found.row, update, found.expensive)
