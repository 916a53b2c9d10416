"""The kinds of operations for a compiler that puts several into one kernel (`costs.fusion`).

Operations are of these kinds:

    view      another shape or name of the same bytes; costs nothing
    barrier   a view of several values, which have to be in memory
    loop      elementwise operations, broadcasts, slices, transpositions, gathers: may be a part of any kernel
    reduce    takes what it reduces into its kernel, and ends it
    update    writes a part of its first operand in place (scatter, dynamic_update_slice), and ends its kernel
    product   a kernel of a library, which may add its result to a value in memory
    accumulation   that addition (found by `costs.fusion`)
    library   a kernel of its own, which takes in nothing: sorts, Fourier transforms, convolutions, collectives
    control   its bodies are programs of their own, whose inputs and outputs are in memory

A product without a depth is a multiplication, one of a vector is a multiplication and a sum (see
`cost.MeshCost.matmul_efficiency`). Layouts are left out: a transposition before a product may cost a copy or nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from alpa_lite.ir.graph import Atom, Lit, Op, Value
from alpa_lite.passes.ir import primitives

Kind = Literal["view", "barrier", "loop", "reduce", "update", "product", "accumulation", "library", "control"]

Sizes = Mapping[int, int] | Sequence[int]
"""Bytes of each value."""


@dataclass(frozen=True)
class Item:
    """An operation for the rule.

    Attributes:
      kind: what it is.
      operands, results: values, by any numbers.
      elements: how many it goes through: those of its result, of a reduction those of its operand.
      reads_part: it reads no more of its first operand than its result has.
      row: the length of the last dim where it reduces that alone, else 0.
      is_expensive: a function that takes many instructions.
      linear: an addition of two values, or a transposition, which GEMMs do in passing.
      update: of an update the operand that says how much is written, and how often memory is touched for it.
    """

    kind: Kind
    operands: tuple[int, ...]
    results: tuple[int, ...]
    elements: int
    reads_part: bool = False
    row: int = 0
    update: tuple[int, int] = (-1, 0)
    is_expensive: bool = False
    linear: Literal["", "addition", "transposition"] = ""

    def read_share(self, nbytes: Sizes) -> float:
        """Returns the share of its first operand that it reads."""
        if not self.reads_part:
            return 1.0
        return min(1.0, sum(nbytes[r] for r in self.results) / max(1, nbytes[self.operands[0]]))

    def written_bytes(self, value: int, nbytes: Sizes) -> float:
        """Returns bytes that are written of a result, and read in order to write them."""
        operand, times = self.update
        return min(nbytes[value], nbytes[operand]) * times if times else nbytes[value]


def kind_of(op: Op, values: Sequence[Value]) -> Kind:
    """Returns the kind of an operation."""
    name = op.name
    if name in primitives.CONTROL:
        return "control"
    if name == "optimization_barrier":
        return "barrier"
    if name in primitives.SAME_BYTES:
        return "view"
    if name == "broadcast_in_dim" and not isinstance(op.operands[0], Lit):
        same = _size(op.operands[0], values) == _size(op.results[0], values)
        return "view" if same else "loop"
    if name == "dot_general":
        m, n, k = _product(op, values)
        return "loop" if k == 1 else "reduce" if 1 in (m, n) else "product"
    if name in primitives.SCATTERS or name == "dynamic_update_slice":
        return "update"
    return "loop" if name in primitives.IN_LOOPS else "reduce" if name in primitives.FOLDS else "library"


def item_of(op: Op, values: Sequence[Value]) -> Item:
    """Returns an operation of a graph, for the rule."""
    kind = kind_of(op, values)
    operands = tuple([a for a in op.operands if not isinstance(a, Lit)])
    elements = max((_size(v, values) for v in op.results), default=0)
    row, update = 0, (-1, 0)
    if kind == "reduce" and operands:
        elements = max(_size(v, values) for v in operands)
        shape = values[operands[0]].shape
        if op.params.get("axes") == (len(shape) - 1,):
            row = shape[-1]
    elif kind == "update":
        wrote = op.operands[1 if op.name == "dynamic_update_slice" else -1]
        update = (-1, 0) if isinstance(wrote, Lit) else (wrote, 1 if op.name == "dynamic_update_slice" else 2)
    partly = op.name in primitives.SELECTIONS and bool(operands)
    expensive = op.name in primitives.TRANSCENDENTAL
    linear = "addition" if op.name in primitives.ADDS else "transposition" if op.name == "transpose" else ""
    return Item(kind, operands, op.results, elements, partly, row, update, expensive, linear)


def _size(atom: Atom, values: Sequence[Value]) -> int:
    return math.prod(atom.aval.shape if isinstance(atom, Lit) else values[atom].shape)


def _product(op: Op, values: Sequence[Value]) -> tuple[int, int, int]:
    """(m, n, k) of a `dot_general`."""
    (contracted, _), (batched, _) = op.params["dimension_numbers"]
    left, right = (a.aval.shape if isinstance(a, Lit) else values[a].shape for a in op.operands[:2])
    k = math.prod(left[d] for d in contracted)
    batch = math.prod(left[d] for d in batched)
    return math.prod(left) // max(1, k * batch), math.prod(right) // max(1, k * batch), k
