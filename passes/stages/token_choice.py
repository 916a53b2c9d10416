"""Which slices of the sequence a pipeline should have: proposals, by a model of the seconds of a slice.

Problem. S stages run m micro-batches, each in slices of n tokens in all. Both m and the lengths are free: fewer
micro-batches in more slices are an alternative to more micro-batches, since a slice computes attention to the tokens
before it in one piece, and waits for dispatching and latencies more often, while smaller micro-batches do the same.

Answer. For each m the lengths with the least

    T = sum_i t_i + (S' - 1) max_i (t_i + c_i),     t, c = max over stages of t_s(1/m, l, c), of transfers both ways
                                                    S' = sum_s T_s / max_s T_s

by the exact dynamic programme (`stages.token_slices.cut`), where T_s is what stage s takes for whole sequences in its
model, so that S' = S where all stages take equally long. The transfer of a slice hides behind the next one unless it
takes longer; in passing all stages it is waited for. A slice takes a process at least the seconds that it spends on
dispatching it to all of its stages. Lengths are multiples of a number of tokens that suits the hardware; the last slice
has what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alpa_lite.ir.graph import Traced
from alpa_lite.passes.stages.token_latency import Latency
from alpa_lite.passes.stages.token_slices import cut

MOST = 32
"""The most slices that are proposed: each is two executables of every stage, which are planned and compiled."""

TILE = {"tpu": 128, "cuda": 64}
"""Rows that a product of matrices is computed in at least, by platform; slices are multiples of them where they can."""

TILE_ELSEWHERE = 8

FEWEST, FINEST = 8, 256
"""A sequence has at least and at most so many steps, whatever the tiles."""


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


def proposed(
    latency: Latency, tokens: int, counts: Sequence[int], step: int, dispatch: float
) -> tuple[Proposal, ...]:  # fmt: skip
    """The best slices for each number of micro-batches, and equal ones, fastest first; one slice is none.

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
        times = latency.seconds(1 / count, lengths, contexts)
        whole = latency.seconds(1 / count, np.array(tokens), np.array(0))
        stages = float(whole.sum() / whole.max()) if whole.max() > 0 else float(len(whole))
        sent = latency.transfers(1 / count, lengths, contexts).max(0)
        table = np.maximum(np.maximum(times.max(0), sent / 2), dispatch)
        table[: shortest - 1] = np.inf
        paced = np.maximum(times.max(0) + sent, dispatch)
        found = cut(table, count, stages, step=step, passing=np.where(np.isinf(table), np.inf, paced))
        best = [n // step for n in found.lengths]
        equal = [tuple(map(len, np.array_split(np.arange(size), n))) for n in (len(best), 1 << len(best).bit_length())]
        for parts in dict.fromkeys((tuple(best), *equal)):
            if len(parts) > 1 and min(parts) >= max(shortest, 1):
                at = np.cumsum([0, *parts[:-1]])
                taken, longest = table[np.array(parts) - 1, at].sum(), paced[np.array(parts) - 1, at].max()
                seconds = float(count * taken + (stages - 1) * longest)
                out.append(Proposal(count, _lengths(parts, step, tokens), seconds))
    return tuple(sorted(out, key=lambda one: one.seconds))


def sizes(traced: Traced) -> tuple[int, ...]:
    """The numbers of tokens that the sequence of a step may have, by the dims of its batch.

    An array may have one more than what the model reads, for the labels. One example may have no dim of examples.
    """
    values = zip(traced.graph.block.inputs, traced.arguments, strict=False)
    shapes = [traced.graph.values[value].shape for value, argument in values if argument.role == "batch"]
    first = 1 if any(len(shape) > 1 for shape in shapes) else 0
    dims = dict.fromkeys(n for shape in shapes for n in shape[first:] if n > 1)
    shorter = (n - 1 for n in dims if n > 2)
    return tuple(dict.fromkeys((*dims, *shorter)))
