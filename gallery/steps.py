"""What train steps of the gallery share: losses, and updates in the ways of users."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from gallery.batches import f32, initial, one_example, random_arrays, random_key, shape
from gallery.registry import Built

Step = Callable[..., Any]
CLIPPED = optax.clip_by_global_norm(1.0)


def module(forward: Callable[..., Any]) -> Any:
    """The class of linen modules that a function of a module and its inputs describes.

    Its keyword-only arguments are the fields of the class, in order.
    """
    fields = [p for p in inspect.signature(forward).parameters.values() if p.kind is p.KEYWORD_ONLY]

    @nn.compact
    @functools.wraps(forward)
    def call(self: Any, *inputs: Any) -> Any:
        return forward(self, *inputs, **{field.name: getattr(self, field.name) for field in fields})

    names = {"__call__": call, "__doc__": forward.__doc__, "__module__": forward.__module__}
    names |= {"__annotations__": dict.fromkeys([field.name for field in fields], Any)}
    names |= {field.name: field.default for field in fields if field.default is not field.empty}
    return type(forward.__name__, (nn.Module,), names)


# -- gradient descent ------------------------------------------------------------------------------------------------


def updated(params: Any, grads: Any, rate: float = 0.1) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def sgd(loss: Callable[[Any, Any], Any], has_aux: bool = False) -> Step:
    """A step of gradient descent, from `(state, batch)` to the new state and the loss."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(state, batch)
        return updated(state, grads), value

    return step


def descent(loss: Callable[[Any, Any], Any]) -> Step:
    """A step as those of the zoo: on `{"params": params}`, with the loss and the gradients as metrics."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        return {"params": updated(state["params"], grads)}, {"loss": value, "grads": grads}

    return step


def optimizer_step(loss: Callable[..., Any], tx: optax.GradientTransformation | optax.MultiSteps) -> Step:
    """A step from `(params, opt_state, *batch)` to the new ones and the loss, as Optax's guide writes it."""

    def step(params, opt_state, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    return step


def by_momentum(loss: Callable[[Any, Any], Any]) -> Step:
    """A step of descent with momentum, from `({"params", "mu"}, batch)` to the new state and the loss."""

    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        mu = jax.tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
        return {"params": updated(state["params"], mu), "mu": mu}, value

    return step


# -- small models ----------------------------------------------------------------------------------------------------


def layers(weights: Any, x: Any) -> Any:
    """A perceptron: products and hyperbolic tangents."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def square_layers(weights: Any, batch: Any) -> Any:
    """The mean square of the results of `layers`."""
    return jnp.mean(layers(weights, batch) ** 2)


def distance(weights: Any, batch: Any) -> Any:
    """The mean square of what `layers` make of `batch["x"]`, less `batch["y"]`."""
    return jnp.mean((layers(weights, batch["x"]) - batch["y"]) ** 2)


def residual_layers(weights: Any, x: Any) -> Any:
    """Products `up` and `down` around a GELU, added to what they are of."""
    for w in weights:
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
    return x


def mlp(width: int, batch: int, layers: int) -> Built:
    """A step of gradient descent on square layers, and shapes of its arguments."""
    return sgd(square_layers), ([f32(width, width) for _ in range(layers)], f32(batch, width))


def in_place(loss: Callable[[Any, Any], Any]) -> Step:
    """A step that updates an NNX model and its optimizer in place."""

    def step(model, optimizer, batch):
        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        return value

    return step


@in_place
def nnx_step(model: Any, batch: Any) -> Any:
    """How far a model's results are from ones."""
    return jnp.mean((model(batch) - 1) ** 2)


class Block(nn.Module):
    """A residual block."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(x)))


class Net(nn.Module):
    """Two residual blocks."""

    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = Block(name=f"h_{i}")(x)
        return x


def train_state(model: nn.Module, batch: Any, tx: Any = None) -> TrainState:
    """A state of Flax for a linen module, with Adam unless `tx` is given."""
    params = random_arrays(initial(model, batch))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx or optax.adam(1e-2))


def linen_step(state: TrainState, batch: Any) -> Any:
    """Updates a `TrainState`, towards ones."""
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn({"params": p}, batch) - 1) ** 2))(state.params)
    return state.apply_gradients(grads=grads), loss


# -- users' ways -----------------------------------------------------------------------------------------------------


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean negative log-likelihood, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def weighted_cross_entropy(logits: Any, labels: Any, weights: Any) -> Any:
    """Mean cross entropy of the tokens that count."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels) * weights
    return losses.sum() / weights.sum()


def adam_step(loss: Callable[..., Any], params: Any, *batch: Any, rng: bool = False) -> Built:
    """A step of Adam in a `TrainState`: `loss(params, *batch)`, with a key as the last argument if `rng`."""

    def step(state: Any, *given: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state.params, *given)
        return state.apply_gradients(grads=grads), value

    state = jax.eval_shape(lambda p: TrainState.create(apply_fn=loss, params=p, tx=optax.adamw(1e-4)), params)
    return step, (state, *batch, *((random_key(),) if rng else ()))


def fitting_step(
    model: Any, loss: Callable[..., Any], *batch: Any, init: Sequence[Any] = (), optimizer: Any = None, **more: Any
) -> Built:
    """A step of `loss(apply, *batch)`, where `apply` is a model at its parameters.

    With Adam in a `TrainState`, or with an optimizer and `habits`.

    Args:
      init: shapes of the model's inputs; by default of the first array of the batch, with one example.
    """

    def value(params: Any, *given: Any) -> Any:
        return loss(functools.partial(model.apply, params), *given)

    params = initial(model, *(init or one_example(*batch[:1])))
    return adam_step(value, params, *batch) if optimizer is None else habits(value, params, optimizer, *batch, **more)


def supervised_step(model: Any, *batch: Any, loss: Callable[..., Any] = cross_entropy, **more: Any) -> Built:
    """A step of `loss` between what a model makes of all arrays of the batch but the last one, and that."""

    def value(apply: Callable[..., Any], *given: Any) -> Any:
        return loss(apply(*given[:-1]), given[-1])

    return fitting_step(model, value, *batch, init=one_example(*batch[:-1]), **more)


def language(model: Any, batch: int, length: int, optimizer: Any = None) -> Built:
    """Next-token prediction."""
    return fitting_step(
        model,
        lambda apply, ids: cross_entropy(apply(ids)[:, :-1], ids[:, 1:]),
        shape(batch, length),
        optimizer=optimizer,
    )


def advantages(rewards: Any, values: Any, last: Any, done: Any, *, unroll: int = 1) -> Any:
    """How much better than expected things went, [time, games], of rewards, values, ends, and the values after them."""

    def back(carry: Any, given: Any) -> Any:
        advantage, following = carry
        reward, value, end = given
        surprise = reward + 0.99 * following * (1 - end) - value
        advantage = surprise + 0.99 * 0.95 * (1 - end) * advantage
        return (advantage, value), advantage

    start = jnp.zeros_like(last), last
    return jax.lax.scan(back, start, (rewards, values, done), reverse=True, unroll=unroll)[1]


def initial_state(params: Any, optimizer: Any) -> dict[str, Any]:
    """The shapes of parameters and of what an optimizer remembers of them."""
    return {"params": params, "memory": jax.eval_shape(optimizer.init, params)}


def apply_optimizer(loss: Callable[..., Any], state: Any, optimizer: Any) -> tuple[Any, Any]:
    """Parameters and memory after a step, and the value of the loss."""
    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, memory = optimizer.update(grads, state["memory"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "memory": memory}, value


def habits(
    loss: Callable[..., Any], params: Any, optimizer: Any, *batch: Any, rng: bool = False, scaled: bool = False,
    average: float | None = None,
) -> Built:  # fmt: skip
    """A step of `loss(params, *batch)` on a dict of state.

    Args:
      rng: whether the last argument of the loss is a key.
      scaled: whether the loss is scaled, and steps without finite gradients are left out.
      average: the decay of an average of the weights.
    """

    def step(state: Any, *given: Any) -> Any:
        scale = state.get("scale", 1.0)
        value, grads = jax.value_and_grad(lambda params: loss(params, *given) * scale)(state["params"])
        grads = jax.tree.map(lambda g: g / scale, grads)
        updates, memory = optimizer.update(grads, state["memory"], state["params"])
        after = {**state, "params": optax.apply_updates(state["params"], updates), "memory": memory}
        if scaled:
            finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
            after = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, state)
            after["scale"] = jnp.where(finite, scale, scale / 2)
        if average is not None:
            after["average"] = optax.incremental_update(after["params"], state["average"], 1 - average)
        return after, {"loss": value / scale, "norm": optax.global_norm(grads)}

    state = initial_state(params, optimizer)
    state |= {"scale": f32()} if scaled else {}
    state |= {"average": params} if average is not None else {}
    return step, (state, *batch, *((random_key(),) if rng else ()))


def statistical_step(apply: Callable[..., Any], variables: Any, optimizer: Any, *batch: Any) -> Built:
    """A step of a net with batch statistics: `apply(variables, pictures)` to logits and updated variables.

    The batch is pictures and labels.
    """

    def step(state: Any, pictures: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, updated = apply({"params": params, "batch_stats": state["statistics"]}, pictures)
            return cross_entropy(logits, labels), updated["batch_stats"]

        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, memory = optimizer.update(gradients, state["memory"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "memory": memory, "statistics": statistics}, value

    return step, (initial_state(variables["params"], optimizer) | {"statistics": variables["batch_stats"]}, *batch)
