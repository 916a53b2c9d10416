"""Best-first search over sets of plans, with proven bounds, estimates, and a counted budget of work.

A candidate is a set of plans. It has a `bound`, seconds that none of its plans takes less of, which is proven and only
prunes; a `priority`, an estimate of its best plan, which orders; and a `key`, which breaks ties. The candidate of the
least (priority, key) is next: it is left out if its bound reaches the cutoff, else expanded into smaller sets and
plans. Other expansions may raise the bound of a candidate that waits, and change its priority; so both are taken when
it is next, and it waits again where its priority has risen.

Cutoff. A plan replaces the incumbent if it takes fewer seconds; one of another kind that is not simpler (a pipeline in
place of one mesh, more micro-batches, more recomputation) only if it saves `MARGIN`. Let c be what a plan of a set must
take less of. A set with bound >= c is pruned, and one with priority >= c is not expanded, since none of its plans is
expected to win; its bound remains part of the gap of the search.

Monotonicity. No expansion sees the budget: a larger one visits a superset of the candidates in the same order, and the
incumbent's seconds never rise. Until a plan fits, there is no budget.

Source: best-first branch and bound (Land and Doig, 1960); A* orders by its bound, here an estimate does, since the
least bubble of a pipeline is nearly none, and by bounds alone every pipeline would precede every plan of one mesh.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite.records import SearchSummary

logger = logging.getLogger(__name__)

MARGIN = 0.01
"""The share of its seconds that a plan of a less simple kind must save: the gap of the whole search."""

ROUNDING = 1e-9
"""Relative difference of seconds that is rounding."""

Kind = tuple[int, ...]
"""How complex plans are: in a pipeline, stages; micro-batches; recomputation. Less in nothing is not simpler."""


@dataclass(frozen=True, eq=False)
class FoundPlan:
    """A plan that fits, not written yet.

    Attributes:
      kind: how complex it is.
      seconds: predicted, of a step: of the lowered program.
      value: whatever its finder needs to write it.
    """

    kind: Kind
    seconds: float
    value: Any


@dataclass(frozen=True, eq=False)
class Expansion:
    """The parts of a candidate.

    Attributes:
      candidates: smaller sets of plans.
      plans: those that were found.
      bound: seconds that none of its plans takes less of which are in no part; `inf` if there are no others.
      work: cells visited.
    """

    candidates: Sequence[Candidate] = ()
    plans: Sequence[FoundPlan] = ()
    bound: float = math.inf
    work: int = 0


@dataclass(frozen=True, eq=False)
class Candidate:
    """A set of plans.

    Attributes:
      name: in words, for reports.
      kind: how complex its simplest plans are.
      key: breaks ties between candidates of equal priority; no two that wait have equal ones.
      estimate: (bound, priority) in seconds, by everything that is known now. The bound never falls.
      expand: its parts; plans of the given seconds or more are not wanted.
    """

    name: str
    kind: Kind
    key: tuple[Any, ...]
    estimate: Callable[[], tuple[float, float]]
    expand: Callable[[float], Expansion]


def cutoff_of(incumbent: FoundPlan | None, kind: Kind) -> float:
    """Seconds that a plan of a kind must take less of to replace the incumbent."""
    if incumbent is None:
        return math.inf
    simpler = all(own <= other for own, other in zip(kind, incumbent.kind, strict=True))
    return incumbent.seconds * (1 - (ROUNDING if simpler else MARGIN))


def search(
    roots: Sequence[Candidate], allowed: int, *, effort: str = "",
    progress: Callable[[int, int], None] = lambda work, allowed: None,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[FoundPlan | None, SearchSummary]:  # fmt: skip
    """The best plan of some candidates, None if none fits, and the work and the gap of the search.

    Args:
      roots: the sets to search.
      allowed: cells that may be visited; the expansion that exceeds them is the last, once a plan fits.
      effort: the name of this budget.
      progress: called with the work spent, and allowed, before each expansion.
      is_over: whether a limit of wall-clock time is over; the search then ends before the next expansion, once a plan
        fits, and is truncated.
    """
    incumbent: FoundPlan | None = None
    bound, work, expanded, pruned, truncated = math.inf, 0, 0, 0, False
    estimated: list[str] = []
    unreached: list[str] = []
    heap: list[tuple[float, tuple[Any, ...], Candidate]] = []

    def push(candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            heapq.heappush(heap, (candidate.estimate()[1], candidate.key, candidate))

    push(roots)
    while heap:
        priority, key, candidate = heapq.heappop(heap)
        least, current = candidate.estimate()
        cutoff = cutoff_of(incumbent, candidate.kind)
        is_bounded = least >= cutoff or math.isinf(least)
        if current > priority and not is_bounded:
            heapq.heappush(heap, (current, key, candidate))
            continue
        if is_bounded:
            pruned += 1
        elif current >= cutoff:
            estimated.append(candidate.name)
        elif incumbent is not None and (truncated or work >= allowed or is_over()):
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
            push(found.candidates)
        bound = min(bound, least)
    bound = min(bound, math.inf if incumbent is None else incumbent.seconds)
    return incumbent, SearchSummary(
        effort, work, allowed, expanded, pruned, bound, tuple(estimated), tuple(unreached), truncated
    )
