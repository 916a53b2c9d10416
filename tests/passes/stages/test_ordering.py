"""Orders of operations by their use: what they read is made before, and names do not count."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.graph import Op
from alpa_lite.passes.ir.flow import producers
from alpa_lite.passes.stages import ordering

INPUTS = 6


def op(number: int, *operands: int, effects: bool = False) -> Op:
    """An addition, whose result is its number and 100."""
    return Op(
        index=number, primitive=jax.lax.add_p, params={}, operands=operands, results=(100 + number,), bodies=(),
        source=None, key=None, has_effects=effects,
    )  # fmt: skip


def assert_ordered(found: Sequence[Op], among: Sequence[Op]) -> None:
    """All operations, each once, behind what it reads."""
    assert sorted(op.index for op in found) == sorted(op.index for op in among)
    place, makers = {op.index: n for n, op in enumerate(found)}, producers(among)
    for op in found:
        assert all(place[makers[value].index] < place[op.index] for value in op.reads if value in makers)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_body_and_update_are_in_an_order_that_can_be_run(seed: int) -> None:
    """Additions of values 0 to 5, which are given, and of results before."""
    rng = np.random.default_rng(seed)
    ops: list[Op] = []
    for number in range(rng.integers(1, 30)):
        known = [*range(INPUTS), *(100 + before for before in range(number))]
        ops.append(op(number, *map(int, rng.choice(known, size=rng.integers(0, 3))), effects=rng.random() < 0.05))
    lasting = {int(value) for value in range(INPUTS) if rng.random() < 0.5}
    copies = {op.index for op in ops if rng.random() < 0.2 and not op.has_effects}
    found = ordering.body(ops, copies, lasting)
    assert_ordered(found, ops)
    assert [op.index for op in found if op.has_effects] == [op.index for op in ops if op.has_effects]
    makers, rounds = producers(ops), {}
    for one in ops:
        late = int(rng.random() < 0.2)
        rounds[one.index] = max((rounds[makers[v].index] for v in one.reads if v in makers), default=0) + late
    found = ordering.update(ops, rounds, [int(value) for value in rng.permutation(INPUTS)[:3]])
    assert_ordered(found, ops)
    assert [rounds[op.index] for op in found] == sorted(rounds.values())


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
