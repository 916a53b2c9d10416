"""A job that is started again takes its plan and its executables from disk: in processes of their own, as jobs are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = Path(__file__).parent / "train.py"
LAUNCH = [sys.executable, "-c", "from alpa_lite.cli import main; main()", "launch"]
HELPERS = {"jit__fresh", "jit__identity_fn"}
"""Copies, which compile in milliseconds: of several processes on CPUs, JAX keeps those of process 0 alone."""


def started(folder: Path, name: str, *cases: str, processes: int = 1) -> list[dict[str, Any]]:
    """What each process of a job did, which has four devices in all."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(TRAIN), str(folder), name, *cases]
    if processes > 1:
        count = ["-n", str(processes), "--devices-per-process", str(4 // processes), "--"]
        command = [*LAUNCH, *count, *command[1:]]
    else:
        settings["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    job = subprocess.Popen(
        command, env=settings, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        text, _ = job.communicate(timeout=180)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    assert job.returncode == 0, text.decode()
    return [json.loads((folder / f"{name}-{i}.json").read_text()) for i in range(processes)]


def assert_quick(first: list[dict[str, Any]], again: list[dict[str, Any]], *, helpers: bool) -> None:
    for number, (one, other) in enumerate(zip(first, again, strict=True)):
        for case, done in one.items():
            restarted = other[case]
            assert restarted["searches"] == 0 and (done["searches"] == 1 or number > 0), case
            assert done["compiled"] and restarted["found"], case
            left = {*restarted["compiled"]} - (HELPERS if helpers and number else set())
            assert not left, f"{case} in process {number}"
            assert restarted["losses"] == done["losses"], case


def test_a_job_that_is_started_again_neither_searches_nor_compiles(tmp_path: Path) -> None:
    first = started(tmp_path, "first", "one mesh", "pipeline")
    assert any("stage_1_backward" in name for name in first[0]["pipeline"]["compiled"])
    assert_quick(first, started(tmp_path, "again", "one mesh", "pipeline"), helpers=False)


@pytest.mark.slow
def test_each_of_several_processes_finds_the_executables_of_its_devices(tmp_path: Path) -> None:
    """JAX alone writes those of process 0."""
    first = started(tmp_path, "first", "one mesh", processes=2)
    assert_quick(first, started(tmp_path, "again", "one mesh", processes=2), helpers=True)
