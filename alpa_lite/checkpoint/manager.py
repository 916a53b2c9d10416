"""Saving and restoring: one checkpoint by its folder, or the numbered checkpoints of a run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import orbax.checkpoint as ocp
from etils import epath

from alpa_lite.checkpoint import files
from alpa_lite.checkpoint.files import Metadata, read_metadata
from alpa_lite.checkpoint.leaves import OtherModelError, Template
from alpa_lite.checkpoint.saving import Save, create_collective
from alpa_lite.errors import CheckpointError, OptionError
from alpa_lite.plan.plan import Plan
from alpa_lite.processes.channel import describe_error

logger = logging.getLogger(__name__)

TIMEOUT = 600.0
"""Time limit in seconds of files and of other processes."""


class RestoredCheckpoint(NamedTuple):
    """A checkpoint of a run.

    Attributes:
      state: the pytree.
      step: its number.
      metadata: its plan, versions, and the metadata of the user.
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
      path: the folder; or an address in an object store.
      state: a pytree of arrays on any devices, submeshes included, of numbers, strings, random keys and NNX objects.
      plan: the plan that the state is sharded by; it is stored with its digest.
      metadata: anything that JSON can hold.
      timeout: time limit in seconds of files and of other processes.

    Raises:
      CheckpointError: the folder is a checkpoint already, or there is no room, or a leaf cannot be stored.
    """
    Save(files.resolve_path(path), state, Metadata.create(None, plan, metadata), timeout).wait()


def restore(
    path: str | os.PathLike[str], like: Any, *, shardings: Any = None, step: int | None = None, verify: bool = True,
    timeout: float = TIMEOUT,
) -> Any:  # fmt: skip
    """Reads a checkpoint; each process reads the blocks of its own devices alone. All processes call it.

    Args:
      path: a folder that `save` or Orbax wrote; or that of a `CheckpointManager`, of which the last good one is read.
      like: a pytree of arrays or `jax.ShapeDtypeStruct`s: the structure, shapes and dtypes. NNX objects in the result
        are new ones.
      shardings: a pytree of shardings, such as `step.shardings(...).arguments[0]`, or a `Plan`; by default those of
        `like`.
      step: of the checkpoint in the folder of a manager.
      verify: whether the checksums of all files are compared first; each process reads a part of the files.
      timeout: time limit in seconds of other processes.

    Raises:
      CheckpointError: there is none, it is damaged, or it holds the state of another model; names the leaves.
    """
    folder = files.resolve_path(path)
    is_checkpoint = (folder / files.STATE).is_dir() or (folder / "_METADATA").exists()
    if step is not None or (not is_checkpoint and _list_steps(folder)):
        manager = CheckpointManager(folder, verify=verify, timeout=timeout)
        return manager.restore(like, step=step, shardings=shardings).state
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a checkpoint: there is no such folder; give one that save wrote")
    found = _read(folder, Template(like, shardings), verify, timeout)
    if isinstance(found, str):
        raise CheckpointError(f"{folder} is damaged: {found}; restore another checkpoint")
    return found[0]


class CheckpointManager:
    """The checkpoints of a run: a folder with one for each saved step.

    Saving copies the state to the host and writes it during training; one save is under way at a time. All processes
    call the same methods in the same order.

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
          folder: is created by the first save.
          keep: number of the newest checkpoints that stay; older ones are removed after a newer one is complete. None
            keeps all.
          verify, timeout: as of `restore`.

        Raises:
          OptionError: `keep` is less than one, or `timeout` is not positive.
        """
        if keep is not None and keep < 1:
            raise OptionError(f"keep={keep}: at least one checkpoint must stay; None keeps all")
        if timeout <= 0:
            raise OptionError(f"timeout={timeout}: give a positive number of seconds")
        self.folder, self._keep, self._verify, self._timeout = files.resolve_path(folder), keep, verify, timeout
        self._save: Save | None = None
        self._damaged: set[int] = set()

    def save(self, step: int, state: Any, *, plan: Plan | None = None, metadata: Any = None) -> None:
        """Starts to save a step, after an earlier save is complete. The arrays may be donated as soon as this returns.

        A checkpoint of the same step that `restore` found damaged is replaced.

        Raises:
          CheckpointError: this step is saved already, a leaf cannot be stored, or the earlier save failed.
        """
        self.wait()
        created, replace = Metadata.create(step, plan, metadata), step in self._damaged
        self._save = Save(self.folder / str(step), state, created, self._timeout, replace)

    def wait(self) -> None:
        """Returns when the save under way is complete, and removes the checkpoints that need not be kept.

        Raises:
          CheckpointError: the state could not be saved; the checkpoints before it are as they were.
        """
        save, self._save = self._save, None
        if save is not None:
            save.wait()
            self._damaged.discard(int(save.final.name))
            self._on_first("removing old checkpoints", self._remove_old)

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, ascending, without those that were found damaged."""
        found = self._on_first("listing checkpoints", lambda: _list_steps(self.folder))
        return [step for step in found if step not in self._damaged]

    def latest_step(self) -> int | None:
        """Returns the newest of `steps()`; None if there is none."""
        return max(self.steps(), default=None)

    def metadata(self, step: int) -> Metadata:
        """Returns the metadata of the checkpoint of a step.

        Raises:
          CheckpointError: there is none, or it is damaged.
        """
        known = _list_steps(self.folder)
        if step not in known:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; {_step_remedy(known)}")
        return read_metadata(self.folder / str(step))

    def restore(self, like: Any, *, step: int | None = None, shardings: Any = None) -> RestoredCheckpoint:
        """Reads the newest checkpoint that is not damaged; logs a warning with the damage of each that is.

        Args:
          like, shardings: as of `alpa_lite.checkpoint.restore`.
          step: that of this step and no other.

        Raises:
          CheckpointError: there is none, or all are damaged, or one holds the state of another model.
        """
        self.wait()
        known = self.steps()
        if step is not None and step not in known:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; {_step_remedy(known)}")
        template, damaged = Template(like, shardings), ""
        for number in reversed(known) if step is None else [step]:
            found = _read(self.folder / str(number), template, self._verify, self._timeout)
            if not isinstance(found, str):
                return RestoredCheckpoint(found[0], number, found[1])
            logger.warning("checkpoint %s is skipped, since it is damaged: %s", self.folder / str(number), found)
            self._damaged.add(number)
            damaged += f"; {number}: {found}"
        raise CheckpointError(
            f"{self.folder} has no checkpoint{' that is not damaged' * bool(damaged)}{damaged}; save one first, "
            "or give another folder"
        )

    def close(self) -> None:
        """Waits for the save under way."""
        self.wait()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.close()
        elif self._save is not None:  # other processes may not come here, and a failure of the save is in the log
            with contextlib.suppress(CheckpointError):
                self._save.wait()

    def _on_first(self, description: str, function: Callable[[], Any]) -> Any:
        """Returns the result of a function that process 0 calls, on all processes."""
        return create_collective(f"{description} in {self.folder}", self._timeout).broadcast("result", function)

    def _remove_old(self) -> None:
        """Removes the oldest checkpoints, and the temporary folders of incomplete saves."""
        good = [step for step in _list_steps(self.folder) if step not in self._damaged]
        old = [self.folder / str(step) for step in good[: -self._keep if self._keep else 0]]
        temporary = [path.get() for path in ocp.step.all_temporary_paths(self.folder)]
        for folder in [*old, *(path for path in temporary if path.name.split(".")[0].isdigit())]:
            files.remove(folder)


def _list_steps(folder: epath.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, ascending."""
    return sorted(found.step for found in ocp.step.standard_name_format().find_all(folder))


def _read(folder: epath.Path, template: Template, verify: bool, timeout: float) -> tuple[Any, Metadata] | str:
    """Returns the state and the metadata of a checkpoint; or its damage, the same on all processes.

    Raises:
      CheckpointError: it holds the state of another model; or it cannot be read, though its checksums are right.
    """
    collective = create_collective(f"restoring {folder}", timeout)
    found: list[Any] = []

    def read() -> str:
        """Returns why this process cannot read it, if it cannot."""
        try:
            found.extend((template.restore(folder), read_metadata(folder)))
        except OtherModelError:
            raise
        except Exception as error:
            return describe_error(error)
        return ""

    def first(problems: list[str]) -> str:
        return next(filter(None, problems), "")

    if verify:
        number, count = collective.process, collective.count
        if damage := collective.gather("damage", lambda: files.find_damage(folder, number, count), first):
            return str(damage)
    failed = collective.gather("read", read, first)
    if failed and verify and (folder / files.CHECKSUMS).exists():
        raise CheckpointError(f"{folder} could not be read, though its checksums are right: {failed}; try again")
    return failed or (found[0], found[1])


def _step_remedy(steps: list[int]) -> str:
    """Returns the remedy for a step without a checkpoint."""
    return f"give one of {', '.join(map(str, steps))}" if steps else "save one first"
