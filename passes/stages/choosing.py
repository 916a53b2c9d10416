"""Chooses the stages: the stage DP on the costs of layers, with what the method gives taken as given.

Of several numbers of micro-batches, those that look best by scaled costs are compared at costs of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from alpa_lite import schedules
from alpa_lite.errors import InfeasibleError, OptionError
from alpa_lite.options import Pipeline
from alpa_lite.passes.layers.division import Divisible
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.stages import slicing
from alpa_lite.passes.stages.formulas import evaluate
from alpa_lite.passes.stages.pricing import REMAT, VARIANTS, Key, Priced
from alpa_lite.passes.stages.refusals import microbatches
from alpa_lite.passes.stages.slices import SliceOptions, StageSlices, StageSlicing, Weighed

GAP = 5e-3
"""How near the optimum of its model the DP stops."""

ROUGH_GAP = 3e-2
"""The same, where it only says which costs of layers to work out."""

ROUGH_SHARE = 0.7
"""The part of the time that this may take, once some stages are worked out: the rest finds better ones among all."""

ROUGHLY = ("1f1b",)
"""The schedules that are searched for that: it keeps the fewest micro-batches in flight."""

HIDING = ("eager-1f1b",)
"""What is searched last where the time is over before all schedules are: transfers hide behind it, for more memory."""

OVERTIME = 0.2
"""For what share of the time that is over costs are worked out for that."""

NEAR = 1e-2
"""By what share stages must be faster by their bounds for these to be worked out."""

PRICED = 3
"""How many numbers of micro-batches are compared at their own costs, at most."""

CERTAIN = 0.02
"""By what share an estimate of bytes or seconds may be exceeded without anything following from it."""


@dataclass(frozen=True, eq=False)
class Sliced:
    """Chosen stages, and what else there was.

    Attributes:
      priced: the step in layers, and their costs.
      slices: the stages.
      weighed: what the DP compared.
      bound: no pipeline of the DP's model is faster, in seconds; what computing alone takes, where the search was not
        finished.
      idle_devices: if devices are left over, how many and why.
      unfinished: whether the time was over before the search.
      rough: whether equal submeshes and few schedules were all that was searched.
    """

    priced: Priced
    slices: StageSlices
    weighed: tuple[Weighed, ...]
    bound: float
    idle_devices: str = ""
    unfinished: bool = False
    rough: bool = False

    @property
    def seconds(self) -> float:
        """Of a step, in the DP's model."""
        return self.slices.seconds


class Slower(Exception):
    """No pipeline takes less than what is at hand, by the costs of layers.

    Attributes:
      seconds: what the best takes at least.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no pipeline takes less than {seconds:.4g} s")
        self.seconds = seconds


def best(
    counts: Sequence[int],
    kinds: tuple[int, ...],
    price: Callable[[int, tuple[int, ...]], Priced],
    choose: Callable[[Priced, Sequence[int], float, bool], Sliced],
    cut: Callable[[int], Divisible],
    deadline: Deadline,
    below: float = math.inf,
    roughly: Callable[[Priced, Sequence[int], float, float], Sliced] | None = None,
) -> Sliced:
    """The best stages, numbers of micro-batches compared at costs of their own.

    Layers are priced at one number, and scaled to the others. The best number by scaled costs is priced itself, if
    there is time, else its stages at scaled costs are the answer; if that is worse than was estimated, another may be
    better, and is priced too, `PRICED` at most. The first number is found roughly (`roughly`): one number is searched
    some twenty times as fast as all of them, and its best stages are a low limit for these.

    Args:
      counts: the numbers, rising.
      kinds: the numbers of devices of submeshes.
      price: the costs of layers at a number of micro-batches on some kinds of submeshes.
      choose: the best stages at some costs and with one of some numbers; of those that take a number of seconds or
        more, any. Raises InfeasibleError if none fits, and OutOfTime if none was found in the time, unless there must
        be some, which is what the last argument says.
      cut: the step in layers with a number of micro-batches.
      deadline: until when numbers are priced.
      below: seconds; only stages that take less are of interest.
      roughly: as `choose`, where the number is all that is asked for, if there is time to price it, which takes as many
        seconds as are given last.

    Raises:
      InfeasibleError: none of the numbers fits.
      OutOfTime: of `choose`.
      Slower: none takes less than `below`.
    """
    left = list(counts)
    reference = _reference(left)
    before = deadline.spent
    scaled = price(reference, kinds)
    took = deadline.spent - before
    found: Sliced | None = None
    tried, compared = 0, True
    while left and tried < PRICED and (found is None or not deadline.over):
        try:
            if found is None and roughly is not None:
                rough = roughly(scaled, left, below, took)
            else:
                limit = below if found is None else (1 - CERTAIN) * found.seconds
                rough = choose(scaled, left, limit, found is None)
        except (InfeasibleError, OutOfTime) as error:
            if found is None:
                raise
            compared = compared or isinstance(error, InfeasibleError)
            break
        compared = not rough.rough
        if found is None and rough.seconds >= below:
            raise Slower(rough.seconds)
        if found is not None:
            found = _beside(found, rough)
            if rough.seconds >= (1 - CERTAIN) * found.seconds:
                break
        count, scaled = rough.slices.num_microbatches, rough.priced
        left.remove(count)
        try:
            if took > deadline.left and count != reference and not rough.rough:
                raise OutOfTime
            exact = rough if count == reference else _exactly(rough, kinds, price, choose, below)
        except OutOfTime:
            if found is not None:
                compared = False
                break
            step = cut(count)
            if len(step.layering.layers) == len(scaled.layers):
                return _as_scaled(rough, step)
            exact = _exactly(rough, kinds, price, choose, below, must=True)
        if exact is None:
            continue
        tried += 1
        if found is None or exact.seconds < found.seconds:
            found = exact if found is None and exact is rough else _beside(exact, found or rough)
        if compared and exact.seconds <= (1 + CERTAIN) * rough.seconds:
            break
    if found is None:
        raise InfeasibleError(f"no pipeline with {microbatches(reference)} or another number fits")
    if found.seconds >= below:
        raise Slower(found.seconds)
    return found if compared else replace(found, bound=min(found.bound, found.priced.least_seconds), unfinished=True)


def _beside(found: Sliced, other: Sliced) -> Sliced:
    """The same, with what another search weighed of other numbers of micro-batches."""
    numbers = {row.num_microbatches for row in other.weighed} - {found.slices.num_microbatches}
    own = [row for row in found.weighed if row.num_microbatches not in numbers]
    return replace(found, weighed=(*own, *(row for row in other.weighed if row.num_microbatches in numbers)))


def _reference(counts: Sequence[int]) -> int:
    """The number at which layers are priced first: one in the middle.

    Where a batch is cut into more than the powers of two that divide it (`numbers.of_pipelines`), the least of these
    finer numbers: its micro-batches are the largest that are a power of two, so that devices can share them. 100
    micro-batches of 16 tell more of 200 of 8 than 32 of 50 would, of which 8 devices cannot have an equal part.
    """
    finer = [count for count in counts if count & (count - 1)]
    return finer[0] if finer else counts[len(counts) // 2]


def _exactly(
    rough: Sliced,
    kinds: tuple[int, ...],
    price: Callable[[int, tuple[int, ...]], Priced],
    choose: Callable[[Priced, Sequence[int], float, bool], Sliced],
    below: float,
    *,
    must: bool = False,
) -> Sliced | None:
    """Stages with as many micro-batches at their own costs: on the same sizes of submeshes, else on all; or None.

    Raises:
      OutOfTime: of `choose`.
    """
    count = rough.slices.num_microbatches
    for sizes in (tuple(sorted(set(rough.slices.devices))), kinds):
        try:
            return choose(price(count, sizes), [count], below, must)
        except InfeasibleError:  # what was scaled fitted by little
            continue
    return None


def _as_scaled(rough: Sliced, step: Divisible) -> Sliced:
    """Stages that were chosen by scaled costs, where the time is over before those at their number are worked out."""
    priced = rough.priced.rescaled(step)
    return replace(rough, priced=priced, bound=min(rough.bound, priced.least_seconds), unfinished=True)


def settled(
    priced: Priced,
    choose: Callable[[Priced, bool], Sliced],
    work_out: Callable[[Priced, Sequence[Key], Deadline | None], Priced],
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
      work_out: the costs with some worked out, until a deadline if one is given; then raises OutOfTime.
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
                priced = _worked_out(priced, found, work_out, None if must and best is None else deadline)
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
    work_out: Callable[[Priced, Sequence[Key], Deadline | None], Priced],
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
            priced = _worked_out(priced, found, work_out, deadline)
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
    work_out: Callable[[Priced, Sequence[Key], Deadline | None], Priced],
    deadline: Deadline | None,
) -> Priced:
    """The costs with all worked out that some stages use: those of layers tell the meshes of stages, and these others.

    Raises:
      OutOfTime: of `work_out`.
    """
    while wanted := priced.unknown(found.slices.stages):
        priced = work_out(priced, wanted, deadline)
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


def choose(
    priced: Priced, method: Pipeline, counts: Sequence[int], budget: float,
    *, rough: bool = False, names: tuple[str, ...] = schedules.NAMES, deadline: Deadline | None = None,
) -> Sliced:  # fmt: skip
    """What the stage DP chooses.

    Args:
      priced: the costs of layers.
      method: what is given.
      counts: the numbers of micro-batches to choose from.
      budget: bytes per device.
      rough: whether to look at equal submeshes alone, and to stop farther from the optimum.
      names: the schedules that are compared, where the method gives none.
      deadline: after which the best stages so far are the answer, if there are any; None for no limit.

    Raises:
      InfeasibleError: no pipeline fits; names what binds.
      OptionError: the method asks for a rematerialisation that there is not.
    """
    shapes = method.mesh_shapes
    if method.lengths:  # whose gradients of parameters are not computed apart
        names = tuple(name for name in names if name != "zb-h1")
    options = SliceOptions(
        budget=budget,
        schedules=names if method.schedule == "auto" else (method.schedule,),
        num_stages=method.num_stages,
        kinds=None if shapes is None else tuple(priced.devices.index(math.prod(shape)) for shape in shapes),
        gap=ROUGH_GAP if rough else GAP,
        equal=rough,
    )
    variants = priced.useful(range(len(VARIANTS)) if method.remat == "auto" else _variants(method.remat))
    costs = [priced.costs(count, variants) for count in counts]
    found = slicing.slice_stages(costs, options, deadline)
    best = found.best
    if best is None and method.schedule == "zb-h1":  # the DP has its times for as many micro-batches as stages
        found = slicing.slice_stages(costs, replace(options, schedules=("1f1b",)), deadline)
        best = found.best and replace(found.best, schedule="zb-h1")
    if best is None:
        assert found.infeasible is not None
        numbers = " or ".join(map(microbatches, counts))
        why = found.infeasible
        raise InfeasibleError(f"no pipeline with {numbers}: {why.message}", why.smallest_budget)
    best = replace(best, stages=tuple(replace(stage, variant=variants[stage.variant]) for stage in best.stages))
    return Sliced(priced, best, found.weighed, found.bound, _idle_devices(priced, method, found, best))


def _idle_devices(priced: Priced, method: Pipeline, found: StageSlicing, best: StageSlices) -> str:
    """If the best pipeline does not use all devices, how many it uses and why."""
    used, total = best.devices_used, priced.cluster.num_devices
    if used == total:
        return ""
    said = f"{used} of {total} devices are used: "
    if method.mesh_shapes is not None:
        return f"{said}submesh_shapes names no more"
    if found.all_devices is not None:
        return f"{said}every pipeline on all of them is predicted to be slower"
    stages = "" if method.num_stages is None else f"{method.num_stages} "
    if found.infeasible is not None and found.infeasible.constraint == "devices":
        sizes = ", ".join(map(str, priced.devices))
        return f"{said}{stages}submeshes of the searched sizes ({sizes} devices) cannot use all devices"
    return f"{said}no pipeline was found on all of them"


def _variants(remat: str) -> tuple[int, ...]:
    """The variants that compute this again.

    Raises:
      OptionError: there is none.
    """
    if remat not in REMAT:
        raise OptionError(f'Pipeline remat={remat!r} cannot be planned; use "auto" or one of {", ".join(REMAT)}')
    return tuple(v for v, (_, again) in enumerate(VARIANTS) if again == remat)
