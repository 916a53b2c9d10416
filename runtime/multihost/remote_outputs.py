"""Results of a pipeline that other processes have: placeholders, and broadcast of small ones such as losses.

State on submeshes of other processes comes back as the same *non-addressable* array (`global_array`) at every call, so
that passing it on costs a comparison of identities. Results that are not state, are replicated on their submesh and
take at most `MAX_BROADCAST_BYTES` are broadcast to all processes at the end of the step, by one program over the
devices of that submesh and one of each other process.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.ir.graph import Traced
from alpa_lite.runtime.buffers import ProgramBuffers
from alpa_lite.runtime.compile import compile_lowered, drain
from alpa_lite.runtime.meshes import lower_region
from alpa_lite.runtime.multihost import global_array
from alpa_lite.runtime.multihost.permute import UnionProgram

MAX_BROADCAST_BYTES = 1024
"""Bytes of a result that is broadcast to all processes."""


class RemoteOutputs:
    """The results of a pipeline that are on devices of other processes; none in a process that is alone."""

    def __init__(self, traced: Traced, buffers: ProgramBuffers) -> None:
        """Compiles nothing."""
        program, devices = buffers.program, buffers.devices
        self._absent: dict[int, Any] = {}
        groups: defaultdict[int, list[int]] = defaultdict(list)
        for n, b in enumerate(program.outputs):
            one = program.buffers[b]
            if not buffers.here[one.mesh]:
                absent = global_array.make_non_addressable(one.shape, one.dtype, buffers.sharding(b))
                self._absent[n] = _jax.array_with_weak_type(absent, traced.outputs[n].weak)
            is_key = jnp.issubdtype(one.dtype, jax.dtypes.extended)
            if traced.outputs[n].role == "state" or is_key or any(one.layout.dims):
                continue
            if math.prod(one.shape) * one.dtype.itemsize <= MAX_BROADCAST_BYTES:
                groups[one.mesh].append(n)
        self._broadcasts: list[Broadcast] = []
        everyone = {device.process_index for device in devices}
        for mesh, outputs in sorted(groups.items()):
            own = [devices[number] for number in program.submeshes[mesh].devices]
            if {device.process_index for device in own} != everyone:
                types = [program.buffers[program.outputs[n]][2:4] for n in outputs]
                self._broadcasts.append(Broadcast(outputs, types, own, devices))

    def shardings(self, results: list[NamedSharding]) -> list[NamedSharding]:
        """Returns the shardings of results, from those of their buffers."""
        for one in self._broadcasts:
            for n in one.outputs:
                results[n] = one.sharding
        return results

    @property
    def broadcast_results(self) -> tuple[int, ...]:
        """The results that are broadcast to all processes."""
        return tuple(n for one in self._broadcasts for n in one.outputs)

    def complete(self, outputs: list[Any]) -> list[Any]:
        """Returns the results of a step, with placeholders for non-addressable ones and with those broadcast."""
        for n, absent in self._absent.items():
            outputs[n] = absent
        if self._broadcasts:
            drain()
        for one in self._broadcasts:
            for n, array in zip(one.outputs, one([outputs[n] for n in one.outputs]), strict=True):
                outputs[n] = array
        return outputs


class Broadcast:
    """Broadcasts small results of one submesh to all processes.

    Attributes:
      outputs: their numbers.
      sharding: of the broadcast results: over the submesh, and a device of each other process.
    """

    def __init__(
        self, outputs: Sequence[int], types: Sequence[tuple[tuple[int, ...], Any]], own: Sequence[Any],
        devices: Sequence[Any],
    ) -> None:  # fmt: skip
        """Args: numbers, shapes and dtypes of the results, the devices of the submesh, and all."""
        self.outputs, self._types = tuple(outputs), types
        first = {device.process_index: device for device in reversed(devices)}
        others = first.keys() - {device.process_index for device in own}
        members = sorted([*own, *(first[n] for n in others)], key=lambda device: device.process_index)
        self._root, self._union = members.index(own[0]), UnionProgram(members, own, types)
        self.sharding = NamedSharding(self._union.mesh, PartitionSpec())

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the results as all processes have them, before they are computed."""
        return self._call(*self._union.give(arrays))

    @functools.cached_property
    def _call(self) -> Any:
        """The program, compiled: each process gives its block, and all take that of the submesh."""
        mesh = self._union.mesh

        def local(*blocks: Any) -> list[Any]:
            return [lax.all_gather(block, mesh.axis_names)[self._root] for block in blocks]

        results = [jax.ShapeDtypeStruct(*kind, sharding=self.sharding) for kind in self._types]
        return compile_lowered(lower_region(local, mesh, self._union.given, results), mesh.devices.flat)
