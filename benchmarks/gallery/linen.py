"""Train steps in plain linen as tutorials write them, by shapes alone: language models, nets of pictures and toys."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.gallery.steps import Built, Case, adam_step, initial, numbers, shape, token_loss


def language(model: Any, batch: int, length: int) -> Built:
    """Next-token prediction with Adam in a `TrainState`."""

    def loss(params: Any, ids: Any) -> Any:
        return token_loss(model.apply(params, ids)[:, :-1], ids[:, 1:])

    return adam_step(loss, initial(model, shape(1, length)), shape(batch, length))


def regression(model: Any, batch: int, size: int, *, denoising: bool) -> Built:
    """Pictures from noisy ones, or from themselves."""
    picture = numbers(batch, size, size, 3)

    def loss(params: Any, noisy: Any, clean: Any = None) -> Any:
        return jnp.mean((model.apply(params, noisy) - (noisy if clean is None else clean)) ** 2)

    return adam_step(loss, initial(model, numbers(1, size, size, 3)), *[picture] * (1 + denoising))


class GPTBlock(nn.Module):
    """A block of a GPT as tutorials write it."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Any, mask: Any) -> Any:
        """[batch, length, hidden] to the same."""
        hidden = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y, y, mask=mask)
        y = nn.Dense(4 * hidden, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(hidden, dtype=self.dtype)(nn.gelu(y))


class GPT(nn.Module):
    """A GPT with a tied embedding and one causal mask for all blocks."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    length: int
    causal: bool
    dtype: Any

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        """[batch, length] tokens to [batch, length, vocabulary] logits."""
        embed = nn.Embed(self.vocabulary, self.hidden, dtype=self.dtype)
        places = self.param("places", nn.initializers.normal(0.02), (self.length, self.hidden))
        x = embed(ids) + places.astype(self.dtype)
        mask = nn.make_causal_mask(ids) if self.causal else None
        for _ in range(self.layers):
            x = GPTBlock(self.heads, self.dtype)(x, mask)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def rotate(x: Any) -> Any:
    """Rotary places of [batch, length, heads, size]."""
    length, size = x.shape[1], x.shape[-1]
    angle = jnp.arange(length)[:, None] * 10000.0 ** (-jnp.arange(0, size, 2) / size)[None]
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


class LlamaBlock(nn.Module):
    """A block of a Llama."""

    heads: int
    wide: int

    @nn.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        """[batch, length, hidden] to the same, as a scan wants it."""
        hidden, size = x.shape[-1], x.shape[-1] // self.heads
        dense = lambda n, name: nn.Dense(n, use_bias=False, dtype=jnp.bfloat16, name=name)  # noqa: E731
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        q, k, v = (dense(hidden, n)(y).reshape(*y.shape[:2], self.heads, size) for n in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", rotate(q), rotate(k)).astype(jnp.float32) / size**0.5
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30)).astype(jnp.bfloat16)
        x = x + dense(hidden, "o")(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        y = nn.RMSNorm(dtype=jnp.bfloat16)(x)
        return x + dense(hidden, "down")(nn.silu(dense(self.wide, "gate")(y)) * dense(self.wide, "up")(y)), None


class Llama(nn.Module):
    """A Llama, scanned over its layers or not, each computed again in the backward pass."""

    layers: int
    hidden: int
    heads: int
    wide: int
    vocabulary: int
    scan: bool

    @nn.compact
    def __call__(self, ids: Any) -> Any:
        """[batch, length] tokens to logits."""
        x = nn.Embed(self.vocabulary, self.hidden, dtype=jnp.bfloat16)(ids)
        block = nn.remat(LlamaBlock, prevent_cse=not self.scan)
        if self.scan:
            stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            x, _ = stack(self.heads, self.wide)(x, None)
        else:
            for _ in range(self.layers):
                x, _ = block(self.heads, self.wide)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=jnp.bfloat16)(nn.RMSNorm(dtype=jnp.bfloat16)(x))


class MLP(nn.Module):
    """Dense layers."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[batch, features] to logits."""
        for width in self.widths[:-1]:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


def linen_mlp(batch: int, features: int, *widths: int) -> Built:
    """Classification by dense layers."""
    model = MLP(widths)
    params = initial(model, numbers(1, features))

    def loss(params: Any, x: Any, labels: Any) -> Any:
        return token_loss(model.apply(params, x), labels)

    return adam_step(loss, params, numbers(batch, features), shape(batch))


def accumulating(batch: int, parts: int, features: int, *widths: int, scan: bool = True) -> Built:
    """A step that accumulates gradients over parts of its batch in a scan of its own, or one after another."""
    model = MLP(widths)
    params = initial(model, numbers(1, features))
    optimizer = optax.adam(1e-3)

    def step(params: Any, memory: Any, x: Any, labels: Any) -> Any:
        def loss(params: Any, x: Any, labels: Any) -> Any:
            return token_loss(model.apply(params, x), labels)

        def one(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *part)
            return jax.tree.map(jnp.add, total, grads), value

        cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), (x, labels))
        grads = jax.tree.map(jnp.zeros_like, params)
        if scan:
            grads, losses = jax.lax.scan(one, grads, cut)
        else:
            losses = jnp.zeros(parts)
            for part in range(parts):
                grads, value = one(grads, jax.tree.map(lambda a, part=part: a[part], cut))
                losses = losses.at[part].set(value)
        updates, after = optimizer.update(jax.tree.map(lambda g: g / parts, grads), memory, params)
        return optax.apply_updates(params, updates), after, losses.mean()

    memory = jax.eval_shape(optimizer.init, params)
    return step, (params, memory, numbers(batch, features), shape(batch))


class UNet(nn.Module):
    """A U-Net with group norms, of widths that double."""

    width: int
    depth: int
    convolutions: int = 2

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[batch, height, width, channels] to the same."""
        channels, kept = x.shape[-1], []
        for level in range(self.depth):
            x = self.stack(x, self.width * 2**level)
            kept.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = self.stack(x, self.width * 2**self.depth)
        for level in reversed(range(self.depth)):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), (2, 2))(x)
            x = self.stack(jnp.concatenate([x, kept[level]], -1), self.width * 2**level)
        return nn.Conv(channels, (1, 1))(x)

    def stack(self, x: Any, width: int) -> Any:
        """Convolutions of one level."""
        for _ in range(self.convolutions):
            x = nn.silu(nn.GroupNorm(min(8, width))(nn.Conv(width, (3, 3))(x)))
        return x


class Autoencoder(nn.Module):
    """Convolutions to a code, and transposed ones from it."""

    widths: tuple[int, ...]
    code: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[batch, height, width, channels] to the same."""
        start = x.shape
        for width in self.widths:
            x = nn.relu(nn.Conv(width, (3, 3), (2, 2))(x))
        inner = x.shape
        x = nn.Dense(self.code)(x.reshape(x.shape[0], -1))
        x = nn.relu(nn.Dense(inner[1] * inner[2] * inner[3])(x)).reshape(inner)
        for width in self.widths[::-1]:
            x = nn.relu(nn.ConvTranspose(width, (3, 3), (2, 2))(x))
        return nn.Conv(start[-1], (3, 3))(x)


def linen_gpt(
    batch: int, length: int, layers: int, hidden: int, heads: int, vocabulary: int = 51200, causal: bool = True,
    dtype: Any = jnp.float16,
) -> Built:  # fmt: skip
    """Next-token prediction with the GPT above."""
    return language(GPT(layers, hidden, heads, vocabulary, length, causal, dtype), batch, length)


def linen_llama(batch: int, length: int, scan: bool, layers: int = 32) -> Built:
    """A Llama of 7 B parameters."""
    return language(Llama(layers, 4096, 32, 11008, 32000, scan), batch, length)


def _issue(build: Any, cluster: str, nodes: int = 1) -> Case:
    return Case(build, cluster, nodes, of="issue")


def _toy(build: Any) -> Case:
    return Case(build, "cpu", of="toy")


CASES: dict[str, Case] = {
    "gpt-39b-mask": _issue(lambda: linen_gpt(1024, 1024, 48, 8192, 64), "p3.16xlarge", 8),
    "gpt-39b-no-mask": _issue(lambda: linen_gpt(1024, 1024, 48, 8192, 64, causal=False), "p3.16xlarge", 8),
    "llama-7b-scan": _issue(lambda: linen_llama(128, 2048, True), "h100", 4),
    "llama-7b-unrolled": _issue(lambda: linen_llama(128, 2048, False), "h100", 4),
    "mlp-toy": _issue(lambda: linen_mlp(256, 128, 256, 256, 128, 10), "cpu"),
    "own-accumulation": _issue(lambda: accumulating(512, 4, 512, 2048, 2048, 16), "cpu"),
    "unet": Case(lambda: regression(UNet(128, 4), 64, 128, denoising=True), "a100"),
    "toy-unet": _toy(lambda: regression(UNet(16, 3), 16, 32, denoising=True)),
    "toy-autoencoder": _toy(lambda: regression(Autoencoder((16, 32, 64), 64), 32, 32, denoising=False)),
    "toy-gpt": _toy(lambda: linen_gpt(16, 64, 4, 64, 4, vocabulary=512, dtype=jnp.float32)),
}
