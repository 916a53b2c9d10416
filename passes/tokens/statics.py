"""Values that no argument of a step changes: masks, positions, and whatever else is made of constants alone.

They are computed with NumPy, on no device, and only where somebody asks. A dim along which a value is constant by
construction (it was broadcast) is kept with size one, so that the mask of every example and head is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from alpa_lite.ir.graph import Atom, Lit, Op, Value
from alpa_lite.passes.ir.inlining import shape_of

LARGEST = 1 << 28
"""Elements of a value beyond which it is not computed."""

NUMPY: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "copy": np.asarray, "div": np.divide,
    "eq": np.equal, "exp": np.exp, "floor": np.floor, "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal,
    "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply, "name": np.asarray, "ne": np.not_equal,
    "neg": np.negative, "not": np.invert, "or": np.bitwise_or, "square": np.square, "stop_gradient": np.asarray,
    "sub": np.subtract, "xor": np.bitwise_xor,
}  # fmt: skip
"""Elementwise operations, as NumPy computes them."""

_MOVES = frozenset(
    ("broadcast_in_dim", "reshape", "squeeze", "transpose", "slice", "dynamic_slice", "convert_element_type", "iota")
)


class Statics:
    """The static values of a block.

    Args:
      ops: in program order.
      values: of the graph.
      constants: value -> array, of the graph's inputs that are constants.
    """

    def __init__(self, ops: Iterable[Op], values: Sequence[Value], constants: Mapping[int, Any]) -> None:
        self.values = values
        self._arrays: dict[int, np.ndarray | None] = {}
        self._alike: dict[Hashable, np.ndarray | None] = {}
        self._constants = dict(constants)
        self._makers: dict[int, Op] = {}
        known = set(constants)
        for op in ops:
            if (op.name in NUMPY or op.name in _MOVES or op.name == "select_n") and all(
                isinstance(a, Lit) or a in known for a in op.operands
            ):
                known.update(op.results)
                self._makers.update((value, op) for value in op.results)

    def has(self, value: int) -> bool:
        """Whether a value is static."""
        return value in self._makers or value in self._constants

    def of(self, atom: Atom) -> np.ndarray | None:
        """The array, of the rank of the value, with size one along dims where it is constant; None if not static.

        Arrays that several layers compute alike, such as their masks, are computed once, and are one array.
        """
        if isinstance(atom, Lit):
            return np.asarray(atom.value)
        if atom not in self._arrays:
            self._arrays[atom] = self._made(atom)
        return self._arrays[atom]

    def _made(self, value: int) -> np.ndarray | None:
        if value in self._constants:
            array = self._constants[value]
            small = math.prod(np.shape(array)) <= LARGEST and isinstance(getattr(array, "dtype", None), np.dtype)
            return np.asarray(array) if small else None
        op = self._makers.get(value)
        given = [array for a in op.operands if (array := self.of(a)) is not None] if op is not None else []
        if op is None or len(given) < len(op.operands):
            return None
        key = (op.key, *map(_identity, op.operands, given))
        if key not in self._alike:
            shape = np.broadcast_shapes(*(x.shape for x in given)) if op.name in NUMPY else ()
            self._alike[key] = self._computed(op, given, self.values[value]) if math.prod(shape) <= LARGEST else None
        return self._alike[key]

    def _computed(self, op: Op, operands: list[np.ndarray], made: Value) -> np.ndarray | None:
        params, name = op.params, op.name
        if name == "iota":
            shape = [1] * len(made.shape)
            shape[params["dimension"]] = -1
            return np.arange(made.shape[params["dimension"]]).astype(made.dtype).reshape(shape)
        (first, *rest) = operands
        if name in NUMPY:
            with np.errstate(all="ignore"):
                return np.asarray(NUMPY[name](*operands)).astype(made.dtype)
        if name == "select_n":
            return np.where(first.astype(bool), rest[1], rest[0]) if len(rest) == 2 else None
        if name == "convert_element_type":
            return first.astype(made.dtype)
        if name == "broadcast_in_dim":
            shape = [1] * len(made.shape)
            for dim, size in zip(params["broadcast_dimensions"], first.shape, strict=True):
                shape[dim] = size
            return first.reshape(shape)
        if name == "transpose":
            return first.transpose(params["permutation"])
        if name == "squeeze":
            return first.squeeze(tuple(params["dimensions"]))
        return self._cut(op, first, rest, made)

    def _cut(self, op: Op, first: np.ndarray, rest: list[np.ndarray], made: Value) -> np.ndarray | None:
        """`slice`, `dynamic_slice` and `reshape`."""
        before = shape_of(op.operands[0], self.values)
        if op.name == "slice":
            steps = op.params["strides"] or (1,) * first.ndim
            cuts = zip(op.params["start_indices"], op.params["limit_indices"], steps, strict=True)
            picks = [slice(a, b, s) for a, b, s in cuts]
        elif op.name == "dynamic_slice":
            sizes = op.params["slice_sizes"]
            starts = [min(max(int(s), 0), n - m) for s, n, m in zip(rest, before, sizes, strict=True)]
            picks = [slice(a, a + n) for a, n in zip(starts, sizes, strict=True)]
        else:
            return _reshaped(first, before, made.shape)
        return first[tuple(slice(None) if n == 1 else pick for n, pick in zip(first.shape, picks, strict=True))]


def _identity(atom: Atom, array: np.ndarray) -> Hashable:
    """Equal for equal operands: the array itself, which is kept, or the value of a literal."""
    return (array.dtype.str, array.tobytes()) if isinstance(atom, Lit) else id(array)


def _reshaped(array: np.ndarray, before: tuple[int, ...], after: tuple[int, ...]) -> np.ndarray | None:
    """The array of a value of shape `before`, as one of shape `after`."""
    if [n for n in before if n != 1] == [n for n in after if n != 1]:
        sizes = iter([n for n, whole in zip(array.shape, before, strict=True) if whole != 1])
        return array.reshape([1 if n == 1 else next(sizes) for n in after])
    if math.prod(before) > LARGEST:
        return None
    return np.broadcast_to(array, before).reshape(after)
