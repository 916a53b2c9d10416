"""The cases of `benchmarks/process_correctness.py` meet in pairs, and its comparison sees what it must."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks import process_cases
from benchmarks.process_cases import CASES, METHODS, MODELS, SUBMESHES, joined


def test_each_method_meets_each_model_and_layout_and_each_model_each_layout():
    kinds = {"layout": SUBMESHES, "method": METHODS, "model": MODELS}
    for one, other in itertools.combinations(kinds, 2):
        met = {(getattr(case, one), getattr(case, other)) for case in CASES}
        assert met == set(itertools.product(kinds[one], kinds[other]))
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(process_cases.Case(*case.name.split(", ")) == case for case in CASES)


def test_a_leaf_is_made_of_the_blocks_of_all_processes_and_the_worst_copy_counts():
    whole = {"w": np.arange(4.0), "[1]['loss']": np.float64(2)}
    loss = [((), np.float64(2))]
    first, second = [(((0, 2),), np.array([0.0, 1]))], [(((2, 4),), np.array([2.0, 3]))]
    got, count = joined([{"w": first, "[1]['loss']": loss}, {"w": second, "[1]['loss']": loss}], whole)
    assert (got["w"] == whole["w"]).all() and count == 4
    for worse in (7.0, np.nan):
        copy = [(((2, 4),), np.array([2.0, worse]))]
        got, _ = joined([{"w": first + second, "[1]['loss']": loss}, {"w": copy, "[1]['loss']": loss}], whole)
        assert np.array_equal(got["w"], [0, 1, 2, worse], equal_nan=True)
    with pytest.raises(AssertionError, match="w: no process has some of its elements"):
        joined([{"w": first, "[1]['loss']": loss}] * 2, whole)
    with pytest.raises(AssertionError, match="a process cannot read it"):
        joined([{"w": first, "[1]['loss']": loss}, {"w": second, "[1]['loss']": []}], whole)
