"""The cases of `benchmarks/numerics/processes.py` meet in pairs, and its comparison sees what it must."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.numerics.processes import CASES, METHODS, MODELS, SUBMESHES, joined


def test_each_method_meets_each_model_and_layout_and_each_model_each_layout():
    kinds = {"layout": SUBMESHES, "method": METHODS, "model": MODELS}
    for one, other in itertools.combinations(kinds, 2):
        met = {(getattr(case, one), getattr(case, other)) for case in CASES}
        assert met == set(itertools.product(kinds[one], kinds[other]))


def test_a_leaf_is_made_of_the_blocks_of_all_processes_and_the_worst_copy_counts():
    whole, lost, loss = {"w": np.arange(4.0), "[0]": np.float64(2)}, {"[0]": []}, {"[0]": [((), np.float64(2))]}
    first, second = [(((0, 2),), np.array([0.0, 1]))], [(((2, 4),), np.array([2.0, 3]))]
    got, count = joined([{"w": first, **loss}, {"w": second, **loss}], whole)
    assert (got["w"] == whole["w"]).all() and count == 4
    for worse in (7.0, np.nan):
        copy = [(((2, 4),), np.array([2.0, worse]))]
        got, _ = joined([{"w": first + second, **loss}, {"w": copy, **loss}], whole)
        assert np.array_equal(got["w"], [0, 1, 2, worse], equal_nan=True)
    for processes, message in (
        ([{"w": first, **loss}] * 2, "w: no process has some of its elements"),
        ([{"w": first, **loss}, {"w": second, **lost}], "a process cannot read it"),
    ):
        with pytest.raises(AssertionError, match=message):
            joined(processes, whole)
