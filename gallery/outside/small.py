"""Small train steps of models that nobody here wrote, whose bytes and memory are compared with a compiler's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from gallery.batches import f32, shape
from gallery.outside.deep import classification_step
from gallery.outside.tutorials import UNet, regression
from gallery.registry import Built
from gallery.steps import apply_optimizer, initial_state, language, module, supervised_step


@module
def Mixer(self, x, *, patch, hidden, blocks, tokens, channels, classes):
    """MLP-Mixer (Tolstikhin et al. 2021) as its authors write it in linen: [batch, height, width, 3] to logits."""
    x = nn.Conv(hidden, (patch, patch), strides=(patch, patch))(x)
    x = x.reshape(x.shape[0], -1, hidden)
    for _ in range(blocks):
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        y = nn.Dense(y.shape[-1])(nn.gelu(nn.Dense(tokens)(y)))
        x = x + jnp.swapaxes(y, 1, 2)
        y = nn.LayerNorm()(x)
        x = x + nn.Dense(hidden)(nn.gelu(nn.Dense(channels)(y)))
    return nn.Dense(classes)(nn.LayerNorm()(x).mean(1))


@module
def Residual(self, x, *, width, stride):
    """A block of two convolutions with batch norms: [batch, height, width, channels]."""
    norm = lambda: nn.BatchNorm(use_running_average=False, momentum=0.9)  # noqa: E731
    y = nn.relu(norm()(nn.Conv(width, (3, 3), stride, use_bias=False)(x)))
    y = norm()(nn.Conv(width, (3, 3), use_bias=False)(y))
    if x.shape != y.shape:
        x = norm()(nn.Conv(width, (1, 1), stride, use_bias=False)(x))
    return nn.relu(x + y)


@module
def ResNet(self, x, *, width, stages):
    """The ResNet of Flax's ImageNet example, with basic blocks: [batch, height, width, 3] to logits."""
    x = nn.Conv(width, (7, 7), (2, 2), use_bias=False)(x)
    x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9)(x))
    x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
    for level, count in enumerate(stages):
        for i in range(count):
            x = Residual(width * 2**level, 2 if level and not i else 1)(x)
    return nn.Dense(100)(x.mean((1, 2)))


def haiku_decoder(
    length: int, layers: int, hidden: int, heads: int, vocabulary: int, inner: int, dropout: bool = False
) -> Any:
    """The transformer of Haiku's examples; with dropout it is that of texts which are padded with zeros."""
    import haiku as hk

    def forward(ids: Any) -> Any:
        init = hk.initializers.VarianceScaling(2 / layers)
        x = hk.Embed(vocabulary, hidden)(ids) + hk.get_parameter("places", [length, hidden], init=init)
        real = (ids != 0)[:, None, None] if dropout else None
        mask = jnp.tril(jnp.ones((1, 1, length, length)))
        mask = mask if real is None else real & (mask == 1)
        for _ in range(layers):
            y = hk.LayerNorm(-1, True, True)(x)
            key = hk.next_rng_key() if dropout else None
            y = hk.MultiHeadAttention(heads, hidden // heads, w_init=init)(y, y, y, mask=mask)
            x = x + (y if key is None else hk.dropout(key, 0.1, y))
            y = hk.Linear(inner, w_init=init)(hk.LayerNorm(-1, True, True)(x))
            x = x + hk.Linear(hidden, w_init=init)(jax.nn.gelu(y))
        return hk.Linear(vocabulary)(hk.LayerNorm(-1, True, True)(x))

    return hk.transform(forward) if dropout else hk.without_apply_rng(hk.transform(forward))


def equinox_mlp(batch: int, features: int, width: int, depth: int) -> Built:
    """The MLP of Equinox under `vmap`, with Adam."""
    import equinox as eqx

    model = eqx.filter_eval_shape(eqx.nn.MLP, features, features, width, depth, key=jax.random.key(0))
    params, static = eqx.partition(model, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    optimizer = optax.adamw(1e-4)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

    def step(state: Any, x: Any, y: Any) -> Any:
        return apply_optimizer(lambda params: loss(params, x, y), state, optimizer)

    return step, (initial_state(params, optimizer), *[f32(batch, features)] * 2)


SMALL: Mapping[str, Callable[[], Built]] = {
    "resnet": lambda: classification_step(ResNet(32, (2, 2, 2)), 32, 64, optax.sgd(0.1, momentum=0.9)),
    "unet": lambda: regression(UNet(32, 3), 16, 64, denoising=True),
    "mixer": lambda: supervised_step(Mixer(8, 256, 3, 128, 1024, 100), f32(32, 64, 64, 3), shape(32)),
    "haiku": lambda: language(haiku_decoder(128, 2, 256, 4, 4096, 1024), 16, 128),
    "equinox": lambda: equinox_mlp(1024, 256, 1024, 4),
}
"""Name -> what builds its step and the shapes of its arguments."""
