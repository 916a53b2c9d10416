"""Lengths of slices: cuttings against all of small cases, and what follows from a model of the seconds of a slice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.errors import OptionError
from alpa_lite.passes.tokens import lengths as choice
from alpa_lite.passes.tokens.lengths import Proposal, Sample, cut


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


@given(tables(5), st.one_of(st.just(0), tables(5)), st.integers(1, 4), st.integers(1, 12))
def test_no_cutting_is_faster(times, more, count, stages):
    """The slowest slice is the one that passes a stage last, which need not be the one that computes longest."""
    passing = times + more

    def seconds(lengths: tuple[int, ...]) -> float:
        at = [(length - 1, sum(lengths[:i])) for i, length in enumerate(lengths)]
        slowest = max(passing[place] for place in at)
        return count * sum(times[place] for place in at) + (stages - 1) * slowest

    found = cut(times, count, stages, passing)
    assert found.seconds == seconds(found.lengths) == min(map(seconds, compositions(5)))


def test_what_is_not_allowed_is_not_taken():
    times = np.ones((4, 4))
    times[2:] = np.inf
    assert cut(times, 1, 1, times) == Proposal(1, (2, 2), 2.0)
    with pytest.raises(OptionError, match="no slices that are allowed"):
        cut(np.full((4, 4), np.inf), 1, 4, np.full((4, 4), np.inf))


# -- the model of the seconds of a slice -------------------------------------------------------------------------------

COEFFICIENTS = ((1e-3, 2e-5, 0.0, 3e-8), (2e-3, 5e-5, 1e-6, 1e-8))


def true_seconds(stage: int, part: float, length: int, context: int) -> float:
    a, b, d, e = COEFFICIENTS[stage]
    seen = length + context
    return a + part * (b * length + d * seen + e * length * seen)


def placed(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(zip(lengths, (0, *itertools.accumulate(lengths)), strict=False))


def planned(part: float, lengths: tuple[int, ...]) -> list[Sample]:
    return [Sample(s, part, n, at, true_seconds(s, part, n, at)) for s in range(2) for n, at in placed(lengths)]


def test_the_first_slices_say_what_any_slice_takes():
    lengths = choice.first(1024, 64)
    assert lengths == (128, 128, 256, 512)
    model = choice.fit_latency(planned(1 / 2, lengths))
    assert model.error < 1e-9
    got, _ = model.seconds(1 / 4, np.array([100, 64]), np.array([0, 900]))
    want = [[true_seconds(s, 1 / 4, 100, 0), true_seconds(s, 1 / 4, 64, 900)] for s in range(2)]
    # That part was never seen: what a slice costs by itself is told from what its tokens cost by the lengths alone.
    np.testing.assert_allclose(got, want, rtol=1e-6)


def step_seconds(count: int, lengths: tuple[int, ...], dispatch: float) -> float:
    """T of the module, by its formula."""
    taken = [max(dispatch, *(true_seconds(s, 1 / count, n, at) for s in range(2))) for n, at in placed(lengths)]
    wholes = [true_seconds(s, 1 / count, sum(lengths), 0) for s in range(2)]
    return count * sum(taken) + (sum(wholes) / max(wholes) - 1) * max(taken)


@pytest.mark.parametrize("dispatch", [0.0, 8e-3])
def test_no_lengths_are_faster_by_the_model(dispatch):
    model = choice.fit_latency(planned(1.0, choice.first(512, 64)))
    found = choice.propose_slices(model, 384, [1, 2, 4], 64, dispatch)
    steps = [c for n in range(1, 7) for c in itertools.product(range(1, 7), repeat=n) if sum(c) == 6]
    every = [step_seconds(count, tuple(64 * n for n in c), dispatch) for c in steps for count in (1, 2, 4)]
    assert found[0].seconds == pytest.approx(min(every), rel=1e-4)
    assert [p.seconds for p in found] == sorted(p.seconds for p in found)
    wanted = [step_seconds(p.microbatches, p.lengths, dispatch) for p in found]
    assert [p.seconds for p in found] == pytest.approx(wanted, rel=1e-4)
    slow = choice.propose_slices(model, 384, [1, 2, 4], 64, 10.0)  # where dispatching takes all the time
    assert slow[0].seconds > 2 * 10.0


def test_sequences_that_are_no_multiple_of_the_hardware():
    assert [choice.step_of(n, "tpu") for n in (2048, 300)] == [128, 32]
    assert [choice.step_of(n, "cuda") for n in (2048, 131072)] == [64, 512]
    assert sum(choice.first(2047, 64)) == 2047
    model = choice.fit_latency(planned(1.0, (128, 128, 256, 512)))
    for proposal in choice.propose_slices(model, 1000, [1], 64, 0.0):
        assert sum(proposal.lengths) == 1000 and all(n % 64 == 0 for n in proposal.lengths[:-1])
        assert 2 <= len(proposal.lengths) <= choice.MOST
