"""Errors of users' callbacks: they name the executable and the micro-batch, and no device waits for one that failed.

JAX makes text of an exception that a callback raises, which knows neither stage nor micro-batch, and shows it where the
results are waited for. And if one device raises while others wait for it in a collective, they wait until the backend
ends the process.

So every callback is wrapped when its executable is traced. The wrapper gets the number of the micro-batch (-1 on one
mesh) as one more operand, and what it raises names the executable, that number and the source line. On one device it
raises at once. On several, it notes the failure and returns zeros, so that all devices go on. A second executable takes
all results of the first and gives them back. In it, the devices tell each other whether there is a note, and all raise
or none: a device that failed alone would be missing in the collectives of every later executable.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError, OptionError
from alpa_lite.ir.graph import Op
from alpa_lite.passes.lowering.program import Instruction, Reshard
from alpa_lite.processes.failure_propagation import monitor
from alpa_lite.runtime.meshes import lower_region

MARKER = f"{ExecutionError.__name__}: "
"""The prefix of our message in the text that JAX makes of an exception."""


class Failures:
    """Errors that callbacks of one step raised on meshes of several devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[tuple[str, int], ExecutionError] = {}
        self._thrown: Counter[tuple[str, int]] = Counter()

    def note(self, name: str, microbatch: int, error: ExecutionError) -> None:
        """Keeps the first error of a run of the executable `name`."""
        with self._lock:
            self._errors.setdefault((name, microbatch), error)

    def has_error(self, name: str, microbatch: int) -> bool:
        """Returns whether a callback of this run raised."""
        return (name, microbatch) in self._errors

    def throw(self, name: str, microbatch: int, count: int) -> None:
        """Raises the error of this run, and forgets it the `count`-th time."""
        key = name, microbatch
        with self._lock:
            error = self._errors.get(key)
            if error is None:  # all devices of the step before have thrown it since this one saw it
                raise ExecutionError(f"{name}, micro-batch {microbatch}: it failed in the step before")
            self._thrown[key] += 1
            if self._thrown[key] == count:
                del self._errors[key], self._thrown[key]
        raise ExecutionError(str(error)) from error.__cause__


def has_callback(instructions: Iterable[Instruction]) -> bool:
    """Returns whether some instruction is a callback, or a loop that holds one."""

    def within(op: Op) -> bool:
        return op.name in _jax.CALLBACKS or any(within(inner) for body in op.bodies for inner in body.ops)

    return any(within(item.op) for item in instructions if not isinstance(item, Reshard))


def locate_callbacks(function: Callable[..., Any], name: str, failures: Failures | None) -> Callable[..., Any]:
    """Returns `function` with its callbacks wrapped, and with the number of the micro-batch, int32, as last argument.

    The wrappers note in `failures` what was raised; without these, they raise it.
    """

    def run(*arrays: Any) -> Any:
        *own, number = arrays

        def replace(params: Any, source: Any, operands: Sequence[Any]) -> Any:
            if failures is not None:
                _refuse_64_bits(name, [*params.get("result_avals", ()), *map(jax.typeof, operands)])
            line = _jax.source_line(source)
            line = f"at {line}" if line else _definition(params["callback"])
            wrapped = _located(params["callback"], name, line, params.get("result_avals", ()), failures)
            return {**params, "callback": wrapped}, [*operands, number]

        with _jax.replacing_callbacks(replace):
            return function(*own)

    return run


def _refuse_64_bits(name: str, avals: Iterable[Any]) -> None:
    """Raises OptionError for values of 64 bits if the calling thread alone has them.

    On several devices JAX runs callbacks in threads of the backend and makes 32 bits of what they read and return. A
    result of another dtype than expected fails on the device that calls, outside of the wrapper, and all others wait.
    """
    wide = sorted({str(aval.dtype) for aval in avals} & {"float64", "int64", "uint64", "complex128"})
    if wide and not _jax.is_x64_in_all_threads():
        raise OptionError(
            f"{name}: a callback takes or returns {', '.join(wide)} under `with jax.enable_x64():`, which holds in the "
            "calling thread alone; JAX runs callbacks of several devices in other threads. "
            "Use jax.config.update('jax_enable_x64', True)"
        )


def lower_failure_check(name: str, mesh: Mesh, results: Sequence[Any], failures: Failures) -> jax.stages.Lowered:
    """Lowers the program that raises on every device of a mesh if a callback failed on one.

    It takes the number of the micro-batch and the results of the executable `name`, and returns a flag and these
    results: `jax.ShapeDtypeStruct`s with their shardings on the mesh.
    """
    flag = jax.ShapeDtypeStruct((1,), np.int32)

    def look(microbatch: Any) -> Any:
        return np.full(1, failures.has_error(name, int(microbatch)), np.int32)

    def throw(microbatch: Any, noted: Any) -> Any:
        if noted.any():
            failures.throw(name, int(microbatch), mesh.size)
        return noted

    def local(number: Any, *blocks: Any) -> Any:
        noted = jax.lax.psum(jax.pure_callback(look, flag, number), mesh.axis_names)
        return [jax.pure_callback(throw, flag, number, noted), *blocks]  # without a result it would be left out

    number = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    flags = jax.ShapeDtypeStruct((mesh.size,), np.int32, sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names)))
    return lower_region(local, mesh, [number, *results], [flags, *results], range(1, 1 + len(results)))


def _definition(callback: Any) -> str:
    """The line that defines the user's function: JAX knows none for functions that `lax.map` and its like call."""
    code = getattr(getattr(callback, "callback_func", None), "__code__", None)
    if code is None:
        return ""
    return f"defined at {'/'.join(code.co_filename.split(os.sep)[-2:])}:{code.co_firstlineno} ({code.co_name})"


def _located(
    callback: Callable[..., Any], name: str, line: str, results: Sequence[Any], failures: Failures | None
) -> Callable[..., Any]:
    """Returns a user's callback whose errors name the executable, the micro-batch and its source line.

    The micro-batch is its last operand, or negative.
    """

    def call(*operands: Any) -> Any:
        *own, number = operands
        microbatch = int(number)
        try:
            return callback(*own)
        except Exception as error:
            part = f", micro-batch {microbatch}" if microbatch >= 0 else ""
            where = f" ({line})" if line else ""
            located = ExecutionError(f"{name}{part}: a callback raised {type(error).__name__}: {error}{where}")
            located.__cause__ = error
            if microbatch >= 0:
                monitor.report_end(located)  # stages in other processes wait for what this one makes
            if failures is None:
                raise located from error
            failures.note(name, microbatch, located)
            return [np.zeros(aval.shape, aval.dtype) for aval in results]

    return call
