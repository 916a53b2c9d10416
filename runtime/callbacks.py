"""What a user's callback raises in an executable of a pipeline: it names where it was, and leaves no device waiting.

Problem. JAX makes text of an exception that a callback raises, and shows it where the results are waited for, be it in
the dispatch loop or in the user's own `block_until_ready` after it. The text knows neither stage nor micro-batch. And
if one device raises while others wait for it in a collective, they wait until the backend ends the process.

Answer. Every callback is wrapped when its executable is traced. The wrapper gets the number of the micro-batch as one
more operand, and what it raises names the executable, that number and the source line. On one device it raises at once.
On several, it notes the failure and returns zeros, so that all devices go on; at the end of the executable, when all of
its outputs are there, each device looks for a note and raises.

A callback without results (a print) may run after that look. Its note is found at the next call of the step.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from alpa_lite import _jax
from alpa_lite.errors import ExecutionError

MARKER = f"{ExecutionError.__name__}: "
"""What stands before our message in the text that JAX makes of an exception."""


class Failures:
    """The notes of one pipelined step: what raised on a submesh of several devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[tuple[str, int], ExecutionError] = {}
        self._told: dict[tuple[str, int], set[int]] = {}  # the devices that have raised it

    def note(self, name: str, microbatch: int, error: ExecutionError) -> None:
        """Keeps the first error of a run of the executable `name`."""
        with self._lock:
            self._errors.setdefault((name, microbatch), error)

    def look(self, name: str, microbatch: int, device: int, count: int) -> None:
        """Raises the error that is noted, once on each of `count` devices."""
        key = name, microbatch
        with self._lock:
            error = self._errors.get(key)
            told = self._told.setdefault(key, set())
            if error is None or device in told:
                return
            told.add(device)
            if len(told) == count:
                del self._errors[key], self._told[key]
        raise ExecutionError(str(error)) from error.__cause__

    def settle(self) -> None:
        """Forgets what some device has raised; raises what none has."""
        with self._lock:
            left = [error for key, error in self._errors.items() if not self._told.get(key)]
            self._errors.clear()
            self._told.clear()
        if left:
            raise left[0]

    def clear(self) -> None:
        """Forgets everything."""
        with self._lock:
            self._errors.clear()
            self._told.clear()


def has_callbacks(function: Callable[..., Any], *specs: Any) -> bool:
    """Whether a function of arrays like `specs` (`jax.ShapeDtypeStruct`s) calls back. Traces it."""
    met: list[Any] = []

    def meet(params: Any, source: Any, operands: Any) -> Any:
        met.append(source)
        return params, operands

    with _jax.replacing_callbacks(meet):
        jax.eval_shape(function, *specs)
    return bool(met)


def located(
    function: Callable[..., Sequence[Any]], name: str, mesh: Mesh, specs: Sequence[PartitionSpec], failures: Failures
) -> Callable[..., Sequence[Any]]:
    """`function` with its callbacks wrapped.

    It has one more argument at the end, the number of the micro-batch, int32; and one more result, which nobody needs:
    an int32 for each device, sharded as `per_device`.

    Args:
      function: from global arrays to a list of global arrays.
      name: of the executable, for messages.
      mesh: what it runs on.
      specs: of its results.
      failures: where wrappers note what was raised.
    """
    several = mesh.size > 1

    def run(*arrays: Any) -> Sequence[Any]:
        *own, number = arrays

        def replace(params: Any, source: Any, operands: Sequence[Any]) -> Any:
            shapes = [(aval.shape, aval.dtype) for aval in params.get("result_avals", ())]
            line = _jax.source_line(source)
            line = f"at {line}" if line else _definition(params["callback"])
            wrapped = _Located(params["callback"], name, line, shapes, failures if several else None)
            return {**params, "callback": wrapped}, [*operands, number]

        with _jax.replacing_callbacks(replace):
            results = function(*own)
        looked = _look(results, number, name, mesh, specs, failures) if several else jnp.zeros(1, np.int32)
        return [*results, looked]

    return run


def per_device(mesh: Mesh) -> PartitionSpec:
    """Of an array that has one element on each device."""
    return PartitionSpec(mesh.axis_names)


def _look(
    results: Sequence[Any], number: Any, name: str, mesh: Mesh, specs: Sequence[PartitionSpec], failures: Failures
) -> Any:
    """Makes each device look for a note once its blocks of the results are there.

    The result of the look must be a result of the executable, or it is left out. (An `io_callback` is not, but leaves a
    token behind that raises once more when Python ends.)
    """

    def look(microbatch: Any, device: Any, *_: Any) -> Any:
        failures.look(name, int(microbatch), int(device), mesh.size)
        return np.zeros(1, np.int32)

    def local(number: Any, *blocks: Any) -> Any:
        device = jax.lax.axis_index(mesh.axis_names)
        shape = jax.ShapeDtypeStruct((1,), np.int32)
        return jax.pure_callback(look, shape, number, device, *[_first(block) for block in blocks])

    region = jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), *specs), out_specs=per_device(mesh), check_vma=False
    )  # fmt: skip
    return region(number, *results)


def _first(block: Any) -> Any:
    """One element of a block, that cannot be had before the block."""
    if jnp.issubdtype(block.dtype, jax.dtypes.prng_key):
        block = jax.random.key_data(block)
    return jnp.ravel(block)[:1]


def _definition(callback: Any) -> str:
    """Where the user's function is defined: JAX knows no line of what `lax.map` and its like call directly."""
    code = getattr(getattr(callback, "callback_func", None), "__code__", None)
    if code is None:
        return ""
    return f"defined at {'/'.join(code.co_filename.split(os.sep)[-2:])}:{code.co_firstlineno} ({code.co_name})"


class _Located:
    """A user's callback that names, in what it raises, the executable, the micro-batch and its source line.

    The micro-batch is its last operand, or negative.
    """

    def __init__(
        self,
        callback: Callable[..., Any],
        name: str,
        line: str,
        shapes: Sequence[tuple[tuple[int, ...], Any]],
        failures: Failures | None,
    ) -> None:
        self._callback, self._name, self._line = callback, name, line
        self._shapes, self._failures = shapes, failures

    def __call__(self, *operands: Any) -> Any:
        *own, number = operands
        microbatch = int(number)
        try:
            return self._callback(*own)
        except Exception as error:
            part = f", micro-batch {microbatch}" if microbatch >= 0 else ""
            line = f" ({self._line})" if self._line else ""
            located = ExecutionError(f"{self._name}{part}: a callback raised {type(error).__name__}: {error}{line}")
            if self._failures is None:
                raise located from error
            located.__cause__ = error
            self._failures.note(self._name, microbatch, located)
            return [np.zeros(shape, dtype) for shape, dtype in self._shapes]
