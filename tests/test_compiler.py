"""The page: one mesh or a pipeline, how many micro-batches, and the laps that a plan prints.

What Auto must choose is tested where theory says what is best, on clusters that are not here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
from alpa_lite import compiler
from alpa_lite.api import make_options, make_plan
from alpa_lite.cluster import Cluster, Link
from alpa_lite.compilation import runner
from alpa_lite.errors import InfeasibleError, OptionError, OrderError, PlanError
from alpa_lite.options import Auto, DataParallel, Pipeline, Sharded, TensorParallel, Zero
from alpa_lite.passes import programs
from alpa_lite.passes.checks import verification
from alpa_lite.passes.plans import writing
from alpa_lite.passes.search import pipeline_analysis, pipelines
from alpa_lite.passes.stages import pricing
from tests import comparing

FIXED = {
    "sharded": Sharded(),
    "data": DataParallel(),
    "zero-3": Zero(3),
    "tensor": TensorParallel(),
    "pipeline": Pipeline(),
}


def step_and_args(layers: int, width: int, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """Plain descent on a chain of square layers."""

    def step(weights, batch):
        def loss(weights):
            x = batch["x"]
            for i, w in enumerate(weights):
                with jax.named_scope(f"layer{i}"):
                    x = jnp.tanh(x @ w)
            return ((x - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value

    rows = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return step, ([jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers, {"x": rows, "y": rows})


def cluster(nodes: int, devices: int, network: float = 50e9) -> Cluster:
    """Devices of 100 teraFLOPs, 300 GB/s within a node."""
    return Cluster(
        device="test",
        devices_per_node=devices,
        nodes=nodes,
        memory=16 * 2**30,
        peak_flops={"f32": 100e12},
        memory_bandwidth=2e12,
        node_link=Link(300e9, 2e-6),
        network_link=Link(network, 5e-6),
    )


def plans(step: Any, args: tuple[Any, ...], where: Cluster, **options: Any) -> dict[str, alpa_lite.Plan]:
    """The plan of Auto and of every fixed method that fits."""
    out = {}
    for name, method in {"auto": Auto(), **FIXED}.items():
        try:
            out[name] = alpa_lite.make_plan(step, *args, cluster=where, method=method, verify="off", **options)
        except InfeasibleError:
            assert name != "auto"
    assert out["auto"].step_seconds <= min(plan.step_seconds for plan in out.values()) * (1 + 1e-9)
    return out


def test_a_model_that_fits_stays_on_one_mesh():
    step, args = step_and_args(layers=4, width=1024, batch=65536)
    found = plans(step, args, cluster(1, 4))
    assert found["auto"].num_stages == 1
    assert not found["auto"].pipelined


@pytest.mark.slow
def test_slow_links_between_nodes_lead_to_stages_per_node():
    step, args = step_and_args(layers=4, width=8192, batch=4096)
    where = dataclasses.replace(cluster(2, 4, network=0.5e9), peak_flops={"f32": 500e9})
    found = plans(step, args, where, num_microbatches=8)["auto"]
    assert found.pipelined
    shape = found.division
    firsts = [shape.first_devices[mesh] for mesh in shape.submeshes]
    spans = [
        range(first, first + math.prod(stage.mesh_shape)) for first, stage in zip(firsts, found.stages, strict=True)
    ]
    assert {device for span in spans for device in span} == set(range(8))
    assert all(span[0] // 4 == span[-1] // 4 for span in spans)


@pytest.mark.slow
def test_auto_goes_on_where_the_stages_of_a_pipeline_wait_for_each_other(monkeypatch):
    """A schedule that cannot run the stages that were chosen is a reason for a mesh, and no error."""

    def unbuildable(*_: Any) -> Any:
        raise OrderError("schedule 1f1b cannot run this step")

    monkeypatch.setattr(pipeline_analysis.PipelineAnalyses, "build", unbuildable)
    step, args = step_and_args(layers=4, width=8192, batch=4096)
    where = cluster(2, 4, network=0.5e9)
    found = alpa_lite.make_plan(step, *args, cluster=where, num_microbatches=8, verify="off")
    assert not found.pipelined
    assert any("schedule 1f1b cannot run this step" in note for note in found.notes)
    with pytest.raises(OrderError):
        alpa_lite.make_plan(step, *args, cluster=where, num_microbatches=8, verify="off", method=Pipeline())


@pytest.mark.slow
def test_memory_that_fits_no_mesh_leads_to_a_pipeline():
    """Sizes that divide into no equal parts cannot be sharded, but layers can be apart."""
    step, args = step_and_args(layers=4, width=2039, batch=32)
    where = cluster(1, 4)
    weights = 2039 * 2039 * 4
    budget = 7 * weights // 2
    with pytest.raises(InfeasibleError):
        alpa_lite.make_plan(step, *args, cluster=where, method=Sharded(), memory_per_device=budget)
    found = plans(step, args, where, memory_per_device=budget)
    assert found["auto"].num_stages > 1
    assert all(stage.memory.total <= budget for stage in found["auto"].stages)


def test_memory_is_the_reason_where_no_number_of_micro_batches_fits():
    """Not that 32 examples in more than 8 micro-batches do not divide over 4 devices: nobody asked for these."""
    step, args = step_and_args(layers=4, width=2039, batch=32)
    budget = 7 * 2039 * 2039 * 4 // 2
    with pytest.raises(InfeasibleError, match="memory_per_device"):
        alpa_lite.make_plan(step, *args, cluster=cluster(1, 4), method=DataParallel(), memory_per_device=budget)


def test_a_pipeline_that_takes_as_long_as_starting_its_tasks_is_expected_to():
    """Each of 4 stages runs for 20 microseconds, and starting that takes 100: there are fewer micro-batches than 8."""
    step, args = step_and_args(layers=4, width=2039, batch=32)
    options: Any = {"memory_per_device": 3.5 * 2039 * 2039 * 4, "method": Pipeline(), "verify": "off"}
    many = alpa_lite.make_plan(step, *args, cluster=cluster(1, 4), num_microbatches=8, **options)
    (chosen,) = (row for row in many.candidates if row.status == "chosen")
    assert many.step_seconds == pytest.approx(chosen.step_seconds, rel=0.1)
    found = alpa_lite.make_plan(step, *args, cluster=cluster(1, 4), **options)
    assert found.num_microbatches < 8 and found.step_seconds < many.step_seconds / 3


# -- one mesh: what is computed again, and micro-batches --------------------------------------------------------------


def residual(weights: Any, batch: Any) -> Any:
    """Plain descent on blocks whose inner values are eight times as wide as what crosses them."""

    def loss(weights: Any) -> Any:
        x = batch
        for up, down in weights:
            x = x + jnp.tanh(jax.nn.gelu(x @ up)) @ down
        return (x**2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def residual_args() -> Any:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return jnp.asarray(0.1 * rng.standard_normal(shape, np.float32))

    return [(array(16, 128), array(128, 16)) for _ in range(4)], array(512, 16)


@pytest.mark.slow
def test_one_mesh_computes_again_what_does_not_fit() -> None:
    args = residual_args()
    where = cluster(1, 2)
    plan = alpa_lite.make_plan(residual, *args, cluster=where, method=Sharded(), num_microbatches=1, verify="off")
    assert plan.division.remat == ("none",)
    budget = plan.stages[0].memory.total // 2
    options: Any = {"method": Sharded(), "num_microbatches": 1, "memory_per_device": budget}
    compiled = compiler.compile_step(residual, args, {}, make_options(options), where)
    less = compiled.plan
    assert less.division.remat != ("none",) and less.stages[0].memory.total <= budget
    (stage,) = compiled.staged.stages
    (segment,) = stage.segments.items
    module = verification.module_of(stage, segment, "cuda")
    assert "optimization_barrier" in str(module)  # or the compiler would merge both computations

    run = alpa_lite.parallelize(residual, plan=less, cluster=Cluster.local(jax.devices()[:2]))
    comparing.compare(run(*args), jax.jit(residual)(*args))


def test_a_compiler_that_drops_barriers_gets_micro_batches_instead() -> None:
    args = residual_args()
    where = Cluster.local(jax.devices()[:2])
    plan = alpa_lite.make_plan(residual, *args, cluster=where, method=Sharded(), verify="off")
    budget = plan.stages[0].memory.total // 2
    less = alpa_lite.make_plan(residual, *args, cluster=where, method=Sharded(), memory_per_device=budget, verify="off")
    assert less.division.remat == ("none",) and less.num_microbatches > 1
    with pytest.raises(InfeasibleError):
        alpa_lite.make_plan(
            residual, *args, cluster=where, method=Sharded(), memory_per_device=budget, num_microbatches=1
        )  # fmt: skip
    with pytest.raises(OptionError, match=r"remat='layer'.* merges .*remat=\"none\""):
        alpa_lite.make_plan(residual, *args, cluster=where, method=Sharded(remat="layer"))


def test_what_one_mesh_computes_again_can_be_given() -> None:
    args, where = residual_args(), cluster(1, 2)
    for remat in ("none", "selective", "layer"):
        plan = alpa_lite.make_plan(residual, *args, cluster=where, method=Sharded(remat=remat), verify="off")
        assert plan.division.remat == (remat,)


# -- laps, dumps and checks -------------------------------------------------------------------------------------------

LAPS = ("tracing", "factors", "micro-batches", "layers", "costs", "slicing", "stages", "sharding", "lowering",
        "programs", "plan", "checks")  # fmt: skip


def test_every_pass_of_a_pipeline_is_timed_dumped_and_checked(tmp_path) -> None:
    step, args = step_and_args(layers=4, width=64, batch=16)
    with runner.checking():
        plan = alpa_lite.make_plan(
            step, *args, cluster=cluster(1, 2), method=Pipeline(2), num_microbatches=2, dump_dir=tmp_path
        )  # fmt: skip
    assert set(plan.planning_seconds) == set(LAPS)
    assert all(seconds > 0 for seconds in plan.planning_seconds.values())
    written = {path.stem.split("_", 1)[1] for path in tmp_path.iterdir()}
    assert written == {lap.replace(" ", "_") for lap in LAPS}


def test_a_value_that_breaks_its_invariants_is_caught_after_its_pass(monkeypatch) -> None:
    step, args = step_and_args(layers=2, width=64, batch=16)
    right = programs.single

    def wrong(*given: Any) -> Any:
        found = right(*given)
        return compiler.replace(found, remat=())

    monkeypatch.setattr(programs, "single", wrong)
    with runner.checking(), pytest.raises(AssertionError):
        alpa_lite.make_plan(step, *args, cluster=cluster(1, 2), method=Sharded(), verify="off")


def test_the_bound_of_a_pipeline_is_that_of_the_model_that_chose_it() -> None:
    """Sums over layers have a bound; the simulated step is of another model, and is not said to be optimal."""
    step, args = step_and_args(layers=4, width=256, batch=64)
    on = cluster(1, 4)
    options = make_options({"method": Pipeline(2), "num_microbatches": 4, "verify": "off", "cluster": on})
    compiled = compiler.compile_step(step, args, {}, options, on)
    plan, staged = compiled.plan, compiled.staged
    assert plan.solver.model == "layers"
    assert plan.solver.bound <= plan.solver.objective
    assert plan.solver.gap == pytest.approx((plan.solver.objective - plan.solver.bound) / plan.solver.objective)
    assert plan.solver.objective != plan.step_seconds
    assert "is not comparable with the bound" in " ".join(plan.details().split())
    verdict = compiler.replace(staged.verdict, seconds=3 * staged.seconds, bound=2 * staged.seconds)
    slower = writing.write(compiler.replace(staged, verdict=verdict), on, method="pipeline", budget=2**34)
    assert slower.solver.bound == slower.step_seconds == plan.step_seconds  # its own simulation is a plan
    assert slower.solver.gap == pytest.approx(2 / 3)


@pytest.mark.parametrize("method", [Sharded(), Pipeline(2)])
def test_solver_plan_and_simulation_have_one_price_list(method) -> None:
    """The seconds of a stage's instructions add up to the objective of its integer program."""
    step, args = step_and_args(layers=4, width=256, batch=64)
    plan = alpa_lite.make_plan(step, *args, cluster=cluster(1, 4), method=method, num_microbatches=4, verify="off")
    for number, stage in enumerate(plan.stages):
        assert stage.compute_seconds + stage.communication_seconds == pytest.approx(stage.solver.objective, rel=1e-6)
        own = [event for event in plan.division.timeline.events if event.stage == number]
        computed = sum(event.seconds for event in own if event.kind != "transfer")
        assert computed == pytest.approx(stage.seconds)


def test_our_own_faults_in_the_search_of_pipelines_are_not_swallowed(monkeypatch) -> None:
    """A pipeline that does not fit gives way to one mesh, with a note; a broken program does not."""
    step, args = step_and_args(layers=2, width=64, batch=16)
    where = cluster(1, 2)
    monkeypatch.setattr(pipelines.PipelineSearch, "estimate", lambda _: (0.0, 0.0))

    def infeasible(*given: Any, **more: Any) -> Any:
        raise InfeasibleError("no stage fits")

    def broken(*given: Any, **more: Any) -> Any:
        raise PlanError("the lists wait for each other")

    monkeypatch.setattr(pipeline_analysis.PipelineAnalyses, "_price", infeasible)
    plan = alpa_lite.make_plan(step, *args, cluster=where, verify="off")
    assert any("no stage fits" in note for note in plan.notes)
    monkeypatch.setattr(pipeline_analysis.PipelineAnalyses, "_price", broken)
    with pytest.raises(PlanError):
        alpa_lite.make_plan(step, *args, cluster=where, verify="off")


def test_estimates_of_layers_do_not_decide_alone_that_no_pipeline_fits(monkeypatch) -> None:
    """With estimates of bytes five times too high, a budget that the stages themselves keep still gives a pipeline."""

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            x = batch
            for w, v in params:
                x = x + jnp.tanh(x @ w) @ v
            return (x**2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    state = [(shape((64, 256)), shape((256, 64))) for _ in range(2)]
    arguments = state, shape((64, 64))
    options: Any = {"cluster": Cluster.preset("a100").part(2), "method": Pipeline(), "verify": "off"}
    roomy = make_plan(step, *arguments, **options)
    budget = int(1.02 * max(stage.memory.total for stage in roomy.stages))
    tables = pricing._tables

    def too_high(layers: Any) -> Any:
        found = tables(layers)
        sizes = ("fixed", "inflight", "split", "temporary")
        return {name: table * (5.0 if name in sizes else 1.0) for name, table in found.items()}

    monkeypatch.setattr(pricing, "_tables", too_high)
    monkeypatch.setattr(pipeline_analysis, "MAX_LAYER_ERROR", 20.0)
    plan = make_plan(step, *arguments, memory_per_device=budget, **options)
    assert max(stage.memory.total for stage in plan.stages) <= budget
