"""Whether pipelines compute what one device computes: models x stages x micro-batches x schedules, all of them.

Every model of the list, in linen and in NNX, in 2, 3 and 4 stages on eight virtual CPU devices, with every number of
micro-batches from 1 to 8 that divides its batch of eight, under every schedule that allows it (interleaved: with two
stages on each submesh, where the model has as many layers). Three consecutive steps: losses, metrics, gradients and
updated states, leaf by leaf. The tests run a covering design of this product (`tests/test_pipelines.py`).

    python -m benchmarks run pipeline_correctness linen_gpt --missing      what the rows lack of some models

`-o cache=FOLDER` keeps executables in a cache of JAX's, since schedules share them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

import gallery
from alpa_lite.ir import schedules
from benchmarks.harness import Benchmark, Row
from benchmarks.numerics import by_model, largest
from tests import pipeline_driver
from tests.pipeline_driver import Driven

KINDS = ("gpt", "gpt_tied", "gpt_scan", "unet", "translator", "moe", "resnet")
MODELS = [f"{library}_{kind}" for kind in KINDS for library in ("linen", "nnx")]
CASES = [
    f"{model} {stages} {microbatches} {schedule}"
    for model in MODELS
    for stages in (2, 3, 4)
    for microbatches in (1, 2, 4, 8)
    for schedule in schedules.NAMES
    if schedule != "interleaved-1f1b" or microbatches % stages == 0
]


@functools.lru_cache(1)
def made(model: str) -> tuple[Any, Any, str, list[Any]]:
    """The step of a model, its arguments, its style, and what three steps give on one device."""
    found = gallery.get("zoo", model)
    step, args = found.make()
    return step, args, found.style, pipeline_driver.on_one_device(step, args, found.style)


@functools.lru_cache(1)
def staged(model: str, stages: int, microbatches: int, schedule: str) -> Driven:
    """A pipeline; others of as many stages and micro-batches share its stages."""
    step, args, *_ = made(model)
    return pipeline_driver.drive(
        step, args, devices=pipeline_driver.DEVICES[stages], microbatches=microbatches, schedule=schedule,
        virtual=2 if schedule == "interleaved-1f1b" else 1,
    )  # fmt: skip


def measure(case: str, cache: str | None = None) -> Row:
    """The largest error of three steps of a case, or why there is none."""
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    model, stages, microbatches, schedule = case.split()
    _, args, style, want = made(model)
    apart = schedule in ("interleaved-1f1b", "zb-h1")  # whose stages are others
    try:
        driven = staged(model, int(stages), int(microbatches), schedule if apart else "1f1b")
    except pipeline_driver.TooFewLayers as refusal:
        return {"skipped": str(refusal)}
    driven = driven if apart else pipeline_driver.rescheduled(driven, schedule)
    row = largest(pipeline_driver.consecutive(driven.executable(), args, style), want)
    if schedule == schedules.NAMES[-1]:
        jax.clear_caches()  # executables take memory mappings, of which a process may have 65,530
    return row


def model_of(case: str) -> str:
    """The model of a case, which has a process of its own."""
    return case.split()[0]


BENCHMARKS = (
    Benchmark(
        "pipeline_correctness", lambda: CASES, measure, lambda rows: by_model(rows, MODELS, model_of), devices=8,
        versions=True, together=model_of,
    ),
)  # fmt: skip
