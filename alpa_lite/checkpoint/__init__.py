"""Checkpoints of state under any plan, in Orbax's format.

A checkpoint is a folder that plain Orbax reads:

    state/               the pytree: one zarr array a leaf in chunks, in an OCDBT store that all processes write to
    metadata/metadata    JSON: step, plan and its digest, versions, kinds of random keys, metadata of the user
    checksums.json       size and CRC-32 of every other file
    commit_success.txt   written last

It is written under a temporary name and renamed when it is complete, so a folder without the temporary suffix is
complete unless the storage damaged it, which the checksums detect. A leaf is stored by its global index, without its
sharding, so that a process reads, of any checkpoint, the blocks that its own devices have under the current plan.
"""

from alpa_lite.checkpoint.files import Metadata
from alpa_lite.checkpoint.manager import CheckpointManager, Restored, restore, save
from alpa_lite.errors import CheckpointError

__all__ = ["CheckpointError", "CheckpointManager", "Metadata", "Restored", "restore", "save"]
