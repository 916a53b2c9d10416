"""Cases in plain JAX, each for one feature of the language of jaxprs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gallery.batches import normal, regression, text, tokens, weights
from gallery.registry import Build, Case, parse_tags
from gallery.steps import cross_entropy, updated

HIDDEN = 32
CASES: list[Case] = []


def named_case(name: str, tags: str, notes: str = "", **more: Any) -> Callable[[Build], Build]:
    """Registers what builds a step; its notes are the first line of its docstring unless they are given."""

    def register(build: Build) -> Build:
        said = notes or (build.__doc__ or "").partition("\n")[0]
        CASES.append(Case(f"plain_{name}", build, tags=parse_tags(f"plain, {tags}"), notes=said, **more))
        return build

    return register


def case(params: Any, loss_fn: Callable[[Any, Any], jax.Array], batch: Any) -> Any:
    """A step on `{"params": params}`."""

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        return {"params": updated(state["params"], grads)}, {"loss": loss, "grads": grads}

    return step, ({"params": params}, batch)


def two_layers(between: Callable[[Any], Any], batch: Any = None) -> Any:
    """Least squares of a two-layer network with `between` applied to the hidden layer, (batch, 32)."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((between(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)

    return case(weights(a=(16, HIDDEN), b=(HIDDEN, 8)), loss_fn, regression(16, 8) if batch is None else batch)


@jax.custom_vjp
def _straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(4 * x) / 4


_straight_through.defvjp(lambda x: (_straight_through(x), x), lambda x, g: (g * (jnp.abs(x) < 2),))


@jax.custom_jvp
def _softplus(x: jax.Array) -> jax.Array:
    return jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(x, 0)


_softplus.defjvps(lambda t, _, x: t * jax.nn.sigmoid(x))


@named_case("custom_vjp", "custom derivative")
def rounded() -> Any:
    """The gradient passes through the rounding. Inputs are eighths, so that no sum rounds the other way."""
    batch = regression(16, 8)
    step, (state, batch) = two_layers(_straight_through, {"x": jnp.round(batch["x"] * 8) / 8, "y": batch["y"]})
    state["params"]["a"] = (jnp.round(state["params"]["a"] * 16) + 0.5) / 16
    return step, (state, batch)


@named_case("remat_policy", "rematerialisation", "products are kept, the rest recomputed")
def remat_policy() -> Any:
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        @partial(jax.checkpoint, policy=policy)
        def body(a: jax.Array, b: jax.Array, x: jax.Array) -> jax.Array:
            return jax.nn.gelu(x @ a) @ b

        return jnp.mean((body(params["a"], params["b"], batch["x"]) - batch["y"]) ** 2)

    return case(weights(a=(16, HIDDEN), b=(HIDDEN, 8)), loss_fn, regression(16, 8))


@named_case("while", "loop, across the batch")
def while_loop() -> Any:
    """Scales by a power of two that a loop, whose length depends on the data, finds without a gradient."""

    def scale(x: jax.Array) -> jax.Array:
        def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            size, factor = carry
            return size / 2, factor / 2

        size = lax.stop_gradient(jnp.sum(x * x))
        return x * lax.while_loop(lambda carry: carry[0] > 100, body, (size, jnp.ones(())))[1]

    return two_layers(scale)


@named_case("fft", "linear algebra", "along the features")
def fft() -> Any:
    return two_layers(lambda x: jnp.fft.fft(x, axis=-1).real / 6)


@named_case("sort", "", "along the features")
def sort() -> Any:
    return two_layers(lambda x: jnp.sort(x, axis=-1))


@named_case("sort_batch", "across the batch")
def trimmed() -> Any:
    """The mean of the smaller half of the losses: a sort along the batch."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        losses = jnp.mean((jnp.tanh(batch["x"] @ params["a"]) - batch["y"]) ** 2, axis=-1)
        return jnp.mean(jnp.sort(losses)[: losses.shape[0] // 2])

    return case(weights(a=(16, 8)), loss_fn, regression(16, 8))


@named_case("pick", "")
def picked() -> Any:
    """A different column of each row, by a gather with a scatter for its gradient."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        hidden = jnp.tanh(batch["x"] @ params["a"])
        return jnp.mean((hidden[jnp.arange(hidden.shape[0]), batch["i"]] - batch["y"]) ** 2)

    batch = {"x": normal(1, 16, 16), "y": normal(2, 16), "i": tokens(3, HIDDEN, 16)}
    return case(weights(a=(16, HIDDEN)), loss_fn, batch)


@named_case("slices", "across the batch")
def slices() -> Any:
    """Slices, concatenation, padding, reversal, and updates of a part."""

    def between(x: jax.Array) -> jax.Array:
        x = jnp.concatenate([x[:, 16:], -x[:, :16]], axis=1)
        x = x + jnp.pad(x[:, ::2], ((0, 0), (8, 8))) + x[:, ::-1]
        y = lax.dynamic_update_slice(x, jnp.tanh(lax.dynamic_slice(x, (2, 3), (4, 5))), (2, 3))
        return y.at[:, 5].add(1.0) + jnp.roll(y, 1, axis=0)

    return two_layers(between)


@named_case("solve", "linear algebra, across the batch")
def solve() -> Any:
    """Whitens the features: a Cholesky factor and a triangular solve."""

    def between(x: jax.Array) -> jax.Array:
        covariance = x.T @ x / x.shape[0] + jnp.eye(x.shape[1])
        return jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(covariance), x.T, lower=True).T

    return two_layers(between)


@named_case("masked_mean", "embedding")
def masked_mean() -> Any:
    """A loss whose denominator is the number of tokens that count."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = params["embed"][batch["inputs"]] @ params["head"]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
        return -jnp.sum(logp * batch["mask"]) / jnp.sum(batch["mask"])

    batch = {**text(64), "mask": tokens(9, 3, 8, 16) > 0}
    return case(weights(embed=(64, HIDDEN), head=(HIDDEN, 64)), loss_fn, batch)


@named_case("tied", "embedding")
def tied() -> Any:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = jnp.tanh(params["embed"][batch["inputs"]] @ params["mix"])
        return cross_entropy(x @ params["embed"].T, batch["targets"])

    return case(weights(embed=(64, HIDDEN), mix=(HIDDEN, HIDDEN)), loss_fn, text(64))


@named_case("scan", "scan, recurrent")
def scan_time() -> Any:
    """A gated recurrence over time, by hand, with outputs at every step and a carry of two."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def body(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = carry
            f, u = jnp.split(jnp.concatenate([x, h], -1) @ params["w"], 2, axis=-1)
            c = jax.nn.sigmoid(f) * c + jnp.tanh(u)
            h = jnp.tanh(c)
            return (h, c), h @ params["out"]

        zeros = jnp.zeros((batch["x"].shape[0], HIDDEN))
        _, ys = lax.scan(body, (zeros, zeros), jnp.swapaxes(batch["x"], 0, 1), reverse=True)
        return jnp.mean((ys - batch["y"]) ** 2)

    batch = {"x": normal(1, 8, 12, 16), "y": normal(2, 12, 8, 8)}
    return case(weights(w=(16 + HIDDEN, 2 * HIDDEN), out=(HIDDEN, 8)), loss_fn, batch)


@named_case("vmap", "")
def vmapped() -> Any:
    """A loss an example, mapped over the batch, with a bilinear form."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        def one(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.sum((jnp.einsum("i,ijk,j->k", x, params["w"], x) / 16 - y) ** 2)

        return jnp.mean(jax.vmap(one)(batch["x"], batch["y"]))

    return case(weights(w=(16, 16, 8)), loss_fn, regression(16, 8))


@named_case("conv_1d", "convolution")
def conv_1d() -> Any:
    """A dilated, a strided, a depthwise and a transposed convolution."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        dims = ("NWC", "WIO", "NWC")
        x = lax.conv_general_dilated(batch["x"], params["a"], (1,), "SAME", rhs_dilation=(2,), dimension_numbers=dims)
        x = lax.conv_general_dilated(
            jax.nn.relu(x), params["b"], (1,), "SAME", dimension_numbers=dims, feature_group_count=16
        )
        x = lax.conv_general_dilated(jnp.tanh(x / 4), params["c"], (2,), "SAME", dimension_numbers=dims)
        x = lax.conv_transpose(x, params["d"], (2,), "SAME", dimension_numbers=dims)
        return jnp.mean((x / 4 - batch["y"]) ** 2)

    params = weights(a=(3, 8, 16), b=(3, 1, 16), c=(3, 16, 16), d=(3, 16, 8))
    return case(params, loss_fn, {"x": normal(1, 8, 16, 8), "y": normal(2, 8, 16, 8)})


def dropout(*, typed: bool) -> Any:
    """Dropout with a key in the state, split at every step; a count and a fixed mask travel in the state too."""

    def step(state: dict[str, Any], batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        key, now = jax.random.split(state["key"])

        def loss_fn(params: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ params["a"]) * state["mask"]
            keep = jax.random.bernoulli(now, 0.75, hidden.shape)
            noise = jax.random.normal(jax.random.fold_in(now, state["count"]), hidden.shape)
            return jnp.mean(((jnp.where(keep, hidden / 0.75, 0) + 0.01 * noise) @ params["b"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        new = {
            "params": updated(state["params"], grads),
            "key": key,
            "count": state["count"] + 1,
            "mask": state["mask"],
        }
        return new, {"loss": loss, "grads": grads}

    key = jax.random.key(3) if typed else jax.random.PRNGKey(3)
    mask = jnp.asarray(np.arange(HIDDEN) % 5 != 0)
    params = weights(a=(16, HIDDEN), b=(HIDDEN, 8))
    return step, ({"params": params, "key": key, "count": jnp.zeros((), jnp.int32), "mask": mask}, regression(16, 8))


def random_argument(*, typed: bool) -> Any:
    """Dropout with a key as an argument of its own."""

    def step(state: dict[str, Any], batch: Any, key: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        def loss_fn(params: Any) -> jax.Array:
            hidden = jnp.tanh(batch["x"] @ params["a"])
            keep = jax.random.bernoulli(key, 0.5, hidden.shape)
            return jnp.mean((jnp.where(keep, 2 * hidden, 0) @ params["b"] - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        return {"params": updated(state["params"], grads)}, {"loss": loss, "grads": grads}

    key = jax.random.key(3) if typed else jax.random.PRNGKey(3)
    return step, ({"params": weights(a=(16, HIDDEN), b=(HIDDEN, 8))}, regression(16, 8), key)


@named_case("constant", "")
def closed_over() -> Any:
    """A constant array that the step closes over, and a batch leaf that is None."""
    mix = normal(20, HIDDEN, HIDDEN)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        assert batch["extra"] is None
        return jnp.mean((jnp.tanh(batch["x"] @ params["a"] @ mix) @ params["b"] - batch["y"]) ** 2)

    return case(weights(a=(16, HIDDEN), b=(HIDDEN, 8)), loss_fn, {**regression(16, 8), "extra": None})


def bf16(dtype: Any = jnp.bfloat16) -> Any:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        a, b = (params[name].astype(dtype) for name in "ab")
        out = jax.nn.gelu(batch["x"].astype(dtype) @ a) @ b
        return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2)

    return case(weights(a=(32, 64), b=(64, 16)), loss_fn, regression(32, 16))


BETWEEN: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "custom_jvp": (_softplus, "custom derivative", ""),
    "remat": (jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x)) * x), "rematerialisation", ""),
    "fori": (
        lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x) + 0.1 * i, x), "loop",
        "a loop of fixed length through which gradients pass",
    ),
    "cond": (
        lambda x: lax.cond(jnp.mean(x * x) > 0.1, jnp.sin, lambda x: x * x, x), "branch, across the batch", "",
    ),
    "switch": (
        lambda x: lax.switch(jnp.int32(jnp.sum(x * x) > 1) + 1, (jnp.sin, jnp.cos, jnp.tanh), x),
        "branch, across the batch", "",
    ),
    "fft_batch": (lambda x: jnp.fft.fft2(x).real / 24, "linear algebra, across the batch", "along the batch too"),
    "cumulative": (
        lambda x: jnp.cumsum(x, 0) / 4 + jnp.cumsum(x, 1) / 4 + lax.associative_scan(jnp.maximum, x),
        "across the batch", "",
    ),
    "reshape": (
        lambda x: jnp.swapaxes(x.reshape(-1, 4, 8), 1, 2).reshape(x.shape) + x.reshape(8, -1).mean(),
        "across the batch", "dims that are split and merged, and transposed between",
    ),
}  # fmt: skip
"""Of two-layer networks what is applied to the hidden layer."""
for _name, (_between, _tags, _notes) in BETWEEN.items():
    named_case(_name, _tags, _notes)(partial(two_layers, _between))
for _typed, _name in ((True, "typed"), (False, "raw")):
    named_case(f"dropout_{_name}", "random", "a key, an integer and a bool in the state")(
        partial(dropout, typed=_typed)
    )
    named_case(f"key_{_name}", "random")(partial(random_argument, typed=_typed))
named_case("bf16", "half precision", dtype="bfloat16", reference=partial(bf16, jnp.float32))(bf16)
