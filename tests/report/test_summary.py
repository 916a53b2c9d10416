"""`print(plan)`: a screen with the choice, its yield, and the figures of other methods."""

import dataclasses
import functools
import pickle
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.options import Method
from alpa_lite.plan.decisions import SearchSummary
from alpa_lite.plan.figures import AxisUse, Products
from alpa_lite.plan.plan import Plan
from alpa_lite.report import summary
from gallery.batches import f32, shape
from gallery.steps import optimizer_step
from tests.plans import gpt_plan, pipeline_plan, small_plan, with_comparisons

CLUSTER = Cluster.preset("h100", nodes=1)
OPTIMIZER = optax.adam(1e-3)


def loss_of(params, tokens):
    """Two products on [batch, sequence] tokens."""
    hidden = jnp.tanh(params["embed"][tokens] @ params["up"])
    return jnp.mean((hidden @ params["down"]) ** 2)


def planned(batch: int = 64, width: int = 128, hidden: int = 512, **options) -> Plan:
    params = {"embed": f32(256, width), "up": f32(width, hidden), "down": f32(hidden, width)}
    tokens = shape(batch, 32)
    args = params, jax.eval_shape(OPTIMIZER.init, params), tokens
    return alpa_lite.make_plan(optimizer_step(loss_of, OPTIMIZER), *args, cluster=CLUSTER, verify="off", **options)


@functools.cache
def planned_by(method: Method) -> Plan:
    return planned(method=method)


DATA, FSDP, ONE_MESH = alpa_lite.DataParallel(), alpa_lite.Zero(stage=3), alpa_lite.Sharded()


@pytest.mark.parametrize("shown", [gpt_plan(), gpt_plan(96), small_plan(), pipeline_plan("interleaved-1f1b", 3)])
def test_fits_a_screen(shown: Plan) -> None:
    lines = str(with_comparisons(shown)).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() or "\x1b" in line for line in lines)


def test_sets_that_were_not_expanded_are_listed_with_the_methods_that_plan_them() -> None:
    search = SearchSummary("normal", 1, 2, 1, 0, 1e-3, ("pipelines of 8 micro-batches",))
    text = " ".join(str(dataclasses.replace(gpt_plan(), search=search)).split())
    assert "pipelines of 8 micro-batches; to plan one, ask for it: method=Pipeline(num_stages=...) or Sharded(" in text


def test_utilisation_and_rates_are_those_of_the_formula() -> None:
    """Two products forward and four backward, since the embedded tokens have a gradient."""
    plan = planned_by(DATA)
    examples, tokens = summary.batch(plan)
    assert (examples, tokens) == (64, 64 * 32)
    assert plan.products.flops == 6 * 2 * tokens * 128 * 512
    assert plan.products.peak == CLUSTER.peak("float32")
    possible = plan.step_seconds * 8 * CLUSTER.peak("float32")
    assert summary.utilisation(plan) == pytest.approx(plan.products.flops / possible)
    assert f"{summary.units.digits(tokens / plan.step_seconds)} tokens/s" in str(plan)
    assert "utilisation" not in str(dataclasses.replace(gpt_plan(), products=Products()))


def test_rematerialised_products_are_no_work_of_the_step() -> None:
    def step(w, x):
        layer = jax.checkpoint(lambda h, w: jnp.tanh(jnp.tanh(h @ w) @ w))
        loss, grad = jax.value_and_grad(lambda w: layer(layer(x, w), w).mean())(w)
        return w - grad, loss

    plan = alpa_lite.make_plan(step, f32(64, 64), f32(512, 64), cluster=CLUSTER, method=DATA, verify="off")
    # Four products forward; backward two each, but none for x.
    assert plan.products.flops == (4 + 4 + 3) * 2 * 512 * 64 * 64


def test_figures_of_other_methods_are_evaluated_on_demand_and_kept(tmp_path) -> None:
    fresh = planned(method=ONE_MESH)
    assert fresh.comparisons == () and "_pending" not in fresh.to_json()["plan"]
    assert pickle.loads(pickle.dumps(fresh)) == fresh
    printed = str(fresh)
    rows = {row.name: row for row in fresh.comparisons}
    assert list(rows) == ["data parallel", "FSDP (ZeRO-3)", "tensor parallel", "one device"]
    for name, method in (("data parallel", DATA), ("FSDP (ZeRO-3)", FSDP)):
        assert rows[name].step_seconds == pytest.approx(planned_by(method).step_seconds, rel=2e-3)
        assert re.search(rf"{re.escape(name)} +8 .*B  (slower by|equally fast)", printed)
    fresh.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.comparisons == fresh.comparisons and str(loaded) == printed and loaded == fresh


def test_a_batch_that_does_not_divide_is_the_reason() -> None:
    assert "which does not divide over 8 devices" in str(planned(batch=12, method=ONE_MESH))


def test_methods_are_held_to_the_memory_of_the_plan() -> None:
    """With less memory than whole state takes, data parallelism says what it lacks, and FSDP has figures that fit."""
    plan = planned(16, 512, 2048, memory_per_device=15 * 10**6, method=FSDP)  # whole state takes 25 MB and more
    printed = str(plan)
    rows = {row.name: row for row in plan.comparisons}
    whole, sharded = rows["data parallel"], rows["FSDP (ZeRO-3)"]
    assert whole.step_seconds is None and (whole.bytes_per_device or 0) > 25e6
    assert sharded.step_seconds is not None and (sharded.bytes_per_device or 0) <= 15e6
    assert re.search(r"data parallel +8 .*does not fit by 0\.\d+ GiB", printed)


def test_a_pipeline_has_one_mesh_beside_it() -> None:
    piped = planned(method=alpa_lite.Pipeline(num_stages=2, submesh_shapes=((4,), (4,))), num_microbatches=4)
    printed = str(piped)
    assert re.search(r"\n  pipeline of 2 stages on 4 devices each, \S+ with 4 micro-batches", printed)
    names = [row.name for row in piped.comparisons]
    assert names == ["data parallel", "FSDP (ZeRO-3)", "tensor parallel", "one mesh", "one device"]
    assert piped.comparisons[-1].step_seconds is not None
    assert "data parallel over x=4" in printed


def test_words_for_the_use_of_the_mesh_axes() -> None:
    def lines(plan: Plan) -> list[str]:
        return ["; ".join(sentence.parts) for sentence in summary.choice_lines(plan)][:2]

    def words(*rows: AxisUse) -> list[str]:
        plan = gpt_plan()
        stages = (dataclasses.replace(plan.stages[0], axes=rows),)
        return lines(dataclasses.replace(plan, stages=stages))

    x, y = AxisUse("x", 4, {"data": 1.0}, 0.99, 1.0), AxisUse("y", 2, {"tensor": 1.0}, 0.8, 0.8)
    assert words(x, y) == [
        "data parallel over x=4; tensor parallel over y=2",
        "FSDP of parameters over x; parameters sharded over y (80 % of the bytes)",
    ]
    assert words(AxisUse("x", 8, {"data": 0.7, "expert": 0.3}, 0.0, 1.0)) == [
        "data parallel (70 % of the products' FLOPs) and expert parallel (30 %) over x=8",
        "parameters replicated, optimizer state sharded (ZeRO) over x",
    ]
    for method, said in ((DATA, "parameters replicated over x"), (FSDP, "FSDP of parameters over x")):
        assert lines(planned_by(method)) == ["data parallel over x=8", said]


def test_activations_are_the_values_that_the_backward_pass_reads() -> None:
    """tanh saves its result, and the products their left operands: the embedded tokens and tanh's result."""
    text = planned_by(DATA).activations()
    kinds = re.findall(r"f32\[[\d,]+\] \S+", text)
    assert "f32[64,32,512] P('x')" in kinds and "f32[64,32,128] P('x')" in kinds
    assert not any("256" in kind for kind in kinds)  # the table is no activation
    lines = text.splitlines()
    assert lines[1:] == sorted(lines[1:])
    size = sum(row.bytes * row.count for row in planned_by(DATA).stages[0].held)
    assert lines[0].endswith(f"wait for the backward pass, {size:,} bytes per device")
    assert planned(method=DATA).activations() == text


def test_long_notes_are_shortened_at_a_word():
    plan = dataclasses.replace(small_plan(), notes=("words " * 40,))
    (line,) = [line for line in str(plan).splitlines() if "words" in line]
    assert line.rstrip().endswith(" words ...") and len(line) <= 100
