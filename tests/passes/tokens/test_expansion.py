"""Steps in slices of the sequence compute what the whole step does, in phases that hold their share of the work."""

from __future__ import annotations

import types
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from alpa_lite.ir.graph import walk
from alpa_lite.passes import factors
from alpa_lite.passes.blockwise import FunctionWriter
from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.layers.layering import forward_ops
from alpa_lite.passes.tokens import beyond, expansion, states
from alpa_lite.passes.tokens.expansion import SlicedBlock
from alpa_lite.passes.tokens.opening import operations, replace_by_operations, unroll_scans
from alpa_lite.passes.tracing import tracing
from alpa_lite.passes.tracing.statics import Statics
from gallery.batches import normal
from gallery.batches import tokens as drawn
from gallery.steps import sgd
from tests.comparing import assert_close_in_norm, norm
from tests.marks import slow, slow_but

TOKENS, VOCAB, WIDE, HEADS = 12, 31, 16, 4
UNEVEN = (5, 4, 3)


def expanded(step: Any, args: Any, lengths: tuple[int, ...]) -> tuple[SlicedBlock, list[Any], list[Any]]:
    """A step (parameters, batch) in slices of dim 1 of its batch, and the results of the whole step and of that."""
    traced = tracing.trace(step, args, {}, batch_argnums=(1,))
    graph, rewriter = traced.graph, FunctionWriter(traced.graph, fold_empty=False)
    block = replace_by_operations(rewriter, graph.block)
    marked = forward_ops(types.SimpleNamespace(bodies=(graph.block,)), graph.values)  # type: ignore[arg-type]
    forward = frozenset(op.index for op in block.ops if rewriter.origin(op.index) in marked)
    rules = factors.rules_of(list(walk(block)), rewriter.values)
    constants = dict(zip(block.inputs[len(traced.arguments) :], graph.constants, strict=True))
    known = beyond.derive_knowledge(block.ops, rules, Statics(block.ops, rewriter.values, constants))
    batch = {v: 1 for v, a in zip(block.inputs, traced.arguments, strict=False) if a.role == "batch"}
    body = states.Body(block, rules, rewriter.values, known, forward)
    made = expansion.expand(rewriter, body, states.States(body, batch), lengths)
    sliced, leaves = rewriter.finish(made.block), jax.tree.leaves(args)
    return made, *([f(*leaves) for f in (jax.jit(lambda *x, g=g: evaluate(g, x)) for g in (graph, sliced))])


def products(made: SlicedBlock) -> list[int]:
    """Matrix products of each phase."""
    counts = Counter(made.phase[op.index] for op in made.block.ops if op.name == "dot_general")
    return [counts[phase] for phase in range(max(counts) + 1)]


def language_model(attend: Any, *, far: bool = False) -> tuple[Any, Any]:
    """Two layers around a function of queries, keys, values ([batch, tokens, heads, ...]) and tokens.

    If `far`, it is also given a number for each of eight distances and each head, which is learned.
    """
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def weight(*shape: int) -> jax.Array:
        return 0.3 * jax.random.normal(next(keys), shape)

    layers = [{"qkv": weight(WIDE, 3 * WIDE), "out": weight(WIDE, WIDE), "mlp": weight(WIDE, WIDE)} for _ in range(2)]
    params = {"embed": weight(VOCAB, WIDE), "layers": layers, "head": weight(WIDE, VOCAB)}
    params |= {"far": [weight(8, HEADS)]} if far else {}

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        for layer in params["layers"]:
            heads = (jax.nn.standardize(x) @ layer["qkv"]).reshape(*x.shape[:2], 3, HEADS, WIDE // HEADS)
            attended = attend(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], tokens, *params.get("far", ()))
            x = x + attended.reshape(x.shape) @ layer["out"]
            x = x + jnp.tanh(x @ layer["mlp"])
        losses = optax.softmax_cross_entropy_with_integer_labels((x @ params["head"])[:, :-1], tokens[:, 1:])
        return losses.mean()

    return sgd(loss), (params, drawn(1, VOCAB, 2, TOKENS))


def rotated(x: jax.Array) -> jax.Array:
    angle = jnp.arange(x.shape[1])[:, None] / 10.0 ** jnp.arange(x.shape[-1] // 2)
    cos, sin = jnp.cos(angle)[None, :, None], jnp.sin(angle)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def softmaxed(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any, low: float = -1e9) -> jax.Array:
    scores = jnp.where(mask, jnp.einsum("blhd,bmhd->bhlm", q, k), low)
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v)


CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


def segments(q, k, v, tokens):
    part = jnp.cumsum(tokens == 0, 1)
    return softmaxed(rotated(q), rotated(k), v, (CAUSAL & (part[:, :, None] == part[:, None, :]))[:, None])


def window(q, k, v, tokens):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0))


def grouped(q, k, v, tokens):
    return jax.nn.dot_product_attention(q, k[:, :, :2], v[:, :, :2], is_causal=True)


def additive(q, k, v, tokens):
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) + (1 - jnp.tril(jnp.ones((TOKENS, TOKENS)))) * -1e10
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v)


def dropout(q, k, v, tokens):
    scores = jnp.where(CAUSAL, jnp.einsum("blhd,bmhd->bhlm", q, k), -jnp.inf)
    keep = jax.random.bernoulli(jax.random.key(3), 0.8, scores.shape)
    return jnp.einsum("bhlm,bmhd->blhd", jnp.where(keep, jax.nn.softmax(scores) / 0.8, 0), v)


def keys_first(q, k, v, tokens):
    scores = jnp.where(CAUSAL.T, jnp.einsum("blhd,bmhd->bhml", q, k), -1e30)
    return jnp.einsum("bhml,bmhd->blhd", jax.nn.softmax(scores, axis=2), v)


def recomputed(q, k, v, tokens):
    return jax.checkpoint(lambda q, k, v: softmaxed(q, k, v, CAUSAL))(q, k, v)


def running(q, k, v, tokens):
    return jnp.cumsum(q * k, 1) * v / TOKENS


def recurrent(q, k, v, tokens):
    def cell(carry: jax.Array, x: Any) -> Any:
        carry = 0.9 * carry + x[0] * x[1]
        return carry, carry * x[2]

    rows = tuple(jnp.swapaxes(x, 0, 1) for x in (q, k, v))
    return jnp.swapaxes(jax.lax.scan(cell, jnp.zeros_like(q[:, 0]), rows)[1], 0, 1)


def shifted(q, k, v, tokens):
    before = jnp.pad(q[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)))
    return before * k + jnp.concatenate([jnp.zeros_like(v[:, :2]), v[:, :-2]], 1)


def learned(q, k, v, tokens, far):
    """A bias for each distance, whose gradient is made of a matrix of attention; no part of a head is not rotated."""
    q, k = (jnp.concatenate([rotated(x), x[..., WIDE // HEADS :]], -1) for x in (q, k))
    bias = jnp.moveaxis(far[jnp.clip(jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS), 0, 7)], -1, 0)
    scores = jnp.where(CAUSAL, jnp.einsum("blhd,bmhd->bhlm", q, k) + bias, -1e9)
    return jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v)


def both_ways(q, k, v, tokens):
    return softmaxed(q, k, v, True)


def reversed_mask(q, k, v, tokens):
    return softmaxed(q, k, v, CAUSAL.T)


def mean_over_tokens(q, k, v, tokens):
    return q * k.mean(1, keepdims=True) + v


FAST, READS_LATER = (grouped, mean_over_tokens), (both_ways, reversed_mask, mean_over_tokens)
CASES = (
    segments, window, grouped, additive, dropout, keys_first, recomputed, running, recurrent, shifted, learned,
    *READS_LATER,
)  # fmt: skip


@pytest.mark.parametrize(
    "attend",
    slow_but(FAST, CASES),
    ids=lambda f: f.__name__,
)
def test_slices_compute_what_the_whole_does(attend):
    """Every slice does the same and none waits for another, or what reads later tokens is named."""
    made, expected, actual = expanded(*language_model(attend, far=attend is learned), UNEVEN)
    assert_close_in_norm(actual, expected)
    forward, backward = products(made)[:3], products(made)[3:]
    if attend in READS_LATER:
        assert made.late and forward[0] < forward[2]  # the first slice cannot go on
        return
    assert not made.late and len(set(forward)) == 1
    if attend is not learned:
        assert len(set(backward)) == 1 and 2 * forward[0] <= backward[0] <= 3 * forward[0]


def state_space(tokens: jax.Array) -> tuple[Any, Any]:
    """A block as in Griffin or Mamba: a causal convolution of each channel, then a gated linear recurrence."""
    names = {"embed": (VOCAB, WIDE), "kernel": (3, 1, WIDE), "gate": (WIDE, WIDE), "out": (WIDE, VOCAB)}
    draws = zip(names, jax.random.split(jax.random.key(0), len(names)), strict=True)
    params = {name: 0.3 * jax.random.normal(key, names[name]) for name, key in draws}

    def join(left: Any, right: Any) -> Any:
        return left[0] * right[0], left[1] * right[0] + right[1]

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        x = x + jax.lax.conv_general_dilated(
            x, params["kernel"], (1,), [(4, 0)], rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=WIDE,
        )  # fmt: skip
        decay = jax.nn.sigmoid(x @ params["gate"])
        x = x + jax.lax.associative_scan(join, (decay, (1 - decay**2) * x), axis=1)[1]
        return optax.softmax_cross_entropy_with_integer_labels((x @ params["out"])[:, :-1], tokens[:, 1:]).mean()

    return sgd(loss), (params, tokens)


@pytest.mark.parametrize("lengths", [UNEVEN, *(slow(n) for n in ((1, 6, 9), (1,) * 13))], ids=str)
def test_state_space_blocks(lengths):
    made, expected, actual = expanded(*state_space(drawn(1, VOCAB, 2, sum(lengths))), lengths)
    assert_close_in_norm(actual, expected)
    assert not made.late
    forward, backward = products(made)[: len(lengths)], products(made)[len(lengths) :]
    assert len(set(forward[:-1])) == len(set(backward[1:])) == 1  # no slice waits; the last token has no loss
    convolutions = Counter(made.phase[op.index] for op in made.block.ops if op.name == "conv_general_dilated")
    assert set(convolutions.values()) <= {1, 2} and len(convolutions) >= 2 * len(lengths) - 1


class Linen(nn.Module):
    """A mask that is made once and passed to every layer; learned positions."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, WIDE)(tokens) + nn.Embed(TOKENS + 3, WIDE)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(WIDE)(nn.gelu(nn.Dense(2 * WIDE)(nn.LayerNorm()(x))))
        return nn.Dense(VOCAB)(x)


@pytest.mark.slow
def test_linen():
    model, tokens = Linen(), drawn(1, VOCAB, 2, TOKENS)
    params = model.init(jax.random.key(0), tokens)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens)
        assert isinstance(logits, jax.Array)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    made, expected, actual = expanded(sgd(loss), (params, tokens), (6, 6))
    assert_close_in_norm(actual, expected)
    assert not made.late


# -- loops over layers ------------------------------------------------------------------------------------------------

LAYERS = 3


def layers(stacked: jax.Array, x: jax.Array) -> Any:
    """A gradient through a scan over layers, which another scan reads backwards; a stack that is read whole."""

    def loss(stacked: jax.Array) -> Any:
        last, every = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum(1)), x, stacked)
        return (last**2).sum() + (every * jnp.arange(1.0, LAYERS + 1)[:, None]).sum(), every

    (value, every), gradient = jax.value_and_grad(loss, has_aux=True)(stacked)
    return gradient, value, every


def test_loops_written_out_compute_the_same():
    """A loop, and the one that reads its residuals."""
    arguments = [normal(0, LAYERS, 4, 4), normal(1, 2, 4)]
    graph = tracing.trace(layers, tuple(arguments), {}, batch_argnums=(1,)).graph
    rewriter = FunctionWriter(graph)
    first, second = (op for op in graph.block.ops if op.name == "scan")
    assert (first.params["reverse"], second.params["reverse"]) == (False, True)
    after, _ = unroll_scans(rewriter, graph.block, {first.index})
    counts = Counter(op.name for op in after.ops)
    assert counts["scan"] == 0
    assert counts["dot_general"] == 3 * LAYERS
    assert counts["concatenate"] == 2  # the gradient and `every`: residuals are never stacked
    for a, b in zip(evaluate(graph, arguments), evaluate(rewriter.finish(after), arguments), strict=True):
        assert norm(a - b) <= 1e-5 * norm(a)


@pytest.mark.parametrize("length", [2, 7])
def test_operations_are_counted_before_they_are_written(length):
    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]

    graph = tracing.trace(step, (jnp.ones((length, 4, 4)), jnp.ones((2, 4))), {}, batch_argnums=(1,)).graph
    (scan,) = (op for op in graph.block.ops if op.name == "scan")
    rewriter = FunctionWriter(graph)
    block, rows = unroll_scans(rewriter, graph.block, {scan.index})
    assert operations(scan) == len(block.ops) == 4 * length
    assert {rewriter.origin(op.index) for op in block.ops} == {scan.index}
    assert set(rows.values()) == {scan.operands[-1]}
