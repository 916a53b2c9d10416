"""Roles of arguments: state, batch, frozen weights, others; errors of steps that have neither; mutable references."""

from functools import partial
from typing import Any

import jax
import jax.flatten_util
import numpy as np
import optax
import pytest
from flax import nnx

import gallery
from alpa_lite.errors import SignatureError, TracingError
from alpa_lite.ir.graph import Traced, check
from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.tracing.tracing import trace
from gallery import steps
from tests.comparing import assert_equal

X = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(4, 6)
SQUARE = np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4)


def roles(traced: Traced) -> dict[str, str]:
    return {argument.path: argument.role for argument in traced.arguments}


def by_role(traced: Traced, role: str) -> list[str]:
    return [path for path, found in roles(traced).items() if found == role]


def assert_traced(fun, *args, **kwargs):
    """The traced step evaluates to what the step returns, and each state pair has one type."""
    traced = trace(fun, args, kwargs)
    check(traced.graph)
    values, block = traced.graph.values, traced.graph.block
    for output, argument in traced.state:
        before = values[block.inputs[argument]]
        after = traced.graph.block.outputs[output]
        assert isinstance(after, int)
        assert values[after].shape == before.shape and values[after].dtype == before.dtype
    assert [o.role == "state" for o in traced.outputs] == [i in dict(traced.state) for i in range(len(traced.outputs))]
    assert traced.calling is not None
    leaves = jax.tree.leaves(traced.calling.drop_static(args, kwargs))
    found = list(jax.jit(partial(evaluate, traced.graph))(leaves))
    for place, argument in traced.returned_arguments:
        found.insert(place, leaves[argument])
    assert_equal(found, jax.tree.leaves(jax.jit(fun)(*args, **kwargs)))
    return traced


PARAMS = {"w": X.T.copy(), "b": np.zeros(4, np.float32)}
BATCH = {"x": np.ones((8, 6), np.float32), "y": np.zeros((8, 4), np.float32)}


def loss_of(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


sgd = steps.sgd(loss_of)
STATE = ["params['b']", "params['w']"]
DATA = ["batch['x']", "batch['y']"]


def test_state_and_batch():
    traced = assert_traced(sgd, PARAMS, BATCH)
    assert roles(traced) == dict.fromkeys(["state['b']", "state['w']"], "state") | dict.fromkeys(DATA, "batch")
    assert traced.state == ((0, 0), (1, 1))
    assert [o.path for o in traced.outputs] == ["result[0]['b']", "result[0]['w']", "result[1]"]
    wanted = "`batch` was taken as the batch (leading dim 8): the step neither returns nor updates it"
    assert traced.notes[0] == wanted


def with_optimizer(params, opt_state, batch):
    params, loss = sgd(params, batch)
    return params, opt_state, loss


def with_rate(params, rate, batch):
    params, loss = sgd(params, batch)
    return params, loss * rate


def with_counter(params, count, key, batch):
    key, used = jax.random.split(key)
    params, loss = sgd(params, batch)
    return params, count + 1, key, loss + jax.random.uniform(used)


def with_noise(params, batch, key):
    return sgd(params, {"x": batch["x"] + jax.random.normal(key, (8, 6)), "y": batch["y"]})


def with_prediction(params, x):
    return jax.tree.map(lambda p: p - 0.1 * x.sum(), params), x * params["b"].sum()


def with_mask(params, batch):
    return sgd(params, {"x": batch["x"] * batch["mask"], "y": batch["y"]})


def with_base(params, base, batch):
    return sgd(params, {**batch, "x": batch["x"] @ base["w"] @ base["w"].T + base["b"].sum()})


def denoise(params, batch):
    return {"x": batch["x"] @ params["w"] @ params["w"].T, "y": batch["y"] @ (params["w"].T @ params["w"])}


def wrapped(wrap):
    return lambda params, batch: wrap(*sgd(params, batch))


KEYS = {"typed": jax.random.key(0), "raw": jax.random.PRNGKey(0)}
PLACES = {
    "loss first": lambda params, loss: (loss, params),
    "deep": lambda params, loss: {"loss": loss, "new": {"deep": params}},
    "among nothing": lambda params, loss: (None, [loss, (params, None)], {}),
    "alone": lambda params, loss: params,
}
ROLES = {
    **{f"result {name}": (wrapped(wrap), (PARAMS, BATCH), {"state": STATE, "batch": DATA})
       for name, wrap in PLACES.items()},
    **{f"counter and {name} key": (with_counter, (PARAMS, np.int32(0), key, BATCH),
                                   {"state": [*STATE, "count", "key"], "batch": DATA}) for name, key in KEYS.items()},
    **{f"{name} key": (with_noise, (PARAMS, BATCH, key), {"batch": DATA, "other": ["key"]})
       for name, key in KEYS.items()},
    "stateless optimizer": (with_optimizer, (PARAMS, optax.EmptyState(), BATCH), {"state": STATE}),
    "one argument": (
        lambda both: sgd(both["params"], both["batch"]), ({"params": PARAMS, "batch": BATCH},),
        {"state": ["both['params']['b']", "both['params']['w']"],
         "batch": ["both['batch']['x']", "both['batch']['y']"]},
    ),
    "predictions of the batch's shape": (with_prediction, (PARAMS, X), {"batch": ["x"]}),
    "predictions in the batch's structure": (denoise, (PARAMS, BATCH), {"state": [], "batch": DATA}),
    "a bare array": (
        lambda w, x: (w - 0.1 * (x @ w).sum(), (x @ w).sum()), (SQUARE, SQUARE), {"state": ["w"], "batch": ["x"]}
    ),
    "bare arrays": (
        lambda w, b, x, y: (w - (x * y).sum(), b + x.sum(), y.sum()), (X, X[0], SQUARE, SQUARE),
        {"state": ["w", "b"], "batch": ["x", "y"]},
    ),
    "a rate": (with_rate, (PARAMS, 0.1, BATCH), {"other": ["rate"]}),
    "inputs and targets": (
        lambda params, x, y: sgd(params, {"x": x, "y": y}), (PARAMS, BATCH["x"], BATCH["y"]), {"batch": ["x", "y"]}
    ),
    "a leaf without the leading dim": (
        with_mask, (PARAMS, {**BATCH, "mask": np.ones(6, np.float32)}), {"batch": DATA, "other": ["batch['mask']"]}
    ),
    "frozen weights": (with_base, (PARAMS, PARAMS, BATCH), {"frozen": ["base['b']", "base['w']"], "batch": DATA}),
    # Steps without state.
    "prediction": (
        lambda params, x: x @ params["w"] + params["b"], (PARAMS, BATCH["x"]),
        {"state": [], "batch": ["x"], "other": []},
    ),
    "prediction with a scalar": (
        lambda params, x, scale: {"y": (x @ params["w"]) * scale, "norm": scale}, (PARAMS, BATCH["x"], np.float32(2)),
        {"state": [], "batch": ["x"], "other": ["scale"]},
    ),
    "prediction with a key": (
        lambda params, x, key: x + jax.random.normal(key, (8, 6)) @ params["w"] @ params["w"].T,
        (PARAMS, BATCH["x"], KEYS["typed"]), {"state": [], "batch": ["x"], "other": ["key"]},
    ),
    **{f"prediction {name}": (fun, (PARAMS, BATCH["x"], X.T.copy()), {"state": [], "batch": batch, "other": []})
       for name, fun, batch in (
           ("of two batches", lambda params, x, w: x.sum() + w.sum(), ["x", "w"]),
           ("by the product", lambda params, x, w: (x @ w).sum(0), ["x"]),
           ("by the result", lambda params, x, w: x @ w, ["x"]),
       )},
}  # fmt: skip


@pytest.mark.parametrize("name", ROLES)
def test_roles(name):
    fun, args, expected = ROLES[name]
    traced = trace(fun, args, {})
    assert {role: by_role(traced, role) for role in expected} == expected


def test_keyword_arguments_are_named_by_their_parameters_and_variadic_ones_numbered():
    traced = assert_traced(lambda params, *, batch, scale=1.0: sgd(params, batch), PARAMS, batch=BATCH, scale=2.0)
    assert by_role(traced, "batch") == DATA and roles(traced)["scale"] == "other"
    traced = assert_traced(
        lambda params, *data, **more: sgd(params, {"x": data[0], **more}), PARAMS, BATCH["x"], y=BATCH["y"]
    )
    assert by_role(traced, "batch") == ["data[0]", "y"]


def test_static_arguments():
    def step(params, depth, batch, mode="train"):
        for _ in range(depth):
            params, loss = sgd(params, batch)
        return params, loss if mode == "train" else None

    traced = trace(step, (PARAMS, 2, BATCH), {"mode": "train"}, static_argnums=-2, static_argnames="mode")
    assert sorted(roles(traced)) == [*DATA, *STATE]
    calling = traced.calling
    assert calling is not None
    matches = [
        calling.matches((PARAMS, depth, BATCH), kwargs)
        for depth, kwargs in ((2, {"mode": "train"}), (3, {"mode": "train"}), (2, {"mode": "test"}), (2, {}))
    ]
    assert matches == [True, False, False, False]
    for depth, number, name, message in (
        ([2], 1, (), "depth is not hashable"),
        (2, 7, (), "static_argnums names argument 7"),
        (2, (), "depht", "'depht'"),
    ):
        with pytest.raises(SignatureError, match=message):
            trace(step, (PARAMS, depth, BATCH), {}, static_argnums=number, static_argnames=name)


def test_none_leaves_empty_containers_and_leaves_that_change_type():
    def step(state, batch):
        params, loss = sgd(state["params"], batch)
        return {"params": params, "ema": None, "extra": {}, "step": state["step"] + 1.0}, loss

    traced = assert_traced(step, {"params": PARAMS, "ema": None, "extra": {}, "step": np.int32(0)}, BATCH)
    assert roles(traced)["state['step']"] == "other" and len(traced.state) == 2
    assert any("state/step is int32[] but comes back as float32[]" in note for note in traced.notes)


def test_the_batch_by_name():
    def step(params, frozen, batch):
        return sgd(params, {"x": batch["x"] * frozen, "y": batch["y"]})

    args = PARAMS, np.ones(6, np.float32), BATCH
    assert by_role(trace(step, args, {}), "batch") == ["frozen", *DATA]
    options: dict[str, Any]
    for options in ({"batch_argnums": 2}, {"batch_argnums": (-1,)}, {"batch_argnames": "batch"}):
        traced = trace(step, args, {}, **options)
        assert roles(traced)["frozen"] == "frozen" and by_role(traced, "batch") == DATA
    with pytest.raises(SignatureError, match="batch_argnames name bach"):
        trace(step, args, {}, batch_argnames="bach")


def penalised(params, batch):
    return loss_of(params, batch) + 0.1 * sum((p**2).sum() for p in jax.tree.leaves(params))


@pytest.mark.parametrize("fun", [loss_of, penalised])
@pytest.mark.parametrize("bare", [False, True])
def test_gradients_are_not_new_state(fun, bare):
    params = PARAMS["w"] if bare else PARAMS

    def loss(params, batch):
        return fun({"w": params, "b": PARAMS["b"]} if bare else params, batch)

    traced = trace(jax.value_and_grad(loss), (params, BATCH), {})
    assert not traced.state and {p.role for p in traced.arguments[: 1 if bare else 2]} == {"frozen"}
    assert bare or any("result/1 has the structure of params but holds gradients" in n for n in traced.notes)
    assert trace(lambda p, b: jax.tree.map(lambda x, g: x - g, p, jax.grad(loss)(p, b)), (params, BATCH), {}).state


def test_state_is_recognised_in_any_form():
    """Forms that optimizers give it: one flat vector, a loop, a branch, a cast, a write at an index."""
    _, unravel = jax.flatten_util.ravel_pytree(PARAMS)

    def step(params, cache, batch):
        grads = jax.grad(loss_of)(params, batch)
        moved = jax.flatten_util.ravel_pytree(params)[0] - 0.1 * jax.flatten_util.ravel_pytree(grads)[0]
        fine = jax.numpy.isfinite(moved).all()
        moved = jax.lax.cond(fine, lambda: unravel(moved), lambda: params)
        rows = jax.lax.fori_loop(0, 2, lambda i, c: c.at[i].set(batch["x"][i]), cache["rows"])
        return moved, {"rows": rows, "seen": cache["seen"] + 1}

    cache = {"rows": np.zeros((3, 6), np.float32), "seen": np.int32(0)}
    assert len(assert_traced(step, PARAMS, cache, BATCH).state) == 4


def test_state_by_name():
    def step(state, x):
        return {"h": jax.numpy.tanh(x @ state["h"])}

    args = ({"h": SQUARE}, SQUARE)
    assert not trace(step, args, {}).state
    choices: list[dict[str, Any]] = [{"state_argnums": 0}, {"state_argnames": "state"}]
    for options in choices:
        traced = trace(step, args, {}, **options)
        assert by_role(traced, "state") == ["state['h']"] and by_role(traced, "batch") == ["x"]
    assert not trace(sgd, (PARAMS, BATCH), {}, state_argnums=()).state
    with pytest.raises(SignatureError, match="state_argnames name x, but no result has its structure"):
        trace(lambda state, x: step(state, x)["h"].sum(), args, {}, state_argnames="x")


def test_frozen_weights_of_a_step_without_state_are_known_from_other_calls():
    def step(base, batch):
        return batch["x"] @ base["w"].T

    args = ({"w": SQUARE}, {"x": SQUARE})
    assert by_role(trace(step, args, {}), "frozen") == []
    traced = trace(step, args, {}, known={0})
    assert by_role(traced, "frozen") == ["base['w']"] and by_role(traced, "batch") == ["batch['x']"]


def test_everything_comes_back_is_an_error_unless_there_is_no_batch():
    def step(one, two):
        return sgd(one, BATCH)[0], sgd(two, BATCH)[0]

    with pytest.raises(SignatureError, match=r"every argument \(one, two\).*batch_argnums=\(\)"):
        trace(step, (PARAMS, PARAMS), {})
    assert len(trace(step, (PARAMS, PARAMS), {}, batch_argnums=()).state) == 4


def test_an_argument_that_is_not_an_array_is_a_constant_if_it_is_hashable():
    def step(params, batch, mode):
        params, loss = sgd(params, batch)
        return params, loss if mode == "train" else -loss

    for mode in ("train", "test"):
        traced = trace(step, (PARAMS, BATCH, mode), {})
        assert len(traced.graph.block.inputs) == 4
        found = jax.jit(partial(evaluate, traced.graph))(jax.tree.leaves((PARAMS, BATCH)))
        assert_equal(list(found), jax.tree.leaves(step(PARAMS, BATCH, mode)))
    with pytest.raises(SignatureError, match=r"mode is a bytearray, neither an array nor hashable"):
        trace(step, (PARAMS, BATCH, bytearray(b"train")), {})


@pytest.mark.parametrize(
    ("misuse", "what"),
    [
        (lambda x: 1.0 if x.sum() > 0 else 2.0, "truth value"),
        (lambda x: np.sin(x).sum(), "NumPy array"),
        (lambda x: sum(range(x.astype(int).sum())), "Python integer"),
        (lambda x: x[x > 0].sum(), "mask"),
    ],
    ids=["bool", "numpy", "integer", "mask"],
)
def test_values_used_in_python_are_errors_with_the_line(misuse, what):
    def step(params, batch):
        return sgd(params, batch)[0], misuse(batch["x"])

    with pytest.raises(TracingError, match=what) as error:
        trace(step, (PARAMS, BATCH), {})
    line = misuse.__code__.co_firstlineno
    assert f"test_tracing.py:{line} (in <lambda>)" in str(error.value)
    assert "jnp.where or jax.lax.cond" in str(error.value)


def test_a_closed_over_nnx_module_is_constant():
    teacher = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    traced = assert_traced(lambda params, x: sgd(params, {"x": x, "y": teacher(x)}), PARAMS, BATCH["x"])
    assert sorted(np.shape(c) for c in traced.graph.constants) == [(4,), (6, 4)]


OF_REFERENCES = {"new_ref", "empty_ref", "free_ref", "freeze", "get", "swap", "addupdate"}


@pytest.mark.parametrize("name", gallery.find("references", "plain"))
def test_values_take_the_place_of_references(name):
    """Results of control flow are compared here, and of all steps in `tests/test_callbacks.py`."""
    step, args = gallery.get("references", name).make()
    traced = trace(step, args, {})
    check(traced.graph)
    assert OF_REFERENCES.isdisjoint(op.name for op in traced.graph.ops())
    assert not any(op.has_effects for op in traced.graph.ops())
    if name not in ("scanned", "searched", "counted"):
        return
    got = jax.jit(partial(evaluate, traced.graph))(jax.tree.leaves(args))
    for a, b in zip(got, jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


counter = jax.new_ref(jax.numpy.zeros(2))


def test_a_reference_from_outside_is_refused_by_name():
    def step(w, x):
        counter[...] += x.sum()
        return w - x.sum()

    with pytest.raises(TracingError, match=r"reference counter \(float32\[2\]\) at tracing/test_tracing.py:\d+ ") as e:
        trace(step, (jax.numpy.ones(()), jax.numpy.ones(4)), {})
    assert "pass its value, ref[...], as an argument, return the new value" in str(e.value)


def test_a_reference_as_an_argument_is_refused_by_name():
    def step(state, x):
        state["count"][...] += 1
        return {**state, "w": state["w"] - x.sum()}

    with pytest.raises(SignatureError, match=r"state/count is a mutable reference .*; pass its value"):
        trace(step, ({"w": jax.numpy.ones(()), "count": jax.new_ref(0)}, jax.numpy.ones(4)), {})
