"""How every operation of a step is done one slice of the sequence after another.

The sequence is cut into slices of consecutive tokens. A value that has the sequence among its dims is held in *pieces*,
one for each slice. Its *rows* are the dim of the sequence; a matrix of attention has rows for queries and *columns* for
keys, and a piece of it has the columns that its rows can see. Index x of the rows belongs to token stride * x + offset;
what that says decides when a piece is made, and not what it holds.

An operation that has the rows as a parallel factor does one slice at a time. Its other factors decide the rest:

    pieces   the result has the rows. A factor of columns is taken as far as the result needs it; one that is summed, as
             far as it is not known to add nothing (`beyond`): the keys and values of this slice and those before it.
    sum      the result has no sequence: a sum, or another reduction, of what each slice gives.
    spread   the rows are summed, and the columns are the result's rows: cotangents of keys and values, of which every
             slice gives its part to itself and to those before it.
    shift    a slice, padding or concatenation along the rows, every second one perhaps (`lax.associative_scan`).
    window   a convolution along the rows, or the gradient of its kernel (`windows`).
    running  cumulative along the rows: a slice goes on where the one before it ended.
    loop     a scan over the rows, whose carry passes from slice to slice.
    free     made of the batch alone, without a product: it is there from the start, whole, and is cut where it is used.
    whole    everything else. It waits for all slices of its operands, so it is always right, and where it stands
             between two layers, slices are of no use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Op, Value
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import shape_of
from alpa_lite.passes.tokens.beyond import Known
from alpa_lite.passes.tokens.windows import SHIFTS, Move, Window, shift_of, window

Kind = Literal["pieces", "sum", "spread", "shift", "window", "running", "loop", "free", "whole"]


@dataclass(frozen=True)
class State:
    """Where a value has the sequence.

    Attributes:
      dim, size: of the rows; the dim is `outer` times the rows times `inner`, major to minor.
      offset, stride: index x belongs to token stride * x + offset.
      column, column_offset: of the columns of a matrix of attention; None if there are none.
      is_free: whether it is there from the start, whole.
    """

    dim: int
    size: int
    offset: int = 0
    outer: int = 1
    inner: int = 1
    column: int | None = None
    column_offset: int = 0
    is_free: bool = False
    stride: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the dim is the rows, one token after another, and there are no columns."""
        return (self.outer, self.inner, self.stride, self.column) == (1, 1, 1, None)


@dataclass(frozen=True)
class Role:
    """How an operation is done.

    Attributes:
      rows, column: the factors of the rows, and of the result's columns (of "spread": the result's rows); a single row
        has none.
      columns: the factors of the columns of operands.
      moves: of "shift": the rows of each operand in the result. window: of "window".
      reason: of "whole" where an operand is in pieces: what stands in the way.
    """

    kind: Kind
    rows: int | None = None
    column: int | None = None
    columns: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()
    window: Window | None = None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Body:
    """A block that is cut along the sequence, with facts of its operations.

    Attributes:
      rules: `Op.key` -> its rule.
      values: of the graph.
      known: of `beyond`.
      forward: indices of the forward operations. free_ops: of those that need no activation.
    """

    block: Block
    rules: Mapping[object, Rule]
    values: Sequence[Value]
    known: Known
    forward: frozenset[int]
    free_ops: frozenset[int] = frozenset()

    @cached_property
    def recomputed_ops(self) -> frozenset[int]:
        """The backward operations that compute the forward pass again: they read no cotangent."""
        of_cotangents: set[int] = set()
        again = set()
        for op in self.block.ops:
            if op.index in self.forward:
                continue
            if _jax.is_computed_again(op.source) and of_cotangents.isdisjoint(op.operands):
                again.add(op.index)
            else:
                of_cotangents.update(op.results)
        return frozenset(again)


SUMS = frozenset({"dot_general", "reduce_sum", "reduce_max", "reduce_min", "scatter-add"})
"""Reductions whose parts are joined by addition, or by their own operation."""

_CHEAP = primitives.ELEMENTWISE | primitives.REARRANGED | primitives.CUMULATIVE | {"iota", "reduce_max", "reduce_min"}
_WHOLE = Role("whole")

ACROSS = "a loop that does not run along the sequence"
"""The reason of loops over layers and the like, which have to be written out to be cut (`opening`)."""


def _orientation(ops: Sequence[Op], rules: Mapping[object, Rule], known: Known) -> dict[int, tuple[int, int]]:
    """Returns the dims of rows and columns of values, where known of a value or of a result that it leads to."""
    out = {value: (b[0].row, b[0].column) for value, b in known.items() if len(b) == 1}
    # A mask is also known the other way around (true, before the diagonal), so what is made of numbers decides.
    for value, some in known.items():
        chosen = [b for b in some if b.is_negative_infinity or b.value == 0]
        if len(chosen) == 1:
            out[value] = (chosen[0].row, chosen[0].column)
    for op in reversed(ops):
        rule = rules.get(op.key)
        if rule is None or not op.results or op.results[0] not in out:
            continue
        pair = [rule.results[0][dim] for dim in out[op.results[0]]]
        for atom, dims in zip(op.operands, rule.operands, strict=True):
            if isinstance(atom, int) and atom not in out and all(f in dims and f for f in pair):
                out[atom] = (dims.index(pair[0]), dims.index(pair[1]))
    return out


_Given = Sequence[State | None]
"""The states of operands; None for those that do not have the sequence."""

_Live = Sequence[tuple[Atom, State]]
"""The operands that have the sequence and are not there from the start."""


class States:
    """Where every value of a block has the sequence, and how every operation is done: one pass in program order.

    Attributes:
      by_atom: the states of values that have the sequence.
      roles: of operations, by index.
    """

    def __init__(self, body: Body, sequence: Mapping[int, int]) -> None:
        """`sequence`: inputs of the block that have the sequence -> its dim."""
        self.rules, self.values, self.early = body.rules, body.values, body.forward | body.recomputed_ops
        self.orientation = _orientation(body.block.ops, body.rules, body.known)
        self.by_atom: dict[Atom, State] = {
            value: State(dim, body.values[value].shape[dim], is_free=True) for value, dim in sequence.items()
        }
        self.roles: dict[int, Role] = {}
        self.cotangents: set[int] = set()  # what nothing makes before the backward pass of its slice
        for op in body.block.ops:
            self.roles[op.index] = self._visit(op)

    def _visit(self, op: Op) -> Role:
        """Returns the role of one operation; the states of its results are filled in."""
        given = list(map(self.by_atom.get, op.operands))
        if not any(given):
            return _WHOLE
        if op.name in primitives.PAIRWISE:  # before the loop; within, `opening` has removed them
            self.by_atom.update((r, s) for r, s in zip(op.results, given, strict=True) if s is not None)
            return _WHOLE
        if op.index not in self.early:
            self.cotangents.update(op.results)
        live = [(a, s) for a, s in zip(op.operands, given, strict=True) if s is not None and not s.is_free]
        if op.name == "scan":
            return self._scan(op, given, live)
        rule = self.rules.get(op.key)
        if rule is None or op.bodies:
            return Role("whole", reason=f"{op.name} is not cut")
        if not live and op.name in _CHEAP:
            self._label(op, rule, given)
            return Role("free")
        found = None
        if live and op.name in SHIFTS:
            found = self._shift(op, given, live)
        elif op.name == "conv_general_dilated":
            found = self._window(op, given, live)
        elif op.name in primitives.CUMULATIVE:
            found = self._running(op, given)
        elif live and op.name in primitives.ELEMENTWISE:
            found = self._single(op, live)
        return found or self._factors(op, rule, given) or Role("whole", reason=f"{op.name} does not go slice by slice")

    # -- by factors -----------------------------------------------------------------------------------------------

    def _factors(self, op: Op, rule: Rule, given: _Given) -> Role | None:
        if all(s is None or s.is_free for s in given):  # of the batch: here the sequence begins to be cut
            given = [None if s is None else replace(s, offset=0, is_free=False, stride=1) for s in given]
        rows: dict[int, list[tuple[Atom, State]]] = {}
        columns: dict[int, int] = {}
        for atom, dims, state in zip(op.operands, rule.operands, given, strict=True):
            if state is None or state.is_free:
                continue
            factor, column = row_factor(rule, dims, state), None
            if state.column is not None:
                (column,) = dims[state.column] if len(dims[state.column]) == 1 else (None,)
                if column is None:
                    return None
                columns[column] = state.column_offset
            if factor is None or any(rule.factors[f].kind in ("replicate", "special") for f in (factor, *columns)):
                return None
            rows.setdefault(factor, []).append((atom, state))
        made = rule.results[0]
        here = [f for f in rows if any(f in dim for dim in made)]
        if len(here) == 2 and op.results[0] in self.orientation:
            first = made[self.orientation[op.results[0]][0]]
            here.sort(key=lambda f: (f,) != first)
        if here:
            return self._pieces(op, rule, here[0], rows, columns)
        if len(rows) != 1 or op.name not in SUMS:
            return None
        (factor,) = rows
        for column, offset in columns.items():
            if any(column in dim for dim in made):
                state = self._made(rule, made, column, offset)
                if op.name not in ("dot_general", "reduce_sum") or state is None or state.outer != 1:
                    return None
                self.by_atom[op.results[0]] = state
                return Role("spread", factor, column, tuple(columns))
        return Role("sum", factor, None, tuple(columns))

    def _pieces(
        self, op: Op, rule: Rule, factor: int, rows: Mapping[int, list[tuple[Atom, State]]], columns: Mapping[int, int]
    ) -> Role | None:
        others = {f: some[0][1].offset for f, some in rows.items() if f != factor} | dict(columns)
        if others and any(s.stride != 1 for some in rows.values() for _, s in some):
            return None
        offset, stride = self._joined(op, [(a, s.offset, s.stride) for a, s in rows[factor]])
        made: list[tuple[int, State]] = []
        column: int | None = None
        for value, dims in zip(op.results, rule.results, strict=True):
            state = self._made(rule, dims, factor, offset)
            if state is None:
                return None
            state = replace(state, stride=stride)
            column = next((f for f in others if (f,) in dims), None)
            if column is not None:
                state = replace(state, column=dims.index((column,)), column_offset=others[column])
            elif any(f in dim for f in others for dim in dims):
                return None
            made.append((value, state))
        self.by_atom.update(made)
        return Role("pieces", factor, column, tuple(columns))

    def _made(self, rule: Rule, dims: Sequence[Sequence[int]], factor: int, offset: int) -> State | None:
        """Returns the state of a tensor whose rows are a factor."""
        for number, dim in enumerate(dims):
            if factor in dim:
                sizes = [rule.factors[f].size for f in dim]
                at = list(dim).index(factor)
                return State(number, sizes[at], offset, math.prod(sizes[:at]), math.prod(sizes[at + 1 :]))
        return None

    def _joined(self, op: Op, tokens: Sequence[tuple[Atom, int, int]]) -> tuple[int, int]:
        """The offset and stride of a result, given (operand, offset, stride): those of the last that it waits for.

        Going backward the first tokens come last, and what the forward pass has made is there.
        """
        going = [(o, s) for atom, o, s in tokens if atom in self.cotangents]
        choose = min if going and op.index not in self.early else max
        pairs = going if choose is min else [(o, s) for _, o, s in tokens]
        stride = choose(stride for _, stride in pairs)
        return choose(offset for offset, own in pairs if own == stride), stride

    def _label(self, op: Op, rule: Rule, given: _Given) -> None:
        """Labels the sequence dim of results made of the batch; the first operand with a label decides."""
        dims, state = next((dims, s) for dims, s in zip(rule.operands, given, strict=True) if s is not None)
        factor = row_factor(rule, dims, state)
        for value, made in zip(op.results, rule.results, strict=True):
            found = None if factor is None else self._made(rule, made, factor, 0)
            if found is None and op.name in SHIFTS and len(made) == len(dims):
                found = State(state.dim, self.values[value].shape[state.dim])
            if found is not None:
                self.by_atom[value] = replace(found, is_free=True)

    # -- along the rows -------------------------------------------------------------------------------------------

    def _shift(self, op: Op, given: _Given, live: _Live) -> Role | None:
        """`slice`, `pad` and `concatenate` that change the rows."""
        state = live[0][1]
        moves = shift_of(op, state.dim, [shape_of(a, self.values) for a in op.operands])
        if not moves or (state.outer, state.inner) != (1, 1):
            return None
        every = zip(op.operands, given, moves, strict=False)
        alive = [(a, s, move) for a, s, move in every if s is not None and not s.is_free]
        if any((s.dim, s.outer, s.column) != (state.dim, 1, state.column) for _, s, _ in alive):
            return None
        if op.name == "concatenate" and any(s is not None and s.column is not None for s in given):
            return None
        if state.column is not None and any((m.stride, m.target_stride) != (1, 1) for _, _, m in alive):
            return None
        several = [one for one in alive if one[1].size > 1]  # of a single row, the stride says nothing
        stride = max(s.stride * move.stride for _, s, move in several or alive)
        apart = alive[0][2].target_stride
        if stride % apart:
            return None
        stride //= apart
        tokens = [(a, s.offset + s.stride * move.start - stride * move.target, stride) for a, s, move in alive]
        joined, _ = self._joined(op, tokens)
        at = 0
        for value in op.results:  # of "split" several
            size = self.values[value].shape[state.dim]
            self.by_atom[value] = replace(state, size=size, offset=joined + stride * at, stride=stride)
            at += size
        return Role("shift", moves=moves)

    def _single(self, op: Op, live: _Live) -> Role | None:
        """Returns an elementwise operation on at most one row, which no factor stands for."""
        state = live[0][1]
        if any(s.size > 1 or (s.dim, s.size, s.column) != (state.dim, state.size, None) for _, s in live):
            return None
        if any(self.values[v].shape[state.dim] != state.size for v in op.results):
            return None
        offset, _ = self._joined(op, [(a, s.offset, 1) for a, s in live])
        stride = max(s.stride for _, s in live)
        self.by_atom.update((v, replace(state, offset=offset, stride=stride)) for v in op.results)
        return Role("pieces")

    def _window(self, op: Op, given: _Given, live: _Live) -> Role | None:
        """Returns a convolution along the rows."""
        state, kernel = given
        if state is None or not all(s.is_plain for _, s in live):
            return None
        shapes = [shape_of(a, self.values) for a in (op.operands[1], op.results[0])]
        found = window(op, state.dim, *shapes, summed=kernel is not None)
        if found is None or (kernel is not None and (kernel.is_free or kernel.dim != found.kernel_dim)):
            return None
        if kernel is None:
            last = op.index in self.early or op.operands[0] not in self.cotangents
            offset = state.offset - found.move.target + (found.move.reach if last else 0)
            self.by_atom[op.results[0]] = State(found.out_dim, shapes[1][found.out_dim], offset)
        return Role("window", window=found)

    def _running(self, op: Op, given: _Given) -> Role | None:
        (state, *_) = given
        if state is None or state.is_free or op.params["axis"] != state.dim or not state.is_plain:
            return None
        self.by_atom[op.results[0]] = state
        return Role("running")

    def _scan(self, op: Op, given: _Given, live: _Live) -> Role:
        """Returns a scan whose stacked operands have the sequence along the dim that it runs over."""
        view = ScanView(op)
        parts = view.split_operands(given)
        xs = [s for s in parts.xs if s is not None]
        is_along = bool(xs) and all(s.dim == 0 and s.is_plain for s in xs)
        if not is_along or any(s is not None and not s.is_free for s in (*parts.consts, *parts.carry)):
            return Role("whole", reason=ACROSS if live else "")
        offset, _ = self._joined(op, [(a, s.offset, 1) for a, s in live]) if live else (0, 1)
        for value in view.split_results(op.results).ys:
            self.by_atom[value] = State(0, view.length, offset)
        return Role("loop")


def row_factor(rule: Rule, dims: Sequence[Sequence[int]], state: State) -> int | None:
    """Returns the factor of a tensor's rows; None if the rule does not have them as one."""
    outer = 1
    for factor in dims[state.dim]:
        if outer == state.outer and rule.factors[factor].size == state.size:
            return factor
        outer *= rule.factors[factor].size
    return None
