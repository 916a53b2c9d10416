"""Saving and restoring: one checkpoint by its folder, or the numbered checkpoints of a run."""

from __future__ import annotations

import contextlib
import logging
import os
from types import TracebackType
from typing import Any, NamedTuple

from etils import epath

from alpa_lite.checkpoint import files, reading, saving
from alpa_lite.checkpoint.metadata import Metadata
from alpa_lite.checkpoint.together import operation
from alpa_lite.errors import CheckpointError, OptionError
from alpa_lite.plan import Plan
from alpa_lite.processes.channel import Collective, describe_error

logger = logging.getLogger(__name__)

TIMEOUT = 600.0
"""Seconds that files and other processes are waited for."""


class Restored(NamedTuple):
    """A checkpoint of a run.

    Attributes:
      state: the pytree.
      step: its number.
      metadata: what else was saved with it.
    """

    state: Any
    step: int
    metadata: Metadata


def save(
    path: str | os.PathLike[str], state: Any, *, plan: Plan | None = None, metadata: Any = None,
    timeout: float = TIMEOUT,
) -> None:  # fmt: skip
    """Writes a checkpoint into a new folder, and returns when it is complete. All processes call it.

    Args:
      path: the folder; an object store's address does, too.
      state: a pytree of arrays that lie anywhere, submeshes included, of numbers, strings, random keys and NNX objects.
      plan: the plan that the state lies under; it is stored with its digest.
      metadata: anything that JSON can hold.
      timeout: the seconds that files and other processes are waited for.

    Raises:
      CheckpointError: the folder is a checkpoint already, or there is no room, or a leaf cannot be stored.
    """
    saving.begin(
        files.located(path), state, step=None, plan=plan, user=metadata, timeout=timeout, replace=False
    ).wait()  # fmt: skip


def restore(
    path: str | os.PathLike[str], like: Any, *, shardings: Any = None, step: int | None = None, verify: bool = True,
    timeout: float = TIMEOUT,
) -> Any:  # fmt: skip
    """Reads a checkpoint, each leaf where it is wanted, each process its own blocks alone. All processes call it.

    Args:
      path: what `save` or Orbax wrote; or the folder of a `CheckpointManager`, of which the last good one is read.
      like: a pytree of arrays or `jax.ShapeDtypeStruct`s: the structure, shapes and dtypes. Of NNX objects new ones are
        made.
      shardings: where the leaves shall lie: a pytree of shardings, such as `step.shardings(...).arguments[0]`, or a
        `Plan`; by default where those of `like` do.
      step: which checkpoint of the folder of a manager.
      verify: whether the checksums of all files are compared first; each process reads a part of the files.
      timeout: the seconds that other processes are waited for.

    Raises:
      CheckpointError: there is none, it is damaged, or it holds the state of another model; names the leaves.
    """
    folder = files.located(path)
    if step is not None or (files.steps(folder) and not files.is_state(folder)):
        return (
            CheckpointManager(folder, verify=verify, timeout=timeout)
            .restore(like, step=step, shardings=shardings)
            .state
        )
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no checkpoint: there is no such folder")
    flat, leaves = reading.wanted(like, shardings)
    found = _read(folder, flat, leaves, verify, timeout)
    if isinstance(found, str):
        raise CheckpointError(f"{folder} is damaged: {found}")
    return found[0]


class CheckpointManager:
    """The checkpoints of a run: a folder with one for each saved step.

    Saving copies the state to the host and writes it while training goes on; one save is under way at a time. All
    processes call the same methods in the same order.

    Example:
      manager = alpa_lite.checkpoint.CheckpointManager("runs/7", keep=3)
      manager.save(100, state, plan=train_step.plan(state, batch))
      ...
      state, step, metadata = manager.restore(shapes, shardings=train_step.shardings(shapes, batch).arguments[0])
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int | None = None, verify: bool = True, timeout: float = TIMEOUT
    ) -> None:
        """Args:
          folder: is made when the first checkpoint is saved.
          keep: how many of the newest checkpoints stay; the oldest are removed after a newer one is complete. None
            keeps all.
          verify: whether restoring compares the checksums of all files first; each process reads a part of the files.
          timeout: the seconds that files and other processes are waited for.

        Raises:
          OptionError: `keep` is less than one, or `timeout` is not positive.
        """
        if keep is not None and keep < 1:
            raise OptionError(f"keep={keep}: at least one checkpoint must stay; None keeps all")
        if timeout <= 0:
            raise OptionError(f"timeout={timeout}: give a positive number of seconds")
        self.folder, self._keep, self._verify, self._timeout = files.located(folder), keep, verify, timeout
        self._pending: saving.Pending | None = None
        self._damaged: set[int] = set()

    def save(self, step: int, state: Any, *, plan: Plan | None = None, metadata: Any = None) -> None:
        """Begins to save a step, after an earlier save is complete. The arrays may be donated as soon as this returns.

        A checkpoint of the same step that `restore` found damaged is replaced.

        Raises:
          CheckpointError: this step is saved already, a leaf cannot be stored, or the earlier save failed.
        """
        self.wait()
        self._pending = saving.begin(
            self._path(step), state, step=step, plan=plan, user=metadata, timeout=self._timeout,
            replace=step in self._damaged,
        )  # fmt: skip

    def wait(self) -> None:
        """Returns when the save that is under way is complete, and removes the checkpoints that need not be kept.

        Raises:
          CheckpointError: the state could not be saved; the checkpoints before it are as they were.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.wait()
        self._damaged.discard(int(pending.place.final.name))
        self._agreement("removing old checkpoints").broadcast("removed", self._remove_old)

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending, without those that were found damaged."""
        found = self._agreement("listing checkpoints").broadcast("steps", lambda: files.steps(self.folder))
        return [step for step in found if step not in self._damaged]

    def latest_step(self) -> int | None:
        """The newest of `steps()`; None if there is none."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> Metadata:
        """What the checkpoint of a step says of itself.

        Raises:
          CheckpointError: there is none, or it is damaged.
        """
        if not files.is_complete(self._path(step)):
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}")
        return files.read_metadata(self._path(step))

    def restore(self, like: Any, *, step: int | None = None, shardings: Any = None) -> Restored:
        """Reads the newest checkpoint that is not damaged; a warning of the log names each that is, and says why.

        Args:
          like, shardings: as of `alpa_lite.checkpoint.restore`.
          step: that of this step and no other.

        Raises:
          CheckpointError: there is none, or all are damaged, or one holds the state of another model.
        """
        self.wait()
        known = self.steps()
        if step is not None and step not in known:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; it has {known or 'none'}")
        flat, leaves = reading.wanted(like, shardings)
        reasons = []
        for number in sorted(known, reverse=True) if step is None else [step]:
            found = _read(self._path(number), flat, leaves, self._verify, self._timeout)
            if not isinstance(found, str):
                return Restored(found[0], number, found[1])
            logger.warning("checkpoint %s is skipped, since it is damaged: %s", self._path(number), found)
            self._damaged.add(number)
            reasons.append(f"{number}: {found}")
        if not reasons:
            raise CheckpointError(f"{self.folder} has no checkpoint")
        raise CheckpointError(f"{self.folder} has no checkpoint that is not damaged; {'; '.join(reasons)}")

    def close(self) -> None:
        """Waits for the save that is under way."""
        self.wait()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._pending is not None:  # other processes may not come here, and what the save says is in the log
            with contextlib.suppress(CheckpointError):
                self._pending.wait()

    def _path(self, step: int) -> epath.Path:
        return self.folder / str(step)

    def _agreement(self, what: str) -> Collective:
        return operation(f"{what} in {self.folder}", self._timeout)

    def _remove_old(self) -> None:
        good = [step for step in files.steps(self.folder) if step not in self._damaged]
        for step in good[: -self._keep] if self._keep else []:
            files.remove(self._path(step))
        for path in files.unfinished(self.folder):
            files.remove(path)


def _read(folder: epath.Path, flat: Any, leaves: Any, verify: bool, timeout: float) -> tuple[Any, Metadata] | str:
    """The state and what else was saved with it; or what is wrong with the checkpoint, the same on all processes.

    Raises:
      CheckpointError: it holds the state of another model; or it cannot be read, though its checksums are right.
    """
    agreed = operation(f"restoring {folder}", timeout)
    if verify:
        damage = agreed.gather("damage", lambda: files.damage(folder, agreed.process, agreed.count))
        if any(damage):
            return next(filter(None, damage))
    found: Any = None

    def reading_own() -> str:
        nonlocal found
        try:
            found = reading.read(folder, flat, leaves), files.read_metadata(folder)
        except reading.OtherModelError:
            raise
        except Exception as error:
            return describe_error(error)
        return ""

    failed = [reason for reason in agreed.gather("read", reading_own) if reason]
    if failed and verify and files.read_sums(folder) is not None:
        raise CheckpointError(f"{folder} could not be read, though its checksums are right: {failed[0]}")
    return failed[0] if failed else found
