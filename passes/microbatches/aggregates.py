"""Tags for the values of a step on one micro-batch: sums over its examples, or other aggregates of them.

Independent micro-batches (`independent`) combine their results without a sum over the whole batch to compare with. A
result may be added up only if it is a sum of terms of single examples; to add anything else (a maximum, the solution of
a linear system, new weights) would multiply it by the number of micro-batches. This module proves the former and
assumes the latter: two traces of the step, on the batch and on a micro-batch, tell the dims that hold examples, and one
walk in program order gives each value a `Tag`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from alpa_lite.ir.graph import Atom, Block, Lit, Op, Value
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import ScanView, WhileView
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
                found = {"scan": self._scan, "while": self._while, "cond": self._cond}[op.name](op, given)
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

    # -- control flow -------------------------------------------------------------------------------------------------

    def _block(self, block: Block, given: Sequence[Tag]) -> list[Tag]:
        self.tags.update(zip(block.inputs, given, strict=True))
        self.tag(block.ops)
        return [self.tag_of(atom) for atom in block.outputs]

    def _repeat(self, body: Block, consts: Sequence[Tag], carry: Sequence[Tag], xs: Sequence[Tag]) -> list[Tag]:
        """Returns the tags of the final carry of a loop, and of its stacked results: a fixed point."""
        held, ys = fixed_point(carry, lambda held: self._block(body, [*consts, *held, *xs]), _join)
        return [*held, *ys]

    def _scan(self, op: Op, given: Sequence[Tag]) -> list[Tag]:
        view = ScanView(op)
        consts, carry, xs = view.split_operands(given)
        if not self._loops_over(op):
            return self._repeat(view.body, consts, carry, xs)
        found = self._repeat(view.body, consts, carry, xs)
        for number, start in enumerate(carry):
            added = self.tag_of(view.additions[number][1]) if number in view.additions else Tag.OTHER
            is_sum = start in (Tag.ZERO, Tag.SUM) and added == Tag.EXAMPLES
            found[number] = Tag.SUM if is_sum else start if found[number] == start in _UNREACHED else Tag.OTHER
        return found

    def _while(self, op: Op, given: Sequence[Tag]) -> list[Tag]:
        cond_consts, body_consts, carry = WhileView(op).split_operands(given)
        found = self._repeat(op.bodies[1], body_consts, carry, ())
        (goes_on,) = self._block(op.bodies[0], [*cond_consts, *found])
        return found if goes_on in _UNREACHED else [Tag.OTHER] * len(found)

    def _cond(self, op: Op, given: Sequence[Tag]) -> list[Tag]:
        branches = [self._block(branch, given[1:]) for branch in op.bodies]
        if given[0] not in _UNREACHED:
            return [Tag.OTHER] * len(op.results)
        first, *others = branches
        for other in others:
            first = list(map(_join, first, other))
        return first


def _join(first: Tag, second: Tag) -> Tag:
    """Returns the tag of a value that has the one or the other."""
    if first == second:
        return first
    both = {first, second}
    if Tag.ZERO in both:
        (other,) = both - {Tag.ZERO}
        return other
    return Tag.EXAMPLES if both == {Tag.CONSTANT, Tag.EXAMPLES} else Tag.OTHER
