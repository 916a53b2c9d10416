"""How one mesh runs a step: micro-batches and rematerialisation, and which configuration only adds to which.

Both save activations and cost seconds: micro-batches repeat what each of them does (gathers of weights, latencies), and
what is recomputed is computed twice. Let T(config) be the seconds of its best plan within the budget, and F(config)
those without one. More micro-batches and more recomputation only add, so on each mesh

    T(more)  >=  F(more)  >=  F(less),      more: no fewer micro-batches, and no less recomputed.

Bytes. Let P(c) be the least bytes per device of any plan with c micro-batches, and `floor` the bytes of the training
state in equal blocks. Take the layouts of a plan with b >= c of them: with c, a micro-batch's values are at most b / c
times as large, and the rest takes at least `floor`. Hence

    P(b)  >=  floor + (P(c) - floor) * c / b .
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from alpa_lite.passes.layers.remat import NOTHING, Remat
from alpa_lite.passes.layers.rematerialisation import Choice

MICROBATCH_OVERHEAD = 0.005
"""Estimated relative cost of each further micro-batch: gathers of weights and latencies are repeated."""

REMAT_OVERHEAD: Mapping[Choice, float] = {"none": 0.0, "selective": 0.08, "layer": 1 / 3}
"""Estimated relative cost of rematerialisation: with whole layers, the forward pass, a third of the operations."""

REMAT_MEMORY_FACTOR: Mapping[Choice, int] = {"none": 1, "selective": 16, "layer": 64}
"""Estimated factor by which rematerialisation lowers saved activations."""

_RANKS: Mapping[Choice, int] = {"none": 0, "selective": 1, "layer": 2}


@dataclass(frozen=True)
class ExecutionConfig:
    """A number of micro-batches, and the rematerialisation of the backward pass."""

    microbatches: int = 1
    remat: Remat = NOTHING

    @property
    def rank(self) -> tuple[int, int]:
        """Its micro-batches, and its rematerialisation in thousandths of a rank."""
        first, total = self.remat.first or (1, 1)
        return self.microbatches, 1000 * _RANKS[self.remat.choice] * first // total

    @property
    def remat_overhead(self) -> float:
        """Estimated share of the computing that is repeated."""
        first, total = self.remat.first or (1, 1)
        return REMAT_OVERHEAD[self.remat.choice] * first / total

    def scale(self, other: ExecutionConfig, computing: float, seconds: float) -> float:
        """Estimated seconds, where another configuration takes `seconds`, of which `computing` for computing.

        Computing is repeated as rematerialisation asks; with fewer micro-batches communication is in proportion, as
        gathers of weights are, and with more of them each adds a little.
        """
        compute = computing * (1 + self.remat_overhead) / (1 + other.remat_overhead)
        fewer = min(1.0, self.microbatches / other.microbatches)
        more = max(0, self.microbatches - other.microbatches)
        return (compute + max(seconds - computing, 0.0) * fewer) * (1 + MICROBATCH_OVERHEAD * more)

    def only_adds_to(self, other: ExecutionConfig) -> bool:
        """Whether it has no fewer micro-batches than another, and recomputes whatever the other does."""
        less, more = other.remat, self.remat
        within = less in (NOTHING, more) or (less.choice == "selective" and more == Remat("layer"))
        return other.microbatches <= self.microbatches and within

    def __str__(self) -> str:
        parts = f"{self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"
        return parts if self.remat == NOTHING else f"{parts}, rematerialisation {str(self.remat)!r}"


def next_feasible_microbatches(count: int, least: float, floor: float, budget: float) -> int:
    """The least 2^k times as many micro-batches, k >= 1, that may fit a budget above the floor.

    Args:
      least: bytes per device that `count` of them need at least; 0 if that is not known.
    """
    assert floor < budget and least < math.inf
    more = 2 * count
    while floor + (least - floor) * count / more > budget:
        more *= 2
    return more
