"""What one run of a segment costs: seconds by roofline, and the bytes that it needs beyond its inputs and outputs.

Seconds. A product costs max(FLOPs / reached peak, bytes / bandwidth) at its local sizes (`cost.MeshCost`). Elementwise
operations fuse, as compilers fuse them: what they cost is the bytes that come into a fused run of them, and that leave
it. Collectives cost alpha + bytes * beta, but those of one kind over the same axes start together. A loop costs its
body times the trip count.

Bytes. Registers live from where they are written to where they are last read. A register between elementwise
operations alone lives in no memory: only what products, reductions, collectives, loops or the end read counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from alpa_lite.cost import MeshCost
from alpa_lite.graph import Lit, Op, Value
from alpa_lite.layout import Layout, local_shape
from alpa_lite.passes.ir.primitives import PRODUCTS, UNFUSED, work
from alpa_lite.passes.lowering.program import Compute, Instruction, Loop, Operand, Reshard, block_count, reads, writes
from alpa_lite.passes.stages.segments import Segment, Segments
from alpa_lite.strategy import Rule


def seconds(segments: Segments, segment: Segment, cost: MeshCost, rules: Mapping[Any, Rule]) -> float:
    """Predicted seconds of one run of a segment.

    Args:
      cost: of the submesh.
      rules: of the stage's ops.
    """
    return _Pricer(segments, cost, rules).seconds(segment.instructions, segment.reads)


def communication(segments: Segments, segment: Segment, cost: MeshCost, rules: Mapping[Any, Rule]) -> float:
    """The part of `seconds` that is spent in collectives."""
    return _Pricer(segments, cost, rules).communication(segment.instructions)


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


class _Pricer:
    def __init__(self, segments: Segments, cost: MeshCost, rules: Mapping[Any, Rule]) -> None:
        self.sizes = _Sizes(segments)
        self.cost, self.rules = cost, rules
        self.mesh = segments.program.mesh

    def seconds(self, items: Sequence[Instruction], ends: Iterable[Operand]) -> float:
        total = self.moved(items, ends) / self.cost.cluster.memory_bandwidth
        for item in items:
            match item:
                case Compute(op=op) if op.name in PRODUCTS:
                    total += self.product(item)
                case Loop(op=op, bodies=bodies):
                    total += self.loop(op, [self.seconds(body.instructions, body.outputs) for body in bodies])
        return total + self.outside_loops(items)

    def communication(self, items: Sequence[Instruction]) -> float:
        """Seconds of collectives, those in loops included."""
        loops = [item for item in items if isinstance(item, Loop)]
        inner = [self.loop(i.op, [self.communication(body.instructions) for body in i.bodies]) for i in loops]
        return sum(inner) + self.outside_loops(items)

    def outside_loops(self, items: Sequence[Instruction]) -> float:
        """Seconds of collectives that are not in loops."""
        total = 0.0
        latency: dict[tuple[str, tuple[str, ...]], float] = {}
        for item in items:
            match item:
                case Compute(form=form):
                    for c in form.collectives:
                        total += self.collective(c.kind, c.axes, c.bytes, latency)
                case Reshard(value=value, steps=steps):
                    known = self.sizes.values[value]
                    for step in steps:
                        size = step.payload(known.shape, known.itemsize, self.mesh)
                        total += self.collective(step.kind, step.axes, size, latency)
        return total + sum(latency.values())

    def loop(self, op: Op, parts: Sequence[float]) -> float:
        """Seconds of a loop, from those of its bodies."""
        if op.name == "scan":
            return parts[0] * int(op.params["length"])
        return max(parts) if op.name == "cond" else sum(parts)

    def collective(self, kind: str, axes: tuple[str, ...], size: float, latency: dict[Any, float]) -> float:
        if kind == "slice":
            return 0.0
        alpha, beta = self.cost.coefficients(kind, axes)
        latency[kind, axes] = alpha
        return beta * size

    def product(self, item: Compute) -> float:
        op = item.op
        used = {a for layout in item.form.operands for dim in layout.dims for a in dim}
        flops = work(op, self.rules[op.key], self.sizes.values) / math.prod(map(self.mesh.axis_size, used))
        dtype = self.sizes.values[op.results[0]].dtype
        moved = sum(self.sizes.bytes(r) for r in (*reads(item), *item.results))
        return self.cost.compute(flops, moved, dtype, self.efficiency(item))

    def efficiency(self, item: Compute) -> float | None:
        if item.op.name != "dot_general":
            return None
        (contract, _), (batch, _) = item.op.params["dimension_numbers"]
        left, right = (self.local(a, la) for a, la in zip(item.op.operands, item.form.operands, strict=True))
        k = math.prod(left[d] for d in contract)
        b = math.prod(left[d] for d in batch)
        m = math.prod(left) // max(1, k * b)
        n = math.prod(right) // max(1, k * b)
        return self.cost.matmul_efficiency(m, n, k, b)

    def local(self, atom: int | Lit, layout: Layout) -> tuple[int, ...]:
        shape = atom.aval.shape if isinstance(atom, Lit) else self.sizes.values[atom].shape
        return local_shape(tuple(shape), layout, self.mesh)

    def moved(self, items: Sequence[Instruction], ends: Iterable[Operand]) -> float:
        """Bytes that operations other than products read and write, fused runs at their edges alone."""
        maker = {r: item for item in items for r in writes(item)}
        read_by_light: set[int] = set()
        read_by_heavy = {o for o in ends if not isinstance(o, Lit)}
        total = 0.0
        for item in items:
            (read_by_light if _is_light(item) else read_by_heavy).update(reads(item))
            if isinstance(item, Compute) and item.op.name in UNFUSED and item.op.name not in PRODUCTS:
                total += sum(self.sizes.bytes(r) for r in (*reads(item), *item.results))
        for register in read_by_light:
            if register not in maker or not _is_light(maker[register]):
                total += self.sizes.bytes(register)
        for register, item in maker.items():
            if _is_light(item) and register in read_by_heavy:
                total += self.sizes.bytes(register)
        return total


def _is_light(item: Instruction) -> bool:
    return isinstance(item, Compute) and item.op.name not in UNFUSED
