"""Saving of one checkpoint: Orbax writes and commits it, and the processes exchange their state between its steps.

    every process, in the caller's thread    copies its blocks to the host
    every process, in a thread               writes its blocks, and broadcasts their checksums or its error
    process 0, in a thread                   merges the stores of all, writes metadata and checksums, and commits

An error of one process is an error on all, and leaves nothing behind. Orbax's own barriers cannot do that: they carry
no error, and most are collectives on devices, without a time limit. `docs/checkpoints.md` says which process writes
which block of an array (`ArrayHandler`), and why in chunks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import logging
import math
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from alpa_lite.checkpoint import files
from alpa_lite.checkpoint.files import Metadata
from alpa_lite.checkpoint.leaves import flatten, to_storable
from alpa_lite.errors import CheckpointError
from alpa_lite.processes.channel import Collective, describe_error

logger = logging.getLogger(__name__)

_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""The messages of operating systems for a full disk, an exhausted quota, and a file above the size limit."""

_VISIBILITY_SECONDS = 60.0
"""Time limit for files of other processes to become visible to process 0."""


def create_collective(activity: str, timeout: float) -> Collective:
    """Returns a collective on a checkpoint, named by `activity` in errors; processes wait `timeout` seconds."""
    remedy = "it has ended, or is not at the same checkpoint; timeout= waits longer"
    return Collective("checkpoint", activity, seconds=timeout, error=CheckpointError, remedy=remedy)


class Save:
    """A checkpoint that is being written, to the folder `final`."""

    def __init__(
        self, final: epath.Path, state: Any, metadata: Metadata, timeout: float, replace: bool = False
    ) -> None:
        """Copies the state to the host and starts to write it. All processes take part.

        Args:
          replace: whether a complete checkpoint in the folder is replaced.

        Raises:
          CheckpointError: there is one that is not to be replaced, or the folder or a leaf cannot be stored.
        """
        leaves, types = to_storable(flatten(state))
        self.final, self._metadata, self._timeout = final, dataclasses.replace(metadata, **types), timeout
        self._temporary = ocp.path.atomicity_defaults.get_default_temporary_path_class(final).from_final(final)
        self._folder: epath.Path = self._temporary.get()
        self._handler = pytree_handler()
        self._collective = create_collective(f"saving {final}", timeout)
        self._collective.broadcast("folder", lambda: self._create_folder(replace))
        pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        args = ocp.args.PyTreeSave(leaves.orbax_tree())
        writing = pool.submit(lambda: asyncio.run(self._handler.async_save(self._folder / files.STATE, args=args)))
        concurrent.futures.wait([writing])
        self._complete = pool.submit(self._finish, writing)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Returns when the checkpoint is complete; raises CheckpointError if it could not be written."""
        self._complete.result()

    def _create_folder(self, replace: bool) -> None:
        """Creates the temporary folder in place of one that an earlier save left."""
        if not replace and self.final.exists() and ocp.utils.is_checkpoint_finalized(self.final):
            raise CheckpointError(f"{self.final} is there already; save under another name or step")
        try:
            files.remove(self._folder)
            (self._folder / files.STATE).mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot be made: {error}; give another folder") from error

    def _finish(self, writing: concurrent.futures.Future[Any]) -> None:
        """Waits for the files of all processes; process 0 commits them."""
        started = time.monotonic()
        try:
            checksums = self._collective.gather("files", lambda: self._wait_for_files(writing))
            self._collective.broadcast("outcome", lambda: self._commit(checksums))
        except BaseException as error:
            if self._collective.process == 0:
                with contextlib.suppress(OSError):  # others may still write; the next save removes the rest
                    files.remove(self._folder)
            text = describe_error(error)
            full = any(message in text for message in _FULL)
            room = ", since there is no room left; what was saved before is as it was; make room, or keep fewer" * full
            failure = CheckpointError(f"{self.final} could not be saved{room}: {text}")
            logger.error("%s", failure)
            raise failure from error
        logger.info("saved %s in %.1f s", self.final, time.monotonic() - started)

    def _wait_for_files(self, writing: concurrent.futures.Future[Any]) -> files.Checksums:
        """Waits for the files of this process, and computes their checksums."""
        deadline = time.monotonic() + self._timeout
        try:
            for future in writing.result() or []:
                future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            message = f"the files were not written within {self._timeout:g} s; timeout= waits longer"
            raise CheckpointError(message) from error
        store = f"{files.STATE}/ocdbt.process_{self._collective.process}"
        return {
            name: files.checksum(self._folder / name) for name in files.list_files(self._folder / store, f"{store}/")
        }

    def _commit(self, checksums: Sequence[files.Checksums]) -> None:
        """Merges the stores of all processes, writes the other files, and renames the folder."""
        _wait_until_visible(self._folder, checksums)
        self._handler.finalize(self._folder / files.STATE)
        self._metadata.write(self._folder)
        files.write_checksums(self._folder, {name: value for own in checksums for name, value in own.items()})
        if self._folder != self.final:  # they are the same in object stores, which cannot rename
            files.remove(self.final)
        asyncio.run(self._temporary.finalize())
        files.synchronise([self.final.parent])


def _wait_until_visible(folder: epath.Path, checksums: Sequence[files.Checksums]) -> None:
    """Waits until process 0 sees the files of others, which network file systems may take seconds to show."""
    deadline = time.monotonic() + _VISIBILITY_SECONDS
    for process, own in enumerate(checksums):
        for name, (size, _) in own.items():
            while files.file_size(folder / name) != size:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"process {process} has written {folder / name}, which process 0 does not see after "
                        f"{_VISIBILITY_SECONDS:g} s; all processes need the same folder, on a shared file system"
                    )
                time.sleep(0.1)


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


def owned_array(array: jax.Array, name: str) -> Any:
    """Returns an array as seen by Orbax's handler: its shards are the blocks that this process writes."""
    fields = {field: getattr(array, field) for field in ("shape", "dtype", "sharding", "ndim", "size", "itemsize")}
    return SimpleNamespace(**fields, addressable_shards=list(owned_blocks(array, name)))


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
        arrays = [owned_array(value, info.name) for value, info in zip(values, infos, strict=True)]
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
