"""Files of a checkpoint and their checksums."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from alpa_lite.checkpoint.metadata import FORMAT, read_metadata
from alpa_lite.errors import CheckpointError

STATE, CHECKSUMS = "state", "checksums.json"

_READ_BYTES = 8 * 2**20

Checksums = Mapping[str, Sequence[int]]
"""Path within a checkpoint -> size in bytes and CRC-32 of a file."""


def resolve_path(path: Any) -> epath.Path:
    """The path of a user; a path in the file system is made absolute, as Orbax requires."""
    found = epath.Path(path)
    return found if "://" in str(found) else found.expanduser().absolute()


def remove(folder: epath.Path) -> None:
    """Removes a folder, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        folder.rmtree()


def list_files(folder: epath.Path, prefix: str = "") -> list[str]:
    """The files in a folder and in its folders, as paths relative to it."""
    out: list[str] = []
    for path in sorted(folder.iterdir(), key=lambda path: path.name) if folder.is_dir() else ():
        out += list_files(path, f"{prefix}{path.name}/") if path.is_dir() else [f"{prefix}{path.name}"]
    return out


def file_size(path: epath.Path) -> int | None:
    """The size of a file in bytes; None if it does not exist."""
    return path.stat().length if path.exists() else None


def compute_checksums(folder: epath.Path, names: Iterable[str]) -> dict[str, list[int]]:
    """Size and CRC-32 of files."""
    return {name: _checksum(folder / name) for name in names}


def _checksum(path: epath.Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def write_checksums(folder: epath.Path, known: Checksums) -> None:
    """Writes the checksums of all files of a checkpoint, and returns when the files are on the disk.

    Args:
      known: the checksums of files that TensorStore wrote, and synchronised.
    """
    rest = [name for name in list_files(folder) if name not in known]
    checksums = {**known, **compute_checksums(folder, rest)}
    (folder / CHECKSUMS).write_text(json.dumps({"format": FORMAT, "crc32": checksums}))
    synchronise(folder / name for name in (*rest, CHECKSUMS, ""))


def synchronise(paths: Iterable[epath.Path]) -> None:
    """Returns when files, and the entries of folders, are on the disk, in case of a power failure."""
    for path in paths:
        if "://" in str(path):  # object stores have no such call, and need none
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def find_damage(folder: epath.Path, process: int = 0, count: int = 1) -> str:
    """The damage of a checkpoint in words; "" for none. Process `process` of `count` reads a part of the files.

    Sizes are compared first, since a truncated file is the most frequent damage.
    """
    try:
        if not (folder / CHECKSUMS).exists():
            return f"{CHECKSUMS} is missing" if read_metadata(folder).jax else ""
        checksums = dict(json.loads((folder / CHECKSUMS).read_text())["crc32"])
        for name, (size, _) in sorted(checksums.items()):
            found = file_size(folder / name)
            if found != size:
                return f"{name} is missing" if found is None else f"{name} has {found} bytes of {size}"
        for name in sorted(checksums, key=lambda name: (-checksums[name][0], name))[process::count]:
            if _checksum(folder / name) != checksums[name]:
                return f"the contents of {name} are not what was written"
    except (OSError, CheckpointError) as error:
        return str(error)
    except (ValueError, KeyError, TypeError) as error:
        return f"{CHECKSUMS} is damaged: {error}"
    return ""
