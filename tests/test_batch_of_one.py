"""Pipelines of a batch of one example, with a dim of examples or without, in slices of the sequence.

The models of Hugging Face need the extra `outside`, without which their tests are skipped.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Link
from alpa_lite.methods import Pipeline
from tests import zoo_linen
from tests.comparing import compare
from tests.test_sliced_models import DECODERS, descending, filled, next_token
from tests.test_token_pipelines import TOKENS, VOCAB, WIDE, language_model
from tests.test_token_slicing import cluster


def without_examples(one_hot: bool = False) -> tuple[Any, Any]:
    """A step on one sequence that has no dim of examples."""
    _, (params, tokens) = language_model()

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        embed = params["embed"]
        x = jax.nn.one_hot(tokens, VOCAB) @ embed if one_hot else jnp.take(embed, tokens, axis=0)
        for layer in params["layers"]:
            q, k, v = jnp.split((jax.nn.standardize(x) @ layer["qkv"]).reshape(len(x), 3, 4, WIDE // 4), 3, 1)
            scores = jnp.einsum("qhd,khd->hqk", q[:, 0], k[:, 0])
            weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9))
            x = x + jnp.tanh(jnp.einsum("hqk,khd->qhd", weights, v[:, 0]).reshape(x.shape) @ layer["out"])
        losses = optax.softmax_cross_entropy_with_integer_labels((x @ params["head"])[:-1], tokens[1:])
        return losses.mean()

    return descending(loss), (params, tokens[0])


def one_example(made: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same step on the first example."""
    step, (*state, batch) = made
    return step, (*state, jax.tree.map(lambda x: x[:1], batch))


def hugging_face(name: str) -> tuple[Any, Any]:
    config, sizes = DECODERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        suffix = "Model" if name.endswith("Head") else ""
        made = getattr(transformers, f"{config}Config")(**sizes)
        model = getattr(transformers, f"Flax{name}{suffix}")(made, _do_init=False)
        params = filled(model.params_shape_tree)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return next_token(model(tokens, params=params).logits, tokens)

    return descending(loss), (params, jax.random.randint(jax.random.key(1), (1, TOKENS), 1, VOCAB))


def piped(step: Any, *lengths: int) -> Any:
    here = alpa_lite.Cluster.local(jax.devices()[:2])
    return alpa_lite.parallelize(step, method=Pipeline(num_stages=2, token_slices=lengths), cluster=here)


def far_apart() -> alpa_lite.Cluster:
    """Two slow devices that a slower network joins."""
    link = Link(bandwidth=1e3, latency=1e-3)
    return replace(cluster(2), peak_flops={"f32": 1e5}, nodes=2, devices_per_node=1, network_link=link)


@pytest.mark.slow
def test_auto_chooses_slices():
    """One example, which no mesh divides without sending more, by a link that is slow, than it computes."""
    step, (params, _) = language_model(layers=4)
    tokens = jax.random.randint(jax.random.key(1), (1, 64), 0, VOCAB)
    plan = alpa_lite.make_plan(step, params, tokens, cluster=far_apart(), verify="off", effort="thorough")
    assert len(plan.stages) == 2 and sum(plan.division.token_slices) == 64
    (mesh,) = [row for row in plan.comparisons if row.name == "one mesh"]
    assert mesh.step_seconds is not None and plan.step_seconds < 0.8 * mesh.step_seconds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "lengths"),
    [
        pytest.param(lambda: models.get("gpt").build("tiny", 1), (40, 24), marks=pytest.mark.thorough),
        (lambda: one_example(zoo_linen.gpt(layers=2)), (9, 7)),
        (without_examples, (7, 5)),
        (lambda: without_examples(one_hot=True), (5, 7)),
        (lambda: hugging_face("GPT2LMHead"), (7, 5)),
        (lambda: hugging_face("LlamaForCausalLM"), (7, 5)),
    ],
    ids=["own", "linen", "without_examples", "one_hot", "gpt2", "llama"],
)
def test_models(make: Any, lengths: tuple[int, ...]):
    step, args = make()
    sliced = piped(step, *lengths)
    compare(sliced(*args), jax.jit(step)(*args))
    assert sliced.plan(*args).num_microbatches == 1
