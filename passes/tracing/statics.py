"""Values that no argument of a step changes: masks, positions, counters, and whatever else is made of constants alone.

They are computed with NumPy, on no device, as XLA computes them, and only where they are asked for. A dim along which a
value is constant by construction (it was broadcast) is kept with size one, so that the mask of every example and head
is computed once. An input of a body is known if it is the same in each run: a constant of a loop, a carry that never
changes, a stack whose rows another loop makes of constants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from alpa_lite.ir.graph import Atom, Lit, Op, Value
from alpa_lite.passes.ir.loops import ports
from alpa_lite.passes.ir.rewriting import shape_of

LARGEST = 1 << 28
"""Elements of a value beyond which it is not computed."""

NUMPY: Mapping[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "clamp": lambda a, x, b: np.clip(x, a, b),
    "convert_element_type": np.asarray, "copy": np.asarray, "div": np.divide, "eq": np.equal, "exp": np.exp,
    "floor": np.floor, "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "max": np.maximum,
    "min": np.minimum, "mul": np.multiply, "name": np.asarray, "ne": np.not_equal, "neg": np.negative,
    "not": np.invert, "or": np.bitwise_or, "rem": np.fmod, "sign": np.sign, "square": np.square,
    "stop_gradient": np.asarray, "sub": np.subtract, "xor": np.bitwise_xor,
}  # fmt: skip
"""Elementwise operations, as NumPy computes them; a quotient of integers is rounded toward zero when it is stored."""

FOLDED = NUMPY.keys() | {
    "broadcast_in_dim", "dynamic_slice", "iota", "reshape", "select_n", "slice", "squeeze", "transpose"
}  # fmt: skip
"""Operations whose results are static where all operands are."""


class Statics:
    """The static values of a program.

    Attributes:
      constants: value -> array, of what is known without an operation.
    """

    def __init__(self, ops: Iterable[Op], values: Sequence[Value], constants: Mapping[int, Any]) -> None:
        """Args:
        ops: of a block, in program order.
        values: of the graph.
        constants: of the graph's inputs.
        """
        self.values, self.constants = values, dict(constants)
        self._arrays: dict[int, np.ndarray | None] = {}  # each is kept, so that its `id` stands for it
        self._literals: dict[Hashable, np.ndarray] = {}
        self._alike: dict[Hashable, np.ndarray | None] = {}
        self._makers: dict[int, Op] = {}
        self._outside: dict[int, Atom] = {}  # input of a body -> its value in each run of the body
        self._rows: dict[Atom | None, Atom] = {}  # stacked result of a scan -> the output of the body
        self._add_block(ops)

    def _add_block(self, ops: Iterable[Op]) -> None:
        for op in ops:
            self.add(op)
            for body in op.bodies:
                self._add_block(body.ops)

    def add(self, op: Op) -> None:
        """Takes in the next operation of the program; those of its bodies come next."""
        if not op.bodies and op.name in FOLDED and all(map(self.has, op.operands)):
            self._makers[op.results[0]] = op
        for port in ports(op) if op.bodies else ():
            operand = self._rows.get(port.operand) if port.role == "xs" else port.operand
            if port.role == "ys":
                self._rows[port.result] = port.outputs[0]
            elif operand is not None and (port.role != "carry" or port.outputs == port.inputs[:1]):  # it never changes
                self._outside.update(dict.fromkeys(port.inputs, operand))

    def resolve(self, atom: Atom) -> Atom:
        """Returns the atom outside of bodies that an input of a body is in each run."""
        while isinstance(atom, int) and atom in self._outside:
            atom = self._outside[atom]
        return atom

    def has(self, atom: Atom) -> bool:
        """Returns whether an atom is static."""
        atom = self.resolve(atom)
        return isinstance(atom, Lit) or atom in self._makers or atom in self.constants

    def array_of(self, atom: Atom) -> np.ndarray | None:
        """The array, of the rank of the value, with size one along dims where it is constant; None if not static.

        Arrays that several layers compute alike, such as their masks, are computed once, and are one array. The array
        is the same in each call.
        """
        wanted = [self.resolve(atom)]
        while wanted:  # without recursion: programs are long
            op = self._missing(wanted[-1])
            missing = [a for a in map(self.resolve, op.operands) if self._missing(a)] if op else []
            if op and not missing:
                self._arrays[op.results[0]] = self._computed(op)
            wanted = [*wanted, *missing] if missing else wanted[:-1]
        return self._read(atom)

    def _missing(self, atom: Atom) -> Op | None:
        """Returns the operation that makes an atom, if it is still to be computed."""
        return self._makers.get(atom) if isinstance(atom, int) and atom not in self._arrays else None

    def _read(self, atom: Atom) -> np.ndarray | None:
        """Returns the array of an atom that is a literal, a constant, or computed."""
        atom = self.resolve(atom)
        if isinstance(atom, Lit):
            array = np.asarray(atom.value, atom.aval.dtype if isinstance(atom.aval.dtype, np.dtype) else None)
            return self._literals.setdefault((array.dtype.str, array.shape, array.tobytes()), array)
        if atom in self.constants and atom not in self._arrays:
            given = self.constants[atom]
            small = math.prod(np.shape(given)) <= LARGEST and isinstance(getattr(given, "dtype", None), np.dtype)
            self._arrays[atom] = np.asarray(given) if small else None
        return self._arrays.get(atom)

    def _computed(self, op: Op) -> np.ndarray | None:
        """Returns the result of an operation whose operands are computed."""
        given = [array for a in op.operands if (array := self._read(a)) is not None]
        if len(given) < len(op.operands):
            return None
        key = (op.key or op.index, *map(id, given))
        if key not in self._alike:
            shape = np.broadcast_shapes(*(x.shape for x in given)) if op.name in NUMPY else ()
            self._alike[key] = fold_constant(op, given, self.values) if math.prod(shape) <= LARGEST else None
        return self._alike[key]


def fold_constant(op: Op, operands: Sequence[np.ndarray], values: Sequence[Value]) -> np.ndarray | None:
    """Returns the result of one of `FOLDED` on arrays; None where it is not defined."""
    params, name, made = op.params, op.name, values[op.results[0]]
    if name == "iota":
        shape = [1] * len(made.shape)
        shape[params["dimension"]] = -1
        return np.arange(made.shape[params["dimension"]]).astype(made.dtype).reshape(shape)
    (first, *rest) = operands
    if name in NUMPY:
        if name in ("div", "rem") and np.dtype(made.dtype).kind in "iu" and not np.all(rest[0]):
            return None
        with np.errstate(all="ignore"):
            return np.asarray(NUMPY[name](*operands)).astype(made.dtype)
    if name == "select_n":
        if len(rest) == 2:
            return np.where(first.astype(bool), rest[1], rest[0])
        return None if first.shape else rest[int(first)]
    if name == "broadcast_in_dim":
        shape = [1] * len(made.shape)
        for dim, size in zip(params["broadcast_dimensions"], first.shape, strict=True):
            shape[dim] = size
        return first.reshape(shape)
    if name == "transpose":
        return first.transpose(params["permutation"])
    if name == "squeeze":
        return first.squeeze(tuple(params["dimensions"]))
    before = shape_of(op.operands[0], values)
    if name == "reshape":
        return _reshaped(first, before, made.shape)
    if name == "slice":
        steps = params["strides"] or (1,) * first.ndim
        picks = [slice(*cut) for cut in zip(params["start_indices"], params["limit_indices"], steps, strict=True)]
    else:
        sizes = params["slice_sizes"]
        starts = [min(max(int(s), 0), n - m) for s, n, m in zip(rest, before, sizes, strict=True)]
        picks = [slice(a, a + n) for a, n in zip(starts, sizes, strict=True)]
    return first[tuple(slice(None) if n == 1 else pick for n, pick in zip(first.shape, picks, strict=True))]


def _reshaped(array: np.ndarray, before: tuple[int, ...], after: tuple[int, ...]) -> np.ndarray | None:
    """Returns the array of a value of shape `before`, as one of shape `after`."""
    if [n for n in before if n != 1] == [n for n in after if n != 1]:
        sizes = iter([n for n, whole in zip(array.shape, before, strict=True) if whole != 1])
        return array.reshape([1 if n == 1 else next(sizes) for n in after])
    if math.prod(before) > LARGEST:
        return None
    return np.broadcast_to(array, before).reshape(after)
