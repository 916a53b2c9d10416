"""The bytes that one run of a segment needs in addition to its inputs and outputs.

Registers live from where they are written to where they are last read. Those that the compiled program holds in memory
(`ir.fusion`) take it: what products, collectives and loops read, what reductions and products make, and what several
kernels read. A loop kernel writes its result over an operand of equal size that nobody needs after it. The buffers of
outputs hold other values until they are written, but for those that are given as inputs and added to.

On CPUs reductions are library calls, too, and there are no products of half precision: operands and results are
brought to float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from alpa_lite.graph import Lit, Value
from alpa_lite.passes.ir import fusion
from alpa_lite.passes.ir.fusion import Item
from alpa_lite.passes.ir.primitives import PRODUCTS
from alpa_lite.passes.lowering.program import Body, Compute, Instruction, Loop, Reshard, block_count, reads, writes
from alpa_lite.passes.stages.segments import Segment, Segments


def temporary_bytes(segments: Segments, segment: Segment, platform: str) -> int:
    """Predicted bytes per device that a run needs beyond its inputs and outputs, at the fullest point.

    Args:
      platform: of the devices, as `Cluster.platform`.
    """
    given = set(segment.inputs)
    outputs = [(r, w in given) for r, w in zip(segment.reads, segment.outputs, strict=True) if not isinstance(r, Lit)]
    sizes = _Sizes(segments, platform)
    kept = {register for register, added_to in outputs if added_to}
    peak = sizes.peak(segment.instructions, {register for register, _ in outputs}, kept)
    return int(peak + _copied(segments, segment, sizes))


def _copied(segments: Segments, segment: Segment, sizes: _Sizes) -> float:
    """The bytes of inputs that are copied out of a pack or of the whole batch, as what more than loops read is."""
    members = {w for pack in segments.packs if segment.kind in pack.readers for w in pack.members}
    parts = [b for w, b in zip(segment.inputs, segment.binds, strict=True) if w in members or w.kind == "slice"]
    packed = {register for registers in parts for register in registers}
    needed: set[int] = set()
    for instruction in segment.instructions if packed else ():
        read = packed.intersection(reads(instruction))
        if read and sizes.item(instruction).kind in ("library", "control"):
            needed |= read
    return float(sum(sizes.bytes(register) for register in needed))


class _Sizes:
    """Bytes of registers."""

    def __init__(self, segments: Segments, platform: str) -> None:
        self.values: Sequence[Value] = segments.stage.traced.graph.values
        self.value_of = segments.value_of
        self.registers = segments.program.registers
        self.mesh = segments.program.mesh
        self.on_cpu = platform == "cpu"

    def bytes(self, register: int) -> int:
        layout = self.registers[register]
        return self.values[self.value_of[register]].nbytes // block_count(layout, self.mesh)

    def elements(self, register: int) -> int:
        return self.bytes(register) // max(1, self.values[self.value_of[register]].itemsize)

    def peak(self, instructions: Sequence[Instruction], outputs: set[int], kept: set[int]) -> float:
        """The most bytes of registers that are written here and in memory, beyond those of the outputs.

        Args:
          outputs: registers that are needed afterwards.
          kept: those of them whose buffers are given, with what is added to.
        """
        items = [self.item(instruction) for instruction in instructions]
        sizes = {r: self.bytes(r) for r in {r for i in instructions for r in (*reads(i), *writes(i))} | outputs}
        change = np.zeros(len(items) + 2)
        inner = np.array([self.inside(i) for i in instructions] + [0.0, 0.0])
        lives = fusion.lifetimes(items, sizes, outputs)
        ending: dict[int, list[int]] = {}
        for register, (_, end) in lives.items():
            if end < len(items):
                ending.setdefault(end, []).append(sizes[register])
        own = 0
        for register, (start, end) in lives.items():
            if register in kept:
                continue
            own += sizes[register] * (end == len(items))
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
        if self.on_cpu and isinstance(instruction, Compute) and instruction.op.name in PRODUCTS:
            halves = [r for r in (*reads(instruction), *writes(instruction)) if self.is_half(r)]
            return 4.0 * sum(self.elements(r) for r in halves)
        return 0.0

    def is_half(self, register: int) -> bool:
        return self.values[self.value_of[register]].dtype in (jnp.bfloat16, jnp.float16)

    def body(self, body: Body) -> float:
        """The bytes of one trip of a loop: what it makes for the next one is in memory beside what it was given."""
        outputs = {o for o in body.outputs if not isinstance(o, Lit)}
        own = sum(self.bytes(r) for r in outputs & {r for i in body.instructions for r in writes(i)})
        return own + self.peak(body.instructions, outputs, set())

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
