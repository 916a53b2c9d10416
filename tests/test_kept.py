"""Steps whose state already lies on submeshes: nothing of it moves, and they compute what one device computes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import alpa_lite
from alpa_lite import compiler, models
from alpa_lite.compiler import Compiled
from alpa_lite.errors import AlpaLiteError, InfeasibleError, OptionError
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.options import Options, Pipeline
from alpa_lite.passes.tracing.tracing import trace
from alpa_lite.plan.pins import Pin, Pins, places
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime import load
from tests.comparing import assert_close
from tests.gallery import local, sgd
from tests.marks import slow, thorough


def parameters(layers: int = 4, width: int = 16):
    keys = jax.random.split(jax.random.key(0), layers)
    return {f"w{i}": 0.1 * jax.random.normal(key, (width, width)) for i, key in enumerate(keys)}


def forward(p, x):
    for i in range(len(p)):
        x = jnp.tanh(x @ p[f"w{i}"]) + x
    return x


descent = sgd(lambda p, x: (forward(p, x) ** 2).mean())


def train(p, x):
    return descent(p, x)


def examples(count: int, width: int = 16):
    return jax.random.normal(jax.random.key(1), (count, width))


def sharding(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


def run(compiled: Compiled) -> Any:
    return load.load(compiled.staged, compiled.plan)


@functools.cache
def trained(stages: int = 2, devices: int = 4, **method) -> Compiled:
    options = Options(method=Pipeline(num_stages=stages, **method), cluster=local(devices), num_microbatches=4)
    return compiler.compile_step(train, (parameters(), examples(8)), {}, options, local(devices))


def placed_state(first: Compiled, state: Any = None) -> Any:
    return run(first).place(state or parameters(), examples(8))[0]


def layouts(compiled: Compiled):
    stages = compiled.plan.stages
    return [{leaf.path: leaf.spec for leaf in stage.arguments if leaf.role == "state"} for stage in stages]


@pytest.mark.parametrize(("batch", "microbatches"), [(6, 3), slow(7, 1)])
def test_a_train_step_on_another_batch_keeps_its_division(batch: int, microbatches: int) -> None:
    first = trained()
    options = Options(method=Pipeline(num_stages=2), cluster=local(4))
    x = examples(batch)
    again = compiler.compile_step(train, (parameters(), x), {}, options, local(4), like=first.plan)
    assert again.plan.num_microbatches == microbatches
    assert layouts(again) == layouts(first)
    assert again.plan.division.submeshes == first.plan.division.submeshes
    assert_close(run(again)(*run(again).place(parameters(), x)), train(parameters(), x))


def test_a_division_of_another_step_is_refused() -> None:
    options, args = Options(method=Pipeline(), cluster=local(4)), (parameters(6), examples(8))
    with pytest.raises(AlpaLiteError, match="layers"):
        compiler.compile_step(train, args, {}, options, local(4), like=trained().plan)


def pins(plan: Plan, fun, args, names=()) -> Pins:
    """Where a plan has the state, for the arguments of a function that have the same paths."""
    found = places(plan, "the train step has it there")
    traced = trace(fun, args, {}, batch_argnums=(), batch_argnames=names)
    known = {i: found[a.path] for i, a in enumerate(traced.arguments) if a.path in found}
    whole = {i: pin for i, pin in known.items() if isinstance(pin, Pin)}
    return Pins(whole, {i: some for i, some in known.items() if not isinstance(some, Pin)})


def planned(first: Compiled, fun, args, names=(), devices: int = 4, **options) -> Compiled:
    """A function planned with the state where a train step has it."""
    given = Options(cluster=local(devices), batch_argnums=(), batch_argnames=names, **options)
    where = pins(first.plan, fun, args, names)
    return compiler.compile_step(fun, args, {}, given, local(devices), pins=where)


def sent_arguments(compiled: Compiled) -> set[str]:
    """The names of the arguments that transfers carry."""
    program = compiled.staged.program
    given = {b for group in program.inputs for b in group}
    return {program.buffers[b].name for t in program.transfers for b in t.sent if b in given}


def check(first: Compiled, compiled: Compiled, fun, state, args) -> None:
    """Compares results on the placed state, of which nothing moves, and nothing is deleted that is not updated.

    Args:
      state: the first argument; args: the others.
    """
    placed = placed_state(first, state)
    before = sharding(placed)
    assert_close(run(compiled)(placed, *args), jax.jit(fun)(state, *args))
    assert sent_arguments(compiled) == set()
    if not compiled.traced.state:
        assert all(not x.is_deleted() for x in jax.tree.leaves(placed))
        assert sharding(placed) == before


def test_a_train_step_divided_by_its_state() -> None:
    """The backward pass of a layer runs where its weights are, although no stage was told."""
    first = trained()
    again = planned(first, train, (parameters(), examples(6)), ("x",))
    check(first, again, train, parameters(), (examples(6),))
    assert layouts(again) == layouts(first)
    assert len(again.staged.program.transfers) == 2  # one activation there, one gradient back


def evaluate(p, x):
    out = forward(p, x)
    return {"loss": (out**2).mean(), "guess": out.argmax(-1)}


def count(p):
    return sum(w.size for w in jax.tree.leaves(p)), jnp.sqrt(sum(jnp.sum(w**2) for w in jax.tree.leaves(p)))


def test_functions_of_the_state_of_a_pipeline() -> None:
    first, x = trained(), examples(6)
    check(first, planned(first, evaluate, (parameters(), x), ("x",)), evaluate, parameters(), (x,))
    check(first, planned(first, count, (parameters(),)), count, parameters(), ())


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
    placed = placed_state(first)
    executable, want, x, y = run(compiled), cache, examples(4), examples(4)
    for at in range(3):
        cache, x = executable(placed, cache, x, jnp.int32(at))
        want, y = decode(parameters(), want, y, at)
    assert_close((cache, x), (want, y))
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
        thorough((4, 8, "1f1b", {"tied": True})),
        (2, 4, "interleaved-1f1b", {"tied": False}),
        (2, 4, "1f1b", {"scan": True}),
    ],
)
def test_a_gpt_is_evaluated_after_a_pipeline(stages: int, devices: int, schedule: str, config) -> None:
    """No leaf moves, neither a tied embedding nor the parts of stacked layers; loss, guesses and norm are exact."""
    step, evaluate, state, batch = gpt(**config)
    method = Pipeline(num_stages=stages, schedule=schedule)
    options = Options(method=method, cluster=local(devices), num_microbatches=4)
    first = compiler.compile_step(step, (state, batch), {}, options, local(devices))
    placed = run(first).place(state, batch)[0]
    before = sharding(placed)

    def norm(state):
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(state["params"])))

    for fun, args, names in ((evaluate, (batch,), ("batch",)), (norm, (), ())):
        compiled = planned(first, fun, (state, *args), names, devices)
        assert_close(run(compiled)(placed, *args), jax.jit(fun)(state, *args))
        assert sent_arguments(compiled) == set()
        assert not any("moved in each call" in note or "copied in each call" in note for note in compiled.plan.notes)
        assert sharding(placed) == before


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_micro_batches_take_turns_in_an_evaluation(schedule: str, tmp_path) -> None:
    first, x = trained(schedule=schedule), examples(8)
    args = parameters(), x
    compiled = planned(first, evaluate, args, ("x",), num_microbatches=4)
    assert compiled.plan.num_microbatches == 4
    check(first, compiled, evaluate, parameters(), (x,))
    tasks = [e for e in compiled.plan.division.timeline.events if e.kind == "forward"]
    assert len(tasks) == 4 * len(compiled.plan.stages)
    compiled.plan.save(tmp_path / "plan.json")
    options = Options(cluster=local(4), plan=str(tmp_path / "plan.json"), batch_argnames=("x",), batch_argnums=())
    again = compiler.compile_step(evaluate, args, {}, options, local(4))
    assert [s.arguments for s in again.plan.stages] == [s.arguments for s in compiled.plan.stages]
    assert "forward" in str(again.plan)


def test_micro_batches_are_taken_where_they_are_faster() -> None:
    """Of a step of milliseconds on slow devices, chosen by the simulated seconds."""
    first, x = trained(), examples(8)
    peaks = {name: 1e6 for name, _ in local(4).peak_flops}
    where = replace(local(4), peak_flops=peaks, tile=1)
    pinned = pins(first.plan, evaluate, (parameters(), x), ("x",))
    seconds = {}
    for number in ("auto", 1):
        options = Options(cluster=where, batch_argnums=(), batch_argnames=("x",), num_microbatches=number)
        plan = compiler.compile_step(evaluate, (parameters(), x), {}, options, where, pins=pinned).plan
        seconds[plan.num_microbatches] = plan.step_seconds
    assert seconds[8] < seconds[1]


def test_a_loop_with_evaluation_and_a_short_last_batch_moves_nothing() -> None:
    here, x = local(4), examples(8)
    step = alpa_lite.parallelize(train, method=Pipeline(num_stages=2), cluster=here, num_microbatches=4)
    evaluation = alpa_lite.parallelize(evaluate, like=step, cluster=here)
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

    first, args = trained(), (parameters(), examples(4))
    compiled = planned(first, sampled, args, ("x",))
    notes = [note for note in compiled.plan.notes if "copied in each call" in note]
    assert len(notes) == len(sent_arguments(compiled)) and "1.00 KiB" in notes[0] and "test_kept.py" in notes[0]
    assert [record.message.partition(": ")[2] for record in caplog.records if "copied" in record.message] == notes
    assert_close(run(compiled)(placed_state(first), args[1]), sampled(*args))
    with pytest.raises(InfeasibleError, match="Take the loop"):
        planned(first, sampled, args, ("x",), memory_per_device=3000)
