"""Steps that are methods: bound to an object, and with the attributes of the function that they were made from."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from alpa_lite import state_io
from alpa_lite.ir.timeline import Timeline

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class BoundStep(Generic[P, R]):
    """A step that is a method, bound to an object, which becomes its first argument."""

    def __init__(self, step: Any, instance: Any) -> None:
        self.__func__, self.__self__ = step, instance

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the step; see `ParallelStep`."""
        return self.__func__(self.__self__, *args, **kwargs)

    def place(self, *args: Any, **kwargs: Any) -> Any:
        """As `ParallelStep.place`, of the arguments after the object that the step is bound to, or of the batch."""
        step = self.__func__
        if not kwargs and state_io.is_batch_alone(step._calls.recent(), args):
            return step.place(*args)
        placed = step.place(self.__self__, *args, **kwargs)
        return (placed[0][1:], placed[1]) if kwargs else placed[1:]

    def profile(self, path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any) -> Timeline:
        """As `ParallelStep.profile`."""
        return self.__func__.profile(path, self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """The step's own attributes; those that take its arguments take the others after the object."""
        value = getattr(self.__func__, name)
        return functools.partial(value, self.__self__) if name in ("plan", "shardings", "hlo", "lower") else value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundStep) and (self.__func__, id(self.__self__)) == (
            other.__func__, id(other.__self__)
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash((self.__func__, id(self.__self__)))

    def __repr__(self) -> str:
        return f"<{self.__func__!r} bound to a {type(self.__self__).__name__}>"


def copy_attributes(step: Any, fun: Callable[..., Any]) -> None:
    """Gives a step the name, the documentation and the attributes of its function, as `functools.update_wrapper`.

    A callable object keeps its attributes: they are its own, not those of a function.
    """
    functools.update_wrapper(step, fun, updated=())
    if inspect.isfunction(fun):
        step.__dict__.update({name: value for name, value in vars(fun).items() if not hasattr(type(step), name)})
    step.__dict__["__wrapped__"] = fun
    if not hasattr(fun, "__name__"):
        inner = fun.func if isinstance(fun, functools.partial) else type(fun)
        step.__dict__["__name__"] = getattr(inner, "__name__", "step")
