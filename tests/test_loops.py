"""The train loops of `tests/loops/` compute on eight devices what plain `jit` computes, and move no state to do so.

Batches are placed ahead, evaluation follows each epoch, and the last batch of an epoch is short.
"""

import importlib
import logging
from typing import Any

import numpy as np
import pytest

import alpa_lite
from tests.gallery import local
from tests.loops import base
from tests.loops.base import NAMES, loop
from tests.marks import only

FAST = ("NnxOptimizer",)
"""Those whose models compile quickest; the others are of the same shape."""

SLOW = ("ActorCritic", "VisionBatchNorm")


def compare(caplog: pytest.LogCaptureFixture, name: str, steps: int, epoch: int, **options: Any) -> None:
    one = loop(name)
    train_step, eval_step = base.plain(one)
    want = base.run(one, train_step, eval_step, steps, epoch)
    step = alpa_lite.parallelize(one.train_step, **options)
    evaluation = alpa_lite.parallelize(one.eval_step, state_from=step)
    with caplog.at_level(logging.WARNING, logger="alpa_lite"):
        errors = base.errors(base.run(one, step, evaluation, steps, epoch, step.prefetch), want)
    assert "moves" not in caplog.text, caplog.text
    wrong = {path: error for path, error in errors.items() if error > base.TOLERANCE}
    assert not wrong, wrong
    assert len(want.metrics) == steps and len(want.evaluations) == steps // epoch


@pytest.mark.parametrize("name", FAST)
def test_two_short_epochs_equal_plain_jit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The last batches come when the step is planned, and are placed ahead."""
    compare(caplog, name, 6, 3, cluster=local(4))


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("name", only(SLOW, NAMES))
def test_twenty_steps_equal_plain_jit(name: str, caplog: pytest.LogCaptureFixture) -> None:
    compare(caplog, name, base.STEPS, base.EPOCH)


def test_every_loop_is_run() -> None:
    for module, names in base.MODULES.items():
        found = vars(importlib.import_module(f"tests.loops.{module}")).values()
        loops = {one.__name__ for one in found if isinstance(one, type) and issubclass(one, base.Loop)} - {"Loop"}
        assert loops == set(names)


def test_the_comparison_finds_a_leaf_that_differs() -> None:
    state = {"w": np.ones(4, np.float32), "tiny": np.float32(1e-9), "count": np.int32(3)}
    same = base.Run(state, [np.float32(0.5)], [])
    assert set(base.errors(same, same).values()) == {0.0}
    for path, value in (("w", state["w"] * (1 + 3e-5)), ("count", np.int32(4)), ("w", np.full(4, np.nan, np.float32))):
        other = base.Run(state | {path: value}, same.metrics, [])
        found = base.errors(other, same)
        assert [name for name, error in found.items() if error > base.TOLERANCE] == [f"state['{path}']"]


@pytest.mark.slow
def test_a_leaf_beside_the_batch_does_not_keep_the_state_from_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """Rollouts have time in front; `last_value` has only environments, of which the last batch has fewer."""
    one = loop("ActorCritic")
    step = alpa_lite.parallelize(one.train_step, method=alpa_lite.Sharded((8,)))
    (learner,) = one.make_state()
    with caplog.at_level(logging.WARNING, logger="alpa_lite"):
        for rows in (16, 6):
            learner, _ = step(learner, one.batch(0, rows))
    roles = {leaf.path: leaf.role for leaf in step.plans[0].stages[0].arguments}
    assert roles["rollout.last_value"] == "other"
    assert "moves" not in caplog.text
    first, second = ({a.path: a.spec for a in p.stages[0].arguments if a.role == "state"} for p in step.plans)
    assert first == second
