"""The buffers of a program on the devices that run it: where each is, and which of them hold state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite.errors import PlanError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.program import Program, Run
from alpa_lite.passes.lowering.program import spec_of
from alpa_lite.runtime import meshes, placement


class ProgramBuffers:
    """The buffers of a program, by their numbers.

    Attributes:
      program: that has them.
      devices: of the cluster, by number.
      meshes: the submeshes.
      here: for each submesh, whether this process has a device of it.
      is_local: for each submesh, whether this process has all devices of it.
      runs: for each executable its first run.
      donated: those of arguments that a run overwrites, or that are results: a caller's array must not be in them.
      in_place: argument -> its buffer, of the state that comes back where the next call reads it.
      unmade: the results that no run makes.
    """

    def __init__(self, traced: Traced, program: Program, devices: Sequence[Any] | None) -> None:
        """Places nothing.

        Args:
          devices: in the order of the cluster; None for the first that are available.

        Raises:
          PlanError: there are fewer devices than the program needs.
        """
        self.program = program
        self.devices = meshes.available() if devices is None else list(devices)
        needed = max(submesh.devices.stop for submesh in program.submeshes)
        if program.schedule != "none" and len(self.devices) < needed:
            raise PlanError(
                f"the plan's {len(program.submeshes)} submeshes have {needed} devices, but there are "
                f"{len(self.devices)}; plan for a cluster of {len(self.devices)}, or start JAX with more devices"
            )
        self.meshes = [meshes.submesh_of(submesh, self.devices) for submesh in program.submeshes]
        owners = [{device.process_index for device in mesh.devices.flat} for mesh in self.meshes]
        self.here = [jax.process_index() in one for one in owners]
        self.is_local = [one == {jax.process_index()} for one in owners]
        self._shardings: dict[Any, NamedSharding] = {}
        runs = [item for items in program.lists for item in items if isinstance(item, Run)]
        self.runs = {run.executable: run for run in reversed(runs)}
        weak = {b for b, output in zip(program.outputs, traced.outputs, strict=True) if output.weak}
        self._weak = {(run.executable, n) for run in runs for n, b in enumerate(run.outputs) if b in weak}
        made = {b for run in runs for b in run.outputs}
        self.unmade = [n for n, b in enumerate(program.outputs) if b not in made]
        given = {b for group in program.inputs for b in group}
        self.donated = frozenset(
            given & {*program.outputs, *(b for run in runs for b in program.consumed_buffers(run))}
        )
        self.in_place: dict[int, int] = {}
        for output, argument in traced.state if all(self.is_local) or not traced.stacked else ():
            first, *others = [self._place(b) for b in program.inputs[argument]] or [None]
            if not others and first == self._place(program.outputs[output]):
                self.in_place[argument] = program.inputs[argument][0]

    def _place(self, number: int) -> tuple[Any, ...]:
        """Returns the submesh, the layout and the type of a buffer."""
        one = self.program.buffers[number]
        return one.mesh, one.layout, one.shape, one.dtype

    def is_key(self, number: int) -> bool:
        """Returns whether a buffer holds random keys."""
        return jnp.issubdtype(self.program.buffers[number].dtype, jax.dtypes.extended)

    def sharding(self, number: int) -> NamedSharding:
        """Returns the sharding of a buffer. Compiled programs replicate what has no elements."""
        one = self.program.buffers[number]
        return self.sharding_on(one.mesh, PartitionSpec() if 0 in one.shape else spec_of(one.layout))

    def sharding_on(self, mesh: int, spec: PartitionSpec | None = None) -> NamedSharding:
        """Returns a sharding over a submesh, by default the replicated one.

        Equal ones are one object: executables compare identities first.
        """
        spec = PartitionSpec() if spec is None else spec
        return self._shardings.setdefault((mesh, spec), NamedSharding(self.meshes[mesh], spec))

    def types(self, executable: int) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
        """Returns the types of the inputs and of the results of an executable, with their shardings."""
        run = self.runs[executable]

        def typed(number: int, weak: bool = False) -> jax.ShapeDtypeStruct:
            one = self.program.buffers[number]
            return jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=self.sharding(number), weak_type=weak)

        results = [typed(b, (executable, n) in self._weak) for n, b in enumerate(run.outputs)]
        return list(map(typed, run.inputs)), results

    def constants(self, traced: Traced) -> dict[int, Any]:
        """Returns the buffers that are full before a step: its constants, and the numbers of the micro-batches."""
        numbers = [(np.int32(n), [b]) for some in self.program.numbers for n, b in enumerate(some)]
        given = (*zip(traced.graph.constants, self.program.constants, strict=False), *numbers)
        found: dict[int, Any] = {}
        for mesh, is_here in enumerate(
            self.here
        ):  # mesh by mesh: processes that share one copy the same arrays together
            values = {b: value for value, group in given for b in group if self.program.buffers[b].mesh == mesh}
            if is_here and values:
                copied = placement.copies(list(values.values()), list(map(self.sharding, values)))
                found.update(zip(values, copied, strict=True))
        return found

    def shared_outputs(self, traced: Traced) -> list[int]:
        """Returns the results whose buffers are also state that was given or is returned: later calls may donate these.

        Of equal results, new state keeps the buffer.
        """
        outputs, inputs, state = self.program.outputs, self.program.inputs, dict(traced.state)
        held = {b for argument in state.values() for b in inputs[argument]}
        found = []
        for n in sorted(range(len(outputs)), key=lambda n: n not in state):
            if outputs[n] in held and not (n in state and outputs[n] in inputs[state[n]]):
                found.append(n)
            if n in state:
                held.add(outputs[n])
        return sorted(found)
