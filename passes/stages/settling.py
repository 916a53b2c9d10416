"""Works out the costs of layers as far as the choice of stages depends on them: most begin as bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from alpa_lite.errors import InfeasibleError
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.stages.choosing import Sliced
from alpa_lite.passes.stages.formulas import evaluate
from alpa_lite.passes.stages.pricing import Key, Priced

ROUGH_SHARE = 0.7
"""The part of the time that a rough search may take, once some stages are worked out: the rest finds better ones among
all."""

ROUGHLY = ("1f1b",)
"""The schedules of a rough search: this one keeps the fewest micro-batches in flight."""

HIDING = ("eager-1f1b",)
"""What is searched last where the time is over before all schedules are: transfers hide behind it, for more memory."""

OVERTIME = 0.2
"""For what share of the time that is over costs are worked out for `HIDING`."""

NEAR = 1e-2
"""By what share stages must be faster by their bounds for these to be worked out."""


def settled(
    priced: Priced,
    choose: Callable[[Priced, bool], Sliced],
    work_out: Callable[[Priced, Sequence[Key], Deadline, bool], Priced],
    budget: float,
    deadline: Deadline,
    limit: float = math.inf,
    *,
    must: bool = True,
    hiding: Callable[[Priced], Sliced] | None = None,
    enough: Callable[[Sliced, float], bool] = lambda found, left: False,
) -> Sliced:
    """The best stages at costs that are worked out where they use them.

    The best stages by bounds are worked out, and the search is done again, until no bound of any others is below the
    best that is worked out by more than `NEAR`: first among equal submeshes and few schedules, which takes little time
    and tells most of what is needed, then among all. Where the time is over, the best stages so far are the answer;
    where that is before all schedules were searched, those of one whose transfers hide are compared with them.

    Args:
      priced: costs of layers, most of them bounds.
      choose: the best stages at some costs; roughly, if the second argument is true. Raises InfeasibleError if none
        fits.
      work_out: the costs with some worked out until a deadline, when it raises OutOfTime, unless it must go on, which
        is what the last argument says.
      deadline: until when to search.
      limit: seconds; of stages that take as many or more, any are returned.
      must: whether to go on without time until some stages are worked out. Then the best of those are taken whose costs
        are known, be they not the best by bounds.
      hiding: the best stages at some costs with a schedule of `HIDING`; raises InfeasibleError if none fits.
      enough: whether the best of what was searched roughly is all that is asked for, with so many seconds left.
      budget: bytes per device.

    Raises:
      InfeasibleError: none fits.
      OutOfTime: none was worked out in the time.
    """
    best: Sliced | None = None
    bound, rounds = 0.0, 0
    for rough, until in ((True, deadline.within(ROUGH_SHARE * deadline.left)), (False, deadline)):
        while best is None or not until.over:
            if deadline.over and not must:
                raise OutOfTime
            try:
                found = choose(priced, rough)
            except InfeasibleError:
                if best is None and not rough:
                    raise
                break
            bound = bound if rough else found.bound
            if found.seconds >= limit and not rough:
                return replace(found, priced=priced)
            if found.seconds >= limit:
                break
            wanted = priced.unknown(found.slices.stages)
            if wanted and deadline.over and rounds:
                certain = _certain(priced, lambda some, rough=rough: choose(some, rough))
                if certain is not None:
                    best = certain
                    break
            if not wanted and (best is None or found.seconds < best.seconds):
                best = found
            if not wanted or (best is not None and found.seconds >= (1 - NEAR) * best.seconds):
                break
            try:
                priced = _worked_out(priced, found, work_out, deadline, must and best is None)
            except OutOfTime:
                if best is None:
                    raise
                break
            rounds += 1
            exact = _at(found, priced)
            if max(exact.slices.bytes) <= budget and (best is None or exact.seconds < best.seconds):
                best = exact
        if rough and best is not None and best.seconds < limit and enough(best, deadline.left):
            return replace(best, priced=priced, bound=min(priced.least_seconds, best.seconds), rough=True)
    assert best is not None
    if deadline.over and hiding is not None:
        best = _hidden(best, priced, hiding, work_out, budget, Deadline(OVERTIME * deadline.spent))
        priced = best.priced
    bound = min(max(bound, priced.least_seconds), best.seconds)
    return replace(best, priced=priced, bound=bound, unfinished=deadline.over)


def _hidden(
    best: Sliced,
    priced: Priced,
    hiding: Callable[[Priced], Sliced],
    work_out: Callable[[Priced, Sequence[Key], Deadline, bool], Priced],
    budget: float,
    deadline: Deadline,
) -> Sliced:
    """The better of these stages and the best whose transfers hide, at costs that are worked out: see `settled`."""
    found = _certain(priced, hiding)
    if found is not None and found.seconds < best.seconds:
        best = found
    while True:
        try:
            found = hiding(priced)
            if found.seconds >= (1 - NEAR) * best.seconds:
                break
            wanted = priced.unknown(found.slices.stages)
            priced = _worked_out(priced, found, work_out, deadline, False)
        except (InfeasibleError, OutOfTime):
            break
        exact = _at(found, priced)
        if max(exact.slices.bytes) <= budget and exact.seconds < best.seconds:
            best = exact
        if not wanted or deadline.over:
            break
    return replace(best, priced=priced)


def _worked_out(
    priced: Priced,
    found: Sliced,
    work_out: Callable[[Priced, Sequence[Key], Deadline, bool], Priced],
    deadline: Deadline,
    must: bool,
) -> Priced:
    """The costs with all worked out that some stages use: those of layers tell the meshes of stages, and these others.

    Raises:
      OutOfTime: of `work_out`.
    """
    while wanted := priced.unknown(found.slices.stages):
        priced = work_out(priced, wanted, deadline, must)
    return priced


def _certain(priced: Priced, choose: Callable[[Priced], Sliced]) -> Sliced | None:
    """The best stages that use no bound; None if there are none that fit."""
    try:
        found = choose(priced.certain)
    except InfeasibleError:
        return None
    return None if priced.unknown(found.slices.stages) else replace(found, priced=priced)


def _at(found: Sliced, priced: Priced) -> Sliced:
    """The same stages at other costs."""
    seconds, size = evaluate(priced.costs(found.slices.num_microbatches), found.slices)
    return replace(found, priced=priced, slices=replace(found.slices, seconds=seconds, bytes=size))
