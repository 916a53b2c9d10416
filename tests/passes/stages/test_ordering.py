"""Orders of operations by their use: little lives long, and names do not count."""

from __future__ import annotations

import jax

from alpa_lite.ir.graph import Op
from alpa_lite.passes.stages import ordering


def op(number: int, *operands: int) -> Op:
    """An addition, whose result is its number and 100."""
    return Op(
        index=number, primitive=jax.lax.add_p, params={}, operands=operands, results=(100 + number,), bodies=(),
        source=None, key=None, has_effects=False,
    )  # fmt: skip


def test_leaves_are_where_their_layers_are() -> None:
    """Casts of weights 0, 1 and 2, of layers 3, 1 and 2; the layers; sums of their gradients."""
    casts = [op(0, 0), op(1, 1), op(2, 2)]
    layers = [op(3, 9, 101), op(4, 103, 102), op(5, 104, 100)]
    sums = [op(6, 10, 105), op(7, 11, 103), op(8, 12, 104)]
    found = ordering.body([*casts, *layers, *sums], set(), [0, 1, 2])
    assert [one.index for one in found] == [1, 3, 7, 2, 4, 8, 0, 5, 6]


def test_updates_follow_the_sums() -> None:
    """Moments of all leaves, then parameters of all; leaf 20 is the sum that is complete last."""
    ops = [op(0, 20, 1), op(1, 21, 2), op(2, 3, 100), op(3, 4, 101)]
    found = ordering.update(ops, dict.fromkeys(range(4), 0), [21, 20])
    assert [one.index for one in found] == [1, 3, 0, 2]
