"""LoRA: the base weights are an argument that the step does not return; low-rank adapters are trained."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.loops.base import Arrays, Loop, rng_of

VOCAB, SEQ, WIDTH, RANK, LAYERS = 32, 8, 16, 2, 2
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
Tree = dict[str, Any]


def pretrained(key: jax.Array) -> Tree:
    """Weights that stand for a download."""
    keys = iter(jax.random.split(key, 2 + 4 * LAYERS))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / jnp.sqrt(shape[0])

    layers = [
        {"query": normal(WIDTH, WIDTH), "value": normal(WIDTH, WIDTH), "up": normal(WIDTH, 4 * WIDTH)}
        | {"down": normal(4 * WIDTH, WIDTH)}
        for _ in range(LAYERS)
    ]
    return {"embed": normal(VOCAB, WIDTH), "layers": layers, "head": normal(WIDTH, VOCAB)}


def adapters(base: Tree, key: jax.Array) -> Tree:
    """For each query and value matrix a random `a` and a zero `b`, so that training starts at the base."""
    out = {}
    for i, layer in enumerate(base["layers"]):
        for name in ("query", "value"):
            rows, columns = layer[name].shape
            a = jax.random.normal(jax.random.fold_in(key, len(out)), (rows, RANK)) / jnp.sqrt(rows)
            out[f"{i}/{name}"] = {"a": a, "b": jnp.zeros((RANK, columns))}
    return out


def forward(base: Tree, lora: Tree, tokens: jax.Array) -> jax.Array:
    def dense(x: jax.Array, i: int, name: str) -> jax.Array:
        adapter = lora[f"{i}/{name}"]
        return x @ base["layers"][i][name] + (x @ adapter["a"]) @ adapter["b"] * 2.0

    x = base["embed"][tokens]
    mask = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))
    for i, layer in enumerate(base["layers"]):
        scores = jnp.einsum("btd,bsd->bts", dense(x, i, "query"), x) / jnp.sqrt(WIDTH)
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        x = x + weights @ dense(x, i, "value")
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
    return x @ base["head"]


def loss_fn(lora: Tree, base: Tree, batch: Arrays) -> jax.Array:
    logits = forward(base, lora, batch["tokens"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def train_step(lora: Tree, opt_state: Any, base: Tree, batch: Arrays) -> tuple[Any, Any, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(lora, base, batch)
    updates, opt_state = TX.update(grads, opt_state, lora)
    return optax.apply_updates(lora, updates), opt_state, loss


def make_state() -> tuple[Any, ...]:
    base = pretrained(jax.random.key(0))
    lora = adapters(base, jax.random.key(1))
    return lora, TX.init(lora), base


def make_batch(seed: int, rows: int) -> Arrays:
    rng = rng_of(seed)
    tokens = (rng.integers(0, VOCAB, (rows, 1)) + 3 * rng.integers(0, 2, (rows, SEQ + 1)).cumsum(1)) % VOCAB
    mask = rng.integers(2, SEQ + 1, (rows, 1)) > range(SEQ)
    return {"tokens": tokens.astype("int32"), "mask": mask.astype("float32")}


LOOP = Loop(
    "lora", make_state, train_step, loss_fn, make_batch,
    evaluate=lambda step, carried, batch: step(carried[0], carried[2], batch),
)  # fmt: skip
