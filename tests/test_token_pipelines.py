"""Pipelines in slices of the sequence: what they compute, what plans say, what is refused, and which lengths are best.

`token_slices="auto"` takes slices where they are predicted to be faster, and whole sequences elsewhere.
"""

import itertools
import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.cluster import Link
from alpa_lite.errors import OptionError
from alpa_lite.methods import Pipeline
from gallery import language, linen
from gallery.language import TOKENS, WIDE, language_model
from gallery.steps import sgd
from tests.comparing import compare
from tests.helpers import local, piped
from tests.marks import one_in, thorough


def test_activations_alone_travel(tmp_path):
    """Masks, their zeros and their cuts are made on every stage that reads them."""
    step, args = language_model()
    plan = piped(step, 2, num_stages=2, schedule="1f1b", token_slices=(5, 4, 3)).plan(*args)
    plan.save_timeline(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    sent = [event["args"]["bytes"] for event in events if event.get("args", {}).get("bytes")]
    assert sent and max(sent) <= 4 * 5 * WIDE * 4  # four examples of the longest slice
    assert len(sent) == 2 * 2 * 3


@pytest.mark.slow
def test_uneven_slices_on_two_stages():
    step, args = language_model()
    sliced = piped(step, 2, num_stages=2, schedule="1f1b", token_slices=(5, 4, 3))
    compare(sliced(*args), jax.jit(step)(*args))
    plan = sliced.plan(*args)
    assert plan.division.token_slices == (5, 4, 3)
    assert "slices of 5, 4, 3 tokens" in plan.method
    again = alpa_lite.Plan.from_json(plan.to_json())
    assert again.division == plan.division
    names = {event.name for event in plan.division.timeline.events if event.kind in ("forward", "backward")}
    assert {f"{kind} {m}.{s}" for kind in ("forward", "backward") for m in range(2) for s in range(3)} <= names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "microbatches", "method"),
    [
        thorough((4, 1, {"num_stages": 4, "token_slices": (3, 3, 3, 3)})),
        (4, 2, {"num_stages": 2, "submesh_shapes": ((1, 2), (2, 1)), "token_slices": (6, 6), "remat": "layer"}),
        thorough((4, 4, {"num_stages": 2, "schedule": "gpipe", "token_slices": (2,) * 6})),
        (2, 2, {"num_stages": 2, "schedule": "eager-1f1b", "token_slices": (7, 5), "remat": "selective"}),
        (2, 4, {"num_stages": 2, "token_slices": (12,)}),
    ],
)
def test_schedules_meshes_and_rematerialisation(devices, microbatches, method):
    step, args = language_model()
    compare(piped(step, devices, microbatches, **method)(*args), jax.jit(step)(*args))


@pytest.mark.slow
def test_a_plan_is_replayed():
    step, args = language_model()
    first = piped(step, 2, num_stages=2, token_slices=(6, 6))
    plan = first.plan(*args)
    again = alpa_lite.parallelize(step, plan=alpa_lite.Plan.from_json(plan.to_json()), cluster=local(2))
    compare(again(*args), jax.jit(step)(*args))


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, ["llama", "gpt"]))
def test_models_of_this_project(name):
    step, args = models.get(name).build("tiny", 4)
    tokens = next(iter(args[-1].values())).shape[1]
    got = piped(step, 2, num_stages=2, token_slices=(tokens // 2, tokens - tokens // 2))(*args)
    compare(got, jax.jit(step)(*args))


@pytest.mark.parametrize(
    ("causal", "lengths", "said"),
    [
        (False, (6, 6), r"token_slices=\[6, 6\]: .*dot_general at .* waits for later tokens"),
        (True, (6, 7), r"the sequence has 12 tokens, and \[6, 7\] are 13"),
    ],
)
def test_what_is_not_causal_and_lengths_that_do_not_add_up_are_refused(causal, lengths, said):
    step, args = language_model(causal=causal)
    with pytest.raises(OptionError, match=said):
        piped(step, 2, num_stages=2, token_slices=lengths).plan(*args)


def test_patches_are_refused_by_what_makes_them():
    """The tokens of a picture are no dim of an argument; what takes several rows of pixels at once is named."""
    params = {"patches": jnp.ones((2, 2, 3, WIDE)), "mix": jnp.ones((WIDE, WIDE)), "head": jnp.ones((WIDE, 1))}

    def loss(params, pixels):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(pixels, params["patches"], (2, 2), "VALID", dimension_numbers=numbers)
        x = x.reshape(x.shape[0], -1, WIDE)
        x = jax.nn.softmax(x @ jnp.swapaxes(x, 1, 2)) @ x @ params["mix"]
        return (x @ params["head"]).mean()

    args = (params, jnp.ones((4, 8, 8, 3)))
    for lengths in ((4, 4), (9, 8)):
        with pytest.raises(OptionError, match=r"conv_general_dilated at .*test_token_pipelines.* waits for later"):
            piped(sgd(loss), 2, num_stages=2, schedule="1f1b", token_slices=lengths).plan(*args)


@pytest.mark.parametrize("given", [(), (0, 4), 4, "every", (4.0, 8.0)])
def test_slices_are_lengths_and_gradients_apart_have_none(given):
    with pytest.raises(OptionError, match="token_slices="):
        Pipeline(token_slices=given)
    with pytest.raises(OptionError, match="zb-h1"):
        Pipeline(schedule="zb-h1", token_slices=(4, 4))


# -- lengths that are chosen -------------------------------------------------------------------------------------------


def cluster(devices: int, dispatch: float = 1e-6) -> alpa_lite.Cluster:
    """CPU devices that compute slowly, in pieces of any size: what a model of this size waits for is its pipeline."""
    return replace(local(devices), peak_flops={"f32": 1e9}, memory_bandwidth=1e12, tile=1, dispatch=dispatch)


@pytest.mark.slow
def test_slices_are_chosen():
    step, args = language_model()
    plan = piped(step, cluster(2), 1, num_stages=2, token_slices="auto").plan(*args)
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
    plan = piped(step, cluster(3), 1, num_stages=3, schedule="1f1b", token_slices=(3, 3, 3, 3)).plan(*args)
    assert max(plan.division.timeline.busy_seconds) < 1.5 * min(plan.division.timeline.busy_seconds)


def test_whole_sequences_where_dispatching_takes_long():
    step, args = language_model()
    plan = piped(step, cluster(2, dispatch=1e-2), 1, num_stages=2, token_slices="auto").plan(*args)
    assert plan.division.token_slices == ()
    assert any("token_slices: whole sequences: no slices were found" in note for note in plan.notes)


def test_a_model_that_cannot_be_sliced_says_why():
    step, args = language_model(causal=False)
    plan = piped(step, cluster(2), 1, num_stages=2, token_slices="auto").plan(*args)
    assert plan.division.token_slices == ()
    (note,) = [note for note in plan.notes if note.startswith("token_slices")]
    assert note.startswith("token_slices: whole sequences: dot_general at ")
    assert "waits for later tokens" in note
    assert "gallery/language.py" in note


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
    tokens = jax.random.randint(jax.random.key(1), (1, 64), 0, language.VOCAB)
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
        (lambda: one_example(linen.gpt(layers=2)), (9, 7)),
        (language.without_examples, (7, 5)),
        (lambda: language.without_examples(one_hot=True), (5, 7)),
    ],
    ids=["own", "linen", "without_examples", "one_hot"],
)
def test_one_example_is_cut_along_its_sequence(make: Any, lengths: tuple[int, ...]):
    step, args = make()
    sliced = piped(step, 2, "auto", num_stages=2, token_slices=lengths)
    compare(sliced(*args), jax.jit(step)(*args))
    assert sliced.plan(*args).num_microbatches == 1
