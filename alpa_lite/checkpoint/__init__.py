"""Checkpoints of state under any plan, in Orbax's format.

A checkpoint is a folder of `state/`, which plain Orbax reads, `metadata/metadata`, `checksums.json` and
`commit_success.txt`; `docs/checkpoints.md` says what they hold. It is written under a temporary name and renamed when
it is complete. A leaf is stored by its global index, without its sharding, so that a process reads, of any checkpoint,
the blocks that its own devices have under the current plan.
"""

from alpa_lite.checkpoint.files import Metadata
from alpa_lite.checkpoint.manager import CheckpointManager, RestoredCheckpoint, restore, save
from alpa_lite.errors import CheckpointError

__all__ = ["CheckpointError", "CheckpointManager", "Metadata", "RestoredCheckpoint", "restore", "save"]
