"""Every model: it trains, its published sizes have the published parameters, and shapes cost nothing."""

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from alpa_lite import models
from alpa_lite.models import gpt, llama, moe, text, transformer
from tests.marks import slow, slow_but, slow_one_in

names = pytest.mark.parametrize("name", models.MODELS)

# Parameters as published, and the last digit given: the papers name sizes by rounding, or by cutting (1.35e9 is 1.3B).
PUBLISHED = {
    "gpt": {"small": (124e6, 1e6), "350M": (350e6, 10e6), "760M": (760e6, 10e6), "1.3B": (1.3e9, 0.1e9),
        "2.6B": (2.6e9, 0.1e9), "6.7B": (6.7e9, 0.1e9), "15B": (15e9, 1e9), "39B": (39e9, 1e9),
        "175B": (175e9, 1e9)},
    "llama": {"8B": (8_030_261_248, 0), "70B": (70_553_706_496, 0)},
    "bert": {"base": (109_514_298, 0), "large": (335_174_458, 0)},
    "moe": {"380M": (380e6, 10e6), "690M": (690e6, 10e6), "1.3B": (1.3e9, 0.1e9), "2.4B": (2.4e9, 0.1e9),
        "10B": (10e9, 1e9), "27B": (27e9, 1e9), "70B": (70e9, 1e9)},
    "wide_resnet": {"250M": (250e6, 10e6), "500M": (500e6, 10e6), "1B": (1e9, 0.1e9), "2B": (2e9, 0.1e9),
        "4B": (4e9, 0.1e9), "6.8B": (6.8e9, 0.1e9), "13B": (13e9, 1e9)},
    "vit": {"B/16": (86_567_656, 0), "L/16": (304_326_632, 0), "H/14": (632_045_800, 0)},
    "unet": {"cifar10": (35.7e6, 0.1e6), "lsun": (114e6, 1e6)},
}  # fmt: skip
FAST = [("gpt", "small"), ("llama", "8B"), ("bert", "base"), ("moe", "380M"), ("vit", "B/16"), ("unet", "cifar10")]


@pytest.mark.parametrize(
    ("name", "size"),
    slow_one_in(3, slow_but(FAST, [(name, size) for name, sizes in PUBLISHED.items() for size in sizes])),
)
def test_parameters_are_the_published_number(name: str, size: str) -> None:
    published, digit = PUBLISHED[name][size]
    assert abs(models.get(name).parameters(size) - published) <= digit


def test_the_largest_model_is_described_without_memory() -> None:
    _, (state, batch) = models.get("gpt").abstract("175B", 1024, scan=True)
    assert sum(leaf.size for leaf in jax.tree.leaves(state["params"])) == pytest.approx(174.6e9, rel=1e-3)
    leaves = jax.tree.leaves((state, batch))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    counts = {leaf.dtype for leaf in jax.tree.leaves(state["opt_state"])}
    assert counts == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}  # float32 moments, and the count of steps
    assert batch["inputs"].shape == (1024, 2048)


QUICK = "mlp", "gpt"


@pytest.mark.parametrize("name", slow_one_in(2, slow_but(QUICK, models.MODELS)))
def test_loss_falls(name: str) -> None:
    # One layer compiles in half of the time.
    layers: dict[str, Any] = {"layers": 1} if name in ("gpt", "llama", "bert", "vit") else {}
    step, (state, batch) = models.get(name).build("tiny", 8, optimizer=optax.adamw(3e-3), **layers)
    step, losses = jax.jit(step), []
    for _ in range(4):
        new, metrics = step(state, batch)
        assert jax.tree.structure(new) == jax.tree.structure(state)
        state = new
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.95 * losses[0], losses


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt", {"tied": False}),
        ("gpt", {"scan": True, "dropout": 0.1}),
        *[slow(name, {}) for name in models.MODELS],
    ],
    ids=str,
)
def test_abstract_and_concrete_agree(name: str, options: dict[str, Any]) -> None:
    spec = models.get(name)
    abstract, concrete = spec.abstract("tiny", 8, **options)[1], spec.build("tiny", 8, **options)[1]
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(concrete), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_nnx_and_functional_steps_agree() -> None:
    spec = models.get("mlp")
    step, (state, batch) = spec.build("tiny", 8, seed=3, optimizer=optax.adam(1e-2))
    nnx_step, (model, optimizer, _) = spec.build_nnx("tiny", 8, seed=3, optimizer=optax.adam(1e-2))
    step, nnx_step = jax.jit(step), nnx.jit(nnx_step)
    for _ in range(3):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(nnx_step(model, optimizer, batch), metrics["loss"], rtol=1e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        state["params"],
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"scan": True}, {"remat": True}, {"scan": True, "remat": True}], ids=str)
def test_scanned_and_recomputed_layers_compute_the_same(options: dict[str, Any]) -> None:
    spec = models.get("gpt")
    step, (state, batch) = spec.build("tiny", 8, optimizer="sgd")
    other, (other_state, _) = spec.build("tiny", 8, optimizer="sgd", **options)
    params = state["params"]
    if options.get("scan"):
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *params["blocks"]["layers"].values())
        params = {**params, "blocks": {"layers": stacked}}
    other_state["params"] = params
    expected, actual = jax.jit(step)(state, batch), jax.jit(other)(other_state, batch)
    np.testing.assert_allclose(actual[1]["loss"], expected[1]["loss"], rtol=1e-6)
    np.testing.assert_allclose(
        actual[0]["params"]["tokens"]["embedding"], expected[0]["params"]["tokens"]["embedding"], rtol=1e-5, atol=1e-7
    )


@pytest.mark.slow
def test_dropout_draws_anew_at_each_step_and_does_not_change_the_tree() -> None:
    step, (state, batch) = models.get("gpt").build("tiny", 8, dropout=0.5, optimizer=optax.sgd(0.0))
    step = jax.jit(step)
    first, metrics = step(state, batch)
    second, later = step(first, batch)
    again, same = step(state, batch)
    assert metrics["loss"] != later["loss"] and metrics["loss"] == same["loss"]
    assert jax.tree.structure(second) == jax.tree.structure(state) == jax.tree.structure(again)


def convolutional(config: Any, batch: int) -> int:
    """The products of a Wide ResNet: of each convolution its weights, at each position where it is applied."""
    size = -(-config.image // 2)
    total = 3 * config.filters * 49 * size**2
    size = -(-size // 2)
    channels = config.filters
    for channels, filters, stride in config.bottlenecks():
        wide = config.width * filters
        total += channels * filters * size**2
        size = -(-size // stride)
        total += (9 * filters * wide + wide * 4 * filters) * size**2
        total += channels * 4 * filters * size**2 if stride > 1 or channels != 4 * filters else 0
        channels = 4 * filters
    return batch * (total + channels * config.classes)


def transformed(config: Any, batch: int, layer: float, once: int) -> float:
    """The products of a transformer: parameters of a layer, and others, at each token, and attention scores."""
    scores = 2 * config.layers * config.seq * config.hidden
    return batch * config.seq * (config.layers * layer * config.hidden**2 + once + scores)


def routed(config: Any, batch: int) -> float:
    """The products of a mixture of experts: `top_k` of them, and their dispatch and combination."""
    layer = (8 + (1 + config.top_k) * 2 * config.ffn_factor) / 2
    dense = transformed(config, batch, layer, config.vocab * config.hidden)
    tokens, slots = batch * config.seq, config.top_k * config.group // config.experts
    routing = 2 * tokens * config.experts * slots * config.hidden
    weights = tokens * config.experts * config.top_k * (slots + 1)  # an einsum of three, as two products
    gates = tokens * config.hidden * config.experts
    return dense + config.layers // 2 * (gates + routing + weights)


PRODUCTS: dict[str, Callable[[Any, int], float]] = {
    "mlp": lambda c, batch: batch * sum(a * b for a, b in zip(c.widths, c.widths[1:], strict=False)),
    "gpt": lambda c, batch: transformed(c, batch, 12, c.vocab * c.hidden),
    "llama": lambda c, batch: transformed(
        c, batch, 2 + 2 * c.kv_heads / c.heads + 3 * c.ffn / c.hidden, c.vocab * c.hidden
    ),
    "bert": lambda c, batch: transformed(c, batch, 12, c.hidden**2 + c.vocab * c.hidden),
    "moe": routed,
    "vit": lambda c, batch: (
        transformed(c, batch, 12, 0) + batch * c.hidden * (3 * c.patch**2 * (c.seq - 1) + c.classes)
    ),
    "wide_resnet": convolutional,
}
"""Multiplications with a parameter, and of queries, keys and values, in a forward pass, by published formulas."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_of_the_products(name: str) -> None:
    spec = models.get(name)
    assert spec.flops("tiny", 8) == pytest.approx(6 * PRODUCTS[name](spec.config("tiny"), 8), rel=1e-6)
    if name == "gpt":  # 72·B·S·H²·L·(1 + S/(6H)) + 6·B·S·H·V, however its layers run
        assert spec.flops("tiny", 8, scan=True, remat=True) == spec.flops("tiny", 8)


@names
def test_a_batch_depends_on_the_seed_alone(name: str) -> None:
    spec = models.get(name)
    config = spec.config("tiny")
    first, again, other = (spec.sample(config, 4, seed) for seed in (1, 1, 2))
    for field in first:
        np.testing.assert_array_equal(first[field], again[field])
    assert any(np.any(first[field] != other[field]) for field in first)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.get("gtp"), r"no model 'gtp'.*gpt, llama"),
        (lambda: models.get("gpt").parameters("1T"), r"gpt has no size '1T'.*tiny, small"),
        (lambda: models.get("gpt").abstract("tiny", 8, depth=3), r"gpt has no attribute 'depth'.*layers"),
        (lambda: models.get("gpt").abstract("tiny", 8, optimizer="adam"), r"no optimizer 'adam'.*adamw or sgd"),
        (lambda: models.get("gpt").abstract("tiny", 8, heads=5), "hidden=128 does not divide into heads=5"),
    ],
)
def test_unknown_names_are_refused_with_those_that_exist(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_gpt_sees_only_the_past() -> None:
    config = gpt.GPTConfig(vocab=16, seq=8, hidden=16, layers=1, heads=2, dtype=jnp.float32)
    model = transformer.Decoder(config, rngs=nnx.Rngs(0))
    tokens = np.tile(np.arange(8, dtype=np.int32), (2, 1))
    tokens[1, 5] = 9
    first, second = nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens))
    np.testing.assert_array_equal(first[:5], second[:5])
    assert np.all(np.any(first[5:] != second[5:], axis=-1))


def test_rotation_keeps_lengths_and_depends_on_distance() -> None:
    x = np.random.default_rng(0).standard_normal((1, 1, 2, 8)).astype(np.float32)
    same = jnp.asarray(np.repeat(x, 6, axis=1))  # the same two heads at every position
    rotated = jax.jit(transformer.rotate, static_argnums=1)(same, 100.0)
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(same, axis=-1), rtol=1e-5)
    products = jnp.einsum("qd,kd->qk", rotated[0, :, 0], rotated[0, :, 1])
    for distance in range(3):
        diagonal = jnp.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert abs(products[0, 0] - products[0, 3]) > 1e-3


def test_grouped_queries_are_those_of_repeated_keys() -> None:
    config = llama.LlamaConfig(
        vocab=8, seq=4, hidden=16, ffn=8, layers=1, heads=4, kv_heads=2, rope_theta=100.0, dtype=jnp.float32
    )
    attention = transformer.make_attention(config, nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 16)).astype(np.float32))

    @nnx.jit
    def repeated(attention, x):
        query = transformer.rotate(attention.query(x), 100.0).reshape(2, 4, 4, 4)
        key = jnp.repeat(transformer.rotate(attention.key(x), 100.0), 2, axis=2)
        value = jnp.repeat(attention.value(x), 2, axis=2)
        expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return attention(x), jnp.einsum("bqhd,hdo->bqo", expected, attention.output.kernel[...].reshape(4, 4, 16))

    np.testing.assert_allclose(*repeated(attention, x), rtol=1e-4, atol=1e-5)


def test_routing_fills_each_slot_once_and_first_choices_first() -> None:
    rng = np.random.default_rng(0)
    gates = jax.nn.softmax(jnp.asarray(rng.standard_normal((3, 16, 4)).astype(np.float32)))
    route = jax.jit(moe.route, static_argnums=(1, 2))
    combine, auxiliary = route(gates, 2, 5)
    assert combine.shape == (3, 16, 4, 5)
    taken = np.asarray(combine > 0)
    assert np.all(taken.sum(axis=1) <= 1)  # one token a slot
    assert np.all(taken.sum(axis=(2, 3)) <= 2)
    weights, choices = jax.lax.top_k(gates, 2)
    weights = weights / weights.sum(-1, keepdims=True)
    for group in range(3):
        used = [0] * 4
        expected = np.zeros((16, 4))
        for rank in range(2):
            for token in range(16):
                expert = int(choices[group, token, rank])
                if used[expert] < 5:
                    expected[token, expert] = weights[group, token, rank]
                used[expert] += 1
        np.testing.assert_allclose(np.asarray(combine[group]).sum(-1), expected, rtol=1e-6)
    uniform = jnp.full((1, 8, 4), 0.25)
    assert float(auxiliary) > 0 and float(route(uniform, 1, 8)[1]) == pytest.approx(1.0)


def test_batches_are_windows_of_the_text_and_targets_follow_inputs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)))
    (tmp_path / "b.txt").write_bytes(bytes(range(100, 200)))
    data = text.read([tmp_path / "a.txt", str(tmp_path / "b.txt")])
    np.testing.assert_array_equal(data, np.arange(200))
    for batch in islice(text.batches(data, 4, 10, seed=1), 50):
        assert batch["inputs"].shape == batch["targets"].shape == (4, 10)
        assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
        np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)  # bytes count up in this text


def test_every_window_is_reached() -> None:
    data = np.arange(12, dtype=np.uint8)
    starts = {int(row) for batch in islice(text.batches(data, 8, 10), 20) for row in batch["inputs"][:, 0]}
    assert starts == {0, 1}


def test_the_same_seed_gives_the_same_batches() -> None:
    data = text.read()
    runs = [[b["inputs"] for b in islice(text.batches(data, 8, 64, seed), 5)] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert np.any(np.asarray(runs[0]) != np.asarray(runs[2]))


def test_the_default_text_is_the_standard_library() -> None:
    data = text.read()
    assert len(data) > 1_000_000
    np.testing.assert_array_equal(data, text.read())
    assert b"def dedent(" in data.tobytes() and data.max() < text.VOCAB


def test_short_empty_and_missing_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seq=10 needs a text of at least 11 bytes, but it has 10"):
        text.batches(np.zeros(10, np.uint8), 2, 10)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match=r"empty\.txt.*hold no bytes"):
        text.read([tmp_path / "empty.txt"])
    with pytest.raises(FileNotFoundError):
        text.read([tmp_path / "absent.txt"])
