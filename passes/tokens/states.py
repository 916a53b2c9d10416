"""How every operation of a step is done one slice of the sequence after another.

The sequence is cut into slices of consecutive tokens. A value that has the sequence among its dims is held in *pieces*,
one for each slice. Its *rows* are the dim of the sequence; a matrix of attention has rows for queries and *columns* for
keys, and a piece of it has the columns that its rows can see. Index x of the rows belongs to token x + `offset`.

An operation that has the rows as a parallel factor does one slice at a time. Its other factors decide the rest:

    pieces   the result has the rows. A factor of columns is taken as far as the result needs it; one that is summed, as
             far as it is not known to add nothing (`beyond`): the keys and values of this slice and those before it.
    sum      the result has no sequence: a sum, or another reduction, of what each slice gives.
    spread   the rows are summed, and the columns are the result's rows: cotangents of keys and values, of which every
             slice gives its part to itself and to those before it.
    shift    a slice, padding or concatenation along the rows.
    running  cumulative along the rows: a slice goes on where the one before it ended.
    loop     a scan over the rows, whose carry passes from slice to slice.
    free     made of the batch alone, without a product: it is there from the start, whole, and is cut where it is used.
    whole    everything else. It waits for all slices of its operands, so it is always right, and where it stands
             between two layers, slices are of no use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from alpa_lite.graph import Atom, Block, Op, Value
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.tokens.beyond import Known
from alpa_lite.strategy import Rule

Kind = Literal["pieces", "sum", "spread", "shift", "running", "loop", "free", "whole"]


@dataclass(frozen=True)
class State:
    """Where a value has the sequence.

    Attributes:
      dim, size: of the rows; the dim is `outer` times the rows times `inner`, major to minor.
      offset: index x belongs to token x + offset.
      column, column_offset: of the columns of a matrix of attention; None if there are none.
      free: whether it is there from the start, whole.
    """

    dim: int
    size: int
    offset: int = 0
    outer: int = 1
    inner: int = 1
    column: int | None = None
    column_offset: int = 0
    free: bool = False


@dataclass(frozen=True)
class Way:
    """How an operation is done.

    Attributes:
      rows, column: the factors of the rows, and of the result's columns (of "spread": the result's rows).
      reason: of "whole" where an operand is in pieces: what stands in the way.
    """

    kind: Kind
    rows: int | None = None
    column: int | None = None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class States:
    """Where every value of a block has the sequence, and how every operation is done, by op index."""

    of: Mapping[int, State]
    ways: Mapping[int, Way]


SUMS = frozenset({"dot_general", "reduce_sum", "reduce_max", "reduce_min", "scatter-add"})
"""Reductions whose parts are joined by addition, or by their own operation."""

SHIFTS = frozenset({"slice", "pad", "concatenate", "split"})

_CHEAP = primitives.ELEMENTWISE | primitives.REARRANGED | primitives.CUMULATIVE | {"iota", "reduce_max", "reduce_min"}
_WHOLE = Way("whole")

ACROSS = "a loop that does not run along the sequence"
"""The reason of loops over layers and the like, which have to be written out to be cut (`unrolling`)."""


def states(
    block: Block,
    rules: Mapping[object, Rule],
    values: Sequence[Value],
    known: Known,
    forward: frozenset[int],
    sequence: Mapping[int, int],
) -> States:
    """States and ways.

    Args:
      rules: `Op.key` -> its rule.
      known: of `beyond`.
      forward: indices of the forward operations.
      sequence: inputs of the block that have the sequence -> its dim.
    """
    walk = _Walk(rules, values, forward, _orientation(block.ops, rules, known))
    walk.of = {value: State(dim, values[value].shape[dim], free=True) for value, dim in sequence.items()}
    for op in block.ops:
        walk.ways[op.index] = walk.visit(op)
    return States(walk.of, walk.ways)


def _orientation(ops: Sequence[Op], rules: Mapping[object, Rule], known: Known) -> dict[int, tuple[int, int]]:
    """Which dims of a value are rows and columns, where that is known of it or of what it becomes."""
    out = {value: (b[0].row, b[0].column) for value, b in known.items() if len(b) == 1}
    # A mask is also known the other way around (true, before the diagonal), so what is made of numbers decides.
    for value, some in known.items():
        chosen = [b for b in some if b.negative or b.value == 0]
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


class _Walk:
    """One pass over the operations in program order."""

    def __init__(
        self,
        rules: Mapping[object, Rule],
        values: Sequence[Value],
        forward: frozenset[int],
        orientation: Mapping[int, tuple[int, int]],
    ) -> None:
        self.rules, self.values, self.forward, self.orientation = rules, values, forward, orientation
        self.of: dict[int, State] = {}
        self.ways: dict[int, Way] = {}

    def visit(self, op: Op) -> Way:
        """The way of one operation; the states of its results are filled in."""
        given = [self.of.get(a) if isinstance(a, int) else None for a in op.operands]
        if not any(given):
            return _WHOLE
        if op.name in primitives.PAIRWISE:
            self.of.update((r, s) for r, s in zip(op.results, given, strict=True) if s is not None)
            return Way("pieces")
        if op.name == "scan":
            return self._scan(op, given)
        rule = self.rules.get(op.key)
        if rule is None or op.bodies:
            return Way("whole", reason=f"{op.name} is not cut")
        if all(s is None or s.free for s in given) and op.name in _CHEAP:
            self._label(op, rule, given)
            return Way("free")
        for attempt in (self._shift, self._running, self._factors):
            way = attempt(op, rule, given)
            if way is not None:
                return way
        return Way("whole", reason=f"{op.name} does not go slice by slice")

    # -- by factors -----------------------------------------------------------------------------------------------

    def _factors(self, op: Op, rule: Rule, given: Sequence[State | None]) -> Way | None:
        live = [s is not None and not s.free for s in given]
        if not any(live):  # of the batch: here the sequence begins to be cut
            live = [s is not None for s in given]
            given = [None if s is None else replace(s, offset=0, free=False) for s in given]
        rows: dict[int, list[State]] = {}
        columns: dict[int, int] = {}
        for dims, state, is_live in zip(rule.operands, given, live, strict=True):
            if state is None or not is_live:
                continue
            factor = row_factor(rule, dims, state)
            if factor is None or rule.factors[factor].kind in ("replicate", "special"):
                return None
            rows.setdefault(factor, []).append(state)
            if state.column is not None:
                at = dims[state.column]
                column = at[0] if len(at) == 1 else None
                if column is None or rule.factors[column].kind in ("replicate", "special"):
                    return None
                columns[column] = state.column_offset
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
        to = [f for f in columns if any(f in dim for dim in made)]
        for column in to:
            return self._spread(op, rule, factor, column, columns[column])
        return Way("sum", factor)

    def _spread(self, op: Op, rule: Rule, factor: int, column: int, offset: int) -> Way | None:
        state = self._made(rule, rule.results[0], column, offset)
        if op.name not in ("dot_general", "reduce_sum") or state is None or state.outer != 1:
            return None
        self.of[op.results[0]] = state
        return Way("spread", factor, column)

    def _pieces(
        self, op: Op, rule: Rule, factor: int, rows: Mapping[int, list[State]], columns: Mapping[int, int]
    ) -> Way | None:
        offset = self._joined(op, [s.offset for s in rows[factor]])
        others = {f: some[0].offset for f, some in rows.items() if f != factor} | dict(columns)
        found: Way | None = None
        made: list[tuple[int, State]] = []
        for value, dims in zip(op.results, rule.results, strict=True):
            state = self._made(rule, dims, factor, offset)
            if state is None:
                return None
            column = next((f for f in others if (f,) in dims), None)
            if column is not None:
                state = replace(state, column=dims.index((column,)), column_offset=others[column])
            elif any(f in dim for f in others for dim in dims):
                return None
            made.append((value, state))
            found = Way("pieces", factor, column)
        self.of.update(made)
        return found

    def _made(self, rule: Rule, dims: Sequence[Sequence[int]], factor: int, offset: int) -> State | None:
        """The state of a tensor whose rows are a factor."""
        for number, dim in enumerate(dims):
            if factor in dim:
                at = list(dim).index(factor)
                outer = inner = 1
                for f in dim[:at]:
                    outer *= rule.factors[f].size
                for f in dim[at + 1 :]:
                    inner *= rule.factors[f].size
                return State(number, rule.factors[factor].size, offset, outer, inner)
        return None

    def _joined(self, op: Op, offsets: Iterable[int]) -> int:
        """The offset of a result: of the last token that it needs going forward, of the first going backward."""
        return max(offsets) if op.index in self.forward else min(offsets)

    def _label(self, op: Op, rule: Rule, given: Sequence[State | None]) -> None:
        """Which dim of what is made of the batch is the sequence; the first operand that says so decides."""
        for dims, state in zip(rule.operands, given, strict=True):
            if state is None:
                continue
            factor = row_factor(rule, dims, state)
            for value, made in zip(op.results, rule.results, strict=True):
                found = None if factor is None else self._made(rule, made, factor, 0)
                if found is None and op.name in SHIFTS and len(made) == len(dims):
                    found = State(state.dim, self.values[value].shape[state.dim])
                if found is not None:
                    self.of[value] = replace(found, free=True)
            return

    # -- along the rows -------------------------------------------------------------------------------------------

    def _shift(self, op: Op, rule: Rule, given: Sequence[State | None]) -> Way | None:
        """`slice`, `pad` and `concatenate` that change the rows."""
        del rule
        if op.name not in SHIFTS:
            return None
        state = next(s for s in given if s is not None and not s.free)
        if not _shifts(op, state):
            return None
        if (state.outer, state.inner) != (1, 1):
            return None
        offset = shift_of(op, state.dim, [_size(a, self.values, state.dim) for a in op.operands])
        if offset is None:
            return None
        alive = [(s, o) for s, o in zip(given, offset, strict=False) if s is not None and not s.free]
        if any((s.dim, s.outer, s.column) != (state.dim, 1, state.column) for s, _ in alive):
            return None
        if any(s is not None and s.column is not None for s in given) and op.name == "concatenate":
            return None
        joined = self._joined(op, [s.offset - o for s, o in alive])
        at = 0
        for value in op.results:  # of "split" several
            size = self.values[value].shape[state.dim]
            self.of[value] = replace(state, size=size, offset=joined + at)
            at += size
        return Way("shift")

    def _running(self, op: Op, rule: Rule, given: Sequence[State | None]) -> Way | None:
        del rule
        (state, *_) = given
        if op.name not in primitives.CUMULATIVE or state is None or state.free:
            return None
        if op.params["axis"] != state.dim or (state.outer, state.inner) != (1, 1) or state.column is not None:
            return None
        self.of[op.results[0]] = state
        return Way("running")

    def _scan(self, op: Op, given: Sequence[State | None]) -> Way:
        """A scan whose stacked operands have the sequence along the dim that it runs over."""
        view = ScanView(op)
        parts = view.taken(given)
        xs = [s for s in parts.xs if s is not None]
        live = [s for s in given if s is not None and not s.free]
        along = all((s.dim, s.outer, s.inner, s.column) == (0, 1, 1, None) for s in xs)
        if not xs or not along or any(s is not None for s in (*parts.consts, *parts.carry) if s and not s.free):
            return Way("whole", reason=ACROSS if live else "")
        offset = self._joined(op, [s.offset for s in live]) if live else 0
        for value in view.given(op.results).ys:
            self.of[value] = State(0, view.length, offset)
        return Way("loop")


def row_factor(rule: Rule, dims: Sequence[Sequence[int]], state: State) -> int | None:
    """The factor of a tensor's rows; None if the rule does not have them as one."""
    outer = 1
    for factor in dims[state.dim]:
        if outer == state.outer and rule.factors[factor].size == state.size:
            return factor
        outer *= rule.factors[factor].size
    return None


def shift_of(op: Op, dim: int, sizes: Sequence[int]) -> list[int] | None:
    """For each operand, by how much an index of the result is greater than its own; None for strides and the like.

    Args:
      sizes: of the operands along `dim`.
    """
    if op.name == "slice":
        strides = op.params["strides"]
        return None if strides is not None and strides[dim] != 1 else [-op.params["start_indices"][dim]]
    if op.name == "split":
        return [0]
    if op.name == "pad":
        low, high, interior = op.params["padding_config"][dim]
        del high
        return None if interior else [low]
    if op.params["dimension"] != dim:
        return None
    return [sum(sizes[:k]) for k in range(len(sizes))]


def _shifts(op: Op, state: State) -> bool:
    """Whether a slice, padding or concatenation changes the rows."""
    if op.name in ("concatenate", "split"):
        return op.params["dimension" if op.name == "concatenate" else "axis"] == state.dim
    if op.name == "pad":
        return tuple(op.params["padding_config"][state.dim]) != (0, 0, 0)
    size = state.outer * state.size * state.inner
    return (op.params["start_indices"][state.dim], op.params["limit_indices"][state.dim]) != (0, size)


def _size(atom: Atom, values: Sequence[Value], dim: int) -> int:
    shape = values[atom].shape if isinstance(atom, int) else tuple(atom.aval.shape)
    return shape[dim] if dim < len(shape) else 1
