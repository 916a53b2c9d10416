"""Micro-batches of an array: consecutive examples, or every m-th example, which no device has to send another.

Problem. A batch of E examples lies on n devices in n blocks of consecutive examples. Cut into m micro-batches of
consecutive examples each, a micro-batch lies on n/m of them and has to be spread over all: an all-to-all of the batch.
If micro-batch t has the examples t, t + m, t + 2m, .. instead, every device has its share already, and cutting is a
reshape of its own block: [E, ..] -> [E/m, m, ..], of which micro-batch t has [:, t].

When. That is a permutation of the batch, and the step computes the same if it does not tell examples apart by their
position: sums do not (but for rounding), nor do operations that work on each example by itself; results that have one
value an example are put back in their order. A draw of random numbers for the batch, a position within it, or a reshape
that takes the batch apart do, and so do prints; then micro-batches are blocks of consecutive examples.

How that is known. The state of a sliced value counts the examples of its dim (`State.examples`): of n elements, each of
E examples has n/E consecutive ones. An operation keeps that where the sharded factor of its rule consists of whole
examples, equally many in all operands; its role says otherwise (`Role.consecutive`). So does a local form that
reads the number of its block, which is found when it is traced (`Builder`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Graph, Lit
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.microbatches.states import AXIS, State, StepStates, sliced
from alpa_lite.passes.tracing import conversion


class PositionDependent(Exception):
    """The step tells examples apart by their position."""


def check_independent_of_position(states: StepStates, block: Block | None = None) -> None:
    """Raises PositionDependent where an operation of the loop tells examples apart by their position."""
    for op in (states.graph.block if block is None else block).ops:
        role = states.roles.get(op.index)
        if role is None or role.kind == "whole":
            continue
        if role.consecutive or any(s.kind == "sliced" and s.examples <= 0 for s in (*role.operands, *role.results)):
            raise PositionDependent
        for value, state in zip(op.results, role.results, strict=True):
            if state.kind == "sliced" and states.values[value].shape[state.dim] % state.examples:
                raise PositionDependent
        for body in op.bodies if role.inner else ():
            check_independent_of_position(states, body)


class Cuts:
    """The micro-batches of arrays: consecutive examples, in each segment of a dim, or every m-th example."""

    def __init__(self, parts: int, strided: bool) -> None:
        """`parts`: the number of micro-batches; `strided`: a micro-batch has every m-th example."""
        self.parts, self.strided = parts, strided

    def normalise(self, state: State) -> State:
        """The state as far as it matters here: the number of examples only where they are strided."""
        return state._replace(examples=0) if state.examples and not self.strided else state

    def cut(self, state: State, x: Any) -> Any:
        """The micro-batches of an array, stacked along a new leading dim."""
        dim = state.dim
        if state.segments and not self.strided:
            pieces = lax.split(x, state.segments, dim)
            return lax.concatenate([self.cut(sliced(dim), piece) for piece in pieces], dim + 1)
        split, axis = self._split(x, state), dim + self.strided
        if axis:
            split = lax.transpose(split, (axis, *(d for d in range(split.ndim) if d != axis)))
        return _merge(split, dim + 1, 2) if self.strided else split

    def one(self, state: State, number: Any, x: Any) -> Any:
        """The micro-batch of an array with a number."""
        dim = state.dim
        if self.strided:
            split = self._split(x, state)
            return _merge(lax.dynamic_index_in_dim(split, number, dim + 1, keepdims=False), dim, 2)
        if state.segments:
            pieces = lax.split(x, state.segments, dim)
            return lax.concatenate([self.one(sliced(dim), number, piece) for piece in pieces], dim)
        size = x.shape[dim] // self.parts
        return lax.dynamic_slice_in_dim(x, lax.mul(number, np.int32(size)), size, dim)

    def join(self, state: State, x: Any) -> Any:
        """The inverse of `cut`."""
        dim = max(state.dim, 0)
        if self.parts == 1:
            return lax.squeeze(x, (0,))  # of any kind, a number without dims as well
        if state.segments and not self.strided:
            pieces = lax.split(x, [n // self.parts for n in state.segments], dim + 1)
            return lax.concatenate([self.join(sliced(dim), piece) for piece in pieces], dim)
        if self.strided:
            examples = state.examples // self.parts
            x = lax.reshape(x, (*x.shape[: dim + 1], examples, x.shape[dim + 1] // examples, *x.shape[dim + 2 :]))
        axis = dim + self.strided
        if axis:
            x = lax.transpose(x, (*range(1, axis + 1), 0, *range(axis + 1, x.ndim)))
        return _merge(x, dim, 2 + self.strided)

    def _split(self, x: Any, state: State) -> Any:
        """The dim as (micro-batches, elements), or as (examples of each, micro-batches, elements of an example)."""
        size, sizes = x.shape[state.dim], (self.parts, x.shape[state.dim] // self.parts)
        if self.strided:
            if state.examples <= 0 or size % state.examples or state.examples % self.parts:
                raise PositionDependent
            sizes = (state.examples // self.parts, self.parts, size // state.examples)
        return lax.reshape(x, (*x.shape[: state.dim], *sizes, *x.shape[state.dim + 1 :]))


def _merge(x: Any, dim: int, count: int) -> Any:
    """An array with `count` dims merged."""
    return lax.reshape(x, (*x.shape[:dim], math.prod(x.shape[dim : dim + count]), *x.shape[dim + count :]))


class Builder(Rewriter):
    """The rewriting of a step into a loop over micro-batches."""

    def __init__(self, states: StepStates, strided: bool = False):
        """`strided`: micro-batches are of every m-th example."""
        super().__init__(states.graph)
        self.states, self.parts, self.strided = states, states.parts, strided
        self.cuts = Cuts(self.parts, strided)
        self._graphs: dict[Hashable, Graph] = {}

    def new_part(self, value: int, state: State) -> int:
        """A new value for the part of `value` that one micro-batch has."""
        if state.kind != "sliced":
            return self.fresh(value)
        shape, dim = self.values[value].shape, state.dim
        return self.shaped(value, (*shape[:dim], shape[dim] // self.parts, *shape[dim + 1 :]))

    def traced(self, run: Callable[..., Any], operands: Sequence[Atom], kind: Hashable) -> Graph:
        """The graph of a function, of which literals are no inputs, traced once for all runs of one kind.

        Runs of one kind do the same on operands of the same types; None is like nothing.
        """
        specs = [_jax.spec_of(self.values[a].aval) for a in values_in(operands)]
        is_shared = kind is not None and len(specs) == len(operands)
        key = (kind, *((s.shape, s.dtype, s.weak_type) for s in specs)) if is_shared else None
        if key is None or key not in self._graphs:

            def call(*arrays: Any) -> Any:
                given = iter(arrays)
                return run(*[a.value if isinstance(a, Lit) else next(given) for a in operands])

            jaxpr = jax.make_jaxpr(call, axis_env=[(AXIS, self.parts)])(*specs)
            self._graphs[key] = conversion.graph_of(jaxpr, self.keys)
        return self._graphs[key]


def with_number(function: Callable[..., jax.Array], number: int, x: jax.Array) -> jax.Array:
    """A function of an array and a number of its type."""
    return function(x, jnp.asarray(number, x.dtype))


def selected(number: int, count: jax.Array, x: jax.Array) -> jax.Array:
    """An array in the micro-batch with a number, zeros in the others."""
    x = jnp.asarray(x)
    return lax.select(lax.broadcast(lax.eq(count, np.int32(number)), x.shape), x, lax.full_like(x, 0))
