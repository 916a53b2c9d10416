"""Finds comparisons of values with their own maximum, whose two sides must have the same bits.

Problem. JAX gives the gradient of a maximum to the elements that equal it: it compares the operand with the result. In
one jitted function that works. But the two sides can get different bits when they are computed apart: where an operand
is computed again for the backward pass and the maximum was saved; or where a compiler computes a cheap operand twice,
once within the reduction, once within the comparison, and contracts a product and a sum in one of them alone. Then
nothing equals the maximum, and the gradient is zero, or 0 / 0 where it is divided by the number of elements that do.

Answer. `ties` finds these comparisons; `rematerialisation` then computes the maximum again together with its operand.
`emission` puts a barrier behind operands of `primitives.EXTREMA` that are also compared, so that one copy of them is
made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from alpa_lite.ir.graph import Op
from alpa_lite.passes.ir import primitives

_SELECTING = primitives.EXTREMA | {"max", "min"}  # the gradients of these two compare with their results in JAX 0.10


@dataclass(frozen=True)
class Tie:
    """A comparison of values with their own maximum or minimum.

    Attributes:
      operands: the values that are compared and among which it is chosen.
      chain: the operation that chooses, and those that reshape its result for the comparison.
    """

    operands: tuple[int, ...]
    chain: tuple[Op, ...]


def ties(ops: Iterable[Op]) -> Mapping[int, Tie]:
    """Returns the comparisons among ops of a block, by the index of the `eq`."""
    makers: dict[int, Op] = {}
    found: dict[int, Tie] = {}
    for op in ops:
        makers.update(dict.fromkeys(op.results, op))
        if op.name != "eq":
            continue
        for atom in op.operands:
            chain = _chain(atom, makers)
            if chain:
                operands = {a for a in chain[0].operands if isinstance(a, int)} & set(op.operands)
                if operands:
                    found[op.index] = Tie(tuple(sorted(operands)), chain)  # type: ignore[type-var]
    return found


def _chain(atom: object, makers: Mapping[int, Op]) -> tuple[Op, ...]:
    """Returns the operation that chose a value, and the reshapes since; empty if it was not chosen."""
    chain: list[Op] = []
    while isinstance(atom, int) and atom in makers:
        maker = makers[atom]
        chain.insert(0, maker)
        if maker.name in _SELECTING:
            return tuple(chain)
        if maker.name not in primitives.RESHAPES:
            break
        atom = maker.operands[0]
    return ()
