"""Steps with mutable references (`jax.new_ref`) compute what plain `jit` does under every method."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import alpa_lite
from alpa_lite import DataParallel, MicrobatchError, Pipeline, Zero
from tests import reference_steps
from tests.comparing import assert_close
from tests.marks import slow_but, slow_one_in

METHODS = {
    "zero": {"method": Zero(3)},
    "micro-batches": {"method": DataParallel(), "num_microbatches": 2},
    "pipeline": {"method": Pipeline(num_stages=2), "num_microbatches": 1},
    "zb-h1": {"method": Pipeline(num_stages=2, schedule="zb-h1"), "num_microbatches": 4},
}
QUICK = {(reference_steps.metrics, "zb-h1")}
CASES = slow_one_in(3, slow_but(QUICK, [(step, method) for step in reference_steps.STEPS for method in METHODS]))


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


@pytest.mark.parametrize(("step", "method"), CASES, ids=name_of)
def test_a_step_with_references_is_equal_to_plain_jit(step, method):
    state, x = reference_steps.arguments(step)
    want = jax.jit(step)(state, x)
    try:
        got = alpa_lite.parallelize(step, **METHODS[method])(state, x)
    except MicrobatchError as error:  # parts of the batch of their own, and other batches
        assert step in (reference_steps.accumulation, reference_steps.scanned), error
        assert "num_microbatches" in str(error)
        return
    assert_close(got, want)
