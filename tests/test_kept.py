"""Steps whose state already lies on submeshes: nothing of it moves, and they compute what one device computes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

import alpa_lite
from alpa_lite import compiler, models
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import Compiled
from alpa_lite.errors import AlpaLiteError, InfeasibleError, OptionError, PlanError
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.options import Options, Pipeline
from alpa_lite.passes.tracing.tracing import trace
from alpa_lite.plan.pins import Pin, Pins, places
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime import load


def parameters(layers: int = 4, width: int = 16):
    keys = jax.random.split(jax.random.key(0), layers)
    return {f"w{i}": 0.1 * jax.random.normal(key, (width, width)) for i, key in enumerate(keys)}


def forward(p, x):
    for i in range(len(p)):
        x = jnp.tanh(x @ p[f"w{i}"]) + x
    return x


def train(p, x):
    loss, grad = jax.value_and_grad(lambda p: (forward(p, x) ** 2).mean())(p)
    return jax.tree.map(lambda a, b: a - 0.1 * b, p, grad), loss


def examples(count: int, width: int = 16):
    return jax.random.normal(jax.random.key(1), (count, width))


def cluster(devices: int) -> Cluster:
    return Cluster.local(jax.devices()[:devices])


@functools.cache
def trained(stages: int = 2, devices: int = 4, **method) -> Compiled:
    options = Options(method=Pipeline(num_stages=stages, **method), cluster=cluster(devices), num_microbatches=4)
    return compiler.compile_step(train, (parameters(), examples(8)), {}, options, cluster(devices))


def layouts(compiled: Compiled):
    stages = compiled.plan.stages
    return [{leaf.path: leaf.spec for leaf in stage.arguments if leaf.role == "state"} for stage in stages]


@pytest.mark.parametrize(("batch", "microbatches"), [(6, 3), pytest.param(7, 1, marks=pytest.mark.slow)])
def test_a_train_step_on_another_batch_keeps_its_division(batch: int, microbatches: int) -> None:
    first = trained()
    options = Options(method=Pipeline(num_stages=2), cluster=cluster(4))
    x = examples(batch)
    again = compiler.compile_step(train, (parameters(), x), {}, options, cluster(4), like=first.plan)
    assert again.plan.num_microbatches == microbatches
    assert layouts(again) == layouts(first)
    assert again.plan.division.submeshes == first.plan.division.submeshes
    got = load.load(again.staged, again.plan)(*load.load(again.staged, again.plan).place(parameters(), x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(train(parameters(), x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_division_of_another_step_is_refused() -> None:
    first = trained()
    with pytest.raises(AlpaLiteError, match="layers"):
        compiler.compile_step(
            train, (parameters(6), examples(8)), {}, Options(method=Pipeline(), cluster=cluster(4)), cluster(4),
            like=first.plan,
        )  # fmt: skip


def pins(plan: Plan, fun, args, names=()) -> Pins:
    """Where a plan has the state, for the arguments of a function that have the same paths."""
    found = places(plan, "the train step has it there")
    traced = trace(fun, args, {}, batch_argnums=(), batch_argnames=names)
    known = {i: found[a.path] for i, a in enumerate(traced.arguments) if a.path in found}
    whole = {i: pin for i, pin in known.items() if isinstance(pin, Pin)}
    return Pins(whole, {i: some for i, some in known.items() if not isinstance(some, Pin)})


def planned(first: Compiled, fun, args, names=(), devices: int = 4, **options) -> Compiled:
    """A function planned with the state where a train step has it."""
    given = Options(cluster=cluster(devices), batch_argnums=(), batch_argnames=names, **options)
    where = pins(first.plan, fun, args, names)
    return compiler.compile_step(fun, args, {}, given, cluster(devices), pins=where)


def sent_arguments(compiled: Compiled) -> set[str]:
    """The names of the arguments that transfers carry."""
    program = compiled.staged.program
    given = {b for group in program.inputs for b in group}
    return {program.buffers[b].name for t in program.transfers for b in t.sent if b in given}


def check(first: Compiled, compiled: Compiled, fun, state, args) -> None:
    """It computes what one device computes on the placed state, and neither moves nor deletes what it does not update.

    Args:
      state: the first argument; args: the others.
    """
    placed = load.load(first.staged, first.plan).place(state, examples(8))[0]
    before = jax.tree.map(lambda x: x.sharding, placed)
    executable = load.load(compiled.staged, compiled.plan)
    want = fun(state, *args)
    got = executable(placed, *args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert sent_arguments(compiled) == set()
    if not compiled.traced.state:
        assert all(not x.is_deleted() for x in jax.tree.leaves(placed))
        assert jax.tree.map(lambda x: x.sharding, placed) == before


def test_a_train_step_divided_by_its_state() -> None:
    """The backward pass of a layer runs where its weights are, although no stage was told."""
    first = trained()
    again = planned(first, train, (parameters(), examples(6)), ("x",))
    check(first, again, train, parameters(), (examples(6),))
    assert layouts(again) == layouts(first)
    assert len(again.staged.program.transfers) == 2  # one activation there, one gradient back


@pytest.mark.slow
def test_a_plan_by_owners_is_saved_and_replayed(tmp_path) -> None:
    first, args = trained(), (parameters(), examples(6))
    plan = planned(first, train, args, ("x",)).plan
    plan.save(tmp_path / "plan.json")
    options = Options(cluster=cluster(4), plan=str(tmp_path / "plan.json"), batch_argnames=("x",), batch_argnums=())
    again = compiler.compile_step(train, args, {}, options, cluster(4))
    assert again.plan.step_seconds == pytest.approx(plan.step_seconds)
    assert [s.arguments for s in again.plan.stages] == [s.arguments for s in plan.stages]
    assert "forward" in str(again.plan) and again.plan.explain("w0")
    again.plan.simulate(tmp_path / "timeline.json")
    with pytest.raises(PlanError, match="was not passed"):
        compiler.compile_step(train, (parameters(3), examples(6)), {}, options, cluster(4))


def evaluate(p, x):
    out = forward(p, x)
    return {"loss": (out**2).mean(), "guess": out.argmax(-1)}


def count(p):
    return sum(w.size for w in jax.tree.leaves(p)), jnp.sqrt(sum(jnp.sum(w**2) for w in jax.tree.leaves(p)))


def averaged(p, average):
    return jax.tree.map(lambda a, b: 0.9 * b + 0.1 * a, p, average)


@pytest.mark.parametrize(("devices", "stages", "schedule"), [(4, 2, "1f1b"), (4, 2, "interleaved-1f1b")])
def test_functions_of_the_state_of_a_pipeline(devices: int, stages: int, schedule: str) -> None:
    first = trained(stages, devices, schedule=schedule)
    x = examples(6)
    check(first, planned(first, evaluate, (parameters(), x), ("x",), devices), evaluate, parameters(), (x,))
    check(first, planned(first, count, (parameters(),), (), devices), count, parameters(), ())


def test_new_state_stays_on_its_submesh() -> None:
    """An average of the parameters: placed by the first call, kept where it is and updated there by the others."""
    first = trained()
    compiled = planned(first, averaged, (parameters(), parameters()))
    placed = load.load(first.staged, first.plan).place(parameters(), examples(8))[0]
    executable = load.load(compiled.staged, compiled.plan)
    want = average = jax.tree.map(jnp.zeros_like, parameters())
    for _ in range(2):
        average, want = executable(placed, average), averaged(parameters(), want)
    for name, leaf in average.items():
        np.testing.assert_allclose(leaf, want[name], rtol=1e-5, atol=1e-6)
        assert leaf.sharding.device_set == placed[name].sharding.device_set
    assert compiled.staged.program.transfers == ()


def decode(p, cache, x, at):
    """One token of a model with a cache in every layer."""
    out = {}
    for i, w in enumerate(p.values()):
        out[f"k{i}"] = jax.lax.dynamic_update_slice(cache[f"k{i}"], (x @ w)[:, None], (0, at, 0))
        x = x + jnp.tanh(out[f"k{i}"]).mean(1)
    return out, x


def test_generation_with_a_cache() -> None:
    first = trained()
    cache = {f"k{i}": jnp.zeros((4, 3, 16)) for i in range(4)}
    compiled = planned(first, decode, (parameters(), cache, examples(4), jnp.int32(0)), ("x",))
    assert sorted(a.path for a in compiled.traced.arguments if a.role == "state") == sorted(
        f"cache['k{i}']" for i in range(4)
    )
    placed = load.load(first.staged, first.plan).place(parameters(), examples(8))[0]
    executable, want, x, y = load.load(compiled.staged, compiled.plan), cache, examples(4), examples(4)
    for at in range(3):
        cache, x = executable(placed, cache, x, jnp.int32(at))
        want, y = decode(parameters(), want, y, at)
    for a, b in zip(jax.tree.leaves((cache, x)), jax.tree.leaves((want, y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for i in range(4):
        assert cache[f"k{i}"].sharding.device_set == placed[f"w{i}"].sharding.device_set
    assert sent_arguments(compiled) == set()


def gpt(**config):
    """A train step of a GPT, an evaluation that takes the same state, the state and a batch."""
    spec, sizes = models.get("gpt"), {"vocab": 64, "seq": 8, "hidden": 16, "layers": 4, "heads": 2, **config}
    step, (state, batch) = spec.build("tiny", 8, **sizes)
    graphdef, _, _ = nnx.split(spec.model(spec.config("tiny", **sizes), rngs=nnx.Rngs(0)), nnx.Param, ...)

    def evaluate(state, batch):
        model = nnx.merge(graphdef, state["params"], state["rest"])
        return {"loss": spec.loss(model, batch), "guess": model(batch["inputs"]).argmax(-1)}

    return step, evaluate, state, batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "devices", "schedule", "config"),
    [
        pytest.param(4, 8, "1f1b", {"tied": True}, marks=pytest.mark.thorough),
        (2, 4, "interleaved-1f1b", {"tied": False}),
        (2, 4, "1f1b", {"scan": True}),
    ],
)
def test_a_gpt_is_evaluated_after_a_pipeline(stages: int, devices: int, schedule: str, config) -> None:
    """No leaf moves, neither a tied embedding nor the parts of stacked layers; loss, guesses and norm are exact."""
    step, evaluate, state, batch = gpt(**config)
    method = Pipeline(num_stages=stages, schedule=schedule)
    options = Options(method=method, cluster=cluster(devices), num_microbatches=4)
    first = compiler.compile_step(step, (state, batch), {}, options, cluster(devices))
    placed = load.load(first.staged, first.plan).place(state, batch)[0]
    before = jax.tree.map(lambda x: x.sharding, placed)

    def norm(state):
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(state["params"])))

    for fun, args, names in ((evaluate, (batch,), ("batch",)), (norm, (), ())):
        compiled = planned(first, fun, (state, *args), names, devices)
        got = load.load(compiled.staged, compiled.plan)(placed, *args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(fun)(state, *args)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert sent_arguments(compiled) == set()
        assert not any("moved in each call" in note or "copied in each call" in note for note in compiled.plan.notes)
        assert jax.tree.map(lambda x: x.sharding, placed) == before


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_micro_batches_take_turns_in_an_evaluation(schedule: str, tmp_path) -> None:
    first, x = trained(2, 4, schedule=schedule), examples(8)
    args = parameters(), x
    compiled = planned(first, evaluate, args, ("x",), num_microbatches=4)
    assert compiled.plan.num_microbatches == 4
    check(first, compiled, evaluate, parameters(), (x,))
    tasks = [e for e in compiled.plan.division.timeline.events if e.kind == "forward"]
    assert len(tasks) == 4 * len(compiled.plan.stages)
    compiled.plan.save(tmp_path / "plan.json")
    options = Options(cluster=cluster(4), plan=str(tmp_path / "plan.json"), batch_argnames=("x",), batch_argnums=())
    again = compiler.compile_step(evaluate, args, {}, options, cluster(4))
    assert [s.arguments for s in again.plan.stages] == [s.arguments for s in compiled.plan.stages]
    assert "forward" in str(again.plan)


def test_micro_batches_are_taken_where_they_are_faster() -> None:
    """Of a step of milliseconds on slow devices, chosen by the simulated seconds."""
    first, x = trained(), examples(8)
    peaks = {name: 1e6 for name, _ in cluster(4).peak_flops}
    slow = replace(cluster(4), peak_flops=peaks, tile=1)
    where = pins(first.plan, evaluate, (parameters(), x), ("x",))
    seconds = {}
    for number in ("auto", 1):
        options = Options(cluster=slow, batch_argnums=(), batch_argnames=("x",), num_microbatches=number)
        plan = compiler.compile_step(evaluate, (parameters(), x), {}, options, slow, pins=where).plan
        seconds[plan.num_microbatches] = plan.step_seconds
    assert seconds[8] < seconds[1]


def test_through_the_face() -> None:
    """A loop with evaluation and a short last batch: nothing of the state moves, and a second call plans nothing."""
    here, x = cluster(4), examples(8)
    step = alpa_lite.parallelize(train, method=Pipeline(num_stages=2), cluster=here, num_microbatches=4)
    evaluation = alpa_lite.parallelize(evaluate, like=step, cluster=here)
    p, _ = step(parameters(), x)
    want, _ = train(parameters(), x)
    before = jax.tree.map(lambda leaf: leaf.sharding, p)
    p, _ = step(p, x[:6])
    want, _ = train(want, x[:6])
    for batch in (x, x[:5]):
        for a, b in zip(jax.tree.leaves(evaluation(p, batch)), jax.tree.leaves(evaluate(want, batch)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert jax.tree.map(lambda leaf: leaf.sharding, p) == before
    assert not any("heeded" in note for note in evaluation.plan(p, x).notes)


@pytest.mark.parametrize(("places", "message"), [(((0, 2), (1, 2)), "share devices"), (((0, 2), (3, 2)), "has none")])
def test_pins_that_no_cluster_has_are_refused(places, message: str) -> None:
    pinned = {i: Pin(LogicalMesh((n,), ("x",)), at, Layout(((), ())), "a test") for i, (at, n) in enumerate(places)}
    options = Options(cluster=cluster(4), batch_argnums=(), batch_argnames=("x",))
    with pytest.raises(OptionError, match=message):
        compiler.compile_step(evaluate, (parameters(2), examples(8)), {}, options, cluster(4), pins=Pins(pinned))


def test_what_is_copied_is_said_and_logged(caplog) -> None:
    """A loop over all layers runs on one submesh: the plan names the loop's line and the bytes that it pulls there."""

    def sampled(p, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: forward(p, x), x)

    first, args = trained(), (parameters(), examples(4))
    compiled = planned(first, sampled, args, ("x",))
    notes = [note for note in compiled.plan.notes if "copied in each call" in note]
    assert len(notes) == len(sent_arguments(compiled)) and "1.00 KiB" in notes[0] and "test_kept.py" in notes[0]
    assert [record.message.partition(": ")[2] for record in caplog.records if "copied" in record.message] == notes
    placed = load.load(first.staged, first.plan).place(parameters(), examples(8))[0]
    np.testing.assert_allclose(load.load(compiled.staged, compiled.plan)(placed, args[1]), sampled(*args), rtol=1e-5)
    with pytest.raises(InfeasibleError, match="Take the loop"):
        planned(first, sampled, args, ("x",), memory_per_device=3000)


class Net(linen.Module):
    """Dense layers with batch norm and dropout."""

    @linen.compact
    def __call__(self, x, train: bool = False):
        for _ in range(4):
            x = linen.BatchNorm(use_running_average=not train)(linen.Dense(16)(x))
            x = linen.Dropout(0.1, deterministic=not train)(linen.relu(x))
        return linen.Dense(4)(x)


class NetState(train_state.TrainState):
    batch_stats: Any = None


@pytest.mark.slow
def test_a_linen_train_state_is_evaluated_predicted_with_and_counted(tmp_path) -> None:
    net, here = Net(), cluster(8)
    batch = {"x": examples(8), "y": jnp.arange(8) % 4}
    v = net.init(jax.random.key(0), batch["x"])
    state = NetState.create(
        apply_fn=net.apply, params=v["params"], tx=optax.adam(1e-3), batch_stats=v["batch_stats"]
    )  # fmt: skip

    def train(state, batch, key):
        def loss(p):
            given = {"params": p, "batch_stats": state.batch_stats}
            out, new = net.apply(given, batch["x"], train=True, mutable=["batch_stats"], rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(out, batch["y"]).mean(), new["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(batch_stats=stats), loss

    def evaluate(state: Any, batch: Any) -> Any:
        out: Any = net.apply({"params": state.params, "batch_stats": state.batch_stats}, batch["x"])
        return {"accuracy": (out.argmax(-1) == batch["y"]).mean(), "mean": out.mean()}

    def predict(params, stats, x):
        return net.apply({"params": params, "batch_stats": stats}, x)

    def count(params):
        return sum(p.size for p in jax.tree.leaves(params)), optax.tree.norm(params)

    step = alpa_lite.parallelize(train, method=Pipeline(num_stages=4), cluster=here, num_microbatches=1)
    state, _ = step(state, batch, jax.random.key(3))
    before = jax.tree.map(lambda x: x.sharding, state)
    host = jax.device_get(state)
    calls: list[Any] = [
        (evaluate, (state, batch), (host, batch)),
        (predict, (state.params, state.batch_stats, batch["x"]), (host.params, host.batch_stats, batch["x"])),
        (count, (state.params,), (host.params,)),
    ]
    for fun, args, plain in calls:
        like: Any = alpa_lite.parallelize(fun, like=step, cluster=here, verify="hlo")
        for a, b in zip(jax.tree.leaves(like(*args)), jax.tree.leaves(jax.jit(fun)(*plain)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert not any("in each call" in note for note in like.plan(*args).notes)
        like.trace(tmp_path / "trace.json", *args)
    assert jax.tree.map(lambda x: x.sharding, state) == before


@pytest.mark.slow
def test_an_nnx_model_is_evaluated_in_place() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for layer in self.layers:
                x = jnp.tanh(layer(x))
            return x

    def train(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    def evaluate(model, x):
        return (model(x) ** 2).mean()

    here, x = cluster(4), examples(8)
    step = alpa_lite.parallelize(train, method=Pipeline(num_stages=2), cluster=here, num_microbatches=2)
    evaluation = alpa_lite.parallelize(evaluate, like=step, cluster=here)
    model, plain = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    optimizer, other = (nnx.Optimizer(m, optax.adam(1e-3), wrt=nnx.Param) for m in (model, plain))
    step(model, optimizer, x)
    train(plain, other, x)
    before = jax.tree.map(lambda leaf: leaf.sharding, nnx.state(model))
    for _ in range(2):
        np.testing.assert_allclose(evaluation(model, x), evaluate(plain, x), rtol=1e-5)
    assert jax.tree.map(lambda leaf: leaf.sharding, nnx.state(model)) == before
    np.testing.assert_allclose(step(model, optimizer, x), train(plain, other, x), rtol=1e-5)
