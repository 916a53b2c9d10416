"""Micro-batches of an array: consecutive examples, or every m-th example, which no device has to send another.

Problem. A batch of E examples lies on n devices in n blocks of consecutive examples. Cut into m micro-batches of
consecutive examples each, a micro-batch lies on n/m of them and has to be spread over all: an all-to-all of the batch.
If micro-batch t has the examples t, t + m, t + 2m, .. instead, every device has its share already, and cutting is a
reshape of its own block: [E, ..] -> [E/m, m, ..], of which micro-batch t has [:, t].

When. That is a permutation of the batch, and the step computes the same if it does not tell examples apart by their
position: sums do not (but for rounding), nor do operations that work on each example by itself; results that have one
value an example are put back in their order. A draw of random numbers for the batch, a position within it, or a reshape
that takes the batch apart do, and so do prints; then micro-batches are blocks of consecutive examples.

How that is known. Of a dim of n elements that is cut, each of E examples has n/E consecutive ones. An operation keeps
that where the sharded factor of its rule consists of whole examples (`check_independent_of_position`). Local forms that
read the number of their block do not, which is found when they are traced (`Builder`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite.ir.graph import Block, Op
from alpa_lite.passes.blockwise import FunctionWriter
from alpa_lite.passes.microbatches.lattice import AXIS, State, sliced_state
from alpa_lite.passes.microbatches.states import Role, StepStates


class PositionDependent(Exception):
    """The step tells examples apart by their position."""


def check_independent_of_position(states: StepStates, block: Block | None = None) -> None:
    """Raises PositionDependent where an operation of the loop tells examples apart by their position."""
    for op in (states.graph.block if block is None else block).ops:
        role = states.roles.get(op.index)
        if role is None or role.kind == "whole":
            continue
        pairs = [*zip(op.operands, role.operands, strict=True), *zip(op.results, role.results, strict=True)]
        cut = [state.segment_sizes(states.shape(atom)[state.dim]) for atom, state in pairs if state.kind == "sliced"]
        has_parts = any(size % states.examples for sizes in cut for size in sizes)
        if op.has_effects or has_parts or not _has_whole_examples(states, op, role):
            raise PositionDependent
        for body in op.bodies if role.inner else ():
            check_independent_of_position(states, body)


def _has_whole_examples(states: StepStates, op: Op, role: Role) -> bool:
    """Whether each element of the factor that is cut belongs to one example, which is computed by itself."""
    if role.form is None:
        return True
    rule = states.rules[op.key]
    cut = (dims[s.dim] for dims, s in zip(rule.operands, role.operands, strict=True) if s.kind == "sliced")
    factors = [rule.factors[dim[0]] for dim in cut if dim]
    return all(f.kind in ("parallel", "sum") and f.size % states.examples == 0 for f in factors)


class Cuts:
    """The micro-batches of arrays, in each segment of a dim: consecutive examples, or every m-th example."""

    def __init__(self, parts: int, examples: int = 0) -> None:
        """`parts`: the number of micro-batches; `examples`: those of the batch if a micro-batch has every m-th one."""
        self.parts, self.examples, self.strided = parts, examples, examples > 0

    def cut(self, state: State, x: Any) -> Any:
        """Returns the micro-batches of an array, stacked along a new leading dim."""
        dim, shape = state.dim, x.shape
        if state.segments:
            return _by_segment(self.cut, state, x, dim, dim + 1)
        split, axis = self._split(x, dim), dim + self.strided
        if axis:
            split = lax.transpose(split, (axis, *(d for d in range(split.ndim) if d != axis)))
        return lax.reshape(split, (self.parts, *shape[:dim], shape[dim] // self.parts, *shape[dim + 1 :]))

    def take(self, state: State, number: Any, x: Any) -> Any:
        """Returns the micro-batch of an array with a number."""
        dim, size = state.dim, x.shape[state.dim] // self.parts
        if state.segments:
            return _by_segment(lambda one, piece: self.take(one, number, piece), state, x, dim, dim)
        if not self.strided:
            return lax.dynamic_slice_in_dim(x, lax.mul(number, np.int32(size)), size, dim)
        taken = lax.dynamic_index_in_dim(self._split(x, dim), number, dim + 1, keepdims=False)
        return lax.reshape(taken, (*x.shape[:dim], size, *x.shape[dim + 1 :]))

    def join(self, state: State, x: Any) -> Any:
        """Returns the inverse of `cut`."""
        dim = max(state.dim, 0)
        if self.parts == 1:
            return lax.squeeze(x, (0,))  # of any kind, a number without dims as well
        if state.segments:
            return _by_segment(self.join, state, x, dim + 1, dim)
        _, *before, size = x.shape[: dim + 2]
        behind, axis = x.shape[dim + 2 :], dim + self.strided
        if self.strided:
            examples = self.examples // self.parts
            x = lax.reshape(x, (self.parts, *before, examples, size // examples, *behind))
        if axis:
            x = lax.transpose(x, (*range(1, axis + 1), 0, *range(axis + 1, x.ndim)))
        return lax.reshape(x, (*before, self.parts * size, *behind))

    def _split(self, x: Any, dim: int) -> Any:
        """A dim as (micro-batches, elements), or as (examples of each, micro-batches, elements of an example)."""
        size, sizes = x.shape[dim], (self.parts, x.shape[dim] // self.parts)
        if self.strided:
            if size % self.examples:
                raise PositionDependent
            sizes = (self.examples // self.parts, self.parts, size // self.examples)
        return lax.reshape(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


def _by_segment(run: Callable[[State, Any], Any], state: State, x: Any, dim: int, made: int) -> Any:
    """Runs a function on each segment of a dim; returns the results joined along dim `made`."""
    pieces = lax.split(x, state.segment_sizes(x.shape[dim]), dim)
    return lax.concatenate([run(sliced_state(state.dim), piece) for piece in pieces], made)


class Builder(FunctionWriter):
    """The rewriting of a step into a loop over micro-batches."""

    def __init__(self, states: StepStates, strided: bool = False):
        """`strided`: micro-batches are of every m-th example."""
        super().__init__(states.graph, [(AXIS, states.parts)])
        self.states, self.parts, self.strided = states, states.parts, strided
        self.cuts = Cuts(self.parts, states.examples if strided else 0)

    def new_part(self, value: int, state: State) -> int:
        """Returns a new value for the part of `value` that one micro-batch has."""
        if state.kind != "sliced":
            return self.new_value(value)
        shape, dim = self.values[value].shape, state.dim
        return self.new_value_of_shape(value, (*shape[:dim], shape[dim] // self.parts, *shape[dim + 1 :]))


def pair_with_number(function: Callable[..., jax.Array], number: int, x: jax.Array) -> jax.Array:
    """Returns a function of an array and a number of its type."""
    return function(x, jnp.asarray(number, x.dtype))


def select_microbatch(number: int, count: jax.Array, x: jax.Array) -> jax.Array:
    """Returns an array in the micro-batch with a number, zeros in the others."""
    x = jnp.asarray(x)
    return lax.select(lax.broadcast(lax.eq(count, np.int32(number)), x.shape), x, lax.full_like(x, 0))
