"""The memory traffic of the operations of a graph, once a compiler has put several into one kernel (`costs.fusion`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from alpa_lite.ir.graph import Block, Lit, Op, Value
from alpa_lite.passes.costs.fusion import traffic
from alpa_lite.passes.costs.items import Item, item_of
from alpa_lite.passes.ir.primitives import COLLECTIVES


@dataclass(frozen=True)
class MemoryTraffic:
    """The memory traffic of one operation of a graph on one device, each time it runs.

    Attributes:
      reads: for each operand the bytes that are read of it.
      writes: for each result the bytes that are written of it.
      starts: how many kernels it starts: none within the kernel of another operation.
    """

    reads: tuple[float, ...]
    writes: tuple[float, ...]
    starts: int = 0

    @property
    def bytes(self) -> float:
        """All of them."""
        return sum(self.reads) + sum(self.writes)


def memory_traffic(
    block: Block, values: Sequence[Value], parts: Mapping[int, Set[int]] | None = None
) -> dict[int, MemoryTraffic]:  # fmt: skip
    """Op index -> memory traffic, for all operations of a block and of the bodies in it.

    Args:
      parts: op index -> the numbers of the parts that do it, of a block that runs in several parts, each a program of
        its own; the others run whole.
    """
    out: dict[int, MemoryTraffic] = {}
    sizes = [v.nbytes for v in values]
    alike: dict[object, Item] = {}
    blocks = [block]
    while blocks:
        for ops, outputs in _programs(blocks.pop(), parts or {}):
            items = []
            for op in ops:  # operations of one key differ in their values alone
                known = alike.get(op.key)
                if known is None or known.kind == "update":  # which says what it writes by its value
                    alike[op.key] = known = item_of(op, values)
                items.append(replace(known, operands=op.reads, results=op.results))
            read, written, starts = traffic(items, sizes, outputs)
            for number, (op, item, reads, writes) in enumerate(zip(ops, items, read, written, strict=True)):
                if op.index in out:  # each part makes it for itself
                    continue
                blocks.extend(op.bodies)
                left = dict(reads)  # an operand that comes twice is read once
                out[op.index] = MemoryTraffic(
                    tuple([0.0 if isinstance(a, Lit) else sizes[a] * left.pop(a, 0.0) for a in op.operands]),
                    tuple([item.written_bytes(v, sizes) if v in writes else 0.0 for v in op.results]),
                    int(number in starts and op.name not in COLLECTIVES),
                )
    return out


def _programs(block: Block, parts: Mapping[int, Set[int]]) -> list[tuple[Sequence[Op], list[int]]]:
    """Returns the operations of each part of a block, and the values that they make for other parts or for outside."""
    numbers = sorted(set().union(*(parts.get(op.index, ()) for op in block.ops)))
    outputs = [a for a in block.outputs if not isinstance(a, Lit)]
    if len(numbers) < 2:
        return [(block.ops, outputs)]
    own = [[op for op in block.ops if number in parts[op.index]] for number in numbers]
    made = [{v for op in ops for v in op.results} for ops in own]
    needed = [{v for op in ops for v in op.reads} - results for ops, results in zip(own, made, strict=True)]
    left = set(outputs).union(*needed)
    return [(ops, sorted(results & left)) for ops, results in zip(own, made, strict=True)]


def moved_bytes(block: Block, values: Sequence[Value]) -> float:
    """Bytes that a program reads and writes on one device: scans by their trips, the bodies of other loops once."""
    each = memory_traffic(block, values)

    def total(block: Block) -> float:
        return sum(
            each[op.index].bytes + op.params.get("length", 1) * sum(total(body) for body in op.bodies)
            for op in block.ops
        )

    return total(block)
