"""Small training steps, each for something that cutting a batch into micro-batches must get right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from gallery.batches import normal, tokens
from gallery.registry import Build, Built, Case, parse_tags
from gallery.steps import optimizer_step, updated

WEIGHTS = {"a": normal(1, 8, 16) / 3, "b": normal(2, 16, 4) / 4}
X, Y = normal(3, 16, 8), normal(4, 16, 4)
MASK = tokens(5, 3, 16) > 0
BATCH = {"x": X, "y": Y}
EXPERTS = {"g": normal(1, 8, 4), "w": normal(2, 4, 8, 8)}
TX = optax.MultiSteps(optax.sgd(1e-2, momentum=0.9), 2)
CASES: list[Case] = []


def forward(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


def squares(p, batch):
    """A loss an example."""
    return jnp.mean((forward(p, batch["x"]) - batch["y"]) ** 2, -1)


def descent(loss, params, batch, aux=False) -> Built:
    def step(state, batch):
        out, grads = jax.value_and_grad(loss, has_aux=aux)(state, batch)
        return updated(state, grads), out, grads

    return step, (params, batch)


def case(
    tags: str = "", batch: Any = BATCH, params: Any = WEIGHTS, *, aux: bool = False, args: Any = None
) -> Callable[[Callable[..., Any]], Build]:
    """Registers the step of a loss of (parameters, batch), or with `args` a step itself, and gives what builds it."""

    def register(fun: Callable[..., Any]) -> Build:
        def build() -> Built:
            return descent(fun, params, batch, aux) if args is None else (fun, args)

        build.__name__ = fun.__name__
        CASES.append(Case(fun.__name__, build, tags=parse_tags(tags), notes=fun.__doc__ or ""))
        return build

    return register


@case()
def sum_loss(p, b):
    return jnp.sum(squares(p, b))


@case("", {**BATCH, "w": jnp.abs(normal(6, 16)), "c": normal(7, 4)})
def weighted_loss(p, b):
    """By example, and by an argument of the batch that has no examples."""
    squares = jnp.mean((forward(p, b["x"]) - b["y"]) ** 2 * b["c"], -1)
    return jnp.sum(b["w"] * squares) / jnp.sum(b["w"])


@case("", {**BATCH, "mask": MASK})
def masked_loss(p, b):
    return jnp.sum(squares(p, b) * b["mask"]) / jnp.sum(b["mask"])


@case()
def regularised_loss(p, b):
    return jnp.mean(squares(p, b)) + 1e-2 * sum(jnp.sum(x * x) for x in jax.tree.leaves(p))


@case(aux=True)
def metrics(p, b):
    """Per-example outputs, means, counts, extremes and deviations besides the loss."""
    out, losses = forward(p, b["x"]), squares(p, b)
    hits = jnp.argmax(out, -1) == jnp.argmax(b["y"], -1)
    rest = {"hits": hits.sum(), "accuracy": hits.mean(), "largest": losses.max(), "spread": losses.std()}
    return losses.mean(), {**rest, "losses": losses, "outputs": out.T}


@case(args=(WEIGHTS, {**BATCH, "m": MASK}))
def several_losses(state, batch):
    first, g1 = jax.value_and_grad(lambda p: jnp.mean(squares(p, batch)))(state)
    second, g2 = jax.value_and_grad(lambda p: jnp.sum(squares(p, batch) * batch["m"]) / batch["m"].sum())(state)
    return updated(state, jax.tree.map(lambda a, b: a + 0.3 * b, g1, g2)), (first, second)


@case("", {"x": normal(7, 6, 16, 8), "y": normal(8, 6, 16, 4)})
def batch_axis_1(p, b):
    """(time, batch, feature), with a sum over time."""
    out = jnp.cumsum(jnp.einsum("tnd,dh->tnh", b["x"], p["a"]), 0) @ p["b"]
    return jnp.mean((out - b["y"]) ** 2)


@case("optimizer, branch", args=(WEIGHTS, TX.init(WEIGHTS), BATCH))
def multi_steps(params, opt_state, batch):
    """The optimizer updates every other step, under a `cond`."""
    return optimizer_step(lambda p, b: jnp.mean(squares(p, b)), TX)(params, opt_state, batch)


@case("scan", {"x": X, "m": MASK}, {"a": WEIGHTS["a"]})
def scanned_layers(p, b):
    """Tied weights in a scanned layer, and in each layer a masked mean and a regulariser."""

    def body(carry, _):
        h, total = carry
        h = jnp.tanh(h @ p["a"]) @ p["a"].T
        total += jnp.sum(jnp.sum(h**2, -1) * b["m"]) / jnp.sum(b["m"]) + 1e-2 * jnp.sum(p["a"] ** 2)
        return (h, total), jnp.mean(h)

    (h, total), means = lax.scan(body, (b["x"], 0.0), None, length=3)
    return jnp.mean(h**2) + total + means.sum()


@case("scan, rematerialisation", {"x": X}, {"w": normal(9, 3, 8, 8) / 3})
def remat_layers(p, b):
    def body(h, w):
        return jax.checkpoint(lambda h, w: jnp.tanh(jnp.sin(h @ w)) + h)(h, w), None

    return jnp.mean(lax.scan(body, b["x"], p["w"])[0] ** 2)


@case("branch, loop")
def branches(p, b):
    """A branch on what does not depend on the batch, and a loop."""
    h = lax.cond(jnp.sum(p["a"]) > 0, lambda x: jnp.sin(x @ p["a"]), lambda x: jnp.cos(x @ p["a"]), b["x"])
    h = lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["b"]) @ p["b"].T + 0.1 * i, h)
    return jnp.mean((h @ p["b"] - b["y"]) ** 2)


@case("loop")
def mapped_loss(p, b):
    """A loop over the examples."""
    return jnp.mean(lax.map(lambda e: jnp.sum((forward(p, e[0]) - e[1]) ** 2), (b["x"], b["y"])))


@case("", {"x": X, "i": tokens(6, 4, 16)})
def random_rows(p, b):
    """`x[arange(N), i]`, and its gradient."""
    logp = jax.nn.log_softmax(forward(p, b["x"]))
    return -jnp.mean(logp[jnp.arange(logp.shape[0]), b["i"]])


@case("random", args=(WEIGHTS, BATCH, jax.random.key(0)))
def noise(state, batch, key):
    def loss(p):
        x = batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)
        keys = jax.random.split(key, 16)
        keep = jax.vmap(lambda k: jax.random.bernoulli(k, 0.5, (8,)))(keys)
        return jnp.mean(squares(p, {**batch, "x": jnp.where(keep, x, 0)}))

    value, grads = jax.value_and_grad(loss)(state)
    return updated(state, grads), value


@case(args=(WEIGHTS, BATCH))
def clipped_examples(state, batch):
    """The gradient of each example is clipped."""
    gradient = jax.vmap(jax.grad(lambda p, x, y: jnp.sum((forward(p, x) - y) ** 2)), (None, 0, 0))
    grads = gradient(state, batch["x"], batch["y"])
    norms = jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in jax.tree.leaves(grads)))
    return updated(
        state, jax.tree.map(lambda g: jnp.mean(g * jnp.minimum(1, 1 / norms)[:, None, None], 0), grads)
    ), norms


@case("random", args=(WEIGHTS, BATCH, jax.random.key(0)))
def mixed_up(state, batch, key):
    """Each example is mixed with another one, in another order."""
    order = jax.random.permutation(key, 16)
    mixed = {n: 0.7 * x[order] + 0.3 * x[::-1] for n, x in batch.items()}
    loss, grads = jax.value_and_grad(lambda p: jnp.mean(squares(p, mixed)))(state)
    return updated(state, grads), loss


@case("", {"x": normal(7, 8, 6, 8), "y": normal(8, 8, 6, 4)})
def flat_tokens(p, b):
    """The statistics of the data alone are no reason to refuse."""
    x = (b["x"] - b["x"].mean(0)) / b["x"].std(0)
    return jnp.mean((forward(p, x.reshape(-1, 8)) - b["y"].reshape(-1, 4)) ** 2)


@case("embedding", {"t": tokens(8, 12, 8, 6)}, {"e": normal(6, 12, 8), "p": normal(7, 6, 8)})
def embedding(p, b):
    """Positions that have the size of the batch, and an embedding that is used twice."""
    h = p["e"][b["t"]] + p["p"][jnp.broadcast_to(jnp.arange(6), b["t"].shape)]
    return jnp.mean((h @ p["e"].T) ** 2)


@case("across the batch")
def contrastive(p, b):
    return -jnp.mean(jnp.diag(jax.nn.log_softmax((b["x"] @ p["a"]) @ (b["y"] @ p["b"].T).T)))


@case("across the batch")
def log_of_mean(p, b):
    return jnp.log(jnp.mean(squares(p, b)))


@case("across the batch, mixture of experts", {"x": normal(3, 8, 6, 8)}, EXPERTS)
def capacity(p, b):
    """Experts take as many tokens as the size of the batch says, in the order of the batch."""
    x = b["x"].reshape(-1, 8)
    chosen = jax.nn.one_hot(jnp.argmax(x @ p["g"], -1), 4)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1).astype(int) - 1
    slots = chosen[:, :, None] * jax.nn.one_hot(place, x.shape[0] // 4)[:, None, :]
    inner = jnp.tanh(jnp.einsum("ecd,edf->ecf", jnp.einsum("nec,nd->ecd", slots, x), p["w"]))
    return jnp.mean(jnp.einsum("nec,ecf->nf", slots, inner) ** 2)


@case("across the batch, mixture of experts", {"x": normal(3, 8, 6, 8)}, EXPERTS)
def expert_balance(p, b):
    """A load-balancing loss: a product of two means over the batch."""
    gates = jax.nn.softmax(b["x"] @ p["g"])
    chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 4)
    out = jnp.einsum("nte,ntd,edf->ntf", chosen * gates, b["x"], p["w"])
    return jnp.mean(out**2) + 0.01 * jnp.sum(chosen.mean((0, 1)) * gates.mean((0, 1)))


@case("across the batch, recurrent, scan")
def recurrent_over_examples(p, b):
    """Each example sees those before it."""

    def body(h, x):
        h = jnp.tanh(x @ p["a"] + h)
        return h, h

    return jnp.mean((lax.scan(body, jnp.zeros(16), b["x"])[1] @ p["b"] - b["y"]) ** 2)


def reference(step: Any, args: tuple[Any, ...], parts: int) -> Any:
    """The mean of the results of a step over blocks of its batch, the second argument."""
    state, batch, *rest = args
    cut = [jax.tree.map(lambda x, t=t: np.split(np.asarray(x), parts)[t], batch) for t in range(parts)]
    return jax.tree.map(lambda *xs: sum(xs) / parts, *[jax.jit(step)(state, part, *rest) for part in cut])
