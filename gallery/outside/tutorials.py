"""Train steps in plain linen as tutorials write them, by shapes alone: language models, nets of pictures and toys."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from gallery.batches import f32, initial, shape
from gallery.registry import Built, published_fields
from gallery.steps import cross_entropy, fitting_step, language, module, supervised_step


def regression(model: Any, batch: int, size: int, *, denoising: bool) -> Built:
    """Pictures from noisy ones, or from themselves."""

    def loss(apply: Any, noisy: Any, clean: Any = None) -> Any:
        return jnp.mean((apply(noisy) - (noisy if clean is None else clean)) ** 2)

    return fitting_step(model, loss, *[f32(batch, size, size, 3)] * (1 + denoising))


@module
def GPTBlock(self, x, mask, *, heads, dtype):
    """A block of a GPT as tutorials write it: [batch, length, hidden] to the same."""
    hidden = x.shape[-1]
    y = nn.LayerNorm(dtype=dtype)(x)
    x = x + nn.MultiHeadDotProductAttention(heads, dtype=dtype)(y, y, mask=mask)
    y = nn.Dense(4 * hidden, dtype=dtype)(nn.LayerNorm(dtype=dtype)(x))
    return x + nn.Dense(hidden, dtype=dtype)(nn.gelu(y))


@module
def GPT(self, ids, *, layers, hidden, heads, vocabulary, length, causal, dtype):
    """A GPT with a tied embedding and one causal mask for all blocks.

    [batch, length] tokens to [batch, length, vocabulary] logits.
    """
    embed = nn.Embed(vocabulary, hidden, dtype=dtype)
    places = self.param("places", nn.initializers.normal(0.02), (length, hidden))
    x = embed(ids) + places.astype(dtype)
    mask = nn.make_causal_mask(ids) if causal else None
    for _ in range(layers):
        x = GPTBlock(heads, dtype)(x, mask)
    return embed.attend(nn.LayerNorm(dtype=dtype)(x))


def rotate(x: Any) -> Any:
    """Rotary places of [batch, length, heads, size]."""
    length, size = x.shape[1], x.shape[-1]
    angle = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)[None]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


@module
def LlamaBlock(self, x, _=None, *, heads, wide):
    """A block of a Llama: [batch, length, hidden] to the same, as a scan wants it."""
    hidden, size = x.shape[-1], x.shape[-1] // heads
    dense = lambda n, name: nn.Dense(n, use_bias=False, dtype=jnp.bfloat16, name=name)  # noqa: E731
    y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
    q, k, v = (dense(hidden, n)(y).reshape(*y.shape[:2], heads, size) for n in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)).astype(jnp.float32) / size**0.5
    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(jnp.bfloat16)
    x = x + dense(hidden, "o")(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
    y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
    return x + dense(hidden, "down")(nn.silu(dense(wide, "gate")(y)) * dense(wide, "up")(y)), None


@module
def Llama(self, ids, *, layers, hidden, heads, wide, vocabulary, scan):
    """A Llama, scanned over its layers or not, each computed again in the backward pass.

    [batch, length] tokens to logits.
    """
    x = nn.Embed(vocabulary, hidden, dtype=jnp.bfloat16)(ids)
    block = nn.remat(LlamaBlock, prevent_cse=not scan)
    if scan:
        stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)
        x, _ = stack(heads, wide)(x, None)
    else:
        for _ in range(layers):
            x, _ = block(heads, wide)(x)
    return nn.Dense(vocabulary, use_bias=False, dtype=jnp.bfloat16)(nn.RMSNorm(dtype=jnp.bfloat16)(x))


@module
def MLP(self, x, *, widths):
    """Dense layers: [batch, features] to logits."""
    for width in widths[:-1]:
        x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(widths[-1])(x)


def accumulation_step(batch: int, parts: int, features: int, *widths: int, scan: bool = True) -> Built:
    """A step that accumulates gradients over parts of its batch in a loop of its own, a scan or not."""
    model = MLP(widths)
    params = initial(model, f32(1, features))
    optimizer = optax.adam(1e-3)

    def step(params: Any, memory: Any, x: Any, labels: Any) -> Any:
        def loss(params: Any, x: Any, labels: Any) -> Any:
            return cross_entropy(model.apply(params, x), labels)

        def one(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *part)
            return jax.tree.map(jnp.add, total, grads), value

        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (x, labels))
        total = jax.tree.map(jnp.zeros_like, params)
        if scan:
            grads, losses = jax.lax.scan(one, total, cut)
        else:
            values = []
            for part in range(parts):
                total, value = one(total, jax.tree.map(lambda a, part=part: a[part], cut))
                values.append(value)
            grads, losses = total, jnp.stack(values)
        updates, after = optimizer.update(jax.tree.map(lambda g: g / parts, grads), memory, params)
        return optax.apply_updates(params, updates), after, losses.mean()

    memory = jax.eval_shape(optimizer.init, params)
    return step, (params, memory, f32(batch, features), shape(batch))


def stack(x: Any, width: int) -> Any:
    """Convolutions of one level."""
    for _ in range(2):
        x = nn.silu(nn.GroupNorm(min(8, width))(nn.Conv(width, (3, 3))(x)))
    return x


@module
def UNet(self, x, *, width, depth):
    """A U-Net with group norms, of widths that double: [batch, height, width, channels] to the same."""
    channels, kept = x.shape[-1], []
    for level in range(depth):
        x = stack(x, width * 2**level)
        kept.append(x)
        x = nn.avg_pool(x, (2, 2), (2, 2))
    x = stack(x, width * 2**depth)
    for level in reversed(range(depth)):
        x = nn.ConvTranspose(width * 2**level, (2, 2), (2, 2))(x)
        x = stack(jnp.concatenate([x, kept[level]], -1), width * 2**level)
    return nn.Conv(channels, (1, 1))(x)


@module
def Autoencoder(self, x, *, widths, code):
    """Convolutions to a code, and transposed ones from it: [batch, height, width, channels] to the same."""
    start = x.shape
    for width in widths:
        x = nn.relu(nn.Conv(width, (3, 3), (2, 2))(x))
    inner = x.shape
    x = nn.Dense(code)(x.reshape(x.shape[0], -1))
    x = nn.relu(nn.Dense(inner[1] * inner[2] * inner[3])(x)).reshape(inner)
    for width in widths[::-1]:
        x = nn.relu(nn.ConvTranspose(width, (3, 3), (2, 2))(x))
    return nn.Conv(start[-1], (3, 3))(x)


_issue, _toy = functools.partial(published_fields, of="issue"), functools.partial(published_fields, "cpu", of="toy")
PLANNED: dict[str, dict[str, Any]] = {
    "gpt-39b-mask": _issue("p3.16xlarge x 8", language, GPT(48, 8192, 64, 51200, 1024, True, jnp.float16), 1024, 1024),
    "gpt-39b-no-mask": _issue(
        "p3.16xlarge x 8", language, GPT(48, 8192, 64, 51200, 1024, False, jnp.float16), 1024, 1024
    ),
    "llama-7b-scan": _issue("h100 x 4", language, Llama(32, 4096, 32, 11008, 32000, True), 128, 2048),
    "llama-7b-unrolled": _issue("h100 x 4", language, Llama(32, 4096, 32, 11008, 32000, False), 128, 2048),
    "mlp-toy": _issue("cpu", supervised_step, MLP((256, 256, 128, 10)), f32(256, 128), shape(256)),
    "own-accumulation": _issue("cpu", accumulation_step, 512, 4, 512, 2048, 2048, 16),
    "unet": published_fields("a100", regression, UNet(128, 4), 64, 128, denoising=True),
    "toy-unet": _toy(regression, UNet(16, 3), 16, 32, denoising=True),
    "toy-autoencoder": _toy(regression, Autoencoder((16, 32, 64), 64), 32, 32, denoising=False),
    "toy-gpt": _toy(language, GPT(4, 64, 4, 512, 64, True, jnp.float32), 16, 64),
}
