"""Lengths of slices of the sequence: proposals, by a model of the seconds of a slice.

Problem. S stages run B micro-batches, each in slices of L tokens in all. Both B and the lengths are free: fewer
micro-batches in more slices are an alternative to more micro-batches, since a slice computes attention to the tokens
before it in one piece, and waits for dispatching and latencies more often, while smaller micro-batches do the same.

Answer. For each B the lengths with the least

    T = B sum_i t_i + (K - 1) max_i p_i,     t, c = max over stages of t_s(1/B, l, c), of transfers both ways
                                             p = t + c,     K = sum_s T_s / max_s T_s

where T_s is what stage s takes for whole sequences in its model, so that K = S where all stages take equally long: the
first slice passes all stages, and the slowest one sets the pace of the rest. The transfer of a slice hides behind the
next one unless it takes longer; in passing all stages it is waited for. A slice takes a process at least the seconds
that it spends on dispatching it to all of its stages. Lengths are multiples of a number of tokens that suits the
hardware; the last slice has what is left.

Method (`cut`). With no p above m, the least sum splits over prefixes of the sequence,

    F_m(e) = min over l of F_m(e - l) + t(l, e - l), where p <= m,      F_m(0) = 0

so that T is the least B F_m(L) + (K - 1) m over the values m that p takes. TeraPipe tries these in order, at steps of
some epsilon, which costs at most (K - 1) epsilon (Li et al., ICML 2021, section 3.3). Here they are bisected, since F
falls as m grows: between two values a < m <= z nothing is less than B F_z(L) + (K - 1) (the value after a), and an
interval that holds nothing below the best so far is not searched further. The result is exact whatever t is: t need not
grow with l or c.

Model (`fit_latency`). Lengths depend on the seconds of slices that nobody has planned yet; these are predicted from
planned pipelines of the same stages in a few slices (`Sample`). A slice of l tokens behind c others, of a part r of the
batch, takes on one stage, forward and backward,

    t(r, l, c) = a + r (b l + d (c + l) + e l (c + l)),        a, b, d, e >= 0

a: the cost of a slice of any length: latencies, and parameters that are held sharded, gathered again. b: its tokens.
d: the work that is done once for each token that it sees, such as adding to the cotangents of their keys and values.
e: attention. The coefficients are those with the least sum of squared errors (non-negative least squares, Lawson and
Hanson, 1974), each as a share of the seconds of the slowest stage for the same slice: it alone sets the pace. Prices of
operations are not exactly of this form (short slices are computed less well), so `error` is the largest share by which
the model misses a sample. Transfers behind a stage, in both directions, have a model of the same form. The proposal
that follows from both is simulated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Traced

MOST = 32
"""The most slices that are proposed: each is two executables of every stage, which are planned and compiled."""

TILE = {"tpu": 128, "cuda": 64}
"""Rows that a product of matrices is computed in at least, by platform; slices are multiples of them where they can."""

TILE_ELSEWHERE = 8

FEWEST, FINEST = 8, 256
"""A sequence has at least and at most this many steps, whatever the tiles."""


@dataclass(frozen=True)
class Sample:
    """Planned seconds of one slice on one stage.

    Attributes:
      part: of the batch, such as 1/2 for two micro-batches.
      seconds: forward and backward. transfer_seconds: of transfers behind the stage, both ways.
    """

    stage: int
    part: float
    length: int
    context: int
    seconds: float
    transfer_seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class Latency:
    """The model of each stage.

    Attributes:
      coefficients: [2, stages, 4]: a, b, d, e of slices, and of transfers behind the stage, both ways.
      error: the largest error of a sample, as a share of what the slowest stage takes for the same slice.
    """

    coefficients: np.ndarray
    error: float

    def seconds(self, part: float, length: np.ndarray, context: np.ndarray) -> np.ndarray:
        """[2, stages, ...] t(part, length, context), and the seconds of transfers."""
        return np.tensordot(self.coefficients, _terms(part, length, context), 1)


def fit_latency(known: Sequence[Sample]) -> Latency:
    """Returns the model of samples; stages without any are of no seconds."""
    slowest: dict[tuple[float, int, int], float] = defaultdict(float)
    of_stage: dict[int, list[Sample]] = defaultdict(list)
    for sample in known:
        key = sample.part, sample.length, sample.context
        slowest[key] = max(slowest[key], sample.seconds)
        of_stage[sample.stage].append(sample)
    out = np.zeros((2, max(of_stage, default=-1) + 1, 4))
    error = 0.0
    for stage, some in of_stage.items():
        weights = np.array([1 / max(slowest[s.part, s.length, s.context], 1e-12) for s in some])
        columns = np.array([_terms(s.part, np.array(s.length), np.array(s.context)) for s in some])
        planned = np.array([(s.seconds, s.transfer_seconds) for s in some]).T
        scale = columns.max(0)  # of one size: tokens squared are many
        for number, seconds in enumerate(planned):
            out[number, stage] = optimize.nnls(columns / scale * weights[:, None], seconds * weights)[0] / scale
        error = max(error, float(np.abs((columns @ out[0, stage] - planned[0]) * weights).max()))
    return Latency(out, error)


def _terms(part: float, length: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Returns [4, ...], the factors of a, b, d and e."""
    seen = length + context
    return np.stack([np.ones_like(length, float), part * length, part * seen, part * length * seen])


@dataclass(frozen=True)
class Proposal:
    """A number of micro-batches, the lengths of their slices, and the seconds of a step by the model."""

    microbatches: int
    lengths: tuple[int, ...]
    seconds: float


def step_of(tokens: int, platform: str) -> int:
    """Of how many tokens the lengths of slices are multiples."""
    step = TILE.get(platform, TILE_ELSEWHERE)
    while step > 1 and tokens < FEWEST * step:
        step //= 2
    while tokens > FINEST * step:
        step *= 2
    return step


def first(tokens: int, step: int) -> tuple[int, ...]:
    """Slices that say most of the model: an eighth, an eighth, a quarter and a half of the sequence; or fewer.

    Four lengths and contexts, as many as the model has coefficients.
    """
    steps = tokens // step
    if steps < 4:
        return _lengths([1] * max(steps, 2) if tokens >= 2 else [1], 1 if steps < 2 else step, tokens)
    eighth, quarter = max(1, steps // 8), steps // 4
    return _lengths([eighth, eighth, quarter, steps - 2 * eighth - quarter], step, tokens)


def _lengths(parts: Sequence[int], step: int, tokens: int) -> tuple[int, ...]:
    """Returns multiples of a step, the last of which includes the rest of the tokens."""
    lengths = [part * step for part in parts]
    lengths[-1] = tokens - sum(lengths[:-1])
    return tuple(lengths)


def propose_slices(
    latency: Latency, tokens: int, counts: Sequence[int], step: int, dispatch: float
) -> tuple[Proposal, ...]:  # fmt: skip
    """Returns the best slices for each number of micro-batches, and equal ones, fastest first; one slice is none.

    Equal ones, as many and as the next power of two, are no better by the model, but prices have steps, which the model
    has not.

    Args:
      latency: of slices on each stage.
      step: of which lengths are multiples, but for the last.
      dispatch: seconds that a slice takes the busiest process to dispatch.
    """
    size = -(-tokens // step)
    shortest = -(-size // MOST)  # in steps
    lengths, contexts = np.meshgrid(np.arange(1, size + 1) * step, np.arange(size) * step, indexing="ij")
    out = []
    for count in counts:
        times, sent = latency.seconds(1 / count, lengths, contexts).max(1)
        whole = latency.seconds(1 / count, np.array(tokens), np.array(0))[0]
        stages = float(whole.sum() / whole.max()) if whole.max() > 0 else float(len(whole))
        table = np.maximum(np.maximum(times, sent / 2), dispatch)
        table[: shortest - 1] = np.inf
        paced = np.maximum(times + sent, dispatch)
        best = cut(table, count, stages, np.where(np.isinf(table), np.inf, paced)).lengths
        equal = [tuple(map(len, np.array_split(np.arange(size), n))) for n in (len(best), 1 << len(best).bit_length())]
        for parts in dict.fromkeys((best, *equal)):
            if len(parts) > 1 and min(parts) >= max(shortest, 1):
                out.append(Proposal(count, _lengths(parts, step, tokens), _seconds(parts, table, count, stages, paced)))
    return tuple(sorted(out, key=lambda one: one.seconds))


def sizes(traced: Traced) -> tuple[int, ...]:
    """Returns the numbers of tokens that the sequence of a step may have, by the dims of its batch.

    An array may have one more than what the model reads, for the labels. One example may have no dim of examples.
    """
    values = zip(traced.graph.block.inputs, traced.arguments, strict=False)
    shapes = [traced.graph.values[value].shape for value, argument in values if argument.role == "batch"]
    first = 1 if any(len(shape) > 1 for shape in shapes) else 0
    dims = dict.fromkeys(n for shape in shapes for n in shape[first:] if n > 1)
    shorter = (n - 1 for n in dims if n > 2)
    return tuple(dict.fromkeys((*dims, *shorter)))


_AT_ONCE = 64
"""Values of m that are tried together: their rows of F fit a cache."""


def cut(seconds: np.ndarray, count: int, stages: float, passing: np.ndarray) -> Proposal:
    """Returns the fastest slices, in steps, and T.

    Args:
      seconds: [n, n] of a slice of i + 1 steps behind j others, where the sequence has n; those longer than the
        sequence (i + 1 + j > n) are not read, and infinity stands for what is not allowed.
      count: B.
      stages: K; not whole where others than the slowest take less.
      passing: p, as `seconds`.

    Raises:
      OptionError: no slices that are allowed add up to the sequence.
    """
    ends = [(np.arange(end + 1), end - np.arange(end + 1)) for end in range(len(seconds))]
    rows = [(seconds[at], passing[at]) for at in ends]
    values = np.unique(np.concatenate([paced for _, paced in rows]))
    values = values[np.isfinite(values)]
    sums: dict[int, float] = {}  # value -> B F(L)
    best, lengths = np.inf, ()
    intervals = [(-1, len(values) - 1)] if len(values) else []  # values after the first of the two, up to the second
    while intervals:
        new = sorted({high for _, high in intervals} - sums.keys())
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            prefixes, last = _prefixes(rows, values[some])
            for number, place in enumerate(some):
                sums[place] = count * float(prefixes[number, -1])
                if sums[place] + (stages - 1) * values[place] < best:
                    best, lengths = sums[place] + (stages - 1) * values[place], _split(last[number])
        halves = [
            (low, (low + high) // 2, high)
            for low, high in intervals
            if high - low > 1 and sums[high] + (stages - 1) * values[low + 1] < best
        ]
        intervals = [pair for low, middle, high in halves for pair in ((low, middle), (middle, high))]
    if not lengths:
        raise OptionError("seconds: no slices that are allowed add up to the sequence; give those of other lengths")
    return Proposal(count, lengths, _seconds(lengths, seconds, count, stages, passing))


def _seconds(lengths: Sequence[int], seconds: np.ndarray, count: int, stages: float, passing: np.ndarray) -> float:
    """Returns T of some slices."""
    at = np.array(lengths) - 1, np.cumsum([0, *lengths[:-1]])
    return float(count * seconds[at].sum() + (stages - 1) * passing[at].max())


def _prefixes(rows: Sequence[tuple[np.ndarray, np.ndarray]], limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[limits, n + 1] F of each prefix of the sequence, and the last slice of it, less one step.

    Args:
      rows: [i] t and p of slices of 1 ... i + 1 steps that end behind step i.
    """
    out = np.zeros((len(limits), len(rows) + 1))
    last = np.zeros(out.shape, int)
    for end, (seconds, paced) in enumerate(rows):
        sums = np.where(paced <= limits[:, None], out[:, end::-1] + seconds, np.inf)  # the shortest slice comes first
        last[:, end + 1] = sums.argmin(1)
        out[:, end + 1] = np.take_along_axis(sums, last[:, end + 1, None], 1)[:, 0]
    return out, last


def _split(last: np.ndarray) -> tuple[int, ...]:
    """Returns the slices behind F(L), in steps."""
    lengths, end = [], len(last) - 1
    while end:
        lengths.append(int(last[end]) + 1)
        end -= lengths[-1]
    return tuple(lengths[::-1])
