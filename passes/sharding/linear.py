"""Which operations a partial sum may travel through: additions of sums, and the linear operations between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from alpa_lite.graph import Block, Lit, Op, Value
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.strategy import Rule

# Linear in their one tensor operand: a partial sum may pass through them.
_LINEAR_UNARY = primitives.LINEAR_CHAIN - {"reshape"}


def linear_ops(block: Block, rules: Mapping[Any, Rule], values: Sequence[Value], accumulators: Set[int]) -> set[int]:
    """Additions, and the linear operations between, whose operands all come from operations that may leave sums."""
    producer, uses = flow.producers(block.ops), flow.uses(block)
    linear: set[int] = set()

    def chain(atom: Any) -> list[int] | None:
        """The linear unary ops between `atom` and an op that may leave a sum; None if there is no such op."""
        path: list[int] = []
        if not isinstance(atom, Lit) and atom in accumulators:
            return path
        while not isinstance(atom, Lit) and atom in producer:
            op = producer[atom]
            if op.index in linear:
                return path
            if op.bodies or op.key not in rules:
                return None
            if any(f.kind == "sum" for f in rules[op.key].factors):
                return path
            scaled = op.name in ("mul", "div") and isinstance(op.operands[1], Lit)
            if not (scaled or op.name in _LINEAR_UNARY) or uses[atom] != 1 or not _floating(values, op):
                return None
            path.append(op.index)
            atom = op.operands[0]
        return None

    for op in block.ops:
        if op.name not in primitives.ADDITIONS or op.key not in rules:
            continue
        if not rules[op.key].factors and not any(a in accumulators for a in op.operands):
            continue  # a scalar that no loop adds up
        shape = values[op.results[0]].shape
        if any(isinstance(a, Lit) or values[a].shape != shape for a in op.operands):
            continue
        found = [chain(a) for a in op.operands]
        if all(path is not None for path in found):
            linear.add(op.index)
            for path in found:
                linear.update(path or ())
    return linear


def _floating(values: Sequence[Value], op: Op) -> bool:
    kinds = [
        getattr(values[v].dtype, "kind", "O")
        for v in (*op.results, *(a for a in op.operands if not isinstance(a, Lit)))
    ]
    return all(kind in "fVc" for kind in kinds)
