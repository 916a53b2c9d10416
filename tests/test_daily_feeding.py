"""State that is born sharded, batches that are placed ahead, and shardings for what comes from elsewhere."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import alpa_lite
from alpa_lite.errors import OptionError
from gallery.batches import f32
from gallery.steps import sgd
from tests import comparing
from tests.marks import slow
from tests.test_daily_use import OPTIMIZER, Net, NnxNet, create, examples, initial, parallel, train, train_nnx, trained

SLOW = slow("pipeline")


def assert_identical(got: Any, want: Any) -> None:
    """The same trees, bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    comparing.assert_equal(jax.tree.leaves(got), jax.tree.leaves(want))


# -- init -------------------------------------------------------------------------------------------------------------


@pytest.mark.optimised
@pytest.mark.parametrize("method", ["zero", slow("mesh"), SLOW])
def test_a_train_state_is_born_where_the_plan_wants_it(method: str) -> None:
    step = parallel(train, method)
    with pytest.raises(OptionError, match=r"train has no plan yet.*train\.init\(create, key, rest=\(batch,\)\)"):
        step.init(create, jax.random.key(3))
    state = step.init(create, jax.random.key(3), rest=(examples(16),))
    want = jax.jit(create)(jax.random.key(3))
    assert_identical(state.params, want.params)
    assert_identical(state.opt_state, want.opt_state)
    where = step.shardings(state, examples(16)).arguments[0]
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, state, where)))
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(state)) or method == "mesh"
    first = state.params
    state, _ = step(state, examples(16))
    assert all(x.is_deleted() for x in jax.tree.leaves(first))  # the step made it: nothing was copied
    comparing.compare(state.params, jax.jit(train)(want, examples(16))[0].params)


def test_parameters_and_moments_are_born_one_after_the_other_or_together() -> None:
    def adam(params: Any, moments: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.square(Net().apply(p, batch["x"]) - batch["y"]).mean())(params)
        updates, moments = OPTIMIZER.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    def make(key: Any) -> Any:
        params = Net().init(key, jnp.ones((1, 16)))
        return params, OPTIMIZER.init(params)

    step = alpa_lite.parallelize(adam, method=alpa_lite.Zero(3))
    both = step.init(make, jax.random.key(0), rest={"batch": examples(16)})
    params = step.init(Net().init, jax.random.key(0), np.ones((1, 16), np.float32))
    moments = step.init(OPTIMIZER.init, params)
    assert_identical(both, jax.jit(make)(jax.random.key(0)))
    assert_identical((params, moments), both)
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, (params, moments), both)
    assert all(jax.tree.leaves(same)) and len(jax.tree.leaves(params)[0].sharding.device_set) == 8
    with pytest.raises(OptionError, match=r"nothing that the initialisation makes.*float32\[3, 3\]"):
        step.init(lambda: jnp.ones((3, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["zero", "pipeline"])
def test_nnx_objects_are_born_sharded(method: str) -> None:
    def make(key: Any) -> tuple[NnxNet, nnx.Optimizer]:
        model = NnxNet(nnx.Rngs(key))
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    step = parallel(train_nnx, method)
    model, optimizer = step.init(make, jax.random.key(1), rest=(examples(16),))
    twin, other = nnx.jit(make)(jax.random.key(1))
    assert_identical(nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(twin)))
    assert_identical(nnx.to_pure_dict(nnx.state(optimizer)), nnx.to_pure_dict(nnx.state(other)))
    spread = [x.sharding for x in jax.tree.leaves(nnx.state((model, optimizer)))]
    assert any(not one.is_fully_replicated for one in spread) and all(isinstance(one, NamedSharding) for one in spread)
    for number in range(2):
        comparing.compare(step(model, optimizer, examples(16, number)), train_nnx(twin, other, examples(16, number)))
    assert len(step.plans) == 1
    alone = step.init(lambda key: NnxNet(nnx.Rngs(key)), jax.random.key(1))
    kernel = alone.first.kernel.get_raw_value()
    assert kernel.sharding.is_equivalent_to(model.first.kernel.get_raw_value().sharding, kernel.ndim)


@pytest.mark.slow
def test_numbers_do_not_depend_on_the_generator() -> None:
    """Numbers of `rbg` depend on how they are cut: each leaf is made whole, and cut then."""

    def make(key: Any) -> Any:
        one, two = jax.random.split(key)
        return {"a": jax.random.normal(one, (16, 32)), "b": jax.random.normal(two, (32, 16))}

    step = alpa_lite.parallelize(sgd(lambda w, x: jnp.square(x @ w["a"] @ w["b"]).mean()), method=alpa_lite.Zero(3))
    step.plan(jax.eval_shape(make, jax.random.key(0)), np.ones((8, 16), np.float32))
    for impl in ("threefry2x32", "rbg"):
        key = jax.random.key(5, impl=impl)
        state = step.init(make, key)
        assert_identical(state, jax.jit(make)(key))
        assert state["a"].addressable_shards[0].data.size == 64


# -- shardings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["zero", SLOW])
def test_shardings_are_those_of_what_the_step_takes_and_returns(method: str) -> None:
    step = trained() if method == "zero" else parallel(train, method)
    shapes = (jax.eval_shape(create, jax.random.key(0)), examples(16))
    where = step.shardings(*shapes)
    placed = step.place(initial(), examples(16))
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, placed, where.arguments)))
    out = step(*placed)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), out, where.results)))


def test_plain_jit_takes_the_shardings() -> None:
    step = trained()
    placed = step.place(initial(), examples(16))
    where = step.shardings(*placed)
    out = jax.jit(train, in_shardings=where.arguments, out_shardings=where.results)(*placed)
    comparing.compare(out[0].params, jax.jit(train)(initial(), examples(16))[0].params)
    inner = (tree.params["params"]["Dense_0"]["kernel"] for tree in (out[0], where.results[0]))
    assert next(inner).sharding == next(inner)


def test_a_plan_has_shardings_for_any_tree_of_its_leaves() -> None:
    step = trained()
    plan = step.plan(initial(), examples(16))
    where = step.shardings(initial(), examples(16)).arguments[0]
    saved = {"model": {"params": jax.eval_shape(create, jax.random.key(0)).params}, "epoch": np.int32(3)}
    found = plan.shardings(saved)
    assert found["model"]["params"] == where.params
    assert found["epoch"].spec == PartitionSpec()
    assert plan.shardings(initial()).opt_state == where.opt_state
    assert plan.shardings(examples(16))["x"].spec == PartitionSpec("x")
    kernel = f32(16, 32)
    assert plan.shardings({"Dense_0": {"kernel": kernel}})["Dense_0"]["kernel"].spec != PartitionSpec()


# -- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["zero", SLOW])
def test_the_batch_is_placed_alone(method: str) -> None:
    step = trained() if method == "zero" else parallel(train, method)
    state, _ = step(initial(), examples(16))
    where = step.shardings(state, examples(16)).arguments[1]
    batch = examples(16, 1)
    placed = step.place(batch)
    assert all(jax.tree.leaves(jax.tree.map(lambda x, s: x.sharding == s, placed, where)))
    batch["x"][:] = 0  # the loader's buffer is its own again
    want = jax.jit(train)(jax.jit(train)(initial(), examples(16))[0], examples(16, 1))
    comparing.compare(step(state, placed)[1], want[1])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["zero", "pipeline"])
def test_batches_are_placed_ahead(method: str) -> None:
    step = parallel(train, method)
    batches = [examples(16, n) for n in range(4)] + [examples(12, 9)]
    state, reference = step.init(create, jax.random.key(0), rest=(batches[0],)), create(jax.random.key(0))
    placed = []
    with step.prefetch(iter(batches)) as ahead:
        for batch, host in zip(ahead, batches, strict=True):
            placed.append(isinstance(batch["x"], jax.Array) and isinstance(batch["x"].sharding, NamedSharding))
            state, loss = step(state, batch)
            reference, want = jax.jit(train)(reference, host)
            comparing.compare(loss, want)
    assert all(placed) and len(step.plans) == 2


def test_a_batch_of_several_arguments() -> None:
    def update(w: Any, x: Any, y: Any) -> Any:
        return sgd(lambda w, x: jnp.square(x @ w["w"] - y).mean())(w, x)[0]

    step = alpa_lite.parallelize(update, method=alpa_lite.DataParallel())
    w = {"w": np.ones((16, 8), np.float32)}
    pairs = [tuple(examples(8, n).values()) for n in range(3)]
    w = step(w, *pairs[0])
    for x, y in step.prefetch(pairs):
        assert x.sharding.spec == y.sharding.spec == PartitionSpec("x")
        w = step(w, x, y)


def test_errors_of_the_loader_come_in_their_place_and_the_thread_ends() -> None:
    step = parallel(train, "zero")
    closed = threading.Event()

    def broken() -> Any:
        yield examples(16)
        raise OSError("disk")

    def endless() -> Any:
        try:
            while True:
                yield examples(16)
        finally:
            closed.set()

    ahead = step.prefetch(broken())
    assert set(next(ahead)) == {"x", "y"}
    with pytest.raises(OSError, match="disk"):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)
    with step.prefetch(endless(), size=1) as ahead:
        next(ahead)
    assert closed.wait(60)
    closed.clear()
    ahead = step.prefetch(endless())
    next(ahead)
    del ahead  # nobody reads on
    assert closed.wait(60)
    for thread in threading.enumerate():
        if thread.name == "alpa_lite prefetch":
            thread.join(60)
            assert not thread.is_alive()
