"""Cuttings of the sequence: exact against all cuttings of small cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import OptionError
from alpa_lite.passes.tokens.lengths import TokenSlices, cut


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum, in every order."""
    for cuts in itertools.product((False, True), repeat=total - 1):
        ends = [i + 1 for i, here in enumerate(cuts) if here] + [total]
        yield tuple(b - a for a, b in itertools.pairwise([0, *ends]))


@st.composite
def tables(draw, steps: int) -> np.ndarray:
    """Seconds without any order: an answer that counts on slices that take longer as they grow fails."""
    cells = st.lists(st.integers(1, 40), min_size=steps * steps, max_size=steps * steps)
    return np.array(draw(cells), float).reshape(steps, steps)


@given(tables(5), st.one_of(st.none(), tables(5)), st.integers(1, 4), st.integers(1, 12))
def test_no_cutting_is_faster(times, more, count, stages):
    """The slowest slice is the one that passes a stage last, which need not be the one that computes longest."""
    passing = None if more is None else times + more

    def seconds(lengths: tuple[int, ...]) -> float:
        at = [(length - 1, sum(lengths[:i])) for i, length in enumerate(lengths)]
        slowest = max((times if passing is None else passing)[place] for place in at)
        return count * sum(times[place] for place in at) + (stages - 1) * slowest

    found = cut(times, count, stages, passing=passing)
    assert found.seconds == seconds(found.lengths) == min(map(seconds, compositions(5)))


def test_what_is_not_allowed_is_not_taken():
    times = np.ones((4, 4))
    times[2:] = np.inf
    assert cut(times, 1, 1) == TokenSlices((2, 2), 2.0)
    with pytest.raises(OptionError, match="no slices that are allowed"):
        cut(np.full((4, 4), np.inf), 1, 4)
