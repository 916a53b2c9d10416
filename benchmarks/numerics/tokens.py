"""Whether pipelines in slices of the sequence compute what one device computes.

Each model of `gallery/tokens/` is run in several variants: 2, 3 or 4 stages
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
from dataclasses import dataclass, replace
from typing import Any

import jax

import gallery
from alpa_lite.errors import AlpaLiteError
from benchmarks.harness import Benchmark, Row, Rows, by_variant
from benchmarks.numerics import by_model, largest
from gallery import Built
from gallery.tokens import models
from gallery.tokens.parts import TOKENS
from tests import pipeline_driver
from tests.helpers import FREE_LINKS

CAUSAL = list(gallery.find("tokens", "causal"))
RANDOM = "random "
ENCODERS = list(gallery.find("tokens", "both ways"))
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
        """The name of a variant in the results."""
        cut = f"{self.slices} {'even' if self.even else 'uneven'} slices"
        run = f"{self.microbatches}, {self.schedule}, {self.remat}, {self.optimizer}"
        return f"{self.stages} x {self.devices}, {cut}, {run}"

    @classmethod
    def draw(cls, rng: random.Random) -> Variant:
        """A random one."""
        some = (cls(**{name: rng.choice(of) for name, of in CHOICES.items()}) for _ in itertools.count())
        return next(one for one in some if one.exists)


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
        return (Variant.draw(random.Random(f"variant of {model}")).of_few_layers,)
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
            tokens=lengths(variant, TOKENS), cluster=FREE_LINKS,
        )  # fmt: skip
    except pipeline_driver.TooFewLayers as refusal:
        return {"skipped": str(refusal)}
    except AlpaLiteError as refusal:
        return {"refused": str(refusal)}
    steps = (driven.executable(), jax.jit(step))
    row = largest(*(pipeline_driver.consecutive(one, args, "functional", STEPS) for one in steps))
    jax.clear_caches()  # executables take memory mappings, of which a process may have 65,530
    return row


def made(model: str, optimizer: str) -> Built:
    """A model's step and its arguments."""
    if model.startswith(RANDOM):
        return models.built(*models.drawn(random.Random(int(model.removeprefix(RANDOM)))), optimizer)
    return gallery.get("tokens", model).make(optimizer=optimizer)


def model_of(case: str) -> str:
    """The model of a case; one for all that are drawn."""
    return RANDOM.strip() if case.startswith(RANDOM) else case.partition(": ")[0]


def view(rows: Rows) -> Row:
    """Errors by model, and refusals."""
    models = [*CAUSAL, RANDOM.strip()]
    found = [(model_of(name), row) for some in by_variant(rows).values() for name, row in sorted(some.items())]
    said = [(model, row.get("refused") or f"**runs**, error {row.get('error')}") for model, row in found
            if "refused" in row or model in ENCODERS]  # fmt: skip
    refusals = {
        key: list(dict.fromkeys(f"- {model}: {text}" for model, text in said if model in some))
        for key, some in (("refusals", models), ("encoders", ENCODERS))
    }
    return by_model({name: row for name, row in rows.items() if model_of(name) in models}, models, model_of) | refusals


BENCHMARKS = (
    Benchmark(
        "token_correctness",
        lambda: [f"{name}: {one}" for name in (*ENCODERS, *CAUSAL, *_RANDOMS) for one in variants(name)], measure, view,
        devices=8, quickly=True, versions=True, together=lambda case: case.partition(": ")[0], is_open=True,
    ),
)  # fmt: skip
