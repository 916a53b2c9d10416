"""Arguments and options that several commands have, and the values that their texts stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from alpa_lite import methods
from alpa_lite.errors import OptionError
from alpa_lite.options import summary
from alpa_lite.steps import NamedStep

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
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Save the plan to this file.")]


def load_step(
    name: str, size: str, batch: int | None, settings: list[str] | None, args: str | None, kwargs: str | None
) -> NamedStep:
    """Returns the step of a command line.

    Raises:
      OptionError: a model without a batch, or options of models with a step of the user's own and the other way round.
    """
    if ":" in name:
        for option, value in (("--batch", batch), ("--set", settings)):
            if value:
                raise OptionError(f"{option} is for models; leave it out: {name!r} has the arguments that --args names")
        return NamedStep(name, args=args or "", kwargs=kwargs or "")
    for option, value in (("--args", args), ("--kwargs", kwargs)):
        if value:
            raise OptionError(
                f"{option} is for steps of your own, package.module:function; leave it out of {name!r}, a model"
            )
    if batch is None:
        raise OptionError(f"--batch is missing: give the number of examples in one step of {name!r}")
    return NamedStep(name, size, batch, settings_of(settings))


def method_of(name: str, stages: int | None, schedule: str | None) -> methods.Method:
    """Returns the method of a command line; stages or a schedule turn "auto" into a pipeline.

    Raises:
      OptionError: for an unknown name, or for stages with a method that is not a pipeline.
    """
    if name == "pipeline" or (name == "auto" and (stages or schedule)):
        return methods.Pipeline(num_stages=stages, schedule=schedule or "auto")
    if stages or schedule:
        raise OptionError(f"--method {name!r} has no stages and no schedule; use --method pipeline, or leave them out")
    kind, _, shape = name.partition(":")
    if shape and kind == "sharded":
        return methods.Sharded(shape_of(shape, "--method sharded:"))
    known = {
        "auto": methods.Auto(),
        "sharded": methods.Sharded(),
        "data": methods.DataParallel(),
        "zero1": methods.Zero(1),
        "zero2": methods.Zero(2),
        "zero3": methods.Zero(3),
        "tensor": methods.TensorParallel(),
        "off": methods.Off(),
    }
    if name not in known:
        names = ", ".join((*known, "pipeline"))
        raise OptionError(f"--method {name!r} is unknown; choose one of {names}, or sharded:4x2")
    return known[name]


def shape_of(text: str, option: str) -> tuple[int, ...]:
    """Returns a shape written as 4x2.

    Raises:
      OptionError: for anything else; names the option.
    """
    try:
        return tuple(int(part) for part in text.replace(",", "x").split("x"))
    except ValueError:
        raise OptionError(f"{option} {text!r} is not a shape; write it as 4x2") from None


def settings_of(items: list[str] | None, option: str = "--set") -> dict[str, Any]:
    """NAME=VALUE pairs of an option; numbers and truth values become such.

    Raises:
      OptionError: for anything else.
    """
    out: dict[str, Any] = {}
    for item in items or ():
        name, equals, value = item.partition("=")
        if not name or not equals:
            example = "seq=2048" if option == "--set" else "effort=quick"
            raise OptionError(f"{option} {item!r}: write NAME=VALUE, such as {example}")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out


def bytes_of(gib: float | None) -> int | None:
    """Whole bytes of a number of GiB."""
    return None if gib is None else int(gib * 2**30)
