"""Other forms of a step: bound to an object as its method, lowered, and compiled.

`step.lower(...).compile()` is as of a function under `jax.jit`: a planned step before and after the compiler. A
pipeline has several executables: what `jax.stages` returns for one is then a tuple, in the program's order.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from alpa_lite import state_io
from alpa_lite.errors import OptionError, SignatureError
from alpa_lite.ir.timeline import Timeline
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime.binding import NewSignature
from alpa_lite.runtime.step import Executable


class Compiled:
    """A planned and compiled step, for arguments of one signature. Call it like the step.

    Attributes:
      plan: the plan.
    """

    def __init__(self, executable: Executable, plan: Plan) -> None:
        self._executable, self.plan = executable, plan
        self._stages = executable.compiled_executables()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
          SignatureError: the arguments are not those that it was lowered for.
        """
        try:
            return self._executable(*args, **kwargs)
        except NewSignature as error:
            raise SignatureError(f"{error}; call the step, which plans for these, or lower it for them") from error

    def as_text(self) -> str:
        """Returns the optimised HLO text; of a pipeline, that of every executable, one after another."""
        return "\n\n".join(one.as_text() for one in self._stages)

    def memory_analysis(self) -> Any:
        """Returns the compiler's count of bytes per device; of a pipeline, a tuple with that of each executable."""
        return self._each(lambda one: one.memory_analysis())

    def cost_analysis(self) -> Any:
        """Returns the compiler's estimate of FLOPs and bytes; of a pipeline, a tuple with that of each executable."""
        return self._each(lambda one: one.cost_analysis())

    def _each(self, read: Callable[[Any], Any]) -> Any:
        found = tuple(map(read, self._stages))
        return found if self.plan.is_pipelined else found[0]


class Lowered:
    """A planned step that is not compiled yet.

    Attributes:
      plan: the plan.
    """

    def __init__(self, executable: Executable, plan: Plan) -> None:
        self._executable, self.plan = executable, plan

    def compile(self) -> Compiled:
        """Compiles the step. The options of the compiler are those of `parallelize`."""
        return Compiled(self._executable, self.plan)

    def as_text(self, dialect: str | None = None, *, debug_info: bool = False) -> str:
        """Returns the StableHLO text of the step, as `jax.stages.Lowered.as_text`.

        Raises:
          OptionError: the plan is a pipeline.
        """
        return self._lowered("as_text").as_text(dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """Returns the module of the step, as `jax.stages.Lowered.compiler_ir`.

        Raises:
          OptionError: the plan is a pipeline.
        """
        return self._lowered("compiler_ir").compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """Returns the compiler's estimate before optimisation, as `jax.stages.Lowered.cost_analysis`.

        Raises:
          OptionError: the plan is a pipeline.
        """
        return self._lowered("cost_analysis").cost_analysis()

    def _lowered(self, name: str) -> Any:
        if self.plan.is_pipelined:
            raise OptionError(f"lower(...).{name}: the plan is a pipeline of several programs; use .compile().{name}()")
        (lowered,) = self._executable.lowered_executables()
        return lowered


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
        if not kwargs and state_io.is_only_batch(step._calls.recent_calls(), args):
            return step.place(*args)
        placed = step.place(self.__self__, *args, **kwargs)
        return (placed[0][1:], placed[1]) if kwargs else placed[1:]

    def profile(self, path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any) -> Timeline:
        """As `ParallelStep.profile`."""
        return self.__func__.profile(path, self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Returns the step's own attributes; those that take its arguments take the others after the object."""
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
