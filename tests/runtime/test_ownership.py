"""What a step may overwrite: what it made itself, and nothing of the caller's, placed or not.

A deleted array is refused before anything runs: JAX 0.10 ends the process where an executable is given one.
"""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.errors import AlpaLiteError, DonatedError
from alpa_lite.runtime import placement
from gallery.batches import normal, regression
from tests.comparing import assert_close
from tests.marks import slow_but
from tests.runtime.cases import deleted, descend

WIDTH, ROWS = 8, 16
METHODS: dict[str, Callable[[], dict[str, Any]]] = {
    "one mesh": lambda: {"method": alpa_lite.Manual({"state/*": P("x")}, mesh_shape=(8,), axis_names=("x",))},
    "pipeline": lambda: {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}

SLOW_PIPELINE = slow_but(["one mesh"], METHODS)


def make(rows: int = ROWS) -> tuple[Any, Any, Any]:
    state = {"first": normal(rows, WIDTH, WIDTH), "second": normal(rows + 1, WIDTH, WIDTH)}
    return state, regression(WIDTH, WIDTH, rows), normal(rows + 2, WIDTH, WIDTH)


def step(state: Any, batch: Any, frozen: Any) -> Any:
    def loss(s: Any) -> Any:
        x = jnp.tanh(batch["x"] @ s["first"] @ frozen) @ s["second"]
        return ((x - batch["y"]) ** 2).mean()

    return descend(loss, state)


@functools.cache
def parallel(where: str, **options: Any) -> Any:
    return alpa_lite.parallelize(step, batch_argnums=1, **METHODS[where](), **options)


def donate_elsewhere(tree: Any) -> None:
    jax.block_until_ready(jax.jit(lambda t: jax.tree.map(jnp.negative, t), donate_argnums=0)(tree))
    assert deleted(tree) == {True}


@pytest.fixture
def copied(monkeypatch) -> list[int]:
    """How many leaves each call of `placement.copies` has copied."""
    counts: list[int] = []
    original = placement.copies

    def counting(leaves: Any, shardings: Any) -> Any:
        counts.append(len(leaves))
        return original(leaves, shardings)

    monkeypatch.setattr(placement, "copies", counting)
    return counts


@pytest.mark.parametrize("where", SLOW_PIPELINE)
def test_a_callers_placed_arrays_survive_the_first_call(where):
    ours, other = parallel(where), alpa_lite.parallelize(step, batch_argnums=1, **METHODS[where]())
    state, batch, frozen = ours.place(*make())
    want = jax.jit(step)(*make())
    mine = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state)  # by hand
    theirs, _ = other(state, batch, frozen)  # placed by another step
    assert_close(theirs, want[0])
    assert deleted(state) == {False}
    for given in (mine, theirs):
        before = jax.tree.map(np.asarray, given)
        assert_close(ours(given, batch, frozen), jax.jit(step)(before, *make()[1:]))
        assert deleted(given) == {False}
        assert_close(given, before)
    own, _ = ours(state, batch, frozen)  # what `place` made is there to be given away
    assert deleted(state) == {True}
    assert_close(own, want[0])


@pytest.mark.parametrize("where", SLOW_PIPELINE)
def test_signatures_in_turn_share_a_state_without_copies(where, copied):
    run = parallel(where)
    state, want = make()[0], make()[0]
    batches = [make()[1:], (make(8)[1], make()[2])]
    for number in range(6):
        if number == 2:  # both have been compiled, and the first has copied the caller's arrays
            copied.clear()
        before = state
        state, loss = run(state, *batches[number % 2])
        want, expected = jax.jit(step)(want, *batches[number % 2])
        assert_close(loss, expected)
        assert number < 2 or deleted(before) == {True}
    assert_close(state, want)
    assert sum(copied) == 0


def test_two_states_in_turn_are_not_copied(copied):
    run = parallel("one mesh")
    _, *others = make()
    states = [run(make()[0], *others)[0] for _ in range(2)]
    copied.clear()
    for _ in range(3):
        states = [run(state, *others)[0] for state in states]
    assert sum(copied) == 0


def test_named_arguments_are_donated_as_in_jit():
    run = parallel("one mesh", donate_argnums=0)
    state, batch, frozen = run.place(*make())
    mine = jax.tree.map(lambda x: jax.device_put(x, x.sharding, may_alias=False), state)
    run(mine, batch, frozen)
    assert deleted(mine) == {True}


@pytest.mark.parametrize("where", SLOW_PIPELINE)
def test_nothing_is_donated_where_nothing_is_asked_for(where):
    run = parallel(where, donate_argnums=())
    state, batch, frozen = run.place(*make())
    for _ in range(2):
        assert_close(run(state, batch, frozen), jax.jit(step)(*make()))
    assert deleted((state, batch, frozen)) == {False}


@pytest.mark.parametrize("where", METHODS)
def test_an_array_that_was_deleted_is_named(where):
    run = parallel(where)
    state, batch, frozen = run.place(*make())
    old, _ = run(state, batch, frozen)
    state, _ = run(old, batch, frozen)
    with pytest.raises(DonatedError, match=r"state/first was deleted.* call of step .*donate_argnums=\(\)"):
        run(old, batch, frozen)
    with pytest.raises(AlpaLiteError, match="state/second was deleted"):
        run({**state, "second": old["second"]}, batch, frozen)
    assert deleted(state) == {False}
    for name, given, end in (("x", jnp.ones((ROWS, WIDTH)), lambda x: x.delete()), ("y", batch["y"], donate_elsewhere)):
        end(given)
        with pytest.raises(DonatedError, match=f"batch/{name} was deleted"):
            run(state, {**make()[1], name: given}, frozen)
    donate_elsewhere(frozen)
    with pytest.raises(DonatedError, match="frozen was deleted"):
        run(state, make()[1], frozen)
    assert deleted(state) == {False}
    donate_elsewhere(state["second"])  # of what the last call returned
    for call in (run, run.place):
        with pytest.raises(DonatedError, match="state/second was deleted"):
            call(state, *make()[1:])
    assert float(run(*make())[1]) > 0


@pytest.mark.parametrize("where", SLOW_PIPELINE)
def test_a_variable_that_was_deleted_is_named(where):
    options: dict[str, Any] = METHODS[where]() if where == "pipeline" else {"method": alpa_lite.Zero(3)}
    run = alpa_lite.parallelize(adapt, **options)
    model, batch, _ = run.place(Adapted(), make()[1])[0], *make()[1:]
    run(model, batch)
    old = jax.tree.map(lambda x: x, nnx.state(model))
    run(model, batch)
    new = jax.tree.map(lambda x: x, nnx.state(model))
    nnx.update(model, old)
    with pytest.raises(DonatedError, match="model/trained/bias/value was deleted"):
        run(model, batch)
    nnx.update(model, new)
    donate_elsewhere(model.trained.kernel[...])
    with pytest.raises(DonatedError, match="model/trained/kernel/value was deleted"):
        run(model, batch)


@pytest.mark.parametrize("where", METHODS)
@pytest.mark.parametrize("states", [1, 2])
def test_a_state_that_is_dropped_is_not_kept_alive(where, states):
    """The state that the last call returned, and one that is known from an earlier call."""
    out = [parallel(where)(*make()) for _ in range(states)]
    alive = list(map(weakref.ref, jax.tree.leaves(out)))
    del out
    gc.collect()
    assert not any(ref() is not None for ref in alive)


class Adapted(nnx.Module):
    """A frozen layer and one that is trained."""

    def __init__(self) -> None:
        self.frozen = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.trained = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.trained(jnp.tanh(self.frozen(x)))


def adapt(model: Adapted, batch: Any) -> jax.Array:
    def loss(trained: nnx.Linear) -> jax.Array:
        return ((trained(jnp.tanh(model.frozen(batch["x"]))) - batch["y"]) ** 2).mean()

    value, grads = nnx.value_and_grad(loss)(model.trained)
    nnx.update(model.trained, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model.trained), grads))
    return value


@pytest.mark.parametrize("where", SLOW_PIPELINE)
def test_variables_that_a_step_does_not_update_stay_the_callers(where, copied):
    options: dict[str, Any] = METHODS[where]() if where == "pipeline" else {"method": alpa_lite.DataParallel()}
    run, jitted = alpa_lite.parallelize(adapt, **options), nnx.jit(adapt)
    (model, plain), (_, batch, _) = (Adapted(), Adapted()), make()
    before = jax.tree.leaves(nnx.state(model.frozen))
    for number in range(3):
        if number == 1:
            copied.clear()
        old = jax.tree.leaves(nnx.state(model.trained))
        assert_close(run(model, batch), jitted(plain, batch))
        after = jax.tree.leaves(nnx.state(model.frozen))
        assert all(map(operator.is_, after, before)) and deleted(before) == {False}
        assert not set(map(id, old)) & set(map(id, jax.tree.leaves(nnx.state(model.trained))))
        assert deleted(old) == {number > 0}
    assert sum(copied) == 0  # copies of what is frozen stay
    jax.block_until_ready(model.frozen(batch["x"]))
    assert_close(nnx.state(model), nnx.state(plain))
