"""`step.lower(...).compile()`, as of a function under `jax.jit`: a planned step before and after the compiler.

A pipeline has several executables: what `jax.stages` returns for one is then a tuple, in the program's order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alpa_lite.errors import OptionError, SignatureError
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
        self._stages = executable.compiled()

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
        """The optimised HLO text; of a pipeline, that of every executable, one after another."""
        return "\n\n".join(one.as_text() for one in self._stages)

    def memory_analysis(self) -> Any:
        """The compiler's count of bytes per device; of a pipeline, a tuple with that of each executable."""
        return self._each(lambda one: one.memory_analysis())

    def cost_analysis(self) -> Any:
        """The compiler's estimate of FLOPs and bytes; of a pipeline, a tuple with that of each executable."""
        return self._each(lambda one: one.cost_analysis())

    def _each(self, read: Callable[[Any], Any]) -> Any:
        found = tuple(map(read, self._stages))
        return found if self.plan.pipelined else found[0]


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
        """The StableHLO text of the step, as `jax.stages.Lowered.as_text`.

        Raises:
          OptionError: the plan is a pipeline.
        """
        return self._lowered("as_text").as_text(dialect, debug_info=debug_info)

    def compiler_ir(self, dialect: str | None = None) -> Any:
        """The module of the step, as `jax.stages.Lowered.compiler_ir`.

        Raises:
          OptionError: the plan is a pipeline.
        """
        return self._lowered("compiler_ir").compiler_ir(dialect)

    def cost_analysis(self) -> Any:
        """The compiler's estimate before optimisation, as `jax.stages.Lowered.cost_analysis`.

        Raises:
          OptionError: the plan is a pipeline.
        """
        return self._lowered("cost_analysis").cost_analysis()

    def _lowered(self, name: str) -> Any:
        if self.plan.pipelined:
            raise OptionError(f"lower(...).{name}: the plan is a pipeline of several programs; use .compile().{name}()")
        (lowered,) = self._executable.lowered()
        return lowered
