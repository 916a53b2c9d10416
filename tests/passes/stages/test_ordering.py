"""Orders of operations by their use: what they read is made before, and names do not count."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.ir.graph import Op
from alpa_lite.passes.ir import flow
from alpa_lite.passes.ir.flow import producers
from alpa_lite.passes.stages import ordering

SEEDS = st.integers(0, 2**32 - 1)
INPUTS = 6


def op(number: int, *operands: int, effects: bool = False) -> Op:
    """An addition, whose result is its number and 100."""
    return Op(
        index=number, primitive=jax.lax.add_p, params={}, operands=operands, results=(100 + number,), bodies=(),
        source=None, key=None, has_effects=effects,
    )  # fmt: skip


def random_ops(rng: np.random.Generator) -> list[Op]:
    """Additions of values 0 to 5, which are given, and of results before."""
    found: list[Op] = []
    for number in range(rng.integers(1, 30)):
        known = [*range(INPUTS), *(100 + before for before in range(number))]
        found.append(op(number, *map(int, rng.choice(known, size=rng.integers(0, 3))), effects=rng.random() < 0.05))
    return found


def assert_ordered(ops: Sequence[Op], among: Sequence[Op]) -> None:
    """All of some ops, each once, behind what it reads."""
    assert sorted(op.index for op in ops) == sorted(op.index for op in among)
    place, makers = {op.index: n for n, op in enumerate(ops)}, producers(among)
    for op in ops:
        assert all(place[makers[value].index] < place[op.index] for value in op.reads if value in makers)


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_the_body_is_in_an_order_that_can_be_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ops = random_ops(rng)
    lasting = {int(value) for value in range(INPUTS) if rng.random() < 0.5}
    copies = {op.index for op in ops if rng.random() < 0.2 and not op.has_effects}
    found = ordering.body(ops, copies, lasting)
    assert_ordered(found, ops)
    assert [op.index for op in found if op.has_effects] == [op.index for op in ops if op.has_effects]


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_the_update_is_in_an_order_that_can_be_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ops, makers, rounds = random_ops(rng), {}, {}
    for op in ops:
        late = int(rng.random() < 0.2)
        rounds[op.index] = max((rounds[makers[v].index] for v in op.reads if v in makers), default=0) + late
        makers |= dict.fromkeys(op.results, op)
    sums = [int(value) for value in rng.permutation(INPUTS)[:3]]
    found = ordering.update(ops, rounds, sums)
    assert_ordered(found, ops)
    assert [rounds[op.index] for op in found] == sorted(rounds.values())


@settings(max_examples=200, deadline=None)
@given(SEEDS)
def test_what_is_needed_is_found_in_the_order_of_its_use(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ops = random_ops(rng)
    makers = producers(ops)
    wanted = [int(value) for value in rng.choice([*range(INPUTS), *makers], size=4)]
    found, inputs = ordering.needed(wanted, makers)
    reached = flow.needed(wanted, makers)
    assert_ordered(found, [op for op in ops if not reached.keys().isdisjoint(op.results)])
    assert sorted(inputs) == sorted(value for value in reached if value < INPUTS)


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
