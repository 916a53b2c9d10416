"""Best-first search over sets of plans, with proven bounds, estimates, and a counted budget of work.

A candidate is a set of plans. Its `bound`, seconds that none of its plans takes less of, is proven and only prunes; its
`priority`, an estimate of its best plan, orders; its `key` breaks ties. The candidate of the least (priority, key) is
next: it is left out if its bound reaches the cutoff, else expanded into smaller sets and plans. Other expansions may
raise both while it waits; so they are taken when it is next, and it waits again where its priority has risen.

Cutoff. A plan replaces the incumbent if it takes fewer seconds; one of another kind that is not simpler (a pipeline in
place of one mesh, more micro-batches, more recomputation) only if it saves `MARGIN`. Let c be what a plan of a set must
take less of. A set with bound >= c is pruned, and one with priority >= c is not expanded, since none of its plans is
expected to win; its bound remains part of the gap of the search.

Monotonicity. No expansion sees the budget: a larger one visits a superset of the candidates in the same order, and the
incumbent's seconds never rise. Until a plan fits, there is no budget.

Work. One unit is one cell of a cost matrix that message passing visits, a nanosecond or so. The constants that convert
other work were read off the CPU seconds of logged searches on one core, from which single ones differ by up to 3 times.
They need not be accurate: they move the end of a search, never its order.

Source: best-first branch and bound (Land and Doig, 1960). An estimate orders, and not the bound as in A*: the least
bubble of a pipeline is nearly none, and by bounds alone every pipeline would precede every plan of one mesh.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite.plan.decisions import SearchSummary

logger = logging.getLogger(__name__)

MARGIN = 0.01
"""The share of its seconds that a plan of a less simple kind must save: the gap of the whole search."""

EFFORTS: Mapping[str, int] = {"quick": 3_000_000_000, "normal": 22_000_000_000, "thorough": 180_000_000_000}
"""Cells that a search may visit, by `effort`: about 3, 20 and 180 CPU seconds of a core of 2026."""

ANALYSIS_PER_OP = 40_000  # tracing micro-batches, factors and groups, for each operation
TABLES_PER_OP = 30_000  # tables for the programs of all meshes, for each operation
BUILD_PER_CELL = 1_500  # building a program, for each cell of its cost matrices
BUILD_PER_STRATEGY = 15_000  # building a program, for each strategy of its nodes: their layouts and rooflines
LAYER_PER_OP = 80_000  # a cost of a layer, for each operation of it
STAGE_DP = 80_000_000  # choosing stages for one number of micro-batches
DIVISION_PER_OP = 50_000  # dividing the step into stages that it was not divided into before, for each operation
STAGE_PER_OP = 100_000  # solving and lowering a stage unlike those before, for each operation of it
SIMULATION_PER_OP = 20_000  # writing and simulating the program of a pipeline, for each operation

Kind = tuple[int, ...]
"""How complex plans are: in a pipeline, stages; micro-batches; recomputation. Less in nothing is not simpler."""


@dataclass(frozen=True, eq=False)
class FoundPlan:
    """A plan that fits, not written yet: its predicted seconds of a step, and the value that it is written from."""

    kind: Kind
    seconds: float
    value: Any


@dataclass(frozen=True, eq=False)
class Expansion:
    """The parts of a candidate, smaller sets of plans and those that were found, and the cells visited.

    No plan that is in none of the parts takes less than `bound` seconds.
    """

    candidates: Sequence[Candidate] = ()
    plans: Sequence[FoundPlan] = ()
    bound: float = math.inf
    work: int = 0


@dataclass(frozen=True, eq=False)
class Candidate:
    """A set of plans.

    Attributes:
      kind: how complex its simplest plans are. key: breaks ties; no two that wait have equal ones.
      estimate: (bound, priority) in seconds, by everything that is known now. The bound never falls.
      expand: its parts; plans of the given seconds or more are not wanted.
      slack: the share of its priority that its best plan takes at least: an estimate prunes only by that.
      is_floor: whether it is expanded even if the budget is spent, so that no plan of the search is slower.
    """

    name: str
    kind: Kind
    key: tuple[Any, ...]
    estimate: Callable[[], tuple[float, float]]
    expand: Callable[[float], Expansion]
    is_floor: bool = False
    slack: float = 1.0


def cutoff_of(incumbent: FoundPlan | None, kind: Kind) -> float:
    """Returns seconds that a plan of a kind must take less of to replace the incumbent."""
    if incumbent is None:
        return math.inf
    simpler = all(own <= other for own, other in zip(kind, incumbent.kind, strict=True))
    return incumbent.seconds * (1 - (1e-9 if simpler else MARGIN))  # that little is rounding


def _place(candidate: Candidate) -> tuple[float, tuple[Any, ...], Candidate]:
    """Returns the place of a candidate in the heap; estimates that differ by rounding are equal, and keys decide."""
    return float(f"{candidate.estimate()[1]:.9g}"), candidate.key, candidate


def search(
    roots: Sequence[Candidate], allowed: int, *, effort: str = "",
    progress: Callable[[int, int], None] = lambda work, allowed: None,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[FoundPlan | None, SearchSummary]:  # fmt: skip
    """Returns the best plan of some candidates, None if none fits, and the work and the gap of the search.

    Args:
      allowed: cells that may be visited; the expansion that exceeds them is the last but for floors, once a plan fits.
      effort: the name of this budget.
      progress: called with the work spent, and allowed, before each expansion.
      is_over: whether a limit of wall-clock time ends the search before the next expansion, once a plan fits.
    """
    incumbent: FoundPlan | None = None
    bound, work, expanded, pruned, truncated = math.inf, 0, 0, 0, False
    estimated, unreached = list[str](), list[str]()
    heap = [_place(root) for root in roots]
    heapq.heapify(heap)
    while heap:
        priority, _, candidate = heapq.heappop(heap)
        least, current = candidate.estimate()
        cutoff = cutoff_of(incumbent, candidate.kind)
        is_bounded = least >= cutoff or math.isinf(least)
        if current > priority * (1 + 1e-8) and not is_bounded:
            heapq.heappush(heap, _place(candidate))
            continue
        if is_bounded:
            pruned += 1
        elif current * candidate.slack >= cutoff:
            estimated.append(candidate.name)
        elif incumbent is not None and not candidate.is_floor and (truncated or work >= allowed or is_over()):
            truncated = truncated or work < allowed
            unreached.append(candidate.name)
        else:
            progress(work, allowed)
            found = candidate.expand(cutoff)
            logger.debug(
                "%s: bound %.4g s, estimated %.4g s, to be below %.4g s; work %d of %d; found %s",
                candidate.name, least, current, cutoff, work + found.work, allowed, [p.seconds for p in found.plans],
            )  # fmt: skip
            expanded, work, least = expanded + 1, work + found.work, max(found.bound, least)
            for plan in found.plans:
                if plan.seconds < cutoff_of(incumbent, plan.kind):
                    incumbent = plan
            for part in found.candidates:
                heapq.heappush(heap, _place(part))
        bound = min(bound, least)
    bound = min(bound, math.inf if incumbent is None else incumbent.seconds)
    return incumbent, SearchSummary(
        effort, work, allowed, expanded, pruned, bound, tuple(estimated), tuple(unreached), truncated
    )
