"""State whose leaves change places, data of several sizes, frozen weights: their roles, and results as of `jit`."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import alpa_lite
from alpa_lite.passes.tracing import trace
from gallery.batches import normal
from gallery.steps import updated
from tests.comparing import assert_close
from tests.marks import slow

WIDTH, ROWS = 16, 16
METHODS: dict[str, dict[str, Any]] = {
    "mesh": {"method": alpa_lite.DataParallel(), "num_microbatches": 2},
    "pipeline": {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2},
}


def weights(seed: int) -> Any:
    return {"a": normal(seed, WIDTH, 32) / 4, "b": normal(seed + 1, 32, WIDTH) / 5}


def batch() -> Any:
    return {"x": normal(8, ROWS, WIDTH), "y": normal(9, ROWS, WIDTH)}


def loss_of(p: Any, b: Any) -> jax.Array:
    return jnp.mean((jnp.tanh(b["x"] @ p["a"]) @ p["b"] - b["y"]) ** 2)


# -- state whose leaves change places ---------------------------------------------------------------------------------


def ping_pong(s: Any, b: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(s["p"], b)
    return {"p": updated(s["q"], grads), "q": s["p"]}, loss


def queue(s: Any, b: Any) -> Any:
    """The last weights wait until their gradient is applied: a stale descent."""
    first, second, third = s["history"]
    loss, grads = jax.value_and_grad(loss_of)(third, b)
    return {"history": [updated(first, grads), first, second], "step": s["step"] + 1}, loss


def rotated(s: Any, b: Any) -> Any:
    """Layers of one shape that change places."""
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(b["x"] @ w[0]) @ w[1] @ w[2] - b["y"]) ** 2))(s)
    one, two, three = updated(s, grads)
    return (three, one, two), loss


def parts_of_one(everything: Any) -> Any:
    """State and batch in one argument."""
    s, loss = ping_pong({"p": everything["p"], "q": everything["q"]}, everything["data"])
    return {**s, "loss": loss}


SWAPPED: dict[Callable[..., Any], Callable[[], tuple[Any, ...]]] = {
    ping_pong: lambda: ({"p": weights(0), "q": weights(2)}, batch()),
    queue: lambda: ({"history": [weights(0), weights(2), weights(4)], "step": jnp.int32(0)}, batch()),
    rotated: lambda: (tuple(normal(i, WIDTH, WIDTH) / 4 for i in range(3)), batch()),
    parts_of_one: lambda: ({"p": weights(0), "q": weights(2), "data": batch()},),
}


@pytest.mark.parametrize("step", SWAPPED, ids=lambda step: step.__name__)
def test_leaves_that_change_places_are_state(step: Any) -> None:
    traced = trace(step, SWAPPED[step](), {})
    for argument in traced.arguments:
        assert argument.role == ("batch" if argument.path.endswith(("['x']", "['y']")) else "state")
    assert not any("no update of it" in note for note in traced.notes)


def test_modules_that_change_places() -> None:
    class Two(nnx.Module):
        def __init__(self) -> None:
            self.fast = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
            self.slow = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(1))

    def step(model: Two, b: Any) -> jax.Array:
        old = model.fast.kernel[...]
        value, grad = jax.value_and_grad(lambda w: jnp.mean((b["x"] @ w - b["y"]) ** 2))(old)
        model.fast.kernel[...] = model.slow.kernel[...] - 0.1 * grad
        model.slow.kernel[...] = old
        return value

    ours, theirs = Two(), Two()
    got = alpa_lite.parallelize(step, **METHODS["mesh"])(ours, batch())
    assert_close(
        (got, nnx.to_pure_dict(nnx.state(ours))), (nnx.jit(step)(theirs, batch()), nnx.to_pure_dict(nnx.state(theirs)))
    )


def exchanged(p: Any, q: Any, b: Any) -> Any:
    """Of two arguments that a caller passes on in the order of the results."""
    loss, grads = jax.value_and_grad(loss_of)(p, b)
    return updated(q, grads), p, loss


def passed_on(fixed: Any, p: Any, q: Any, r: Any, b: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: loss_of(jax.tree.map(jnp.add, p, fixed), b))(p)
    return fixed, (q, r, updated(p, grads)), loss


def averaged(average: Any, p: Any, b: Any) -> Any:
    """No exchange: results in another order than the arguments."""
    loss, grads = jax.value_and_grad(loss_of)(p, b)
    new = updated(p, grads)
    return new, jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, new), loss


def crossed(p: Any, q: Any, b: Any) -> Any:
    """Each new value is an update of the other argument."""
    loss, grads = jax.value_and_grad(loss_of)(p, b)
    return updated(q, grads), jax.tree.map(lambda w: 0.99 * w, p), loss


def crossed_by_name(p: Any, q: Any, b: Any) -> Any:
    new, old, loss = crossed(p, q, b)
    return {"q": old, "p": new, "loss": loss}


def named_in_another_order(p: Any, q: Any, b: Any) -> Any:
    """Each is an update of itself; without the names it would be an exchange."""
    new, _, loss = crossed(p, p, b)
    return {"q": jax.tree.map(lambda w: 0.99 * w, q), "p": new}, loss


PAIRED: dict[Callable[..., Any], dict[str, str]] = {
    **{step: {"result[0]": "p", "result[1]": "q"} for step in (exchanged, crossed)},
    averaged: {"result[0]": "p", "result[1]": "average"},
    crossed_by_name: {"result['p']": "p", "result['q']": "q"},
    named_in_another_order: {"result[0]['p']": "p", "result[0]['q']": "q"},
    passed_on: {"result[1][0]": "p", "result[1][1]": "q", "result[1][2]": "r"},
}
"""Results, and the arguments of which they are the new values."""


@pytest.mark.parametrize(
    ("step", "named"),
    [(step, named) for step in PAIRED for named in (False, True)
     if (step, named) != (passed_on, True)],
)  # fmt: skip
def test_arguments_that_change_places_are_state(step: Any, named: bool) -> None:
    state = [weights(2 * n) for n in range(4 if step is passed_on else 2)]
    traced = trace(step, (*state, batch()), {}, state_argnums=(0, 1) if named else "auto")
    pairs = {(traced.outputs[o].path, traced.arguments[a].path) for o, a in traced.state}
    assert pairs == {(f"{o}['{leaf}']", f"{a}['{leaf}']") for o, a in PAIRED[step].items() for leaf in "ab"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [ping_pong, *(slow(f) for f in (queue, rotated))])
def test_leaves_that_change_places_are_computed_as_by_jit(step: Any, method: str) -> None:
    args = SWAPPED[step]()
    assert_close(alpa_lite.parallelize(step, **METHODS[method])(*args), jax.jit(step)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [exchanged, crossed])
def test_arguments_that_change_places_are_computed_as_by_jit(step: Any, method: str, caplog: Any) -> None:
    state = want = (weights(0), weights(2))
    planned = alpa_lite.parallelize(step, **METHODS[method], state_argnums=(0, 1), batch_argnums=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            *state, loss = planned(*state, batch())
            *want, expected = jax.jit(step)(*want, batch())
            assert_close((state, loss), (want, expected))
    assert not any("moves" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("order", [("w", "x", "y"), ("x", "w", "y"), ("x", "y", "w")])
def test_a_batch_may_have_the_type_of_the_weights(order: tuple[str, ...]) -> None:
    def step(*args: Any) -> Any:
        given = dict(zip(order, args, strict=True))
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((given["x"] @ w - given["y"]) ** 2))(given["w"])
        return given["w"] - 0.1 * grad, loss

    traced = trace(step, tuple(normal(n, WIDTH, WIDTH) for n in range(3)), {})
    found = dict(zip(order, (argument.role for argument in traced.arguments), strict=True))
    assert found == {"w": "state", "x": "batch", "y": "batch"}


def test_values_handed_through_and_gradients_are_no_state() -> None:
    def handed(s: Any, b: Any) -> Any:
        return s, loss_of(s, b)

    def gradients(s: Any, b: Any) -> Any:
        return jax.grad(loss_of)(s, b)

    for fun in (handed, gradients):
        assert not trace(fun, (weights(0), batch()), {}).state


def test_the_batch_is_contracted_at_once() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        return w - 0.1 * (x.T @ y), jnp.sum(w)

    args = normal(0, WIDTH, WIDTH), *batch().values()
    assert_close(alpa_lite.parallelize(step, **METHODS["mesh"])(*args), jax.jit(step)(*args))


# -- data -------------------------------------------------------------------------------------------------------------


def descended(loss: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(loss)
    def step(s: Any, *data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(s, *data)
        return updated(s, grads), value

    return step


@descended
def graph_network(s: Any, graph: Any, labels: Any) -> Any:
    nodes, senders, receivers, edges, graph_of = graph
    messages = jnp.tanh(jnp.concatenate([nodes[senders], edges], -1) @ s["edge"])
    inbox = jax.ops.segment_sum(messages, receivers, len(nodes))
    hidden = jnp.concatenate([nodes, inbox], -1) @ s["node"]
    return jnp.mean((jax.ops.segment_sum(hidden, graph_of, len(labels)) - labels) ** 2)


@descended
def two_players(s: Any, real: Any, noise: Any) -> Any:
    return jnp.mean(jnp.tanh(real @ s["d"])) - jnp.mean(jnp.tanh(noise @ s["g"] @ s["d"]))


@descended
def pooled(s: Any, nodes: Any, edges: Any, sizes: Any) -> Any:
    return jnp.mean((nodes @ s["w"]) ** 2) + jnp.mean(edges) * jnp.mean(sizes)


def graphs(seed: int) -> tuple[Any, ...]:
    """A graph of 40 nodes and 96 edges in 8 parts, with labels of the parts."""
    draw = np.random.default_rng(seed)
    ends = draw.integers(0, 40, (2, 96)).astype(np.int32)
    nodes, edges, labels = floats((40, 8), (96, 2), (8, 3))(seed)
    return (nodes, *ends, edges, np.sort(draw.integers(0, 8, 40)).astype(np.int32)), labels


def floats(*shapes: tuple[int, ...]) -> Callable[[int], tuple[np.ndarray, ...]]:
    return lambda seed: tuple(np.random.default_rng(seed).normal(size=s).astype(np.float32) / 4 for s in shapes)


DATA: dict[Callable[..., Any], tuple[Any, Callable[[int], tuple[Any, ...]]]] = {
    graph_network: ({"edge": normal(0, 10, 6) / 4, "node": normal(1, 14, 3) / 4}, graphs),
    two_players: ({"d": normal(0, 8, 1), "g": normal(1, 6, 8)}, floats((16, 8), (32, 6))),
    pooled: ({"w": normal(0, 8, 4)}, floats((64, 8), (96, 3), (4,))),
}


@pytest.mark.parametrize("fun", DATA, ids=lambda fun: fun.__name__)
def test_arrays_passed_with_each_call_are_data(fun: Any) -> None:
    state, make = DATA[fun]
    traced = trace(fun, (state, *make(0)), {})
    count = len(jax.tree.leaves(state))
    roles = [argument.role for argument in traced.arguments[count:]]
    assert "batch" in roles and set(roles) <= {"batch", "other"}


@pytest.mark.parametrize(
    ("fun", "options"),
    [
        (pooled, {}),
        *[slow(fun, {"method": alpa_lite.DataParallel()}) for fun in DATA],
        slow(two_players, METHODS["pipeline"]),
    ],
)
def test_data_that_change_in_every_call_are_read_anew(fun: Any, options: Any, caplog: Any) -> None:
    state, make = DATA[fun]
    step = alpa_lite.parallelize(fun, **options)
    with caplog.at_level(logging.WARNING, logger="alpa_lite"):
        for number in range(3):
            data = make(number)
            assert_close(step(state, *data), jax.jit(fun)(state, *data))
    assert "frozen" not in caplog.text
    assert not any("frozen" in note for note in step.plan(state, *make(0)).notes)


# -- weights that do not come back ------------------------------------------------------------------------------------


def adapted(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(batch @ base["a"] + batch @ w) ** 2)


def transposed(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    kernel = (base["a"].astype(jnp.bfloat16).astype(jnp.float32) * 2).T.T
    return jnp.mean((batch @ kernel @ w) ** 2)


def scanned(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean(lax.scan(lambda x, _: (jnp.tanh(x @ base["a"]) @ w, None), batch, None, length=2)[0] ** 2)


def looked_up(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((base["a"][batch[:, 0].astype(jnp.int32)] @ w) ** 2)


def against_targets(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    """A product that sums over the examples: both are examples."""
    return -jnp.einsum("bc,bc->", jax.nn.log_softmax(batch @ w), base["a"])


def pairs(w: jax.Array, base: Any, batch: jax.Array) -> jax.Array:
    """Rows of both are compared with one another, as data are."""
    return jnp.mean((batch @ w @ base["a"].T) ** 2)


@pytest.mark.parametrize(
    ("loss", "shapes", "role"),
    [
        *[(loss, ((ROWS, ROWS), (ROWS, ROWS)), "frozen") for loss in (adapted, transposed, scanned, looked_up)],
        (adapted, ((ROWS, ROWS), (2 * ROWS, ROWS)), "frozen"),
        (against_targets, ((ROWS, ROWS), (ROWS, ROWS)), "batch"),
        (pairs, ((8, ROWS), (2 * ROWS, ROWS)), "batch"),
    ],
)
def test_weights_that_do_not_come_back_are_told_from_the_batch(loss, shapes, role):
    """Though they have as many rows as there are examples."""

    def step(state: Any, base: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda w: loss(w, base, batch))(state["w"])
        return {"w": state["w"] - 0.1 * gradient}, value

    traced = trace(step, ({"w": jnp.ones((ROWS, ROWS))}, {"a": jnp.ones(shapes[0])}, jnp.ones(shapes[1])), {})
    assert [argument.role for argument in traced.arguments] == ["state", role, "batch"]
