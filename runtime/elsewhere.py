"""What a process gives back for results of a pipeline that other processes have.

A result that lies on submeshes of other processes is an *absent* array (`presence`): shape, dtype and sharding. State
comes back as the same absent array at every call, so that passing it on costs a comparison of identities. Results that
are no state, are replicated on their submesh and take at most `SMALL` bytes, such as losses and metrics, are told to
all processes at the end of the step, by one program over the devices of that submesh and one of each other process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.graph import Traced
from alpa_lite.program import Program
from alpa_lite.runtime import compiling, pacing, presence

SMALL = 1024
"""Bytes of a result that is told to all processes."""

_AXIS = "process"


class Elsewhere:
    """The arguments and results of a pipeline that this process has no part of.

    Attributes:
      arguments: the flat arguments that no submesh of this process reads, though another does.
    """

    def __init__(
        self, traced: Traced, program: Program, devices: Sequence[Any], here: Sequence[bool],
        sharding: Callable[[int], NamedSharding],
    ) -> None:  # fmt: skip
        """Compiles nothing.

        Args:
          traced, program: of one step.
          devices: of the cluster, by number.
          here: for each submesh, whether this process has a device of it.
          sharding: of a buffer.
        """
        mesh_of = [one.mesh for one in program.buffers]
        self.arguments = frozenset(
            i for i, group in enumerate(program.inputs) if group and not any(here[mesh_of[b]] for b in group)
        )
        self.buffers = frozenset(b for group in program.inputs for b in group if not here[mesh_of[b]])
        self._buffers = program.outputs
        self._outputs: list[tuple[int, Any]] = []
        for n, b in enumerate(program.outputs):
            if not here[mesh_of[b]]:
                one = program.buffers[b]
                absent = presence.absent(one.shape, one.dtype, sharding(b))
                self._outputs.append((n, _jax.array_with_weak_type(absent, traced.outputs[n].weak)))
        self._news: list[News] = []
        groups: dict[int, list[int]] = {}
        for n, b in enumerate(program.outputs):
            if traced.outputs[n].role != "state" and _is_small(program.buffers[b]):
                groups.setdefault(mesh_of[b], []).append(n)
        everyone = {device.process_index for device in devices}
        for mesh, outputs in sorted(groups.items()):
            own = [devices[number] for number in program.submeshes[mesh].devices]
            if {device.process_index for device in own} != everyone:
                buffers = [program.buffers[program.outputs[n]] for n in outputs]
                self._news.append(News(outputs, [(b.shape, b.dtype) for b in buffers], own, devices))
        absent = dict(self._outputs)
        self._here = [n for n in range(len(program.outputs)) if n not in absent]
        self._returning = [(argument, absent[n]) for n, argument in traced.state if n in absent]

    def shardings(self, results: list[NamedSharding]) -> list[NamedSharding]:
        """Where results lie, of where their buffers do."""
        for one in self._news:
            for n in one.outputs:
                results[n] = one.sharding
        return results

    @property
    def told(self) -> tuple[int, ...]:
        """The results that all processes are told."""
        return tuple(n for one in self._news for n in one.outputs)

    def unchanged(self, leaves: Sequence[Any]) -> bool:
        """Whether the absent state among some flat arguments is that which calls return."""
        return all(leaves[argument] is kept for argument, kept in self._returning)

    @property
    def state(self) -> frozenset[int]:
        """The flat arguments whose new values are absent."""
        return frozenset(argument for argument, _ in self._returning)

    @property
    def labels(self) -> dict[int, NamedSharding]:
        """The shardings under which results are told, of those buffers that are results in no other way."""
        told = {n: one.sharding for one in self._news for n in one.outputs}
        others = {b for n, b in enumerate(self._buffers) if n not in told}
        return {self._buffers[n]: sharding for n, sharding in told.items() if self._buffers[n] not in others}

    def complete(self, outputs: list[Any]) -> list[Any]:
        """The results of a step, with absent arrays for what is not here and with what all are told."""
        for n, kept in self._outputs:
            outputs[n] = kept
        if self._news:
            pacing.settled(outputs[n] for n in self._here)
        for one in self._news:
            for n, array in zip(one.outputs, one.tell([outputs[n] for n in one.outputs]), strict=True):
                outputs[n] = array
        return outputs


class News:
    """Small results of one submesh that all processes are told.

    Attributes:
      outputs: their numbers.
      sharding: where all lie when they are told: on the submesh, and on a device of each other process.
    """

    def __init__(
        self, outputs: Sequence[int], types: Sequence[tuple[tuple[int, ...], Any]], own: Sequence[Any],
        devices: Sequence[Any],
    ) -> None:  # fmt: skip
        """Args:
        types: shape and dtype of each result.
        own: the devices of the submesh.
        devices: all.
        """
        self.outputs = tuple(outputs)
        own_of: dict[int, list[Any]] = {}
        for device in own:
            own_of.setdefault(device.process_index, []).append(device)
        for device in devices:
            own_of.setdefault(device.process_index, [device])
        speakers = [device for process in sorted(own_of) for device in own_of[process]]
        self._speaker = speakers.index(own[0])
        mesh = Mesh(np.array(speakers), (_AXIS,), axis_types=(AxisType.Auto,))
        self.sharding = NamedSharding(mesh, PartitionSpec())
        self._types = list(types)
        self._relabel = _jax.relabeller(self.sharding)
        self._zeros: list[Any] = []  # what a process offers that has none of the results
        mine = own_of[jax.process_index()]
        if mine[0] not in own:
            avals = [_jax.aval_of(*kind) for kind in types]
            blocks = [[jax.device_put(np.zeros(s, d), mine[0])] for s, d in types]
            self._zeros = [_jax.assembled(a, self.sharding, b) for a, b in zip(avals, blocks, strict=True)]
        self._call: Any = None

    def tell(self, arrays: Sequence[Any]) -> list[Any]:
        """The results as all processes have them. Returns before they are there."""
        if self._call is None:
            self._call = self._compiled()
        if self._zeros:
            return self._call(*self._zeros)
        return self._call(*[x if x.sharding is self.sharding else self._relabel(x) for x in arrays])

    @_jax.without_mesh()
    def _compiled(self) -> Any:
        """The program: each process offers its block, and all take that of the submesh."""
        speaker = self._speaker

        def local(*blocks: Any) -> list[Any]:
            return [lax.all_gather(block, _AXIS)[speaker] for block in blocks]

        spec, count = PartitionSpec(), len(self._types)
        region = jax.shard_map(
            local, mesh=self.sharding.mesh, in_specs=(spec,) * count, out_specs=[spec] * count, check_vma=False
        )
        avals = [jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding) for shape, dtype in self._types]
        lowered = jax.jit(region, out_shardings=[self.sharding] * count).lower(*avals)
        return compiling.compiled(lowered, self.sharding.device_set)


def _is_small(one: Any) -> bool:
    if jnp.issubdtype(one.dtype, jax.dtypes.extended) or any(one.layout.dims):
        return False
    return math.prod(one.shape) * one.dtype.itemsize <= SMALL
