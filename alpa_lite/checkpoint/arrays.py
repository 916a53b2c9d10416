"""How arrays get to files: who writes which block, in which chunks.

Every block of an array, that is, every distinct index that a device has, is written once: among the devices that hold
it, by one that a hash of the leaf's name chooses, so that replicated leaves are spread over devices and processes. An
array on a submesh is written by the processes of that submesh alone, and others need not have it at all. Orbax's own
handler refuses arrays that belong to a single process of several, or of which a process has no part; it still reads
what is written here. Numbers and NumPy arrays are written by Orbax itself, into a store of its own.

Blocks are stored in chunks of at most `CHUNK` bytes that tile each block. A process that reads a part of a block reads
whole chunks: without that bound, an array that was saved by one device would be read whole by every process.

OCDBT keeps what a transaction writes in memory until it is committed, so a process commits `BATCH` bytes at a time.
"""

from __future__ import annotations

import asyncio
import functools
import math
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

CHUNK = 32 * 2**20
"""The most bytes of a chunk."""

BATCH = 512 * 2**20
"""About as many bytes are committed at a time."""

STORE = "ocdbt.process_{}_arrays"
"""The folder of what a process writes here. Orbax merges all whose names begin so."""

Index = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """What this process writes of one array.

    Attributes:
      name: of the array in the store.
      shape, dtype: of the whole array.
      chunk: the shape of a chunk.
      blocks: where each block begins and ends, and its values, on the host.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunk: tuple[int, ...]
    blocks: tuple[tuple[Index, np.ndarray], ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the blocks."""
        return sum(block.nbytes for _, block in self.blocks)


def chunk_shape(block: Sequence[int], itemsize: int, limit: int) -> tuple[int, ...]:
    """The shape of chunks that tile a block: halves, thirds, ... of it, until one has no more than `limit` bytes.

    The dimension with the smallest divisor is cut, the largest of several, so that a prime dimension stays whole as
    long as another can be cut.
    """
    shape = [max(1, dim) for dim in block]
    while math.prod(shape) * itemsize > limit:
        divisors = [(_smallest_divisor(dim), -dim, axis) for axis, dim in enumerate(shape) if dim > 1]
        if not divisors:
            break
        divisor, _, axis = min(divisors)
        shape[axis] //= divisor
    return tuple(shape)


def _smallest_divisor(number: int) -> int:
    return next((d for d in range(2, math.isqrt(number) + 1) if number % d == 0), number)


@functools.lru_cache(maxsize=4096)
def blocks_of(sharding: Any, shape: tuple[int, ...]) -> dict[Any, tuple[int, Index, tuple[Any, ...]]]:
    """For each device the number of its block, where that begins and ends, and all devices that have the same."""
    holders: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = tuple(part.indices(dim)[:2] for part, dim in zip(index, shape, strict=True))
        holders.setdefault(bounds, []).append(device)
    out = {}
    for number, (bounds, devices) in enumerate(sorted(holders.items(), key=lambda item: item[0])):
        block = number, tuple(slice(*part) for part in bounds), tuple(sorted(devices, key=lambda device: device.id))
        out.update(dict.fromkeys(devices, block))
    return out


def own_shards(array: jax.Array, name: str) -> Iterator[tuple[Index, jax.Array]]:
    """The blocks that this process writes of an array, on their devices."""
    blocks, salt = blocks_of(array.sharding, array.shape), zlib.crc32(name.encode())
    for shard in array.addressable_shards:
        number, index, devices = blocks[shard.device]
        if shard.device == devices[(salt + number) % len(devices)]:
            yield index, shard.data


class BlockHandler(ocp.type_handlers.ArrayHandler):
    """Orbax's handler of `jax.Array`, with the blocks and chunks of this module.

    Attributes:
      written: done when the blocks are. Orbax is not told, since it would print the whole traceback of a failure.
    """

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Future[None]] = []

    async def serialize(self, values: Sequence[jax.Array], infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
        """Copies what this process writes to the host, and begins to write it in a thread."""
        shards = [list(own_shards(value, info.name)) for value, info in zip(values, infos, strict=True)]
        for _, data in (shard for own in shards for shard in own):
            data.copy_to_host_async()
        parts = [_part(value, info.name, own) for value, info, own in zip(values, infos, shards, strict=True) if own]
        folder = f"{infos[0].parent_dir}/{STORE.format(jax.process_index())}/"
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.written.append(pool.submit(lambda: asyncio.run(write(parts, folder, infos[0].ts_context))))
        pool.shutdown(wait=False)
        return []


def _part(array: jax.Array, name: str, shards: Sequence[tuple[Index, jax.Array]]) -> Part:
    blocks = tuple((index, np.asarray(data)) for index, data in shards)
    chunk = chunk_shape(blocks[0][1].shape, array.dtype.itemsize, CHUNK)
    return Part(name, array.shape, np.dtype(array.dtype), chunk, blocks)


async def write(parts: list[Part], folder: str, context: ts.Context) -> None:
    """Writes the parts of arrays into the store of this process; what is written leaves the host's memory."""
    while parts:
        transaction, writes, size = ts.Transaction(atomic=True), [], 0
        while parts and size < BATCH:
            part = parts.pop()
            size += part.nbytes
            store = await ts.open(_spec(part, folder), open=True, create=True, context=context, transaction=transaction)
            writes += [store[index].write(block) for index, block in part.blocks]
        await asyncio.gather(*writes)
        await transaction.commit_async()


def _spec(part: Part, folder: str) -> dict[str, Any]:
    """Where and how TensorStore keeps an array: the format that Orbax writes by default."""
    base = folder if "://" in folder else {"driver": "file", "path": folder}
    return {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": base,
            "path": part.name,
            "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000},
        },
        "metadata": {
            "shape": list(part.shape),
            "chunks": list(part.chunk),
            "compressor": {"id": "zstd", "level": 1},
        },
        "dtype": part.dtype.name,
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


def writer() -> tuple[ocp.PyTreeCheckpointHandler, BlockHandler]:
    """What writes pytrees of arrays, numbers and strings; and its part that writes `jax.Array`s."""
    blocks = BlockHandler()
    handlers = ocp.type_handlers
    registry = handlers.create_type_handler_registry(
        (int, handlers.ScalarHandler()),
        (float, handlers.ScalarHandler()),
        (np.number, handlers.ScalarHandler()),
        (np.ndarray, handlers.NumpyHandler()),
        (jax.Array, blocks),
        (str, handlers.StringHandler()),
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry), blocks
