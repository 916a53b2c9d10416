"""Communication that hides behind computing: two streams, and plans that count on them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite import compiler
from alpa_lite.options import Method, Options
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.plan.plan import Plan
from gallery.batches import shape
from gallery.steps import mlp, sgd

LAYERS, WIDTH, EXAMPLES = 6, 4096, 16384
H100 = dataclasses.replace(alpa_lite.Cluster.preset("h100", nodes=1), collectives=(), memory_efficiency=1.0)


step, _ = mlp(WIDTH, EXAMPLES, LAYERS)


def arguments(examples: int = EXAMPLES):
    params = [shape(WIDTH, WIDTH, dtype=jnp.bfloat16)] * LAYERS
    return params, shape(examples, WIDTH, dtype=jnp.bfloat16)


@functools.cache
def compiled(
    method: Method, overlap: bool, cluster: alpa_lite.Cluster = H100, examples: int = EXAMPLES
) -> tuple[Plan, Staged]:
    options = Options(method=method, overlap=overlap, verify="off")
    found = compiler.compile_step(step, arguments(examples), {}, options, cluster)
    return found.plan, found.staged


def seconds_of(plan: Plan, kind: str) -> float:
    """Of the collectives of a kind that move weights or gradients."""
    found = zip(plan.collectives, plan.collective_seconds, strict=True)
    return sum(seconds for c, seconds in found if c.kind == kind and c.bytes > 1000)


def test_gradients_hide_behind_the_layers_before_them():
    """All but the last bucket: the gradient of the first layer is made last, and nothing is left to compute."""
    (plan, staged), (serial, _) = compiled(alpa_lite.DataParallel(), True), compiled(alpa_lite.DataParallel(), False)
    (stage,), (before,) = plan.stages, serial.stages
    assert before.hidden_seconds == before.hideable_seconds == 0
    assert plan.step_seconds == pytest.approx(serial.step_seconds - stage.hidden_seconds)
    gradients = seconds_of(plan, "all_reduce")
    assert stage.hideable_seconds == pytest.approx(gradients)
    alpha, beta = staged.stages[0].prices.cost.coefficients("all_reduce", ("x",))
    last = alpha + beta * 2 * WIDTH**2  # each is a bucket by itself
    sums = stage.communication_seconds - gradients  # of the loss, which waits
    update = LAYERS * 2 * 3 * WIDTH**2 / H100.memory_bandwidth
    least = stage.compute_seconds - update + last + sums
    # What is computed after the reverse pass waits for the last bucket.
    assert least <= plan.step_seconds <= least + 1.5 * update


def test_parameters_are_gathered_ahead_of_their_use():
    plan, staged = compiled(alpa_lite.Zero(3), True)
    (stage,) = plan.stages
    kinds = {kind: seconds_of(plan, kind) for kind in ("all_gather", "reduce_scatter")}
    assert stage.hideable_seconds == pytest.approx(sum(kinds.values()))
    # The first gather has nothing before it, and blocks of gradients that are no bucket together are sent at the end.
    first = kinds["all_gather"] / (2 * LAYERS - 1)
    assert stage.hidden_seconds == pytest.approx(kinds["all_gather"] - first, rel=0.05)
    (found,) = staged.stages[0].overlap.values()
    assert found.prefetched_bytes == 2 * WIDTH**2
    assert any(f"holds up to {32:.1f} MiB more" in note for note in plan.notes)


def test_where_links_are_busier_only_as_much_as_is_computed_hides():
    few = EXAMPLES // 64
    plan, _ = compiled(alpa_lite.DataParallel(), True, H100, few)
    (stage,) = plan.stages
    assert stage.hideable_seconds > stage.compute_seconds
    assert 0 < stage.hidden_seconds < stage.compute_seconds
    assert plan.step_seconds > stage.hideable_seconds


@pytest.mark.slow
def test_all_plans_are_compared_by_what_hides():
    """Without overlap tensor parallelism in part is faster; with it, data parallelism that shards its state."""
    textbook = [alpa_lite.DataParallel(), alpa_lite.Zero(3), alpa_lite.TensorParallel()]
    for overlap in (False, True):
        best = compiled(alpa_lite.Auto(), overlap)[0].step_seconds
        assert all(best <= compiled(method, overlap)[0].step_seconds * (1 + 1e-6) for method in textbook)
    plan, _ = compiled(alpa_lite.Sharded(), True)
    compared = {row.name: row.step_seconds for row in plan.with_baselines().comparisons}
    for name, method in zip(("data parallel", "FSDP (ZeRO-3)"), textbook, strict=False):
        assert compared[name] == pytest.approx(compiled(method, True)[0].step_seconds, rel=1e-3)
    assert compiled(alpa_lite.Auto(), True)[0].step_seconds < compiled(alpa_lite.Auto(), False)[0].step_seconds


def test_the_plan_says_how_much_hides_and_who_does_it():
    plan, _ = compiled(alpa_lite.DataParallel(), True)
    (stage,) = plan.stages
    said = f"overlapped: {1e6 * stage.hidden_seconds:.0f} µs of {1e6 * stage.hideable_seconds:.0f} µs of gradient"
    assert said in str(plan) and said in plan.details()
    assert any("xla_gpu_enable_latency_hiding_scheduler=True" in note for note in plan.notes)
    assert Plan.from_json(plan.to_json()).stages[0].hidden_seconds == stage.hidden_seconds
    assert "overlapped" not in str(compiled(alpa_lite.DataParallel(), False)[0])


def test_nothing_overlaps_on_cpus():
    cluster = alpa_lite.Cluster.local(jax.devices()[:4])
    (plan, _), (serial, _) = (compiled(alpa_lite.DataParallel(), o, cluster, 64) for o in (True, False))
    assert plan.step_seconds == serial.step_seconds
    assert "overlapped: nothing" in str(plan) and any("nothing overlaps on cpu" in note for note in plan.notes)
    assert plan.cluster.compiler_options == {}


def test_sums_do_not_hide_on_tpus():
    """Their compiler starts and awaits a sum in one instruction."""
    cluster = alpa_lite.Cluster.preset("v5e", topology=(2, 4))
    (stage,) = compiled(alpa_lite.DataParallel(), True, cluster)[0].stages
    assert stage.hidden_seconds == stage.hideable_seconds == 0
    plan, _ = compiled(alpa_lite.Zero(3), True, cluster)
    assert plan.stages[0].hideable_seconds == pytest.approx(seconds_of(plan, "all_gather"))
    assert plan.stages[0].hidden_seconds > 0 and plan.cluster.compiler_options == {}


def test_a_loop_keeps_what_it_communicates_inside():
    """Gradients of layers in a scan are summed in each iteration, behind what that computes, and in no other."""

    @sgd
    def scanned(params, batch):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params)
        return (h**2).mean()

    params = shape(LAYERS, WIDTH, WIDTH, dtype=jnp.bfloat16)
    options = Options(method=alpa_lite.Zero(3), overlap=True, verify="off")
    found = compiler.compile_step(scanned, (params, arguments()[1]), {}, options, H100)
    (stage,) = found.plan.stages
    gathers, sums = (seconds_of(found.plan, kind) for kind in ("all_gather", "reduce_scatter"))
    assert stage.hideable_seconds == pytest.approx(gathers + sums)
    # A weight is needed at the beginning of an iteration forward, and behind the product of its gradient backward; the
    # sum of that gradient is there after the other product at the earliest.
    assert stage.hidden_seconds == pytest.approx(gathers / 2 + sums, rel=0.05)
