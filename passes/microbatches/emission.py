"""Writes the graph of a step whose gradient part is a loop over micro-batches.

    [operations on the whole batch]  one `scan` over micro-batches  [operations after it]

The body of the scan is made by demand (`blocks`), and so are the operations before it; those before and after it keep
their value numbers. The scan's results are

    partial   a carry that starts at zero and is added to; sums of 16-bit floats are carried in float32, since with
              b micro-batches a 16-bit running sum loses up to b/2 units in the last place
    local     the same with each summand divided by the number of micro-batches: a mean; of integers and random keys a
              carry that is overwritten: those of the last micro-batch
    inner     a carry that is overwritten: all are equal
    sliced    stacked, and joined along their dim after the scan
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import primitives

from alpa_lite import _jax
from alpa_lite.errors import MicrobatchError
from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op, Value
from alpa_lite.passes.ir.flow import reach, values_in
from alpa_lite.passes.ir.loops import Carried
from alpa_lite.passes.ir.rewriting import renamed_atom, renamed_op, shape_of
from alpa_lite.passes.microbatches.blocks import Scope
from alpa_lite.passes.microbatches.builder import Builder, check_independent_of_position
from alpa_lite.passes.microbatches.states import (
    AFTER,
    INNER,
    LOCAL,
    PARTIAL,
    WHOLE,
    State,
    StepStates,
    accumulator_dtype,
)


class WithoutLoop(Exception):
    """Nothing that a step returns depends on its batch, in the loop."""

    def __str__(self) -> str:
        return "nothing that the step returns depends on its batch"


def emit(states: StepStates, *, strided: bool = False) -> tuple[Graph, int]:
    """The rewritten graph, and the index of its scan over micro-batches in the top block.

    Args:
      states: of the step.
      strided: micro-batches are of every m-th example.

    Raises:
      WithoutLoop: if nothing that is live depends on the batch.
      PositionDependent: with `strided`, if the step tells examples apart by their position.
    """
    if strided:
        check_independent_of_position(states)
    builder, block = Builder(states, strided), states.graph.block
    loop = _Loop(builder)
    for op in block.ops:
        loop.emit(op)
    loop.find_epilogue()
    scan, post = loop.finish()
    outputs = tuple(renamed_atom(atom, loop.names) for atom in block.outputs)
    graph = builder.finish(Block(block.inputs, (*loop.prologue(), scan, *post, *loop.epilogue()), outputs))
    if scan.index not in builder.place:
        raise WithoutLoop
    return graph, builder.place[scan.index]


class _Loop(Scope):
    """The body of the scan over micro-batches, and the operations before and after it.

    Attributes:
      names: what exported values are called after the loop.
      prepared: new operations before it.
    """

    def __init__(self, builder: Builder):
        super().__init__(builder)
        self.names: dict[int, int] = {}
        self.prepared: list[Op] = []
        self._exports: dict[int, State] = {}
        self._early: set[int] = set()  # values that are computed before the loop
        self._late: set[int] = set()  # and after it, unless they are early
        self._effects: set[int] = set()  # operations after the loop, by index

    # -- before ---------------------------------------------------------------------------------------------------

    @functools.cached_property
    def counter(self) -> int:
        """The number of the micro-batch, an int32 scalar."""
        return self.scanned_input(self.builder.prepare(lax.iota, [], np.int32, self.builder.parts, into=self.prepared))

    def port(self, value: int, want: State) -> Atom | None:
        states = self.states
        if want == WHOLE:
            op, _ = states.producers.get(value, (None, 0))
            is_bare = op is not None and not (op.bodies or op.has_effects or op.reads)  # made from nothing in the loop
            return None if is_bare else self._require(value)
        if want.kind == "sliced" and (states.is_outside(value) or states.state[value] == WHOLE):
            found = self._local_block(value, want) if states.state[value] == WHOLE else None
            if found is None:  # its micro-batches, stacked along a new leading dim
                cut, whole = self.builder.cuts.cut, [self._require(value)]
                found = self.scanned_input(self.builder.prepare(cut, whole, want, into=self.prepared))
            return found
        return None

    def _require(self, value: int) -> int:
        """Makes sure that a value is computed, for the whole batch, before the loop."""
        self._mark(value, self._early)
        return value

    def _mark(self, value: int, marked: set[int]) -> None:
        """Adds a value, and the values that it is made of, unless they are early anyway."""
        producers = self.states.producers

        def missing(atoms: Sequence[Atom]) -> list[int]:
            return [v for v in values_in(atoms) if v in producers and v not in marked and v not in self._early]

        def made_of(value: int) -> list[int]:
            op, result = producers[value]
            return missing([op.operands[result]] if op.name == "optimization_barrier" else op.operands)

        marked.update(reach(missing([value]), made_of))

    def prologue(self) -> list[Op]:
        """The operations before the loop."""
        ops = self.states.graph.block.ops
        return [*(part for op in ops if (part := _part(op, self._early)) is not None), *self.prepared]

    # -- after ----------------------------------------------------------------------------------------------------

    def find_epilogue(self) -> None:
        """Finds the operations after the loop, and the values that the loop must return for them."""
        states, block = self.states, self.states.graph.block

        def read(atom: Atom) -> None:
            if isinstance(atom, Lit) or states.state[atom] == AFTER:
                return
            if states.state[atom] == WHOLE or states.is_outside(atom):
                self._mark(atom, self._late)
            else:
                self._exports[atom] = states.state[atom]

        for op in block.ops:
            role = states.roles.get(op.index)
            outside = role is None or (op.has_effects and role.kind == "whole")
            if outside:
                self._effects.add(op.index)
                self._late.update(op.results)
            for atom, value in zip(op.operands, op.results, strict=False):
                if op.name == "optimization_barrier" and states.state[value] == AFTER:
                    self._late.add(value)
                    read(atom)
            for atom in op.operands if outside else ():
                read(atom)
        for atom in block.outputs:
            read(atom)

    def epilogue(self) -> list[Op]:
        """The operations after the loop."""
        out = []
        wanted = self._late - self._early
        for op in self.states.graph.block.ops:
            if op.name != "optimization_barrier" and not self._early.isdisjoint(op.results):
                continue  # before the loop, with all of its results
            part = _part(op, wanted)
            if part is None and op.index in self._effects and not op.results:
                part = op
            if part is not None:
                out.append(renamed_op(part, self.names))
        return out

    # -- results --------------------------------------------------------------------------------------------------

    def finish(self) -> tuple[Op, list[Op]]:
        """The scan, and the operations that make the exported values of its results."""
        carries: list[tuple[int, Carried]] = []
        stacked: list[tuple[int, State, Atom, int]] = []  # value, its state, the body's output, the result
        values, parts = self.builder.values, self.builder.parts
        for value, state in self._exports.items():
            if state.kind == "sliced" or (state == LOCAL and parts == 1):
                inner = self.fetch(value, state)
                result = self.builder.shaped(value, (parts, *shape_of(inner, values)))
                stacked.append((value, state, inner, result))
            else:
                carries.append((value, self._carry(value, state)))
        self.carried = [carry.input for _, carry in carries]
        self.outputs = (*(carry.output for _, carry in carries), *(inner for _, _, inner, _ in stacked))
        free = self.free()
        params = {
            "length": parts, "reverse": False, "unroll": 1, "num_consts": len(free), "num_carry": len(carries)
        }  # fmt: skip
        operands = (*free, *(carry.start for _, carry in carries), *(outer for outer, _ in self.xs))
        results = (*(carry.end for _, carry in carries), *(result for *_, result in stacked))
        index, source = self.builder.index(), self._scan_source()
        scan = Op(index, primitives.scan_p, params, operands, results, (self.block(free),), source, None)
        post: list[Op] = []
        for value, carry in carries:
            dtype, end = values[value].dtype, carry.end
            is_wide = values[end].dtype != dtype
            self.names[value] = self.builder.prepare(_converted, [end], dtype, into=post) if is_wide else end
        for value, state, _, result in stacked:
            self.names[value] = self.builder.prepare(self.builder.cuts.join, [result], state, into=post)
        return scan, post

    def _carry(self, value: int, state: State) -> Carried:
        """A carry for an exported value."""
        shape, dtype = self.builder.values[value].shape, self.builder.values[value].dtype
        wide = dtype if state == INNER else accumulator_dtype(dtype)
        init = self.builder.prepare(_zeros, [], shape, wide, into=self.prepared)
        if state == LOCAL and dtype == np.bool_:
            raise MicrobatchError(
                f"num_microbatches={self.builder.parts}: a result is a truth value of the whole batch, which no "
                "micro-batch has; use num_microbatches=1"
            )
        like = Value(shape, wide, ShapedArray(shape, wide))
        start, end = self.builder.fresh(like), self.builder.fresh(like)
        if state == INNER or (state == LOCAL and not jnp.issubdtype(dtype, jnp.inexact)):
            return Carried(init, start, self.fetch(value, state), end)
        summand, source = self.fetch(value, PARTIAL), self.source(value)
        if wide != dtype:
            summand = self.trace(_converted, [summand], source, wide)
        return Carried(init, start, self.trace(lax.add, [start, summand], source), end)

    def _scan_source(self) -> Any:
        """A source of its own, without a name stack: those of the operations inside are whole."""
        for op in (*self.ops, *self.states.graph.block.ops):
            if op.source is not None:
                return op.source.replace(name_stack=_jax.empty_stack())
        raise WithoutLoop


def _part(op: Op, wanted: set[int]) -> Op | None:
    """An operation that makes wanted values; of a barrier only the part that makes them."""
    if wanted.isdisjoint(op.results):
        return None
    kept = [i for i, value in enumerate(op.results) if value in wanted]
    if op.name != "optimization_barrier" or len(kept) == len(op.results):
        return op
    return replace(
        op, operands=tuple(op.operands[i] for i in kept), results=tuple(op.results[i] for i in kept), key=None
    )


def _converted(dtype: Any, x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, dtype)


def _zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return lax.full(shape, 0, dtype)
