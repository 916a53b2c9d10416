"""Processes that do not do the same all say what differs, in a bounded time, before anything has run."""

from __future__ import annotations

import pytest

from alpa_lite.processes.initialization import detected_launcher
from tests.processes import driver

SAID = {
    "shapes": [
        "batch/x is float32[32, 8] in process 1, float32[16, 8] in process 0",
        "batch/y is float32[32, 8] in process 1",
    ],
    "code": ["operations in process 1", "1 sin instead of 0"],
    "constants": ["arrays that the step closes over have other values, in process 1 than in process 0"],
    "raises": ["the data is not there"],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SAID)
def test_what_differs_is_said_by_all(what):
    ended = driver.run("bad.py", 2, 1, what, "1", env={"ALPA_LITE_PROCESS_TIMEOUT": "240"})
    for number, one in enumerate(ended):
        assert one.code == 0, one.text
        assert "no error" not in one.text, one.text
        for words in SAID[what]:
            assert words in one.text, one.text
        named = "ValueError after" if what == "raises" and number == 1 else "ProcessError after"
        assert named in one.text or "TracingError after" in one.text, one.text


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named_in_time():
    ended = driver.run("bad.py", 2, 1, "late", "1", env={"ALPA_LITE_PROCESS_TIMEOUT": "3"})
    for one in ended:
        assert one.code == 0, one.text
        assert "process 1 did not" in one.text and "raise ALPA_LITE_PROCESS_TIMEOUT" in one.text, one.text


def test_a_process_that_was_started_with_others_and_has_not_joined_them_is_told():
    assert detected_launcher({}) is None
    assert detected_launcher({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}) is None  # one step of a larger job
    assert detected_launcher({"OMPI_COMM_WORLD_SIZE": "4"}) == "OMPI_COMM_WORLD_SIZE=4"
    assert detected_launcher({"JAX_COORDINATOR_ADDRESS": "a:1"}) == "JAX_COORDINATOR_ADDRESS=a:1"


@pytest.mark.slow
def test_processes_that_were_not_joined_say_so():
    ended = driver.run("bad.py", 2, 1, "alone", "0", env={"SLURM_STEP_NUM_TASKS": "2"})
    for one in ended:
        assert one.code == 0 and "ProcessError" in one.text, one.text
        assert "SLURM_STEP_NUM_TASKS=2" in one.text and "alpa_lite.initialize()" in one.text, one.text
