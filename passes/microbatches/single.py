"""The roles of a step in one micro-batch, which is the whole batch: no operation needs to have a form for a part of it.

Problem. Pipelines run a loop over micro-batches, be it one. What is in its body then need not be found by how the batch
is cut, and cannot be where the batch is one example, or has no dim of examples: a dim of one element is no factor of an
operation. But the body must hold the forward and the backward pass and nothing of the update, which waits for all of
the backward pass where it clips gradients by their norm.

Answer. JAX marks the operations of a reverse pass. What depends on the batch is in the loop, unless it is made of
results of the reverse pass and nothing that is differentiated is made of it: that is the update. Random values that
the loop reads are drawn in it. Every operation is as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.graph import Graph, Op, walk
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import made_of, producers, reach, values_in
from alpa_lite.passes.microbatches.analysis import Analysis
from alpa_lite.passes.microbatches.states import AFTER, LOCAL, PARTIAL, WHOLE, Role, State, is_intensive
from alpa_lite.strategy import Rule


def has_reverse_pass(graph: Graph) -> bool:
    """Whether JAX has marked operations of a reverse pass."""
    return any(_jax.is_reverse(op.source) for op in graph.ops())


def holds_the_work(analysis: Analysis) -> bool:
    """Whether most of the heavy operations of a step are in the loop."""
    heavy = [op for op in analysis.graph.block.ops if is_intensive(op)]
    whole = [op for op in heavy if op.index not in analysis.roles or analysis.roles[op.index].kind == "whole"]
    return 2 * len(whole) <= len(heavy)


class Single(Analysis):
    """The states and roles of one graph in one micro-batch."""

    def __init__(
        self, graph: Graph, rules: Mapping[Any, Rule], batch: Mapping[int, int], bound: Set[int], scalars: Set[int]
    ) -> None:
        """As `Analysis`; `scalars` are the arguments of the batch without dims."""
        self._seeds = self._begin(graph, {*batch, *scalars}, bound)
        super().__init__(graph, rules, 1, batch, bound)

    def _begin(self, graph: Graph, batch: Set[int], bound: Set[int]) -> Set[int]:
        """What the loop depends on: the batch; without one, keys and the like, or, where they are not read, all."""
        inputs = graph.block.inputs
        for seeds in (batch, set(inputs) - bound):
            if seeds and any(is_intensive(op) for op in _dependent(graph, seeds)):
                return seeds
        return set(inputs)

    def _walk(self, may_be_local: bool) -> None:
        block = self.graph.block
        active = {op.index for op in _dependent(self.graph, self._seeds)}
        inside = self._inside([op for op in block.ops if op.index in active])
        drawn = self._drawn([op for op in block.ops if op.index not in active], inside)
        after = active - inside.keys()
        returned = {v for op in block.ops if op.index in after for v in op.reads} | set(values_in(block.outputs))
        for op in block.ops:
            states = self.read(op)
            if self.is_free(op):
                self.free.update(op.results)
            if op.index in after:
                self._afterwards(op, states)
            elif op.name == "optimization_barrier":
                self.barrier(op, states)
            elif op.index in inside or op.index in drawn:
                results = tuple(PARTIAL if v in returned and self._is_sum(op, v) else LOCAL for v in op.results)
                self.decide(op, Role("copy", states, results))
            else:
                self.decide(op, self.whole(op))

    def _inside(self, ops: Sequence[Op]) -> dict[int, Op]:
        """The operations of the forward and backward pass, by index, of those that depend on the batch."""
        makers = producers(ops)
        reverse = [op for op in ops if any(_jax.is_reverse(o.source) for o in _with_bodies(op))]
        later = made_of(ops, [v for op in reverse for v in op.results])
        marked = [op for op in ops if any(_jax.derivative(o.source) for o in _with_bodies(op))]
        kept = [op for op in ops if later.isdisjoint(op.reads)] + marked
        found = reach(kept, lambda op: [makers[v] for v in op.reads if v in makers])
        return {op.index: op for op in found}

    def _drawn(self, ops: Sequence[Op], inside: Mapping[int, Op]) -> Set[int]:
        """Operations on random values alone, by index, that the loop reads."""
        draws = primitives.DRAWS - {"threefry2x32"}  # which makes keys, too
        random = made_of(ops, [v for op in ops if op.name in draws for v in op.results])
        makers = producers([op for op in ops if not random.isdisjoint(op.results) and not op.has_effects])
        wanted = [v for op in inside.values() for v in op.reads if v in makers]
        found = reach(wanted, lambda v: [r for r in makers[v].reads if r in makers])
        return {makers[v].index for v in found}

    def _afterwards(self, op: Op, states: Sequence[State]) -> None:
        """An operation of the update."""
        if op.name == "optimization_barrier":
            self.barrier(op, tuple([WHOLE if state == WHOLE else AFTER for state in states]))
            return
        for value in op.results:
            self.state[value] = AFTER

    def _is_sum(self, op: Op, value: int) -> bool:
        """Whether a result that leaves the loop is accumulated: numbers of the reverse pass, and single ones."""
        aval = self.values[value]
        if not jnp.issubdtype(aval.dtype, jnp.number):
            return False
        return not aval.shape or any(_jax.is_reverse(o.source) for o in _with_bodies(op))


def _dependent(graph: Graph, seeds: Collection[int]) -> list[Op]:
    """The operations that depend on some values."""
    found = made_of(graph.block.ops, seeds)
    return [op for op in graph.block.ops if not found.isdisjoint(op.reads)]


def _with_bodies(op: Op) -> list[Op]:
    return [op, *(inner for body in op.bodies for inner in walk(body))]
