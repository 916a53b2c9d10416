"""One mesh or a pipeline, how many micro-batches, and the laps that a plan prints.

What Auto must choose is tested where theory says what is best, on clusters that are not here.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
from alpa_lite import compiler
from alpa_lite.api import make_options, make_plan
from alpa_lite.cluster import Cluster, Dispatch, Link
from alpa_lite.compilation import runner
from alpa_lite.errors import InfeasibleError, OptionError, OrderError, PlanError
from alpa_lite.options import Auto, DataParallel, Pipeline, Sharded, TensorParallel, Zero
from alpa_lite.passes.checks import verification
from alpa_lite.passes.search import pipeline_analysis, pipelines
from alpa_lite.passes.stages.layer_costs import COSTS, MeasuredLayer
from gallery.batches import f32, normal
from gallery.steps import layers, sgd
from tests import comparing, invariants
from tests.helpers import local

FIXED = {
    "sharded": Sharded(),
    "data": DataParallel(),
    "zero-3": Zero(3),
    "tensor": TensorParallel(),
    "pipeline": Pipeline(),
}


@sgd
def step(weights, batch):
    x = batch["x"]
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer{i}"):
            x = jnp.tanh(x @ w)
    return ((x - batch["y"]) ** 2).mean()


def shapes_of(layers: int, width: int, batch: int) -> tuple[Any, ...]:
    """Weights of square layers, and a batch."""
    return [f32(width, width)] * layers, {"x": f32(batch, width), "y": f32(batch, width)}


def cluster(nodes: int, devices: int, network: float = 50e9) -> Cluster:
    """Devices of 100 teraFLOPs, 300 GB/s within a node."""
    return Cluster(
        device="test", devices_per_node=devices, nodes=nodes, memory=16 * 2**30, peak_flops={"f32": 100e12},
        memory_bandwidth=2e12, node_link=Link(300e9, 2e-6), network_link=Link(network, 5e-6),
    )  # fmt: skip


def plans(args: tuple[Any, ...], where: Cluster, **options: Any) -> dict[str, alpa_lite.Plan]:
    """The plan of Auto and of every fixed method that fits."""
    out = {}
    for name, method in {"auto": Auto(), **FIXED}.items():
        try:
            out[name] = make_plan(step, *args, cluster=where, method=method, verify="off", **options)
        except InfeasibleError:
            assert name != "auto"
    assert out["auto"].step_seconds <= min(plan.step_seconds for plan in out.values()) * (1 + 1e-9)
    return out


def test_a_model_that_fits_stays_on_one_mesh():
    args = shapes_of(layers=4, width=1024, batch=65536)
    found = plans(args, cluster(1, 4))
    assert found["auto"].num_stages == 1
    assert not found["auto"].is_pipelined


@pytest.mark.slow
def test_slow_links_between_nodes_lead_to_stages_per_node():
    args = shapes_of(layers=4, width=8192, batch=4096)
    where = dataclasses.replace(cluster(2, 4, network=0.5e9), peak_flops={"f32": 500e9})
    found = plans(args, where, num_microbatches=8)["auto"]
    assert found.is_pipelined
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
    error = OrderError("schedule 1f1b cannot run this step")
    monkeypatch.setattr(pipeline_analysis.PipelineAnalyses, "build", mock.Mock(side_effect=error))
    args = shapes_of(layers=4, width=8192, batch=4096)
    where = cluster(2, 4, network=0.5e9)
    found = make_plan(step, *args, cluster=where, num_microbatches=8, verify="off")
    assert not found.is_pipelined
    assert any("schedule 1f1b cannot run this step" in note for note in found.notes)
    with pytest.raises(OrderError):
        make_plan(step, *args, cluster=where, num_microbatches=8, verify="off", method=Pipeline())


@pytest.mark.slow
def test_memory_that_fits_no_mesh_leads_to_a_pipeline():
    """Sizes that divide into no equal parts cannot be sharded, but layers can be apart."""
    args = shapes_of(layers=4, width=2039, batch=32)
    where = cluster(1, 4)
    weights = 2039 * 2039 * 4
    budget = 7 * weights // 2
    with pytest.raises(InfeasibleError):
        make_plan(step, *args, cluster=where, method=Sharded(), memory_per_device=budget)
    found = plans(args, where, memory_per_device=budget)
    assert found["auto"].num_stages > 1
    assert all(stage.memory.total <= budget for stage in found["auto"].stages)


def test_memory_is_the_reason_where_no_number_of_micro_batches_fits():
    """Not that 32 examples in more than 8 micro-batches do not divide over 4 devices: nobody asked for these."""
    args = shapes_of(layers=4, width=2039, batch=32)
    budget = 7 * 2039 * 2039 * 4 // 2
    with pytest.raises(InfeasibleError, match="memory_per_device"):
        make_plan(step, *args, cluster=cluster(1, 4), method=DataParallel(), memory_per_device=budget)


def test_a_pipeline_that_takes_as_long_as_starting_its_tasks_is_expected_to():
    """Each of 4 stages runs for 20 microseconds, and starting that takes 100: there are fewer micro-batches than 8."""
    args = shapes_of(layers=4, width=2039, batch=32)
    options: Any = {"memory_per_device": 3.5 * 2039 * 2039 * 4, "method": Pipeline(), "verify": "off"}
    many = make_plan(step, *args, cluster=cluster(1, 4), num_microbatches=8, **options)
    (chosen,) = (row for row in many.candidates if row.status == "chosen")
    assert many.step_seconds == pytest.approx(chosen.step_seconds, rel=0.1)
    found = make_plan(step, *args, cluster=cluster(1, 4), **options)
    assert found.num_microbatches < 8 and found.step_seconds < many.step_seconds / 3


# -- one mesh: what is computed again, and micro-batches --------------------------------------------------------------


@sgd
def residual(weights: Any, batch: Any) -> Any:
    """Blocks whose inner values are eight times as wide as what crosses them."""
    x = batch
    for up, down in weights:
        x = x + jnp.tanh(jax.nn.gelu(x @ up)) @ down
    return (x**2).mean()


def residual_args() -> Any:
    weights = [(0.1 * normal(i, 16, 128), 0.1 * normal(4 + i, 128, 16)) for i in range(4)]
    return weights, 0.1 * normal(8, 512, 16)


@pytest.mark.slow
def test_one_mesh_computes_again_what_does_not_fit() -> None:
    args = residual_args()
    where = cluster(1, 2)
    plan = make_plan(residual, *args, cluster=where, method=Sharded(), num_microbatches=1, verify="off")
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

    run = alpa_lite.parallelize(residual, plan=less, cluster=local(2))
    comparing.compare(run(*args), jax.jit(residual)(*args))


def test_a_compiler_that_drops_barriers_gets_micro_batches_instead() -> None:
    args = residual_args()
    where = local(2)
    plan = make_plan(residual, *args, cluster=where, method=Sharded(), verify="off")
    budget = plan.stages[0].memory.total // 2
    less = make_plan(residual, *args, cluster=where, method=Sharded(), memory_per_device=budget, verify="off")
    assert less.division.remat == ("none",) and less.num_microbatches > 1
    with pytest.raises(InfeasibleError):
        make_plan(
            residual, *args, cluster=where, method=Sharded(), memory_per_device=budget, num_microbatches=1
        )  # fmt: skip
    with pytest.raises(OptionError, match=r"remat='layer'.* merges .*remat=\"none\""):
        make_plan(residual, *args, cluster=where, method=Sharded(remat="layer"))


def test_what_one_mesh_computes_again_can_be_given() -> None:
    args, where = residual_args(), cluster(1, 2)
    for remat in ("none", "selective", "layer"):
        plan = make_plan(residual, *args, cluster=where, method=Sharded(remat=remat), verify="off")
        assert plan.division.remat == (remat,)


# -- laps, dumps and checks -------------------------------------------------------------------------------------------

LAPS = ("tracing", "factors", "grouping", "sharding", "lowering", "programs", "plan", "checks")
PIPELINE_LAPS = ("tracing", "factors", "micro-batches", "layers", "costs", "slicing", "stages", "sharding", "lowering",
                 "programs", "plan", "checks")  # fmt: skip


@pytest.mark.parametrize(("method", "parts", "laps"), [(Sharded(), 1, LAPS), (Pipeline(2), 2, PIPELINE_LAPS)])
def test_every_pass_is_timed_and_dumped_and_keeps_its_invariants(method, parts, laps, tmp_path, monkeypatch) -> None:
    run, checked = runner.Passes.__call__, set()

    def run_checked(passes, name, *args, **kwargs):
        value = run(passes, name, *args, **kwargs)
        invariants.check(value)
        checked.add(name)
        return value

    monkeypatch.setattr(runner.Passes, "__call__", run_checked)
    args = shapes_of(layers=4, width=64, batch=16)
    plan = make_plan(
        step, *args, cluster=cluster(1, 2), method=method, num_microbatches=parts, dump_dir=tmp_path
    )  # fmt: skip
    assert checked == set(laps)
    assert set(plan.planning_seconds) == set(laps)
    assert all(seconds > 0 for seconds in plan.planning_seconds.values())
    files = sorted(tmp_path.iterdir())
    assert {path.stem.split("_", 1)[1] for path in files} == {lap.replace(" ", "_") for lap in laps}
    assert "dot_general" in files[0].read_text() and all(path.read_text().strip() for path in files)


@functools.cache
def in_parts(method: Any) -> alpa_lite.Plan:
    args = shapes_of(layers=4, width=256, batch=64)
    return make_plan(step, *args, cluster=cluster(1, 4), method=method, num_microbatches=4, verify="off")


def test_the_bound_of_a_pipeline_is_that_of_the_model_that_chose_it() -> None:
    """Sums over layers have a bound; the simulated step is of another model, and is not said to be optimal."""
    plan = in_parts(Pipeline(2))
    assert plan.solver.model == "layers"
    assert plan.solver.bound <= plan.solver.objective != plan.step_seconds
    assert plan.solver.gap == pytest.approx((plan.solver.objective - plan.solver.bound) / plan.solver.objective)
    assert "is not comparable with the bound" in " ".join(plan.details().split())


@pytest.mark.parametrize("method", [Sharded(), Pipeline(2)])
def test_solver_plan_and_simulation_have_one_price_list(method) -> None:
    """The seconds of a stage's instructions add up to the objective of its integer program."""
    plan = in_parts(method)
    for number, stage in enumerate(plan.stages):
        assert stage.compute_seconds + stage.communication_seconds == pytest.approx(stage.solver.objective, rel=1e-6)
        own = [event for event in plan.division.timeline.events if event.stage == number]
        computed = sum(event.seconds for event in own if event.kind != "transfer")
        assert computed == pytest.approx(stage.seconds)


def test_our_own_faults_in_the_search_of_pipelines_are_not_swallowed(monkeypatch) -> None:
    """A pipeline that does not fit gives way to one mesh, with a note; a broken program does not."""
    args = shapes_of(layers=2, width=64, batch=16)
    monkeypatch.setattr(pipelines.PipelineSearch, "estimate", lambda _: (0.0, 0.0))
    price = mock.Mock(side_effect=InfeasibleError("no stage fits"))
    monkeypatch.setattr(pipeline_analysis.PipelineAnalyses, "price", price)
    plan = make_plan(step, *args, cluster=cluster(1, 2), verify="off")
    assert any("no stage fits" in note for note in plan.notes)
    price.side_effect = PlanError("the lists wait for each other")
    with pytest.raises(PlanError):
        make_plan(step, *args, cluster=cluster(1, 2), verify="off")


def test_estimates_of_layers_do_not_decide_alone_that_no_pipeline_fits(monkeypatch) -> None:
    """With estimates of bytes five times too high, a budget that the stages themselves keep still gives a pipeline."""

    arguments = [(f32(64, 256), f32(256, 64)) for _ in range(2)], f32(64, 64)
    options: Any = {"cluster": Cluster.preset("a100").part(2), "method": Pipeline(), "verify": "off"}
    roomy = make_plan(residual, *arguments, **options)
    budget = int(1.02 * max(stage.memory.total for stage in roomy.stages))
    factors = np.array([5.0 if name.endswith("_bytes") else 1.0 for name in COSTS])[:, None]
    cost = MeasuredLayer.cost
    monkeypatch.setattr(
        MeasuredLayer, "cost", lambda own: dataclasses.replace(found := cost(own), table=found.table * factors)
    )
    monkeypatch.setattr(pipeline_analysis, "MAX_LAYER_ERROR", 20.0)
    plan = make_plan(residual, *arguments, memory_per_device=budget, **options)
    assert max(stage.memory.total for stage in plan.stages) <= budget


# -- tiny models ------------------------------------------------------------------------------------------------------

CPU = Cluster.preset("cpu")


@sgd
def perceptron(weights: Any, batch: Any) -> Any:
    return jnp.mean((layers(weights, batch[0]) - batch[1]) ** 2)


def plan_widths(where: Cluster, widths: tuple[int, ...], examples: int, **options: Any) -> alpa_lite.Plan:
    weights = [f32(*pair) for pair in itertools.pairwise(widths)]
    batch = f32(examples, widths[0]), f32(examples, widths[-1])
    return make_plan(perceptron, weights, batch, cluster=where, verify="off", **options)


@pytest.mark.parametrize(("widths", "examples"), [((16,) * 3, 16), ((180,) * 5, 64), ((32, 256, 64, 8), 8)])
def test_auto_takes_one_mesh_where_a_step_takes_less_than_starting_its_tasks(widths, examples) -> None:
    assert plan_widths(CPU, widths, examples).num_stages == 1


def test_a_tiny_pipeline_takes_as_long_as_its_dispatch() -> None:
    """Each of four stages runs four micro-batches forward and backward: tasks that one process starts in turn."""
    widths, examples = (128,) * 5, 32
    options: dict[str, Any] = {"method": Pipeline(submesh_shapes=(2, 2, 2, 2)), "num_microbatches": 4}
    free = dataclasses.replace(CPU, dispatch=Dispatch())
    without, counted = (plan_widths(where, widths, examples, **options) for where in (free, CPU))
    least = (2 * 4 * 4 - 1) * CPU.dispatch.seconds(2)
    assert without.step_seconds < least <= counted.step_seconds
    mesh = plan_widths(CPU, widths, examples, method=Sharded())
    assert mesh.step_seconds == mesh.solver.objective < counted.step_seconds
