"""`Pipeline(token_slices="auto")`: slices where they are predicted to be faster, and whole sequences elsewhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Link
from alpa_lite.methods import Pipeline
from tests import language_models as lm
from tests import zoo_linen
from tests.comparing import compare
from tests.gallery import local
from tests.language_models import TOKENS, language_model
from tests.marks import thorough


def cluster(devices: int, dispatch: float = 1e-6) -> alpa_lite.Cluster:
    """CPU devices that compute slowly, in pieces of any size: what a model of this size waits for is its pipeline."""
    return replace(local(devices), peak_flops={"f32": 1e9}, memory_bandwidth=1e12, tile=1, dispatch=dispatch)


def piped(step: Any, on: alpa_lite.Cluster, microbatches: Any = 1, **method: Any) -> Any:
    return alpa_lite.parallelize(step, method=Pipeline(**method), cluster=on, num_microbatches=microbatches)


@pytest.mark.slow
def test_slices_are_chosen():
    step, args = language_model()
    plan = piped(step, cluster(2), num_stages=2, token_slices="auto").plan(*args)
    assert len(plan.division.token_slices) > 1
    assert sum(plan.division.token_slices) == TOKENS
    (whole,) = [row for row in plan.comparisons if row.name == "whole sequences"]
    assert plan.step_seconds < 0.85 * whole.step_seconds
    (note,) = [note for note in plan.notes if note.startswith("token_slices: chosen")]
    assert f"{whole.step_seconds / plan.step_seconds:.2f} times as fast" in note
    assert "slices of the sequence: auto" in plan.method
    assert "token_slices: chosen" in str(plan)
    assert "slices of the sequence" in str(plan)
    again = alpa_lite.Plan.from_json(plan.to_json())
    assert (again.division, again.notes) == (plan.division, plan.notes)


def test_slices_that_are_given_have_stages_that_suit_them():
    """One micro-batch of whole sequences takes as long in any stages; its slices wait for the slowest of these."""
    step, args = language_model(layers=3)
    plan = piped(step, cluster(3), num_stages=3, schedule="1f1b", token_slices=(3, 3, 3, 3)).plan(*args)
    assert max(plan.division.timeline.busy) < 1.5 * min(plan.division.timeline.busy)


def test_whole_sequences_where_dispatching_takes_long():
    step, args = language_model()
    plan = piped(step, cluster(2, dispatch=1e-2), num_stages=2, token_slices="auto").plan(*args)
    assert plan.division.token_slices == ()
    assert any("token_slices: whole sequences: no slices were found" in note for note in plan.notes)


def test_a_model_that_cannot_be_sliced_says_why():
    step, args = language_model(causal=False)
    plan = piped(step, cluster(2), num_stages=2, token_slices="auto").plan(*args)
    assert plan.division.token_slices == ()
    (note,) = [note for note in plan.notes if note.startswith("token_slices")]
    assert note.startswith("token_slices: whole sequences: dot_general at ")
    assert "waits for later tokens" in note
    assert "language_models.py" in note


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.thorough)])
def test_none_of_some_lengths_are_faster(stages, microbatches):
    """Through the simulator: every cutting at multiples of three tokens, planned and simulated."""
    step, args = language_model()
    on = cluster(stages)
    auto = piped(step, on, microbatches, num_stages=stages, schedule="1f1b", token_slices="auto").plan(*args)
    parts = [c for n in range(1, 5) for c in itertools.product(range(1, 5), repeat=n) if sum(c) == 4]
    cuttings = [tuple(3 * part for part in some) for some in parts]
    fixed = {"num_stages": stages, "schedule": "1f1b"}
    seconds = {c: piped(step, on, microbatches, **fixed, token_slices=c).plan(*args).step_seconds for c in cuttings}
    assert auto.step_seconds <= 1.02 * min(seconds.values())
    assert auto.step_seconds < seconds[12,]


@pytest.mark.slow
def test_fewer_micro_batches_in_more_slices():
    """The number of micro-batches is chosen with the slices, and what is chosen computes what one device does."""
    step, args = language_model()
    on = cluster(2, dispatch=1e-4)
    fixed: dict[str, Any] = {"num_stages": 2, "schedule": "1f1b"}
    sliced = piped(step, on, "auto", **fixed, token_slices="auto")
    plan, whole = sliced.plan(*args), piped(step, on, "auto", **fixed).plan(*args)
    assert len(plan.division.token_slices) > 1
    assert plan.num_microbatches < whole.num_microbatches
    assert plan.step_seconds < whole.step_seconds
    every = [piped(step, on, n, **fixed).plan(*args) for n in (1, 2, 4, 8)]
    assert whole.step_seconds <= min(one.step_seconds for one in every)
    compare(sliced(*args), jax.jit(step)(*args))


# -- batches of one example -------------------------------------------------------------------------------------------


def one_example(made: tuple[Any, Any]) -> tuple[Any, Any]:
    """The same step on the first example."""
    step, (*state, batch) = made
    return step, (*state, jax.tree.map(lambda x: x[:1], batch))


def far_apart() -> alpa_lite.Cluster:
    """Two slow devices that a slower network joins."""
    link = Link(bandwidth=1e3, latency=1e-3)
    return replace(cluster(2), peak_flops={"f32": 1e5}, nodes=2, devices_per_node=1, network_link=link)


@pytest.mark.slow
def test_auto_chooses_slices():
    """One example, which no mesh divides without sending more, by a link that is slow, than it computes."""
    step, (params, _) = language_model(layers=4)
    tokens = jax.random.randint(jax.random.key(1), (1, 64), 0, lm.VOCAB)
    plan = alpa_lite.make_plan(step, params, tokens, cluster=far_apart(), verify="off", effort="thorough")
    assert len(plan.stages) == 2 and sum(plan.division.token_slices) == 64
    (mesh,) = [row for row in plan.comparisons if row.name == "one mesh"]
    assert mesh.step_seconds is not None and plan.step_seconds < 0.8 * mesh.step_seconds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "lengths"),
    [
        thorough((lambda: models.get("gpt").build("tiny", 1), (40, 24))),
        (lambda: one_example(zoo_linen.gpt(layers=2)), (9, 7)),
        (lm.without_examples, (7, 5)),
        (lambda: lm.without_examples(one_hot=True), (5, 7)),
    ],
    ids=["own", "linen", "without_examples", "one_hot"],
)
def test_one_example_is_cut_along_its_sequence(make: Any, lengths: tuple[int, ...]):
    step, args = make()
    sliced = piped(step, local(2), "auto", num_stages=2, token_slices=lengths)
    compare(sliced(*args), jax.jit(step)(*args))
    assert sliced.plan(*args).num_microbatches == 1
