"""The back-end for one mesh: the step is one executable, called once.

XLA reuses a donated buffer for an output of the same type and sharding, and for no other; JAX warns of a donated buffer
that no output can use. So "auto" donates the state leaves whose new value has their sharding, and of the arguments that
a user names those are donated that find such an output. JAX gives the buffers to the outputs of their type in order.
Where a leaf's new value is written over another leaf, XLA copies the old values that are still to be read; so donated
arguments are in the order of the outputs that replace them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.passes.tracing.arguments import donated_leaves
from alpa_lite.plan.pins import layout_of_spec
from alpa_lite.runtime import callbacks, placement
from alpa_lite.runtime.binding import Buffers
from alpa_lite.runtime.compile import Call, FlatFunction, compile_all, picker, with_number
from alpa_lite.runtime.multihost import global_array
from alpa_lite.runtime.step import Donate, Executable, LoadOptions


class SingleExecutable(Executable):
    """A planned step on one mesh. Its buffers are its arguments, then its constants, by their numbers."""

    def __init__(
        self,
        traced: Traced,
        function: Callable[..., Sequence[Any]],
        mesh: Mesh,
        in_specs: Sequence[PartitionSpec],
        out_specs: Sequence[PartitionSpec],
        options: LoadOptions | None = None,
        *,
        calls_back: bool = False,
    ) -> None:
        """Prepares the executable; it is compiled by the first call, or by `compiled()`.

        Args:
          function: from the flat arguments, then the graph's constants, to the flat outputs, all global arrays.
          in_specs: a spec for each argument, then for each constant; those of constants may be missing (replicated).
          calls_back: whether the step calls functions of the user on the host, which may raise.
        """
        self.mesh, self._options = mesh, options or LoadOptions()
        block, values, count = traced.graph.block, traced.graph.values, len(traced.arguments)
        specs = [*in_specs[:count], *(in_specs[count:] or [PartitionSpec()] * len(traced.graph.constants))]
        shardings: dict[Any, NamedSharding] = {}  # equal ones are one object: executables compare identities first

        def typed(aval: Any, spec: PartitionSpec, weak: bool) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec() if 0 in aval.shape else spec  # as executables return what has no elements
            sharding = shardings.setdefault(spec, NamedSharding(mesh, spec))
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)

        avals = [values[number].aval for number in block.inputs]
        inputs = list(map(typed, avals, specs, [bool(getattr(aval, "weak_type", False)) for aval in avals]))
        outputs = [atom.aval if isinstance(atom, Lit) else values[atom].aval for atom in block.outputs]
        results = list(map(typed, outputs, out_specs, [output.weak for output in traced.outputs]))
        self._in_shardings = [one.sharding for one in inputs]
        self._out_shardings = [one.sharding for one in results]
        donated = donated_arguments(traced, inputs, results, self._options.donate)
        in_place = {n: n for n in donated_arguments(traced, inputs, results, "auto")}
        if not in_place.keys() >= set(donated):  # another donated argument may share a buffer: each call has to look
            in_place = {}
        inputs_of, sharding = [(n,) for n in range(count)], self._in_shardings.__getitem__
        buffers = Buffers(inputs_of, sharding, frozenset(donated), in_place, takes_uncommitted=True)
        failures = callbacks.Failures() if calls_back and mesh.size > 1 else None
        self._function = FlatFunction(traced.name, function, mesh, inputs, results, donated, failures)
        self._pick_donated, self._pick_kept = picker(donated), picker(self._function.kept)
        self._constants: list[Any] = []
        self._call: Call | None = None
        super().__init__(traced, buffers, self._options)

    def lowered(self) -> Iterator[jax.stages.Lowered]:
        """The step lowered for its mesh, whose devices may be those of a topology that is described alone."""
        yield self._function.lower()

    def _compile(self) -> tuple[Any, ...]:
        ((compiled, self._call),) = compile_all(self._traced.name, [self._function], self._options.compiler_options)
        constants = self._traced.graph.constants
        self._constants = placement.copies(constants, self._in_shardings[len(self._traced.arguments) :])
        if self._function.failures is not None:
            (number,) = global_array.put([np.int32(-1)], [NamedSharding(self.mesh, PartitionSpec())])
            self._call = with_number(self._call, number)
        return (compiled,)

    def _start(self, leaves: Sequence[Any]) -> list[Any]:
        return [*leaves, *self._constants]

    def _execute(self, buffers: list[Any]) -> list[Any]:
        assert self._call is not None
        return list(self._call(self._pick_donated(buffers), self._pick_kept(buffers)))

    @property
    def _program_shardings(self) -> tuple[list[NamedSharding], list[NamedSharding]]:
        return self._in_shardings[: len(self._traced.arguments)], list(self._out_shardings)


def donated_arguments(traced: Traced, inputs: Sequence[Any], results: Sequence[Any], donate: Donate) -> list[int]:
    """Returns the arguments whose buffers become outputs, in the order of these outputs as far as it is known.

    These are the requested arguments whose type and sharding an output has; JAX would warn of others.

    Args:
      inputs, results: types of the arguments and of the outputs, with shardings on one mesh.
    """
    arguments, outputs = (
        [(tuple(one.shape), one.dtype, layout_of_spec(one.sharding.spec, len(one.shape))) for one in types]
        for types in (inputs, results)
    )
    if isinstance(donate, str):
        if donate != "auto":
            raise OptionError(f'donate_argnums is {donate!r}; give "auto", an int or a tuple of ints')
        return [argument for output, argument in sorted(traced.state) if outputs[output] == arguments[argument]]
    free = Counter(outputs)
    chosen = []
    for argument in donated_leaves(traced, donate):
        if free[arguments[argument]] > 0:
            free[arguments[argument]] -= 1
            chosen.append(argument)
    replaced_by = {argument: output for output, argument in traced.state}
    return sorted(chosen, key=lambda argument: replaced_by.get(argument, len(outputs)))
