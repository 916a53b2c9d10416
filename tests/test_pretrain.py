"""`examples/pretrain.py` in several processes: preempted, killed, and started again on fewer."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks import kills
from tests.test_examples import load

ARGUMENTS = ("--method", "zero", "--steps", "12", "--save-every", "3")


def events(folder: Path, name: str) -> list[dict[str, object]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == name]


def test_batches_depend_on_the_step_alone_and_rows_are_parts_of_them() -> None:
    source = load("pretrain").Text(None, 6, 5, 0)
    whole, again = source.batch(3), source.batch(3)
    assert whole["inputs"].shape == (6, 5) and (whole["inputs"] == again["inputs"]).all()
    assert (whole["inputs"][:, 1:] == whole["targets"][:, :-1]).all()
    part = source.batch(3, rows={"inputs": [4, 5], "targets": []})
    assert (part["inputs"] == whole["inputs"][4:]).all() and part["targets"].shape == (0, 5)
    assert (source.batch(4)["inputs"] != whole["inputs"]).any()
    assert (source.batch(3, "evaluation")["inputs"] != whole["inputs"]).any()


def test_one_process_is_asked_to_end_by_a_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        preemption = load("pretrain").Preemption()
        assert not preemption.reached(1)
        signal.raise_signal(signal.SIGTERM)
        assert preemption.reached(2)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_a_run_goes_on_with_half_of_its_processes_when_one_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    wanted = kills.resume(tmp_path / "whole", 1, 2, *ARGUMENTS)
    assert sorted(wanted) == list(range(12)) and wanted[11] < wanted[0]
    folder = tmp_path / "run"
    with kills.job(folder, 2, 1, *ARGUMENTS) as running:
        kills.wait_for((folder / "checkpoints" / "3").is_dir, running, 240, folder)
        found = kills.kill(folder, running, 1, "step")
    assert found.named, kills.said(folder, 0)
    # JAX ends it, unless the error of its own collective has ended it before.
    assert found.codes in ([-signal.SIGABRT], [1]), kills.said(folder, 0)
    assert kills.farthest(kills.resume(folder, 1, 1, *ARGUMENTS), wanted) < 1e-6
    assert [start["step"] for start in events(folder, "start")][:2] in ([0, 3], [0, 6], [0, 9])


@pytest.mark.slow
def test_all_processes_save_and_end_when_one_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    with kills.job(tmp_path, 2, 1, "--method", "zero", "--steps", "100000") as running:
        kills.wait_for(lambda: max(kills.losses(tmp_path), default=-1) >= 1, running, 240, tmp_path)
        running[1].send_signal(signal.SIGTERM)  # JAX tells the other
        assert [process.wait(timeout=120) for process in running] == [0, 0], kills.said(tmp_path, 0)
    (end,) = events(tmp_path, "end")
    assert end["preempted"] and end["saved"] == end["step"]
    assert (tmp_path / "checkpoints" / str(end["saved"])).is_dir()
