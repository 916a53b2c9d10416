"""Pieces of values while a step in slices is written, with their cuts and joins, and the phases.

An operation that is written belongs to the phase and the operation that are set (`_now`, `_owner`), or to the latest
phase of its operands. A cut or a join is made once for each phase: values that one phase makes and another one reads
would have to be kept between them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite import _jax
from alpa_lite.graph import Atom, Graph, Lit, Op
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_atom
from alpa_lite.passes.tokens.extents import Extents, Range
from alpa_lite.passes.tokens.states import State, States
from alpa_lite.passes.tracing import conversion


class Pieces:
    """The operations that are written, and the pieces of their values.

    Attributes:
      pieces: value -> the atom of each of its pieces; None where a slice has none of its rows.
      whole: value -> the atom of all of it.
      phase: value -> the phase that makes it.
      ops: with their phases, in an order in which they can run. owner: op index -> `_owner` when it was written.
    """

    def __init__(self, rewriter: Rewriter, found: States, extents: Extents, inputs: Sequence[int]) -> None:
        self.rw, self.found, self.extents, self.slices = rewriter, found, extents, extents.slices
        self.pieces: dict[int, list[Atom | None]] = {}
        self.whole: dict[int, Atom] = {value: value for value in inputs}
        self.phase: dict[int, int] = {}
        self.ops: list[tuple[int, Op]] = []
        self.owner: dict[int, int] = {}
        self._memo: dict[Hashable, Atom] = {}
        self._traces: dict[Hashable, Graph] = {}
        self._source: Any = None
        self._now = 0
        self._owner = -1

    def _add(self, op: Op) -> None:
        phase = max([self._now, *(self.phase.get(v, 0) for v in values_in(op.operands))])
        self.ops.append((phase, op))
        self.owner[op.index] = self._owner
        self.phase.update(dict.fromkeys(op.results, phase))

    def _made(self, run: Callable[..., Any], operands: Sequence[Atom], kind: Hashable) -> Atom:
        """The result of a small function of arrays, in operations of its own."""
        specs = [_jax.spec_of(self._aval(a)) for a in operands]
        key = (kind, *((s.shape, s.dtype, s.weak_type) for s in specs))
        graph = self._traces.get(key)
        if graph is None:
            jaxpr = jax.make_jaxpr(run)(*specs)
            graph = self._traces[key] = conversion.graph_of(jaxpr, self.rw.keys, fold_empty=False)
        env: dict[int, Atom] = dict(zip(graph.block.inputs, operands, strict=True))
        for op in graph.block.ops:
            results = [self.rw.fresh(graph.values[v]) for v in op.results]
            made = self.rw.moved(op, [renamed_atom(a, env) for a in op.operands], results, values=graph.values)
            self._add(replace(made, key=op.key, source=self._source))
            env.update(zip(op.results, results, strict=True))
        return renamed_atom(graph.block.outputs[0], env)

    def _aval(self, atom: Atom) -> Any:
        return atom.aval if isinstance(atom, Lit) else self.rw.values[atom].aval

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return tuple(atom.aval.shape) if isinstance(atom, Lit) else self.rw.values[atom].shape

    # -- fetching -------------------------------------------------------------------------------------------------

    def _cut(self, atom: Atom, dim: int, rows: Range, outer: int = 1, inner: int = 1) -> Atom:
        """Some rows of an array along a dim of outer times rows times inner."""
        shape = self._shape(atom)
        size = shape[dim] // (outer * inner)
        if rows == (0, size) or isinstance(atom, Lit):
            return atom

        def run(x: jax.Array) -> jax.Array:
            if outer == 1:
                return lax.slice_in_dim(x, rows[0] * inner, rows[1] * inner, axis=dim)
            apart = x.reshape(*shape[:dim], outer, size, inner, *shape[dim + 1 :])
            apart = lax.slice_in_dim(apart, *rows, axis=dim + 1)
            return apart.reshape(*shape[:dim], -1, *shape[dim + 1 :])

        key = ("cut", self._now, atom, dim, rows, outer, inner)
        if key not in self._memo:
            self._memo[key] = self._made(run, [atom], ("cut", dim, rows, outer, inner))
        return self._memo[key]

    def _fetch(self, atom: Atom, rows: Range | None = None, columns: int | None = None) -> Atom:
        """Some rows and the first columns of a value in pieces, joined; of another one, all of it."""
        state = self.found.of.get(atom) if isinstance(atom, int) else None
        if isinstance(atom, Lit) or atom in self.whole or state is None:
            return atom if isinstance(atom, Lit) else self.whole[atom]
        rows = (0, state.size) if rows is None else rows
        key = ("fetch", self._now, atom, rows, columns)
        if key in self._memo:
            return self._memo[key]
        parts: list[Atom] = []
        for piece, own in self.extents.over(state, rows):
            held = self.pieces[atom][piece]
            assert held is not None
            part = self._cut(held, state.dim, own, state.outer, state.inner)
            if state.column is not None:
                width = self.rw.values[atom].shape[state.column] if columns is None else columns
                part = self._of_width(atom, part, state.column, width)
            parts.append(part)
        self._memo[key] = parts[0] if len(parts) == 1 else self._join(parts, state)
        return self._memo[key]

    def _of_width(self, value: int, part: Atom, column: int, width: int) -> Atom:
        """The first columns of some rows, with the number that is known to be behind those that were made."""
        made = self._shape(part)[column]
        if width <= made:
            return self._cut(part, column, (0, width))
        holds = self.extents.behind(value)
        assert holds is not None, "columns that somebody reads are made, or known"
        number = holds.value

        def run(x: jax.Array) -> jax.Array:
            config = [(0, 0, 0)] * x.ndim
            config[column] = (0, width - made, 0)
            return lax.pad(x, jnp.asarray(number, x.dtype), config)

        return self._made(run, [part], ("behind", column, width, number))

    def _join(self, parts: Sequence[Atom], state: State) -> Atom:
        dim, outer = state.dim, state.outer

        def run(*arrays: jax.Array) -> jax.Array:
            if outer == 1:
                return jnp.concatenate(arrays, dim)
            apart = [x.reshape(*x.shape[:dim], outer, -1, *x.shape[dim + 1 :]) for x in arrays]
            joined = jnp.concatenate(apart, dim + 1)
            return joined.reshape(*joined.shape[:dim], -1, *joined.shape[dim + 2 :])

        return self._made(run, parts, ("join", dim, outer))
