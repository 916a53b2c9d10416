"""Writes the graph of a step whose gradient part is a loop over micro-batches.

    [operations on the whole batch]  one `scan` over micro-batches  [operations after it]

The body of the scan is made by demand (`blocks`). Operations before and after the scan keep their value numbers
(`prologue_epilogue`). The scan's results are

    partial   a carry that starts at zero and is added to; sums of 16-bit floats are carried in float32, since with
              b micro-batches a 16-bit running sum loses up to b/2 units in the last place
    local     the same with each summand divided by the number of micro-batches: a mean; of integers and random keys a
              carry that is overwritten: those of the last micro-batch
    inner     a carry that is overwritten: all are equal
    sliced    stacked, and joined along their dim after the scan
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import primitives

from alpa_lite import _jax
from alpa_lite.errors import MicrobatchError
from alpa_lite.graph import Atom, Block, Graph, Lit, Op, Value
from alpa_lite.passes.ir.loops import Carried, ScanView
from alpa_lite.passes.microbatches.blocks import Scope
from alpa_lite.passes.microbatches.building import Builder
from alpa_lite.passes.microbatches.cutting import check_independent_of_position
from alpa_lite.passes.microbatches.prologue_epilogue import PrologueEpilogue
from alpa_lite.passes.microbatches.states import INNER, LOCAL, PARTIAL, WHOLE, State, accumulator_dtype
from alpa_lite.passes.microbatches.step_states import StepStates


def emit(states: StepStates, *, strided: bool = False) -> tuple[Graph, int]:
    """The rewritten graph, and the index of its scan over micro-batches in the top block.

    Args:
      states: of the step.
      strided: micro-batches are of every m-th example.

    Raises:
      ValueError: if nothing that is live depends on the batch.
      PositionDependent: with `strided`, if the step tells examples apart by their position.
    """
    if strided:
        check_independent_of_position(states)
    builder = Builder(states, strided)
    around = PrologueEpilogue(builder)
    loop = _Loop(around)
    block = states.graph.block
    for op in block.ops:
        loop.emit(op)
    around.find_epilogue(loop.export)
    scan, post = loop.finish()
    outputs = tuple(map(loop.rename, block.outputs))
    ops = (*around.prologue(), scan, *post, *around.epilogue(loop.rename))
    graph = builder.finish(Block(block.inputs, ops, outputs))
    if scan.index not in builder.place:
        raise ValueError("nothing that the step returns depends on its batch")
    return graph, builder.place[scan.index]


class _Loop(Scope):
    """The body of the scan over micro-batches."""

    def __init__(self, around: PrologueEpilogue):
        super().__init__(around.builder)
        self.around = around
        self._exports: dict[int, State] = {}
        self._renames: dict[int, int] = {}

    def port(self, value: int, want: State) -> Atom | None:
        states = self.states
        if want == WHOLE:
            if self._is_source(value):
                return None
            return self.const_input(self.around.require(value))
        if want.kind == "sliced" and (states.is_outside(value) or states.state[value] == WHOLE):
            found = self._local_block(value, want) if states.state[value] == WHOLE else None
            return found if found is not None else self.scanned_input(self.around.blocks(value, want))
        return None

    def _is_source(self, value: int) -> bool:
        """Whether a value is made from nothing, so that it need not come in from outside."""
        if value not in self.states.producers:
            return False
        op, _ = self.states.producers[value]
        return not op.bodies and not op.has_effects and all(isinstance(a, Lit) for a in op.operands)

    def counters(self) -> int:
        return self.around.counters()

    # -- results --------------------------------------------------------------------------------------------------

    def export(self, value: int) -> None:
        """Makes the loop return a value."""
        self._exports[value] = self.builder.cuts.normalise(self.states.state[value])

    def rename(self, atom: Atom) -> Atom:
        """The name of a value after the loop."""
        return atom if isinstance(atom, Lit) else self._renames.get(atom, atom)

    def finish(self) -> tuple[Op, list[Op]]:
        """The scan, and the operations that make the exported values of its results."""
        post: list[Op] = []
        carries: list[tuple[int, Carried]] = []
        stacked: list[tuple[int, State, Atom, int]] = []  # value, its state, the body's output, the result
        for value, state in self._exports.items():
            if state.kind == "sliced" or (state == LOCAL and self.builder.parts == 1):
                inner = self.fetch(value, state)
                result = self.builder.shaped(value, (self.builder.parts, *self.builder.shape_of(inner)))
                stacked.append((value, state, inner, result))
            else:
                carries.append((value, self._carry(value, state)))
        params = {"length": self.builder.parts, "reverse": False, "unroll": 1}
        empty = Op(self.builder.index(), primitives.scan_p, params, (), (), (), self._scan_source(), None)
        ys = [(inner, result) for _, _, inner, result in stacked]
        scan = ScanView(empty).rebuilt(self.ops, self.consts, [carry for _, carry in carries], self.xs, ys)
        for value, carry in carries:
            result, dtype = carry.end, self.builder.values[value].dtype
            if self.builder.values[result].dtype != dtype:
                run = functools.partial(_convert, dtype=dtype)
                result = self.around.trace(run, [result], post, ("back", dtype))
            self._renames[value] = result
        for value, state, _, result in stacked:
            run = functools.partial(self._join, state=state)
            self._renames[value] = self.around.trace(run, [result], post, ("joined", state))
        return scan, post

    def _carry(self, value: int, state: State) -> Carried:
        """A carry for an exported value."""
        shape, dtype = self.builder.values[value].shape, self.builder.values[value].dtype
        wide = dtype if state == INNER else accumulator_dtype(dtype)
        zeros = "zeros", shape, wide
        init = self.around.trace(lambda: [lax.full(shape, 0, wide)], [], self.around.prepared, zeros)
        if state == LOCAL and dtype == np.bool_:
            raise MicrobatchError(
                f"num_microbatches={self.builder.parts}: a result is a truth value of the whole batch, which no "
                "micro-batch has; use num_microbatches=1"
            )
        like = Value(shape, wide, ShapedArray(shape, wide))
        start, end = self.builder.fresh(like), self.builder.fresh(like)
        if state == INNER or (state == LOCAL and not jnp.issubdtype(dtype, jnp.inexact)):
            return Carried(init, start, self.fetch(value, state), end)
        summand = self.fetch(value, PARTIAL)
        if wide != dtype:
            widened = "to", wide
            summand = self.trace(lambda x: [lax.convert_element_type(x, wide)], [summand], self._source(value), widened)
        total = self.trace(lambda a, x: [lax.add(a, x)], [start, summand], self._source(value), "add")
        return Carried(init, start, total, end)

    def _join(self, x: jax.Array, state: State) -> list[jax.Array]:
        return [self.builder.cuts.join(x, state)]

    def _scan_source(self) -> Any:
        """A source of its own, without a name stack: those of the operations inside are whole."""
        for op in (*self.ops, *self.around.block.ops):
            if op.source is not None:
                return op.source.replace(name_stack=_jax.empty_stack())
        raise ValueError("nothing that the step returns depends on its batch")


def _convert(x: jax.Array, dtype: Any) -> list[jax.Array]:
    return [lax.convert_element_type(x, dtype)]
