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
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import primitives

from alpa_lite import _jax
from alpa_lite.errors import MicrobatchError
from alpa_lite.ir.graph import Atom, Block, Graph, Op, Value
from alpa_lite.passes.ir.flow import reach, values_in
from alpa_lite.passes.ir.loops import Carry
from alpa_lite.passes.ir.rewriting import rename_atom, rename_op, shape_of
from alpa_lite.passes.microbatches.blocks import Scope, part_of_barrier
from alpa_lite.passes.microbatches.builder import Builder, check_independent_of_position
from alpa_lite.passes.microbatches.lattice import AFTER, INNER, LOCAL, PARTIAL, WHOLE, State
from alpa_lite.passes.microbatches.states import StepStates


class WithoutLoop(Exception):
    """Nothing that a step returns depends on its batch, in the loop."""

    def __str__(self) -> str:
        return "nothing that the step returns depends on its batch"


def emit(states: StepStates, *, strided: bool = False) -> tuple[Graph, int]:
    """Returns the rewritten graph, and the index of its scan over micro-batches in the top block.

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
    scan, post = loop.finish()
    before, after = loop.ops_around(scan)
    outputs = tuple(rename_atom(atom, loop.names) for atom in block.outputs)
    graph = builder.finish(Block(block.inputs, (*before, scan, *post, *after), outputs))
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

    @functools.cached_property
    def counter(self) -> int:
        """The number of the micro-batch, an int32 scalar."""
        return self.scanned_input(self._prepare(lax.iota, [], np.int32, self.builder.parts))

    def port(self, value: int, want: State) -> Atom | None:
        states = self.states
        if want == WHOLE:
            op, _ = states.producers.get(value, (None, 0))
            is_bare = op is not None and not (op.bodies or op.has_effects or op.reads)  # made from nothing in the loop
            return None if is_bare else value
        if want.kind == "sliced" and (states.is_outside(value) or states.state[value] == WHOLE):
            found = self._local_block(value, want) if states.state[value] == WHOLE else None
            if found is None:  # its micro-batches, stacked along a new leading dim
                found = self.scanned_input(self._prepare(self.builder.cuts.cut, [value], want))
            return found
        return None

    def _prepare(self, function: Callable[..., Any], operands: Sequence[int], *static: Hashable) -> Any:
        """Returns the one result of `function(*static, *operands)`, in operations before the loop."""
        return self.builder.call(function, operands, *static, into=self.prepared)

    # -- before and after -----------------------------------------------------------------------------------------

    def late_reads(self) -> list[int]:
        """The values that the operations after the loop read, and those that the step returns, if made before that."""
        states, atoms = self.states, list[Atom]()
        for op in states.graph.block.ops:
            if op.name == "optimization_barrier":
                atoms += [a for a, v in zip(op.operands, op.results, strict=True) if states.state[v] == AFTER]
            elif self._is_later(op):
                atoms += op.operands
        found = dict.fromkeys(values_in([*atoms, *states.graph.block.outputs]))
        return [value for value in found if states.state[value] != AFTER]

    def exports(self) -> dict[int, State]:
        """Returns the values that the loop must return, with their states."""
        states = self.states
        pairs = ((value, states.state[value]) for value in self.late_reads())
        return {value: state for value, state in pairs if state != WHOLE and not states.is_outside(value)}

    def ops_around(self, scan: Op) -> tuple[list[Op], list[Op]]:
        """Returns the operations before and after the loop."""
        states, ops = self.states, self.states.graph.block.ops
        early = self._made_of(value for op in (scan, *self.prepared) for value in op.reads)
        late = self._made_of(value for value in self.late_reads() if value not in self.names)
        late |= {v for op in ops for v in op.results if self._is_later(op) or states.state[v] == AFTER}
        before = [part for op in ops if (part := _part(op, early)) is not None]
        late, after = late - early, []
        for op in ops:
            if op.name != "optimization_barrier" and not early.isdisjoint(op.results):
                continue  # before the loop, with all of its results
            part = _part(op, late) if op.results or not self._is_later(op) else op
            if part is not None:
                after.append(rename_op(part, self.names))
        return [*before, *self.prepared], after

    def _is_later(self, op: Op) -> bool:
        """Returns whether an operation comes after the loop, or has an effect that happens once."""
        role = self.states.roles.get(op.index)
        return role is None or (op.has_effects and role.kind == "whole")

    def _made_of(self, values: Iterable[int]) -> set[int]:
        """Returns those of some values that operations make, and all that these are made of."""
        return set(reach(values, self.states.made_of)) & self.states.producers.keys()

    # -- results --------------------------------------------------------------------------------------------------

    def finish(self) -> tuple[Op, list[Op]]:
        """Returns the scan, and the operations that make the exported values of its results."""
        carries: list[tuple[int, Carry]] = []
        stacked: list[tuple[int, State, Atom, int]] = []  # value, its state, the body's output, the result
        values, parts = self.builder.values, self.builder.parts
        for value, state in self.exports().items():
            if state.kind == "sliced" or (state == LOCAL and parts == 1):
                inner = self.fetch(value, state)
                result = self.builder.new_value_of_shape(value, (parts, *shape_of(inner, values)))
                stacked.append((value, state, inner, result))
            else:
                carries.append((value, self._carry(value, state)))
        self.carried = [carry.input for _, carry in carries]
        self.outputs = (*(carry.output for _, carry in carries), *(inner for _, _, inner, _ in stacked))
        free = self.free_values()
        params = {
            "length": parts, "reverse": False, "unroll": 1, "num_consts": len(free), "num_carry": len(carries)
        }  # fmt: skip
        operands = (*free, *(carry.start for _, carry in carries), *(outer for outer, _ in self.xs))
        results = (*(carry.end for _, carry in carries), *(result for *_, result in stacked))
        index, source = self.builder.index(), self._scan_source()
        scan = Op(index, primitives.scan_p, params, operands, results, (self.block(free),), source, None)
        post, call = list[Op](), self.builder.call
        for value, carry in carries:
            dtype, end = values[value].dtype, carry.end
            is_wide = values[end].dtype != dtype
            self.names[value] = call(lax.convert_element_type, [end], into=post, new_dtype=dtype) if is_wide else end
        for value, state, _, result in stacked:
            self.names[value] = call(self.builder.cuts.join, [result], state, into=post)
        return scan, post

    def _carry(self, value: int, state: State) -> Carry:
        """Returns a carry for an exported value."""
        shape, dtype = self.builder.values[value].shape, self.builder.values[value].dtype
        wide = dtype if state == INNER else _accumulator_dtype(dtype)
        init = self._prepare(lax.full, [], shape, 0, wide)
        if state == LOCAL and dtype == np.bool_:
            raise MicrobatchError(
                f"num_microbatches={self.builder.parts}: a result is a truth value of the whole batch, which no "
                "micro-batch has; use num_microbatches=1"
            )
        like = Value(shape, wide, ShapedArray(shape, wide))
        start, end = self.builder.new_value(like), self.builder.new_value(like)
        if state == INNER or (state == LOCAL and not jnp.issubdtype(dtype, jnp.inexact)):
            return Carry(init, start, self.fetch(value, state), end)
        summand, source = self.fetch(value, PARTIAL), self.source(value)
        if wide != dtype:
            summand = self.trace(lax.convert_element_type, [summand], source, new_dtype=wide)
        return Carry(init, start, self.trace(lax.add, [start, summand], source), end)

    def _scan_source(self) -> Any:
        """Returns a source of its own, without a name stack: those of the operations inside are whole."""
        for op in (*self.ops, *self.states.graph.block.ops):
            if op.source is not None:
                return op.source.replace(name_stack=_jax.empty_stack())
        raise WithoutLoop


def _accumulator_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a sum over micro-batches is carried.

    It is float32 for 16-bit floats: with b micro-batches a 16-bit running sum loses up to b/2 units in the last place.
    """
    return np.dtype(np.float32) if dtype in (jnp.bfloat16, np.float16) else dtype


def _part(op: Op, wanted: set[int]) -> Op | None:
    """Returns an operation that makes wanted values; of a barrier only the part that makes them."""
    kept = [i for i, value in enumerate(op.results) if value in wanted]
    return None if not kept else part_of_barrier(op, kept) if op.name == "optimization_barrier" else op
