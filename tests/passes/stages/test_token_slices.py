"""Cuttings of the sequence and the batch: exact against all cuttings of small cases, and within the gap asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import OptionError
from alpa_lite.passes.stages.token_slices import Part, TokenSlices, cut

STAGES = st.integers(1, 12)


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum, in every order."""
    for cuts in itertools.product((False, True), repeat=total - 1):
        ends = [i + 1 for i, here in enumerate(cuts) if here] + [total]
        yield tuple(b - a for a, b in itertools.pairwise([0, *ends]))


def partitions(total: int, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of some sizes, in one order."""
    if total == 0:
        yield ()
    for size in sizes:
        if size <= total:
            yield from ((size, *rest) for rest in partitions(total - size, [s for s in sizes if s <= size]))


def seconds(times: dict[int, np.ndarray], parts: list[tuple[int, tuple[int, ...]]], stages: int) -> float:
    taken = [
        times[examples][length - 1, sum(lengths[:i])] for examples, lengths in parts for i, length in enumerate(lengths)
    ]
    return sum(taken) + (stages - 1) * max(taken)


def least(times: dict[int, np.ndarray], batch: int, stages: int) -> float:
    """Over all cuttings, each part cut on its own."""
    size = len(next(iter(times.values())))
    return min(
        seconds(times, list(zip(some, lengths, strict=True)), stages)
        for some in partitions(batch, list(times))
        for lengths in itertools.product(list(compositions(size)), repeat=len(some))
    )


@st.composite
def tables(draw, steps: int) -> dict[int, np.ndarray]:
    """Seconds without any order: an answer that counts on slices that take longer as they grow fails."""
    cells = st.lists(st.integers(1, 40), min_size=steps * steps, max_size=steps * steps)
    return {b: np.array(draw(cells), float).reshape(steps, steps) for b in (1, 2)}


@given(tables(5), STAGES)
def test_no_cutting_of_one_part_is_faster(times, stages):
    found = cut({1: times[1]}, 1, stages)
    assert found.seconds == least({1: times[1]}, 1, stages) == found.bound


@given(tables(3), st.integers(1, 4), STAGES)
def test_no_cutting_of_a_batch_is_faster(times, batch, stages):
    found = cut(times, batch, stages)
    assert found.seconds == least(times, batch, stages) == found.bound
    assert found.seconds == seconds(times, [(part.examples, part.lengths) for part in found.parts], stages)
    assert sum(part.examples for part in found.parts) == batch
    assert found.slowest == max(
        times[p.examples][length - 1, sum(p.lengths[:i])] for p in found.parts for i, length in enumerate(p.lengths)
    )


@given(tables(4), st.integers(1, 3), STAGES, st.floats(0, 60))
def test_the_gap_bounds_what_is_lost(times, batch, stages, gap):
    best, found = cut(times, batch, stages), cut(times, batch, stages, gap=gap)
    assert found.bound <= best.seconds <= found.seconds
    assert found.seconds - best.seconds <= gap
    assert found.seconds - found.bound <= max(gap, 0)


def test_even_slices_would_be_slower():
    """Later slices attend to more, so they are shorter, as in the paper's tables."""
    tokens, before = np.arange(1, 65)[:, None], np.arange(64)[None, :]
    found = cut({1: 1.0 + tokens * (1.0 + before / 32.0)}, 1, 16, step=8)
    (part,) = found.parts
    assert sum(part.lengths) == 512
    assert part.lengths[0] > part.lengths[-1] and list(part.lengths) == sorted(part.lengths, reverse=True)


def test_what_is_not_allowed_is_not_taken():
    times = np.ones((4, 4))
    times[2:] = np.inf
    assert cut({1: times}, 1, 1) == TokenSlices((Part(1, (2, 2)),), 2.0, 1.0, 2.0)
    with pytest.raises(OptionError, match=r"no parts of 2 examples .* add up to a batch of 3"):
        cut({2: times}, 3, 4)
    with pytest.raises(OptionError, match="no parts of 1 examples"):
        cut({1: np.full((4, 4), np.inf)}, 1, 4)


@given(tables(5), tables(5), STAGES)
def test_what_passing_a_stage_takes_longer(times, more, stages):
    """The slowest slice is the one that passes a stage last, which need not be the one that computes longest."""
    passing = {1: times[1] + more[1]}
    found = cut({1: times[1]}, 2, stages, passing=passing)

    def both(lengths: tuple[int, ...]) -> tuple[float, float]:
        at = [(length - 1, sum(lengths[:i])) for i, length in enumerate(lengths)]
        return sum(times[1][place] for place in at), max(passing[1][place] for place in at)

    every = [(both(a), both(b)) for a, b in itertools.combinations_with_replacement(list(compositions(5)), 2)]
    assert found.seconds == min(a[0] + b[0] + (stages - 1) * max(a[1], b[1]) for a, b in every)
    assert found.bound == found.seconds
    assert found.slowest == max(both(part.lengths)[1] for part in found.parts)
