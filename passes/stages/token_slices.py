"""How a pipeline's sequence is cut into slices, and its batch into parts, so that a step takes the least time.

Problem. K stages run one *part* of the batch after another, b examples each, and of each part one *slice* of the
sequence after another: l tokens that attend to themselves and to the c tokens before them. A slice takes t(b, l, c)
seconds on a stage, forward and backward, with what is sent to the next stage. As in every pipeline whose stages take as
long as one another, the first slice passes all stages and the slowest one sets the pace of the rest:

    T = sum_i t_i + (K - 1) max_i p_i,     over parts of B examples in all, each cut into slices of L tokens in all,

where p_i = t_i, or what a slice takes to pass a stage if that is more: of sending, only the last slice's is waited for.

Method. With no slice above m, the least sum splits: over prefixes of the sequence, and then over examples,

    F_m(b, e) = min over l of F_m(b, e - l) + t(b, l, e - l), where p <= m,      F_m(b, 0) = 0
    G_m(n)    = min over b of G_m(n - b) + F_m(b, L),                            G_m(0) = 0

so that T is the least G_m(B) + (K - 1) m over the values m that p takes. TeraPipe tries these in order, at steps of
some epsilon, which costs at most (K - 1) epsilon (Li et al., ICML 2021, section 3.3). Here they are bisected, since G
falls as m grows: between two values a < m <= z nothing is less than G_z(B) + (K - 1) (the value after a), and an
interval that holds nothing below the best so far, less `gap`, is not searched further. With `gap` 0 that is exact.
Otherwise it is above the optimum by at most `gap`, whatever t is: t need not grow with l or c.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from alpa_lite.errors import OptionError

_AT_ONCE = 64
"""Values of m that are tried together: their rows of F fit a cache."""


@dataclass(frozen=True)
class Part:
    """Examples that run together, and the lengths of their slices in tokens, first to last."""

    examples: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class TokenSlices:
    """A cutting of a batch of sequences.

    Attributes:
      parts: in the order in which they run.
      seconds: T, predicted. slowest: p of the slowest slice.
      bound: no cutting at these lengths is faster, in seconds.
    """

    parts: tuple[Part, ...]
    seconds: float
    slowest: float
    bound: float


def cut(
    times: Mapping[int, np.ndarray], batch: int, stages: float, *, step: int = 1, gap: float = 0.0,
    passing: Mapping[int, np.ndarray] | None = None,
) -> TokenSlices:  # fmt: skip
    """The fastest cutting.

    Args:
      times: for each number of examples that a part may have, [n, n] seconds of a slice of (i + 1) * step tokens behind
        j * step others, where the sequence has n * step; what is longer than the sequence (i + 1 + j > n) is not read,
        and infinity stands for what is not allowed.
      batch: examples of a step. stages: K; not whole where others than the slowest take less.
      step: the lengths of slices are multiples of so many tokens.
      gap: seconds by which the result may exceed the least.
      passing: p, as `times`, which it is where it is not given.

    Raises:
      OptionError: no parts add up to the batch, or no slices that are allowed to the sequence.
    """
    passing = times if passing is None else passing
    tables = {
        b: _ends(np.asarray(seconds, float), np.asarray(passing[b], float)) for b, seconds in sorted(times.items())
    }
    values = np.unique(np.concatenate([paced for rows in tables.values() for _, paced in rows]))
    values = values[np.isfinite(values)]
    known: dict[int, float] = {}

    def ask(places: list[int]) -> None:
        new = sorted({place for place in places if place not in known})
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            known.update(zip(some, _least(tables, batch, values[some]).tolist(), strict=True))

    last = len(values) - 1
    if last < 0 or (ask([last]), not np.isfinite(known[last]))[1]:
        raise OptionError(
            f"times: no parts of {', '.join(map(str, tables))} examples with slices that are allowed add up to a batch "
            f"of {batch}; give times for other numbers of examples"
        )
    best, at = known[last] + (stages - 1) * values[last], last
    bound, open_ = np.inf, [(-1, last)]  # values after the first of the two, up to the second
    while open_:
        kept = []
        for low, high in open_:
            least = known[high] + (stages - 1) * values[low + 1]
            if high - low == 1 or least >= best - gap:
                bound = min(bound, least)
            else:
                kept.append((low, high, (low + high) // 2))
        ask([middle for _, _, middle in kept])
        open_ = []
        for low, high, middle in kept:
            if (found := known[middle] + (stages - 1) * values[middle]) < best:
                best, at = found, middle
            open_ += [(low, middle), (middle, high)]
    parts = _parts(tables, batch, values[at], step)
    taken, paced = np.array(
        [
            [row[length // step - 1] for row in tables[part.examples][end // step - 1]]
            for part in parts
            for length, end in zip(part.lengths, np.cumsum(part.lengths).tolist(), strict=True)
        ]
    ).T
    seconds = taken.sum() + (stages - 1) * paced.max()
    return TokenSlices(parts, float(seconds), float(paced.max()), float(min(bound, seconds)))


Rows = list[tuple[np.ndarray, np.ndarray]]
"""[i] t and p of slices of 1 ... i + 1 steps that end behind step i."""


def _ends(seconds: np.ndarray, passing: np.ndarray) -> Rows:
    """The rows of tables by length and context."""
    at = [(np.arange(end + 1), end - np.arange(end + 1)) for end in range(len(seconds))]
    return [(seconds[i], passing[i]) for i in at]


def _least(tables: Mapping[int, Rows], batch: int, limits: np.ndarray) -> np.ndarray:
    """[limits] G(batch) with no slice above each limit."""
    whole = {examples: _prefixes(rows, limits)[:, -1] for examples, rows in tables.items()}
    total = np.full((batch + 1, len(limits)), np.inf)
    total[0] = 0.0
    for n in range(1, batch + 1):
        for examples, seconds in whole.items():
            if examples <= n:
                total[n] = np.minimum(total[n], total[n - examples] + seconds)
    return total[batch]


def _prefixes(rows: Rows, limits: np.ndarray) -> np.ndarray:
    """[limits, n + 1] F of each prefix of the sequence."""
    out = np.zeros((len(limits), len(rows) + 1))
    for end, (seconds, paced) in enumerate(rows):
        before = out[:, end::-1] + seconds  # the shortest slice follows the longest prefix
        out[:, end + 1] = np.where(paced <= limits[:, None], before, np.inf).min(1)
    return out


def _parts(tables: Mapping[int, Rows], batch: int, limit: float, step: int) -> tuple[Part, ...]:
    """The cutting behind G(batch)."""
    limits = np.array([limit])
    prefixes = {examples: _prefixes(rows, limits)[0] for examples, rows in tables.items()}
    total, chosen = [0.0], [0]
    for n in range(1, batch + 1):
        options = [(total[n - b] + prefix[-1], b) for b, prefix in prefixes.items() if b <= n]
        least, examples = min(options, default=(np.inf, 0))
        total.append(least)
        chosen.append(examples)
    parts = []
    while batch:
        examples = chosen[batch]
        rows, prefix, lengths, end = tables[examples], prefixes[examples], [], len(tables[examples])
        while end:
            seconds, paced = rows[end - 1]
            steps = int(np.where(paced <= limit, prefix[end - 1 :: -1] + seconds, np.inf).argmin()) + 1
            lengths.append(steps * step)
            end -= steps
        parts.append(Part(examples, tuple(reversed(lengths))))
        batch -= examples
    return tuple(reversed(parts))
