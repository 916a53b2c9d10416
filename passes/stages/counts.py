"""Compares numbers of micro-batches: those that look best by scaled costs at costs of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from alpa_lite.errors import InfeasibleError
from alpa_lite.passes.layers.division import Divisible
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.stages.choosing import CERTAIN, Sliced
from alpa_lite.passes.stages.pricing import Priced
from alpa_lite.passes.stages.refusals import microbatches

PRICED = 3
"""How many numbers of micro-batches are compared at their own costs, at most."""


@dataclass(frozen=True, eq=False)
class Layered:
    """What stages are chosen from.

    Attributes:
      counts: numbers of micro-batches, rising. kinds: numbers of devices of submeshes.
      cut: the step in layers with a number of micro-batches.
      price: the costs of layers with a number of micro-batches on some kinds of submeshes.
    """

    counts: Sequence[int]
    kinds: tuple[int, ...]
    cut: Callable[[int], Divisible]
    price: Callable[[int, tuple[int, ...]], Priced]


class Slower(Exception):
    """No pipeline takes less than what is at hand, by the costs of layers.

    Attributes:
      seconds: what the best takes at least.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no pipeline takes less than {seconds:.4g} s")
        self.seconds = seconds


def best(
    layers: Layered,
    choose: Callable[[Priced, Sequence[int], float, bool], Sliced],
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
      layers: the numbers, and the costs of layers at each.
      choose: the best stages at some costs and with one of some numbers; of those that take a number of seconds or
        more, any. Raises InfeasibleError if none fits, and OutOfTime if none was found in the time, unless there must
        be some, which is what the last argument says.
      deadline: until when numbers are priced.
      below: seconds; only stages that take less are of interest.
      roughly: as `choose`, where the number is all that is asked for, if there is time to price it. The last argument
        says how many seconds bounding its costs takes.

    Raises:
      InfeasibleError: none of the numbers fits.
      OutOfTime: of `choose`.
      Slower: none takes less than `below`.
    """
    left = list(layers.counts)
    reference = _reference(left)
    before = deadline.spent
    scaled = layers.price(reference, layers.kinds)
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
            exact = rough if count == reference else _exactly(rough, layers, choose, below)
        except OutOfTime:
            if found is not None:
                compared = False
                break
            late = _late(rough, layers, choose, below)
            if late is not None:
                return late
            exact = _exactly(rough, layers, choose, below, must=True)
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
    layers: Layered,
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
    for sizes in (tuple(sorted(set(rough.slices.devices))), layers.kinds):
        try:
            return choose(layers.price(count, sizes), [count], below, must)
        except InfeasibleError:  # what was scaled fitted by little
            continue
    return None


def _late(
    rough: Sliced, layers: Layered, choose: Callable[[Priced, Sequence[int], float, bool], Sliced], below: float
) -> Sliced | None:  # fmt: skip
    """The best stages by scaled costs, where the time is over before those at their number are worked out.

    Where few schedules were compared, what `choose` has time for is. None if costs cannot be scaled: there are other
    layers with that number of micro-batches.
    """
    if rough.rough:
        try:
            other = choose(rough.priced, layers.counts, below, True)
            rough = other if other.seconds < rough.seconds else rough
        except (InfeasibleError, OutOfTime):
            pass
    step = layers.cut(rough.slices.num_microbatches)
    if len(step.layering.layers) != len(rough.priced.layers):
        return None
    priced = rough.priced.rescaled(step)
    return replace(rough, priced=priced, bound=min(rough.bound, priced.least_seconds), unfinished=True)
