"""The interface of the models in this folder, and the training steps made of them.

A model file gives a configuration class, sizes, a module, a loss and the fields of its batch. `ModelSpec` turns these
into steps: `build` and `build_nnx` with arrays, `abstract` with shapes. Shapes come from `nnx.eval_shape`, which runs
the initialisation on abstract values, so a model of 175 billion parameters takes seconds and no memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from alpa_lite.ir.flops import jaxpr_flops

Batch = dict[str, Any]
Loss = Callable[[Any, Batch], jax.Array]
Optimizer = str | optax.GradientTransformation


@dataclass(frozen=True)
class Field:
    """One array of a batch.

    Attributes:
      shape: with the batch dim first.
      dtype: a NumPy dtype.
      limit: integers are drawn from [0, limit); None for a standard normal.
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32
    limit: int | None = None

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype alone."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """Returns a random array of this shape."""
        if self.limit is None:
            return rng.standard_normal(self.shape, np.float32).astype(self.dtype)
        return rng.integers(0, self.limit, self.shape).astype(self.dtype)


@dataclass(frozen=True)
class ModelSpec:
    """A model with its sizes.

    Attributes:
      name: the name in `MODELS`.
      sizes: size name to configuration, a frozen dataclass.
      model: `(config, *, rngs) -> nnx.Module`.
      loss: `(model, batch) -> float32 scalar`.
      fields: `(config, batch_size) -> {name: Field}`, the arrays of a batch.
    """

    name: str
    sizes: Mapping[str, Any]
    model: Callable[..., nnx.Module]
    loss: Loss
    fields: Callable[[Any, int], dict[str, Field]]

    def config(self, size: str, **overrides: Any) -> Any:
        """Returns the configuration of `size`, with some of its attributes replaced.

        Raises:
          ValueError: for a size or an attribute that does not exist; the message lists those that do.
        """
        if size not in self.sizes:
            raise ValueError(f"{self.name} has no size {size!r}; choose one of {', '.join(self.sizes)}")
        config = self.sizes[size]
        known = [field.name for field in dataclasses.fields(config)]
        unknown = [name for name in overrides if name not in known]
        if unknown:
            raise ValueError(f"{self.name} has no attribute {unknown[0]!r}; it has {', '.join(known)}")
        return dataclasses.replace(config, **overrides)

    def build(
        self, size: str, batch: int, seed: int = 0, *, optimizer: Optimizer = "adamw", **overrides: Any
    ) -> tuple[Callable[..., Any], tuple[Any, Batch]]:
        """Returns a functional training step and concrete arguments.

        Args:
          size: a key of `sizes`.
          batch: examples in the batch.
          seed: of the parameters and of the random batch.
          optimizer: "adamw" (float32 moments), "sgd", or any Optax transformation.
          **overrides: attributes of the configuration.

        Returns:
          `train_step(state, batch) -> (state, {"loss": ...})` and `(state, batch)`. The state is made of dictionaries:
          "params", "rest" (batch norm statistics, dropout keys) and "opt_state". The step is not jitted.
        """
        config = self.config(size, **overrides)
        tx = make_optimizer(optimizer)
        graphdef, params, rest = nnx.split(self.model(config, rngs=nnx.Rngs(seed)), nnx.Param, ...)
        step = functional_step(graphdef, tx, self.loss)
        return step, (_state(tx, params, rest), self.sample(config, batch, seed))

    def build_nnx(
        self, size: str, batch: int, seed: int = 0, *, optimizer: Optimizer = "adamw", **overrides: Any
    ) -> tuple[Callable[..., jax.Array], tuple[nnx.Module, nnx.Optimizer, Batch]]:
        """As `build`, in NNX's own style: `train_step(model, optimizer, batch) -> loss` updates both in place."""
        config = self.config(size, **overrides)
        model = self.model(config, rngs=nnx.Rngs(seed))
        wrapped = nnx.Optimizer(model, make_optimizer(optimizer), wrt=nnx.Param)
        return module_step(self.loss), (model, wrapped, self.sample(config, batch, seed))

    def abstract(
        self, size: str, batch: int, *, optimizer: Optimizer = "adamw", **overrides: Any
    ) -> tuple[Callable[..., Any], tuple[Any, Batch]]:
        """As `build`, with every array a `jax.ShapeDtypeStruct`: nothing is allocated or computed."""
        config = self.config(size, **overrides)
        tx = make_optimizer(optimizer)
        graphdef, params, rest = nnx.split(self._shapes(config), nnx.Param, ...)
        state = jax.eval_shape(lambda params, rest: _state(tx, params, rest), params, rest)
        fields = self.fields(config, batch)
        return functional_step(graphdef, tx, self.loss), (state, {name: f.abstract() for name, f in fields.items()})

    def sample(self, config: Any, batch: int, seed: int = 0) -> Batch:
        """Returns a random batch of NumPy arrays; the same for the same seed."""
        rng = np.random.default_rng(seed)
        return {name: field.sample(rng) for name, field in self.fields(config, batch).items()}

    def parameters(self, size: str, **overrides: Any) -> int:
        """Returns the number of trainable parameters."""
        config = self.config(size, **overrides)
        params = nnx.state(self._shapes(config), nnx.Param)
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.to_pure_dict(params)))

    def flops(self, size: str, batch: int, **overrides: Any) -> float:
        """Returns FLOPs of one training step, for model FLOPs utilisation.

        A multiplication and an addition are two FLOPs; the backward pass costs twice the forward pass. Only matrix
        products and convolutions of the forward pass count, three times: for a language model 6·N·D with N the
        parameters that multiply and D the tokens, plus 12·layers·batch·seq²·hidden for attention scores, causal or not.
        """
        config = self.config(size, **overrides)
        graphdef, state = nnx.split(self._shapes(config))
        fields = {name: field.abstract() for name, field in self.fields(config, batch).items()}
        loss = jax.make_jaxpr(lambda state, batch: self.loss(nnx.merge(graphdef, state), batch))(state, fields)
        return 3.0 * jaxpr_flops(loss, products_only=True)

    def _shapes(self, config: Any) -> nnx.Module:
        """Returns the module with shapes in place of arrays."""

        def create() -> nnx.Module:
            rngs = nnx.Rngs(0)
            # A traced count makes flax 0.12.8 look for its sharding at every key drawn, and JAX 0.10 then searches the
            # whole trace for its origin: 80 s for 96 layers. A NumPy count is not traced.
            count: Any = np.zeros((), np.uint32)
            rngs["default"].count.set_value(count)
            return self.model(config, rngs=rngs)

        return nnx.eval_shape(create)


def _state(tx: optax.GradientTransformation, params: nnx.State, rest: nnx.State) -> dict[str, Any]:
    """Returns the training state as dictionaries of arrays."""
    pure = nnx.to_pure_dict(params)
    return {"params": pure, "rest": nnx.to_pure_dict(rest), "opt_state": tx.init(pure)}


def make_optimizer(optimizer: Optimizer) -> optax.GradientTransformation:
    """Returns an Optax transformation by name: "adamw" (moments in the parameters' float32) or "sgd" (no state).

    Raises:
      ValueError: for another name.
    """
    if not isinstance(optimizer, str):
        return optimizer
    if optimizer == "adamw":
        return optax.adamw(3e-4, b2=0.95, weight_decay=0.01)
    if optimizer == "sgd":
        return optax.sgd(1e-2)
    raise ValueError(f"there is no optimizer {optimizer!r}; choose adamw or sgd, or pass an Optax transformation")


def module_step(loss_fn: Loss) -> Callable[[nnx.Module, nnx.Optimizer, Any], jax.Array]:
    """`train_step(model, optimizer, batch) -> loss`, which updates the model and the optimizer in place."""

    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return train_step


def functional_step(
    graphdef: nnx.GraphDef, tx: optax.GradientTransformation, loss_fn: Loss
) -> Callable[[dict[str, Any], Any], tuple[dict[str, Any], dict[str, jax.Array]]]:
    """`train_step(state, batch) -> (state, {"loss": ...})` on dictionaries "params", "rest" and "opt_state"."""

    def train_step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, jax.Array]]:
        def loss_and_rest(params: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(graphdef, params, state["rest"])
            loss = loss_fn(model, batch)
            return loss, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

        (loss, rest), grads = jax.value_and_grad(loss_and_rest, has_aux=True)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "rest": rest, "opt_state": opt_state}, {"loss": loss}

    return train_step
