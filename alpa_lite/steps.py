"""Steps by name: what the command line plans, and what a plan file remembers of it.

A step is a model of this project with its size and batch, or any function, as `package.module:attribute`, with its
arguments from another such name. Modules are looked for in the current directory first, as Python itself does for a
script. A plan holds no program: the file that the command line writes also names the step, so that the plan can be
compiled later.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alpa_lite.errors import OptionError, PlanError
from alpa_lite.ir import json_codec

KEY = "step"
"""Under which a plan file names its step."""


@dataclass(frozen=True)
class NamedStep:
    """A step and its arguments by name.

    Attributes:
      name: of a model, or `package.module:attribute` of a function.
      size, batch, settings: of a model.
      args: for a function, the name of its positional arguments: a tuple or list of arrays, `jax.ShapeDtypeStruct`s or
        pytrees of them, or a function without parameters that returns one.
      kwargs: likewise of its keyword arguments, a mapping; "" for none.
    """

    name: str
    size: str = ""
    batch: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    args: str = ""
    kwargs: str = ""

    @property
    def is_model(self) -> bool:
        """Whether it is a model of this project."""
        return ":" not in self.name

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Returns the function, its positional arguments and its keyword arguments.

        Raises:
          OptionError: there is no such model, size, module or attribute, or it is of another kind.
        """
        if self.is_model:
            from alpa_lite import models

            try:
                fun, args = models.get(self.name).abstract(self.size, self.batch, **self.settings)
            except (ValueError, TypeError) as error:
                raise OptionError(str(error)) from error
            return fun, tuple(args), {}
        fun = attribute(self.name, "the step")
        if not callable(fun):
            raise OptionError(f"{self.name!r} is a {type(fun).__name__}; name the train step, a function")
        if not self.args:
            raise OptionError(
                f"{self.name!r}: give its arguments, as in --args package.module:abstract_args, a tuple of arrays or "
                "jax.ShapeDtypeStructs, or a function that returns one"
            )
        args = _value(self.args, "--args")
        if not isinstance(args, tuple | list):
            raise OptionError(f"--args {self.args!r} is a {type(args).__name__}; give a tuple, one item per argument")
        kwargs = _value(self.kwargs, "--kwargs") if self.kwargs else {}
        if not isinstance(kwargs, Mapping):
            raise OptionError(f"--kwargs {self.kwargs!r} is a {type(kwargs).__name__}; give a mapping of names")
        return fun, tuple(args), dict(kwargs)


def attribute(name: str, what: str) -> Any:
    """Returns the object that `package.module:attribute` names; attributes of attributes are joined by dots.

    Raises:
      OptionError: there is no such module or attribute; `what` says what it should have been.
    """
    module_name, _, path = name.partition(":")
    if not module_name or not path:
        raise OptionError(f"{what} {name!r}: write package.module:attribute")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise  # the module is there, and something that it imports is not
        raise OptionError(
            f"{what} {name!r}: there is no module {error.name!r} in {here} or among the installed ones; check its name"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, dir(found), 3)
            hint = f"; did you mean {', '.join(close)}?" if close else "; check its name"
            raise OptionError(f"{what} {name!r}: {module_name} has no attribute {path!r}{hint}")
        found = getattr(found, part)
    return found


def remember(path: Path, step: NamedStep) -> None:
    """Names the step in a plan file that was just written."""
    json_codec.write_json(path, {**json_codec.read_json(path), KEY: json_codec.encode(step)})


def step_of_plan_file(path: Path) -> NamedStep | None:
    """Returns the step that a plan file names, if it does.

    Raises:
      PlanError: the file names a step in a form that this version does not know.
    """
    try:
        data = json_codec.read_json(path).get(KEY)
    except (OSError, ValueError, AttributeError):
        return None  # reading the plan says what is wrong with the file
    if data is None:
        return None
    try:
        return json_codec.decode_fields(NamedStep, data)
    except json_codec.DecodeError as error:
        raise PlanError(
            f"plan file {str(path)!r}: its {KEY!r} is not what this alpa_lite writes; plan again"
        ) from error


def _value(name: str, what: str) -> Any:
    """Returns the object of a name, or its result if it is a function."""
    found = attribute(name, what)
    return found() if callable(found) else found
