"""Commands that make and read plans: `plan`, `show`, `verify`, `explain`, `diff`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from alpa_lite import steps, verifying
from alpa_lite.api import make_plan
from alpa_lite.cli import base, options, tables
from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.plan.plan import Plan
from alpa_lite.report import summary as brief


def plan(
    model: str, cluster: str, batch: int | None = None, size: str = "small", args: str | None = None,
    kwargs: str | None = None, nodes: int | None = None, topology: str | None = None, output: Path | None = None,
    method: str = "auto", stages: int | None = None, microbatches: int | None = None, schedule: str | None = None,
    memory: float | None = None, settings: list[str] | None = None, simulate: Path | None = None,
    option: list[str] | None = None, dump: Path | None = None,
) -> None:  # fmt: skip
    """Plan a model, or any train step, for a cluster that need not be attached; nothing is executed.

    A step of your own is looked for in the current directory first:
    alpa-lite plan train:step --args train:abstract_args --cluster h100
    """
    machine = _machine(cluster, nodes, topology)
    named = options.load_step(model, size, batch, settings, args, kwargs)
    step, positional, keywords = named.load()
    given = {
        "method": options.method_of(method, stages, schedule), "memory_per_device": options.bytes_of(memory),
        "num_microbatches": microbatches or "auto", "dump_dir": dump, **options.settings_of(option, "--option"),
        "cluster": machine,
    }  # fmt: skip
    found = make_plan(step, *positional, kwargs=keywords, **_with_own_options(step, given))
    console = base.console()
    console.print(brief.render_summary(found.with_baselines()))
    base.write(found, output, simulate, console)
    if output is not None:
        steps.remember(output, named)


def _machine(name: str, nodes: int | None, topology: str | None) -> Cluster:
    """Returns the cluster of a command line."""
    shape = None if topology is None else options.shape_of(topology, "--topology")
    if name.lower() == "local":
        return base.local_cluster(None)
    if nodes is None and shape is None:
        return Cluster.from_name(name)
    return Cluster.preset(name, nodes=nodes, topology=shape)


def _with_own_options(step: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a command line, and those that a step is decorated with where the line gives none."""
    own = verifying.options_of(step)
    if not own:
        return given
    usual = {"method": options.method_of("auto", None, None), "num_microbatches": "auto"}
    return own | {name: value for name, value in given.items() if value not in (None, usual.get(name))}


def show(file: Path, full: bool = False, html: Path | None = None) -> None:
    """Print a plan: what was chosen, what it yields, and how other methods would do; with --full everything."""
    found = Plan.load(file)
    if html is None:
        base.console().print(brief.render_plan(found) if full else brief.render_summary(found))
        return
    with base.report_unwritable("--html", html):
        found.to_html(html)
    base.console().print(f"saved to {html}: open it in a browser")


def verify(
    file: Path, step: str | None = None, target: str | None = None, size: str = "small", batch: int | None = None,
    settings: list[str] | None = None, args: str | None = None, kwargs: str | None = None,
    json_file: Path | None = None, time_limit: float = 600.0,
) -> None:  # fmt: skip
    """Compile a plan with the compiler of its target, without the hardware, and compare.

    Prints the collectives and the memory of the compiled program and of the plan. Ends with exit code 1 if the program
    communicates what the plan does not say. For TPUs install alpa-lite with its extra tpu-verify, for CUDA with
    cuda-verify.
    """
    Plan.load(file)
    named = (
        steps.step_of_plan_file(file) if step is None else options.load_step(step, size, batch, settings, args, kwargs)
    )
    if named is None:
        raise OptionError(
            f"{str(file)!r} does not name its step; give it: alpa-lite verify {file} package.module:function --args "
            "package.module:abstract_args, or a model with --size and --batch"
        )
    found = verifying.verify(file, named, target, time_limit)
    written = json.dumps(found, indent=1)
    if str(json_file) == "-":
        typer.echo(written)
    else:
        if json_file is not None:
            with base.report_unwritable("--json", json_file):
                json_file.write_text(written + "\n", encoding="utf-8")
        base.console().print(tables.verification(found))
    if not found["communicates"]:
        raise typer.Exit(1)


def explain(file: Path, path: str) -> None:
    """Explain the sharding of an argument or operation, and which changes would make another choice win."""
    base.console().print(Plan.load(file).explain(path))


def diff(before: Path, after: Path) -> None:
    """Compare two plans: mesh, shardings, collectives, memory, times."""
    base.console().print(Plan.load(before).diff(Plan.load(after)))
