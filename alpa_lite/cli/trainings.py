"""Commands that train on the devices of this machine: `demo`, `train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from alpa_lite.cli import base, options, values
from alpa_lite.errors import OptionError


def demo(
    devices: options.Devices = None,
    steps: Annotated[
        int, typer.Option(min=1, help="Number of training steps on one mesh; the pipeline takes half as many.")
    ] = 120,
    stages: options.Stages = 2,
    microbatches: options.Microbatches = 8,
    schedule: options.ScheduleName = None,
    trace: options.Trace = None,
) -> None:
    """Train a tiny GPT on the sources of Python's standard library, first as planned by `auto`, then as a pipeline.

    Without an accelerator it runs on 8 virtual CPU devices. The pipeline continues from the state of the first plan.
    """
    shared: dict[str, Any] = {"devices": devices, "batch": 32, "text": None, "settings": None}
    state = _train("gpt", "tiny", steps=steps, method="auto", seed=0, **shared)
    if (stages or 1) > 1:
        base.console().print(f"\nthe same training, now as a pipeline of {stages} stages\n", style="bold")
        _train(
            "gpt", "tiny", steps=max(1, steps // 2), method="pipeline", seed=1, stages=stages, schedule=schedule,
            microbatches=microbatches, trace=trace, state=state, brief=True, **shared,
        )  # fmt: skip


def train(
    context: typer.Context,
    model: options.Model,
    size: options.Size = "tiny",
    devices: options.Devices = None,
    batch: options.Batch = 32,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 200,
    text: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="Text files to train on.", show_default="Python's standard library"),
    ] = None,
    method: options.MethodName = "auto",
    stages: options.Stages = None,
    microbatches: options.Microbatches = None,
    schedule: options.ScheduleName = None,
    memory: options.Memory = None,
    settings: options.Settings = None,
    plan: Annotated[
        Path | None, typer.Option(help="Run this plan file instead of solving.", exists=True, dir_okay=False)
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Save the plan to this file.")] = None,
    simulate: options.Simulate = None,
    trace: options.Trace = None,
    seed: options.Seed = 0,
) -> None:
    """Train a model on the devices of this machine; prints the plan, then the loss."""
    if context.args and not text:  # `--text a b` leaves b unparsed
        raise OptionError(f"unexpected argument {context.args[0]!r}; text files follow --text")
    files = None if text is None else [*text, *map(Path, context.args)]
    _train(
        model, size, devices=devices, batch=batch, steps=steps, text=files, method=method, stages=stages,
        microbatches=microbatches, schedule=schedule, memory=memory, settings=settings, plan=plan, output=output,
        simulate=simulate, trace=trace, seed=seed,
    )  # fmt: skip


def _train(
    model: str,
    size: str,
    *,
    devices: int | None,
    method: str,
    settings: list[str] | None,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    memory: float | None = None,
    output: Path | None = None,
    simulate: Path | None = None,
    brief: bool = False,
    **options: Any,
) -> Any:
    """Sets the devices up, then trains; prints the plan, or with `brief` its beginning, and saves it if asked."""
    from alpa_lite import training

    console = base.console()
    chosen = values.method_of(method, stages, schedule)
    cluster = training.local_cluster(devices)
    from alpa_lite.report import summary, timeline
    from alpa_lite.report import text as report

    def show(plan: Any) -> None:
        console.print(report.overview(plan) if brief else summary.renderable(plan.compared()))
        base.write(plan, output, simulate, console)
        console.print()

    return training.train(
        model,
        size,
        cluster=cluster,
        settings=values.settings_of(settings),
        method=chosen,
        memory_per_device=values.bytes_of(memory),
        num_microbatches=microbatches or "auto",
        on_plan=show,
        on_line=console.print,
        on_trace=lambda executed: console.print("\n", timeline.draw(executed), "\n", sep=""),
        **options,
    )
