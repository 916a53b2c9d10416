"""`nnx.Optimizer`: a convolutional NNX model with batch norm and dropout, updated in place, with `nnx.MultiMetric`."""

from typing import Any

import jax
import optax
from flax import nnx

from tests.loops.base import Arrays, Loop, images

SIZE, CLASSES = 8, 4


class CNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(16 * (SIZE // 4) ** 2, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.avg_pool(nnx.relu(self.norm1(self.conv1(x))), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.norm2(self.conv2(x))), (2, 2), (2, 2))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


def loss_fn(model: CNN, batch: Arrays) -> tuple[jax.Array, jax.Array]:
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


def train_step(model: CNN, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: Arrays) -> None:
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def eval_step(model: CNN, batch: Arrays) -> dict[str, jax.Array]:
    loss, logits = loss_fn(model, batch)
    return {"loss": loss, "accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def make_state() -> tuple[Any, ...]:
    model = CNN(nnx.Rngs(0))
    model.train()
    optimizer = nnx.Optimizer(model, optax.sgd(0.02, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, optimizer, metrics


def make_batch(seed: int, rows: int) -> Arrays:
    return images(seed, rows, SIZE, 1, CLASSES)


def advance(step: Any, carried: tuple[Any, ...], batch: Arrays) -> tuple[tuple[Any, ...], Any]:
    step(*carried, batch)
    metrics = carried[2].compute()
    carried[2].reset()
    return carried, metrics


def evaluate(step: Any, carried: tuple[Any, ...], batch: Arrays) -> Any:
    model = carried[0]
    model.eval()
    found = step(model, batch)
    model.train()
    return found


LOOP = Loop("nnx_optimizer", make_state, train_step, eval_step, make_batch, advance, evaluate)
