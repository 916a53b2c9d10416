"""A job that is started again takes its plan and its executables from disk: in processes of their own, as jobs are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.processes import driver

HELPERS = {"jit__fresh", "jit__identity_fn", "jit_stage", "jit__threefry_seed"}
"""Copies and random keys, which compile in milliseconds: of several processes on CPUs, JAX keeps those of process 0."""


def started(folder: Path, *cases: str, processes: int = 1) -> list[dict[str, Any]]:
    """What each process of a job did, which has four devices in all."""
    texts = driver.agreed("restart.py", processes, 4 // processes, str(folder), *cases)
    return [json.loads(text.splitlines()[-1]) for text in texts]


def assert_quick(first: list[dict[str, Any]], again: list[dict[str, Any]], *, helpers: bool) -> None:
    for number, (one, other) in enumerate(zip(first, again, strict=True)):
        for case, done in one.items():
            restarted = other[case]
            assert restarted["searches"] == 0 and (done["searches"] == 1 or number > 0), case
            assert done["compiled"] and restarted["found"], case
            left = {*restarted["compiled"]} - (HELPERS if helpers and number else set())
            assert not left, f"{case} in process {number}"
            assert restarted["losses"] == done["losses"], case


@pytest.mark.slow
def test_a_job_that_is_started_again_neither_searches_nor_compiles(tmp_path: Path) -> None:
    first = started(tmp_path, "pipeline")
    assert any("stage_1_backward" in name for name in first[0]["pipeline"]["compiled"])
    assert_quick(first, started(tmp_path, "pipeline"), helpers=False)


@pytest.mark.slow
def test_one_mesh_is_started_again_as_quickly(tmp_path: Path) -> None:
    cases = ("one mesh", "searched")
    assert_quick(started(tmp_path, *cases), started(tmp_path, *cases), helpers=False)


@pytest.mark.slow
def test_each_of_several_processes_finds_the_executables_of_its_devices(tmp_path: Path) -> None:
    """JAX alone keeps what process 0 compiles, which has none of the second stage."""
    cases = ("one mesh", "pipeline")
    first = started(tmp_path, *cases, processes=2)
    assert any("stage_1_backward" in name for name in first[1]["pipeline"]["compiled"])
    assert_quick(first, started(tmp_path, *cases, processes=2), helpers=True)
