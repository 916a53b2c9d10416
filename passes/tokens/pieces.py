"""Pieces of values while a step in slices is written, with their cuts and joins, and the phases.

An operation that is written belongs to the phase and the operation that are set (`_now`, `_owner`), or to the latest
phase of its operands. A cut or a join is made once for each phase: values that one phase makes and another one reads
would have to be kept between them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Graph, Lit, Op
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.inlining import inlined, shape_of
from alpa_lite.passes.ir.rewriting import Rewriter
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
        self.pieces: dict[int, list[Atom | None]] = defaultdict(lambda: [None] * extents.slices)
        self.whole: dict[int, Atom] = {value: value for value in inputs}
        self.phase: dict[int, int] = {}
        self.ops: list[tuple[int, Op]] = []
        self.owner: dict[int, int] = {}
        self._memo: dict[Hashable, Atom] = {}
        self._graphs: dict[Hashable, Graph] = {}
        self._source: Any = None
        self._now = 0
        self._owner = -1

    def _add(self, op: Op) -> None:
        phase = max([self._now, *(self.phase.get(v, 0) for v in values_in(op.operands))])
        self.ops.append((phase, op))
        self.owner[op.index] = self._owner
        self.phase.update(dict.fromkeys(op.results, phase))

    def _again(
        self, op: Op, operands: Sequence[Atom], results: Sequence[int], params: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Writes an operation on other operands, with other parameters perhaps; its results."""
        self._add(self.rw.moved(op, operands, results, params))
        return list(results)

    def _made(self, function: Callable[..., Any], operands: Sequence[Atom], *static: Hashable, **named: Any) -> Atom:
        """The result of `function(*static, *operands, **named)`, in operations of its own."""
        specs = [_jax.spec_of(a.aval if isinstance(a, Lit) else self.rw.values[a].aval) for a in operands]
        key = (function, static, *named.items(), *((s.shape, s.dtype, s.weak_type) for s in specs))
        if key not in self._graphs:
            jaxpr = jax.make_jaxpr(functools.partial(function, *static, **named))(*specs)
            self._graphs[key] = conversion.graph_of(jaxpr, self.rw.keys, fold_empty=False)
        graph = self._graphs[key]
        ops, (result,) = inlined(self.rw, graph, dict(zip(graph.block.inputs, operands, strict=True)), self._source)
        for op in ops:
            self._add(op)
        return result

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return shape_of(atom, self.rw.values)

    # -- fetching -------------------------------------------------------------------------------------------------

    def _cut(self, atom: Atom, dim: int, rows: Range, outer: int = 1, inner: int = 1) -> Atom:
        """Some rows of an array along a dim of outer times rows times inner."""
        if isinstance(atom, Lit) or rows == (0, self._shape(atom)[dim] // (outer * inner)):
            return atom
        key = ("cut", self._now, atom, dim, rows, outer, inner)
        if key not in self._memo:
            self._memo[key] = self._made(_rows_of, [atom], dim, rows, outer, inner)
        return self._memo[key]

    def _fetch(self, atom: Atom, rows: Range | None = None, columns: int | None = None) -> Atom:
        """Some rows and the first columns of a value in pieces, joined; of another one, all of it."""
        state = self.found.of.get(atom)
        if isinstance(atom, Lit) or atom in self.whole or state is None:
            return atom if isinstance(atom, Lit) else self.whole[atom]
        rows = (0, state.size) if rows is None else rows
        key = ("fetch", self._now, atom, rows, columns)
        if key not in self._memo:
            parts: list[Atom] = []
            for piece, own in self.extents.over(state, rows):
                held = self.pieces[atom][piece]
                assert held is not None
                part = self._cut(held, state.dim, own, state.outer, state.inner)
                if state.column is not None:
                    width = self.rw.values[atom].shape[state.column] if columns is None else columns
                    part = self._of_width(atom, part, state.column, width)
                parts.append(part)
            self._memo[key] = self._join(parts, state)
        return self._memo[key]

    def _of_width(self, value: int, part: Atom, column: int, width: int) -> Atom:
        """The first columns of some rows, with the number that is known to be behind those that were made."""
        made = self._shape(part)[column]
        if width <= made:
            return self._cut(part, column, (0, width))
        holds = self.extents.behind(value)
        assert holds is not None, "columns that somebody reads are made, or known"
        return self._made(padded, [part], column, 0, width - made, holds.value)

    def _join(self, parts: Sequence[Atom], state: State) -> Atom:
        return parts[0] if len(parts) == 1 else self._made(_joined, parts, state.dim, state.outer)


def _rows_of(dim: int, rows: Range, outer: int, inner: int, x: jax.Array) -> jax.Array:
    if outer == 1:
        return lax.slice_in_dim(x, rows[0] * inner, rows[1] * inner, axis=dim)
    before, behind = x.shape[:dim], x.shape[dim + 1 :]
    apart = lax.slice_in_dim(x.reshape(*before, outer, -1, inner, *behind), *rows, axis=dim + 1)
    return apart.reshape(*before, -1, *behind)


def padded(dim: int, low: int, high: int, number: float, x: jax.Array) -> jax.Array:
    """An array with a number before and behind its rows."""
    config = [(low, high, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
    return lax.pad(x, jnp.asarray(number, x.dtype), config)


def _joined(dim: int, outer: int, *arrays: jax.Array) -> jax.Array:
    if outer == 1:
        return jnp.concatenate(arrays, dim)
    apart = [x.reshape(*x.shape[:dim], outer, -1, *x.shape[dim + 1 :]) for x in arrays]
    joined = jnp.concatenate(apart, dim + 1)
    return joined.reshape(*joined.shape[:dim], -1, *joined.shape[dim + 2 :])
