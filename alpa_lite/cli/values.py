"""Parsers of command-line options: methods, shapes, settings, steps by name."""

from __future__ import annotations

import json
from typing import Any

from alpa_lite import options
from alpa_lite.errors import OptionError
from alpa_lite.steps import NamedStep


def named_step(
    name: str, size: str, batch: int | None, settings: list[str] | None, args: str | None, kwargs: str | None
) -> NamedStep:
    """The step of a command line.

    Raises:
      OptionError: a model without a batch, or options of models with a step of the user's own and the other way round.
    """
    if ":" in name:
        for option, value in (("--batch", batch), ("--set", settings)):
            if value:
                raise OptionError(f"{option} is for models; {name!r} has the arguments that --args names")
        return NamedStep(name, args=args or "", kwargs=kwargs or "")
    for option, value in (("--args", args), ("--kwargs", kwargs)):
        if value:
            raise OptionError(f"{option} is for steps of your own, package.module:function; {name!r} is a model")
    if batch is None:
        raise OptionError(f"--batch is missing: how many examples one step of {name!r} takes")
    return NamedStep(name, size, batch, settings_of(settings))


def method_of(name: str, stages: int | None, schedule: str | None) -> options.Method:
    """The method of a command line; stages or a schedule turn "auto" into a pipeline.

    Raises:
      OptionError: for an unknown name, or for stages with a method that is no pipeline.
    """
    if name == "pipeline" or (name == "auto" and (stages or schedule)):
        return options.Pipeline(num_stages=stages, schedule=schedule or "auto")
    if stages or schedule:
        raise OptionError(f"--method {name!r} has no stages and no schedule; use --method pipeline, or leave them out")
    kind, _, shape = name.partition(":")
    if shape and kind == "sharded":
        return options.Sharded(shape_of(shape, "--method sharded:"))
    known = {
        "auto": options.Auto(),
        "sharded": options.Sharded(),
        "data": options.DataParallel(),
        "zero1": options.Zero(1),
        "zero2": options.Zero(2),
        "zero3": options.Zero(3),
        "tensor": options.TensorParallel(),
        "off": options.Off(),
    }
    if name not in known:
        names = ", ".join((*known, "pipeline"))
        raise OptionError(f"--method {name!r} is unknown; choose one of {names}, or sharded:4x2")
    return known[name]


def shape_of(text: str, option: str) -> tuple[int, ...]:
    """A shape written as 4x2.

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
