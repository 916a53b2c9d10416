"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from alpa_lite.options import summary

PlanFile = Annotated[
    Path, typer.Argument(help="A plan file, written by `alpa-lite plan -o` or Plan.save.", show_default=False)
]
Model = Annotated[
    str, typer.Argument(help="The model: gpt, mlp, ...; an unknown name lists all of them.", show_default=False)
]
Size = Annotated[str, typer.Option(help="The size of the model; an unknown one lists all of them.")]
Batch = Annotated[int, typer.Option(min=1, help="Number of examples in the batch of one step.")]
Devices = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of devices to use; without an accelerator, virtual CPU devices (8).", show_default=False
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        help="auto, sharded, pipeline, data, zero1, zero2, zero3, tensor or off; sharded:4x2 fixes the mesh shape."
    ),
]
Stages = Annotated[
    int | None,
    typer.Option(min=1, help="Use a pipeline on this number of submeshes.", show_default="the method's choice"),
]
Microbatches = Annotated[
    int | None,
    typer.Option(min=1, help=summary("num_microbatches"), show_default="chosen"),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        help="Use a pipeline with this schedule: gpipe, 1f1b, eager-1f1b, interleaved-1f1b or zb-h1.",
        show_default="chosen",
    ),
]
Simulate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the predicted timeline of one pipelined step, for Perfetto."),
]
Trace = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the executed and the predicted timeline of one pipelined step."),
]
Memory = Annotated[
    float | None,
    typer.Option(min=0.0, help="Memory per device that the plan may use, in GiB.", show_default="the device's"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="Set an attribute of the model, such as seq=2048; may be repeated."
    ),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "-O", "--option", metavar="NAME=VALUE",
        help="Any other option of alpa_lite.parallelize, such as effort=thorough; may be repeated.",
    ),
]  # fmt: skip
Seed = Annotated[int, typer.Option(help="Seed of the parameters and of the batches.")]
Arguments = Annotated[
    str | None,
    typer.Option(
        "--args",
        metavar="MODULE:NAME",
        help="The positional arguments of a step of your own: a tuple of arrays or jax.ShapeDtypeStructs, or a "
        "function that returns one.",
        show_default=False,
    ),
]
Keywords = Annotated[
    str | None,
    typer.Option("--kwargs", metavar="MODULE:NAME", help="Likewise its keyword arguments.", show_default=False),
]
