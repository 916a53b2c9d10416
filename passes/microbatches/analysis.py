"""Which operations of a step go into the loop over micro-batches, and in what form.

One walk over the graph, in program order, gives every value a `State` and every operation a `Role` (`roles`). Partial
values are summed over the micro-batches as soon as something is not linear in them; what depends on such a sum comes
after the loop.

What depends on no parameters (an operand is *free* if no floating-point state reaches it) and has no exact form is
computed for the whole batch before the loop: the number of tokens that count, which a masked mean divides by. Where
nothing would be left for the loop (a step that begins with x.T @ y), such sums are taken in it, as any other.

An operation after the loop that is heavy and still works on single examples means that the model looks across the
batch (batch norm, contrastive losses): `Refused` says which, and which reductions would have to be taken within the
micro-batch instead (`local`). Where that is allowed, the walk goes back to the first of them, and on from there: what
it costs to find all of them does not depend on how many operations there are besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np

from alpa_lite.graph import Atom, Block, Graph, Lit, Op, walk
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.microbatches.journal import Journal, Unwritten
from alpa_lite.passes.microbatches.roles import Classifier
from alpa_lite.passes.microbatches.states import (
    AFTER,
    INNER,
    LOCAL,
    PARTIAL,
    WHOLE,
    Failure,
    Role,
    State,
    is_intensive,
    sliced,
)
from alpa_lite.strategy import Rule

_NONE: frozenset[int] = frozenset()


class Refused(Exception):
    """The step has no exact form. `op` is the heavy operation that would need the whole batch, `failure` the reason."""

    def __init__(self, op: Op, failure: Failure | None, roots: frozenset[int]):
        super().__init__(op.name)
        self.op, self.failure, self.roots = op, failure, roots


class Analysis(Classifier):
    """The states and roles of one graph.

    Attributes:
      ahead: operations on the batch that are computed for the whole batch before the loop.
      unfit: why, for those of them that have no exact form in the loop.

    Operations that come after the loop have no role.
    """

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[Any, Rule],
        parts: int,
        batch: Mapping[int, int],
        bound: Set[int],
        *,
        may_be_local: bool = False,
    ):
        """Walks over the graph.

        Args:
          graph, rules: of the step.
          parts: the number of micro-batches.
          batch: input -> the dim that is cut.
          bound: inputs that are floating-point state, or weights.
          may_be_local: whether reductions may be taken within the micro-batch.

        Raises:
          Refused: the step has no exact form, or, where reductions may be local, that does not help.
        """
        journal = Journal() if may_be_local else Unwritten()
        super().__init__(graph, rules, parts, batch, bound, journal)
        self.ahead: list[Op] = journal.row()
        self.unfit: list[Failure] = journal.row()
        self.cause: dict[int, Failure | None] = journal.table()
        self.carried: dict[int, frozenset[int]] = journal.table()  # after the loop: the dims that hold examples
        self._declined: dict[int, Role] = journal.table()
        self._uses = flow.uses(graph.block)
        self._walk(may_be_local)

    @property
    def work(self) -> int:
        """Elements that heavy operations inside of the loop read and write in all: to compare choices of the batch."""
        return sum(
            int(np.prod(self._shape(a), dtype=np.int64))
            for op in self.graph.block.ops
            if is_intensive(op) and op.index in self.roles and self.roles[op.index].kind not in ("whole", "copy")
            for a in (*op.operands, *op.results)
        )

    @property
    def has_loop(self) -> bool:
        """Whether an operation that the outputs are made of is in the loop."""
        block = self.graph.block
        makers = flow.producers(block.ops)
        kinds = {v: self.roles[op.index].kind if op.index in self.roles else "after" for v, op in makers.items()}
        outside = {v for v, kind in kinds.items() if kind in ("after", "barrier")}
        live = flow.reach(flow.values_in(block.outputs), lambda v: makers[v].reads if v in outside else ())
        return any(v in kinds and kinds[v] not in ("after", "barrier", "whole") for v in live)

    # -- the top block --------------------------------------------------------------------------------------------

    def _walk(self, may_be_local: bool) -> None:
        ops = self.graph.block.ops
        marks: list[int] = []  # what the journal had before each operation
        places: dict[int, int] = {}  # index of an operation, nested or not -> number at the top
        while len(marks) < len(ops):
            number = len(marks)
            marks.append(self.journal.mark)
            try:
                self._top(ops[number])
            except Refused as refused:
                new = refused.roots - self.local
                if not (new and may_be_local):
                    raise
                places = places or {op.index: n for n, top in enumerate(ops) for op in walk(Block((), (top,), ()))}
                first = min(places[index] for index in new)
                self.journal.back(marks[first])
                del marks[first:]
                self.local |= new

    def _top(self, op: Op) -> None:
        states = self.read(op)
        if op.name == "optimization_barrier":
            self.barrier(op, states)
            return
        if AFTER in states and self._sink(op):
            states = self.read(op)
        if AFTER in states:
            self._decline_chain(op, states)
            self._after(op, None)
            return
        found = self.classify(op, states)
        free = self.is_free(op)
        if free:
            self.free.update(op.results)
            if isinstance(found, Failure) or (PARTIAL in found.results and not op.has_effects):
                self.ahead.append(op)
                if isinstance(found, Failure):
                    self.unfit.append(found)
                found = self._ahead(op, states)
        if isinstance(found, Failure):
            if self.parts == 1 and any(s.kind in ("sliced", "local") for s in states):
                found = Role("copy", states, (LOCAL,) * len(op.results))
            else:
                self._after(op, found)
                return
        if PARTIAL in states and not op.bodies and found.kind == "copy" and not self._stays(op, states, found):
            self._declined[op.index] = found
            self._after(op, None)
            return
        if found.kind in ("scan", "map", "while", "cond"):
            results = tuple(INNER if s == WHOLE else s for s in found.results)
            found = Role(found.kind, found.operands, results, None, found.inner, found.scale, found.length)
        self.decide(op, found)

    def _ahead(self, op: Op, states: Sequence[State]) -> Role:
        """Computed before the loop; what still holds single examples is cut, so that what follows is in the loop."""
        carried = {i: self._examples(a) for i, a in enumerate(op.operands)}
        cut = []
        for i, value in enumerate(op.results):
            dims = self._result_examples(op, carried, i)
            if op.name == "gather" and states[0].kind == "sliced":
                shape, size = self.values[value].shape, self._shape(op.operands[0])[states[0].dim]
                dims = {d for d, n in enumerate(shape) if n == size and d not in self._window_dims(op)}
            fits = [d for d in sorted(dims) if self.values[value].shape[d] % self.parts == 0]
            cut.append(sliced(fits[0]) if fits and not op.bodies else WHOLE)
        return Role("whole", (WHOLE,) * len(op.operands), tuple(cut))

    def _window_dims(self, op: Op) -> Sequence[int]:
        return op.params["dimension_numbers"].offset_dims

    def outside(self, value: int) -> bool:
        """Whether a value is computed before the loop, or is an argument."""
        if value not in self.producers:
            return True
        role = self.roles.get(self.producers[value][0].index)
        return role is not None and role.kind == "whole"

    def like(self, value: int, atom: int) -> None:
        """`value` is another name of `atom`."""
        super().like(value, atom)
        tables: list[Any] = [self.cause, self.carried]
        for table in tables:
            if atom in table:
                table[value] = table[atom]

    def _after(self, op: Op, failure: Failure | None) -> None:
        """An operation that comes after the loop; refused if it is heavy and works on single examples."""
        carried = {i: dims for i, a in enumerate(op.operands) if (dims := self._examples(a))}
        roots = self.roots_of(op)
        if failure is not None:
            roots |= failure.roots
        cause = failure
        for value in op.reads:
            cause = cause or self.cause.get(value)
        examples = bool(carried)
        if failure is None and cause is None and examples:
            cause = Failure(op, "it uses single examples together with a sum over all of them")
        if examples and (is_intensive(op) or self._is_opaque(op)):
            raise Refused(op, cause, roots)
        for i, value in enumerate(op.results):
            self.state[value] = AFTER
            self.roots[value], self.cause[value] = roots, cause
            self.carried[value] = self._result_examples(op, carried, i) if examples else _NONE

    def _is_opaque(self, op: Op) -> bool:
        rule = self.rules.get(op.key)
        return not op.bodies and rule is not None and rule.source == "opaque" and not op.has_effects

    def _examples(self, atom: Atom) -> frozenset[int]:
        """The dims of an operand that hold examples."""
        if isinstance(atom, Lit):
            return _NONE
        state = self.state[atom]
        return frozenset({state.dim}) if state.kind == "sliced" else self.carried.get(atom, _NONE)

    def _result_examples(self, op: Op, carried: Mapping[int, frozenset[int]], result: int) -> frozenset[int]:
        rule, rank = self.rules.get(op.key), len(self.values[op.results[result]].shape)
        if rule is None or rule.source == "opaque":
            return frozenset(range(rank))
        factors = {f for i, dims in carried.items() for d in dims for f in rule.operands[i][d]}
        unnamed = any(not rule.operands[i][d] for i, dims in carried.items() for d in dims)
        named = {d for d, fs in enumerate(rule.results[result]) if factors & set(fs)}
        sizes = {self._shape(op.operands[i])[d] for i, dims in carried.items() for d in dims}
        alike = {d for d, n in enumerate(self.values[op.results[result]].shape) if n in sizes and n > 1}
        return frozenset(named | (alike if unnamed else set()))

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return tuple(atom.aval.shape) if isinstance(atom, Lit) else self.values[atom].shape

    # -- sums that are better added inside of the loop ------------------------------------------------------------

    def _stays(self, op: Op, states: Sequence[State], role: Role) -> bool:
        """Whether a linear operation on sums is done inside of the loop.

        It is where that makes fewer or smaller accumulators (two sums that are only added, a reduction), where it makes
        wider ones (so that narrow floats are summed in wide ones), and where it needs a local value.
        """
        if any(s.kind in ("local", "inner") for s in states):
            return True
        summed = [a for a, s in zip(op.operands, role.operands, strict=True) if s == PARTIAL]
        before = sum(self.values[a].nbytes for a in summed if not isinstance(a, Lit))
        joins = op.name in primitives.ADDITIONS and len(summed) == 2 and all(s == PARTIAL for s in states)
        shrinks = sum(self.values[v].nbytes for v in op.results) < before and op.name == "reduce_sum"
        widens = op.name == "convert_element_type" and self.values[op.results[0]].itemsize > _itemsize(self, summed[0])
        return (joins or shrinks or widens) and all(self._once(a) for a in summed)

    def _sink(self, op: Op) -> bool:
        """Moves the linear operations before an addition or a conversion into the loop, if it then can be there too."""
        if op.name not in primitives.ADDITIONS and op.name != "convert_element_type":
            return False
        chains = [self._chain(a) for a in op.operands]
        if any(chain is None for chain in chains):
            return False
        for chain in chains:
            for inner in reversed(chain or ()):
                for value in inner.results:
                    del self.cause[value], self.carried[value]
                self.decide(inner, self._declined[inner.index])
        return True

    def _decline_chain(self, op: Op, states: Sequence[State]) -> None:
        """Notes an operation that could be in the loop if the linear operations before it were."""
        if op.name not in primitives.LINEAR_CHAIN:
            return
        made = [a for a in op.operands if not isinstance(a, Lit)]
        if all(a in self.producers and self.producers[a][0].index in self._declined for a in made):
            found = self.classify(op, tuple([PARTIAL if s == AFTER else s for s in states]))
            if isinstance(found, Role):
                self._declined[op.index] = found

    def _chain(self, atom: Atom) -> list[Op] | None:
        """The linear operations between a value and a sum, all read once; None if there is no such chain."""
        chain: list[Op] = []
        while not isinstance(atom, Lit):
            if self._uses[atom] != 1:
                return None
            if self.state[atom] == PARTIAL:
                return chain
            op = self.producers[atom][0] if atom in self.producers else None
            if op is None or op.name not in primitives.LINEAR_CHAIN or op.index not in self._declined:
                return None
            chain.append(op)
            atom = op.operands[0]
        return None

    def _once(self, atom: Atom) -> bool:
        return not isinstance(atom, Lit) and self._uses[atom] == 1


def _itemsize(analysis: Analysis, atom: Atom) -> int:
    return int(np.dtype(atom.aval.dtype).itemsize) if isinstance(atom, Lit) else analysis.values[atom].itemsize
