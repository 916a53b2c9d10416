"""Orbax's handler of `jax.Array`, extended to arrays that only some processes hold.

Each distinct block of an array is written once: of the devices that hold it, a hash of the array's name and the block's
index chooses one, so that replicated arrays are spread over devices and processes. An array on a submesh is written by
the processes of that submesh alone. Orbax's own handler refuses arrays whose devices all belong to one of several
processes, and arrays of which a process has no block; it reads all that is written here.

Chunks have at most `CHUNK_BYTES`. A reader reads whole chunks: without that limit, an array that was saved by one
device would be read whole by every process.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

CHUNK_BYTES = 32 * 2**20
"""Maximum size of a chunk."""


class Block(NamedTuple):
    """A block of an array, with the attributes of `jax.Shard` that Orbax reads."""

    index: tuple[slice, ...]
    data: jax.Array
    replica_id: int = 0


def owned_blocks(array: jax.Array, name: str) -> Iterator[Block]:
    """Yields the blocks of an array that this process writes, still on their devices."""
    block_size = math.prod(array.sharding.shard_shape(array.shape))
    replicas = len(array.sharding.device_set) * block_size // array.size
    for shard in array.addressable_shards:
        if shard.replica_id == zlib.crc32(f"{name}{shard.index}".encode()) % replicas:
            yield Block(shard.index, shard.data)


class OwnedArray:
    """An array as seen by Orbax's handler: its shards are the blocks that this process writes."""

    def __init__(self, array: jax.Array, name: str) -> None:
        self.shape, self.dtype, self.sharding = array.shape, array.dtype, array.sharding
        self.ndim, self.size, self.itemsize = array.ndim, array.size, array.itemsize
        self.addressable_shards = list(owned_blocks(array, name))


class ArrayHandler(ocp.type_handlers.ArrayHandler):
    """Handler of `jax.Array`s on any devices of any processes."""

    def __init__(self) -> None:
        super().__init__(
            primary_host=None,  # every process writes the zarr metadata of its arrays
            use_replica_parallel=False,
            enable_write_sharding_file=False,
        )

    async def serialize(self, values: Sequence[jax.Array], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """Copies the blocks of this process to the host, and starts to write them in a thread."""
        arrays = [OwnedArray(value, info.name) for value, info in zip(values, infos, strict=True)]
        infos = [info.replace(byte_limiter=None) for info in infos]  # all arrays are written in one transaction
        owned = [(array, info) for array, info in zip(arrays, infos, strict=True) if array.addressable_shards]
        if not owned:
            return []
        save_args = [ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)] * len(owned)
        futures = await super().serialize(*zip(*owned, strict=True), save_args)  # type: ignore[misc]
        for array, _ in owned:
            array.addressable_shards.clear()  # Orbax holds it until all is written
        return futures


def pytree_handler() -> ocp.PyTreeCheckpointHandler:
    """Returns Orbax's handler of pytrees, with `ArrayHandler` for `jax.Array`s."""
    handlers = ocp.type_handlers
    scalars = [(kind, handlers.ScalarHandler()) for kind in (int, float, np.number)]
    arrays = (np.ndarray, handlers.NumpyHandler()), (jax.Array, ArrayHandler())
    registry = handlers.create_type_handler_registry(*scalars, *arrays, (str, handlers.StringHandler()))
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
