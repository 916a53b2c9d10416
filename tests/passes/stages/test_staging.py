"""Stage graphs: every operation once, everything that crosses given by one stage, and sums that are split add up."""

from __future__ import annotations

from collections import Counter

import jax
import numpy as np
import pytest

from alpa_lite.ir import graph
from alpa_lite.ir.graph import Op
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.ir.loops import scan_op
from alpa_lite.passes.stages.staging import StageGraph
from alpa_lite.passes.stages.sums import split_sums
from tests.passes.layers.division_cases import KINDS, deep, staged

CASES = [(kind, stages) for kind in KINDS for stages in (2, 4)]
each = pytest.mark.parametrize(("kind", "stages"), CASES)


def body_of(stage: StageGraph) -> tuple[Op, ...]:
    return scan_op(stage.traced, stage.scan).bodies[0].ops


def updates_of(stage: StageGraph) -> list[Op]:
    return [op for op in stage.traced.graph.block.ops if op.index in stage.rounds]


@each
def test_every_operation_is_on_one_stage(kind: str, stages: int) -> None:
    cut = staged(kind, stages)
    traced, assignment = split_sums(cut.accumulated.traced, cut.accumulated.scan, cut.assignment)
    made = Counter(v for one in cut.graphs for op in body_of(one) for v in op.results)
    for op in scan_op(traced, cut.accumulated.scan).bodies[0].ops:
        for value in op.results:
            assert made[value] == 1 or op.index in assignment.shared, op.name
    given = Counter(v for one in cut.graphs for op in updates_of(one) for v in op.results)
    late = set(scan_op(traced, cut.accumulated.scan).results)
    for op in traced.graph.block.ops:
        if late.intersection(a for a in op.operands if isinstance(a, int)):
            late.update(op.results)
            assert all(given.pop(value) == 1 for value in op.results), op.name
    assert not given


@each
def test_what_crosses_is_given_by_one_stage(kind: str, stages: int) -> None:
    cut = staged(kind, stages)
    for name in ("crossing", "late"):
        given = Counter(p.number for one in cut.graphs for p in one.outputs if p.kind == name)
        taken = [p.number for one in cut.graphs for p in one.inputs if p.kind == name]
        assert set(given.values()) <= {1}
        assert set(taken) == set(given)
    for one in cut.graphs:
        assert not {p for p in one.inputs if p.kind in ("crossing", "late")} & set(one.outputs)


@each
def test_results_come_from_one_stage_and_state_stays_where_it_is_updated(kind: str, stages: int) -> None:
    cut = staged(kind, stages)
    results = [p.number for one in cut.graphs for p in one.outputs if p.kind == "argument"]
    assert sorted(results) == list(range(len(cut.traced.outputs)))
    owners = Counter(p.number for one in cut.graphs for p in one.inputs if p.kind == "argument")
    state = {argument for _, argument in cut.traced.state}
    assert all(owners[number] == 1 for number in state)
    copies = {p.number for one in cut.graphs for p in one.inputs if p.kind == "copy"}
    assert copies <= state
    assert bool(copies) == (kind == "tied")
    for one in cut.graphs:
        arguments = {p.number for p in one.inputs if p.kind == "argument"}
        outputs = {p.number for p in one.outputs if p.kind == "argument"}
        assert {a for o, a in cut.traced.state if o in outputs} == arguments & state


@each
def test_rounds_count_the_exchanges_of_the_update(kind: str, stages: int) -> None:
    cut = staged(kind, stages)
    made = {value: number for one in cut.graphs for value, number in one.late_rounds.items()}
    for one in cut.graphs:
        late = {p.number for p in one.inputs if p.kind == "late"}
        for op in one.traced.graph.block.ops:
            for value in late.intersection(a for a in op.operands if isinstance(a, int)):
                assert one.rounds[op.index] > made[value]
    rounds = {number for one in cut.graphs for number in one.rounds.values()}
    assert (max(rounds) > 0) == (kind != "plain")


@pytest.mark.parametrize("stages", [2, 4])
def test_split_sums_add_up(stages: int) -> None:
    cut = staged("tied", stages)
    assert cut.assignment.split_sums
    traced, assignment = split_sums(cut.accumulated.traced, cut.accumulated.scan, cut.assignment)
    assert assignment.split_sums == () and assignment.dissolved == frozenset()
    graph.check(traced.graph)
    _, args = deep(stages, tied=True)
    leaves = jax.tree.leaves((args, {}))
    before = scan_op(cut.accumulated.traced, cut.accumulated.scan).params["num_carry"]
    assert scan_op(traced, cut.accumulated.scan).params["num_carry"] == before + 1
    got = jax.jit(lambda *x: evaluation.evaluate(traced.graph, x))(*leaves)
    want = jax.jit(lambda *x: evaluation.evaluate(cut.accumulated.traced.graph, x))(*leaves)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_without_split_sums_nothing_changes() -> None:
    cut = staged("plain", 2)
    traced, assignment = split_sums(cut.accumulated.traced, cut.accumulated.scan, cut.assignment)
    assert traced is cut.accumulated.traced and assignment is cut.assignment
