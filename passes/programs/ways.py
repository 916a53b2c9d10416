"""One mesh: how many micro-batches, and what the backward pass computes again, by predicted seconds.

Both save activations and cost seconds: micro-batches repeat what is done for each of them (gathers of weights, the
latency of operations), and what is computed again is computed twice. They pay where memory binds, since what they leave
free lets the integer program choose faster layouts. A *way* is a number of micro-batches and a choice of what is
computed again. Let T(way) be the seconds of its best plan within the budget, and F(way) those of its best plan without
one. More micro-batches and more computed again only add, so

    T(more)  >=  F(more)  >=  F(less),      where more is no fewer micro-batches, and no less computed again,

on each mesh: where T(way) is F(way), or near, nothing more can be faster, and nothing more is tried. Else ways are
tried in columns: without computing anything again, with "selective" and "layer" rematerialisation. Columns begin with
one micro-batch, or with what may fit by its bytes, roughly, once one is known not to (`SAVES`); what is likely to be
the fastest, by its bound and what it adds (`Way.share_added`), is next. Where a number does not fit, the first of its
multiples 2, 4, 8, ... follows that may, by the bytes that are missing (`sharding.lessons`); one that fits is followed
by twice as many, as long as memory binds and there is a gain. The best seconds so far are the cutoff of each, and it is
tried as long as a bound leaves room for a gain and the time allows. Ways are compared on the first meshes alone, and a
way that is the best of them there is searched on the others at once, in a part of the time: what it finds is a low
cutoff for the ways after it, and none of them then takes long. What a misfit takes is little, too, since its bytes are
looked at before its other meshes. Where all layers computed again is the best, fewer of them are tried by bisection:
the first k of n layers (Chen et al. 2016 compute all again; k trades seconds for bytes one layer at a time).

The search may begin with a plan that is known, such as that of a textbook method: whatever the time, what it returns is
no slower. Such a plan may be ten times slower than what a search of half a second finds, so that it does not end the
search: where it is slow by its bound, and where ways are analysed already (for textbook methods), one or two are tried
whatever the time.

A search can go on with more time where it stopped (`Chosen.rest`), since pipelines, which may be faster, are searched
in between: what was left for want of time is tried then, where its bound is below the best of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from alpa_lite.errors import InfeasibleError, MicrobatchError
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.layers.remat import NOTHING, Remat
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.programs.outcomes import AGAIN, GAIN, Chosen, Outcome, Solve, Start, T, Unfinished, Way, unknown
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.sharding.lessons import Beaten, Bounds, Lessons, doublings
from alpa_lite.report import units

ANY = 1e30
"""A cutoff that every plan is below: where none fits, nothing is then spent on saying what would."""

FAILURES = 2
"""After so many doublings in a row without a gain, no more micro-batches are tried."""

DUE = 2
"""So many ways are tried at least before a plan that is known is all there is: one, and the first that may fit. Where
pipelines are likely to be faster, it is one."""

SLOW = 2.0
"""A plan that is known is slow where it takes more than this multiple of what no plan undercuts."""

LIKELY = 0.5
"""The part of `AGAIN` that what is computed again adds to a bound, where it is asked what may be spent on trying it.

"selective" added 0.043 to 0.089 of the bound of three outside models (a GPT, a ResNet and CLIP), where `AGAIN` is 0.08.
"""

_EQUAL = 1e-9  # relative difference of seconds that is rounding

REST = 0.5
"""The part of the time that is left in which the other meshes of a way are searched, before other ways are tried. It is
less where there would be no time for another way then, which may be much faster: Llama-70B on 512 TPUs takes 10.0 s a
step in 16 micro-batches whatever the mesh, and 7.4 s where something is computed again."""

HALVINGS = 3
"""How often the number of layers that are computed again is bisected."""

SAVES: Mapping[Choice, int] = {"none": 1, "selective": 16, "layer": 64}
"""By how much the activations may be less where something is computed again, by rule of thumb."""


def best(
    solve: Solve[T],
    remats: Sequence[Choice],
    given: int | None,
    *,
    floor: float,
    budget: float,
    deadline: Deadline,
    must: bool = True,
    start: Start[T] | None = None,
    ready: Callable[[Way], bool] = lambda way: False,
    analysing: Callable[[], float] = lambda: 0.0,
    elsewhere: Callable[[float, float], bool] = lambda seconds, computing: False,
    kept: float = 0.0,
    first: bool = False,
) -> Chosen[T]:
    """The fastest way that fits.

    Args:
      remats: what may be computed again, the least first. One alone is kept in all layers.
      given: the number of micro-batches, if it is not to be chosen.
      floor: bytes per device of the training state when all of it is sharded; budget: bytes per device.
      deadline: after which nothing more is tried, once something has been.
      must: whether to go on without time until something fits. Else what follows the first misfit is tried whatever the
        time: it takes less than a search for pipelines, and mostly finds what is faster than any (`elsewhere`).
      start: a plan that is known.
      ready: whether a way is analysed already, so that trying it takes little.
      analysing: seconds that analysing another way takes at least.
      elsewhere: whether something faster than all ways is likely to be found elsewhere, where none takes less than so
        many seconds, and the best computes for so many (0 if none is known).
      kept: seconds before the end that are for what is elsewhere, unless that is not likely to be faster.
      first: whether, where it is likely, all of the time is for that once a way fits.

    Raises:
      InfeasibleError: no way fits. MicrobatchError: the step cannot be cut into the given number.
      Unfinished: without `must`, nothing that fits was found in the time.
    """
    search = _Search(solve, given, floor, budget, [Remat(remat) for remat in remats])
    search.best = search.start = start
    search.ready, search.analysing, search.elsewhere, search.one_is_enough = ready, analysing, elsewhere, first
    return search.until(deadline, must=must, kept=kept)


@dataclass(frozen=True)
class Begun(Generic[T]):
    """The first way of a method, and what is left.

    Attributes:
      found: the way and its plan, if it fits.
      free: seconds that no plan of a further way undercuts; `inf` if there is no further way.
      rest: the best of all ways, where the further ones are tried that may undercut some seconds, by the bounds of the
        method and those that are given of programs with more choices; None if none fits.
    """

    found: Start[T] | None
    free: float
    rest: Callable[[float, Callable[[Way], Bounds]], Start[T] | None]


def begun(solve: Solve[T], given: int | None, *, floor: float, budget: float) -> Begun[T]:
    """The search of `best` where nothing is computed again, and few choices are open: its first way, and the rest.

    Nothing but `solve` keeps to a time.

    Raises:
      MicrobatchError: the step cannot be cut into the given number.
    """
    search = _Search(solve, given, floor, budget, [NOTHING])
    more = search.step(Way(given or 1))
    search.left = {} if more is None else {NOTHING: (more, 0)}
    free = math.inf if more is None else min(search.known(Way(more)).values(), default=0.0)

    def rest(below: float, others: Callable[[Way], Bounds]) -> Start[T] | None:
        search.below, search.others = below, others
        search.columns()
        return search.best

    return Begun(search.best, free, rest)


def _is_less(one: Way, other: Way) -> bool:
    """Whether a way has no more micro-batches than another, and computes nothing again that the other does not."""
    return one.count <= other.count and _is_within(one.remat, other.remat)


def _is_within(less: Remat, more: Remat) -> bool:
    """Whether one computes again whatever another does."""
    return less in (NOTHING, more) or (less.choice == "selective" and more == Remat("layer"))


class _Search(Generic[T]):
    """What has been tried, and what is left."""

    def __init__(
        self, solve: Solve[T], given: int | None, floor: float, budget: float, remats: Sequence[Remat]
    ) -> None:
        self.solve, self.given, self.floor, self.budget, self.remats = solve, given, floor, budget, remats
        self.deadline, self.must, self.below = Deadline(), True, math.inf
        self.end, self.kept = self.deadline, 0.0  # of the time, with seconds that are kept for what is elsewhere
        self.begun: Deadline | None = None  # since when a plan is known, so that more is to be repaid
        self.best: tuple[Way, Outcome[T]] | None = None
        self.start: Start[T] | None = None
        self.first: tuple[Way, Outcome[T]] | None = None
        self.ready: Callable[[Way], bool] = lambda way: False
        self.analysing: Callable[[], float] = lambda: 0.0
        self.elsewhere: Callable[[float, float], bool] = lambda seconds, computing: False
        self.one_is_enough = False  # where something faster is likely elsewhere
        self.slowest = {True: 0.0, False: 0.0}  # seconds that trying a way took, by whether it was ready
        self.misfits: list[Way] = []
        self.least: dict[Way, float] = {}  # bytes per device that no plan of a misfit has less of, 0 if not known
        self.refused: MicrobatchError | None = None
        self.skipped: list[Way] = []
        self.little: list[Way] = []
        self.bounds: dict[Way, Bounds] = {}
        self.others: Callable[[Way], Bounds] = unknown
        self.narrow: list[Way] = []  # misfits on the first meshes, which others may fit
        # of each column: how many micro-batches are next, and the failures before
        self.left: dict[Remat, tuple[int, int]] = dict.fromkeys(remats, (given or 1, 0))

    def until(
        self, deadline: Deadline, below: float = math.inf, *, must: bool = False, kept: float = 0.0
    ) -> Chosen[T]:  # fmt: skip
        """The best way. As `best`, and as `Rest`."""
        self.end, self.kept, self.below, self.must = deadline.search(self.begun), kept, below, must
        self.deadline = self.end.within(self.end.left - kept)
        if self.best is not None:
            self.begun = self.begun or self.deadline
        self.skipped = []
        self.columns()
        self.wider()
        if self.best is None and math.isfinite(below):
            raise Unfinished(self.until)
        if self.best is None:
            self.explain()
        if self.best is not None and self.best[1].free < below:
            self.rest(self.deadline)
        if len(self.remats) > 1:
            self.fewer_layers()
        assert self.best is not None
        _, found = self.best
        late, little = tuple(dict.fromkeys(self.skipped)), tuple(dict.fromkeys(self.little))
        rest = self.go_on if late or found.rest else None
        return Chosen(found.value, found.seconds, self.notes(), late, little, rest, self.known)

    def go_on(self, deadline: Deadline, below: float = math.inf, *, must: bool = False) -> Chosen[T]:
        """As `Rest`."""
        if self.best is None:
            return self.until(deadline, below, must=must)
        _, found = self.best
        least = math.inf if found.rest is None else found.free
        for late in self.skipped:
            least = min(least, min(self.known(late).values(), default=0.0))
        gain = min(below, found.seconds) - least
        deadline = deadline.search(self.begun)
        deadline = deadline.repaying(deadline.patience(max(gain, 0.0)))
        if found.free < below:
            self.rest(self.part(deadline, max(map(self.longest, self.skipped), default=0.0)))
        return self.until(deadline, below, must=must)

    def part(self, deadline: Deadline, another: float) -> Deadline:
        """`REST` of the time, where that leaves the seconds that trying another way takes; else what these leave."""
        left = deadline.left
        return deadline.within(min(REST * left, max(left - another, 0.0)))

    def cutoff(self, way: Way) -> float:
        """Seconds below which a way is taken."""
        if self.best is None:
            return ANY
        best, found = self.best
        if way == best:
            return found.seconds * (1 + _EQUAL)
        return found.seconds if _is_less(way, best) else found.seconds * (1 - GAIN)

    def is_beaten(self, way: Way) -> bool:
        """Whether no plan of a way can be taken."""
        return min(self.known(way).values(), default=0.0) >= min(self.cutoff(way), self.below)

    def is_open(self, way: Way) -> bool:
        """Whether a way may be taken, and trying it is in time and can be repaid; notes it where it is not."""
        if self.is_beaten(way):
            return False
        if self.best is None:
            return True
        if self.deadline.patience(self.gain(way)) < self.longest(way) and not self.is_due(way):
            late = self.is_late(way) and not self.deadline.little
            (self.skipped if late else self.little).append(way)
            return False
        return True

    def gain(self, way: Way) -> float:
        """Seconds a step that a way may save, by its bound and by what computing again is likely to add to it."""
        least = min(self.known(way).values(), default=0.0)
        if way not in self.bounds:
            first, total = way.remat.first or (1, 1)
            least *= 1 + LIKELY * AGAIN[way.remat.choice] * first / total
        return max(min(self.cutoff(way), self.below) - least, 0.0)

    def longest(self, way: Way) -> float:
        """Seconds that trying a way may take: as long as others took, with what analysing it takes."""
        if self.ready(way):
            return self.slowest[True]
        return max(self.slowest[False], self.slowest[True] + self.analysing())

    def is_late(self, way: Way) -> bool:
        """Whether trying a way may take longer than what is left."""
        return self.longest(way) > self.deadline.left

    def is_due(self, way: Way) -> bool:
        """Whether a way is tried whatever the time: nothing is found, and the known plan is slow or the way ready."""
        if self.start is None or self.best is not self.start or self.are_enough(way):
            return False
        return self.ready(way) or self.start[1].seconds > SLOW * min(self.known(way).values(), default=math.inf)

    def are_enough(self, way: Way) -> bool:
        """Whether so many ways did not fit that no more is tried without time."""
        few = 1 if self.elsewhere(min(self.known(way).values(), default=0.0), 0.0) else DUE
        return len(self.misfits) >= few

    def known(self, way: Way) -> Bounds:
        """Bounds of the meshes of a way, by those of ways that are no more, and of `others` that are given."""
        out: dict[LogicalMesh, float] = {}
        for other, bounds in self.bounds.items():
            if other.count <= way.count and _is_within(other.remat, way.remat):
                out |= {mesh: max(bound, out.get(mesh, 0.0)) for mesh, bound in bounds.items()}
        others = self.others(way)
        return {mesh: max(bound, others.get(mesh, 0.0)) for mesh, bound in out.items()}

    def attempt(self, way: Way, *, quick: bool = False) -> Outcome[T] | Beaten:
        """What comes of a way; it is kept if it is the best."""
        before, cutoff, ready = self.deadline.spent, self.cutoff(way), self.ready(way)
        first = None if self.best is None or self.best is self.start else self.best[1].mesh
        found: Outcome[T] | Beaten
        try:
            found = self.solve(way, min(cutoff, self.below), Lessons(self.known(way), first, quick), self.deadline)
        except Beaten as beaten:
            found = beaten
        self.slowest[ready] = max(self.slowest[ready], self.deadline.spent - before)
        self.bounds[way] = found.bounds
        if isinstance(found, Outcome) and found.seconds < cutoff:
            if self.begun is None:
                self.begun = self.deadline = self.deadline.search()
            if self.kept and not self.elsewhere(found.seconds, found.computing):
                self.deadline, self.kept = self.end.search(self.begun), 0.0
            elif self.kept and self.one_is_enough:
                self.deadline = self.deadline.within(0.0)
            found = self.on_all(found, self.part(self.deadline, self.slowest[False]))
            self.first = self.first or (way, found)
            self.best, self.bounds[way] = (way, found), found.bounds
        return found

    def on_all(self, found: Outcome[T], deadline: Deadline) -> Outcome[T]:
        """The best plan of a way, the meshes that were not searched yet among them, or why they are not."""
        late = deadline.over and not deadline.little
        return found if found.rest is None or late else found.rest(deadline)

    def columns(self) -> None:
        """One column for each of what may be computed again; what is likely to be the fastest is next.

        Raises:
          Unfinished: without `must`, nothing that fits was found in the time.
        """
        waiting, self.left = self.left, {}
        while waiting:
            way = min(
                (Way(waiting[remat][0], remat) for remat in self.remats if remat in waiting),
                key=lambda way: min(self.known(way).values(), default=0.0) * (1 + way.share_added),
            )
            remat, (count, failures) = way.remat, waiting[way.remat]
            if self.is_open(way) or (self.best is None and not self.bounds):
                try:
                    more = self.step(way)
                except OutOfTime:
                    self.left = waiting
                    raise Unfinished(self.until) from None
                failures = failures + 1 if self.fails(way) else 0
                if more is not None and remat == NOTHING and way in self.misfits:
                    for other, (fewer, failed) in waiting.items():
                        waiting[other] = max(fewer, more // SAVES[other.choice]), failed
                if more is not None and failures < FAILURES:
                    waiting[remat] = more, failures
                    continue
            elif way in self.skipped:
                self.left[remat] = count, failures
            del waiting[remat]

    def fails(self, way: Way) -> bool:
        """Whether a way that was tried was no gain. With less than in a plan that is known, nothing need fit."""
        if self.best is None or self.best[0] == way:
            return False
        return self.best is not self.start or not _is_less(way, self.best[0])

    def step(self, way: Way) -> int | None:
        """Tries a way: how many micro-batches of its column are next; None if no more may be a gain."""
        may_fit = self.floor < self.budget and not self.given
        late = self.best is None and not self.must and self.is_late(way)
        if late and self.are_enough(way):  # the first that may fit, by its bytes, mostly does
            raise OutOfTime
        try:
            found = self.attempt(way, quick=may_fit)
        except MicrobatchError as refusal:
            if self.best is None and (self.given or not self.bounds):
                raise
            self.refused = self.refused or refusal
            return None
        if isinstance(found, Outcome):
            return 2 * way.count if found.is_bound and not self.given else None
        if self.best is None or found.least > 0:
            self.misfits.append(way)
            self.least[way] = found.least
        self.narrow += [way] * found.wider
        return doublings(way.count, found.least, self.floor, self.budget) if may_fit else None

    def wider(self) -> None:
        """What did not fit the first meshes, tried on all."""
        ways, self.narrow = self.narrow, []
        for way in reversed(ways):
            if self.is_open(way):
                self.attempt(way)
            elif way in self.skipped:
                self.narrow.insert(0, way)

    def rest(self, deadline: Deadline) -> None:
        """The meshes on which the best way was not tried yet."""
        assert self.best is not None
        way, found = self.best
        if self.best is not self.start or way not in self.bounds:
            other = self.on_all(found, deadline)
            if other.seconds <= found.seconds:
                self.best, self.bounds[way] = (way, other), other.bounds
                self.first = self.best if self.first is not None and self.first[0] == way else self.first

    def explain(self) -> None:
        """Raises why nothing fits; what is found only now, by looking at memory alone, is taken."""
        if not self.misfits:
            raise InfeasibleError("nothing else may be computed again")
        first, last = self.misfits[0], max(way.count for way in self.misfits)
        smallest = min(self.misfits, key=lambda way: self.least.get(way) or math.inf)
        refusals: list[tuple[float, Way, InfeasibleError]] = []
        for way in dict.fromkeys((smallest, first)):
            try:
                self.best = self.first = way, self.solve(way, math.inf, Lessons(), self.deadline)
                return
            except InfeasibleError as error:
                refusals.append((error.smallest_budget or math.inf, way, error))
        _, way, error = min(refusals, key=lambda refusal: refusal[0])
        why = f" Micro-batches do not help: {self.refused}" if last == first.count and self.refused else ""
        if way != first:
            why = f" This is with {way}."
        elif last > way.count:
            why = f" Micro-batches do not help: the step does not fit with {last} of them."
        if not why or (self.given and way == first):
            raise error
        raise InfeasibleError(f"{error}{why}", error.smallest_budget) from error

    def fewer_layers(self) -> None:
        """Fewer layers computed again, by bisection, where all of them are the best."""
        assert self.best is not None
        way, found = self.best
        if way.remat.choice == "none" or found.layers < 2:
            return
        low, high, total = 0, found.layers, found.layers
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            fewer = Way(way.count, Remat(way.remat.choice, (middle, total)))
            if middle in (low, high):
                return
            if fewer not in self.bounds:
                if not self.is_open(fewer):
                    return
                self.attempt(fewer)
            low, high = (low, middle) if self.best[0] == fewer else (middle, high)

    def notes(self) -> tuple[str, ...]:
        """Why this way."""
        assert self.best is not None
        way, found = self.best
        memory = f"memory_per_device={units.exact_bytes(self.budget)}"
        out = []
        if self.first is not None and way != self.first[0]:
            seconds = self.first[1].seconds
            out.append(f"{way}: {self.first[0]} would take {seconds:.4g} s within {memory}, this {found.seconds:.4g} s")
        elif self.misfits:
            less = "with fewer, the step" if way.remat == NOTHING else str(self.misfits[0])
            out.append(f"{way}: {less} does not fit into {memory}")
        return tuple(out)
