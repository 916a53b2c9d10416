"""Train steps of linen, Haiku and Equinox with other habits than one loss in a `TrainState`.

Lion and other optimizers, gradients clipped by their global norm, weights averaged, packed segments, experts with a
capacity, graphs, loops over time.
"""

from __future__ import annotations

import importlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from gallery.batches import f32, shape
from gallery.registry import Built, published_fields
from gallery.steps import (
    CLIPPED,
    cross_entropy,
    fitting_step,
    habits,
    language,
    module,
    updated,
    weighted_cross_entropy,
)


@module
def Experts(self, x, *, experts, wide, capacity=1.25):
    """The two experts of each token that a softmax prefers, as far as their capacity allows.

    [batch, length, hidden] to the same.
    """
    batch, length, hidden = x.shape
    slots = int(2 * capacity * length / experts)
    weights, numbers = jax.lax.top_k(jax.nn.softmax(nn.Dense(experts)(x)), 2)
    chosen = jax.nn.one_hot(numbers, experts, dtype=jnp.int32)
    place = jnp.cumsum(chosen.reshape(batch, -1, experts), 1).reshape(chosen.shape) - 1
    taken = (chosen * (place < slots))[..., None] * jax.nn.one_hot(place, slots, dtype=jnp.int32)
    combine = jnp.einsum("bsk,bskec->bsec", weights, taken.astype(weights.dtype)).astype(x.dtype)
    given = jnp.einsum("bsec,bsd->becd", taken.sum(2).astype(x.dtype), x)
    normal = nn.initializers.lecun_normal()
    up = self.param("up", normal, (experts, hidden, wide)).astype(x.dtype)
    down = self.param("down", normal, (experts, wide, hidden)).astype(x.dtype)
    made = jnp.einsum("becw,ewd->becd", nn.gelu(jnp.einsum("becd,edw->becw", given, up)), down)
    return jnp.einsum("becd,bsec->bsd", made, combine)


@module
def ExpertsBlock(self, x, mask, *, experts, heads, wide):
    """A block of a decoder, with experts or without: [batch, length, hidden] to the same."""
    y = nn.RMSNorm(dtype=x.dtype)(x)
    x = x + nn.MultiHeadDotProductAttention(heads, dtype=x.dtype)(y, y, mask=mask)
    y = nn.RMSNorm(dtype=x.dtype)(x)
    if experts:
        return x + Experts(experts, wide)(y)
    return x + nn.Dense(x.shape[-1], dtype=x.dtype)(nn.gelu(nn.Dense(wide, dtype=x.dtype)(y)))


@module
def ExpertsModel(self, ids, segments, *, layers, hidden, vocabulary=32000):
    """A decoder for packed sequences, with experts in every other block; products are saved.

    Tokens and the numbers of their segments to logits.
    """
    x = nn.Embed(vocabulary, hidden, dtype=jnp.bfloat16)(ids)
    own = nn.make_attention_mask(segments, segments, jnp.equal)
    mask = nn.combine_masks(nn.make_causal_mask(ids), own)
    saved = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    for number in range(layers):
        block = nn.remat(ExpertsBlock, policy=saved)
        x = block(32 * (number % 2), hidden // 128, 4 * hidden)(x, mask)
    return nn.Dense(vocabulary, dtype=jnp.bfloat16)(nn.RMSNorm(dtype=jnp.bfloat16)(x))


def packed(apply: Any, ids: Any, segments: Any) -> Any:
    """The loss of the next tokens of packed sequences."""
    return weighted_cross_entropy(apply(ids, segments)[:, :-1], ids[:, 1:], segments[:, 1:] > 0)


@module
def Diffusing(self, x, condition, *, heads):
    """A block of a diffusion transformer: norms are scaled, shifted and gated by a condition.

    [batch, length, hidden] to the same.
    """
    hidden, dtype = x.shape[-1], jnp.bfloat16
    changes = nn.Dense(6 * hidden, dtype=dtype)(nn.silu(condition))[:, None]
    shift, scale, gate, shift_up, scale_up, gate_up = jnp.split(changes, 6, -1)
    norm = nn.LayerNorm(use_bias=False, use_scale=False, dtype=dtype)
    y = norm(x) * (1 + scale) + shift
    x = x + gate * nn.MultiHeadDotProductAttention(heads, dtype=dtype)(y, y)
    y = nn.gelu(nn.Dense(4 * hidden, dtype=dtype)(norm(x) * (1 + scale_up) + shift_up))
    return x + gate_up * nn.Dense(hidden, dtype=dtype)(y)


@module
def Diffusion(self, x, time, label, *, layers, hidden, heads):
    """A diffusion transformer on latents, each block computed again in the backward pass.

    [batch, height, width, channels] to the same.
    """
    batch, height, width, channels = x.shape
    angle = time[:, None] * jnp.exp(-9.2 * jnp.arange(128) / 128)
    waves = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)
    condition = nn.Dense(hidden)(nn.silu(nn.Dense(hidden)(waves))) + nn.Embed(1001, hidden)(label)
    y = nn.Conv(hidden, (2, 2), (2, 2), dtype=jnp.bfloat16)(x).reshape(batch, -1, hidden)
    y = y + self.param("places", nn.initializers.normal(0.02), y.shape[1:]).astype(y.dtype)
    for _ in range(layers):
        y = nn.remat(Diffusing)(heads)(y, condition)
    y = nn.Dense(4 * channels)(y).reshape(batch, height // 2, width // 2, 2, 2, channels)
    return y.transpose(0, 1, 3, 2, 4, 5).reshape(x.shape)


def noise_loss(apply: Any, clean: Any, labels: Any, key: Any) -> Any:
    """The loss of predicting noise."""
    first, second, third = jax.random.split(key, 3)
    time = jax.random.randint(first, clean.shape[:1], 0, 1000)
    noise = jax.random.normal(second, clean.shape)
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))[time][:, None, None, None]
    labels = jnp.where(jax.random.bernoulli(third, 0.1, labels.shape), 1000, labels)
    noisy = jnp.sqrt(kept) * clean + jnp.sqrt(1 - kept) * noise
    return jnp.mean((apply(noisy, time.astype(jnp.float32), labels) - noise) ** 2)


def dense(x: Any, hidden: int) -> Any:
    """Two layers and a norm."""
    return nn.LayerNorm()(nn.Dense(hidden)(nn.relu(nn.Dense(hidden)(x))))


@module
def Round(self, nodes, edges, senders, receivers, *, hidden):
    """A round of messages along the edges of a graph: Nodes and edges to the same."""
    edges = edges + dense(jnp.concatenate([edges, nodes[senders], nodes[receivers]], -1), hidden)
    summed = jax.ops.segment_sum(edges, receivers, num_segments=nodes.shape[0])
    return nodes + dense(jnp.concatenate([nodes, summed], -1), hidden), edges


@module
def Graph(self, nodes, edges, senders, receivers, *, rounds, hidden):
    """A graph net of many rounds, each computed again in the backward pass.

    Features of nodes and edges to three numbers of each node.
    """
    nodes, edges = nn.Dense(hidden)(nodes), nn.Dense(hidden)(edges)
    for _ in range(rounds):
        nodes, edges = nn.remat(Round)(hidden)(nodes, edges, senders, receivers)
    return nn.Dense(3)(nodes)


def graph(nodes: int, edges: int, rounds: int, hidden: int) -> Built:
    """Regression on the nodes of one large graph."""
    given = f32(nodes, 16), f32(edges, 4), shape(edges), shape(edges)

    def loss(apply: Any, given: Any, wanted: Any) -> Any:
        return jnp.mean((apply(*given) - wanted) ** 2)

    optimizer = optax.chain(CLIPPED, optax.adam(1e-4))
    return fitting_step(Graph(rounds, hidden), loss, given, f32(nodes, 3), init=given, optimizer=optimizer)


def lstm(scan: bool, layers: int = 4, hidden: int = 1024, batch: int = 256, length: int = 128) -> Built:
    """Stacked LSTM layers with biases; time is a scan in both forms."""
    sizes = {"own": (hidden, 4 * hidden), "below": (hidden, 4 * hidden), "bias": (4 * hidden,)}
    lead = (layers,) if scan else ()
    one = {name: f32(*lead, *dims) for name, dims in sizes.items()}
    params = one if scan else [one] * layers

    def layer(x: Any, weights: Any) -> Any:
        def cell(carry: Any, x: Any) -> Any:
            h, c = carry
            gates = h @ weights["own"] + x @ weights["below"] + weights["bias"]
            i, f, g, o = jnp.split(gates, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((x.shape[1], hidden))
        return jax.lax.scan(cell, (start, start), x)[1], None

    def loss(params: Any, x: Any, y: Any) -> Any:
        if scan:
            x, _ = jax.lax.scan(layer, x, params)
        else:
            for weights in params:
                x, _ = layer(x, weights)
        return jnp.mean((x[-1] - y) ** 2)

    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, jnp.swapaxes(x, 0, 1), y)
        return updated(params, grads, 1e-3), value

    return step, (params, f32(batch, length, hidden), f32(batch, hidden))


# --- Haiku and Equinox ----------------------------------------------------------------------------------------------


def recurrent(batch: int, length: int, width: int, vocabulary: int = 33000) -> Built:
    """A language model of three LSTMs in Haiku, a loop over time."""
    hk = importlib.import_module("haiku")

    def forward(ids: Any) -> Any:
        core = hk.DeepRNN([hk.LSTM(width), jax.nn.relu, hk.LSTM(width), jax.nn.relu, hk.LSTM(width)])
        x = hk.Embed(vocabulary, width // 4)(ids.T)
        return hk.Linear(vocabulary)(hk.dynamic_unroll(core, x, core.initial_state(ids.shape[0]))[0]).swapaxes(0, 1)

    model = hk.without_apply_rng(hk.transform(forward))
    return language(model, batch, length, optax.chain(CLIPPED, optax.adam(1e-3)))


def state_space(batch: int, length: int, layers: int, hidden: int, states: int = 16, vocabulary: int = 50280) -> Built:
    """A selective state-space model in Equinox: an associative scan over time in a scan over layers."""
    eqx = importlib.import_module("equinox")
    wide, rank = 2 * hidden, hidden // 16

    def layer(key: Any) -> dict[str, Any]:
        keys = jax.random.split(key, 5)
        return {
            "norm": eqx.nn.RMSNorm(hidden),
            "enter": eqx.nn.Linear(hidden, 2 * wide, use_bias=False, key=keys[0]),
            "near": eqx.nn.Conv1d(wide, wide, 4, groups=wide, padding=[(3, 0)], key=keys[1]),
            "select": eqx.nn.Linear(wide, rank + 2 * states, use_bias=False, key=keys[2]),
            "time": eqx.nn.Linear(rank, wide, key=keys[3]),
            "decay": jnp.zeros((wide, states)),
            "leave": eqx.nn.Linear(wide, hidden, use_bias=False, key=keys[4]),
        }

    def applied(own: Any, x: Any) -> Any:
        u, gate = jnp.split(jax.vmap(own["enter"])(jax.vmap(own["norm"])(x)), 2, -1)
        u = jax.nn.silu(own["near"](u.T).T)
        time, into, out = jnp.split(jax.vmap(own["select"])(u), [rank, rank + states], -1)
        time = jax.nn.softplus(jax.vmap(own["time"])(time))
        kept = jnp.exp(-time[..., None] * jnp.exp(own["decay"]))
        added = (time * u)[..., None] * into[:, None, :]
        _, held = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (kept, added))
        return x + jax.vmap(own["leave"])(jnp.einsum("len,ln->le", held, out) * jax.nn.silu(gate))

    def make(key: Any) -> Any:
        first, second = jax.random.split(key)
        return eqx.nn.Embedding(vocabulary, hidden, key=first), eqx.filter_vmap(layer)(jax.random.split(second, layers))

    model = eqx.filter_eval_shape(make, jax.random.key(0))
    params, rest = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(params: Any, ids: Any) -> Any:
        embedding, stacked = eqx.combine(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params), rest)
        arrays, other = eqx.partition(stacked, eqx.is_array)

        def logits(ids: Any) -> Any:
            block = jax.checkpoint(lambda x, own: (applied(eqx.combine(own, other), x), None))
            return jax.lax.scan(block, jax.vmap(embedding)(ids), arrays)[0] @ embedding.weight.T

        return cross_entropy(jax.vmap(logits)(ids)[:, :-1], ids[:, 1:])

    return habits(loss, params, optax.chain(CLIPPED, optax.lion(1e-4)), shape(batch, length))


# --- the cases ------------------------------------------------------------------------------------------------------

PLANNED: dict[str, dict[str, Any]] = {
    "experts-14b": published_fields(
        "h100 x 4", fitting_step, ExpertsModel(24, 2048), packed, *[shape(256, 2048)] * 2, init=[shape(1, 2048)] * 2,
        optimizer=optax.chain(CLIPPED, optax.adamw(1e-4)),
    ),
    "diffusion-xl": published_fields(
        "v5p:4x4x4", fitting_step, Diffusion(28, 1152, 16), noise_loss, f32(2048, 64, 64, 4), shape(2048),
        init=(f32(1, 64, 64, 4), f32(1), shape(1)), optimizer=optax.adamw(1e-4), rng=True, average=0.9999,
    ),
    "graph-net": published_fields("a100", graph, 131072, 1048576, 16, 512),
    "haiku-lstm": published_fields("a100", recurrent, 256, 256, 4096),
    "equinox-mamba": published_fields("h100", state_space, 64, 2048, 24, 1536),
}  # fmt: skip
