"""Which files make a checkpoint, when it is complete, and whether it is as it was written."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from alpa_lite.checkpoint.metadata import FORMAT, Metadata
from alpa_lite.errors import CheckpointError

STATE, METADATA, CHECKSUMS, COMMITTED = "state", "metadata/metadata", "checksums.json", "commit_success.txt"
TEMPORARY = ".orbax-checkpoint-tmp"
"""What Orbax, too, ends the names of unfinished checkpoints with."""

REPLACED = ".replaced"
"""What the name of a damaged checkpoint has before that, from when a new one takes its place until it is removed."""

READ = 8 * 2**20
"""Bytes that are read at once for a checksum."""

Sums = dict[str, list[int]]
"""Path within a checkpoint -> size in bytes and CRC-32 of a file."""


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is written.

    Attributes:
      final: its folder when it is complete.
      writing: its folder while it is written. Object stores cannot rename folders: there it is the same, and the file
        that is written last tells.
    """

    final: epath.Path
    writing: epath.Path

    @staticmethod
    def of(final: epath.Path) -> Place:
        """Where the checkpoint of a folder is written."""
        return Place(final, final.parent / (final.name + TEMPORARY) if renames(final) else final)


def renames(path: epath.Path) -> bool:
    """Whether folders can be renamed where a path leads: in file systems, not in object stores."""
    return "://" not in str(path)


def located(path: Any) -> epath.Path:
    """A path that a user gives; one of the file system is made absolute, as Orbax wants it."""
    found = epath.Path(path)
    return found.expanduser().absolute() if renames(found) else found


def is_complete(path: epath.Path) -> bool:
    """Whether a folder is a checkpoint that was written to its end, which the name tells where folders are renamed."""
    return path.is_dir() and not path.name.endswith(TEMPORARY) and (renames(path) or (path / COMMITTED).exists())


def is_state(path: epath.Path) -> bool:
    """Whether a folder is a checkpoint itself, or a pytree that Orbax wrote."""
    return (path / STATE).is_dir() or (path / "_METADATA").exists()


def remove(path: epath.Path) -> None:
    """Removes a folder, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        path.rmtree()


def steps(folder: epath.Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, ascending."""
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit() and is_complete(path))


def unfinished(folder: epath.Path) -> list[epath.Path]:
    """What saves that ended too early have left among the checkpoints of a run."""
    named = [path for path in folder.iterdir() if path.name.removesuffix(TEMPORARY).removesuffix(REPLACED).isdigit()]
    return [path for path in named if not is_complete(path)]


def files_below(folder: epath.Path, prefix: str = "") -> list[str]:
    """The files within a folder, as paths below it."""
    if not folder.is_dir():
        return []
    out: list[str] = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        out += files_below(path, f"{prefix}{path.name}/") if path.is_dir() else [f"{prefix}{path.name}"]
    return out


def checksums(folder: epath.Path, names: Iterable[str]) -> Sums:
    """Size and CRC-32 of files."""
    return {name: list(_checksum(folder / name)) for name in names}


def _checksum(path: epath.Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(READ):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return size, crc


def has_size(path: epath.Path, size: int) -> bool:
    """Whether a file is there, with so many bytes."""
    return path.exists() and path.stat().length == size


def synchronise(folder: epath.Path, names: Iterable[str]) -> None:
    """Returns when files and the folder that lists them are on the disk, should power fail. Not for object stores."""
    for path in (*(folder / name for name in names), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_sums(folder: epath.Path, sums: Mapping[str, Sequence[int]]) -> None:
    """Writes the checksums of all files."""
    (folder / CHECKSUMS).write_text(json.dumps({"format": FORMAT, "crc32": sums}))


def read_sums(folder: epath.Path) -> Sums | None:
    """The checksums of all files; None if the checkpoint was not written by this module.

    Raises:
      CheckpointError: they are missing, or damaged.
    """
    path = folder / CHECKSUMS
    if not path.exists():
        if read_metadata(folder).jax:
            raise CheckpointError(f"{CHECKSUMS} is missing")
        return None
    try:
        return dict(json.loads(path.read_text())["crc32"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{CHECKSUMS} is damaged: {error}") from error


def damage(folder: epath.Path, process: int = 0, count: int = 1) -> str:
    """What is wrong with the files of a checkpoint that process `process` of `count` checks; "" for nothing.

    Sizes are looked at first, since a file that was cut short is most often what is wrong.
    """
    try:
        sums = read_sums(folder) or {}
        for name in sorted(sums):
            path = folder / name
            if not path.exists():
                return f"{name} is missing"
            if not has_size(path, sums[name][0]):
                return f"{name} has {path.stat().length} bytes of {sums[name][0]}"
        own = sorted(sums, key=lambda name: (-sums[name][0], name))[process::count]
        for name in own:
            if list(_checksum(folder / name)) != list(sums[name]):
                return f"the contents of {name} are not what was written"
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def read_metadata(folder: epath.Path) -> Metadata:
    """What a checkpoint says of itself; nothing, if others wrote it.

    Raises:
      CheckpointError: that is damaged.
    """
    path = folder / METADATA
    if not path.exists():
        return Metadata()
    try:
        return Metadata.from_text(path.read_text())
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{METADATA} is damaged: {error}") from error
