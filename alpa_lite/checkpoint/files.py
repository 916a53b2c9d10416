"""Files of a checkpoint: its metadata, and the checksums of the others."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from etils import epath

from alpa_lite.errors import CheckpointError
from alpa_lite.ir import json_codec
from alpa_lite.plan.plan import Plan
from alpa_lite.version import __version__

FORMAT, STATE, METADATA, CHECKSUMS = "alpa_lite.checkpoint", "state", "metadata/metadata", "checksums.json"

_READ_BYTES = 8 * 2**20

Checksums = Mapping[str, Sequence[int]]
"""Path within a checkpoint -> size in bytes and CRC-32 of a file."""


@dataclass(frozen=True)
class Metadata:
    """Metadata of a checkpoint.

    Attributes:
      step: its number; None if it was saved without one.
      plan: the JSON of the plan that the state was sharded by, as `Plan.to_json` gives it; None if it was not given.
      fingerprint: the digest of that plan.
      jax, alpa_lite: the versions that saved it.
      keys: path of each leaf of typed random keys -> the name of their implementation. They are stored as their data.
      empty: path of each array without elements -> its shape, and the name of its dtype. They are not stored.
      user: metadata of the user.
    """

    step: int | None = None
    plan: Mapping[str, Any] | None = None
    fingerprint: str | None = None
    jax: str = ""
    alpa_lite: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    empty: Mapping[str, Any] = field(default_factory=dict)
    user: Any = None

    @staticmethod
    def create(step: int | None, plan: Plan | None, user: Any) -> Metadata:
        """Returns the metadata of a new checkpoint; raises CheckpointError if JSON cannot hold that of the user."""
        try:
            json.dumps(user)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"metadata= is stored as JSON, which cannot hold it: {error}; give numbers, strings, lists and dicts"
            ) from error
        planned = {} if plan is None else {"plan": plan.to_json(), "fingerprint": plan.fingerprint}
        return Metadata(step, jax=jax.__version__, alpa_lite=__version__, user=user, **planned)

    def load_plan(self) -> Plan | None:
        """Returns the plan that the state was sharded by, for `parallelize(plan=...)`.

        Raises:
          PlanError: another version of alpa_lite wrote it.
        """
        return None if self.plan is None else Plan.from_json(dict(self.plan), "the plan of the checkpoint")

    def write(self, folder: epath.Path) -> None:
        """Writes the metadata into the folder of a checkpoint."""
        (folder / METADATA).parent.mkdir(exist_ok=True)
        fields = {**json_codec.encode_fields(self), "user": self.user}
        (folder / METADATA).write_text(json.dumps({"format": FORMAT, **fields}))


def read_metadata(folder: epath.Path) -> Metadata:
    """Returns the metadata of a checkpoint; raises CheckpointError if it is damaged.

    JSON of other writers is the metadata of the user.
    """
    path = folder / METADATA
    if not path.exists():
        return Metadata()
    try:
        data = json_codec.read_json(path)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            return Metadata(user=data)
        return json_codec.decode_fields(Metadata, {**vars(Metadata()), **data})
    except json_codec.DecodeError as error:
        raise CheckpointError(f"{METADATA} is damaged: {error}; restore another checkpoint") from error


def resolve_path(path: Any) -> epath.Path:
    """Returns the path of a user; a path in the file system is made absolute, as Orbax requires."""
    found = epath.Path(path)
    return found if "://" in str(found) else found.expanduser().absolute()


def remove(folder: epath.Path) -> None:
    """Removes a folder, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        folder.rmtree()


def list_files(folder: epath.Path, prefix: str = "") -> list[str]:
    """Returns the files in a folder and in its folders, as paths relative to it."""
    out: list[str] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        out += list_files(path, f"{prefix}{path.name}/") if path.is_dir() else [f"{prefix}{path.name}"]
    return out


def file_size(path: epath.Path) -> int | None:
    """Returns the size of a file in bytes; None if it does not exist."""
    return path.stat().length if path.exists() else None


def checksum(path: epath.Path) -> list[int]:
    """Returns the size in bytes and the CRC-32 of a file."""
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
    checksums = {**known, **{name: checksum(folder / name) for name in rest}}
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
    """Returns the damage of a checkpoint; "" for none. Process `process` of `count` reads a part of the files.

    Sizes are compared first, since a truncated file is the most frequent damage.
    """
    try:
        if not (folder / CHECKSUMS).exists():
            return f"{CHECKSUMS} is missing" if read_metadata(folder).jax else ""
        checksums = dict(json_codec.read_json(folder / CHECKSUMS)["crc32"])
        for name, (size, _) in sorted(checksums.items()):
            found = file_size(folder / name)
            if found != size:
                return f"{name} is missing" if found is None else f"{name} has {found} bytes of {size}"
        for name in sorted(checksums, key=lambda name: (-checksums[name][0], name))[process::count]:
            if checksum(folder / name) != checksums[name]:
                return f"the contents of {name} are not what was written"
    except (OSError, CheckpointError) as error:
        return str(error)
    except (ValueError, KeyError, TypeError) as error:
        return f"{CHECKSUMS} is damaged: {error}"
    return ""
