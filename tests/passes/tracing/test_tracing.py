"""Which arguments are state and batch, and the errors of those who write neither."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.flatten_util
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from alpa_lite.errors import SignatureError, TracingError
from alpa_lite.graph import Traced, check
from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.tracing.tracing import trace
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
    leaves = jax.tree.leaves(traced.calling.traced(args, kwargs))
    found = list(jax.jit(partial(evaluate, traced.graph))(leaves))
    for place, argument in traced.through:
        found.insert(place, leaves[argument])
    assert_equal(found, jax.tree.leaves(jax.jit(fun)(*args, **kwargs)))
    return traced


PARAMS = {"w": X.T.copy(), "b": np.zeros(4, np.float32)}
BATCH = {"x": np.ones((8, 6), np.float32), "y": np.zeros((8, 4), np.float32)}
OPTIMIZER = optax.adam(1e-2)


def loss_of(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


def sgd(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def adam(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def test_state_and_batch():
    traced = assert_traced(sgd, PARAMS, BATCH)
    assert roles(traced) == {
        "params['b']": "state",
        "params['w']": "state",
        "batch['x']": "batch",
        "batch['y']": "batch",
    }
    assert traced.state == ((0, 0), (1, 1))
    assert [o.path for o in traced.outputs] == ["result[0]['b']", "result[0]['w']", "result[1]"]
    wanted = "`batch` was taken as the batch (leading dim 8): the step neither returns nor updates it"
    assert traced.notes[0] == wanted


def test_params_optimizer_state_and_batch():
    traced = assert_traced(adam, PARAMS, OPTIMIZER.init(PARAMS), BATCH)
    assert by_role(traced, "batch") == ["batch['x']", "batch['y']"]
    assert by_role(traced, "other") == []
    assert "opt_state[0].mu['w']" in by_role(traced, "state")


def test_a_stateless_optimizer_does_not_confuse():
    def step(params, opt_state, batch):
        params, loss = sgd(params, batch)
        return params, opt_state, loss

    traced = assert_traced(step, PARAMS, optax.EmptyState(), BATCH)
    assert by_role(traced, "state") == ["params['b']", "params['w']"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda params, loss: (loss, params),
        lambda params, loss: {"loss": loss, "new": {"deep": params}},
        lambda params, loss: (None, [loss, (params, None)], {}),
    ],
)
def test_state_is_found_anywhere_in_the_result(wrap):
    traced = assert_traced(lambda params, batch: wrap(*sgd(params, batch)), PARAMS, BATCH)
    assert by_role(traced, "state") == ["params['b']", "params['w']"]


def test_state_alone_is_returned():
    traced = assert_traced(lambda params, batch: sgd(params, batch)[0], PARAMS, BATCH)
    assert len(traced.state) == 2 and by_role(traced, "batch") == ["batch['x']", "batch['y']"]


def test_state_and_batch_in_one_argument():
    def step(everything):
        params, loss = sgd(everything["params"], everything["batch"])
        return params, loss

    traced = assert_traced(step, {"params": PARAMS, "batch": BATCH})
    assert by_role(traced, "state") == ["everything['params']['b']", "everything['params']['w']"]
    assert by_role(traced, "batch") == ["everything['batch']['x']", "everything['batch']['y']"]


def test_train_state_with_its_static_fields():
    module = linen.Dense(4)
    state = TrainState.create(apply_fn=module.apply, params=module.init(jax.random.key(0), BATCH["x"]), tx=OPTIMIZER)

    def step(state, batch):
        def loss(params):
            return ((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    traced = assert_traced(step, state, BATCH)
    assert "state.params['params']['kernel']" in by_role(traced, "state")
    assert set(by_role(traced, "state")) == {p for p in roles(traced) if p.startswith("state")}


def test_predictions_of_the_batch_shape_are_not_state():
    def step(params, x):
        return jax.tree.map(lambda p: p - 0.1 * x.sum(), params), x * params["b"].sum()

    traced = assert_traced(step, PARAMS, X)
    assert roles(traced)["x"] == "batch"


def test_bare_arrays_can_be_state():
    traced = assert_traced(lambda w, x: (w - 0.1 * (x @ w).sum(), (x @ w).sum()), SQUARE, SQUARE)
    assert roles(traced) == {"w": "state", "x": "batch"}
    traced = assert_traced(lambda w, b, x, y: (w - (x * y).sum(), b + x.sum(), y.sum()), X, X[0], SQUARE, SQUARE)
    assert roles(traced) == {"w": "state", "b": "state", "x": "batch", "y": "batch"}


def test_a_loss_is_not_the_new_value_of_a_scalar_setting():
    def step(params, rate, batch):
        params, loss = sgd(params, batch)
        return params, loss * rate

    assert roles(assert_traced(step, PARAMS, 0.1, BATCH))["rate"] == "other"


def test_counters_and_keys_that_come_back_are_state():
    def step(params, count, key, batch):
        key, used = jax.random.split(key)
        params, loss = sgd(params, batch)
        return params, count + 1, key, loss + jax.random.uniform(used)

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        found = roles(assert_traced(step, PARAMS, np.int32(0), key, BATCH))
        assert found["count"] == found["key"] == "state"


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_state_batch_and_key(key):
    def step(params, batch, key):
        return sgd(params, {"x": batch["x"] + jax.random.normal(key, (8, 6)), "y": batch["y"]})

    traced = assert_traced(step, PARAMS, BATCH, key)
    assert by_role(traced, "other") == ["key"] and by_role(traced, "batch") == ["batch['x']", "batch['y']"]


def test_several_arguments_with_one_leading_dim_are_all_batch():
    traced = assert_traced(lambda params, x, y: sgd(params, {"x": x, "y": y}), PARAMS, BATCH["x"], BATCH["y"])
    assert by_role(traced, "batch") == ["x", "y"]


def test_keyword_arguments_are_named_by_their_parameters():
    traced = assert_traced(lambda params, *, batch, scale=1.0: sgd(params, batch), PARAMS, batch=BATCH, scale=2.0)
    assert by_role(traced, "batch") == ["batch['x']", "batch['y']"] and roles(traced)["scale"] == "other"


def test_variadic_arguments_are_numbered():
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
    assert sorted(roles(traced)) == ["batch['x']", "batch['y']", "params['b']", "params['w']"]
    calling = traced.calling
    assert calling is not None
    assert calling.matches((PARAMS, 2, BATCH), {"mode": "train"})
    assert not calling.matches((PARAMS, 3, BATCH), {"mode": "train"})
    assert not calling.matches((PARAMS, 2, BATCH), {"mode": "test"})
    assert not calling.matches((PARAMS, 2, BATCH), {})
    with pytest.raises(SignatureError, match="depth is not hashable"):
        trace(step, (PARAMS, [2], BATCH), {}, static_argnums=1)
    with pytest.raises(SignatureError, match="static_argnums names argument 7"):
        trace(step, (PARAMS, 2, BATCH), {}, static_argnums=7)
    with pytest.raises(SignatureError, match="'depht'"):
        trace(step, (PARAMS, 2, BATCH), {}, static_argnames="depht")


def test_abstract_arguments_trace_alike():
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, BATCH))
    one, two = trace(sgd, abstract, {}), trace(sgd, (PARAMS, BATCH), {})
    assert [op.key for op in one.graph.ops()] == [op.key for op in two.graph.ops()]
    assert one.arguments == two.arguments


def test_none_leaves_and_empty_containers():
    def step(state, batch):
        params, loss = sgd(state["params"], batch)
        return {"params": params, "ema": None, "extra": {}}, loss

    assert_traced(step, {"params": PARAMS, "ema": None, "extra": {}}, BATCH)


def test_a_leaf_that_changes_type_is_no_state_and_a_note_says_so():
    def step(state, batch):
        params, loss = sgd(state["params"], batch)
        return {"params": params, "step": state["step"] + 1.0}, loss

    traced = assert_traced(step, {"params": PARAMS, "step": np.int32(0)}, BATCH)
    assert roles(traced)["state['step']"] == "other"
    assert any("state/step is int32[] but comes back as float32[]" in note for note in traced.notes)


def test_the_batch_can_be_named():
    def step(params, frozen, batch):
        return sgd(params, {"x": batch["x"] * frozen, "y": batch["y"]})

    frozen = np.ones(6, np.float32)
    assert by_role(trace(step, (PARAMS, frozen, BATCH), {}), "batch") == ["frozen", "batch['x']", "batch['y']"]
    options: dict[str, Any]
    for options in ({"batch_argnums": 2}, {"batch_argnums": (-1,)}, {"batch_argnames": "batch"}):
        traced = trace(step, (PARAMS, frozen, BATCH), {}, **options)
        assert roles(traced)["frozen"] == "frozen" and by_role(traced, "batch") == ["batch['x']", "batch['y']"]
    with pytest.raises(SignatureError, match="batch_argnames name bach"):
        trace(step, (PARAMS, frozen, BATCH), {}, batch_argnames="bach")


def test_leaves_of_the_batch_without_its_leading_dim_are_other():
    def step(params, batch):
        return sgd(params, {"x": batch["x"] * batch["mask"], "y": batch["y"]})

    traced = assert_traced(step, PARAMS, {**BATCH, "mask": np.ones(6, np.float32)})
    assert roles(traced)["batch['mask']"] == "other" and len(by_role(traced, "batch")) == 2


def test_a_step_without_state_reads_frozen_weights():
    traced = assert_traced(loss_of, PARAMS, BATCH)
    assert by_role(traced, "frozen") == ["params['b']", "params['w']"] and not traced.state
    assert by_role(traced, "batch") == ["batch['x']", "batch['y']"]
    assert "`batch` was taken as the batch (leading dim 8)" in traced.notes[0]


@pytest.mark.parametrize(
    ("fun", "batch"),
    [
        (lambda params, x: x @ params["w"] + params["b"], ["x"]),
        (lambda params, x, scale: {"y": (x @ params["w"]) * scale, "norm": scale}, ["x"]),
        (lambda params, x, w: x.sum() + w.sum(), ["x", "w"]),
        (lambda params, x, w: (x @ w).sum(0), ["x"]),
        (lambda params, x, w: x @ w, ["x"]),
        (lambda params, x, key: x + jax.random.normal(key, (8, 6)) @ params["w"] @ params["w"].T, ["x"]),
    ],
    ids=["prediction", "scalar", "two batches", "by the product", "by the result", "key"],
)
def test_the_batch_of_a_step_without_state(fun, batch):
    more = {"scale": np.float32(2), "w": X.T.copy(), "key": jax.random.key(0)}
    names = fun.__code__.co_varnames[2 : fun.__code__.co_argcount]
    traced = assert_traced(fun, PARAMS, BATCH["x"], *(more[name] for name in names))
    assert not traced.state and by_role(traced, "batch") == batch
    assert set(by_role(traced, "other")) == {"scale", "key"} & set(names)


def penalised(params, batch):
    return loss_of(params, batch) + 0.1 * sum((p**2).sum() for p in jax.tree.leaves(params))


@pytest.mark.parametrize("fun", [loss_of, penalised])
@pytest.mark.parametrize("bare", [False, True])
def test_gradients_are_not_new_state(fun, bare):
    params = PARAMS["w"] if bare else PARAMS
    rest = {"b": PARAMS["b"]}

    def loss(params, batch):
        return fun({"w": params, **rest} if bare else params, batch)

    traced = assert_traced(jax.value_and_grad(loss), params, BATCH)
    assert not traced.state and {p.role for p in traced.arguments[: 1 if bare else 2]} == {"frozen"}
    assert bare or any("result/1 has the structure of params but holds gradients" in n for n in traced.notes)
    assert assert_traced(lambda p, b: jax.tree.map(lambda x, g: x - g, p, jax.grad(loss)(p, b)), params, BATCH).state


def test_predictions_in_the_batchs_structure_are_not_state():
    def denoise(params, batch):
        return {"x": batch["x"] @ params["w"] @ params["w"].T, "y": batch["y"] @ (params["w"].T @ params["w"])}

    traced = assert_traced(denoise, PARAMS, BATCH)
    assert not traced.state and by_role(traced, "batch") == ["batch['x']", "batch['y']"]


def test_averages_and_parameters_in_either_order():
    def step(params, average, batch):
        params, loss = sgd(params, batch)
        return jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params), params, loss

    traced = assert_traced(step, PARAMS, PARAMS, BATCH)
    assert dict(traced.state) == {0: 2, 1: 3, 2: 0, 3: 1}


def test_state_is_recognised_in_any_form():
    """What optimizers do to it: one flat vector, a loop, a branch, a cast, a write at an index."""
    _, unravel = jax.flatten_util.ravel_pytree(PARAMS)

    def step(params, cache, batch):
        grads = jax.grad(loss_of)(params, batch)
        moved = jax.flatten_util.ravel_pytree(params)[0] - 0.1 * jax.flatten_util.ravel_pytree(grads)[0]
        fine = jax.numpy.isfinite(moved).all()
        moved = jax.lax.cond(fine, lambda: unravel(moved), lambda: params)
        rows = jax.lax.fori_loop(0, 2, lambda i, c: c.at[i].set(batch["x"][i]), cache["rows"])
        return moved, {"rows": rows, "seen": cache["seen"] + 1}

    cache = {"rows": np.zeros((3, 6), np.float32), "seen": np.int32(0)}
    traced = assert_traced(step, PARAMS, cache, BATCH)
    assert len(traced.state) == 4


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


def test_a_tree_of_frozen_weights_is_not_the_batch():
    def step(params, base, batch):
        return sgd(params, {**batch, "x": batch["x"] @ base["w"] @ base["w"].T + base["b"].sum()})

    traced = assert_traced(step, PARAMS, PARAMS, BATCH)
    assert by_role(traced, "frozen") == ["base['b']", "base['w']"]
    assert by_role(traced, "batch") == ["batch['x']", "batch['y']"]
    square = {"w": SQUARE}
    args = (square, {"x": SQUARE})
    assert by_role(trace(lambda base, batch: batch["x"] @ base["w"].T, args, {}), "frozen") == []
    traced = trace(lambda base, batch: batch["x"] @ base["w"].T, args, {}, known={0})
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

    for mode, sign in (("train", 1), ("test", -1)):
        traced = trace(step, (PARAMS, BATCH, mode), {})
        assert len(traced.graph.block.inputs) == 4
        found = jax.jit(partial(evaluate, traced.graph))(jax.tree.leaves((PARAMS, BATCH)))
        params, loss = sgd(PARAMS, BATCH)
        assert_equal(list(found), [*jax.tree.leaves(params), sign * loss])
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


def test_flax_is_imported_only_for_nnx_arguments():
    import subprocess
    import sys

    code = (
        "import sys, numpy as np; from alpa_lite.passes.tracing.tracing import trace;"
        "t = trace(lambda s, b: ({'w': s['w'] + b.sum()}, 1.0), ({'w': np.ones(2)}, np.ones(3)), {});"
        "assert len(t.state) == 1; assert not any(m.split('.')[0] == 'flax' for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=280)


def test_warnings_are_not_raised_by_tracing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(adam, (PARAMS, OPTIMIZER.init(PARAMS), BATCH), {})
