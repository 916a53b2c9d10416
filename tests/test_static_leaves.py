"""Leaves that are no arrays are constants of the program; methods and callables bind as under `jit`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, struct

import alpa_lite
from alpa_lite import Pipeline, SignatureError, Zero
from gallery.batches import normal, random_arrays
from gallery.steps import sgd as descent
from gallery.steps import updated
from tests.comparing import assert_close
from tests.marks import slow

eqx = pytest.importorskip("equinox")
X, Y = jnp.linspace(-1, 1, 64 * 16).reshape(64, 16), jnp.linspace(-1, 1, 64)
KEY = jax.random.key(0)
W = normal(0, 16, 16) / 4
TX = optax.adam(1e-2)


def mlp(key: Any) -> Any:
    return eqx.nn.MLP(16, "scalar", 32, 2, activation=jax.nn.gelu, key=key)


def dropped(key: Any) -> Any:
    """A dropout whose rate and whose switch are leaves, and read in Python."""
    return eqx.nn.Sequential([eqx.nn.Linear(16, 32, key=key), eqx.nn.Dropout(0.5, inference=True),
                              eqx.nn.Lambda(jax.nn.relu), eqx.nn.Linear(32, "scalar", key=key)])  # fmt: skip


def eqx_step(net, opt_state, x, y):
    loss, grads = eqx.filter_value_and_grad(lambda net: jnp.mean((jax.vmap(net)(x) - y) ** 2))(net)
    updates, opt_state = TX.update(grads, opt_state, eqx.filter(net, eqx.is_inexact_array))
    return eqx.apply_updates(net, updates), opt_state, loss


PIPELINE = {"method": Pipeline(num_stages=2), "num_microbatches": 2}


@pytest.mark.parametrize("options", [{}, slow({"method": Zero(3)}), slow(PIPELINE)])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("make", [dropped, slow(mlp)])
def test_modules_of_equinox(make, filtered, options):
    net = make(KEY)
    state = TX.init(eqx.filter(net, eqx.is_inexact_array))
    jitted = eqx.filter_jit(eqx_step)
    step = alpa_lite.parallelize(jitted if filtered else eqx_step, **options)
    ours, theirs = step(net, state, X, Y), jitted(net, state, X, Y)
    assert_close(ours, theirs)
    assert_close(step(*ours[:2], X, Y), jitted(*theirs[:2], X, Y))
    assert len(step.plans) == 1


PAIR = {"a": W, "b": W.T}


def layers(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w["a"]) @ w["b"]


@struct.dataclass
class Batch:
    x: Any
    kind: str
    weigh: Callable[[Any], Any]


def textual(w, batch):
    new, loss = descent(lambda w, batch: batch.weigh(layers(w, batch.x)).mean() * len(batch.kind))(w, batch)
    return new, {"loss": loss, "kind": batch.kind, "by": batch.weigh, "none": None}


def optimised(params, opt_state, tx, x):
    """An Optax optimizer is a tuple of functions, passed like any argument."""
    loss, grads = jax.value_and_grad(lambda w: (layers(w, x) ** 2).mean())(params)
    updates, opt_state = tx.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@dataclass(frozen=True)
class Config:
    rate: float = 0.1
    act: Any = field(default=jnp.tanh)


def configured(w, config, dtype, x):
    loss, grads = jax.value_and_grad(lambda w: (config["c"].act(layers(w, x).astype(dtype)) ** 2).mean())(w)
    return updated(w, grads, config["c"].rate), loss


class Dense(nn.Module):
    act: Any = jnp.sin

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16)(self.act(nn.Dense(16)(x)))


def applied(params, model, x):
    """A linen module as an argument is an object without leaves."""
    return descent(lambda params, x: (model.apply(params, x) ** 2).mean())(params, x)


OTHERS = {
    "texts and functions in a batch": (textual, lambda: (PAIR, Batch(X, "word", jnp.square))),
    "an optimizer": (optimised, lambda: (PAIR, TX.init(PAIR), TX, X)),
    "a configuration and a dtype": (configured, lambda: (PAIR, {"c": Config()}, jnp.float32, X)),
    "a module of linen": (applied, lambda: (random_arrays(jax.eval_shape(Dense().init, KEY, X)), Dense(), X)),
}


@pytest.mark.parametrize("options", [{}, slow(PIPELINE)])
@pytest.mark.parametrize("name", OTHERS)
def test_leaves_that_are_no_arrays(name, options):
    fun, make = OTHERS[name]
    args = make()
    step = alpa_lite.parallelize(fun, **options)
    ours, theirs = step(*args), eqx.filter_jit(fun)(*args)
    assert_close(ours, theirs)
    step(ours[0], *(args[1:] if name != "an optimizer" else (ours[1], *args[2:])))
    assert len(step.plans) == 1


def nnx_step(model, optimizer, turn, x):
    loss, grads = nnx.value_and_grad(lambda model: turn(model(x)).mean())(model)
    optimizer.update(model, grads)
    return loss, {"by": turn}


def test_constants_beside_modules_of_nnx():
    def make():
        model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    (ours, own), (theirs, their) = make(), make()
    step = alpa_lite.parallelize(nnx_step)
    plain = nnx.jit(lambda model, optimizer, x: nnx_step(model, optimizer, jnp.square, x)[0])
    for _ in range(2):
        loss, rest = step(ours, own, jnp.square, X)
        np.testing.assert_allclose(loss, plain(theirs, their, X), rtol=1e-5)
    assert rest["by"] is jnp.square and len(step.plans) == 1
    np.testing.assert_allclose(ours.kernel[...], theirs.kernel[...], rtol=1e-5)


def test_another_constant_is_another_program():
    step = alpa_lite.parallelize(textual)
    for kind in ("a", "abc", "a"):
        batch = Batch(X, kind, jnp.square)
        assert_close(step(PAIR, batch), eqx.filter_jit(textual)(PAIR, batch))
    assert len(step.plans) == 2


@pytest.mark.parametrize(
    ("leaf", "what"), [({1, 2}, "set, neither an array nor hashable"), (np.array(["a"]), "array of <U1, which JAX")]
)
def test_leaves_that_can_be_neither_are_refused_by_name(leaf, what):
    with pytest.raises(SignatureError, match=rf"^x/it is an? {what}") as error:
        alpa_lite.parallelize(lambda w, x: (w - x["x"].mean(), w.sum())).plan(W, {"x": X, "it": leaf})
    assert len(str(error.value)) < 300


def test_state_is_initialised_with_its_functions():
    def create(key):
        net = mlp(key)
        return net, TX.init(eqx.filter(net, eqx.is_inexact_array))

    step = alpa_lite.parallelize(eqx_step)
    net, state = step.init(create, KEY, rest=(X, Y))
    assert net.activation is jax.nn.gelu
    want = create(KEY)
    assert_close((net, state), want)
    assert_close(step(*step.place(net, state, X, Y)), eqx.filter_jit(eqx_step)(*want, X, Y))


# -- methods and callables --------------------------------------------------------------------------------------------


def sgd(w, x, scale=1.0):
    return descent(lambda w, x: ((x @ w) ** 2).mean() * scale)(w, x)


@jax.tree_util.register_dataclass
@dataclass
class Trainer:
    w: jax.Array

    @alpa_lite.parallelize
    def update(self, x):
        w, loss = sgd(self.w, x)
        return Trainer(w), loss


class Module(eqx.Module):
    w: jax.Array
    act: Any = jnp.tanh

    @alpa_lite.parallelize
    def update(self, x):
        w, loss = sgd(self.w, self.act(x))
        return Module(w, self.act), loss


class Agent:
    scale = 2.0

    @functools.partial(alpa_lite.parallelize, static_argnums=0)
    def update(self, w, x):
        return sgd(w, x, self.scale)

    @alpa_lite.parallelize(static_argnames="self")
    def named(self, w, x):
        return sgd(w, x, self.scale)

    @staticmethod
    @alpa_lite.parallelize
    def static(w, x):
        return sgd(w, x)

    @classmethod
    @functools.partial(alpa_lite.parallelize, static_argnums=0)
    def of_class(cls, w, x):
        return sgd(w, x, cls.scale)

    def __call__(self, w, x):
        return sgd(w, x, self.scale)

    plan = "an attribute of its own, which is no plan"


BOUND = {
    "a dataclass": (lambda: Trainer(W).update, lambda: (X,), 1.0),
    "a module of Equinox": (lambda: Module(W).update, lambda: (jnp.arctanh(X * 0.9),), None),
    "self is static": (lambda: Agent().update, lambda: (W, X), 2.0),
    "self is static by name": (lambda: Agent().named, lambda: (W, X), 2.0),
    "a static method": (lambda: Agent().static, lambda: (W, X), 1.0),
    "a class method": (lambda: Agent.of_class, lambda: (W, X), 2.0),
    "unbound": (lambda: functools.partial(Trainer.update, Trainer(W)), lambda: (X,), 1.0),
    "a partial": (lambda: alpa_lite.parallelize(functools.partial(sgd, scale=2.0)), lambda: (W, X), 2.0),
    "a callable": (lambda: alpa_lite.parallelize(Agent()), lambda: (W, X), 2.0),
    "a bound method": (lambda: alpa_lite.parallelize(Agent().__call__), lambda: (W, X), 2.0),
    "a jitted function": (lambda: alpa_lite.parallelize(jax.jit(sgd)), lambda: (W, X), 1.0),
}


@pytest.mark.parametrize("name", BOUND)
def test_methods_and_callables(name):
    make, args, scale = BOUND[name]
    given = args()
    x = jnp.tanh(given[-1]) if scale is None else X
    assert np.allclose(make()(*given)[1], sgd(W, x, scale or 1.0)[1], rtol=1e-5)


def test_a_bound_step_has_the_attributes_of_the_step():
    trainer, agent = Trainer(W), Agent()
    assert trainer.update.plan(X).num_devices == 8 and agent.update.plan(W, X).num_devices == 8
    assert trainer.update.__name__ == "update" and trainer.update.__self__ is trainer
    assert agent.update == agent.update != Agent().update
    placed = agent.update.place(W, X)
    assert len(placed) == 2 and np.allclose(agent.update(*placed)[1], sgd(W, X, 2.0)[1])
    assert agent.update.place(X).shape == X.shape
    assert "bound to a Agent" in repr(agent.update)


def test_a_callable_keeps_its_own_attributes():
    assert callable(alpa_lite.parallelize(Agent()).plan) and alpa_lite.parallelize(Agent()).__name__ == "Agent"
