"""Small train steps of models that nobody here wrote, whose bytes are compared with a compiler's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import outside_cases as outside
from outside_cases import Built, adam_step, shape, token_loss

F32 = jnp.float32


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021) as its authors write it in linen."""

    patch: int
    hidden: int
    blocks: int
    tokens: int
    channels: int
    classes: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[batch, height, width, 3] to logits."""
        x = nn.Conv(self.hidden, (self.patch, self.patch), strides=(self.patch, self.patch))(x)
        x = x.reshape(x.shape[0], -1, self.hidden)
        for _ in range(self.blocks):
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            y = nn.Dense(y.shape[-1])(nn.gelu(nn.Dense(self.tokens)(y)))
            x = x + jnp.swapaxes(y, 1, 2)
            y = nn.LayerNorm()(x)
            x = x + nn.Dense(self.hidden)(nn.gelu(nn.Dense(self.channels)(y)))
        return nn.Dense(self.classes)(nn.LayerNorm()(x).mean(1))


def mixer(batch: int, size: int, **sizes: Any) -> Built:
    """Classification of pictures."""
    model = Mixer(**sizes)
    params = jax.eval_shape(model.init, jax.random.key(0), shape(1, size, size, 3, dtype=F32))

    def loss(params: Any, pixels: Any, labels: Any) -> Any:
        return token_loss(model.apply(params, pixels), labels)

    return adam_step(loss, params, shape(batch, size, size, 3, dtype=F32), shape(batch))


class Residual(nn.Module):
    """A block of two convolutions with batch norms."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[batch, height, width, channels]."""
        norm = lambda: nn.BatchNorm(use_running_average=False, momentum=0.9)  # noqa: E731
        y = nn.relu(norm()(nn.Conv(self.width, (3, 3), self.stride, use_bias=False)(x)))
        y = norm()(nn.Conv(self.width, (3, 3), use_bias=False)(y))
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.width, (1, 1), self.stride, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """The ResNet of Flax's ImageNet example, with basic blocks."""

    width: int
    stages: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """[batch, height, width, 3] to logits."""
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for level, count in enumerate(self.stages):
            for i in range(count):
                x = Residual(self.width * 2**level, 2 if level and not i else 1)(x)
        return nn.Dense(100)(x.mean((1, 2)))


def resnet(batch: int, size: int, width: int, stages: tuple[int, ...]) -> Built:
    """Classification of pictures, with batch statistics and momentum."""
    model = ResNet(width, stages)
    variables = jax.eval_shape(model.init, jax.random.key(0), shape(1, size, size, 3, dtype=F32))
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(variables: Any, momentum: Any, pixels: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            both = {"params": params, "batch_stats": variables["batch_stats"]}
            logits, after = model.apply(both, pixels, mutable=["batch_stats"])
            return token_loss(logits, labels), after

        (value, after), grads = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        updates, memory = optimizer.update(grads, momentum, variables["params"])
        return {"params": optax.apply_updates(variables["params"], updates), **after}, memory, value

    momentum = jax.eval_shape(optimizer.init, variables["params"])
    return step, (variables, momentum, shape(batch, size, size, 3, dtype=F32), shape(batch))


def haiku_transformer(batch: int, length: int, layers: int, hidden: int, heads: int, vocabulary: int) -> Built:
    """The transformer of Haiku's examples."""
    import haiku as hk

    def forward(ids: Any) -> Any:
        init = hk.initializers.VarianceScaling(2 / layers)
        x = hk.Embed(vocabulary, hidden)(ids) + hk.get_parameter("places", [length, hidden], init=init)
        mask = jnp.tril(jnp.ones((1, 1, length, length)))
        for _ in range(layers):
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(heads, hidden // heads, w_init=init)(y, y, y, mask)
            y = hk.Linear(4 * hidden, w_init=init)(hk.LayerNorm(-1, True, True)(x))
            x = x + hk.Linear(hidden, w_init=init)(jax.nn.gelu(y))
        return hk.Linear(vocabulary)(hk.LayerNorm(-1, True, True)(x))

    model = hk.without_apply_rng(hk.transform(forward))
    params = jax.eval_shape(model.init, jax.random.key(0), shape(batch, length))

    def loss(params: Any, ids: Any) -> Any:
        return token_loss(model.apply(params, ids)[:, :-1], ids[:, 1:])

    return adam_step(loss, params, shape(batch, length))


def equinox_mlp(batch: int, features: int, width: int, depth: int) -> Built:
    """The MLP of Equinox under `vmap`, with Adam."""
    import equinox as eqx

    model = eqx.filter_eval_shape(eqx.nn.MLP, features, features, width, depth, key=jax.random.key(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    optimizer = optax.adamw(1e-4)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

    def step(params: Any, memory: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, memory = optimizer.update(grads, memory, params)
        return eqx.apply_updates(params, updates), memory, value

    data = shape(batch, features, dtype=F32)
    return step, (params, jax.eval_shape(optimizer.init, params), data, data)


_ENCODER = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 1024}
_TEXT = {"vocab_size": 4096, "max_position_embeddings": 64, **_ENCODER}
_VISION = {"image_size": 64, "patch_size": 8, **_ENCODER}

CASES: Mapping[str, Callable[[], Built]] = {
    "bert": lambda: outside.masked("FlaxBertForMaskedLM", "BertConfig", 16, 128, vocab_size=4096, **_ENCODER),
    "gpt2": lambda: outside.causal(
        "FlaxGPT2LMHeadModel", "GPT2Config", 16, 128, n_embd=256, n_layer=2, n_head=4, vocab_size=4096
    ),
    "llama": lambda: outside.causal(
        "FlaxLlamaForCausalLM", "LlamaConfig", 16, 128, hidden_size=256, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=688, vocab_size=4096, max_position_embeddings=128,
    ),
    "whisper": lambda: outside.speech(
        16, 128, 64, d_model=256, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=1024, decoder_ffn_dim=1024, vocab_size=4096, num_mel_bins=80,
        max_source_positions=64, max_target_positions=64, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    ),
    "vit": lambda: outside.pictures(
        "FlaxViTForImageClassification", "ViTConfig", 32, 64, classes=100, patch_size=8, **_ENCODER
    ),
    "clip": lambda: outside.contrastive(32, text=_TEXT, vision=_VISION, projection=256),
    "resnet": lambda: resnet(32, 64, 32, (2, 2, 2)),
    "unet": lambda: outside.linen_unet(16, 64, 32, 3),
    "mixer": lambda: mixer(32, 64, patch=8, hidden=256, blocks=3, tokens=128, channels=1024, classes=100),
    "haiku": lambda: haiku_transformer(16, 128, 2, 256, 4, 4096),
    "equinox": lambda: equinox_mlp(1024, 256, 1024, 4),
}  # fmt: skip
"""Name -> what builds its step and the shapes of its arguments."""
