"""Steps whose state already lies on submeshes: nothing of it moves, and they compute what one device computes."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import alpa_lite
from alpa_lite import Pipeline, compiler, models
from alpa_lite.errors import AlpaLiteError, InfeasibleError, OptionError
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.options import Options
from alpa_lite.plan.pins import Pin, Pins
from gallery.steps import sgd
from tests.comparing import assert_close
from tests.helpers import local
from tests.marks import slow, thorough


def parameters(layers: int = 4):
    keys = jax.random.split(jax.random.key(0), layers)
    return {f"w{i}": 0.1 * jax.random.normal(key, (16, 16)) for i, key in enumerate(keys)}


def forward(p, x):
    for i in range(len(p)):
        x = jnp.tanh(x @ p[f"w{i}"]) + x
    return x


descent = sgd(lambda p, x: (forward(p, x) ** 2).mean())


def train(p, x):
    return descent(p, x)


def examples(count: int):
    return jax.random.normal(jax.random.key(1), (count, 16))


def sharding(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def pipeline(fun: Any = train, args: Any = None, cluster: Any = None, **method: Any) -> Any:
    """A train step on four devices, planned."""
    chosen = Pipeline(method.pop("num_stages", 2), **method)
    step = alpa_lite.parallelize(fun, method=chosen, cluster=cluster or local(4), num_microbatches=4)
    step.plan(*(args or (parameters(), examples(8))))
    return step


trained = functools.cache(pipeline)


def layouts(plan: alpa_lite.Plan):
    return [{leaf.path: leaf.spec for leaf in stage.arguments if leaf.role == "state"} for stage in plan.stages]


def sent_arguments(run: Any, *args: Any) -> set[str]:
    """The names of the arguments that transfers carry."""
    program = run.prepare_call(args, {})[0].staged.program
    given = {b for group in program.inputs for b in group}
    return {program.buffers[b].name for t in program.transfers for b in t.sent_buffers if b in given}


def check(first: Any, run: Any, fun: Any, state: Any, *args: Any) -> None:
    """Compares results on the placed state, of which nothing moves, and nothing is deleted that is not updated."""
    placed = first.place(state, examples(8))[0]
    before, updates = sharding(placed), run.prepare_call((placed, *args), {})[0].traced.state
    assert sent_arguments(run, placed, *args) == set()
    assert_close(run(placed, *args), jax.jit(fun)(state, *args))
    if not updates:
        assert all(not x.is_deleted() for x in jax.tree.leaves(placed))
        assert sharding(placed) == before


@pytest.mark.parametrize(("batch", "microbatches"), [(6, 3), slow(7, 1)])
def test_a_train_step_on_another_batch_keeps_its_division(batch: int, microbatches: int) -> None:
    step, x = pipeline(), examples(batch)
    first, again = step.plan(parameters(), examples(8)), step.plan(parameters(), x)
    assert again.num_microbatches == microbatches
    assert layouts(again) == layouts(first)
    assert again.division.submeshes == first.division.submeshes
    assert_close(step(*step.place(parameters(), x)), train(parameters(), x))


def test_a_division_of_another_step_is_refused() -> None:
    options, args = Options(method=Pipeline(), cluster=local(4)), (parameters(6), examples(8))
    with pytest.raises(AlpaLiteError, match="layers"):
        compiler.compile_step(train, args, {}, options, local(4), like=trained().plans[0])


def test_a_train_step_divided_by_its_state() -> None:
    """The backward pass of a layer runs where its weights are, although no stage was told."""
    again = alpa_lite.parallelize(train, state_from=trained(), batch_argnums=1)
    check(trained(), again, train, parameters(), examples(6))
    assert layouts(again.plans[0]) == layouts(trained().plans[0])
    program = again.prepare_call((parameters(), examples(6)), {})[0].staged.program
    assert len(program.transfers) == 2  # one activation there, one gradient back


def evaluate(p, x):
    out = forward(p, x)
    return {"loss": (out**2).mean(), "guess": out.argmax(-1)}


def count(p):
    return sum(w.size for w in jax.tree.leaves(p)), jnp.sqrt(sum(jnp.sum(w**2) for w in jax.tree.leaves(p)))


@pytest.mark.parametrize(("fun", "args"), [(evaluate, (examples(6),)), (count, ())])
def test_functions_of_the_state_of_a_pipeline(fun: Any, args: Any) -> None:
    check(trained(), alpa_lite.parallelize(fun, state_from=trained()), fun, parameters(), *args)


def decode(p, cache, x, at):
    """One token of a model with a cache in every layer."""
    out = {}
    for i, w in enumerate(p.values()):
        out[f"k{i}"] = jax.lax.dynamic_update_slice(cache[f"k{i}"], (x @ w)[:, None], (0, at, 0))
        x = x + jnp.tanh(out[f"k{i}"]).mean(1)
    return out, x


def test_generation_with_a_cache() -> None:
    cache = want = {f"k{i}": jnp.zeros((4, 3, 16)) for i in range(4)}
    run, placed = alpa_lite.parallelize(decode, state_from=trained()), trained().place(parameters(), examples(8))[0]
    x = y = examples(4)
    for at in range(3):
        cache, x = run(placed, cache, x, jnp.int32(at))
        want, y = decode(parameters(), want, y, at)
    assert_close((cache, x), (want, y))
    arguments = [leaf for stage in run.plans[0].stages for leaf in stage.arguments]
    assert sorted(leaf.path for leaf in arguments if leaf.role == "state") == [f"cache['k{i}']" for i in range(4)]
    for i in range(4):
        assert cache[f"k{i}"].sharding.device_set == placed[f"w{i}"].sharding.device_set
    assert sent_arguments(run, placed, cache, x, jnp.int32(0)) == set()


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
        thorough((4, 8, "1f1b", {"tied": True})),
        (2, 4, "interleaved-1f1b", {"tied": False}),
        (2, 4, "1f1b", {"scan": True}),
    ],
)
def test_a_gpt_is_evaluated_after_a_pipeline(stages: int, devices: int, schedule: str, config) -> None:
    """No leaf moves, neither a tied embedding nor the parts of stacked layers; loss, guesses and norm are exact."""
    step, evaluate, state, batch = gpt(**config)
    first = pipeline(step, (state, batch), local(devices), num_stages=stages, schedule=schedule)
    placed = first.place(state, batch)[0]
    before = sharding(placed)

    def norm(state):
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(state["params"])))

    functions: list[Any] = [(evaluate, (batch,)), (norm, ())]
    for fun, args in functions:
        run = alpa_lite.parallelize(fun, state_from=first)
        assert_close(run(placed, *args), jax.jit(fun)(state, *args))
        assert sent_arguments(run, placed, *args) == set()
        assert not any("moved in each call" in note or "copied in each call" in note for note in run.plans[0].notes)
        assert sharding(placed) == before


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_micro_batches_take_turns_in_an_evaluation(schedule: str, tmp_path) -> None:
    first, args = trained(schedule=schedule), (parameters(), examples(8))
    run = alpa_lite.parallelize(evaluate, state_from=first, num_microbatches=4)
    check(first, run, evaluate, *args)
    (plan,) = run.plans
    assert plan.num_microbatches == 4
    assert sum(e.kind == "forward" for e in plan.division.timeline.events) == 4 * len(plan.stages)
    plan.save(tmp_path / "plan.json")
    again = alpa_lite.parallelize(evaluate, plan=tmp_path / "plan.json", cluster=local(4), batch_argnums=1).plan(*args)
    assert [s.arguments for s in again.stages] == [s.arguments for s in plan.stages]
    assert "forward" in str(again)


def test_micro_batches_are_taken_where_they_are_faster() -> None:
    """Of a step of milliseconds on slow devices, chosen by the simulated seconds."""
    first = pipeline(cluster=replace(local(4), peak_flops={name: 1e6 for name, _ in local(4).peak_flops}, tile=1))
    runs = (alpa_lite.parallelize(evaluate, state_from=first, num_microbatches=number) for number in ("auto", 1))
    seconds = {plan.num_microbatches: plan.step_seconds for plan in (r.plan(parameters(), examples(8)) for r in runs)}
    assert seconds[8] < seconds[1]


def test_a_loop_with_evaluation_and_a_short_last_batch_moves_nothing() -> None:
    step, x = pipeline(), examples(8)
    evaluation = alpa_lite.parallelize(evaluate, state_from=step)
    p, _ = step(parameters(), x)
    want, _ = train(parameters(), x)
    before = sharding(p)
    p, _ = step(p, x[:6])
    want, _ = train(want, x[:6])
    for batch in (x, x[:5]):
        assert_close(evaluation(p, batch), evaluate(want, batch))
    assert sharding(p) == before
    assert not any("applied" in note for note in evaluation.plan(p, x).notes)


@pytest.mark.parametrize(
    ("places", "message"), [(((0, 2), (1, 2)), "share devices"), (((0, 2), (3, 2)), "does not have")]
)
def test_pins_that_no_cluster_has_are_refused(places, message: str) -> None:
    pinned = {i: Pin(LogicalMesh((n,), ("x",)), at, Layout(((), ())), "a test") for i, (at, n) in enumerate(places)}
    options = Options(cluster=local(4), batch_argnums=(), batch_argnames=("x",))
    with pytest.raises(OptionError, match=message):
        compiler.compile_step(evaluate, (parameters(2), examples(8)), {}, options, local(4), pins=Pins(pinned))


def test_what_is_copied_is_said_and_logged(caplog) -> None:
    """A loop over all layers runs on one submesh: the plan names the loop's line and the bytes that it pulls there."""

    def sampled(p, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: forward(p, x), x)

    args, run = (parameters(), examples(4)), alpa_lite.parallelize(sampled, state_from=trained())
    notes = [note for note in run.plan(*args).notes if "copied in each call" in note]
    assert len(notes) == len(sent_arguments(run, *args)) and "1.00 KiB" in notes[0] and "test_kept.py" in notes[0]
    assert [record.message.partition(": ")[2] for record in caplog.records if "copied" in record.message] == notes
    assert_close(run(trained().place(parameters(), examples(8))[0], args[1]), sampled(*args))
    with pytest.raises(InfeasibleError, match="Take the loop"):
        alpa_lite.parallelize(sampled, state_from=trained(), memory_per_device=3000).plan(*args)
