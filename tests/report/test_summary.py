"""`print(plan)`: a screen that says what was chosen, what it yields, and how other methods would do."""

from __future__ import annotations

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.figures import AxisUse, Comparison, Products
from alpa_lite.plan import Plan
from alpa_lite.report import activations, strategy_names, summary
from tests.plans import gpt_plan, pipeline_plan, small_plan

CLUSTER = Cluster.preset("h100", nodes=1)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens_step(params, opt, tokens):
    """Two products on [batch, sequence] tokens."""

    def loss_fn(params):
        hidden = jnp.tanh(params["embed"][tokens] @ params["up"])
        return jnp.mean((hidden @ params["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, opt = OPTIMIZER.update(gradients, opt)
    return optax.apply_updates(params, updates), opt, loss


OPTIMIZER = optax.adam(1e-3)


def tokens_args(batch: int = 64, sequence: int = 32, width: int = 128, hidden: int = 512):
    params = {"embed": f32(256, width), "up": f32(width, hidden), "down": f32(hidden, width)}
    tokens = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return params, jax.eval_shape(OPTIMIZER.init, params), tokens


def planned(*args, **options) -> Plan:
    return alpa_lite.make_plan(tokens_step, *(args or tokens_args()), cluster=CLUSTER, verify="off", **options)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def with_comparisons(plan: Plan) -> Plan:
    rows = (
        Comparison("data parallel", (8,), 1.25 * plan.step_seconds, plan.memory_per_device + 3 * 2**30),
        Comparison("FSDP (ZeRO-3)", (8,), 1.25 * plan.step_seconds, 2**30),
        Comparison("tensor parallel", reason="argument batch has a batch of 6, which does not divide over 8 devices"),
        Comparison("one mesh", (8,), plan.step_seconds, 2**30),
    )
    return dataclasses.replace(plan, comparisons=rows)


@pytest.mark.parametrize("shown", [gpt_plan(), gpt_plan(96), small_plan(), pipeline_plan("interleaved-1f1b", 3)])
def test_fits_a_screen(shown: Plan) -> None:
    lines = str(with_comparisons(shown)).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() or "\x1b" in line for line in lines)


def test_repr_is_one_line() -> None:
    assert repr(gpt_plan()) == (
        "<Plan 'Auto()' for 8 V100-SXM2-16GB: mesh data=4 model=2, step 48.2 ms, 3.16 GiB per device, 9f2c61d07be6>"
    )
    assert "4 stages, 1f1b with 8 micro-batches" in repr(pipeline_plan())
    assert len(repr(pipeline_plan().division.timeline)) < 120 and "\n" not in repr(pipeline_plan().division.timeline)


def test_reasons_say_what_does_not_fit_what_is_slower_and_what_was_not_evaluated() -> None:
    plan = with_comparisons(gpt_plan())
    said = [summary.why_not(plan, row) for row in plan.comparisons]
    assert said == [
        "does not fit by 3.00 GiB, slower by 25 %",
        "slower by 25 %",
        "argument batch has a batch of 6, which does not divide over 8 devices",
        "equally fast",
    ]
    assert summary.why_not(plan, Comparison("x", (8,), 0.5 * plan.step_seconds)) == "faster by 50 %"
    assert summary.why_not(plan, Comparison("x")) == "not evaluated"


def test_utilisation_and_rates_are_those_of_the_formula(plan: Plan) -> None:
    """Two products forward and four backward, since the embedded tokens have a gradient."""
    examples, tokens = summary.batch(plan)
    assert (examples, tokens) == (64, 64 * 32)
    assert plan.products.flops == 6 * 2 * tokens * 128 * 512
    assert plan.products.peak == CLUSTER.peak("float32")
    possible = plan.step_seconds * 8 * CLUSTER.peak("float32")
    assert summary.utilisation(plan) == pytest.approx(plan.products.flops / possible)
    assert f"{summary.units.digits(tokens / plan.step_seconds)} tokens/s" in str(plan)


def test_what_is_computed_again_is_no_work_of_the_step() -> None:
    def step(w, x):
        layer = jax.checkpoint(lambda h, w: jnp.tanh(jnp.tanh(h @ w) @ w))
        loss, grad = jax.value_and_grad(lambda w: layer(layer(x, w), w).mean())(w)
        return w - grad, loss

    plan = alpa_lite.make_plan(step, f32(64, 64), f32(512, 64), cluster=CLUSTER, verify="off")
    # Four products forward; backward two each, but none for x.
    assert plan.products.flops == (4 + 4 + 3) * 2 * 512 * 64 * 64


def test_figures_of_other_methods_are_evaluated_when_asked_for_and_kept(plan: Plan, tmp_path) -> None:
    fresh = planned(method=alpa_lite.Sharded())
    assert fresh.comparisons == () and "_pending" not in fresh.to_json()["plan"]
    assert pickle.loads(pickle.dumps(fresh)) == fresh
    printed = str(fresh)
    rows = {row.name: row for row in fresh.comparisons}
    assert list(rows) == ["data parallel", "FSDP (ZeRO-3)", "tensor parallel", "one device"]
    for name, method in (("data parallel", alpa_lite.DataParallel()), ("FSDP (ZeRO-3)", alpa_lite.Zero(stage=3))):
        own = planned(method=method)
        assert rows[name].step_seconds == pytest.approx(own.step_seconds, rel=2e-3)
        assert re.search(rf"{re.escape(name)} +8 .*B  (slower by|equally fast)", printed)
    fresh.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.comparisons == fresh.comparisons and str(loaded) == printed
    assert loaded == fresh


def test_a_batch_that_does_not_divide_is_the_reason() -> None:
    odd = planned(*tokens_args(batch=12))
    assert "which does not divide over 8 devices" in str(odd)


def test_methods_are_held_to_the_memory_of_the_plan() -> None:
    """With less memory than whole state takes, data parallelism says what it lacks, and FSDP has figures that fit."""
    args = tokens_args(batch=16, width=512, hidden=2048)  # state of 2 M parameters: 25 MB and more
    plan = planned(*args, memory_per_device=15 * 10**6)
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
    assert [row.name for row in piped.comparisons] == [
        "data parallel",
        "FSDP (ZeRO-3)",
        "tensor parallel",
        "one mesh",
        "one device",
    ]
    assert piped.comparisons[-1].step_seconds is not None
    assert "data parallel over x=4" in printed


def test_words_for_what_the_mesh_axes_divide() -> None:
    def axes(*rows: AxisUse) -> Plan:
        plan = gpt_plan()
        return dataclasses.replace(plan, stages=(dataclasses.replace(plan.stages[0], axes=rows),))

    x = AxisUse("x", 4, {"data": 1.0}, 0.99, 1.0)
    y = AxisUse("y", 2, {"tensor": 1.0}, 0.8, 0.8)
    assert strategy_names.chosen(axes(x, y))[:2] == [
        "data parallel over x=4; tensor parallel over y=2",
        "FSDP of parameters over x; parameters sharded over y (80 % of the bytes)",
    ]
    mixed = AxisUse("x", 8, {"data": 0.7, "expert": 0.3}, 0.0, 1.0)
    assert strategy_names.chosen(axes(mixed))[:2] == [
        "data parallel (70 % of the products' FLOPs) and expert parallel (30 %) over x=8",
        "parameters replicated, optimizer state sharded (ZeRO) over x",
    ]


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (alpa_lite.DataParallel(), ["data parallel over x=8", "parameters replicated over x"]),
        (alpa_lite.Zero(stage=3), ["data parallel over x=8", "FSDP of parameters over x"]),
    ],
)
def test_textbook_plans_are_called_by_their_names(method, said: list[str]) -> None:
    assert strategy_names.chosen(planned(method=method))[:2] == said


def test_activations_are_those_that_the_backward_pass_reads() -> None:
    """tanh saves its result, and the products their left operands: the embedded tokens and tanh's result."""
    plan = planned(method=alpa_lite.DataParallel())
    text = plan.activations()
    kinds = sorted(re.findall(r"f32\[[\d,]+\] \S+", text))
    assert "f32[64,32,512] P('x')" in kinds and "f32[64,32,128] P('x')" in kinds
    assert not any("256" in kind for kind in kinds)  # the table is no activation
    lines = text.splitlines()
    assert lines[1:] == sorted(lines[1:])
    size = sum(row.bytes * row.count for row in plan.stages[0].held)
    assert lines[0].endswith(f"wait for the backward pass, {size:,} bytes per device")
    assert activations.render(planned(method=alpa_lite.DataParallel())) == text


def test_utilisation_is_left_out_where_nothing_is_known() -> None:
    assert "utilisation" not in str(dataclasses.replace(gpt_plan(), products=Products()))
