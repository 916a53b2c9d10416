"""Whether pipelines in slices of the sequence compute what one device computes.

Each model of `gallery/tokens.py` and `gallery/token_libraries.py` is run in several variants: 2, 3 or 4 stages
(interleaved: two on each submesh) of one or two virtual CPU devices, 1 to 8 slices of even or uneven lengths, 1, 2 or 4
micro-batches, every schedule that allows slices, every rematerialisation, gradient descent or Adam. Variants are drawn
with a seed, so that those of all models together have each pair of these choices. Two devices of a stage share what
they can, since links cost nothing here: examples where a micro-batch has two, columns of matrices where it has one. A
refusal is kept with its reason: of a model whose tokens depend on earlier ones alone it is a fault. Models that are not
causal follow, with the reasons why they are refused. Compiled without most of LLVM's optimisations.

"random N" is a model that a seed draws: the mixers of its layers, their norms, MLPs, residuals and recomputation, a
head that is tied or not, the form of the loss with losses of its own beside it; its variant is drawn with it. All are
causal: none may be refused.

    python -m benchmarks run token_correctness llama hf-bloom --missing
    python -m benchmarks run token_correctness "random 100" "random 101"
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from alpa_lite.errors import AlpaLiteError
from benchmarks.gallery import token_libraries, token_parts
from benchmarks.gallery import tokens as gallery
from benchmarks.gallery.token_parts import TOKENS, VOCAB, Model, Weights
from benchmarks.harness import Benchmark, Row, Rows, by_variant
from benchmarks.numerics import ALLOWED, by_model, largest
from benchmarks.workers import free_links
from tests import pipeline_driver

CAUSAL = [*gallery.MODELS, *token_libraries.MODELS]
RANDOM = "random "
ENCODERS = [*gallery.ENCODERS, *token_libraries.ENCODERS]
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b")
_RANDOMS = [f"{RANDOM}{seed}" for seed in range(16)]
VARIANTS, STEPS = 2, 2
"""Of each model; of each variant."""


@dataclass(frozen=True)
class Variant:
    """How a model is run.

    Attributes:
      devices: of each stage. even: whether the slices have the same lengths, as far as they can.
    """

    stages: int
    slices: int
    even: bool
    microbatches: int
    devices: int
    schedule: str
    remat: str
    optimizer: str

    @property
    def exists(self) -> bool:
        """Whether there is such a schedule, and more than one place to cut."""
        interleaved = self.schedule == "interleaved-1f1b"
        return (self.slices > 1 or self.even) and not (interleaved and self.microbatches % self.stages)

    @property
    def of_few_layers(self) -> Variant:
        """The same with at most four stages in all: models of two layers can be cut into six or seven."""
        return replace(self, stages=2) if self.schedule == "interleaved-1f1b" else self

    def __str__(self) -> str:
        """As the results name it."""
        cut = f"{self.slices} {'even' if self.even else 'uneven'} slices"
        return ", ".join(
            map(
                str,
                (f"{self.stages} x {self.devices}", cut, self.microbatches, self.schedule, self.remat, self.optimizer),
            )
        )


CHOICES: dict[str, tuple[Any, ...]] = {
    "stages": (2, 3, 4), "slices": tuple(range(1, 9)), "even": (False, True), "microbatches": (1, 2, 4),
    "devices": (1, 2), "schedule": SCHEDULES, "remat": ("none", "layer", "selective"), "optimizer": ("sgd", "adam"),
}  # fmt: skip


@functools.cache
def variants(model: str) -> tuple[Variant, ...]:
    """How a model is run: of a few random variants always the one with the most new pairs."""
    if model in ENCODERS:
        return (Variant(2, 2, True, 2, 1, "1f1b", "none", "sgd"),)
    if model.startswith(RANDOM):
        draw = random.Random(f"variant of {model}")
        some = (Variant(**{name: draw.choice(of) for name, of in CHOICES.items()}) for _ in itertools.count())
        return (next(one for one in some if one.exists).of_few_layers,)
    return _all_variants()[model]


@functools.cache
def _all_variants() -> dict[str, tuple[Variant, ...]]:
    draw = random.Random(0)
    seen: set[Any] = set()
    out: dict[str, tuple[Variant, ...]] = dict.fromkeys(CAUSAL, ())
    for _, model in itertools.product(range(VARIANTS), CAUSAL):
        some = [Variant(**{name: draw.choice(of) for name, of in CHOICES.items()}) for _ in range(60)]
        best = max((one for one in some if one.exists), key=lambda one: len(pairs(model, one) - seen))
        seen |= pairs(model, best)
        out[model] = (*out[model], best)
    return {model: tuple(variant.of_few_layers for variant in some) for model, some in out.items()}


def pairs(model: str, variant: Variant) -> set[Any]:
    """Each two choices of a variant, the model among them."""
    return set(itertools.combinations([("model", model), *dataclasses.asdict(variant).items()], 2))


def lengths(variant: Variant, tokens: int) -> tuple[int, ...]:
    """Of the slices of a variant."""
    if variant.even:
        return tuple((i + 1) * tokens // variant.slices - i * tokens // variant.slices for i in range(variant.slices))
    ends = sorted(random.Random(str(variant)).sample(range(1, tokens), variant.slices - 1))
    return tuple(b - a for a, b in itertools.pairwise([0, *ends, tokens]))


def measure(case: str) -> Row:
    """The largest error of some steps of a case and the leaf that has it, or why there is none."""
    name, _, text = case.partition(": ")
    variant = next(one for one in variants(name) if text in ("", str(one)))
    step, args = made(name, variant.optimizer)
    virtual = 2 if variant.schedule == "interleaved-1f1b" else 1
    try:
        driven = pipeline_driver.drive(
            step, args, devices=(variant.devices,) * variant.stages, microbatches=variant.microbatches,
            schedule=variant.schedule, virtual=virtual,
            remat=(variant.remat,) * variant.stages * virtual,  # type: ignore[arg-type]
            tokens=lengths(variant, TOKENS), cluster=free_links(),
        )  # fmt: skip
    except pipeline_driver.TooFewLayers as refusal:
        return {"skipped": str(refusal)}
    except AlpaLiteError as refusal:
        return {"refused": str(refusal)}
    steps = (driven.executable(), jax.jit(step))
    row = largest(*(pipeline_driver.consecutive(one, args, "functional", STEPS) for one in steps))
    jax.clear_caches()  # executables take memory mappings, of which a process may have 65,530
    return row


def made(model: str, optimizer: str) -> gallery.Built:
    """A model's step and its arguments."""
    if model.startswith(RANDOM):
        return gallery.built(*drawn(random.Random(int(model.removeprefix(RANDOM)))), optimizer)
    plain = {**gallery.MODELS, **gallery.ENCODERS}
    if model in plain:
        return gallery.built(*plain[model](), optimizer)
    return {**token_libraries.MODELS, **token_libraries.ENCODERS}[model](optimizer)


def page(rows: Rows) -> list[str]:
    """Errors by model, and refusals."""

    def model_of(name: str) -> str:
        return RANDOM.strip() if name.startswith(RANDOM) else name.partition(": ")[0]

    def refusals(models: list[str]) -> Iterator[str]:
        for name, row in ((name, row) for found in by_variant(rows).values() for name, row in sorted(found.items())):
            model = model_of(name)
            if model in models and ("refused" in row or model in ENCODERS):
                yield f"- {model}: " + (row.get("refused") or f"**runs**, error {row.get('error')}")

    models = [*CAUSAL, RANDOM.strip()]
    return [
        *by_model({name: row for name, row in rows.items() if model_of(name) in models}, models, model_of), "",
        "## Refusals", "", *dict.fromkeys(refusals(models)), "", "Encoders, whose tokens depend on later ones:", "",
        *dict.fromkeys(refusals(ENCODERS)),
    ]  # fmt: skip


# -- random models ----------------------------------------------------------------------------------------------------

MIXERS = (
    "plain", "opaque", "grouped_rotary", "repeated_rotary", "alibi", "learned_bias", "window", "opaque_window",
    "padded", "packed", "dropped", "softcapped", "state_space", "recurrent", "linear_attention", "convolution",
    "centred", "taps",
)  # fmt: skip
LOSSES = ("shifted", "longer", "masked", "normaliser")


def drawn(draw: random.Random) -> tuple[Model, Any]:
    """A model and its batch."""
    layers = [
        {
            "mixer": draw.choice(MIXERS), "norm": draw.choice(("layer_norm", "rms_norm")),
            "mlp": draw.choice(("mlp", "gated", "none")), "residual": draw.choice(("before", "after", "beside")),
            "recompute": draw.random() < 0.25,
        }
        for _ in range(draw.randint(1, 3))
    ]  # fmt: skip
    loss, tied, places, aside = draw.choice(LOSSES), draw.random() < 0.4, draw.random() < 0.6, draw.random() < 0.3

    def model(w: Weights, batch: Any, key: jax.Array) -> jax.Array:
        tokens = batch["tokens"]
        given = tokens[:, :-1] if loss == "longer" else tokens
        x, beside = token_parts.embedded(w, given, places=places), jnp.zeros(())
        for n, (layer, own) in enumerate(zip(layers, jax.random.split(key, len(layers)), strict=True)):

            def run(x: jax.Array, own: jax.Array, n: int = n, layer: Any = layer) -> jax.Array:
                return _layer(w, f"{n}", layer, x, batch, own)

            x = (jax.checkpoint(run) if layer["recompute"] else run)(x, own)
            beside += 1e-2 * (jax.nn.logsumexp(x, -1) ** 2).mean() if aside else 0
        x = token_parts.layer_norm(w, "last", x)
        logits = x @ w("embed", VOCAB, x.shape[-1]).T if tied else token_parts.dense(w, "head", x, VOCAB)
        return _loss(loss, logits, tokens, batch["real"]) + beside

    return model, _batch(longer=loss == "longer")


def _layer(w: Weights, name: str, layer: Any, x: jax.Array, batch: Any, key: jax.Array) -> jax.Array:
    norm, mixer = getattr(token_parts, layer["norm"]), getattr(token_parts, layer["mixer"])
    inner = getattr(token_parts, layer["mlp"], None)
    if layer["residual"] == "beside":
        y = norm(w, f"{name}.a", x)
        return x + mixer(w, f"{name}.mix", y, batch, key) + (inner(w, f"{name}.mlp", y) if inner else 0)
    if layer["residual"] == "before":
        x = x + mixer(w, f"{name}.mix", norm(w, f"{name}.a", x), batch, key)
        return x + inner(w, f"{name}.mlp", norm(w, f"{name}.b", x)) if inner else x
    x = norm(w, f"{name}.a", x + mixer(w, f"{name}.mix", x, batch, key))
    return norm(w, f"{name}.b", x + inner(w, f"{name}.mlp", x)) if inner else x


def _loss(kind: str, logits: jax.Array, tokens: jax.Array, real: jax.Array) -> jax.Array:
    cut = logits if kind == "longer" else logits[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(cut, tokens[:, 1:])
    if kind == "masked":
        weights = real[:, 1:].astype(jnp.float32)
        return (losses * weights).sum() / weights.sum()
    return losses.mean() + (1e-3 * (jax.nn.logsumexp(logits, -1) ** 2).mean() if kind == "normaliser" else 0)


def _batch(*, longer: bool) -> dict[str, Any]:
    """Tokens with all that a mixer may ask for."""
    numbers = np.random.default_rng(1)
    starts = numbers.random((gallery.BATCH, TOKENS)) < 0.2
    first = np.maximum.accumulate(np.where(starts, np.arange(TOKENS), 0), 1)
    real = np.arange(TOKENS) < numbers.integers(4, TOKENS + 1, (gallery.BATCH, 1))
    return gallery.text(
        TOKENS + longer, real=jnp.asarray(real), part=jnp.asarray(starts.cumsum(1), jnp.int32),
        place=jnp.asarray(np.arange(TOKENS) - first, jnp.int32),
    )  # fmt: skip


BENCHMARKS = (
    Benchmark(
        "token_correctness", "Pipelines in slices of the sequence against one device", f"Two steps. {ALLOWED}",
        lambda: [f"{name}: {one}" for name in (*ENCODERS, *CAUSAL, *_RANDOMS) for one in variants(name)], measure, page,
        devices=8, quickly=True, versions=True, together=lambda case: case.partition(": ")[0], is_open=True,
    ),
)  # fmt: skip
