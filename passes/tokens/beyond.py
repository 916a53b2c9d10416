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

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa_lite.ir.graph import Atom, Lit, Op
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.tracing.statics import NUMPY, Statics

NEGATIVE = -1e3
"""At most this is as good as minus infinity."""

LARGE = 1e30
"""A finite number between which and its negative all are that are not known."""

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **NUMPY, "and": lambda x, y: int(x) & int(y), "convert_element_type": float, "exp2": np.exp2, "expm1": np.expm1,
    "integer_pow": lambda y, x: np.float_power(x, y), "is_finite": np.isfinite, "not": np.logical_not,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "or": lambda x, y: int(x) | int(y),
    "select_n": lambda case, *cases: cases[int(case)], "sqrt": np.sqrt, "tanh": np.tanh,
    "xor": lambda x, y: int(x) ^ int(y),
}  # fmt: skip
"""Elementwise operations on numbers; on masks, which are 0 or 1."""

_MONOTONE = (
    "add", "add_any", "and", "convert_element_type", "copy", "div", "exp", "exp2", "logistic", "max", "min", "mul",
    "name", "or", "select_n", "stop_gradient", "sub",
)  # fmt: skip
_SHAPES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "reduce_precision")


@dataclass(frozen=True, eq=False)
class ConstantTail:
    """In row i of a value, every column from `first[i]` on holds one number.

    Attributes:
      row, column: dims of the value. first: [rows].
      value: the number; exact: whether it is that, or at most that and as good as minus infinity.
    """

    row: int
    column: int
    first: np.ndarray
    value: float
    is_exact: bool = True

    @property
    def is_negative_infinity(self) -> bool:
        """Whether it is as good as minus infinity."""
        return self.value <= NEGATIVE


Known = Mapping[int, tuple[ConstantTail, ...]]
"""By value; at most one for each pair of dims."""


def derive_knowledge(ops: Iterable[Op], rules: Mapping[object, Rule], statics: Statics) -> Known:
    """Returns the knowledge of the values that operations make.

    Args:
      ops: in program order; those of a scan's body after the scan.
      rules: `Op.key` -> its rule.
      statics: of these operations.
    """
    found: dict[int, tuple[ConstantTail, ...]] = {}
    masks: dict[int, tuple[ConstantTail, ...]] = {}  # by the array, which several layers may share

    def of(atom: Atom) -> tuple[ConstantTail, ...]:
        if isinstance(atom, Lit) or atom in found:
            return () if isinstance(atom, Lit) else found[atom]
        array = statics.array_of(atom)
        if array is None:
            return ()
        if id(array) not in masks:
            masks[id(array)] = _read(array)
        return masks[id(array)]

    for op in ops:
        if op.name == "scan":
            found.update((inner, beyond) for outer, inner in ScanView(op).consts if (beyond := of(outer)))
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


def _read(array: np.ndarray) -> tuple[ConstantTail, ...]:
    """Returns the number that a static array holds behind the diagonal, for each order of two dims not constant."""
    wide = [d for d, n in enumerate(array.shape) if n > 1]
    if len(wide) < 2 or array.dtype.kind not in "bif":
        return ()
    out = []
    for row, column in itertools.permutations(wide, 2):
        others = [d for d in range(array.ndim) if d not in (row, column)]
        rows = array.transpose(*others, row, column).reshape(-1, array.shape[row], array.shape[column])
        number = rows[0, 0, -1]
        differs = np.ascontiguousarray((rows != number).any(0)[:, ::-1])  # which is searched faster
        first = np.where(differs.any(1), differs.shape[1] - differs.argmax(1), 0)
        if (first < differs.shape[1]).any():
            out.append(ConstantTail(row, column, first, float(number)))
    return tuple(out)


def _moved(beyond: ConstantTail, rule: Rule) -> ConstantTail | None:
    """Returns the same of the result of an operation that reorders or names dims."""
    dims = {dim: i for i, dim in enumerate(rule.results[0]) if dim}
    row, column = (dims.get(rule.operands[0][dim]) for dim in (beyond.row, beyond.column))
    return (
        None
        if row is None or column is None
        else ConstantTail(row, column, beyond.first, beyond.value, beyond.is_exact)
    )


def _number(atom: Atom, statics: Statics) -> float | None:
    """Returns the number that a static atom holds everywhere, if it is one."""
    array = statics.array_of(atom)
    return float(array.reshape(())) if array is not None and array.size == 1 and array.dtype.kind in "bif" else None


def _computed(
    op: Op, pair: tuple[int, int], operands: Sequence[tuple[ConstantTail, ...]], numbers: Sequence[float | None]
) -> ConstantTail | None:
    """Returns the knowledge of an elementwise result, for rows and columns on two dims; None if there is none.

    The fewest operands that determine the number are taken, and exact numbers before those that are as good as minus
    infinity.
    """
    held = [next((b for b in some if (b.row, b.column) == pair), None) for some in operands]
    given = [
        (b.value, b.is_exact) if b else (None if n is None else (n, True)) for b, n in zip(held, numbers, strict=True)
    ]
    for exactly in (True, False):
        known = [i for i, g in enumerate(given) if g is not None and (g[1] or not exactly)]
        for used in itertools.chain.from_iterable(itertools.combinations(known, n + 1) for n in range(len(known))):
            first = [b.first for i in used if (b := held[i]) is not None]
            numbers = [g[0] if g is not None and i in used else None for i, g in enumerate(given)]
            value = _value(op, numbers, exactly) if first else None
            if value is not None:
                exact = exactly or value == 0
                return ConstantTail(*pair, np.maximum.reduce(first), value, exact)
    return None


def _value(op: Op, given: Sequence[float | None], exactly: bool) -> float | None:
    """The number that an operation makes of some, and of any finite one in place of None; None if it makes several.

    An operation that is monotone in each operand makes one number of all numbers of an interval if it makes that of
    both ends. Unless `exactly`, what is at most `NEGATIVE` stands for minus infinity, and so does the result.
    """
    function, is_certain = _FUNCTIONS.get(op.name), None not in given and exactly
    if function is None or not (is_certain or op.name in _MONOTONE):
        return None
    if not exactly and (op.name in ("and", "or") or (op.name == "div" and (given[1] or 0) <= NEGATIVE)):
        return None
    if op.name == "integer_pow":
        function = functools.partial(function, op.params["y"])
    unknown = {"and": (0, 1), "or": (0, 1), "select_n": range(len(given) - 1)}.get(op.name, (-LARGE, LARGE))
    ends = [unknown if x is None else (-np.inf if x <= NEGATIVE and not exactly else x,) for x in given]
    with np.errstate(all="ignore"):
        made = {float(function(*numbers)) for numbers in itertools.product(*ends)}
        bound = float(function(*(0.0 if x is None else x for x in given)))
    if len(made) > 1 or any(map(math.isnan, made)):
        return None
    (value,) = made
    if exactly or value == 0:
        return value or 0.0
    return bound if value == -np.inf and bound <= NEGATIVE else None
