"""Cuttings of the sequence: exact against all cuttings of small cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import OptionError
from alpa_lite.passes.stages.token_slices import TokenSlices, cut

STAGES = st.integers(1, 12)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum, in every order."""
    for cuts in itertools.product((False, True), repeat=total - 1):
        ends = [i + 1 for i, here in enumerate(cuts) if here] + [total]
        yield tuple(b - a for a, b in itertools.pairwise([0, *ends]))


def seconds(times: np.ndarray, lengths: tuple[int, ...], count: int, stages: int) -> float:
    taken = [times[length - 1, sum(lengths[:i])] for i, length in enumerate(lengths)]
    return count * sum(taken) + (stages - 1) * max(taken)


@st.composite
def tables(draw, steps: int) -> np.ndarray:
    """Seconds without any order: an answer that counts on slices that take longer as they grow fails."""
    cells = st.lists(st.integers(1, 40), min_size=steps * steps, max_size=steps * steps)
    return np.array(draw(cells), float).reshape(steps, steps)


@given(tables(5), st.integers(1, 4), STAGES)
def test_no_cutting_is_faster(times, count, stages):
    found = cut(times, count, stages)
    assert found.seconds == min(seconds(times, lengths, count, stages) for lengths in compositions(5))
    assert found.seconds == seconds(times, found.lengths, count, stages)


def test_even_slices_would_be_slower():
    """Later slices attend to more, so they are shorter, as in the paper's tables."""
    tokens, before = np.arange(1, 65)[:, None], np.arange(64)[None, :]
    lengths = cut(1.0 + tokens * (1.0 + before / 32.0), 1, 16, step=8).lengths
    assert sum(lengths) == 512
    assert lengths[0] > lengths[-1] and list(lengths) == sorted(lengths, reverse=True)


def test_what_is_not_allowed_is_not_taken():
    times = np.ones((4, 4))
    times[2:] = np.inf
    assert cut(times, 1, 1) == TokenSlices((2, 2), 2.0)
    with pytest.raises(OptionError, match="no slices that are allowed"):
        cut(np.full((4, 4), np.inf), 1, 4)


@given(tables(5), tables(5), STAGES)
def test_what_passing_a_stage_takes_longer(times, more, stages):
    """The slowest slice is the one that passes a stage last, which need not be the one that computes longest."""
    passing = times + more
    found = cut(times, 2, stages, passing=passing)

    def both(lengths: tuple[int, ...]) -> tuple[float, float]:
        at = [(length - 1, sum(lengths[:i])) for i, length in enumerate(lengths)]
        return sum(times[place] for place in at), max(passing[place] for place in at)

    assert found.seconds == min(2 * taken + (stages - 1) * paced for taken, paced in map(both, compositions(5)))
