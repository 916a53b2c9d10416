"""Whether pipelines in slices of the sequence compute what one device computes: models x ways to run them.

Each model of `token_models.py` and `token_models_outside.py` is run in several ways: 2, 3 or 4 stages (interleaved: two
on each submesh) of one or two virtual CPU devices, 1 to 8 slices of even or uneven lengths, 1, 2 or 4 micro-batches,
every schedule that allows slices, every rematerialisation, gradient descent or Adam. Ways are drawn with a seed, so
that those of all models together have each pair of these choices. Two devices of a stage share what they can, since
links cost nothing here: examples where a micro-batch has two, columns of matrices where it has one.

Two consecutive steps, compiled without most of LLVM's optimisations: losses, gradients and updated states, leaf by
leaf. An error of 1 is what is allowed, ||a - b|| = 1e-5 * max(||b||, 1e-3 * ||all gradients||) in float32;
`tests/comparing.py` has the rest. A refusal is kept with its reason: of a model whose tokens depend on earlier ones
alone it is a fault. Models that are not causal stand below, with the reasons why they are refused.

    PYTHONPATH=. python benchmarks/token_correctness.py                 what the results lack for this JAX
    PYTHONPATH=. python benchmarks/token_correctness.py llama hf-bloom  of these models
    PYTHONPATH=. python benchmarks/token_correctness.py --ways 1        one way of each model

writes benchmarks/results/token_correctness.json after every case, and token_correctness.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from alpa_lite.cluster import Cluster, Link
from alpa_lite.errors import AlpaLiteError
from benchmarks import kept_rows, token_models, token_models_outside, virtual_devices
from tests import comparing, pipeline_driver

RESULTS = Path(__file__).parent / "results" / "token_correctness.json"
VERSION = f"jax {jax.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}"
CAUSAL = [*token_models.MODELS, *token_models_outside.MODELS]
ENCODERS = [*token_models.ENCODERS, *token_models_outside.ENCODERS]
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b")
WAYS, STEPS = 2, 2
"""Of each model; of each way."""


@dataclass(frozen=True)
class Way:
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
        """Whether there is such a schedule, and more than one way to cut."""
        interleaved = self.schedule == "interleaved-1f1b"
        return (self.slices > 1 or self.even) and not (interleaved and self.microbatches % self.stages)

    @property
    def of_few_layers(self) -> Way:
        """The same with at most four stages in all: models of two layers can be cut into six or seven."""
        return replace(self, stages=2) if self.schedule == "interleaved-1f1b" else self

    def __str__(self) -> str:
        """As the results name it."""
        cut = f"{self.slices} {'even' if self.even else 'uneven'} slices"
        ways = f"{self.microbatches}, {self.schedule}, {self.remat}, {self.optimizer}"
        return f"{self.stages} x {self.devices}, {cut}, {ways}"


CHOICES: dict[str, tuple[Any, ...]] = {
    "stages": (2, 3, 4), "slices": tuple(range(1, 9)), "even": (False, True), "microbatches": (1, 2, 4),
    "devices": (1, 2), "schedule": SCHEDULES, "remat": ("none", "layer", "selective"), "optimizer": ("sgd", "adam"),
}  # fmt: skip
FREE_LINKS = Cluster(
    device="cpu", platform="cpu", devices_per_node=8, memory=1 << 30, peak_flops={"f32": 1e4}, memory_bandwidth=1e4,
    node_link=Link(1e15), tile=1,
)  # fmt: skip


def main() -> None:
    """Runs the cases that the results lack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="of those that the results name")
    parser.add_argument("--ways", type=int, default=WAYS, help="of each model")
    parser.add_argument("--part", default="0/1", help="which part of how many of the models, for several processes")
    arguments = parser.parse_args()
    virtual_devices.prepare()
    part, parts = map(int, arguments.part.split("/"))
    models = (arguments.models or [*ENCODERS, *CAUSAL])[part::parts]
    for number, model in itertools.product(range(arguments.ways), models):
        for way in ways(model)[number : number + 1]:
            if f"{model}: {way}" in kept_rows.known(RESULTS, VERSION):
                continue
            started = time.process_time()
            row = measured(model, way)
            print(f"{model}: {way}", row, f"{time.process_time() - started:.0f} s", flush=True)
            keep(f"{model}: {way}", row)
            jax.clear_caches()  # executables take memory mappings, of which a process may have 65,530


@functools.cache
def ways(model: str) -> tuple[Way, ...]:
    """How a model is run: of a few random ways always the one with the most pairs that no way before has."""
    if model in ENCODERS:
        return (Way(2, 2, True, 2, 1, "1f1b", "none", "sgd"),)
    return _all_ways()[model]


@functools.cache
def _all_ways() -> dict[str, tuple[Way, ...]]:
    draw = random.Random(0)
    seen: set[Any] = set()
    out: dict[str, tuple[Way, ...]] = dict.fromkeys(CAUSAL, ())
    for _, model in itertools.product(range(WAYS), CAUSAL):
        some = [Way(**{name: draw.choice(of) for name, of in CHOICES.items()}) for _ in range(60)]
        best = max((way for way in some if way.exists), key=lambda way: len(pairs(model, way) - seen))
        seen |= pairs(model, best)
        out[model] = (*out[model], best)
    return {model: tuple(way.of_few_layers for way in some) for model, some in out.items()}


def pairs(model: str, way: Way) -> set[Any]:
    """Each two choices of a way, the model among them."""
    return set(itertools.combinations([("model", model), *dataclasses.asdict(way).items()], 2))


def lengths(way: Way, tokens: int) -> tuple[int, ...]:
    """Of the slices of a way."""
    if way.even:
        return tuple((i + 1) * tokens // way.slices - i * tokens // way.slices for i in range(way.slices))
    ends = sorted(random.Random(str(way)).sample(range(1, tokens), way.slices - 1))
    return tuple(b - a for a, b in itertools.pairwise([0, *ends, tokens]))


def measured(model: str, way: Way) -> dict[str, Any]:
    """The largest error of some steps and the leaf that has it, or why there is none."""
    step, args = made(model, way.optimizer)
    virtual = 2 if way.schedule == "interleaved-1f1b" else 1
    try:
        driven = pipeline_driver.drive(
            step, args, devices=(way.devices,) * way.stages, microbatches=way.microbatches, schedule=way.schedule,
            virtual=virtual, remat=(way.remat,) * way.stages * virtual,  # type: ignore[arg-type]
            tokens=lengths(way, token_models.TOKENS), cluster=FREE_LINKS,
        )  # fmt: skip
    except pipeline_driver.TooFewLayers as refusal:
        return {"skipped": str(refusal)}
    except AlpaLiteError as refusal:
        return {"refused": str(refusal)}
    errors: dict[str, float] = {}
    got, want = (
        pipeline_driver.consecutive(run, args, "functional", STEPS) for run in (driven.executable(), jax.jit(step))
    )
    for number, (ours, one) in enumerate(zip(got, want, strict=True)):
        errors |= {f"step {number} {name}": error for name, error in comparing.errors(ours, one).items()}
    leaf = max(errors, key=errors.__getitem__)
    return {"error": round(float(errors[leaf]), 4), "leaf": leaf, "leaves": len(errors)}


def made(model: str, optimizer: str) -> token_models.Built:
    """A model's step and its arguments."""
    plain = {**token_models.MODELS, **token_models.ENCODERS}
    if model in plain:
        return token_models.built(*plain[model](), optimizer)
    return {**token_models_outside.MODELS, **token_models_outside.ENCODERS}[model](optimizer)


# -- results ----------------------------------------------------------------------------------------------------------


def keep(name: str, row: dict[str, Any]) -> None:
    """Adds a row. Several processes may run at once."""
    with kept_rows.changed(RESULTS, table) as rows:
        rows.setdefault(VERSION, {})[name] = row


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The results as a page."""
    title = "Pipelines in slices of the sequence against one device"
    lines = kept_rows.of_errors(title, "two", "token_correctness", rows)
    for model in CAUSAL:
        cells = [cell for found in rows.values() for cell in _cells(list(_of(found, model)))]
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    lines += ["", *(_said(name, found) for name, found in rows.items()), "", "## What is refused", ""]
    for model in CAUSAL:
        lines += sorted(
            {f"- {model}: {row['refused']}" for f in rows.values() for row in _of(f, model) if "refused" in row}
        )
    lines += ["", "Encoders, whose tokens depend on later ones:", ""]
    for model in ENCODERS:
        said = [
            row.get("refused", f"**runs**, error {row.get('error')}") for f in rows.values() for row in _of(f, model)
        ]
        lines += [f"- {model}: {reason}" for reason in dict.fromkeys(said)]
    return "\n".join([*lines, "", f"Made {datetime.date.today()}.", ""])


def _of(found: dict[str, Any], model: str) -> Iterator[dict[str, Any]]:
    return (row for name, row in found.items() if name.startswith(f"{model}: "))


def _cells(rows: list[dict[str, Any]]) -> list[str]:
    errors = [row["error"] for row in rows if "error" in row]
    return [str(len(errors)), f"{max(errors):.3f}" if errors else "-"]


def _said(name: str, found: dict[str, Any]) -> str:
    rows = [row for model in CAUSAL for row in _of(found, model)]
    errors = [row["error"] for row in rows if "error" in row]
    refused, skipped = (sum(kind in row for row in rows) for kind in ("refused", "skipped"))
    wrong = sum(error > 1 for error in errors)
    leaves = sum(row["leaves"] for row in rows if "error" in row)
    return (
        f"{name}: {len(errors)} cases run of {WAYS * len(CAUSAL)} that are drawn, {wrong} above 1, {leaves:,} leaves "
        f"compared; {refused} refused; {skipped} need more layers than their model has."
    )


if __name__ == "__main__":
    main()
