"""Alternatives against brute force, the whole steps that they are, and when they are weighed."""

import functools
import itertools
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.strategy import StrategyGraph, Transfer
from alpa_lite.options import Method, Pipeline, Sharded
from alpa_lite.passes.plans import alternatives
from alpa_lite.passes.plans.weighing import Outcomes
from alpa_lite.passes.sharding import mesh_program, strategies
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.solver.problem import Problem, problem_from_graph
from alpa_lite.passes.stages import stage_graph
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.plan.decisions import Decision
from alpa_lite.plan.plan import Plan
from tests.helpers import grouped_step
from tests.passes.sharding.solver.test_solve import SEEDS, random_graph


def _every(problem: Problem):
    """All allowed choices of a small problem, with their seconds and whether they fit."""
    for choice in itertools.product(*(range(size) for size in problem.links.sizes)):
        seconds = problem.seconds(choice)
        if math.isfinite(seconds):
            yield choice, seconds, problem.fits(choice)


def _weighed(seed: int, *, memory: bool):
    """A random problem, within a budget that its fastest choice may break, its optimum, and the weighed strategies."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, memory=memory, forbidden=0.08)
    if memory:
        least, _ = solve.find_minimal_budget(graph)
        assume(math.isfinite(least))
        graph = replace(graph, budget=least * float(rng.choice([1.0, 1.2, 2.0])))
    solution = solve.solve(graph, gap=0.0)
    assume(solution.status == "optimal")
    problem = problem_from_graph(graph)
    rows = alternatives.weigh(problem, solution.choice, [9] * len(solution.choice))
    return problem, solution, rows


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_bound_and_plan_enclose_the_best_with_a_strategy(seed: int) -> None:
    problem, solution, rows = _weighed(seed, memory=False)
    best: dict[tuple[int, int], float] = {}
    for choice, seconds, _ in _every(problem):
        for item in enumerate(choice):
            best[item] = min(best.get(item, math.inf), seconds)
    for i, row in enumerate(rows):
        assert row[0].strategy == solution.choice[i]
        assert len({w.strategy for w in row}) == len(row)
        for w in row:
            assert w.fastest_choice[i] == w.strategy and w.fitting_choice is w.fastest_choice
            assert w.bound <= best[i, w.strategy] + 1e-9 <= problem.seconds(w.fastest_choice) + 2e-9


@settings(max_examples=20, deadline=None)
@given(SEEDS)
def test_within_a_budget_plans_fit_and_bounds_hold(seed: int) -> None:
    problem, _, rows = _weighed(seed, memory=True)
    best: dict[tuple[int, int], float] = {}
    for choice, seconds, fits in _every(problem):
        if fits:
            for item in enumerate(choice):
                best[item] = min(best.get(item, math.inf), seconds)
    for i, row in enumerate(rows):
        for w in row:
            assert w.bound <= best.get((i, w.strategy), math.inf) + 1e-9
            for choice in (w.fitting_choice, w.fastest_choice):
                if choice is not None:
                    assert choice[i] == w.strategy
                    assert math.isfinite(problem.seconds(choice))
            if w.fitting_choice is not None:
                assert problem.fits(w.fitting_choice)


def _chain(seconds: list[list[float]], move: float) -> Problem:
    """Nodes in a row; neighbours of unequal strategies pay `move`."""
    same, cost = np.arange(2), np.array([[0.0, move], [move, 0.0]])
    transfers = tuple(Transfer(i, same, ((i + 1, same),), cost) for i in range(len(seconds) - 1))
    return problem_from_graph(StrategyGraph(tuple(np.array(one) for one in seconds), transfers))


def test_neighbours_adapt_to_what_is_forced() -> None:
    # Alone, strategy 1 of the middle node costs 4 to move in and out; all three moving cost 3 instead.
    problem = _chain([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], 2.0)
    rows = alternatives.weigh(problem, (0, 0, 0), [1, 1, 1])
    other = rows[1][1]
    assert other.fastest_choice.tolist() == [1, 1, 1]
    assert other.bound == 3.0


def test_no_more_are_weighed_than_asked_for_or_allowed() -> None:
    assert [len(row) for row in alternatives.weigh(_chain([[0.0, 1.0], [0.0, 1.0]], 2.0), (0, 0), [0, 1])] == [1, 2]
    problem = _chain([[0.0, 1.0], [0.0, math.inf]], math.inf)
    assert [len(row) for row in alternatives.weigh(problem, (0, 0), [1, 1])] == [1, 1]


CLUSTER = Cluster.preset("a100", nodes=1)


def _planned(method: Method) -> Plan:
    step, args = models.get("mlp").abstract("tiny", 4096, inputs=1024, hidden=1024)
    return alpa_lite.make_plan(step, *args, cluster=CLUSTER, method=method, verify="off")


def _has_alternatives(plan: Plan) -> bool:
    return any(decision.alternatives for stage in plan.stages for decision in stage.decisions)


def test_alternatives_are_weighed_when_somebody_asks_and_a_file_has_them() -> None:
    plan = _planned(Sharded((4, 2)))
    before = pickle.loads(pickle.dumps(plan))
    assert not _has_alternatives(plan)
    decided = next(decision.paths[0] for decision in plan.stages[0].decisions if decision.paths)
    assert "no alternatives" not in plan.explain(decided)
    assert _has_alternatives(plan) and plan.with_alternatives() is plan
    assert before == plan and not _has_alternatives(before.with_alternatives())
    read = Plan.from_json(plan.to_json())
    assert _has_alternatives(read) and read.stages == plan.stages
    assert [d.alternatives for d in read.stages[0].decisions] == [d.alternatives for d in plan.stages[0].decisions]


def test_every_stage_has_those_of_its_own_decisions() -> None:
    plan = _planned(Pipeline(num_stages=2)).with_alternatives()
    assert len(plan.stages) == 2
    for stage in plan.stages:
        assert stage.decisions
        for decision in stage.decisions:
            assert decision.chosen_alternative is not None
            assert decision.chosen_alternative.step.seconds == pytest.approx(stage.solver.objective)


BATCH = 65536


def _stepped(batch: int):
    step, args = models.get("mlp").abstract("tiny", batch, inputs=1024, hidden=2048)
    return step, *args


@functools.cache
def _grouped(batch: int):
    return grouped_step(*_stepped(batch))


@functools.cache
def _compared():
    method = Sharded((4, 2))
    budget = CLUSTER.usable_memory
    programs = mesh_program.mesh_programs(_grouped(BATCH), CLUSTER, method, budget=budget)
    found = mesh_program.solve_meshes(programs, budget)
    assert found is not None
    plan = alpa_lite.make_plan(*_stepped(BATCH), cluster=CLUSTER, method=method, num_microbatches=1, verify="off")
    return found, plan.with_alternatives()


@functools.cache
def _steps():
    """The problem, the choice, and for each alternative its step and the choice that it is of."""
    found, _ = _compared()
    problem, choice, step = problem_from_graph(found.space.program), found.solution.choice, _grouped(BATCH)
    stage = DecidedStage(stage_graph.whole_step_stage(step.traced, -1), step.rules, step.grouping, found, CLUSTER)
    outcomes = Outcomes(stage, problem)
    rows = alternatives.weigh(problem, choice, [3] * len(choice))
    return (
        problem,
        choice,
        [(outcomes.outcome_of(weighed.fastest_choice), weighed.fastest_choice) for row in rows for weighed in row],
    )


def test_the_chosen_step_is_the_plan() -> None:
    _, plan = _compared()
    for decision in plan.stages[0].decisions:
        assert decision.chosen_alternative is not None
        step = decision.chosen_alternative.step
        assert decision.chosen_alternative.fits
        assert step.seconds == pytest.approx(plan.step_seconds)
        assert step.compute_seconds == pytest.approx(plan.stages[0].compute_seconds)
        assert step.bytes_sent == sum(c.bytes * c.count for c in plan.collectives)
        assert step.bytes_per_device == plan.stages[0].memory.total
        assert step.changed == 0


def test_every_alternative_is_a_step_of_its_own() -> None:
    problem, choice, steps = _steps()
    for step, other in steps:
        assert step.seconds == pytest.approx(problem.seconds(other))
        assert step.bytes_per_device == pytest.approx(problem.peak(other), abs=1)
        assert 0 <= step.latency_seconds <= step.communication_seconds
        assert 0 <= step.batch_seconds <= step.seconds
        assert step.changed == sum(a != b for a, b in zip(choice, other, strict=True))


def test_alternatives_are_ordered_by_the_whole_step() -> None:
    def order(decision: Decision) -> list[tuple[bool, float]]:
        return [(not a.fits, a.step.seconds) for a in decision.alternatives]

    _, plan = _compared()
    assert any(len(d.alternatives) > 3 for d in plan.stages[0].decisions)
    assert all(order(d) == sorted(order(d)) for d in plan.stages[0].decisions)


def test_links_twice_as_fast_halve_what_is_not_latency() -> None:
    link = CLUSTER.node_link
    faster = replace(CLUSTER, node_link=replace(link, bandwidth=2 * link.bandwidth))
    space = strategies.build(_grouped(BATCH), MeshCost(faster, _compared()[0].mesh))
    for step, other in _steps()[2]:
        waiting = step.communication_seconds - step.latency_seconds
        assert solve.evaluate(space.program, other.tolist())[0] == pytest.approx(step.seconds - waiting / 2)


def test_a_batch_twice_as_large_adds_what_grows_with_it() -> None:
    """To first order: products read their weights whatever the batch, and larger ones come closer to the peak."""
    found, _ = _compared()
    space = strategies.build(_grouped(2 * BATCH), MeshCost(CLUSTER, found.mesh))
    assert [n.strategies for n in space.nodes] == [n.strategies for n in found.space.nodes]
    for step, other in _steps()[2]:
        assert solve.evaluate(space.program, other.tolist())[0] == pytest.approx(
            step.seconds + step.batch_seconds, rel=0.05
        )
        assert step.batch_seconds > 0.3 * step.seconds
