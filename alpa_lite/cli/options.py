"""The arguments and options of all commands, and the values that their texts stand for."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from alpa_lite import methods
from alpa_lite.errors import OptionError
from alpa_lite.options import summary
from alpa_lite.steps import NamedStep

PARAMETERS: Mapping[str, Any] = {
    "file": typer.Argument(help="A plan file, written by `alpa-lite plan -o` or Plan.save."),
    "before": typer.Argument(help="A plan file, written by `alpa-lite plan -o` or Plan.save."),
    "after": typer.Argument(help="A plan file, written by `alpa-lite plan -o` or Plan.save."),
    "model": typer.Argument(help="The model: gpt, mlp, ...; an unknown name lists all of them."),
    "plan model": typer.Argument(metavar="STEP", help=(
        "A model (gpt, mlp, ...), or a step of your own as package.module:function, with --args."
    )),
    "step": typer.Argument(metavar="[STEP]", show_default=False, help=(
        "The step that was planned, as for `alpa-lite plan`; a file of `alpa-lite plan -o` names its own."
    )),
    "path": typer.Argument(help=(
        "An argument's path or its last keys (layers/3/ffn/up/kernel, ffn/up/kernel), an operation, or a source line."
    )),
    "script": typer.Argument(metavar="SCRIPT ARGS...", help=(
        "A Python file, -m and a module, or a program, with arguments."
    )),
    "cluster": typer.Option(help="A name that `alpa-lite clusters` lists, local, or a file of `alpa-lite calibrate`."),
    "size": typer.Option(help="The size of the model; an unknown one lists all of them."),
    "batch": typer.Option(min=1, help="Number of examples in the batch of one step."),
    "plan batch": typer.Option(min=1, help="Of a model, the number of examples in the batch of one step."),
    "verify batch": typer.Option(min=1, help="As for `alpa-lite plan`."),
    "devices": typer.Option(min=1, help="Number of devices to use; without an accelerator, virtual CPU devices (8)."),
    "nodes": typer.Option(min=1, help="Number of nodes, or of TPU slices.", show_default="the machine's"),
    "topology": typer.Option(metavar="AxBxC", help="Shape of a TPU slice, such as 4x4x4."),
    "method": typer.Option(help=(
        "auto, sharded, pipeline, data, zero1, zero2, zero3, tensor or off; sharded:4x2 fixes the mesh shape."
    )),
    "stages": typer.Option(
        min=1, help="Use a pipeline on this number of submeshes.", show_default="the method's choice"
    ),
    "microbatches": typer.Option(min=1, help=summary("num_microbatches"), show_default="chosen"),
    "schedule": typer.Option(show_default="chosen", help=(
        "Use a pipeline with this schedule: gpipe, 1f1b, eager-1f1b, interleaved-1f1b or zb-h1."
    )),
    "memory": typer.Option(
        min=0.0, help="Memory per device that the plan may use, in GiB.", show_default="the device's"
    ),
    "settings": typer.Option(
        "--set", metavar="NAME=VALUE", help="Set an attribute of the model, such as seq=2048; may be repeated."
    ),
    "option": typer.Option("-O", "--option", metavar="NAME=VALUE", help=(
        "Any other option of alpa_lite.parallelize, such as effort=thorough; may be repeated."
    )),
    "args": typer.Option("--args", metavar="MODULE:NAME", help=(
        "The positional arguments of a step of your own: a tuple of arrays or jax.ShapeDtypeStructs, or a function "
        "that returns one."
    )),
    "kwargs": typer.Option("--kwargs", metavar="MODULE:NAME", help="Likewise its keyword arguments."),
    "dump": typer.Option(help=summary("dump_dir")),
    "output": typer.Option("-o", "--output", metavar="FILE", help="Save the plan to this file."),
    "calibrate output": typer.Option(
        "-o", "--output", metavar="FILE", help="Write what was found to this file.",
        show_default="~/.cache/alpa_lite/calibration-DEVICE-NUMBER.json",
    ),
    "simulate": typer.Option(
        metavar="FILE", help="Write the predicted timeline of one pipelined step, for Perfetto."
    ),
    "trace": typer.Option(
        metavar="FILE", help="Write the executed and the predicted timeline of one pipelined step."
    ),
    "full": typer.Option("--full", help="Print everything: shardings, collectives, checks."),
    "html": typer.Option("--html", metavar="FILE", help="Write it as one page for a browser instead."),
    "target": typer.Option(
        help="The machine to compile for: v5e:2x4, or cuda:FILE with XLA's description of a GPU.",
        show_default="the plan's own cluster",
    ),
    "json_file": typer.Option("--json", metavar="FILE", help="Write what was found as JSON; - prints it."),
    "time_limit": typer.Option(min=1.0, help="Seconds for planning again and compiling."),
    "steps": typer.Option(min=1, help="Number of training steps."),
    "demo steps": typer.Option(
        min=1, help="Number of training steps on one mesh; the pipeline takes half as many."
    ),
    "text": typer.Option(metavar="FILE...", help="Text files to train on.", show_default="Python's standard library"),
    "plan": typer.Option(help="Run this plan file instead of solving.", exists=True, dir_okay=False),
    "seed": typer.Option(help="Seed of the parameters and of the batches."),
    "seconds": typer.Option(min=1.0, help="Seconds that it may take, about; samples that do not fit are skipped."),
    "processes": typer.Option("-n", "--processes", min=1, help="Number of processes."),
    "devices_per_process": typer.Option(
        min=1, help="Virtual CPU devices of each process, or its share of the accelerators."
    ),
    "platform": typer.Option(
        help="The platform that JAX shall use, such as cpu.", show_default="what JAX finds"
    ),
    "port": typer.Option(min=1, max=65535, help="Port of the coordinator.", show_default="a free one"),
    "grace": typer.Option(min=0.0, help="Seconds to end in, after a signal or the failure of another process."),
}  # fmt: skip
"""Parameter -> its description; where a command has one of its own, that is behind the name of the command."""


def describe_parameters(command: Callable[..., None]) -> inspect.Signature:
    """Returns the signature of a command with the descriptions of its parameters, as Typer reads them."""
    signature = inspect.signature(command, eval_str=True)
    own = {
        name: one.replace(annotation=Annotated[one.annotation, found])
        for name, one in signature.parameters.items()
        if (found := PARAMETERS.get(f"{command.__name__} {name}", PARAMETERS.get(name)))
    }
    return signature.replace(parameters=[own.get(name, one) for name, one in signature.parameters.items()])


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
