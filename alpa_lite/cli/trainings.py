"""Commands that train on the devices of this machine: `demo`, `train`.

The loop is an ordinary one on purpose: a user's own loop looks like this with `alpa_lite.parallelize` around its step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from alpa_lite.api import ParallelStep, parallelize
from alpa_lite.cli import base, options
from alpa_lite.errors import OptionError
from alpa_lite.ir import units
from alpa_lite.options import Pipeline
from alpa_lite.report import summary, timeline

_LINES = 20  # of losses, whatever the number of steps


def demo(
    devices: int | None = None, steps: int = 120, stages: int | None = 2, microbatches: int | None = 8,
    schedule: str | None = None, trace: Path | None = None,
) -> None:  # fmt: skip
    """Train a tiny GPT on the sources of Python's standard library, first as planned by `auto`, then as a pipeline.

    Without an accelerator it runs on 8 virtual CPU devices. The pipeline continues from the state of the first plan.
    """
    console, cluster = base.console(), base.local_cluster(devices)
    work = _work("gpt", "tiny", 32)
    step = parallelize(work.step, cluster=cluster)
    console.print(summary.render_summary(step.plan(work.state, work.example).with_baselines()))
    console.print()
    state = _run(console, step, work, work.state, steps)
    if (stages or 1) == 1:
        return
    console.print(f"\nthe same training, now as a pipeline of {stages} stages\n", style="bold")
    work = _work("gpt", "tiny", 32, seed=1)
    method = Pipeline(stages, schedule or "auto")
    step = parallelize(work.step, method=method, cluster=cluster, num_microbatches=microbatches or "auto")
    console.print(summary.overview(step.plan(work.state, work.example)))
    console.print()
    state, _ = step.place(state, work.example)
    _run(console, step, work, state, max(1, steps // 2), trace)


def train(
    context: typer.Context, model: str, size: str = "tiny", devices: int | None = None, batch: int = 32,
    steps: int = 200, text: list[Path] | None = None, method: str = "auto", stages: int | None = None,
    microbatches: int | None = None, schedule: str | None = None, memory: float | None = None,
    settings: list[str] | None = None, plan: Path | None = None, output: Path | None = None,
    simulate: Path | None = None, trace: Path | None = None, seed: int = 0,
) -> None:  # fmt: skip
    """Train a model on the devices of this machine; prints the plan, then the loss."""
    if context.args and not text:  # `--text a b` leaves b unparsed
        raise OptionError(f"unexpected argument {context.args[0]!r}; write text files after --text")
    files = None if text is None else [*text, *map(Path, context.args)]
    chosen, cluster = options.method_of(method, stages, schedule), base.local_cluster(devices)
    work = _work(model, size, batch, files, settings, seed)
    step = parallelize(
        work.step, method=chosen, cluster=cluster, memory_per_device=options.bytes_of(memory),
        num_microbatches=microbatches or "auto", plan=plan,
    )  # fmt: skip
    found = step.plan(work.state, work.example)
    if trace is not None and not found.is_pipelined:
        raise OptionError(
            f"--trace {str(trace)!r}: the plan has one mesh and no pipeline; use --stages 2, or leave --trace out"
        )
    console = base.console()
    console.print(summary.render_summary(found.with_baselines()))
    base.write(found, output, simulate, console)
    console.print()
    _run(console, step, work, work.state, steps, trace)


@dataclass(frozen=True)
class _Work:
    """A model to train.

    Attributes:
      step, state: its step and its first state.
      example: a batch.
      batches: endless batches; of language models text, of other models one random batch repeatedly.
      title: the model and its batches in words.
    """

    step: Callable[..., Any]
    state: Any
    example: Any
    batches: Iterator[Any]
    title: str


def _work(
    model: str, size: str, batch: int, text: Sequence[Path] | None = None, settings: list[str] | None = None,
    seed: int = 0,
) -> _Work:  # fmt: skip
    """Returns a model with its batches; text is of some files, by default of the sources of Python's standard library.

    Raises:
      OptionError: for a model, size, attribute or file that does not exist.
    """
    from alpa_lite import models
    from alpa_lite.models import text as texts

    given = options.settings_of(settings)
    try:
        spec = models.get(model)
        config, title = spec.config(size, **given), f"{model} {size}: {spec.parameters(size, **given):,} parameters"
        step, (state, example) = spec.build(size, batch, seed, **given)
        if hasattr(config, "vocab") and hasattr(config, "seq") and {"inputs", "targets"} <= set(example):
            data = texts.read(text)
            if config.vocab < texts.VOCAB:
                raise ValueError(f"vocab={config.vocab}: text is read as bytes, so it must be at least {texts.VOCAB}")
            batches = texts.batches(data, batch, config.seq, seed)
            return _Work(step, state, example, batches, f"{title}, {units.nbytes(len(data))} of text")
    except (ValueError, TypeError, OSError) as error:
        raise OptionError(str(error)) from error
    if text is not None:
        raise OptionError(f"--text {str(text[0])!r} is for language models; leave it out for {model!r}")
    return _Work(step, state, example, itertools.repeat(example), f"{title}, one random batch of {batch}, repeated")


def _run(
    console: Console, step: ParallelStep[..., Any], work: _Work, state: Any, steps: int, trace: Path | None = None
) -> Any:
    """Runs a planned step from a state, and of a pipeline one more whose timeline is drawn. Returns the state.

    Losses are fetched only for the printed lines, so that steps overlap; the first step compiles.

    Args:
      trace: where to write that timeline.
    """
    console.print(f"{work.title}, {steps} steps")
    losses: list[float] = []
    start = since = time.perf_counter()
    shown = 0
    for number in range(1, steps + 1):
        state, metrics = step(state, next(work.batches))
        if number == 1 or number % max(1, steps // _LINES) == 0 or number == steps:
            losses.append(float(metrics["loss"]))
            taken = time.perf_counter() - since
            speed = (
                f"{(number - shown) / taken:.1f} steps/s" if shown else f"compiled and run in {units.seconds(taken)}"
            )
            console.print(f"step {number:>5}  loss {losses[-1]:.4f}  {speed}")
            since, shown = since + taken, number
    console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {units.seconds(time.perf_counter() - start)}")
    if step.plans[-1].is_pipelined:
        executed = step.profile(trace, state, next(work.batches))
        console.print("\n", timeline.draw(executed), "\n", sep="")
    if trace is not None:
        saved = f"executed and predicted timeline of one step saved to {trace}"
        console.print(f"{saved}: open it in https://ui.perfetto.dev")
    return state
