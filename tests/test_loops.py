"""The train loops of `gallery/loops/` compute on eight devices what plain `jit` computes, and move no state to do so.

Batches are placed ahead, evaluation follows each epoch, and the last batch of an epoch is short.
"""

import logging
from typing import Any

import numpy as np
import pytest

import alpa_lite
import gallery
from gallery.loops import base
from gallery.loops.base import LOOPS, Run
from tests.comparing import tree_errors
from tests.helpers import local
from tests.marks import only

NAMES = tuple(gallery.find("loop"))
FAST = ("NnxOptimizer",)
"""Those whose models compile quickest; the others are of the same shape."""

SLOW = ("ActorCritic", "VisionBatchNorm")


def errors(got: Run, want: Run) -> dict[str, float]:
    """For each leaf its relative error, as the docstring of `base` defines it; infinity where other leaves differ."""
    pairs = [("state", got.state, want.state)]
    for name in ("metrics", "evaluations"):
        both = zip(getattr(got, name), getattr(want, name), strict=True)
        pairs += [(f"{name}[{i}]", a, b) for i, (a, b) in enumerate(both)]
    return {name + path: error for name, a, b in pairs for path, error in tree_errors(a, b).items()}


def compare(caplog: pytest.LogCaptureFixture, name: str, steps: int, epoch: int, **options: Any) -> None:
    one = LOOPS[name]()
    train_step, eval_step = base.plain(one)
    want = base.run(one, train_step, eval_step, steps, epoch)
    step = alpa_lite.parallelize(one.train_step, **options)
    evaluation = alpa_lite.parallelize(one.eval_step, state_from=step)
    with caplog.at_level(logging.WARNING, logger="alpa_lite"):
        found = errors(base.run(one, step, evaluation, steps, epoch, step.prefetch), want)
    assert "moves" not in caplog.text, caplog.text
    wrong = {path: error for path, error in found.items() if error > base.TOLERANCE}
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


def test_the_comparison_finds_a_leaf_that_differs() -> None:
    state = {"w": np.ones(4, np.float32), "tiny": np.float32(1e-9), "count": np.int32(3)}
    same = Run(state, [np.float32(0.5)], [])
    assert set(errors(same, same).values()) == {0.0}
    for path, value in (("w", state["w"] * (1 + 3e-5)), ("count", np.int32(4)), ("w", np.full(4, np.nan, np.float32))):
        other = Run(state | {path: value}, same.metrics, [])
        found = errors(other, same)
        assert [name for name, error in found.items() if error > base.TOLERANCE] == [f"state['{path}']"]


@pytest.mark.slow
def test_a_leaf_beside_the_batch_does_not_keep_the_state_from_its_place(caplog: pytest.LogCaptureFixture) -> None:
    """Rollouts have time in front; `last_value` has only environments, of which the last batch has fewer."""
    one = LOOPS["ActorCritic"]()
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
