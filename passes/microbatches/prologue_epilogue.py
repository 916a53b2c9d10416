"""The operations of the top block before and after the loop over micro-batches, under their own value numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax import lax

from alpa_lite.graph import Atom, Lit, Op
from alpa_lite.passes.ir.flow import reach, values_in
from alpa_lite.passes.microbatches.building import Builder, Traceable
from alpa_lite.passes.microbatches.states import AFTER, WHOLE, State


class PrologueEpilogue:
    """The operations before and after the loop. Those before it become known while the loop is built."""

    def __init__(self, builder: Builder):
        self.builder, self.states = builder, builder.states
        self.block = builder.graph.block
        self.prepared: list[Op] = []
        self._early: set[int] = set()  # values that are computed before the loop
        self._late: set[int] = set()  # and after it, unless they are early
        self._effects: set[int] = set()  # operations after the loop, by index
        self._blocks: dict[tuple[int, State], int] = {}

    # -- before ---------------------------------------------------------------------------------------------------

    def require(self, value: int) -> int:
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

    def blocks(self, value: int, state: State) -> int:
        """The value with its micro-batches, in a sliced state, stacked along a new leading dim."""
        key = (value, state)
        if key not in self._blocks:
            cuts = self.builder.cuts
            self._blocks[key] = self.trace(
                lambda x: [cuts.cut(x, state)], [self.require(value)], self.prepared, ("cut", state)
            )
        return self._blocks[key]

    def counters(self) -> int:
        """The numbers of the micro-batches: int32, one each."""
        return self.trace(lambda: [lax.iota(np.int32, self.builder.parts)], [], self.prepared)

    def trace(self, run: Traceable, operands: Sequence[Atom], ops: list[Op], kind: Hashable = None) -> Any:
        """The one result of some operations outside of the loop; `kind` as for `Builder.append_ops`."""
        (found,) = self.builder.append_ops(run, operands, ops, kind=kind)
        return found

    def prologue(self) -> list[Op]:
        """The operations before the loop."""
        own = [part for op in self.block.ops if (part := self._part(op, self._early)) is not None]
        return [*own, *self.prepared]

    def _part(self, op: Op, wanted: set[int]) -> Op | None:
        """An operation that makes wanted values; of a barrier only the part that makes them."""
        if wanted.isdisjoint(op.results):
            return None
        kept = [i for i, value in enumerate(op.results) if value in wanted]
        if op.name != "optimization_barrier" or len(kept) == len(op.results):
            return op
        return replace(
            op, operands=tuple(op.operands[i] for i in kept), results=tuple(op.results[i] for i in kept), key=None
        )

    # -- after ----------------------------------------------------------------------------------------------------

    def find_epilogue(self, export: Callable[[int], None]) -> None:
        """Finds the operations after the loop; calls `export` for each value that the loop must return for them."""
        states = self.states

        def read(atom: Atom) -> None:
            if isinstance(atom, Lit) or states.state[atom] == AFTER:
                return
            if states.state[atom] == WHOLE or states.is_outside(atom):
                self._mark(atom, self._late)
            else:
                export(atom)

        for op in self.block.ops:
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
        for atom in self.block.outputs:
            read(atom)

    def epilogue(self, rename: Callable[[Atom], Atom]) -> list[Op]:
        """The operations after the loop; `rename` gives the name of a value there."""
        out = []
        wanted = self._late - self._early
        for op in self.block.ops:
            if op.name != "optimization_barrier" and not self._early.isdisjoint(op.results):
                continue  # before the loop, with all of its results
            part = self._part(op, wanted)
            if part is None and op.index in self._effects and not op.results:
                part = op
            if part is not None:
                operands = tuple(map(rename, part.operands))
                out.append(part if operands == part.operands else replace(part, operands=operands))
        return out
