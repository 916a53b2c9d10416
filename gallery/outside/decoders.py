"""The train steps of `published`: decoders in plain JAX with the sizes, precision and kernels that a source used.

Parameters are float32 and computation is bfloat16 unless a row says otherwise; AdamW has both moments in the dtype of
the parameters. `remat` is that of the source: "full" recomputes each layer, "minimal" and "selective" keep the results
of products with weights, "none" keeps everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gallery.batches import shape
from gallery.steps import apply_optimizer, cross_entropy, initial_state

Model = Mapping[str, Any]
Attend = Callable[[Any, Any, Any], Any]


def step_of(row: Mapping[str, Any], *, scan: bool = True) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    """The train step of a row, and its abstract arguments (state, batch)."""
    model = row["model"]
    stored = jnp.dtype(row["params"])
    half = jnp.float16 if stored == jnp.float16 else jnp.bfloat16
    attend = attention(row["kernel"])
    block = checkpoint_block({"gpt": gpt_block, "llama": llama_block}[model["kind"]], row["remat"])
    optimizer = optax.adamw(3e-4)

    def loss_of(params: Any, batch: Any) -> Any:
        layer = lambda x, w: block(model, attend, cast(w, half), x)  # noqa: E731
        embed = cast(params["embed"], half)
        x = embed[batch["inputs"]]
        if "positions" in params:
            x = x + cast(params["positions"], half)
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = layer(x, w)
        x = norm(x, params["norm"], model["kind"])
        head = cast(params["head"], half) if "head" in params else embed
        return cross_entropy(jnp.einsum("btm,vm->btv", x, head), batch["targets"])

    def train_step(state: Any, batch: Any) -> Any:
        return apply_optimizer(lambda params: loss_of(params, batch), state, optimizer)

    shapes = parameters(model, scan)
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, stored), shapes, is_leaf=lambda s: isinstance(s, tuple))
    tokens = shape(row["batch"], model["seq"])
    return train_step, (initial_state(params, optimizer), {"inputs": tokens, "targets": tokens})


def parameters(model: Model, scan: bool) -> dict[str, Any]:
    """The shapes of a model's parameters; of the layers stacked ones, or a list."""
    m, n, layers = model["hidden"], model["heads"], model["layers"]
    if model["kind"] == "gpt":
        d = m // n
        layer = {
            "norm1": (m,), "q": (m, n, d), "k": (m, n, d), "v": (m, n, d), "o": (n, d, m),
            "norm2": (m,), "up": (m, 4 * m), "down": (4 * m, m),
        }  # fmt: skip
        outer = {"embed": (model["vocab"], m), "positions": (model["seq"], m), "norm": (m,)}
    else:
        d, f, kv = model["head_dim"], model["ffn"], model["kv_heads"]
        layer = {
            "norm1": (m,), "q": (m, n, d), "k": (m, kv, d), "v": (m, kv, d), "o": (n, d, m),
            "norm2": (m,), "gate": (m, f), "up": (m, f), "down": (f, m),
        }  # fmt: skip
        outer = {"embed": (model["vocab"], m), "head": (model["vocab"], m), "norm": (m,)}
    stacked = {name: (layers, *shape) for name, shape in layer.items()}
    return outer | {"layers": stacked if scan else [layer] * layers}


def flops_of(model: Model, batch: int) -> float:
    """FLOPs of a step by the sources' formula: 6 N a token without the embedding, and 12 s² m a layer for attention."""
    shapes = parameters(model, True)
    count = sum(math.prod(s) for s in shapes["layers"].values()) + model["vocab"] * model["hidden"]
    width = model["heads"] * model.get("head_dim", model["hidden"] // model["heads"])
    return batch * model["seq"] * (6.0 * count + 12.0 * model["layers"] * model["seq"] * width)


def gpt_block(model: Model, attend: Attend, w: Any, x: Any) -> Any:
    """A layer of an MPT: no biases, a feed-forward of four times the width."""
    y = norm(x, w["norm1"], "gpt")
    q, k, v = (jnp.einsum("btm,mnd->btnd", y, w[name]) for name in "qkv")
    x = x + jnp.einsum("btnd,ndm->btm", attend(q, k, v), w["o"])
    y = norm(x, w["norm2"], "gpt")
    return x + jax.nn.gelu(y @ w["up"]) @ w["down"]


def llama_block(model: Model, attend: Attend, w: Any, x: Any) -> Any:
    """A layer of a Llama: rotary positions, grouped queries and a gated feed-forward."""
    y = norm(x, w["norm1"], "llama")
    q, k, v = (jnp.einsum("btm,mnd->btnd", y, w[name]) for name in "qkv")
    x = x + jnp.einsum("btnd,ndm->btm", attend(rotate(q), rotate(k), v), w["o"])
    y = norm(x, w["norm2"], "llama")
    return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"]


def norm(x: Any, weight: Any, kind: str) -> Any:
    """Layer norm of a GPT, RMS norm of a Llama, computed in float32."""
    y = x.astype(jnp.float32)
    if kind == "gpt":
        y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def rotate(x: Any) -> Any:
    """Rotary positions of (batch, sequence, heads, features)."""
    half = x.shape[-1] // 2
    rates = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates)[:, None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def cast(tree: Any, dtype: Any) -> Any:
    """The leaves of a tree in a dtype."""
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def attention(kernel: str) -> Attend:
    """Causal attention by the kernel of a row; of FlashAttention on GPUs the operation of cuDNN stands for it."""
    if kernel == "scores":

        def scores(q: Any, k: Any, v: Any) -> Any:
            s = jnp.einsum("btnd,bsnd->bnts", q, k) / math.sqrt(q.shape[-1])
            seen = jnp.tril(jnp.ones(s.shape[-2:], bool))
            p = jax.nn.softmax(jnp.where(seen, s.astype(jnp.float32), -1e30), -1).astype(v.dtype)
            return jnp.einsum("bnts,bsnd->btnd", p, v)

        return scores
    if kernel == "splash_attention":
        return splash_attention
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def splash_attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention by JAX's kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    length, heads = q.shape[1:3]
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    kernel: Any = splash_attention_kernel.make_splash_mha_single_device(mask)
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q / math.sqrt(q.shape[-1]), k, v))
    return jnp.swapaxes(jax.vmap(kernel)(q, k, v), 1, 2)


def checkpoint_block(block: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """A layer with the source's recomputation."""
    if remat == "none":
        return block
    policy = None if remat == "full" else jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims

    def run(model: Model, attend: Attend, w: Any, x: Any) -> Any:
        # JAX's recomputation keeps the results of products with weights; those of attention are named.
        layer = jax.checkpoint(lambda w, x: block(model, attend, w, x), policy=policy)
        return layer(w, x)

    return run
