"""Train steps that tests of several modules plan, and shapes, clusters and updates for them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh

from alpa_lite.cluster import Cluster
from tests.zoo_base import filled, regression, updated

Step = Callable[..., Any]


def sgd(loss: Callable[[Any, Any], Any], has_aux: bool = False) -> Step:
    """A step of gradient descent, from `(state, batch)` to the new state and the loss."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(state, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    return step


def descent(loss: Callable[[Any, Any], Any]) -> Step:
    """A step as those of the zoo: on `{"params": params}`, with the loss and the gradients as metrics."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return {"params": updated(state["params"], grads)}, {"loss": value, "grads": grads}

    return step


def optimised(loss: Callable[..., Any], tx: optax.GradientTransformation) -> Step:
    """A step from `(params, opt_state, *batch)` to the new ones and the loss, as Optax's guide writes it."""

    def step(params, opt_state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def rows(count: int, width: int) -> dict[str, jax.Array]:
    """A batch of as many features as targets."""
    return regression(width, width, count)


def layers(weights: Any, x: Any) -> Any:
    """A perceptron: products and hyperbolic tangents."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def square_layers(weights: Any, batch: Any) -> Any:
    """The mean square of the results of `layers`."""
    return jnp.mean(layers(weights, batch) ** 2)


def nnx_step(model: Any, optimizer: Any, batch: Any) -> Any:
    """Updates an NNX model and its optimizer in place, towards ones."""
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(batch) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


class Block(linen.Module):
    """A residual block."""

    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(8)(linen.gelu(linen.Dense(16)(x)))


class Net(linen.Module):
    """Two residual blocks."""

    @linen.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"h_{i}")(x)
        return x


def train_state(model: linen.Module, batch: Any, tx: Any = None) -> TrainState:
    """A state of Flax for a linen module, with Adam unless `tx` is given."""
    params = filled(jax.eval_shape(model.init, jax.random.key(0), batch))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx or optax.adam(1e-2))


def linen_step(state: TrainState, batch: Any) -> Any:
    """Updates a `TrainState`, towards ones."""
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn({"params": p}, batch) - 1) ** 2))(state.params)
    return state.apply_gradients(grads=grads), loss


def record_calls(monkeypatch: Any, module: Any, name: str) -> list[Any]:
    """A list that grows by the result of each call of a module's function."""
    made: list[Any] = []
    original = getattr(module, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(module, name, recording)
    return made


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def shapes(tree: Any) -> Any:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def mesh_of(*sizes: int, names: str = "data model", kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of the first devices of this machine, with the first of some axes."""
    axes, devices = tuple(names.split())[: len(sizes)], jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, axes, axis_types=(kind,) * len(sizes), devices=devices)


def local(devices: int) -> Cluster:
    """The first devices of this machine."""
    return Cluster.local(jax.devices()[:devices])
