"""The roles of a step in one micro-batch, which is the whole batch: no operation needs to have a form for a part of it.

Problem. Pipelines run a loop over micro-batches, be it one. Its body then need not be found by how the batch is cut,
and cannot be where the batch is one example, or has no dim of examples: a dim of one element is not a factor.
But the body must hold the forward and the backward pass and nothing of the update, which waits for all of the backward
pass where it clips gradients by their norm.

Answer. JAX marks the operations of a reverse pass. Everything that depends on the batch is in the loop, unless it is
made of results of the reverse pass and nothing that is differentiated is made of it: that is the update. Random values
that the loop reads are drawn in it. Every operation is as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.ir.graph import Block, Graph, Op, walk
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import find_dependents, producers, reach, values_in
from alpa_lite.passes.microbatches.analysis import Analysis
from alpa_lite.passes.microbatches.lattice import AFTER, LOCAL, PARTIAL, WHOLE
from alpa_lite.passes.microbatches.states import Role, StepStates, is_intensive


def has_reverse_pass(graph: Graph) -> bool:
    """Returns whether JAX has marked operations of a reverse pass."""
    return any(_jax.is_reverse(op.source) for op in graph.ops())


def is_work_in_loop(analysis: Analysis) -> bool:
    """Returns whether most of the heavy operations of a step are in the loop."""
    roles = analysis.roles
    heavy = [op for op in analysis.graph.block.ops if is_intensive(op)]
    whole = [op for op in heavy if op.index not in roles or roles[op.index].kind == "whole"]
    return 2 * len(whole) <= len(heavy)


def assign_whole_batch(
    graph: Graph, rules: Mapping[Any, Rule], batch: Mapping[int, int], bound: Collection[int], scalars: Collection[int]
) -> StepStates:
    """Returns the states and roles of one graph in one micro-batch.

    Args:
      graph, rules, batch, bound: as for `Analysis`.
      scalars: the arguments of the batch without dims.
    """
    states, block = StepStates(graph, rules, 1, batch, bound), graph.block
    active = _dependent(graph, _seeds(graph, {*batch, *scalars}, bound))
    passes = _forward_and_backward(active)
    found = {op.index for op in active}
    update = found - passes
    draws = _draws([op for op in block.ops if op.index not in found], [op for op in active if op.index in passes])
    returned = {v for op in block.ops if op.index in update for v in op.reads} | set(values_in(block.outputs))
    for op in block.ops:
        given = states.read(op)
        if op.name == "optimization_barrier":
            if op.index in update:
                given = tuple([WHOLE if state == WHOLE else AFTER for state in given])
            states.decide(op, Role("barrier", given, given))
        elif op.index in update:
            states.state.update(dict.fromkeys(op.results, AFTER))
        elif op.index in passes or op.index in draws:
            results = tuple(PARTIAL if v in returned and _is_sum(graph, op, v) else LOCAL for v in op.results)
            states.decide(op, Role("copy", given, results))
        else:
            states.decide(op, Role.for_whole_batch(op))
    return states


def _seeds(graph: Graph, batch: Collection[int], bound: Collection[int]) -> Collection[int]:
    """The inputs that the loop depends on: the batch; without one, keys and the like; where they are unread, all."""
    inputs = graph.block.inputs
    for seeds in (batch, set(inputs).difference(bound)):
        if seeds and any(is_intensive(op) for op in _dependent(graph, seeds)):
            return seeds
    return inputs


def _dependent(graph: Graph, seeds: Collection[int]) -> list[Op]:
    """Returns the operations that depend on some values."""
    found = find_dependents(graph.block.ops, seeds)
    return [op for op in graph.block.ops if not found.isdisjoint(op.reads)]


def _forward_and_backward(ops: Sequence[Op]) -> set[int]:
    """Returns the operations of the forward and backward pass, by index."""
    makers = producers(ops)
    later = find_dependents(ops, [v for op in ops if _is_reverse(op) for v in op.results])
    marked = [op for op in ops if any(_jax.derivative(o.source) for o in walk(Block((), (op,), ())))]
    kept = [op for op in ops if later.isdisjoint(op.reads)] + marked
    return {op.index for op in reach(kept, lambda op: [makers[v] for v in op.reads if v in makers])}


def _draws(ops: Sequence[Op], readers: Sequence[Op]) -> set[int]:
    """Returns operations on random values alone, by index, whose results some others read."""
    draws = primitives.DRAWS - {"threefry2x32"}  # which makes keys, too
    random = find_dependents(ops, [v for op in ops if op.name in draws for v in op.results])
    makers = producers([op for op in ops if not random.isdisjoint(op.results) and not op.has_effects])
    wanted = [v for op in readers for v in op.reads if v in makers]
    return {makers[v].index for v in reach(wanted, lambda v: [r for r in makers[v].reads if r in makers])}


def _is_sum(graph: Graph, op: Op, value: int) -> bool:
    """Returns whether a result that leaves the loop is accumulated: numbers of the reverse pass, and single ones."""
    aval = graph.values[value]
    return jnp.issubdtype(aval.dtype, jnp.number) and (not aval.shape or _is_reverse(op))


def _is_reverse(op: Op) -> bool:
    return any(_jax.is_reverse(o.source) for o in walk(Block((), (op,), ())))
