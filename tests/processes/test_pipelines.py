"""Pipelines over several processes compute what one device computes."""

from __future__ import annotations

import json

import pytest

from tests.marks import only
from tests.processes import driver


def over(*shape, microbatches=2, **more):
    return {"kind": "Pipeline", "submesh_shapes": shape, "microbatches": microbatches, **more}


def mlp(*shape, **more):
    return ["mlp", over(*shape, microbatches=4, **more)]


def test_a_pipeline_over_two_processes_trains_as_one_device_does():
    """Stages of two devices, each in a process of its own: losses, parameters and every block of them."""
    first, last = driver.agreed("models.py", 2, 2, json.dumps([mlp(2, 2, schedule="1f1b")]))
    assert "meshes [(2,), (2,)]" in first and "meshes [(2,), (2,)]" in last
    assert "in 15 blocks" in first  # 3 steps: 2 parameters on 2 devices, and the loss, which it is told on one
    assert "in 18 blocks" in last  # which has the loss on the devices that made it


TWO = [
    mlp(4, 2, schedule="gpipe"),
    mlp(2, 2, 4, schedule="zb-h1"),  # two stages in one process, unequal submeshes
    mlp(2, 2, 2, 2, schedule="eager-1f1b"),
    mlp([2, 2], 4, schedule="interleaved-1f1b"),
    mlp(1, 1, schedule="1f1b"),  # both in one process; the other has no part, but is told the loss
]


@pytest.mark.slow
def test_schedules_and_submeshes():
    """On two processes; on four, and by every method and schedule, in `benchmarks/numerics/processes.py`."""
    for text in driver.agreed("models.py", 2, 4, json.dumps(TWO)):
        lines = [line.split() for line in text.splitlines() if " agrees in " in line]
        assert [line[-1] for line in lines] == [options["schedule"] for _, options in TWO]
        assert all(int(line[4]) >= 3 for line in lines)  # the loss of each step at least


MODELS = {
    "modules": (2, 2, [["nnx_user_gpt", over(2, 2)]]),  # they are updated in place
    "scan": (2, 2, [
        ["linen_gpt_scan", over(2, 2)],  # parameters under a scan that unequal stages share
        ["linen_gpt_scan", over(2, 2, schedule="1f1b", token_slices=[9, 7])],
    ]),
    "experts": (2, 2, [
        ["moe/nnx", {"kind": "DataParallel"}],
        ["moe/nnx", over(2, 2, schedule="gpipe")],  # after the other, JAX 0.10 hung while the loss was told
    ]),
    "mlp on four": (4, 1, [
        mlp(2, 2, schedule="1f1b"),  # each stage on two processes
        mlp(1, 2, schedule="zb-h1"),
    ]),
    "experts on four": (4, 1, [
        ["linen_moe", {"kind": "Sharded"}],
        ["linen_moe", {"kind": "Zero", "stage": 2}],
    ]),
    "gpt on four": (4, 1, [
        ["gpt", {"kind": "TensorParallel"}],
        ["gpt", over(1, 1, 1, 1, microbatches=4, schedule="eager-1f1b")],
    ]),
}  # fmt: skip
SLOW = ("modules", "experts on four", "mlp on four")


@pytest.mark.slow
@pytest.mark.parametrize("which", only(SLOW, MODELS))
def test_models_and_methods(which):
    """GPT and mixture of experts, of Linen and NNX, as functions and as modules.

    Of slices of the sequence, keys, values and their cotangents stay in the process of their stage; what crosses does
    so slice by slice.
    """
    processes, devices, cases = MODELS[which]
    for text in driver.agreed("models.py", processes, devices, json.dumps(cases)):
        lines = text.splitlines()
        ran = [(*line.split()[:2], line.split()[-1]) for line in lines if " agrees in " in line]
        for (name, kind, schedule), (wanted, options) in zip(ran, cases, strict=True):
            assert (name, kind) == (wanted, options["kind"])
            assert schedule == options.get("schedule", schedule)
        slices = [line.split(" slices ")[1] for line in lines if " slices " in line]
        assert slices == [str(options.get("token_slices", [])) for _, options in cases]


@pytest.mark.slow
def test_state_is_born_evaluated_and_moved_where_it_belongs():
    for text in driver.agreed("state.py", 2, 2, "[2, 2]", "[1, 2]"):
        for line in ("born in", "trained", "evaluated at", "short batch", "moved"):
            assert line in text
        assert "all held" not in text


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"kind": "Sharded"}, over(4, 4, microbatches=4)], ids=["mesh", "pipeline"])
def test_steps_may_be_called_long_before_their_results_are_read(options):
    """XLA holds 32 programs a device; with as few threads as devices (NPROC), JAX 0.10 hung beyond that."""
    for one in driver.run("models.py", 2, 4, json.dumps([["mlp", {**options, "unread": 100}]]), env={"NPROC": "1"}):
        assert one.code == 0, one.text
        assert "agrees" in one.text


@pytest.mark.slow
def test_check_trace_and_callbacks():
    """A wrong block of one process is found by all."""
    for text in driver.agreed("tools.py", 2, 2, "[2, 2]"):
        assert "equal: 5 leaves of Pipeline" in text and "equal: 5 leaves of Zero" in text
        assert "wrong: 2 leaves, the values between operations are in several processes" in text
        assert "'update'] on [0, 1]" in text and "called back" in text
