"""Tags for the values of a step on one micro-batch: sums over its examples, or other aggregates of them.

Independent micro-batches (`independent`) combine their results without a sum over the whole batch to compare with. A
result may be added up only if it is a sum of terms of single examples; to add anything else (a maximum, the solution of
a linear system, new weights) would multiply it by the number of micro-batches. This module proves the former and
assumes the latter: two traces of the step, on the batch and on a micro-batch, tell the dims that hold examples, and one
walk in program order gives each value a `Tag`.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from alpa_lite.ir.graph import Atom, Lit, Op, Value
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import ScanView, ports
from alpa_lite.passes.microbatches.lattice import fixed_point
from alpa_lite.passes.microbatches.states import is_zero, linear_operands

SUMMATIONS = primitives.LINEAR_IN_EACH - {"mul"} | primitives.SCATTER_ADDITIONS | {"reduce_sum"}
"""Operations that add up terms of single examples where a dim of examples is not among the dims of the result."""


class Tag(enum.Enum):
    """How a value depends on the examples of the batch."""

    ZERO = "made of literal zeros"
    CONSTANT = "reached by no example"
    EXAMPLES = "holds single examples, and depends on no aggregate of them"
    SUM = "a sum over examples"
    OTHER = "another aggregate of examples, or dependent on one"


_UNREACHED = frozenset({Tag.ZERO, Tag.CONSTANT})


class Aggregates:
    """The tags of a step on one micro-batch.

    Attributes:
      tags: value -> tag, for what was walked over.
      once: additions of a constant to a sum, by index: the operands that are the constant. Their result is a sum if the
        constant is added once.
    """

    def __init__(
        self, values: Sequence[Value], holds_examples: Callable[[int], bool], loops_over_examples: Callable[[Op], bool]
    ) -> None:
        """Args:
        values: of the graph.
        holds_examples: whether a dim of a value holds examples.
        loops_over_examples: whether the length of a scan is a number of examples.
        """
        self.tags: dict[int, Tag] = {}
        self.once: dict[int, list[int]] = {}
        self._values, self._holds, self._loops_over = values, holds_examples, loops_over_examples

    def tag_of(self, atom: Atom) -> Tag:
        """Returns the tag of a value or a literal."""
        if isinstance(atom, Lit):
            return Tag.ZERO if is_zero(atom, {}) else Tag.CONSTANT
        return self.tags[atom]

    def tag(self, ops: Sequence[Op], *, may_add_once: bool = False) -> None:
        """Tags the results of operations in program order; `may_add_once`: whether additions are noted in `once`."""
        for op in ops:
            given = [self.tag_of(atom) for atom in op.operands]
            if may_add_once and op.name in primitives.ADDITIONS and set(given) == {Tag.SUM, Tag.CONSTANT}:
                self.once[op.index] = [i for i, tag in enumerate(given) if tag == Tag.CONSTANT]
                found = [Tag.SUM]
            elif op.bodies:
                found = self._control(op)
            else:
                found = [self._result(op, given, value) for value in op.results]
            self.tags.update(zip(op.results, found, strict=True))

    def _result(self, op: Op, given: Sequence[Tag], value: int) -> Tag:
        if Tag.OTHER in given:
            return Tag.SUM if self._counts(op, value) else Tag.OTHER
        if self._holds(value):
            return Tag.OTHER if Tag.SUM in given else Tag.EXAMPLES
        if Tag.EXAMPLES in given:
            added_to = given[0] if op.name in primitives.SCATTER_ADDITIONS else Tag.ZERO
            is_sum = op.name in SUMMATIONS and (Tag.SUM not in given or added_to == Tag.SUM == given[0])
            return Tag.SUM if is_sum and added_to in (Tag.ZERO, Tag.SUM) else Tag.OTHER
        if Tag.SUM in given:
            wanted = linear_operands(op, [tag == Tag.SUM for tag in given], self._values)
            summands = [tag for tag, want in zip(given, wanted or (), strict=False) if want]
            return Tag.SUM if summands and {Tag.SUM, Tag.ZERO}.issuperset(summands) else Tag.OTHER
        is_same = op.name in primitives.RESHAPES and len(given) == 1
        return given[0] if is_same else Tag.CONSTANT

    def _counts(self, op: Op, value: int) -> bool:
        """Returns whether an operation counts examples, by whatever they are chosen: integers cannot be averaged."""
        is_integer = jnp.issubdtype(self._values[value].dtype, jnp.integer)
        return is_integer and op.name == "reduce_sum" and any(map(self._holds, op.reads)) and not self._holds(value)

    def _control(self, op: Op) -> list[Tag]:
        """Returns the tags of the results of control flow; those of carried values are a fixed point."""
        border = ports(op)
        given = [(port, self.tag_of(port.operand)) for port in border if port.operand is not None]
        carries = [port for port in border if port.role == "carry"]

        def run(held: Sequence[Tag]) -> list[Tag]:
            for port, tag in (*given, *zip(carries, held, strict=True)):
                self.tags.update(dict.fromkeys(port.inputs, tag))
            for body in op.bodies:
                self.tag(body.ops)
            return [functools.reduce(_join, map(self.tag_of, port.outputs)) for port in border if port.outputs]

        start = [tag for port, tag in given if port.role == "carry"]
        carry, others = fixed_point(start, run, _join)
        decides = op.operands[:1] if op.name == "cond" else op.bodies[0].outputs if op.name == "while" else ()
        if not _UNREACHED.issuperset(map(self.tag_of, decides)):
            return [Tag.OTHER] * len(op.results)
        for number, before in enumerate(start if op.name == "scan" and self._loops_over(op) else ()):
            additions = ScanView(op).additions
            added = self.tag_of(additions[number][1]) if number in additions else Tag.OTHER
            is_sum = before in (Tag.ZERO, Tag.SUM) and added == Tag.EXAMPLES
            carry[number] = Tag.SUM if is_sum else before if carry[number] == before in _UNREACHED else Tag.OTHER
        return [*carry, *others]


def _join(first: Tag, second: Tag) -> Tag:
    """Returns the tag of a value that has the one or the other."""
    if first == second:
        return first
    both = {first, second}
    if Tag.ZERO in both:
        (other,) = both - {Tag.ZERO}
        return other
    return Tag.EXAMPLES if both == {Tag.CONSTANT, Tag.EXAMPLES} else Tag.OTHER
