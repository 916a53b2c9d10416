"""The operations of a step that go into the loop over micro-batches, and their form: a data-flow fixed point.

A visit of each operation, in program order, gives every value a `State` and every operation a `Role` (`transfer`).
Partial values are summed over the micro-batches as soon as something is not linear in them; operations that depend
on such a sum come after the loop.

An operation that depends on no parameters (an operand is *free* if no floating-point state reaches it) and has no exact
form is computed for the whole batch before the loop: the number of tokens that count, which a masked mean divides by.
Where nothing would be left for the loop (a step that begins with x.T @ y), such sums are taken in it, as any other.

An operation after the loop that is heavy and still works on single examples means that the model looks across the batch
(batch norm, contrastive losses): `InexactStep` names it, and the reductions that would have to be taken within the
micro-batch instead (`local_reductions`). Where that is allowed, the visit goes on from the first of them: the states
before it do not depend on it, so that the cost of all of them does not depend on the number of other operations.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from alpa_lite.ir.graph import Atom, Lit, Op
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.microbatches.lattice import AFTER, INNER, LOCAL, PARTIAL, WHOLE, State, sliced_state
from alpa_lite.passes.microbatches.states import Failure, Role, is_intensive, linear_operands
from alpa_lite.passes.microbatches.transfer import Transfer


class InexactStep(Exception):
    """The step has no exact form. `op` is the heavy operation that would need the whole batch, `failure` the reason."""

    def __init__(self, op: Op, failure: Failure | None, roots: frozenset[int]):
        super().__init__(op.name)
        self.op, self.failure, self.roots = op, failure, roots


@dataclass(eq=False)
class Analysis(Transfer):
    """The states and roles of one graph; making one raises `InexactStep` if the step has no exact form.

    Attributes:
      may_be_local: whether reductions may be taken within the micro-batch; it is refused where that does not help.
      ops_ahead: those that are computed for the whole batch before the loop, by index.
      example_dims: the dims that hold examples of each value after the loop that has any.
    """

    may_be_local: bool = False
    ops_ahead: dict[int, Op] = field(default_factory=dict, init=False)
    example_dims: dict[int, frozenset[int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._uses = flow.uses(self.graph.block)
        self._visit_all()

    @property
    def work(self) -> int:
        """Elements that heavy operations inside of the loop read and write in all: to compare choices of the batch."""
        roles = self.roles
        return sum(
            int(np.prod(self.shape(a), dtype=np.int64))
            for op in self.graph.block.ops
            if is_intensive(op) and op.index in roles and roles[op.index].kind not in ("whole", "copy")
            for a in (*op.operands, *op.results)
        )

    @property
    def has_loop(self) -> bool:
        """Whether an operation that the outputs are made of is in the loop."""
        block, roles = self.graph.block, self.roles
        makers = flow.producers(block.ops)
        kinds = {v: roles[op.index].kind if op.index in roles else "after" for v, op in makers.items()}
        outside = {v for v, kind in kinds.items() if kind in ("after", "barrier")}
        live = flow.reach(flow.values_in(block.outputs), lambda v: makers[v].reads if v in outside else ())
        return any(v in kinds and kinds[v] not in ("after", "barrier", "whole") for v in live)

    # -- the fixed point ------------------------------------------------------------------------------------------

    def _visit_all(self) -> None:
        """Visits the operations until their states are stable."""
        ops = self.graph.block.ops
        indices = [op.index for op in ops]  # those of nested operations are smaller
        number = 0
        while number < len(ops):
            try:
                self._visit(ops[number])
                number += 1
            except InexactStep as refused:
                new = refused.roots - self.local_reductions
                if not (new and self.may_be_local):
                    raise
                number = bisect.bisect_left(indices, min(new))
                self.local_reductions |= new

    def _visit(self, op: Op) -> None:
        for by_op in (self.roles, self.failures, self.ops_ahead):  # of an earlier visit
            by_op.pop(op.index, None)
        for value in op.results:
            self.example_dims.pop(value, None)
        given = self.read(op)
        if op.name == "optimization_barrier":
            self.decide(op, Role("barrier", given, given))
            pairs = zip(op.operands, op.results, strict=True)
            self.example_dims.update(
                (v, self.example_dims[a]) for a, v in pairs if isinstance(a, int) and a in self.example_dims
            )
            return
        if AFTER in given:
            given = self._sink(op, given)
        if AFTER in given:
            self._put_after(op)
            return
        found = None
        try:
            found = self.classify(op, given)
        except Failure as error:
            self.failures[op.index] = error.with_traceback(None)
        if self.is_free(op) and (found is None or (PARTIAL in found.results and not op.has_effects)):
            self.ops_ahead[op.index] = op
            found = self._compute_ahead(op, given)
        if found is None and self.parts == 1 and any(s.kind in ("sliced", "local") for s in given):
            del self.failures[op.index]
            found = Role("copy", given, (LOCAL,) * len(op.results))
        is_sum = found is not None and PARTIAL in given and not op.bodies and found.kind == "copy"
        if found is None or (is_sum and not self._stays(op, given, found)):
            self._put_after(op)
            return
        if found.kind in ("map", "control"):  # its whole results are computed in the loop
            found = replace(found, results=tuple(INNER if s == WHOLE else s for s in found.results))
        self.decide(op, found)

    def _compute_ahead(self, op: Op, given: Sequence[State]) -> Role:
        """Computed before the loop; results that still hold single examples are cut: their readers are in the loop."""
        values, examples = self.values, self._operand_examples(op)
        cut = []
        for i, value in enumerate(op.results):
            dims, shape = self._result_examples(op, examples, i), values[value].shape
            if op.name == "gather" and given[0].kind == "sliced":
                size = self.shape(op.operands[0])[given[0].dim]
                window = op.params["dimension_numbers"].offset_dims
                dims = frozenset(d for d, n in enumerate(shape) if n == size and d not in window)
            fits = [d for d in sorted(dims) if shape[d] % self.parts == 0]
            cut.append(sliced_state(fits[0]) if fits and not op.bodies else WHOLE)
        return Role("whole", (WHOLE,) * len(op.operands), tuple(cut))

    # -- after the loop -------------------------------------------------------------------------------------------

    def _put_after(self, op: Op) -> None:
        """Puts an operation after the loop; refused if it is heavy and works on single examples."""
        examples = self._operand_examples(op)
        if examples and self._cause(op) is None:
            self.failures[op.index] = Failure(op, "it uses single examples together with a sum over all of them")
        rule = self.rules.get(op.key)
        is_opaque = not op.bodies and rule is not None and rule.source == "opaque" and not op.has_effects
        if examples and (is_intensive(op) or is_opaque):
            sums = self.failures[op.index].sums if op.index in self.failures else ()
            raise InexactStep(op, self._cause(op), self.roots([*op.reads, *sums]))
        for i, value in enumerate(op.results):
            self.state[value] = AFTER
            if examples and (dims := self._result_examples(op, examples, i)):
                self.example_dims[value] = dims

    def _cause(self, op: Op) -> Failure | None:
        """Returns why the first operation on the way to one after the loop has no exact form in it, if any has none."""

        def after(values: Sequence[int]) -> list[int]:
            return [v for v in reversed(values) if self.state[v] == AFTER]

        found = flow.reach(after(op.reads), lambda value: after(self.made_of(value)))
        indices = (op.index, *(self.producers[v][0].index for v in found))
        return next((self.failures[index] for index in indices if index in self.failures), None)

    def _operand_examples(self, op: Op) -> dict[int, frozenset[int]]:
        """Returns the dims that hold examples of each operand that has any, by its number."""
        found = {}
        for i, atom in enumerate(op.operands):
            state = self.state_of(atom)
            if state.kind == "sliced":
                found[i] = frozenset({state.dim})
            elif isinstance(atom, int) and atom in self.example_dims:
                found[i] = self.example_dims[atom]
        return found

    def _result_examples(self, op: Op, examples: Mapping[int, frozenset[int]], result: int) -> frozenset[int]:
        rule, shape = self.rules.get(op.key), self.values[op.results[result]].shape
        if rule is None or rule.source == "opaque":
            return frozenset(range(len(shape)))
        factors = {f for i, dims in examples.items() for d in dims for f in rule.operands[i][d]}
        unnamed = any(not rule.operands[i][d] for i, dims in examples.items() for d in dims)
        named = {d for d, fs in enumerate(rule.results[result]) if factors & set(fs)}
        sizes = {self.shape(op.operands[i])[d] for i, dims in examples.items() for d in dims}
        alike = {d for d, n in enumerate(shape) if n in sizes and n > 1}
        return frozenset(named | (alike if unnamed else set()))

    # -- sums that are better added inside of the loop ------------------------------------------------------------

    def _stays(self, op: Op, given: Sequence[State], role: Role) -> bool:
        """Returns whether a linear operation on sums is done inside of the loop.

        It is where that makes fewer or smaller accumulators (two sums that are only added, a reduction), where it makes
        wider ones (so that narrow floats are summed in wide ones), and where it needs a local value.
        """
        if any(s.kind in ("local", "inner") for s in given):
            return True
        values = self.values
        summed = [a for a, s in zip(op.operands, role.operands, strict=True) if s == PARTIAL]
        before = sum(values[a].nbytes for a in summed if not isinstance(a, Lit))
        joins = op.name in primitives.ADDITIONS and len(summed) == 2 and all(s == PARTIAL for s in given)
        shrinks = op.name == "reduce_sum" and sum(values[v].nbytes for v in op.results) < before
        dtypes = [(a.aval if isinstance(a, Lit) else values[a]).dtype for a in (summed[0], op.results[0])]
        widens = op.name == "convert_element_type" and np.dtype(dtypes[0]).itemsize < np.dtype(dtypes[1]).itemsize
        return (joins or shrinks or widens) and all(self._is_read_once(a) for a in summed)

    def _sink(self, op: Op, given: tuple[State, ...]) -> tuple[State, ...]:
        """The states of operands, once linear operations before an addition or a conversion are in the loop, too."""
        if op.name not in primitives.ADDITIONS and op.name != "convert_element_type":
            return given
        chains = [self._chain(a) for a in op.operands]
        if any(chain is None for chain in chains):
            return given
        for inner in (one for chain in chains for one in reversed(chain or ())):
            self.decide(inner, Role("copy", (PARTIAL,), (PARTIAL,)))
        return (PARTIAL,) * len(given)

    def _chain(self, atom: Atom) -> list[Op] | None:
        """Returns the linear operations between a value and a sum, all read once; None if there is no such chain."""
        chain: list[Op] = []
        while isinstance(atom, int) and self._is_read_once(atom) and self.state[atom] in (PARTIAL, AFTER):
            if self.state[atom] == PARTIAL:
                return chain
            op, _ = self.producers[atom]
            if op.name not in primitives.LINEAR_CHAIN or linear_operands(op, [True], self.values) is None:
                return None
            chain.append(op)
            atom = op.operands[0]
        return None

    def _is_read_once(self, atom: Atom) -> bool:
        return isinstance(atom, int) and self._uses[atom] == 1
