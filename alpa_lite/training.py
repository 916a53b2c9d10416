"""The training loop of the command line: a model of `alpa_lite.models`, real text, all devices of this machine.

It is an ordinary loop on purpose: a user's own loop looks like this with `alpa_lite.parallelize` around its step.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from alpa_lite import models
from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.ir.timeline import Timeline
from alpa_lite.models import text as texts
from alpa_lite.options import Method
from alpa_lite.plan.plan import Plan
from alpa_lite.report import units

VIRTUAL_DEVICES = 8
"""The number of CPU devices if there is no accelerator and the user gives no number."""

_LINES = 20  # of losses, whatever the number of steps


def local_cluster(devices: int | None, calibration: Literal["auto"] | None = "auto") -> Cluster:
    """The cluster of the first `devices` devices here; None for all accelerators, or eight virtual CPU devices.

    The number of virtual CPU devices can only be set before JAX first looks for devices; accelerators are unaffected.

    Args:
      calibration: as for `Cluster.local`.

    Raises:
      OptionError: if there are fewer devices.
    """
    with contextlib.suppress(RuntimeError):  # raised if JAX has already looked for devices: those must do
        jax.config.update("jax_num_cpu_devices", devices or VIRTUAL_DEVICES)
    found = jax.devices()
    if devices is not None and len(found) < devices:
        raise OptionError(
            f"--devices {devices}: there are {len(found)} {found[0].platform} devices here; ask for fewer"
        )
    if devices is None and found[0].platform == "cpu":
        devices = min(VIRTUAL_DEVICES, len(found))
    return Cluster.local(found[:devices], calibration=calibration)


def abstract(
    model: str, size: str, batch: int, settings: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """A model's train step, and its arguments as shapes.

    Raises:
      OptionError: for a model, size or attribute that does not exist.
    """
    try:
        return models.get(model).abstract(size, batch, **settings)
    except (ValueError, TypeError) as error:
        raise OptionError(str(error)) from error


def train(
    model: str, size: str, *, cluster: Cluster, batch: int, steps: int, text: Sequence[Path] | None, method: Method,
    settings: Mapping[str, Any], seed: int, on_plan: Callable[[Plan], None], on_line: Callable[[str], None],
    on_trace: Callable[[Timeline], None], memory_per_device: int | None = None,
    num_microbatches: int | Literal["auto"] = "auto", plan: Path | None = None, trace: Path | None = None,
    state: Any = None,
) -> Any:  # fmt: skip
    """Plans and trains; language models on text, other models on one random batch repeatedly.

    Args:
      on_plan: gets the plan before the first step.
      on_line: gets each line about the progress.
      on_trace: gets the timeline of one more step, after the last, of a pipeline.
      text: files; None for the sources of Python's standard library.
      plan: a file with a plan to run instead of solving.
      trace: where to write that timeline.
      state: the state to continue from, such as another plan's; None for a fresh model.

    Returns:
      The state, placed as the plan wants it.

    Raises:
      OptionError: for a model, size, attribute or file that does not exist, or a trace of a plan without a pipeline.
      InfeasibleError, PlanError: from planning.
    """
    try:
        spec = models.get(model)
        config = spec.config(size, **settings)
        fun, (fresh, example) = spec.build(size, batch, seed, **settings)
        batches, source = _batches(config, example, text, batch, seed)
    except (ValueError, TypeError, OSError) as error:
        raise OptionError(str(error)) from error
    from alpa_lite.api import parallelize

    state = fresh if state is None else state
    step = parallelize(
        fun, method=method, cluster=cluster, memory_per_device=memory_per_device,
        num_microbatches=num_microbatches, plan=plan,
    )  # fmt: skip
    found = step.plan(state, example)
    if trace is not None and not found.pipelined:
        raise OptionError(
            f"--trace {str(trace)!r}: the plan has one mesh and no pipeline; use --stages 2, or leave --trace out"
        )
    on_plan(found)
    on_line(f"{model} {size}: {spec.parameters(size, **settings):,} parameters, {source}, {steps} steps")
    if state is not fresh:
        state, _ = step.place(state, example)  # it lies where another plan had it
    state = _loop(step, state, batches, steps, on_line)
    if found.pipelined:
        on_trace(step.trace(trace, state, next(batches)))
    if trace is not None:
        on_line(f"executed and predicted timeline of one step saved to {trace}: open it in https://ui.perfetto.dev")
    return state


def _batches(
    config: Any, example: Any, text: Sequence[Path] | None, batch: int, seed: int
) -> tuple[Iterator[Any], str]:
    """Endless batches, and a description of them."""
    if not (hasattr(config, "vocab") and hasattr(config, "seq") and {"inputs", "targets"} <= set(example)):
        if text is not None:
            raise ValueError("--text is for language models; leave it out for this one")
        return itertools.repeat(example), f"one random batch of {batch}, repeated"
    data = texts.read(text)
    if config.vocab < texts.VOCAB:
        raise ValueError(f"vocab={config.vocab}: text is read as bytes, so it must be at least {texts.VOCAB}")
    return texts.batches(data, batch, config.seq, seed), f"{units.nbytes(len(data))} of text"


def _loop(
    step: Callable[..., Any], state: Any, batches: Iterator[Any], steps: int, on_line: Callable[[str], None]
) -> Any:
    """Runs the step. Losses are fetched only for the lines, so that steps overlap; the first step compiles."""
    losses: list[float] = []
    every = max(1, steps // _LINES)
    start = since = time.perf_counter()
    done = 0
    for number in range(1, steps + 1):
        state, metrics = step(state, next(batches))
        if number == 1 or number % every == 0 or number == steps:
            losses.append(float(metrics["loss"]))
            now = time.perf_counter()
            speed = f"compiled and run in {units.seconds(now - since)}"
            if number > 1:
                speed = f"{(number - done) / (now - since):.1f} steps/s"
            on_line(f"step {number:>5}  loss {losses[-1]:.4f}  {speed}")
            since, done = now, number
    on_line(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {units.seconds(time.perf_counter() - start)}")
    return state
