"""A plan is found again by the keys of its decisions, without solving, or refused with what differs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError, PlanError
from alpa_lite.passes.plans import replay
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.stages import stage_graph
from alpa_lite.passes.tracing import tracing
from alpa_lite.plan.plan import Plan
from gallery.batches import f32
from gallery.steps import residual_layers, sgd, updated

H100 = Cluster.preset("h100", nodes=1)
WIDTH = 1024


@sgd
def step(state, batch):
    return (residual_layers(state, batch["x"]) ** 2).mean()


ARGUMENTS = [{"up": f32(WIDTH, 4 * WIDTH), "down": f32(4 * WIDTH, WIDTH)}] * 3, {"x": f32(2048, WIDTH)}


def planned(cluster: Cluster = H100, **options: Any) -> Plan:
    return alpa_lite.make_plan(step, *ARGUMENTS, cluster=cluster, verify="off", **options)


def replayed(plan: Plan, fun=step, cluster: Cluster = H100) -> MeshSolution:
    replay.check_devices(plan, cluster)
    graph = stage_graph.whole_step_stage(tracing.trace(fun, ARGUMENTS, {}), -1)
    return replay.replay(graph, cluster, plan.stages[0], "explicit").mesh_solution


def test_arguments_of_a_stage_may_be_recorded_in_another_order():
    """As plans of versions do that kept them in the order of their names."""
    plan = planned(method=alpa_lite.Auto())
    (stage,) = plan.stages
    other = {**stage.ingredients, "arguments": "a digest of another order"}
    turned = dataclasses.replace(stage, arguments=stage.arguments[::-1], ingredients=other)
    assert turned.arguments != stage.arguments
    found = replayed(dataclasses.replace(plan, stages=(turned,)))
    assert found.solution.objective == pytest.approx(plan.step_seconds)
    fewer = dataclasses.replace(turned, arguments=turned.arguments[1:])
    with pytest.raises(PlanError, match="is not in the plan"):
        replayed(dataclasses.replace(plan, stages=(fewer,)))


def test_other_values_than_plans_are_refused():
    with pytest.raises(OptionError, match="plan=3: give a Plan, or the path of a file"):
        planned(plan=3)


def test_on_one_device_another_program_of_equal_arguments_is_refused():
    def other(state, batch):
        grads = jax.grad(lambda layers: sum((jnp.tanh(batch["x"] @ one["up"]) ** 2).mean() for one in layers))(state)
        return updated(state, grads), jnp.float32(0)

    one = H100.part(1)
    plan = planned(one)
    assert replayed(plan, cluster=one).solution.objective == pytest.approx(plan.step_seconds)
    with pytest.raises(PlanError, match=r"another program: program was .*Plan again"):
        replayed(plan, fun=other, cluster=one)
    stage = dataclasses.replace(plan.stages[0], ingredients={**plan.stages[0].ingredients, "jax": "0.0.1"})
    elsewhere = dataclasses.replace(plan, stages=(stage,))
    replayed(elsewhere, fun=other, cluster=one)  # what another version traces cannot be compared
