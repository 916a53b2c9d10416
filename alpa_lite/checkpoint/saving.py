"""One checkpoint on its way to the disk.

    every process, while the caller waits    its blocks are copied to the host
    every process, in a thread               its blocks are written and their checksums told
    process 0                                the stores are merged; metadata, checksums, the commit file; the folder is
                                             renamed; the outcome is told

Whatever fails anywhere fails the save on every process, with the error of the one that it failed on, and leaves nothing
behind. The caller's arrays are free as soon as `begin` returns.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from alpa_lite.checkpoint import arrays, files, trees
from alpa_lite.checkpoint.files import Place
from alpa_lite.checkpoint.metadata import Metadata
from alpa_lite.checkpoint.together import operation
from alpa_lite.errors import CheckpointError
from alpa_lite.plan import Plan
from alpa_lite.processes.channel import describe_error

logger = logging.getLogger(__name__)

FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""What operating systems call a full disk, an exhausted quota, and a file larger than is allowed."""

VISIBLE = 60.0
"""Seconds within which process 0 must see the files of others."""


class Pending:
    """A checkpoint that is being written.

    Attributes:
      place: where.
    """

    def __init__(self, place: Place, work: Callable[[], None]) -> None:
        self.place = place
        self._work, self._error = work, None
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Returns when the checkpoint is complete.

        Raises:
          CheckpointError: it could not be written; raised once.
        """
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(self._sentence(error)) from error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            logger.error("%s", self._sentence(error))
            self._error = error

    def _sentence(self, error: BaseException) -> str:
        text = describe_error(error)
        full = any(sign in text for sign in FULL)
        room = ", since there is no room left; what was saved before is as it was; make room, or keep fewer" * full
        return f"{self.place.final} could not be saved{room}: {text}"


def begin(
    final: epath.Path, tree: Any, *, step: int | None, plan: Plan | None, user: Any, timeout: float, replace: bool
) -> Pending:
    """Copies the state to the host and begins to write it. All processes take part.

    Args:
      replace: whether a complete checkpoint in the folder is replaced, once the new one is complete.

    Raises:
      CheckpointError: there is one, and it is not to be replaced; the folder cannot be made; a leaf cannot be stored.
    """
    started = time.monotonic()
    flat = trees.flat(tree)
    plain = trees.plain(flat)
    metadata = Metadata.of(step, plan, plain, user)
    place, agreed = Place.of(final), operation(f"saving {final}", timeout)
    agreed.broadcast("folder", lambda: _make_folder(place, replace))
    handler, blocks = arrays.writer()
    try:
        args = ocp.args.PyTreeSave(trees.stored(tree, plain.leaves))
        written = _run(handler.async_save(place.writing / files.STATE, args=args)) or []
    except Exception as error:
        failed: Exception | None = error
        written = []
    else:
        failed = None

    def work() -> None:
        try:
            sums = agreed.gather(
                "files", lambda: _written(place, agreed.process, [*written, *blocks.written], failed, timeout)
            )
            agreed.broadcast("outcome", lambda: _commit(place, handler, metadata, sums, replace))
        except BaseException:
            if agreed.process == 0:
                with contextlib.suppress(OSError):  # others may be writing still; the next save removes the rest
                    files.remove(place.writing)
            raise
        logger.info("saved %s in %.1f s", final, time.monotonic() - started)

    return Pending(place, work)


def _run(coroutine: Any) -> Any:
    """The result of a coroutine, be the caller's thread within a loop of its own, as in notebooks, or not."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def _make_folder(place: Place, replace: bool) -> None:
    if files.is_complete(place.final) and not replace:
        raise CheckpointError(f"{place.final} is there already; save under another name or step")
    try:
        files.remove(place.writing)
        (place.writing / files.STATE).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{place.writing} cannot be made: {error}") from error


def _written(
    place: Place, process: int, written: Sequence[Any], failed: Exception | None, timeout: float
) -> files.Sums:
    """The checksums of what this process has written, when it has."""
    if failed is not None:
        raise failed
    deadline = time.monotonic() + timeout
    for future in written:
        try:
            future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise CheckpointError(f"the files were not written within {timeout:g} s; timeout= waits longer") from error
    store = f"{files.STATE}/{arrays.STORE.format(process)}"
    return files.checksums(place.writing, files.files_below(place.writing / store, f"{store}/"))


def _commit(
    place: Place, handler: ocp.PyTreeCheckpointHandler, metadata: Metadata, sums: Sequence[files.Sums], replace: bool
) -> None:
    """Makes a checkpoint of what all processes have written."""
    folder = place.writing
    known = {name: value for own in sums for name, value in own.items()}
    _wait_until_visible(folder, sums)
    handler.finalize(folder / files.STATE)
    (folder / files.METADATA).parent.mkdir(exist_ok=True)
    (folder / files.METADATA).write_text(metadata.to_text())
    rest = [name for name in files.files_below(folder) if name not in known]
    files.write_sums(folder, {**known, **files.checksums(folder, rest)})
    (folder / files.COMMITTED).write_text(f"committed as {place.final}")
    if place.writing == place.final:
        return
    files.synchronise(folder, [*rest, files.CHECKSUMS, files.COMMITTED])
    aside = place.final.parent / f"{place.final.name}{files.REPLACED}{files.TEMPORARY}"
    if replace and place.final.exists():
        files.remove(aside)
        place.final.rename(aside)
    place.writing.rename(place.final)
    files.synchronise(place.final.parent, [])
    files.remove(aside)


def _wait_until_visible(folder: epath.Path, sums: Sequence[files.Sums]) -> None:
    """Waits until process 0 sees what others have written: network file systems may take some seconds to show it.

    Raises:
      CheckpointError: it does not see a file.
    """
    deadline = time.monotonic() + VISIBLE
    for process, own in enumerate(sums):
        for name, (size, _) in own.items():
            while not files.has_size(folder / name, size):
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"process {process} has written {folder / name}, which process 0 does not see after "
                        f"{VISIBLE:g} s; all processes need the same folder, on a file system that they share"
                    )
                time.sleep(0.1)
