"""What fails while a checkpoint is saved leaves the checkpoints before it as they were."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from alpa_lite.checkpoint import CheckpointError, CheckpointManager, files, saving
from tests.checkpoint import states

ROOT = Path(__file__).parents[2]


def state(step: int, size: int = 256) -> dict[str, Any]:
    return {"w": states.put(states.draw(8, size, seed=step), states.mesh(0, 8, 8), "x"), "n": step}


# -- a process that ends at any point ----------------------------------------------------------------------------------


def test_the_last_good_one_is_restored_whatever_point_a_save_ended_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Copies the folder after each thing that a save does to it: it is what a process that is killed there leaves."""
    points: list[Path] = []

    def copy(source: str, target: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # other threads of the save go on, and end their locks
            shutil.copy2(source, target)

    def remembering(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            points.append(tmp_path / f"{len(points)} {name}")
            shutil.copytree(tmp_path / "run", points[-1], dirs_exist_ok=True, copy_function=copy)
            return out

        monkeypatch.setattr(owner, name, wrapped)

    (tmp_path / "run").mkdir()
    with CheckpointManager(tmp_path / "run", keep=1) as manager:
        manager.save(1, state(1))
        manager.wait()
        posix = type(epath.Path(tmp_path))
        for owner, name in (
            (saving.Save, "_create_folder"), (saving.Save, "_wait_for_files"),
            (saving.ocp.PyTreeCheckpointHandler, "finalize"),
            (posix, "write_text"), (posix, "rename"), (files, "remove"),
        ):  # fmt: skip
            remembering(owner, name)
        manager.save(2, state(2))
    monkeypatch.undo()
    names = [point.name.split()[1] for point in points]
    assert names.count("write_text") >= 4 and names.index("rename") < len(names) - 1
    restored = []
    for point in points:
        found = CheckpointManager(point).restore(state(0))
        states.same(found.state, state(found.step))
        restored.append(found.step)
        with CheckpointManager(point) as manager:
            manager.save(3, state(3))
        assert manager.restore(state(0)).step == 3 and not list(point.glob("*tmp"))
    assert restored == [1] * names.index("rename") + [2] * (len(names) - names.index("rename"))


PREAMBLE = """
    import os, pathlib, random, resource, signal, sys, threading, time
    import jax
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    from alpa_lite.checkpoint import CheckpointError, CheckpointManager
    from tests.checkpoint.test_failures import state
"""

KILLED = """
    folder, seed, first = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    manager = CheckpointManager(folder, keep=2)
    for step in (first, first + 1):
        begin = time.monotonic()
        manager.save(step, state(step, 65536))
        manager.wait()
    taken = time.monotonic() - begin
    delay = random.Random(seed).uniform(0.0, taken)
    threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    manager.save(first + 2, state(first + 2, 65536))
    manager.wait()
    time.sleep(60)
"""


def run_script(text: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(PREAMBLE + text), *map(str, args)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_saves_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    """Each process goes on in the folder that the one before it left, and is killed at some time of its second save."""
    whole, first = 0, 1
    for seed in range(3):
        run = run_script(KILLED, tmp_path / "run", seed, first)
        assert run.returncode == -signal.SIGKILL, run.stderr
        found = CheckpointManager(tmp_path / "run").restore(state(0, 65536))
        assert found.step in (first + 1, first + 2)
        states.same(found.state, state(found.step, 65536))
        whole, first = whole + (found.step == first + 2), found.step + 1
    assert whole < 3, "no process was killed before its save was complete"


# -- no room -----------------------------------------------------------------------------------------------------------

LIMITED = """
    manager = CheckpointManager(sys.argv[1], keep=2)
    manager.save(1, state(1))
    manager.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    manager.save(2, state(2, 65536))
    try:
        manager.wait()
    except CheckpointError as error:
        print(error)
    manager.save(2, state(2))
    manager.wait()
"""


@pytest.mark.slow
def test_a_file_that_cannot_grow_is_an_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The real writers meet a limit of the operating system, as they would a full disk."""
    run = run_script(LIMITED, tmp_path / "run")
    assert run.returncode == 0, run.stderr
    assert f"{tmp_path / 'run' / '2'} could not be saved, since there is no room left" in run.stdout
    manager = CheckpointManager(tmp_path / "run")
    assert manager.steps() == [1, 2] and not list((tmp_path / "run").glob("*tmp"))
    for step in (1, 2):
        states.same(manager.restore(state(0), step=step).state, state(step))


class Writing:
    """The future of the arrays of a save, of which a function decides how it ends."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    def result(self, timeout: float | None = None) -> None:
        self._end()


def writing(end: Callable[[], None]) -> Any:
    """Stands in for the handler's method that starts to write arrays."""

    async def serialize(*args: Any) -> list[Writing]:
        return [Writing(end)]

    return serialize


WRITERS = {
    "the arrays": (saving.ArrayHandler, "serialize"),
    "the merged store": (saving.ocp.PyTreeCheckpointHandler, "finalize"),
    "the checksums": (files, "write_checksums"),
}


@pytest.mark.parametrize("which", WRITERS)
def test_no_room_for_any_of_the_files_is_an_error_in_time(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    owner, name = WRITERS[which]

    def full(*args: Any) -> None:
        raise OSError(28, os.strerror(28), str(tmp_path))

    manager = CheckpointManager(tmp_path / "run")
    manager.save(1, state(1))
    manager.wait()
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, writing(full) if name == "serialize" else full)
        manager.save(2, state(2))
        begin = time.monotonic()
        with pytest.raises(CheckpointError, match=r"run/2 could not be saved, since there is no room left.*No space"):
            manager.wait()
        assert time.monotonic() - begin < 60  # and not the 600 that files are waited for
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["1"]
    manager.wait()  # the error is raised once
    assert manager.restore(state(0)).step == 1
    manager.save(2, state(2))
    manager.wait()
    states.same(manager.restore(state(0)).state, state(2))


def test_writing_that_never_ends_is_an_error_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck() -> None:
        time.sleep(1.0)
        raise TimeoutError

    monkeypatch.setattr(saving.ArrayHandler, "serialize", writing(stuck))
    manager = CheckpointManager(tmp_path, timeout=0.2)
    manager.save(1, state(1))
    with pytest.raises(CheckpointError, match=r"not written within 0\.2 s; timeout= waits longer"):
        manager.wait()
    assert manager.steps() == []


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serialize, free = saving.ArrayHandler.serialize, []

    def hold() -> None:
        while not free:
            time.sleep(0.01)

    async def held(*args: Any) -> list[Any]:
        return [Writing(hold), *await serialize(*args)]

    monkeypatch.setattr(saving.ArrayHandler, "serialize", held)
    manager = CheckpointManager(tmp_path)
    step = jax.jit(lambda s: {"w": s["w"] + 1, "n": s["n"]}, donate_argnums=0)
    here = state(1)
    manager.save(1, here)
    here = step(here)  # while nothing is written yet
    np.testing.assert_array_equal(here["w"], state(1)["w"] + 1)
    assert manager.steps() == []
    free.append(True)
    manager.wait()
    states.equal(manager.restore(state(0)).state, state(1))


def test_a_process_that_writes_where_process_0_does_not_see_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two hosts do that have a folder of that name each."""
    wait_for_files = saving.Save._wait_for_files
    elsewhere = "state/ocdbt.process_1/manifest.ocdbt"
    monkeypatch.setattr(saving.Save, "_wait_for_files", lambda *args: {**wait_for_files(*args), elsewhere: [3, 0]})
    monkeypatch.setattr(saving, "_VISIBILITY_SECONDS", 0.1)
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1))
    with pytest.raises(CheckpointError, match=r"manifest\.ocdbt, which process 0 does not see after 0\.1 s"):
        manager.wait()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/1\.orbax-checkpoint-tmp cannot be made"):
        CheckpointManager(tmp_path / "file").save(1, {"w": jnp.ones(1)})
