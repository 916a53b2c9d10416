"""Pipelines in slices of the sequence: what they compute, what their plans say, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite
from alpa_lite import models
from alpa_lite.errors import OptionError
from alpa_lite.methods import Pipeline
from tests.comparing import compare
from tests.gallery import local, sgd
from tests.language_models import WIDE, language_model
from tests.marks import one_in, thorough


def piped(step: Any, devices: int, microbatches: int = 2, **method: Any) -> Any:
    return alpa_lite.parallelize(step, method=Pipeline(**method), cluster=local(devices), num_microbatches=microbatches)


def make_plan(step: Any, args: Any, **method: Any) -> Any:
    return alpa_lite.make_plan(step, *args, cluster=local(2), method=Pipeline(**method), num_microbatches=2)


def test_activations_alone_travel(tmp_path):
    """Masks, their zeros and their cuts are made on every stage that reads them."""
    plan = make_plan(*language_model(), num_stages=2, schedule="1f1b", token_slices=(5, 4, 3))
    plan.simulate(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    sent = [event["args"]["bytes"] for event in events if event.get("args", {}).get("bytes")]
    assert sent and max(sent) <= 4 * 5 * WIDE * 4  # four examples of the longest slice
    assert len(sent) == 2 * 2 * 3


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_quickly")
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


def test_what_is_not_causal_is_refused():
    step, args = language_model(causal=False)
    with pytest.raises(OptionError, match=r"token_slices=\[6, 6\]: .*dot_general at .* waits for later tokens"):
        piped(step, 2, num_stages=2, token_slices=(6, 6)).plan(*args)


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
            make_plan(sgd(loss), args, num_stages=2, schedule="1f1b", token_slices=lengths)


def test_lengths_must_add_up():
    step, args = language_model()
    with pytest.raises(OptionError, match=r"the sequence has 12 tokens, and \[6, 7\] are 13"):
        piped(step, 2, num_stages=2, token_slices=(6, 7)).plan(*args)


@pytest.mark.parametrize("given", [(), (0, 4), 4, "every", (4.0, 8.0)])
def test_slices_are_lengths(given):
    with pytest.raises(OptionError, match="token_slices="):
        Pipeline(token_slices=given)


def test_gradients_apart_have_no_slices():
    with pytest.raises(OptionError, match="zb-h1"):
        Pipeline(schedule="zb-h1", token_slices=(4, 4))
