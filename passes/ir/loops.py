"""Loops by the roles of their operands and results: the one place that counts `num_consts`, `num_carry` and the like.

A scan takes constants, initial carries and scanned inputs; it gives final carries and stacked outputs. The inputs and
outputs of its body are in the same order:

    operands, body inputs    consts, carry, xs
    results, body outputs    carry, ys

`ScanView` cuts any sequence that is parallel to one of them: values, states, layouts, arrays, registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

from alpa_lite.ir.graph import Atom, Block, Op, Traced
from alpa_lite.passes.ir import flow, primitives

T = TypeVar("T")


class ScanOperands(NamedTuple, Generic[T]):
    """The operands of a scan, or the inputs of its body, by role."""

    consts: tuple[T, ...]
    carry: tuple[T, ...]
    xs: tuple[T, ...]


class ScanResults(NamedTuple, Generic[T]):
    """The results of a scan, or the outputs of its body, by role."""

    carry: tuple[T, ...]
    ys: tuple[T, ...]


class Carry(NamedTuple):
    """One value that a scan carries: what it starts as, the body's input and output, and what it ends as."""

    start: Atom
    input: int
    output: Atom
    end: int


class ScanView:
    """A scan by its parts.

    Attributes:
      op, body: the scan, and the block of one iteration.
      num_consts, num_carry: the numbers of constants and of carried values. length: that of iterations.
      operands, inputs, outputs, results: those of the scan and of its body, by role.
      consts, xs: (operand, body input) of each constant, and of each value that is scanned over.
      carries: the carried values.
      ys: (body output, result) of each stacked result.
    """

    def __init__(self, op: Op) -> None:
        self.op, self.body = op, op.bodies[0]
        self.num_consts: int = op.params["num_consts"]
        self.num_carry: int = op.params["num_carry"]
        self.length = int(op.params["length"])
        self.operands, self.inputs = self.split_operands(op.operands), self.split_operands(self.body.inputs)
        self.outputs, self.results = self.split_results(self.body.outputs), self.split_results(op.results)
        self.consts = tuple(zip(self.operands.consts, self.inputs.consts, strict=True))
        self.xs = tuple(zip(self.operands.xs, self.inputs.xs, strict=True))
        self.ys = tuple(zip(self.outputs.ys, self.results.ys, strict=True))
        carries = zip(self.operands.carry, self.inputs.carry, self.outputs.carry, self.results.carry, strict=True)
        self.carries = tuple(map(Carry._make, carries))

    def split_operands(self, items: Sequence[T]) -> ScanOperands[T]:
        """Returns a sequence that is parallel to the operands, in parts."""
        first = self.num_consts + self.num_carry
        return ScanOperands(
            tuple(items[: self.num_consts]), tuple(items[self.num_consts : first]), tuple(items[first:])
        )

    def split_results(self, items: Sequence[T]) -> ScanResults[T]:
        """Returns a sequence that is parallel to the results, in parts."""
        return ScanResults(tuple(items[: self.num_carry]), tuple(items[self.num_carry :]))

    @cached_property
    def accumulators(self) -> Mapping[int, tuple[Op, int]]:
        """Carry number -> (the op that adds to it, the added value): `additions` without those of literals."""
        return {n: (op, added) for n, (op, added) in self.additions.items() if isinstance(added, int)}

    @cached_property
    def additions(self) -> Mapping[int, tuple[Op, Atom]]:
        """Carry number -> (the op that adds to it, the added atom), for carries that nothing but an addition reads."""
        uses, makers = flow.uses(self.body), flow.producers(self.body.ops)
        found: dict[int, tuple[Op, Atom]] = {}
        for number, (value, out) in enumerate(zip(self.inputs.carry, self.outputs.carry, strict=True)):
            op = makers.get(out) if isinstance(out, int) else None
            if op is not None and op.name in primitives.ADDS and uses[value] == 1 and value in op.operands:
                (added,) = [atom for atom in op.operands if atom != value]
                found[number] = op, added
        return found

    def rebuild(
        self,
        ops: Iterable[Op],
        consts: Sequence[tuple[Atom, int]],
        carries: Sequence[Carry],
        xs: Sequence[tuple[Atom, int]],
        ys: Sequence[tuple[Atom, int]],
        **params: Any,
    ) -> Op:
        """Returns the scan with another body and other parts, in the form that the properties of these names have.

        Its key is written when it is numbered. `params` replace parameters, such as the length.
        """
        inputs = (*(v for _, v in consts), *(c.input for c in carries), *(v for _, v in xs))
        outputs = (*(c.output for c in carries), *(a for a, _ in ys))
        return replace(
            self.op,
            params={**self.op.params, "num_consts": len(consts), "num_carry": len(carries), **params},
            operands=(*(a for a, _ in consts), *(c.start for c in carries), *(a for a, _ in xs)),
            results=(*(c.end for c in carries), *(v for _, v in ys)),
            bodies=(Block(inputs, tuple(ops), outputs),),
            key=None,
        )


class WhileOperands(NamedTuple, Generic[T]):
    """The operands of a while loop, by role."""

    cond_consts: tuple[T, ...]
    body_consts: tuple[T, ...]
    carry: tuple[T, ...]


@dataclass(frozen=True, eq=False)
class WhileView:
    """A while by its parts: the inputs of each block are its own constants, then what is carried."""

    op: Op

    def split_operands(self, items: Sequence[T]) -> WhileOperands[T]:
        """Returns a sequence that is parallel to the operands, in parts."""
        first = self.op.params["cond_nconsts"]
        split = first + self.op.params["body_nconsts"]
        return WhileOperands(tuple(items[:first]), tuple(items[first:split]), tuple(items[split:]))

    def cond(self, items: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """Returns a sequence that is parallel to the condition's inputs: constants, carried."""
        count = self.op.params["cond_nconsts"]
        return tuple(items[:count]), tuple(items[count:])

    def body(self, items: Sequence[T]) -> tuple[tuple[T, ...], tuple[T, ...]]:
        """Returns a sequence that is parallel to the body's inputs: constants, carried."""
        count = self.op.params["body_nconsts"]
        return tuple(items[:count]), tuple(items[count:])


class Port(NamedTuple):
    """A value on the border of an op with bodies.

    Attributes:
      role: const, carry, xs or ys of a loop; operand or result of a branch.
      operand: the atom that is given; None if none is.
      inputs: the body inputs that it is, of a loop first that of its body.
      outputs: the body outputs that it becomes, one of each branch.
      result: that it is at the end; None if it is none.
    """

    role: str
    operand: Atom | None
    inputs: tuple[int, ...]
    outputs: tuple[Atom, ...]
    result: int | None


def ports(op: Op) -> list[Port]:
    """Returns the border of a scan, while or cond: in the order of operands, the index of a cond left out, then ys.

    A body has no other results, except the condition of a while.
    """
    if op.name == "scan":
        view = ScanView(op)
        return [
            *(Port("const", atom, (value,), (), None) for atom, value in view.consts),
            *(Port("carry", one.start, (one.input,), (one.output,), one.end) for one in view.carries),
            *(Port("xs", atom, (value,), (), None) for atom, value in view.xs),
            *(Port("ys", None, (), (atom,), result) for atom, result in view.ys),
        ]
    if op.name == "while":
        loop, (cond, body) = WhileView(op), op.bodies
        cond_consts, body_consts, start = loop.split_operands(op.operands)
        (cond_inputs, seen), (body_inputs, carried) = loop.cond(cond.inputs), loop.body(body.inputs)
        consts = zip((*cond_consts, *body_consts), (*cond_inputs, *body_inputs), strict=True)
        carries = zip(start, zip(carried, seen, strict=True), body.outputs, op.results, strict=True)
        return [
            *(Port("const", atom, (value,), (), None) for atom, value in consts),
            *(Port("carry", atom, inputs, (output,), result) for atom, inputs, output, result in carries),
        ]
    inputs = zip(*(body.inputs for body in op.bodies), strict=True)
    outputs = zip(*(body.outputs for body in op.bodies), strict=True)
    return [
        *(Port("operand", atom, values, (), None) for atom, values in zip(op.operands[1:], inputs, strict=True)),
        *(Port("result", None, (), atoms, result) for atoms, result in zip(outputs, op.results, strict=True)),
    ]


def body_runs(op: Op) -> int:
    """Runs of each body for one run of an op: a scan's length; one of loops of unknown trip count, and of branches."""
    return int(op.params["length"]) if op.name == "scan" else 1


def scan_op(traced: Traced, scan: int) -> Op:
    """Returns the op of the top block with index `scan`.

    Raises:
      ValueError: if there is none, or it is not a scan.
    """
    for op in traced.graph.block.ops:
        if op.index == scan:
            if op.name != "scan":
                raise ValueError(f"scan={scan} is the op {op.name}; pass the index of the scan over micro-batches")
            return op
    raise ValueError(f"scan={scan} is not the index of an op of the top block")
