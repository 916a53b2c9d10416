"""Independent micro-batches: the inexact form of steps that look across the batch.

Problem. A contrastive loss compares every example with every other, and the capacity of an expert is a share of the
batch. Such operations have no local form, and no sum over micro-batches gives their results on the whole batch. The
meaning of micro-batches there is the step on a batch of b examples, M times, and the mean of its gradients.

Answer. The step is traced once more on b examples. Both traces are the same operations in the same order; where their
shapes differ, a dim is derived from the batch. The forward and the backward pass of the small trace (`whole_batch`) run
M times, on each micro-batch in turn, and the update runs on their combined results.

    values of the batch alone           in the loop: the number of tokens that count is that of the micro-batch
    random draws                        those of the whole batch, a block for each micro-batch
    sums over examples (`aggregates`)   averaged, if the step divides by a number of examples on the way: by a literal
                                        that differs between the traces, or by a value of the batch alone; else added
    other floating-point results        averaged: a maximum, the solution of a system, new weights keep their scale
    other integers, random keys         those of the last micro-batch
    results with one value an example   joined

The notes name each leaf of the result under one of these.

(GPipe, Huang et al. 2019, section 2.2, takes the statistics of batch norm so, within micro-batches.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite.ir.graph import Block, Graph, Lit, Op, Traced, walk
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import find_dependents, values_in
from alpa_lite.passes.ir.rewriting import Rewriter, rename_atom, rename_op
from alpa_lite.passes.microbatches.aggregates import Aggregates, Tag
from alpa_lite.passes.microbatches.lattice import AFTER, LOCAL, PARTIAL, WHOLE, State, sliced_state
from alpa_lite.passes.microbatches.messages import notes_on_leaves
from alpa_lite.passes.microbatches.states import Role, StepStates


class TraceMismatch(Exception):
    """The step on one micro-batch is not the same operations as the step on the batch; the message says why."""


class _Pair:
    """The two traces side by side: `big` on the batch, `small` on one micro-batch."""

    def __init__(self, big: Graph, small: Graph) -> None:
        self.big, self.small = big, small
        ops = list(big.ops()), list(small.ops())
        for op in ops[0]:
            if op.has_effects:
                raise TraceMismatch(
                    f"the effect of {op.name} at {_jax.source_line(op.source)} happens once for the whole batch"
                )
        first, second = ([(op.name, len(op.operands), len(op.results)) for op in some] for some in ops)
        if first != second:
            raise TraceMismatch("on one micro-batch the step does not do the same operations as on the batch")
        if len(big.block.inputs) != len(small.block.inputs):
            raise TraceMismatch("on one micro-batch the step does not close over the same constants as on the batch")
        self.big_op = {b.index: a for a, b in zip(*ops, strict=True)}  # by the index of the small op
        self.big_value = dict(zip(small.block.inputs, big.block.inputs, strict=True))
        for a, b in zip(*ops, strict=True):
            self.big_value.update(zip(b.results, a.results, strict=True))
            for outer, inner in zip(a.bodies, b.bodies, strict=True):
                self.big_value.update(zip(inner.inputs, outer.inputs, strict=True))

    def literals_differ(self, op: Op) -> bool:
        """Returns whether a small op, or one in its bodies, computes with another float literal than its twin.

        Comparisons are left out: a capacity that a value is compared with does not scale it.
        """
        inside = [op, *(o for body in op.bodies for o in walk(body))]
        return any(
            isinstance(a, Lit) and isinstance(b, Lit) and _is_float(a.aval) and not np.array_equal(a.value, b.value)
            for small in inside
            if small.name not in primitives.COMPARISONS
            for a, b in zip(small.operands, self.big_op[small.index].operands, strict=True)
        )

    def grown_dims(self, value: int) -> list[int]:
        """Returns the dims in which a small value differs from its twin."""
        a, b = self.small.values[value].shape, self.big.values[self.big_value[value]].shape
        if len(a) != len(b):
            raise TraceMismatch("a value has different dims on one micro-batch and on the batch")
        return [d for d, (m, n) in enumerate(zip(a, b, strict=True)) if m != n]

    def holds_examples(self, value: int) -> bool:
        """Returns whether a dim of a small value holds examples."""
        return self.small.values[value].shape != self.big.values[self.big_value[value]].shape

    def loops_over_examples(self, op: Op) -> bool:
        """Returns whether the length of a scan is a number of examples."""
        return op.params["length"] != self.big_op[op.index].params["length"]

    def one_grown_dim(self, value: int, refusal: str) -> int | None:
        """Returns the dim in which a small value differs from its twin, if any; refused if there are several."""
        grown = self.grown_dims(value)
        if len(grown) > 1:
            raise TraceMismatch(refusal)
        return grown[0] if grown else None


class IndependentLoop:
    """The step in micro-batches that do not know of each other."""

    def __init__(
        self, big: Traced, small: Traced, dims: Mapping[int, int], parts: int, update: Collection[int]
    ) -> None:
        """Pairs the traces and decides how each result of the loop is combined.

        Args:
          big, small: the step on the batch, and on one micro-batch.
          dims: argument number -> the dim that is cut.
          parts: the number of micro-batches.
          update: the operations of `small` that come after the loop, by index.

        Raises:
          TraceMismatch: the traces differ in more than shapes, or a result has no form that micro-batches can give.
        """
        self.pair, self.dims, self.parts = _Pair(big.graph, small.graph), dims, parts
        self.arguments, self.outputs = small.arguments, small.outputs
        block = small.graph.block
        batch = {block.inputs[i] for i in dims}
        passes = [op for op in block.ops if op.index not in update]  # forward and backward
        of_batch = find_dependents(passes, batch)
        self.before = [op for op in passes if of_batch.isdisjoint(op.results)]
        self.inside = [op for op in passes if not of_batch.isdisjoint(op.results)]
        self.after = [op for op in block.ops if op.index in update]
        made = {*batch, *(v for op in self.inside for v in op.results)}
        self.aggregates = Aggregates(small.graph.values, self.pair.holds_examples, self.pair.loops_over_examples)
        self.aggregates.tags |= {v: Tag.EXAMPLES if v in batch else Tag.CONSTANT for v in block.inputs}
        self.aggregates.tag(passes, may_add_once=True)
        read_later = [*(v for op in self.after for v in op.reads), *values_in(block.outputs)]
        self.exports = [v for v in dict.fromkeys(read_later) if v in made]
        normed = self._find_normed(passes, of_batch)
        self.combined = {value: self._combination(value, value in normed) for value in self.exports}
        self.terms = self._find_terms_added_once()
        unknown = {v for v, state in self.combined.items() if state.kind == "sliced"} | batch
        of_examples = find_dependents(self.after, unknown)
        self.updates = [op for op in self.after if of_examples.isdisjoint(op.reads)]  # those that need no example
        self.draws = self._find_draws(of_batch)
        self.states = self._states()

    # -- how results are combined ---------------------------------------------------------------------------------

    def _combination(self, value: int, is_normed: bool) -> State:
        """Returns the state of an export: sliced, partial if it is a sum of the micro-batches' values, else local."""
        aval, is_sum = self.pair.small.values[value], self.aggregates.tag_of(value) == Tag.SUM
        dim = self.pair.one_grown_dim(value, "a result has a value for each pair of examples of the batch")
        if dim is not None:
            return sliced_state(dim)
        if aval.dtype == np.bool_:
            raise TraceMismatch("a result is a truth value of the whole batch")
        return PARTIAL if is_sum and not (is_normed and _is_float(aval)) else LOCAL

    def _find_normed(self, passes: Sequence[Op], of_batch: Collection[int]) -> set[int]:
        """Returns the values on whose way the step divides by a number of examples, before or after the loop."""
        pair, block = self.pair, self.pair.small.block
        inputs = zip(self.arguments, block.inputs, strict=False)
        state = {v for argument, v in inputs if argument.role == "state" and _is_float(pair.small.values[v])}
        of_state = find_dependents(passes, state)

        def divides(op: Op) -> bool:
            if pair.literals_differ(op):
                return True
            by = op.operands[1] if op.name == "div" else None
            if not isinstance(by, int) or by not in of_batch or by in of_state or not _is_float(pair.small.values[by]):
                return False
            return not pair.grown_dims(by)  # examples are divided by values of their own for other reasons

        normed = find_dependents(passes, {v for op in passes if divides(op) for v in op.results})
        for op in reversed(self.after):
            if not normed.isdisjoint(op.results) or pair.literals_differ(op):
                normed.update(op.reads)
        return normed

    def _find_terms_added_once(self) -> dict[int, list[int]]:
        """Operations (by index) of the loop that add a term which no example reaches to a sum: the term's operands.

        A sum has the term once, a mean in each micro-batch.

        Raises:
          TraceMismatch: the term is added to a sum and to a mean.
        """
        found = {}
        for op in self.inside:
            operands = self.aggregates.once.get(op.index)
            if not operands:
                continue
            reached = find_dependents(self.inside, op.results)
            states = {state for value, state in self.combined.items() if value in reached}
            if {LOCAL, PARTIAL} <= states:
                raise TraceMismatch("it adds a value that no example reaches to a sum and to a mean over examples")
            if LOCAL not in states:
                found[op.index] = operands
        return found

    def _find_draws(self, of_batch: Collection[int]) -> dict[int, int]:
        """Random values that the loop reads and whose shape comes from the batch: value -> the dim that is cut."""
        random = find_dependents(
            self.before, {v for op in self.before if op.name in primitives.DRAWS for v in op.results}
        )
        used = sorted(random.intersection(v for op in self.inside for v in op.reads).difference(of_batch))
        refusal = "random numbers are drawn for pairs of examples of the batch"
        return {value: dim for value in used if (dim := self.pair.one_grown_dim(value, refusal)) is not None}

    # -- the step -------------------------------------------------------------------------------------------------

    def _states(self) -> StepStates:
        """Both traces as one graph, with the states of its values.

        The operations of `small` are in the loop, its update and that of `big` after it: a result that has one value an
        example is that of `big`, any other one that of `small`.
        """
        big, small = self.pair.big, self.pair.small
        rewriter, count = Rewriter(big), len(self.arguments)
        own = {v: rewriter.new_value(small.values[v]) for v in small.block.inputs[count:]}
        constants = tuple(own.values())
        own |= dict(zip(small.block.inputs, big.block.inputs[:count], strict=False))
        copies, _ = rewriter.inline(small.block, own, small.values)
        copy = {op.index: new for op, new in zip(small.block.ops, copies, strict=True)}
        own |= {v: new for op in small.block.ops for v, new in zip(op.results, copy[op.index].results, strict=True)}
        drawn = {own[v]: self.pair.big_value[v] for v in self.draws}
        joined = {v for v, state in self.combined.items() if state.kind == "sliced"}
        for value in joined:
            rewriter.values[own[value]] = big.values[self.pair.big_value[value]]
        before = [*self._twins(self.before), *(copy[op.index] for op in self.before)]
        inside = [rename_op(copy[op.index], drawn) for op in self.inside]
        whole = {self.pair.big_value[v]: own[v] for v in self.exports}
        after = [copy[op.index] for op in self.updates] + [rename_op(op, whole) for op in self._twins(self.after)]
        made = {v for v in self.exports if v not in joined} | {v for op in self.updates for v in op.results}
        outputs = [
            own[a] if isinstance(a, int) and a in made and not self.pair.grown_dims(a) else rename_atom(b, whole)
            for a, b in zip(small.block.outputs, big.block.outputs, strict=True)
        ]
        block = Block((*big.block.inputs, *constants), (*before, *inside, *after), tuple(outputs))
        graph = Graph(tuple(rewriter.values), block, (*big.constants, *small.constants), rewriter.keys)
        states = StepStates(graph, {}, self.parts, {big.block.inputs[i]: dim for i, dim in self.dims.items()}, ())
        for op in before:
            states.decide(op, Role.for_whole_batch(op))
        exported = {own[v]: state for v, state in self.combined.items()}
        draws = {self.pair.big_value[v]: sliced_state(dim) for v, dim in self.draws.items()}
        for op, new in zip(self.inside, inside, strict=True):
            given = [draws.get(a, states.state_of(a)) if isinstance(a, int) else WHOLE for a in new.operands]
            for i in self.terms.get(op.index, ()):
                given[i] = PARTIAL
            states.decide(new, Role("copy", tuple(given), tuple(exported.get(v, LOCAL) for v in new.results)))
        states.state.update((v, AFTER) for op in after for v in op.results)
        return states

    def _twins(self, ops: Sequence[Op]) -> list[Op]:
        return [self.pair.big_op[op.index] for op in ops]

    def notes(self) -> tuple[str, ...]:
        """Returns how each leaf of the result that the loop has a part in is combined."""
        ops, roles = self.states.graph.block.ops, self.states.roles
        inside = [op for op in ops if op.index in roles and roles[op.index].kind == "copy"]
        notes = ["inexact: each micro-batch is computed independently, as a whole batch"]
        notes += notes_on_leaves(self.outputs, self.states, inside)
        nested = (inner for op in self.inside for body in op.bodies for inner in walk(body))
        if any(op.name in primitives.DRAWS for op in nested):
            notes.append("random numbers drawn in the loop are the same in every micro-batch")
        return tuple(notes)


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)
