"""A training loop with everything around it: evaluation, short batches and restores, and nothing of the state moves."""

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import alpa_lite
from alpa_lite.errors import OptionError
from alpa_lite.ir import units
from gallery.steps import in_place, sgd
from tests import comparing
from tests.marks import slow

WIDTH, OUT = 16, 8
OPTIMIZER = optax.adam(1e-2)


def examples(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "x": draw.normal(size=(count, WIDTH)).astype(np.float32),
        "y": draw.normal(size=(count, OUT)).astype(np.float32),
    }


class Net(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(OUT)(linen.relu(linen.Dense(2 * WIDTH)(x)))


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.second = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, OUT, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        return self.second(nnx.relu(self.first(x)))


def distance(predictions: jax.Array, batch: Any) -> jax.Array:
    return ((predictions - batch["y"]) ** 2).mean()


APPLY: Any = Net().apply


def create(key: Any) -> TrainState:
    return TrainState.create(apply_fn=APPLY, params=Net().init(key, jnp.ones((1, WIDTH))), tx=OPTIMIZER)


@functools.cache
def initial() -> TrainState:
    return create(jax.random.key(0))


def train(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(lambda p: distance(state.apply_fn(p, batch["x"]), batch))(state.params)
    return state.apply_gradients(grads=grads), loss


def evaluate(state: TrainState, batch: Any) -> dict[str, jax.Array]:
    predictions = state.apply_fn(state.params, batch["x"])
    return {"loss": distance(predictions, batch), "predictions": predictions}


def norm_of(params: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(params)))


SLOW = slow("pipeline")
METHODS = {
    "zero": (alpa_lite.Zero(3), "auto"),
    "mesh": (alpa_lite.Sharded((4, 2)), "auto"),
    "pipeline": (alpa_lite.Pipeline(num_stages=2, schedule="gpipe"), 2),
}


def parallel(fun: Any, method: str, **options: Any) -> Any:
    chosen, microbatches = METHODS[method]
    return alpa_lite.parallelize(fun, method=chosen, num_microbatches=microbatches, **options)


@functools.cache
def trained() -> Any:
    """The train step under ZeRO-3, for tests that count no plans of it."""
    return parallel(train, "zero")


@contextlib.contextmanager
def nothing_moves(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No state goes from device to device, and no warning says that it does."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="alpa_lite"), jax.transfer_guard_device_to_device("disallow"):
        yield
    assert not [record for record in caplog.records if record.name.startswith("alpa_lite.runtime")], caplog.text


def pointers(tree: Any) -> list[int]:
    """Where the blocks of arrays are."""
    return [s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards]


# -- state_from= -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["zero", "mesh", "pipeline"])
def test_evaluation_keeps_the_state_where_the_train_step_has_it(method: str, caplog: Any) -> None:
    step = parallel(train, method)
    test = alpa_lite.parallelize(evaluate, state_from=step)
    norm = alpa_lite.parallelize(norm_of, state_from=step)
    state, reference = initial(), initial()
    for number in range(2):
        state, _ = step(state, examples(16, number))
        reference, _ = jax.jit(train)(reference, examples(16, number))
    before = pointers(state)
    with nothing_moves(caplog) if method != "pipeline" else contextlib.nullcontext():
        found, size = test(state, examples(8, 9)), norm(state.params)
    assert pointers(state) == before
    comparing.compare(found, jax.jit(evaluate)(reference, examples(8, 9)))
    comparing.compare(size, norm_of(reference.params))
    with nothing_moves(caplog) if method != "pipeline" else contextlib.nullcontext():
        state, _ = step(state, examples(16, 3))
    (plan,) = test.plans
    specs = {leaf.path: leaf.spec for stage in step.plans[0].stages for leaf in stage.arguments}
    kept = {leaf.path: leaf for stage in plan.stages for leaf in stage.arguments if leaf.path.startswith("state")}
    used = {path: leaf for path, leaf in kept.items() if ".params" in path}
    assert len(used) == 4 and all(leaf.spec == specs[path] for path, leaf in kept.items())
    assert all(leaf.role == "frozen" for leaf in used.values())


def test_abstract_and_host_leaves_are_matched_by_the_ends_of_their_paths() -> None:
    step = trained()
    plan = step.plan(initial(), examples(16))
    specs = {leaf.path: leaf.spec for leaf in plan.stages[0].arguments}
    shapes = jax.eval_shape(create, jax.random.key(0)).params

    def predict(params: Any, x: jax.Array) -> Any:
        return Net().apply(params, x)

    for like in (step, plan, (plan,)):
        found = alpa_lite.parallelize(predict, state_from=like).plan(shapes, examples(8)["x"])
        leaves = {leaf.path: leaf.spec for leaf in found.stages[0].arguments}
        inner = "['params']['Dense_0']['kernel']"
        assert leaves[f"params{inner}"] == specs[f"state.params{inner}"] != jax.sharding.PartitionSpec()
    made = alpa_lite.make_plan(predict, shapes, examples(8)["x"], cluster=plan.cluster, state_from=plan)
    assert made.stages[0].inputs == found.stages[0].inputs


def test_a_step_that_is_not_planned_yet_is_planned_from_the_shapes_at_hand() -> None:
    step = parallel(train, "zero")
    with pytest.raises(OptionError, match=r"state_from=train: train has no plan yet.*train\.plan\(\.\.\.\)"):
        alpa_lite.parallelize(norm_of, state_from=step)(initial().params)
    found = alpa_lite.parallelize(evaluate, state_from=step)(initial(), examples(8))
    comparing.compare(found, jax.jit(evaluate)(initial(), examples(8)))
    assert len(step.plans) == 1
    with pytest.raises(OptionError, match="state_from=3: give a step that parallelize made, a Plan"):
        alpa_lite.parallelize(evaluate, state_from=3)


def test_two_train_steps_on_one_state_hand_it_on_without_a_copy(caplog: Any) -> None:
    """A discriminator's and a generator's step, or two phases: what one returned, the other overwrites."""

    def slowly(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        return train(state, {**batch, "y": 0.5 * batch["y"]})

    one = trained()
    two = alpa_lite.parallelize(slowly, state_from=one)
    state, reference = initial(), initial()
    for number in range(4):
        fun, run = ((train, one), (slowly, two))[number % 2]
        reference, _ = jax.jit(fun)(reference, examples(16, number))
        old = state
        with nothing_moves(caplog) if number > 1 else contextlib.nullcontext():
            state, _ = run(state, examples(16, number))
        assert number == 0 or all(x.is_deleted() for x in jax.tree.leaves(old.params))
    comparing.compare(state.params, reference.params)


def test_what_only_derives_values_from_the_state_does_not_donate_it() -> None:
    step = trained()
    state, _ = step(initial(), examples(16))
    half = alpa_lite.parallelize(lambda params: jax.tree.map(lambda p: 0.5 * p, params), state_from=step)
    halved = half(half(state.params))
    comparing.compare(halved, jax.tree.map(lambda p: 0.25 * p, state.params))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_generation_with_a_cache_hands_the_cache_on(caplog: Any) -> None:
    """The parameters stay, the cache is state of the generation itself: it comes back where the next call reads it."""

    def generate(params: Any, cache: jax.Array, token: jax.Array, key: Any) -> Any:
        key, used = jax.random.split(key)
        cache = cache.at[:, 0].add(token)
        return cache, jax.random.normal(used, token.shape) + APPLY(params, cache).sum(-1), key

    step = trained()
    state, _ = step(initial(), examples(16))
    run = alpa_lite.parallelize(generate, state_from=step)
    mine = theirs = (jnp.ones((8, WIDTH)), jnp.ones(8), jax.random.key(0))
    params = jax.tree.map(np.asarray, state.params)
    for number in range(3):
        with nothing_moves(caplog) if number else contextlib.nullcontext():
            mine = run(state.params, *mine)
        theirs = jax.jit(generate)(params, *theirs)
        comparing.compare(mine[:2], theirs[:2])
    (plan,) = run.plans
    roles = {leaf.path: leaf.role for leaf in plan.stages[0].arguments if "params" not in leaf.path}
    assert roles == {"cache": "state", "token": "batch", "key": "state"}
    assert not any(x.is_deleted() for x in jax.tree.leaves(state.params))


# -- other signatures -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["zero", "mesh"])
def test_a_short_batch_is_planned_once_and_moves_nothing(method: str, caplog: Any) -> None:
    step = parallel(train, method)
    state, reference = initial(), initial()
    for number, count in enumerate((16, 12, 16, 12, 5)):
        with nothing_moves(caplog) if number else contextlib.nullcontext():
            state, loss = step(state, examples(count, number))
        reference, want = jax.jit(train)(reference, examples(count, number))
        comparing.compare(loss, want)
    comparing.compare(state.params, reference.params)
    specs = [{x.path: x.spec for x in plan.stages[0].arguments if x.role == "state"} for plan in step.plans]
    assert all(found == specs[0] for found in specs)


def test_another_model_in_the_same_step_is_planned_by_itself() -> None:
    step = alpa_lite.parallelize(sgd(lambda w, x: jnp.square(x @ w["w"]).mean()), method=alpa_lite.Sharded())
    for width in (16, 32):
        step.plan({"w": jnp.ones((width, 8))}, jnp.ones((8, width)))
    assert [plan.stages[0].arguments[0].shape for plan in step.plans] == [(16, 8), (32, 8)]


def test_a_move_is_a_warning_with_its_bytes(caplog: Any) -> None:
    step = parallel(train, "zero")
    state, _ = step(initial(), examples(16))
    with caplog.at_level(logging.WARNING, logger="alpa_lite"):
        step(jax.device_put(state, jax.devices()[0]), examples(16))
    total = sum(x.nbytes for x in jax.tree.leaves(state))
    assert f"train moves {units.exact_bytes(total)} of state" in caplog.text
    assert "the largest of them state/params/params/Dense_" in caplog.text


# -- frozen weights ---------------------------------------------------------------------------------------------------


def lora(adapters: Any, base: Any, batch: Any) -> tuple[Any, jax.Array]:
    def loss_of(adapters: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ (base["in"] + adapters["a"] @ adapters["b"])
        return distance(jnp.tanh(x) @ base["out"], batch)

    return sgd(loss_of)(adapters, batch)


@pytest.mark.parametrize("where", [slow("device"), "read-only", "host"])
def test_frozen_weights_are_placed_once_and_stay(where: str, caplog: Any) -> None:
    draw = np.random.default_rng(0)
    base = {"in": draw.normal(size=(WIDTH, 32)), "out": draw.normal(size=(32, OUT))}
    base = {name: value.astype(np.float32) for name, value in base.items()}
    if where == "device":
        base = jax.tree.map(jnp.asarray, base)
    elif where == "read-only":
        for value in base.values():
            value.flags.writeable = False
    adapters = {"a": jnp.zeros((WIDTH, 2)), "b": jnp.ones((2, 32))}
    step = alpa_lite.parallelize(lora, method=alpa_lite.Zero(3))
    reference = adapters
    for number in range(3):
        moving = number == 0 or where != "device"  # an array of the host is reported once it comes again
        with contextlib.nullcontext() if moving else nothing_moves(caplog):
            adapters, loss = step(adapters, base, examples(16, number))
        reference, want = jax.jit(lora)(reference, base, examples(16, number))
        comparing.compare(loss, want)
    assert ("NumPy arrays that can be written" in caplog.text) == (where == "host")
    if where == "host":  # what changed in place is seen
        base["in"] *= 2
        comparing.compare(step(adapters, base, examples(16))[1], jax.jit(lora)(reference, base, examples(16))[1])
    (plan,) = step.plans
    assert [leaf.role for leaf in plan.stages[0].arguments] == ["state"] * 2 + ["frozen"] * 2 + ["batch"] * 2
    assert plan.stages[0].memory.frozen > 0 and "frozen" in str(plan)


# -- NNX --------------------------------------------------------------------------------------------------------------


@in_place
def train_nnx(model: NnxNet, batch: Any) -> jax.Array:
    return distance(model(batch["x"]), batch)


@pytest.mark.parametrize("method", ["zero", SLOW])
def test_an_nnx_model_is_evaluated_where_it_is(method: str, caplog: Any) -> None:
    step = parallel(train_nnx, method)
    test = alpa_lite.parallelize(lambda model, batch: distance(model(batch["x"]), batch), state_from=step)
    models = [NnxNet(nnx.Rngs(0)) for _ in range(2)]
    optimizers = [nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param) for model in models]
    plain = nnx.jit(train_nnx)
    for number in range(3):
        with nothing_moves(caplog) if number and method == "zero" else contextlib.nullcontext():
            loss = step(models[0], optimizers[0], examples(16, number))
            before = [variable.get_raw_value() for variable in jax.tree.leaves(nnx.state(models[0]), is_leaf=_variable)]
            found = test(models[0], examples(8, number))
        after = [variable.get_raw_value() for variable in jax.tree.leaves(nnx.state(models[0]), is_leaf=_variable)]
        assert all(a is b for a, b in zip(before, after, strict=True))  # what is not updated keeps its arrays
        comparing.compare(loss, plain(models[1], optimizers[1], examples(16, number)))
        comparing.compare(found, distance(models[1](examples(8, number)["x"]), examples(8, number)))
    arguments = [leaf for stage in test.plans[0].stages for leaf in stage.arguments]
    assert {(leaf.path.split("[")[0], leaf.role) for leaf in arguments} == {("model", "frozen"), ("batch", "batch")}


def _variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


@pytest.mark.parametrize("method", ["zero", slow("pipeline")])
def test_variables_that_the_step_does_not_update_keep_their_arrays(method: str) -> None:
    class Tuned(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.base, self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, OUT, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(jnp.tanh(self.base(x)))

    def tune(model: Tuned, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda head, base: distance(head(jnp.tanh(base(batch["x"]))), batch))(
            model.head, model.base
        )
        nnx.update(model.head, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model.head, nnx.Param), grads))
        return loss

    model, twin = Tuned(nnx.Rngs(0)), Tuned(nnx.Rngs(0))
    base = model.base.kernel.get_raw_value()
    step = parallel(tune, method)
    for number in range(2):
        comparing.compare(step(model, examples(16, number)), nnx.jit(tune)(twin, examples(16, number)))
    assert model.base.kernel.get_raw_value() is base and not base.is_deleted()
    assert float((base + 1).sum()) == float((twin.base.kernel.get_raw_value() + 1).sum())  # usable elsewhere
    roles = {leaf.path: leaf.role for stage in step.plans[0].stages for leaf in stage.arguments}
    assert {role for path, role in roles.items() if "base" in path} == {"frozen"}
    assert {role for path, role in roles.items() if "head" in path} == {"state"}
