"""Train steps that are not one loss and one optimizer, and models of unusual operations.

Two networks and optimizers in a step, epochs in a step, frozen weights, tables of millions of rows, loops over time
and over chunks, attention within windows and along triangles, frequencies, determinants, sorting. Most networks are in
`networks.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import traverse_util

from gallery.batches import f32, initial, one_example, random_key, shape, to_bfloat16
from gallery.outside import networks
from gallery.outside import networks_of_pictures as pictures
from gallery.outside.hugging_face import model_of, sizes_of
from gallery.outside.tutorials import Llama
from gallery.registry import Built, published_fields
from gallery.steps import (
    CLIPPED,
    advantages,
    apply_optimizer,
    cross_entropy,
    fitting_step,
    habits,
    initial_state,
    language,
    module,
    supervised_step,
    weighted_cross_entropy,
)

# --- agents ---------------------------------------------------------------------------------------------------------


def policy(length: int, games: int, epochs: int = 4, parts: int = 8) -> Built:
    """PPO: several epochs over shuffled parts of what was played, in scans within the step."""
    model: Any = networks.Actor()
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))
    total = length * games

    def loss(params: Any, seen: Any, taken: Any, before: Any, advantage: Any, wanted: Any) -> Any:
        logits, values = model.apply(params, seen)
        logs = jax.nn.log_softmax(logits)
        ratio = jnp.exp(jnp.take_along_axis(logs, taken[:, None], 1)[:, 0] - before)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return -gain.mean() + 0.5 * jnp.mean((values - wanted) ** 2) + 0.01 * (jnp.exp(logs) * logs).sum(-1).mean()

    def step(state: Any, seen: Any, taken: Any, before: Any, rewards: Any, values: Any, done: Any, key: Any) -> Any:
        advantage = advantages(rewards, values[:-1], values[-1], done)
        played = seen, taken, before, advantage, advantage + values[:-1]
        flat = jax.tree.map(lambda x: x.reshape(total, *x.shape[2:]), played)

        def epoch(state: Any, key: Any) -> Any:
            order = jax.random.permutation(key, total)
            cut = jax.tree.map(lambda x: x[order].reshape(parts, total // parts, *x.shape[1:]), flat)

            def part(state: Any, given: Any) -> Any:
                return apply_optimizer(lambda params: loss(params, *given), state, optimizer)

            return jax.lax.scan(part, state, cut)

        state, losses = jax.lax.scan(epoch, state, jax.random.split(key, epochs))
        return state, losses.mean()

    state = initial_state(initial(model, shape(1, 84, 84, 4, dtype=jnp.uint8)), optimizer)
    seen, each = shape(length, games, 84, 84, 4, dtype=jnp.uint8), f32(length, games)
    return step, (state, seen, shape(length, games), each, each, f32(length + 1, games), each, random_key())


def divergence(first: Any, second: Any) -> Any:
    """How far choices are from each other, of which one is free."""
    apart = jax.nn.log_softmax(first) - jax.nn.log_softmax(second)
    return jnp.maximum((jax.nn.softmax(first) * apart).sum((-1, -2)), 1).mean()


def world_loss(apply: Any, frames: Any, actions: Any, key: Any) -> Any:
    """Frames predicted, and what is expected and what is seen drawn to each other."""
    made, expected, seen = apply(frames, actions, key)
    learned = divergence(jax.lax.stop_gradient(seen), expected)
    kept = divergence(seen, jax.lax.stop_gradient(expected))
    return jnp.mean((made - frames / 255) ** 2) + 0.5 * learned + 0.1 * kept


# --- text -----------------------------------------------------------------------------------------------------------


def adapted(batch: int, length: int, rank: int = 16) -> Built:
    """Next-token prediction by a frozen Llama of 8 B, whose queries and values are adapted by matrices of low rank."""
    model, params = model_of("Llama", "ForCausalLM", **sizes_of({"like": "llama"}))
    optimizer = optax.adamw(1e-4)

    def step(state: Any, frozen: Any, ids: Any, mask: Any) -> Any:
        def loss(adapters: Any) -> Any:
            flat: Any = traverse_util.flatten_dict(frozen, sep="/")
            for name, own in adapters.items():
                flat[name] = flat[name] + (own["down"] @ own["up"]).astype(jnp.bfloat16)
            logits = model(ids, attention_mask=mask, params=traverse_util.unflatten_dict(flat, sep="/")).logits
            return weighted_cross_entropy(logits[:, :-1], ids[:, 1:], mask[:, 1:])

        return apply_optimizer(loss, state, optimizer)

    flat: Any = traverse_util.flatten_dict(params, sep="/")
    adapters = {
        name: {"down": f32(leaf.shape[0], rank), "up": f32(rank, leaf.shape[1])}
        for name, leaf in flat.items()
        if name.endswith(("q_proj/kernel", "v_proj/kernel"))
    }
    return step, (initial_state(adapters, optimizer), to_bfloat16(params), shape(batch, length), shape(batch, length))


def preferred(batch: int, length: int) -> Built:
    """DPO of a Llama of 7 B: pairs of answers, against a frozen copy."""
    model: Any = Llama(32, 4096, 32, 11008, 32000, True)
    params, optimizer = initial(model, shape(1, length)), optax.chain(CLIPPED, optax.adamw(1e-6))

    def likelihood(params: Any, ids: Any, mask: Any) -> Any:
        logs = jax.nn.log_softmax(model.apply(params, ids)[:, :-1].astype(jnp.float32))
        return (jnp.take_along_axis(logs, ids[:, 1:, None], -1)[..., 0] * mask[:, 1:]).sum(-1)

    def step(state: Any, frozen: Any, better: Any, worse: Any, better_mask: Any, worse_mask: Any) -> Any:
        better_before, worse_before = likelihood(frozen, better, better_mask), likelihood(frozen, worse, worse_mask)

        def loss(params: Any) -> Any:
            better_gain = likelihood(params, better, better_mask) - better_before
            worse_gain = likelihood(params, worse, worse_mask) - worse_before
            return -jax.nn.log_sigmoid(0.1 * (better_gain - worse_gain)).mean()

        return apply_optimizer(loss, state, optimizer)

    return step, (initial_state(params, optimizer), to_bfloat16(params), *[shape(batch, length)] * 4)


def distilled(batch: int, length: int) -> Built:
    """A decoder of 1.3 B that follows the predictions of a frozen one of 13 B."""
    teacher: Any = networks.Decoder(40, 5120, 40, 32000)
    model: Any = networks.Decoder(24, 2048, 16, 32000)
    optimizer = optax.chain(CLIPPED, optax.adamw(3e-4))

    def step(state: Any, frozen: Any, ids: Any) -> Any:
        wanted = jax.nn.softmax(teacher.apply(frozen, ids).astype(jnp.float32) / 2)

        def loss(params: Any) -> Any:
            logits = model.apply(params, ids).astype(jnp.float32)
            followed = -(wanted * jax.nn.log_softmax(logits / 2)).sum(-1).mean() * 4
            return followed + cross_entropy(logits[:, :-1], ids[:, 1:])

        return apply_optimizer(loss, state, optimizer)

    ids = shape(1, length)
    return step, (
        initial_state(initial(model, ids), optimizer),
        to_bfloat16(initial(teacher, ids)),
        shape(batch, length),
    )


# --- pictures -------------------------------------------------------------------------------------------------------


def adversarial(batch: int) -> Built:
    """A GAN: two networks with an optimizer each, a penalty on gradients, and an average of the generator."""
    generator: Any = pictures.Generator()
    discriminator: Any = pictures.Discriminator()
    optimizer = optax.adam(2e-3, b1=0.0)

    def step(state: Any, real: Any, key: Any) -> Any:
        first, second = jax.random.split(key)

        def told_apart(params: Any) -> Any:
            fake = generator.apply(state["generator"]["params"], jax.random.normal(first, (batch, 512)))
            is_real, is_fake = discriminator.apply(params, real), discriminator.apply(params, fake)
            steep = jax.grad(lambda x: discriminator.apply(params, x).sum())(real)
            penalty = 5 * (steep**2).sum((1, 2, 3)).mean()
            return jax.nn.softplus(is_fake).mean() + jax.nn.softplus(-is_real).mean() + penalty

        critic, apart = apply_optimizer(told_apart, state["discriminator"], optimizer)

        def believed(params: Any) -> Any:
            fake = generator.apply(params, jax.random.normal(second, (batch, 512)))
            return jax.nn.softplus(-discriminator.apply(critic["params"], fake)).mean()

        maker, doubt = apply_optimizer(believed, state["generator"], optimizer)
        average = optax.incremental_update(maker["params"], state["average"], 0.001)
        return {"generator": maker, "discriminator": critic, "average": average}, (apart, doubt)

    params = initial(generator, f32(4, 512))
    state = {"generator": initial_state(params, optimizer), "average": params}
    state["discriminator"] = initial_state(initial(discriminator, f32(4, 256, 256, 3)), optimizer)
    return step, (state, f32(batch, 256, 256, 3), random_key())


def render(colours: Any, density: Any, times: Any) -> tuple[Any, Any]:
    """[rays, points, 3] colours and [rays, points] densities to the colours of rays and the weights of points."""
    apart = jnp.concatenate([times[:, 1:] - times[:, :-1], jnp.full_like(times[:, :1], 1e10)], -1)
    stopped = 1 - jnp.exp(-density * apart)
    through = jnp.concatenate([jnp.ones_like(stopped[:, :1]), 1 - stopped[:, :-1] + 1e-10], -1)
    weights = stopped * jnp.cumprod(through, -1)
    return (weights[..., None] * colours).sum(1), weights


def radiance(rays: int, points: int = 64) -> Built:
    """A NeRF: a coarse field says where along its rays a fine one is asked."""
    model: Any = pictures.Field()
    one = f32(1, 1, 3)
    params = {"coarse": initial(model, one, one), "fine": initial(model, one, one)}

    def seen(params: Any, origins: Any, directions: Any, times: Any) -> Any:
        places = origins[:, None] + directions[:, None] * times[..., None]
        colours, density = model.apply(params, places, directions[:, None])
        return render(colours, density, times)

    def loss(params: Any, origins: Any, directions: Any, wanted: Any, key: Any) -> Any:
        first, second = jax.random.split(key)
        times = jnp.linspace(2.0, 6.0, points)[None] + jax.random.uniform(first, (rays, points)) * 4 / points
        coarse, weights = seen(params["coarse"], origins, directions, times)
        shares = jnp.cumsum(weights / (weights.sum(-1, keepdims=True) + 1e-5), -1)
        drawn = jax.vmap(jnp.searchsorted)(shares, jax.random.uniform(second, (rays, 2 * points))).clip(0, points - 1)
        more = jnp.concatenate([times, jnp.take_along_axis(times, drawn, 1)], -1)
        fine, _ = seen(params["fine"], origins, directions, jax.lax.stop_gradient(jnp.sort(more, -1)))
        return jnp.mean((coarse - wanted) ** 2) + jnp.mean((fine - wanted) ** 2)

    return habits(loss, params, optax.adam(5e-4), *[f32(rays, 3)] * 3, rng=True)


def surprise(apply: Any, x: Any, key: Any) -> Any:
    """How unlikely pictures are, with noise added to them."""
    return -apply(x + jax.random.uniform(key, x.shape) / 256).mean() / (64 * 64 * 3)


# --- science --------------------------------------------------------------------------------------------------------


def fold_loss(apply: Any, rows: Any, apart: Any, distances: Any, letters: Any, hidden: Any) -> Any:
    """Distances in a protein and hidden letters of its alignment."""
    far, letter = apply(rows, apart)
    return cross_entropy(far, distances) + weighted_cross_entropy(letter, letters, hidden)


def fold(scan: bool, batch: int = 32, sequences: int = 64, length: int = 128, layers: int = 4) -> Built:
    """The alignment network of the outside models."""
    model = networks.Fold(layers, scan)
    rows, apart = shape(batch, sequences, length), shape(batch, length, length)

    def loss(apply: Any, rows: Any, apart: Any) -> Any:
        logits, letters = apply(rows, apart)
        return cross_entropy(logits, apart) + cross_entropy(letters, rows)

    return fitting_step(model, loss, rows, apart, init=one_example(rows, apart))


def relative_error(made: Any, wanted: Any) -> Any:
    """The mean over examples of the norm of the error over that of the field."""
    size = lambda z: jnp.sqrt((z**2).sum((1, 2, 3)))  # noqa: E731
    return (size(made - wanted) / size(wanted)).mean()


# --- recommendation -------------------------------------------------------------------------------------------------

_TABLES = (10_000_000, 5_000_000, 3_000_000, 1_000_000, 500_000, 100_000, *[20_000] * 10, *[1_000] * 10)


@module
def Ranking(self, numbers, chosen, *, tables):
    """Clicks from numbers and from rows of tables, some of them large, by the products of all pairs.

    [batch, features] numbers and [batch, tables] rows to [batch] logits.
    """
    x = numbers
    for width in (512, 256, 128):
        x = nn.relu(nn.Dense(width)(x))
    rows = [nn.Embed(size, 128)(chosen[:, number]) for number, size in enumerate(tables)]
    stacked = jnp.stack([x, *rows], 1)
    first, second = jnp.tril_indices(1 + len(rows), -1)
    x = jnp.concatenate([x, jnp.einsum("bid,bjd->bij", stacked, stacked)[:, first, second]], -1)
    for width in (1024, 1024, 512, 256):
        x = nn.relu(nn.Dense(width)(x))
    return nn.Dense(1)(x)[:, 0]


def clicks(logits: Any, clicked: Any) -> Any:
    """The mean loss of clicks."""
    return optax.sigmoid_binary_cross_entropy(logits, clicked).mean()


# --- the cases ------------------------------------------------------------------------------------------------------


_unusual = functools.partial(published_fields, of="unusual")
_STEPS = optax.MultiSteps(optax.apply_if_finite(optax.adamw(1e-4), 5), every_k_schedule=4)
_FRAMES, _KEY = shape(256, 64, 64, 64, 3, dtype=jnp.uint8), random_key()
_ROWS, _PAIRS = shape(128, 128, 256), shape(128, 256, 256)
PLANNED: dict[str, dict[str, Any]] = {
    # its arrays begin with time: which of their axes is the batch cannot be told
    "ppo": _unusual("a100", policy, 128, 1024, options={"batch_argnums": ()}),
    "dreamer": _unusual(
        "a100", fitting_step, networks.World(), world_loss, _FRAMES, f32(256, 64, 18),
        init=(*one_example(_FRAMES), f32(1, 64, 18), _KEY), optimizer=optax.chain(CLIPPED, optax.adam(1e-4)),
        rng=True,
    ),
    "gan": _unusual("a100", adversarial, 256),
    "lora-8b": _unusual("h100", adapted, 64, 2048),
    "dpo-7b": _unusual("h100 x 2", preferred, 128, 2048),
    "dlrm": _unusual(
        "a100", supervised_step, Ranking(_TABLES), f32(65536, 13), shape(65536, 26), f32(65536), loss=clicks,
        optimizer=optax.adagrad(0.01),
    ),
    "muon-1b": _unusual(
        "h100 x 2", language, networks.Decoder(24, 2048, 16, 50304), 256, 2048, optax.contrib.muon(2e-2)
    ),
    "fold": _unusual(
        "a100 x 4", fitting_step, networks.Fold(48), fold_loss, _ROWS, _PAIRS, _PAIRS, _ROWS, f32(128, 128, 256),
        init=one_example(_ROWS, _PAIRS), optimizer=optax.chain(CLIPPED, optax.adam(1e-3)), average=0.999,
    ),
    "nerf": _unusual("a100", radiance, 65536),
    "glow": _unusual(
        "a100", fitting_step, pictures.Flow(16, 3), surprise, f32(512, 64, 64, 3),
        optimizer=optax.adamax(1e-3), rng=True
    ),
    "swin-large": _unusual(
        "v5p:2x2x2", fitting_step, pictures.Windows(),
        lambda apply, x, labels, key: cross_entropy(apply(x, rngs={"dropout": key}), labels),
        f32(1024, 224, 224, 3), shape(1024), optimizer=optax.adamw(1e-3), rng=True, average=0.9999,
    ),
    "fno": _unusual(
        "a100", supervised_step, pictures.Fourier(64, 32), f32(128, 256, 256, 10), f32(128, 256, 256, 1),
        loss=relative_error, optimizer=optax.adam(1e-3),
    ),
    "distil": _unusual("h100 x 2", distilled, 256, 2048),
    "multisteps": _unusual("a100", language, networks.Decoder(12, 768, 6, 50304), 256, 1024, _STEPS),
    "linear-attention": _unusual(
        "h100 x 2", language, networks.LinearDecoder(24, 2048, 65536), 128, 4096, optax.adamw(1e-4)
    ),
}  # fmt: skip
