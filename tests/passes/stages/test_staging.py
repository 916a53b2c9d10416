"""Stage graphs: every operation once, everything that crosses given by one stage, and state where it is updated."""

from __future__ import annotations

from collections import Counter

import pytest

from alpa_lite.passes.ir.loops import scan_op
from alpa_lite.passes.stages.sums import split_sums
from tests.passes.layers.division_cases import staged


@pytest.mark.parametrize(("kind", "stages"), [("plain", 2), ("tied", 2), ("tied", 4), ("norm", 4)])
def test_operations_and_what_crosses_have_one_stage(kind: str, stages: int) -> None:
    cut = staged(kind, stages)
    traced, assignment = split_sums(cut.accumulated.traced, cut.accumulated.scan, cut.assignment)
    assert bool(cut.assignment.split_sums) == (kind == "tied") and assignment.split_sums == ()
    bodies = [scan_op(one.traced, one.scan).bodies[0].ops for one in cut.graphs]
    made = Counter(v for ops in bodies for op in ops for v in op.results)
    for op in scan_op(traced, cut.accumulated.scan).bodies[0].ops:
        assert op.index in assignment.shared or all(made[value] == 1 for value in op.results), op.name
    updates = [op for one in cut.graphs for op in one.traced.graph.block.ops if op.index in one.rounds]
    assert set(Counter(v for op in updates for v in op.results).values()) <= {1}
    for name in ("crossing", "late"):
        given = Counter(p.number for one in cut.graphs for p in one.outputs if p.kind == name)
        taken = {p.number for one in cut.graphs for p in one.inputs if p.kind == name}
        assert set(given.values()) <= {1} and taken == set(given)
    rounds = {number for one in cut.graphs for number in one.rounds.values()}
    assert (max(rounds) > 0) == (kind != "plain")  # the update exchanges values


@pytest.mark.parametrize(("kind", "stages"), [("plain", 4), ("tied", 2), ("norm", 2)])
def test_results_come_from_one_stage_and_state_stays_where_it_is_updated(kind: str, stages: int) -> None:
    cut = staged(kind, stages)
    state = {argument for _, argument in cut.traced.state}
    arguments = [{p.number for p in one.inputs if p.kind == "argument"} for one in cut.graphs]
    outputs = [{p.number for p in one.outputs if p.kind == "argument"} for one in cut.graphs]
    assert sorted(number for some in outputs for number in some) == list(range(len(cut.traced.outputs)))
    for own, results in zip(arguments, outputs, strict=True):
        assert {a for o, a in cut.traced.state if o in results} == own & state
    copies = {p.number for one in cut.graphs for p in one.inputs if p.kind == "copy"}
    assert copies <= state and bool(copies) == (kind == "tied")
