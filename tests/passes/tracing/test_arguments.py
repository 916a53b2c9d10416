"""State whose leaves change places, and data of several sizes: what they are, and that steps compute as plain `jit`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import alpa_lite
from alpa_lite.passes.tracing import trace
from tests.zoo_base import normal

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


def descended(p: Any, grads: Any) -> Any:
    return jax.tree.map(lambda x, g: x - 0.1 * g, p, grads)


def close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# -- state whose leaves change places ---------------------------------------------------------------------------------


def ping_pong(s: Any, b: Any) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(s["p"], b)
    return {"p": descended(s["q"], grads), "q": s["p"]}, loss


def queue(s: Any, b: Any) -> Any:
    """The last weights wait until their gradient is applied: a stale descent."""
    first, second, third = s["history"]
    loss, grads = jax.value_and_grad(loss_of)(third, b)
    return {"history": [descended(first, grads), first, second], "step": s["step"] + 1}, loss


def targets(s: Any, b: Any) -> Any:
    """A target network that becomes the old parameters."""
    loss, grads = jax.value_and_grad(loss_of)(s["online"], b)
    return {"online": descended(s["online"], grads), "target": s["online"]}, loss + loss_of(s["target"], b)


def rotated(s: Any, b: Any) -> Any:
    """Layers of one shape that change places."""
    loss, grads = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(b["x"] @ w[0]) @ w[1] @ w[2] - b["y"]) ** 2))(s)
    one, two, three = descended(s, grads)
    return (three, one, two), loss


def taken_apart(everything: Any) -> Any:
    """State and batch in one argument."""
    s, loss = ping_pong(everything["state"], everything["data"])
    return {"state": s, "loss": loss}


def parts_of_one(everything: Any) -> Any:
    s, loss = ping_pong({"p": everything["p"], "q": everything["q"]}, everything["data"])
    return {**s, "loss": loss}


def square() -> Any:
    return tuple(normal(i, WIDTH, WIDTH) / 4 for i in range(3))


SWAPPED: dict[Callable[..., Any], Callable[[], tuple[Any, ...]]] = {
    ping_pong: lambda: ({"p": weights(0), "q": weights(2)}, batch()),
    queue: lambda: ({"history": [weights(0), weights(2), weights(4)], "step": jnp.int32(0)}, batch()),
    targets: lambda: ({"online": weights(0), "target": weights(2)}, batch()),
    rotated: lambda: (square(), batch()),
    taken_apart: lambda: ({"state": {"p": weights(0), "q": weights(2)}, "data": batch()},),
    parts_of_one: lambda: ({"p": weights(0), "q": weights(2), "data": batch()},),
}


@pytest.mark.parametrize("step", SWAPPED, ids=lambda step: step.__name__)
def test_leaves_that_change_places_are_state(step: Any) -> None:
    traced = trace(step, SWAPPED[step](), {})
    roles = {argument.path: argument.role for argument in traced.arguments}
    assert {role for path, role in roles.items() if path.endswith(("['x']", "['y']"))} == {"batch"}
    assert {role for path, role in roles.items() if not path.endswith(("['x']", "['y']"))} == {"state"}
    assert not any("no update of it" in note for note in traced.notes)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "step", [ping_pong, *(pytest.param(f, marks=pytest.mark.slow) for f in SWAPPED if f is not ping_pong)]
)
def test_they_are_computed_as_by_jit(step: Any, method: str) -> None:
    args = SWAPPED[step]()
    close(alpa_lite.parallelize(step, **METHODS[method])(*args), jax.jit(step)(*args))


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
    close(
        (got, nnx.to_pure_dict(nnx.state(ours))), (nnx.jit(step)(theirs, batch()), nnx.to_pure_dict(nnx.state(theirs)))
    )


def exchanged(p: Any, q: Any, b: Any) -> Any:
    """Of two arguments that a caller passes on in the order of the results."""
    loss, grads = jax.value_and_grad(loss_of)(p, b)
    return descended(q, grads), p, loss


def passed_on(fixed: Any, p: Any, q: Any, r: Any, b: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: loss_of(jax.tree.map(jnp.add, p, fixed), b))(p)
    return fixed, (q, r, descended(p, grads)), loss


def averaged(average: Any, p: Any, b: Any) -> Any:
    """No exchange: results in another order than the arguments."""
    loss, grads = jax.value_and_grad(loss_of)(p, b)
    new = descended(p, grads)
    return new, jax.tree.map(lambda a, w: 0.9 * a + 0.1 * w, average, new), loss


def exchanged_arrays(p: Any, q: Any, b: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(b["x"] @ p) - b["y"]) ** 2))(p)
    return q - 0.1 * grads, p, loss


def crossed(p: Any, q: Any, b: Any) -> Any:
    """Each new value is an update of the other argument."""
    loss, grads = jax.value_and_grad(loss_of)(p, b)
    return descended(q, grads), jax.tree.map(lambda w: 0.99 * w, p), loss


def crossed_by_name(p: Any, q: Any, b: Any) -> Any:
    new, old, loss = crossed(p, q, b)
    return {"q": old, "p": new, "loss": loss}


def crossed_arrays(p: Any, q: Any, b: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(b["x"] @ p) - b["y"]) ** 2))(p)
    return q - 0.1 * grads, p - 0.2 * grads, loss


def named_in_another_order(p: Any, q: Any, b: Any) -> Any:
    """Each is an update of itself; without the names it would be an exchange."""
    loss, grads = jax.value_and_grad(loss_of)(p, b)
    return {"q": jax.tree.map(lambda w: 0.99 * w, q), "p": descended(p, grads)}, loss


@pytest.mark.parametrize("named", [False, True], ids=["found", "named"])
@pytest.mark.parametrize("step", [exchanged, averaged, crossed, crossed_by_name, named_in_another_order])
def test_arguments_that_change_places_are_state(step: Any, named: bool) -> None:
    in_order = {"result[0]": "p", "result[1]": "q"}
    want = {
        exchanged: in_order,
        crossed: in_order,
        averaged: {"result[0]": "p", "result[1]": "average"},
        crossed_by_name: {"result['p']": "p", "result['q']": "q"},
        named_in_another_order: {"result[0]['p']": "p", "result[0]['q']": "q"},
    }
    options: Any = {"state_argnums": (0, 1)} if named else {}
    traced = trace(step, (weights(0), weights(2), batch()), {}, **options)
    pairs = {(traced.outputs[o].path, traced.arguments[a].path) for o, a in traced.state}
    assert pairs == {(f"{o}['{k}']", f"{a}['{k}']") for o, a in want[step].items() for k in "ab"}


def test_arguments_rotate_and_others_are_handed_through() -> None:
    traced = trace(passed_on, (*(weights(n) for n in (0, 2, 4, 6)), batch()), {})
    pairs = {(traced.outputs[o].path, traced.arguments[a].path) for o, a in traced.state}
    places = {"result[1][0]": "p", "result[1][1]": "q", "result[1][2]": "r"}
    assert pairs == {(f"{o}['{k}']", f"{a}['{k}']") for o, a in places.items() for k in "ab"}


@pytest.mark.parametrize(
    ("step", "options"), [(exchanged_arrays, {"state_argnums": (0, 1)}), (crossed_arrays, {"state_argnums": (0, 1)}),
                          (crossed_arrays, {})]
)  # fmt: skip
def test_arrays_that_change_places_are_state(step: Any, options: Any) -> None:
    p, q = normal(0, WIDTH, WIDTH), normal(1, WIDTH, WIDTH)
    traced = trace(step, (p, q, batch()), {}, **options)
    pairs = {(traced.outputs[o].path, traced.arguments[a].path) for o, a in traced.state}
    assert pairs == {("result[0]", "p"), ("result[1]", "q")}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("step", [exchanged, crossed, exchanged_arrays])
def test_arguments_that_change_places_are_computed_as_by_jit(step: Any, method: str, caplog: Any) -> None:
    if step is exchanged_arrays and method == "pipeline":
        return  # one product
    make = (lambda n: weights(n)["a"][:, :WIDTH]) if step is exchanged_arrays else weights
    state = want = (make(0), make(2))
    planned = alpa_lite.parallelize(step, **METHODS[method], state_argnums=(0, 1), batch_argnums=2)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            *state, loss = planned(*state, batch())
            *want, expected = jax.jit(step)(*want, batch())
            close((state, loss), (want, expected))
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


def test_what_is_handed_through_or_predicted_is_no_state() -> None:
    def handed(s: Any, b: Any) -> Any:
        return s, loss_of(s, b)

    def gradients(s: Any, b: Any) -> Any:
        return jax.grad(loss_of)(s, b)

    for fun in (handed, gradients):
        assert not trace(fun, (weights(0), batch()), {}).state


# -- steps that contract the batch at once ----------------------------------------------------------------------------


def correlated(w: Any, x: Any, y: Any) -> Any:
    return w - 0.1 * (x.T @ y), jnp.sum(w)


def second_moments(s: Any, b: Any) -> Any:
    moments = b["x"].T @ b["x"] / len(b["x"])
    return {"moments": 0.9 * s["moments"] + 0.1 * moments, "w": s["w"] - s["w"] @ moments}, jnp.trace(moments)


def least_squares(s: Any, b: Any) -> Any:
    gram = b["x"].T @ b["x"] + jnp.eye(WIDTH)
    return {"w": 0.5 * s["w"] + 0.5 * jnp.linalg.solve(gram, b["x"].T @ b["y"])}, jnp.sum(b["y"] ** 2)


def principal(s: Any, b: Any) -> Any:
    values = jnp.linalg.eigvalsh(b["x"].T @ b["x"])
    return {"values": 0.9 * s["values"] + 0.1 * values}, values[-1]


def counted(s: Any, b: Any) -> Any:
    pairs = jax.nn.one_hot(b["i"], WIDTH).T @ jax.nn.one_hot(b["j"], WIDTH)
    return {"pairs": s["pairs"] + pairs}, jnp.log1p(pairs).sum()


CONTRACTED: dict[Callable[..., Any], Callable[[], tuple[Any, ...]]] = {
    correlated: lambda: (normal(0, WIDTH, WIDTH), *batch().values()),
    second_moments: lambda: ({"moments": jnp.eye(WIDTH), "w": normal(1, WIDTH, WIDTH)}, batch()),
    least_squares: lambda: ({"w": normal(1, WIDTH, WIDTH)}, batch()),
    principal: lambda: ({"values": normal(1, WIDTH)}, batch()),
    counted: lambda: ({"pairs": jnp.zeros((WIDTH, WIDTH))}, {"i": jnp.arange(ROWS) % 5, "j": jnp.arange(ROWS) % 7}),
}


@pytest.mark.parametrize(
    ("step", "method"),
    [
        (correlated, "mesh"),
        *[
            pytest.param(step, method, marks=pytest.mark.slow)
            for step in CONTRACTED
            for method in METHODS
            if (step, method) != (correlated, "mesh")
        ],
    ],
)
def test_the_batch_is_contracted_at_once(step: Any, method: str) -> None:
    args = CONTRACTED[step]()
    close(alpa_lite.parallelize(step, **METHODS[method])(*args), jax.jit(step)(*args))


def test_a_loss_that_is_no_sum_is_refused_for_what_it_is() -> None:
    def step(s: Any, b: Any) -> Any:
        def loss(p: Any) -> jax.Array:
            mean = loss_of(p, b)
            return mean / (1 + mean)

        value, grads = jax.value_and_grad(loss)(s)
        return descended(s, grads), value

    parallel = alpa_lite.parallelize(step, **METHODS["mesh"])
    with pytest.raises(alpa_lite.MicrobatchError, match=r"mul at .*single examples together with a sum over all"):
        parallel(weights(0), batch())


# -- data -------------------------------------------------------------------------------------------------------------


def graph_loss(s: Any, nodes: Any, senders: Any, receivers: Any, edges: Any, graph: Any, labels: Any) -> jax.Array:
    messages = jnp.tanh(jnp.concatenate([nodes[senders], edges], -1) @ s["edge"])
    inbox = jax.ops.segment_sum(messages, receivers, len(nodes))
    hidden = jnp.concatenate([nodes, inbox], -1) @ s["node"]
    return jnp.mean((jax.ops.segment_sum(hidden, graph, len(labels)) - labels) ** 2)


def graph_network(s: Any, *data: Any) -> Any:
    loss, grads = jax.value_and_grad(graph_loss)(s, *data)
    return descended(s, grads), loss


def graph_tuple(s: Any, graph: Any, labels: Any) -> Any:
    return graph_network(s, *graph, labels)


def convolved(w: Any, adjacency: Any, x: Any, y: Any) -> Any:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((adjacency @ x @ w - y) ** 2))(w)
    return w - 0.1 * grad, loss


def inside_and_edge(s: Any, inside: Any, edge: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda s: jnp.mean((inside @ s["w"]) ** 2) + jnp.mean((edge @ s["w"] - 1) ** 2))(s)
    return descended(s, grads), loss


def two_players(s: Any, real: Any, noise: Any) -> Any:
    def loss(s: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(real @ s["d"])) - jnp.mean(jnp.tanh(noise @ s["g"] @ s["d"]))

    value, grads = jax.value_and_grad(loss)(s)
    return descended(s, grads), value


def pooled(s: Any, nodes: Any, edges: Any, sizes: Any) -> Any:
    def loss(s: Any) -> jax.Array:
        return jnp.mean((nodes @ s["w"]) ** 2) + jnp.mean(edges) * jnp.mean(sizes)

    value, grads = jax.value_and_grad(loss)(s)
    return descended(s, grads), value


def nearest(w: Any, known: Any, labels: Any, asked: Any) -> Any:
    return labels[jnp.argmax(jnp.tanh(asked @ w) @ jnp.tanh(known @ w).T, 1)]


NODES, EDGES, GRAPHS = 40, 96, 8


def graph_arrays(seed: int) -> tuple[np.ndarray, ...]:
    draw = np.random.default_rng(seed)
    ends = draw.integers(0, NODES, (2, EDGES)).astype(np.int32)
    nodes, edges = draw.normal(size=(NODES, 8)), draw.normal(size=(EDGES, 2))
    return (
        nodes.astype(np.float32), *ends, edges.astype(np.float32),
        np.sort(draw.integers(0, GRAPHS, NODES)).astype(np.int32), draw.normal(size=(GRAPHS, 3)).astype(np.float32),
    )  # fmt: skip


def floats(*shapes: tuple[int, ...]) -> Callable[[int], tuple[np.ndarray, ...]]:
    return lambda seed: tuple(np.random.default_rng(seed).normal(size=s).astype(np.float32) / 4 for s in shapes)


def graph_weights() -> Any:
    return {"edge": normal(0, 10, 6) / 4, "node": normal(1, 14, 3) / 4}


DATA: dict[Callable[..., Any], tuple[Any, Callable[[int], tuple[Any, ...]]]] = {
    graph_network: (graph_weights(), graph_arrays),
    graph_tuple: (graph_weights(), lambda seed: (graph_arrays(seed)[:-1], graph_arrays(seed)[-1])),
    convolved: (normal(0, 8, 4), floats((32, 32), (32, 8), (32, 4))),
    inside_and_edge: ({"w": normal(0, 2, 8)}, floats((64, 2), (16, 2))),
    two_players: ({"d": normal(0, 8, 1), "g": normal(1, 6, 8)}, floats((16, 8), (32, 6))),
    pooled: ({"w": normal(0, 8, 4)}, floats((64, 8), (96, 3), (4,))),
    nearest: (normal(0, 8, 8), lambda seed: (*floats((64, 8))(seed), np.arange(64), *floats((16, 8))(seed + 9))),
}


@pytest.mark.parametrize("fun", DATA, ids=lambda fun: fun.__name__)
def test_what_is_passed_with_each_call_is_data(fun: Any) -> None:
    state, make = DATA[fun]
    traced = trace(fun, (state, *make(0)), {})
    count = len(jax.tree.leaves(state))
    roles = [argument.role for argument in traced.arguments[count:]]
    assert "batch" in roles and set(roles) <= {"batch", "other"}


@pytest.mark.parametrize(
    ("fun", "options"),
    [
        (pooled, {}),
        *[pytest.param(fun, {}, marks=pytest.mark.slow) for fun in DATA if fun is not pooled],
        *[pytest.param(fun, {"method": alpa_lite.DataParallel()}, marks=pytest.mark.slow) for fun in DATA],
        *[pytest.param(fun, METHODS["pipeline"], marks=pytest.mark.slow) for fun in (inside_and_edge, two_players)],
    ],
)
def test_data_that_change_in_every_call_are_read_anew(fun: Any, options: Any, caplog: Any) -> None:
    state, make = DATA[fun]
    step = alpa_lite.parallelize(fun, **options)
    with caplog.at_level(logging.WARNING, logger="alpa_lite"):
        for number in range(3):
            data = make(number)
            close(step(state, *data), jax.jit(fun)(state, *data))
    assert "frozen" not in caplog.text
    assert not any("frozen" in note for note in step.plan(state, *make(0)).notes)
