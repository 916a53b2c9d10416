"""Seconds of a slice of the sequence on each stage, by its length and by the tokens before it.

Problem. The lengths that a pipeline should have depend on the seconds of slices that nobody has planned yet. Given
planned pipelines of the same stages in a few slices (`Sample`), predict the seconds of any slice.

Model. A slice of l tokens behind c others, of a part r of the batch, takes on one stage, forward and backward,

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


@dataclass(frozen=True)
class Sample:
    """Planned seconds of one slice on one stage.

    Attributes:
      part: of the batch, such as 1/2 for two micro-batches.
      seconds: forward and backward. sent: of transfers behind the stage, both ways.
    """

    stage: int
    part: float
    length: int
    context: int
    seconds: float
    sent: float = 0.0


@dataclass(frozen=True, eq=False)
class Latency:
    """The model of each stage.

    Attributes:
      coefficients: [stages, 4]: a, b, d, e. sent: likewise, of transfers.
      error: the largest error of a sample, as a share of what the slowest stage takes for the same slice.
    """

    coefficients: np.ndarray
    sent: np.ndarray
    error: float

    def seconds(self, part: float, length: np.ndarray, context: np.ndarray) -> np.ndarray:
        """[stages, ...] t(part, length, context)."""
        return np.tensordot(self.coefficients, _terms(part, length, context), 1)

    def transfers(self, part: float, length: np.ndarray, context: np.ndarray) -> np.ndarray:
        """[stages, ...] seconds of transfers behind each stage, both ways."""
        return np.tensordot(self.sent, _terms(part, length, context), 1)


def fitted(known: Sequence[Sample]) -> Latency:
    """The model of samples; stages without any are of no seconds."""
    slowest: dict[tuple[float, int, int], float] = defaultdict(float)
    of_stage: dict[int, list[Sample]] = defaultdict(list)
    for sample in known:
        key = sample.part, sample.length, sample.context
        slowest[key] = max(slowest[key], sample.seconds)
        of_stage[sample.stage].append(sample)
    out, sent = np.zeros((2, max(of_stage, default=-1) + 1, 4))
    error = 0.0
    for stage, some in of_stage.items():
        weights = np.array([1 / max(slowest[s.part, s.length, s.context], 1e-12) for s in some])
        columns = np.array([_terms(s.part, np.array(s.length), np.array(s.context)) for s in some])
        seconds, transfers = (np.array([getattr(s, name) for s in some]) for name in ("seconds", "sent"))
        scale = columns.max(0)  # of one size: tokens squared are many
        out[stage] = optimize.nnls(columns / scale * weights[:, None], seconds * weights)[0] / scale
        sent[stage] = optimize.nnls(columns / scale * weights[:, None], transfers * weights)[0] / scale
        error = max(error, float(np.abs((columns @ out[stage] - seconds) * weights).max()))
    return Latency(out, sent, error)


def _terms(part: float, length: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Returns [4, ...], the factors of a, b, d and e."""
    seen = length + context
    return np.stack([np.ones_like(length, float), part * length, part * seen, part * length * seen])
