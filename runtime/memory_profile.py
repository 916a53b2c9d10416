"""The most bytes that live arrays take while a pipeline runs, counted after every instruction.

The compiler's own count ends at each executable; which buffers live between them is the program's choice, and what it
predicts (`program.peak_bytes`) is confirmed by a count of the arrays that are there. Arrays that share memory count
once: blocks are identified by device and address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh


class MemoryProfile:
    """Counts during one dispatch of a program, which it delays: called after every item.

    Attributes:
      most: for each submesh, bytes of the device that has held most so far.
    """

    def __init__(self, meshes: Sequence[Mesh], constants: Iterable[jax.Array]) -> None:
        """Args:
        meshes: of the pipeline.
        constants: of the step, which count although they are there before.
        """
        self._meshes = meshes
        self._before = _blocks(jax.live_arrays()).keys() - _blocks(constants).keys()
        self.most = [0] * len(meshes)

    def __call__(self, _: int, env: Sequence[Any]) -> None:
        """Waits for all buffers, and counts."""
        jax.block_until_ready([x for x in env if x is not None])
        held: Counter[int] = Counter()
        for (device, pointer), size in _blocks(jax.live_arrays()).items():
            if (device, pointer) not in self._before:
                held[device] += size
        for mesh, devices in enumerate(self._meshes):
            self.most[mesh] = max(self.most[mesh], *(held[d.id] for d in devices.devices.flat))


def _blocks(arrays: Iterable[jax.Array]) -> dict[tuple[int, int], int]:
    """Bytes of the distinct blocks of arrays, by device and address."""
    found: dict[tuple[int, int], int] = {}
    for array in arrays:
        if array.is_deleted():
            continue
        for shard in array.addressable_shards:
            if shard.data.nbytes:
                found[shard.device.id, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return found
