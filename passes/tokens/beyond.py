"""Static knowledge of a matrix of attention: that a token does not see those behind it.

A causal mask is false wherever the column (the key) is behind the row (the query). From there the knowledge follows
the operations: values selected by the mask are minus infinity there, or a number that stands for it; their exponential,
less the maximum of its row, is zero; so are products with it, the cotangents of the backward pass among them. A sum
over columns, or a product that sums over them, then needs none of these columns, and a maximum neither.

A number of at most `NEGATIVE` counts as minus infinity, with any finite number added to it: its exponential is zero
in every type of float. A row of which no column is seen is the one place where this is not so: all its columns are
equal then, and the weights of attention are those of the columns that are computed, where the mathematics has a mean
over all. Such a row means nothing, and models do not read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from alpa_lite.ir.graph import Atom, Lit, Op
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.tokens.statics import NUMPY, Statics

NEGATIVE = -1e3
"""At most this is as good as minus infinity."""

_EXACT = {
    **NUMPY, "exp2": np.exp2, "expm1": np.expm1, "is_finite": np.isfinite, "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "sign": np.sign, "sqrt": np.sqrt, "tanh": np.tanh,
}  # fmt: skip
_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "reduce_precision")


@dataclass(frozen=True, eq=False)
class Beyond:
    """In row i of a value, every column from `first[i]` on holds one number.

    Attributes:
      row, column: dims of the value. first: [rows].
      value: the number; exact: whether it is that, or at most that and as good as minus infinity.
    """

    row: int
    column: int
    first: np.ndarray
    value: float
    exact: bool = True

    @property
    def negative(self) -> bool:
        """Whether it is as good as minus infinity."""
        return self.value <= NEGATIVE


Known = Mapping[int, tuple[Beyond, ...]]
"""By value; at most one for each pair of dims."""


def known(
    ops: Iterable[Op],
    rules: Mapping[object, Rule],
    statics: Statics,
    given: Known | None = None,
) -> Known:
    """Returns the knowledge of the values that a block's operations make.

    Args:
      ops: in program order.
      rules: `Op.key` -> its rule.
      given: the knowledge of the block's inputs.
    """
    found: dict[int, tuple[Beyond, ...]] = dict(given or {})
    masks: dict[int, tuple[Beyond, ...]] = {}  # by the array, which several layers may share

    def of(atom: Atom) -> tuple[Beyond, ...]:
        if isinstance(atom, Lit) or atom in found:
            return () if isinstance(atom, Lit) else found[atom]
        array = statics.of(atom)
        if array is None:
            return ()
        if id(array) not in masks:
            masks[id(array)] = _read(array)
        return masks[id(array)]

    for op in ops:
        if op.name in primitives.PAIRWISE:
            found.update(pair for pair in zip(op.results, map(of, op.operands), strict=True) if pair[1])
        elif op.name in _SHAPES:
            beyond = found.get(op.operands[0]) if isinstance(op.operands[0], int) else None
            moved = [_moved(b, rules[op.key]) for b in beyond or ()]
            if any(moved):
                found[op.results[0]] = tuple(b for b in moved if b is not None)
        elif op.name in primitives.ELEMENTWISE and len(op.results) == 1:
            operands = [of(a) for a in op.operands]
            pairs = dict.fromkeys((b.row, b.column) for some in operands for b in some)
            numbers = [_number(a, statics) for a in op.operands]
            made = [_computed(op, pair, operands, numbers) for pair in pairs]
            if any(made):
                found[op.results[0]] = tuple(b for b in made if b is not None)
    return found


def _read(array: np.ndarray) -> tuple[Beyond, ...]:
    """Returns the number that a static array holds behind the diagonal, for each order of two dims not constant."""
    wide = [d for d, n in enumerate(array.shape) if n > 1]
    if len(wide) < 2 or array.dtype.kind not in "bif":
        return ()
    out = []
    for row, column in permutations(wide, 2):
        others = [d for d in range(array.ndim) if d not in (row, column)]
        rows = array.transpose(*others, row, column).reshape(-1, array.shape[row], array.shape[column])
        number = rows[0, 0, -1]
        differs = np.ascontiguousarray((rows != number).any(0)[:, ::-1])  # which is searched faster
        first = np.where(differs.any(1), differs.shape[1] - differs.argmax(1), 0)
        if (first < differs.shape[1]).any():
            out.append(Beyond(row, column, first, float(number)))
    return tuple(out)


def _moved(beyond: Beyond, rule: Rule) -> Beyond | None:
    """The same of the result of an operation that reorders or names dims."""
    dims = {dim: i for i, dim in enumerate(rule.results[0]) if dim}
    row, column = (dims.get(rule.operands[0][dim]) for dim in (beyond.row, beyond.column))
    return None if row is None or column is None else Beyond(row, column, beyond.first, beyond.value, beyond.exact)


def _number(atom: Atom, statics: Statics) -> float | None:
    """The number that a static atom holds everywhere, if it is one."""
    array = statics.of(atom)
    return float(array.reshape(())) if array is not None and array.size == 1 and array.dtype.kind in "bif" else None


def _computed(
    op: Op, pair: tuple[int, int], operands: Sequence[tuple[Beyond, ...]], numbers: Sequence[float | None]
) -> Beyond | None:
    """Derives the knowledge of an elementwise result, for rows and columns on two dims; None if there is none."""
    held = [next((b for b in some if (b.row, b.column) == pair), None) for some in operands]
    given = [
        (b.value, b.exact) if b else (None if n is None else (n, True)) for b, n in zip(held, numbers, strict=True)
    ]
    answer = _answer(op, given)
    if answer is None:
        return None
    value, exact, used = answer
    first = [b.first for i, b in enumerate(held) if b is not None and i in used]
    return Beyond(*pair, np.maximum.reduce(first), value, exact) if first else None


_Given = Sequence[tuple[float, bool] | None]


def _answer(op: Op, given: _Given) -> tuple[float, bool, set[int]] | None:
    """The number that an operation makes, whether exactly, and of which operands; None where that is not known."""
    every = set(range(len(given)))
    exact = [g[0] if g is not None and g[1] else None for g in given]
    if op.name == "select_n" and exact[0] is not None:
        case = 1 + int(exact[0])
        chosen = given[case]
        return None if chosen is None else (*chosen, {0, case})
    if op.name == "select_n" and None not in exact[1:] and len(set(exact[1:])) == 1:
        return exact[1], True, every - {0}  # type: ignore[return-value]
    absorbing = {"and": 0.0, "mul": 0.0, "or": 1.0}.get(op.name)
    if absorbing is not None and absorbing in exact:
        return absorbing, True, {exact.index(absorbing)}
    if op.name == "div" and exact[0] == 0.0:
        return 0.0, True, {0}
    if op.name in ("convert_element_type", "copy", "name", "stop_gradient") and given[0] is not None:
        return (*given[0], {0})
    numbers = [x for x in exact if x is not None]
    if len(numbers) == len(given) and op.name in _EXACT:
        with np.errstate(all="ignore"):
            if op.name == "not":
                return float(not numbers[0]), True, every
            if op.name in ("and", "or", "xor"):
                return float(_EXACT[op.name](*map(int, numbers))), True, every
            return float(_EXACT[op.name](*numbers)), True, every
    if op.name == "integer_pow" and exact[0] == 0.0 and op.params["y"] > 0:
        return 0.0, True, {0}
    return _negative(op, given, exact)


def _negative(op: Op, given: _Given, exact: Sequence[float | None]) -> tuple[float, bool, set[int]] | None:
    """The same where an operand is as good as minus infinity, and the others are any finite numbers."""
    low = [i for i, g in enumerate(given) if g is not None and g[0] <= NEGATIVE]
    if not low:
        return None
    value = max(given[i][0] for i in low)  # type: ignore[index]
    if op.name in ("exp", "exp2", "logistic"):
        return 0.0, True, {0}
    if op.name in ("add", "add_any", "min"):
        return value, False, {low[0]}
    if op.name == "max" and len(low) == 2:
        return value, False, {0, 1}
    if op.name == "sub" and low[0] == 0:
        return value, False, {0}
    factor = next((x for x in exact if x is not None and x > 0), None)
    if op.name == "mul" and factor is not None:
        return (value * factor, False, {low[0]}) if value * factor <= NEGATIVE else None
    if op.name == "div" and low[0] == 0 and exact[1] is not None and exact[1] > 0:
        return (value / exact[1], False, {0}) if value / exact[1] <= NEGATIVE else None
    return None
