"""A GPT whose every second feed-forward is a mixture of experts, as in GShard (Lepikhin et al., 2021, section 2.2).

Tokens are taken in groups of N. Each token goes to its `top_k` experts by gate probability; an expert takes at most
C = ⌈capacity · top_k · N / experts⌉ tokens of a group, first choices before second ones, and drops the rest. Dispatch
and combination are products with a (group, token, expert, slot) tensor, so experts are a dim like any other:

    inputs[e, g, c]  = Σₙ dispatch[g, n, e, c] · x[g, n]
    outputs[g, n]    = Σₑ,c combine[g, n, e, c] · FeedForwardₑ(inputs[e, g, c])
    auxiliary loss   = experts · Σₑ (share of first choices)ₑ · (mean gate)ₑ, a mean over groups

Sizes "380M" to "70B" are those of the Alpa paper (Zheng et al., 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .spec import ModelSpec
from .transformer import Block, Decoder, TransformerConfig, fields, make_attention, make_norm


@dataclass(frozen=True)
class MoEConfig(TransformerConfig):
    """The shape of a mixture of experts; `remat` is by pairs of layers, and gates are float32.

    Attributes:
      vocab, seq, hidden, layers, heads: its sizes; `layers` must be even.
      ffn_factor: the inner size of a feed-forward, and of an expert, over `hidden`.
      experts, top_k: experts in a layer, and how many each token goes to.
      group: tokens in a group; a smaller batch is one group.
      capacity: slots over those needed if all experts were equally liked.
      balance: weight of the auxiliary loss.
    """

    vocab: int = 32000
    seq: int = 1024
    layers: int = 8
    heads: int = 16
    ffn_factor: int = 8
    experts: int = 8
    top_k: int = 2
    group: int = 2048
    capacity: float = 1.0
    balance: float = 0.01


class Experts(nnx.Module):
    """The gate and the experts' feed-forwards."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        hidden, inner, experts = config.hidden, config.inner, config.experts
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.config = config
        self.gate = nnx.Linear(hidden, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (experts, hidden, inner)))
        self.down = nnx.Param(init(rngs.params(), (experts, inner, hidden)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(batch, sequence, hidden) to the same, and the auxiliary loss."""
        config = self.config
        tokens = x.shape[0] * x.shape[1]
        group = min(config.group, tokens)
        if tokens % group:
            raise ValueError(f"{group=} does not divide the batch's {tokens} tokens; choose another batch or group")
        grouped = x.reshape(tokens // group, group, config.hidden)
        gates = jax.nn.softmax(self.gate(grouped.astype(jnp.float32)), axis=-1)
        slots = math.ceil(config.capacity * config.top_k * group / config.experts)
        combine, auxiliary = route(gates, config.top_k, slots)
        dispatch = (combine > 0).astype(config.dtype)
        inputs = jnp.einsum("gnec,gnm->egcm", dispatch, grouped)
        inner = nnx.gelu(jnp.einsum("egcm,emh->egch", inputs, self.up[...].astype(config.dtype)))
        outputs = jnp.einsum("egch,ehm->egcm", inner, self.down[...].astype(config.dtype))
        y = jnp.einsum("gnec,egcm->gnm", combine.astype(config.dtype), outputs)
        return y.reshape(x.shape), auxiliary


def route(gates: jax.Array, top_k: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """Gives each token a slot at each of its experts.

    Args:
      gates: (group, token, expert) float32, positive, each token's summing to one.
      top_k: experts a token.
      slots: tokens an expert takes of a group.

    Returns:
      (group, token, expert, slot) float32: the weight of the token's output there, zero for tokens that are elsewhere;
      and the auxiliary loss.
    """
    experts = gates.shape[-1]
    weights, choices = jax.lax.top_k(gates, top_k)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    chosen = jax.nn.one_hot(choices, experts)  # group, token, choice, expert
    totals = jnp.sum(chosen, axis=1)  # group, choice, expert
    before = jnp.cumsum(chosen, axis=1) - chosen + (jnp.cumsum(totals, axis=1) - totals)[:, None]
    slot = jnp.sum(before * chosen, axis=-1).astype(jnp.int32)  # one_hot is zero for a slot that does not exist
    combine = jnp.einsum("gnk,gnke,gnkc->gnec", weights, chosen, jax.nn.one_hot(slot, slots))
    first, mean = jnp.mean(chosen[:, :, 0], axis=1), jnp.mean(gates, axis=1)
    return combine, experts * jnp.mean(jnp.sum(first * mean, axis=-1))


class Pair(nnx.Module):
    """Two layers: one with a feed-forward, one with experts."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        self.dense = Block(config, rngs=rngs)
        self.attention_norm = make_norm(config, rngs)
        self.attention = make_attention(config, rngs)
        self.experts_norm = make_norm(config, rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """(batch, sequence, hidden) and the sum of auxiliary losses to the same."""
        x, auxiliary = self.dense(carry[0]), carry[1]
        x = x + self.attention(self.attention_norm(x))
        y, more = self.experts(self.experts_norm(x))
        return x + y, auxiliary + more


class MoE(Decoder):
    """The whole decoder."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        """Draws the parameters from `rngs`."""
        if config.layers % 2:
            raise ValueError(f"layers={config.layers} must be even: every second layer has experts")
        super().__init__(config, rngs=rngs, layer=Pair, length=config.layers // 2)

    def __call__(self, tokens: jax.Array) -> Any:
        """Tokens (batch, sequence) int32 to float32 logits (batch, sequence, vocab), and the mean auxiliary loss."""
        x, auxiliary = self.blocks((self.embed_tokens(tokens), jnp.zeros(())))
        return self.logits(x), auxiliary / self.blocks.length


def loss_fn(model: MoE, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean negative log-likelihood of the targets, in nats a token, plus the weighted auxiliary loss."""
    logits, auxiliary = model(batch["inputs"])
    likelihood = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
    return likelihood + model.config.balance * auxiliary


SIZES = {
    "tiny": MoEConfig(
        vocab=256, seq=64, hidden=64, layers=2, heads=8, ffn_factor=2, experts=8, group=64, dtype=jnp.float32
    ),
    "380M": MoEConfig(),
    "690M": MoEConfig(experts=16),
    "1.3B": MoEConfig(layers=16, experts=16),
    "2.4B": MoEConfig(hidden=1024, layers=16, experts=16),
    "10B": MoEConfig(hidden=1536, layers=16, experts=32),
    "27B": MoEConfig(hidden=2048, layers=16, experts=48),
    "70B": MoEConfig(hidden=2048, layers=32, experts=64),
}

SPEC = ModelSpec("moe", SIZES, MoE, loss_fn, fields)
