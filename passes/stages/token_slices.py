"""How a pipeline's sequence is cut into slices so that a step takes the least time.

Problem. K stages run one micro-batch after another, B in all, and of each one *slice* of the sequence after another: l
tokens that attend to themselves and to the c tokens before them. A slice takes t(l, c) seconds on a stage, forward and
backward, with what is sent to the next stage. As in every pipeline whose stages take as long as one another, the first
slice passes all stages and the slowest one sets the pace of the rest:

    T = B sum_i t_i + (K - 1) max_i p_i,     over slices of L tokens in all,

where p_i = t_i, or what a slice takes to pass a stage if that is more: of sending, only the last slice's is waited for.

Method. With no slice above m, the least sum splits over prefixes of the sequence,

    F_m(e) = min over l of F_m(e - l) + t(l, e - l), where p <= m,      F_m(0) = 0

so that T is the least B F_m(L) + (K - 1) m over the values m that p takes. TeraPipe tries these in order, at steps of
some epsilon, which costs at most (K - 1) epsilon (Li et al., ICML 2021, section 3.3). Here they are bisected, since F
falls as m grows: between two values a < m <= z nothing is less than B F_z(L) + (K - 1) (the value after a), and an
interval that holds nothing below the best so far is not searched further. The result is exact whatever t is: t need not
grow with l or c.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alpa_lite.errors import OptionError

_AT_ONCE = 64
"""Values of m that are tried together: their rows of F fit a cache."""


@dataclass(frozen=True)
class TokenSlices:
    """A cutting of each sequence.

    Attributes:
      lengths: of the slices in tokens, first to last.
      seconds: T, predicted.
    """

    lengths: tuple[int, ...]
    seconds: float


def cut(
    seconds: np.ndarray, count: int, stages: float, *, step: int = 1, passing: np.ndarray | None = None
) -> TokenSlices:
    """The fastest cutting.

    Args:
      seconds: [n, n] of a slice of (i + 1) * step tokens behind j * step others, where the sequence has n * step; those
        longer than the sequence (i + 1 + j > n) are not read, and infinity stands for what is not allowed.
      count: B.
      stages: K; not whole where others than the slowest take less.
      step: the lengths of slices are multiples of so many tokens.
      passing: p, as `seconds`, which it is where it is not given.

    Raises:
      OptionError: no slices that are allowed add up to the sequence.
    """
    rows = _ends(seconds, seconds if passing is None else passing)
    values = np.unique(np.concatenate([paced for _, paced in rows]))
    values = values[np.isfinite(values)]
    known: dict[int, float] = {}

    def ask(places: list[int]) -> None:
        new = sorted(set(places) - known.keys())
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            known.update(zip(some, (count * _prefixes(rows, values[some])[:, -1]).tolist(), strict=True))

    last = len(values) - 1
    if last >= 0:
        ask([last])
    if not np.isfinite(known.get(last, np.inf)):
        raise OptionError("seconds: no slices that are allowed add up to the sequence; give those of other lengths")
    best, at = known[last] + (stages - 1) * values[last], last
    intervals = [(-1, last)]  # values after the first of the two, up to the second
    while intervals:
        kept = [
            (low, high, (low + high) // 2)
            for low, high in intervals
            if high - low > 1 and known[high] + (stages - 1) * values[low + 1] < best
        ]
        ask([middle for _, _, middle in kept])
        intervals = []
        for low, high, middle in kept:
            if (found := known[middle] + (stages - 1) * values[middle]) < best:
                best, at = found, middle
            intervals += [(low, middle), (middle, high)]
    lengths = _lengths(rows, values[at])
    ends = np.cumsum(lengths).tolist()
    taken, paced = np.array([[row[n - 1] for row in rows[end - 1]] for n, end in zip(lengths, ends, strict=True)]).T
    return TokenSlices(tuple(n * step for n in lengths), float(count * taken.sum() + (stages - 1) * paced.max()))


Rows = list[tuple[np.ndarray, np.ndarray]]
"""[i] t and p of slices of 1 ... i + 1 steps that end behind step i."""


def _ends(seconds: np.ndarray, passing: np.ndarray) -> Rows:
    """The rows of tables by length and context."""
    at = [(np.arange(end + 1), end - np.arange(end + 1)) for end in range(len(seconds))]
    return [(seconds[i], passing[i]) for i in at]


def _prefixes(rows: Rows, limits: np.ndarray) -> np.ndarray:
    """[limits, n + 1] F of each prefix of the sequence."""
    out = np.zeros((len(limits), len(rows) + 1))
    for end, (seconds, paced) in enumerate(rows):
        before = out[:, end::-1] + seconds  # the shortest slice follows the longest prefix
        out[:, end + 1] = np.where(paced <= limits[:, None], before, np.inf).min(1)
    return out


def _lengths(rows: Rows, limit: float) -> list[int]:
    """The slices behind F(L), in steps."""
    prefix, lengths, end = _prefixes(rows, np.array([limit]))[0], [], len(rows)
    while end:
        seconds, paced = rows[end - 1]
        lengths.append(int(np.where(paced <= limit, prefix[end - 1 :: -1] + seconds, np.inf).argmin()) + 1)
        end -= lengths[-1]
    return lengths[::-1]
