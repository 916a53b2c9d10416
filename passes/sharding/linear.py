"""Which values may be partial sums, and which operations a partial sum may travel through.

A sum over a sharded factor leaves a partial sum: each device holds a summand, and the true value is the sum of these.
It may travel through

- additions of two such values, and the linear operations of one operand between (`_LINEAR_UNARY`);
- the carry of a scan that starts at zero and is only added to, there or within a scan that goes over it;
- a stacked result of a scan, if nothing but the stack reads the summand in the body, and the iterations do not run
  apart, as those of a stage of a pipeline do.

Loops thereby hand partial sums on: gradients of layers that are scanned go as a stack to the accumulator of the loop
over micro-batches around them, and are reduced once, after both. Whether a value *is* a partial sum is the solver's
choice; here is found out where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from alpa_lite.ir.graph import Atom, Block, Lit, Op, Value
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.ir.loops import Carry, ScanView
from alpa_lite.passes.sharding.groups import keeps_dims

# Linear in their one tensor operand: partial sums pass through them, `reshape` and `reduce_sum` only if dims stay.
_LINEAR_UNARY = primitives.LINEAR_CHAIN | {"reduce_sum"}


def find_linear(
    block: Block, rules: Mapping[Any, Rule], values: Sequence[Value], apart: Set[int] = frozenset()
) -> tuple[set[int], set[int]]:  # fmt: skip
    """Finds where partial sums may be in a block and the bodies inside it, but for the stacked results in `apart`.

    Returns:
      The operations, by index, that they may travel through; and the values that they may be held in: carries of scans,
      as inputs of the body, and results of scans.
    """
    walk = _Block(block, rules, values, (set(), set()), apart)
    walk.visit()
    return walk.ops, walk.held


class _Block:
    """A walk over one block in program order, the bodies of its loops first."""

    def __init__(
        self, block: Block, rules: Mapping[Any, Rule], values: Sequence[Value], found: tuple[set[int], set[int]],
        apart: Set[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.block, self.rules, self.values, self.apart = block, rules, values, apart
        self.ops, self.held = found
        self.producers, self.uses = flow.producers(block.ops), flow.uses(block)

    def nested_block(self, body: Block) -> _Block:
        return _Block(body, self.rules, self.values, (self.ops, self.held))

    def visit(self) -> None:
        for op in self.block.ops:
            if op.name == "scan":
                self.scan(ScanView(op))
            elif op.bodies:
                for body in op.bodies:
                    self.nested_block(body).visit()
            elif op.name in primitives.ADDITIONS and op.key in self.rules:
                self.addition(op)

    def scan(self, view: ScanView) -> None:
        inside, held = self.nested_block(view.body), self.held
        sums = [
            (view.carries[number], adds)
            for number, (adds, _) in view.additions.items()
            if inside.uses[adds.results[0]] == 1 and self.starts_at_zero(view.carries[number].start)
        ]
        held.update(carried.input for carried, _ in sums)
        scanned = [carried for carried in view.carries if self.starts_at_zero(carried.start)]
        slices = {carried.input: own for carried in scanned if (own := inside.slice_of_sum(carried)) is not None}
        held.update(slices, slices.values())
        inside.visit()
        held.update(carried.end for carried, adds in sums if adds.index in self.ops)
        held.update(carried.end for carried in scanned if carried.input in slices and carried.output in held)
        for atom, result in view.ys if view.length > 1 else ():  # a stack of one is reduced once in any case
            path = inside.chain(atom)
            if path is None:
                continue
            (source,) = flow.values_in(path[-1].operands if path else (atom,))
            if inside.uses[source] == 1 and result not in self.apart:
                held.add(result)
                self.ops.update(op.index for op in path)

    def slice_of_sum(self, carried: Carry) -> int | None:
        """The slice of a carry in a scan of its body that adds to each slice and does nothing else with the carry."""
        op = self.producers.get(carried.output) if isinstance(carried.output, int) else None
        if op is None or op.name != "scan" or self.uses[carried.input] != 1:
            return None
        view = ScanView(op)
        slices = [own for atom, own in view.xs if atom == carried.input]
        sums = [atom for atom, result in view.ys if result == carried.output]
        if not slices or not sums or not isinstance(sums[0], int):
            return None
        adds = flow.producers(view.body.ops).get(sums[0])
        is_added = adds is not None and adds.name in primitives.ADDS and slices[0] in adds.operands
        return slices[0] if is_added and flow.uses(view.body)[slices[0]] == 1 else None

    def starts_at_zero(self, start: Atom) -> bool:
        """Returns whether a carry starts with zeros, which are a partial sum over any axes."""
        if isinstance(start, Lit):
            return flow.is_literal_zero(start)
        return start in self.producers and flow.makes_zeros(self.producers[start])

    def addition(self, op: Op) -> None:
        """Notes an addition of partial sums, and the operations between these and it."""
        if not self.rules[op.key].factors and not any(a in self.held for a in op.operands):
            return  # a scalar that no loop adds up
        shape = self.values[op.results[0]].shape
        if any(isinstance(a, Lit) or self.values[a].shape != shape for a in op.operands):
            return
        paths = [self.chain(a) for a in op.operands]
        if all(path is not None for path in paths):
            self.ops.add(op.index)
            self.ops.update(each.index for path in paths for each in path or ())

    def chain(self, atom: Atom) -> list[Op] | None:
        """The linear unary operations from a possible partial sum to `atom`, the last first; None without one."""
        path: list[Op] = []
        while not isinstance(atom, Lit):
            op = self.producers.get(atom)
            if atom in self.held or (op is not None and op.index in self.ops):
                return path
            if op is None or op.bodies or op.key not in self.rules:
                return None
            if any(f.kind == "sum" for f in self.rules[op.key].factors):
                return path
            if not self.is_linear_unary(op) or self.uses[atom] != 1:
                return None
            path.append(op)
            (atom,) = flow.values_in(op.operands)
        return None

    def is_linear_unary(self, op: Op) -> bool:
        tensors = flow.values_in(op.operands)
        kinds = [getattr(self.values[value].dtype, "kind", "O") for value in (*op.results, *tensors)]
        if len(tensors) != 1 or not all(kind in "fVc" for kind in kinds):
            return False
        if op.name == "mul" or (op.name == "div" and isinstance(op.operands[1], Lit)):
            return True
        if op.name in ("reshape", "reduce_sum"):
            return keeps_dims(self.rules[op.key]) and not op.params.get("dimensions")
        return op.name in _LINEAR_UNARY
