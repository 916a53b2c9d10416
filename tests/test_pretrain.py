"""`examples/pretrain.py` in several processes: preempted, killed, and started again on fewer."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks import kills
from tests.test_examples import load

ARGUMENTS = ("--method", "zero", "--steps", "16", "--save-every", "4")


def events(folder: Path, name: str) -> list[dict[str, object]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == name]


def test_who_is_lost_is_read_from_what_jax_says() -> None:
    assert kills.names("The following tasks are unhealthy (stopped sending heartbeats):\n1\nThe tasks", 1)
    assert kills.names("(stopped sending heartbeats):\n/job:jax_worker/replica:0/task:2\n", 2)
    assert kills.names("Barrier failed because: task is set to ERROR: UNAVAILABLE: Task 2 heartbeat timeout.", 2)
    assert not kills.names("Task 12 heartbeat timeout; (stopped sending heartbeats):\n12\n", 1)
    assert kills.names("Either the leader task was preempted/died/restarted unexpectedly or", 0)
    assert not kills.names("Connection reset by peer", 1)


def test_batches_depend_on_the_step_alone_and_rows_are_parts_of_them() -> None:
    source = load("pretrain").Text(None, 6, 5, 0)
    whole, again = source.batch(3), source.batch(3)
    assert whole["inputs"].shape == (6, 5) and (whole["inputs"] == again["inputs"]).all()
    assert (whole["inputs"][:, 1:] == whole["targets"][:, :-1]).all()
    part = source.batch(3, rows={"inputs": [4, 5], "targets": []})
    assert (part["inputs"] == whole["inputs"][4:]).all() and part["targets"].shape == (0, 5)
    assert (source.batch(4)["inputs"] != whole["inputs"]).any()
    assert (source.batch(3, "evaluation")["inputs"] != whole["inputs"]).any()


@pytest.mark.slow
def test_a_run_that_is_preempted_and_killed_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Two processes get SIGTERM, save and end well; one of the next two is killed; one process goes on to the end."""
    wanted = kills.resume(tmp_path / "whole", 1, 4, *ARGUMENTS)
    folder = tmp_path / "run"
    with kills.job(folder, 2, 2, *ARGUMENTS) as running:
        kills.wait_for(lambda: max(kills.losses(folder), default=-1) >= 2, running, 120, folder)
        running[1].send_signal(signal.SIGTERM)  # to one of them: JAX tells the other
        assert [process.wait(timeout=60) for process in running] == [0, 0], kills.said(folder, 0)
    (end,) = events(folder, "end")
    assert end["preempted"] and end["saved"] == end["step"]
    before = int(str(end["step"]))
    assert 3 <= before < 16
    with kills.job(folder, 2, 2, *ARGUMENTS) as running:
        found = kills.kill(folder, running, 1, "compiling")
    assert found.seconds < kills.LIMIT and found.named, kills.said(folder, 0)
    assert found.codes == [-signal.SIGABRT]
    assert kills.farthest(kills.resume(folder, 1, 4, *ARGUMENTS), wanted) < 1e-6
    assert [start["step"] for start in events(folder, "start")] in ([0, before], [0, before, before])


@pytest.mark.slow
def test_one_process_ends_well_when_it_is_asked_to(tmp_path: Path) -> None:
    with kills.job(tmp_path, 1, 1, "--method", "data", "--steps", "100000") as running:
        kills.wait_for(lambda: max(kills.losses(tmp_path), default=-1) >= 1, running, 120, tmp_path)
        running[0].send_signal(signal.SIGTERM)
        assert running[0].wait(timeout=60) == 0, kills.said(tmp_path, 0)
    (end,) = events(tmp_path, "end")
    assert end["preempted"] and (tmp_path / "checkpoints" / str(end["saved"])).is_dir()
