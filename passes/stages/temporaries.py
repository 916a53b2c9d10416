"""The bytes that one run of a segment needs in addition to its inputs and outputs.

Registers live from where they are written to where they are last read. A register between elementwise operations alone
lives in no memory, since compilers fuse these: only what products, reductions, collectives, loops or the end read
counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa_lite.graph import Lit, Value
from alpa_lite.passes.ir.primitives import UNFUSED
from alpa_lite.passes.lowering.program import Compute, Instruction, Loop, block_count, reads, writes
from alpa_lite.passes.stages.segments import Segment, Segments


def temporary_bytes(segments: Segments, segment: Segment) -> int:
    """Predicted bytes per device that a run needs beyond its inputs and outputs, at the fullest point."""
    sizes = _Sizes(segments)
    outputs = {o for o in segment.reads if not isinstance(o, Lit)}
    return int(sizes.peak(segment.instructions, outputs))


class _Sizes:
    """Bytes of registers."""

    def __init__(self, segments: Segments) -> None:
        self.values: Sequence[Value] = segments.stage.traced.graph.values
        self.value_of = segments.value_of
        self.registers = segments.program.registers
        self.mesh = segments.program.mesh

    def bytes(self, register: int) -> float:
        layout = self.registers[register]
        return self.values[self.value_of[register]].nbytes / block_count(layout, self.mesh)

    def peak(self, items: Sequence[Instruction], kept: set[int]) -> float:
        """The most bytes of registers that are written here, not kept, and read by more than elementwise operations."""
        last: dict[int, int] = {}
        for n, item in enumerate(items):
            if not _is_light(item):
                last.update(dict.fromkeys(reads(item), n))
        change = np.zeros(len(items) + 2)
        inner = np.zeros(len(items) + 2)
        for n, item in enumerate(items):
            if isinstance(item, Loop):
                inner[n] = max((self.peak(body.instructions, set()) for body in item.bodies), default=0.0)
            for register in writes(item):
                if register not in kept and register in last:
                    size = self.bytes(register)
                    change[n] += size
                    change[last[register] + 1] -= size
        return float(np.max(np.cumsum(change) + inner, initial=0.0))


def _is_light(item: Instruction) -> bool:
    return isinstance(item, Compute) and item.op.name not in UNFUSED
