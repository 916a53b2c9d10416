"""What train steps of the gallery share: shapes of arguments, losses, and updates in the ways of users.

A case is a function that returns a step and the shapes of its arguments, with the cluster and the method.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

Built = tuple[Callable[..., Any], tuple[Any, ...]]
CLIPPED = optax.clip_by_global_norm(1.0)


@dataclass(frozen=True)
class Case:
    """A step to be planned.

    Attributes:
      build: makes the step and the shapes of its arguments.
      cluster, nodes: a preset.
      options: of `make_plan`, the method aside.
      method: a text that makes a method.
      of: "issue" for the cases that were reported, "published" for models at published sizes, "unusual" for steps that
        are not one loss and one optimizer, "toy" for small ones, "own" for models of this project.
    """

    build: Callable[[], Built]
    cluster: str
    nodes: int = 1
    method: str = "Auto()"
    options: Mapping[str, Any] = field(default_factory=dict)
    of: str = "published"


def case(
    on: str, build: Callable[..., Built], *args: Any, of: str = "published", method: str = "Auto()",
    options: Any = None, **sizes: Any,
) -> Case:  # fmt: skip
    """The case of `build(*args, **sizes)` on a preset, such as "a100 x 2" for two nodes of it."""
    cluster, _, nodes = on.partition(" x ")
    return Case(lambda: build(*args, **sizes), cluster, int(nodes or 1), method, options or {}, of)


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


def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    """The shape of an argument."""
    return jax.ShapeDtypeStruct(dims, dtype)


def numbers(*dims: int) -> jax.ShapeDtypeStruct:
    """The shape of an argument in float32."""
    return shape(*dims, dtype=jnp.float32)


def random_key() -> Any:
    """The shape of a key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def initial(model: Any, *given: Any) -> Any:
    """The shapes of a model's variables."""
    return jax.eval_shape(model.init, jax.random.key(0), *given)


def halved(params: Any) -> Any:
    """The shapes of parameters in bfloat16."""
    return jax.tree.map(lambda leaf: shape(*leaf.shape, dtype=jnp.bfloat16), params)


def token_loss(logits: Any, labels: Any) -> Any:
    """Mean cross entropy of tokens, in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def weighted(logits: Any, labels: Any, weights: Any) -> Any:
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


def fitted(
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


def one_example(*arrays: Any) -> list[Any]:
    """The shapes of arrays with one example."""
    return [shape(1, *x.shape[1:], dtype=x.dtype) for x in arrays]


def supervised(model: Any, *batch: Any, loss: Callable[..., Any] = token_loss, **more: Any) -> Built:
    """A step of `loss` between what a model makes of all arrays of the batch but the last one, and that."""

    def value(apply: Callable[..., Any], *given: Any) -> Any:
        return loss(apply(*given[:-1]), given[-1])

    return fitted(model, value, *batch, init=one_example(*batch[:-1]), **more)


def language(model: Any, batch: int, length: int, optimizer: Any = None) -> Built:
    """Next-token prediction."""
    return fitted(
        model, lambda apply, ids: token_loss(apply(ids)[:, :-1], ids[:, 1:]), shape(batch, length), optimizer=optimizer
    )


def started(params: Any, optimizer: Any) -> dict[str, Any]:
    """The shapes of parameters and of what an optimizer remembers of them."""
    return {"params": params, "memory": jax.eval_shape(optimizer.init, params)}


def descended(loss: Callable[..., Any], state: Any, optimizer: Any) -> tuple[Any, Any]:
    """Parameters and memory after a step, and the value of the loss."""
    value, grads = jax.value_and_grad(loss)(state["params"])
    updates, memory = optimizer.update(grads, state["memory"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "memory": memory}, value


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

    state = started(params, optimizer)
    state |= {"scale": numbers()} if scaled else {}
    state |= {"average": params} if average is not None else {}
    return step, (state, *batch, *((random_key(),) if rng else ()))


def statistical_step(apply: Callable[..., Any], variables: Any, optimizer: Any, *batch: Any) -> Built:
    """A step of a net with batch statistics: `apply(variables, pictures)` to logits and updated variables.

    The batch is pictures and labels.
    """

    def step(state: Any, pictures: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            logits, updated = apply({"params": params, "batch_stats": state["statistics"]}, pictures)
            return token_loss(logits, labels), updated["batch_stats"]

        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, memory = optimizer.update(gradients, state["memory"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "memory": memory, "statistics": statistics}, value

    return step, (started(variables["params"], optimizer) | {"statistics": variables["batch_stats"]}, *batch)
