"""One mesh: how many micro-batches, and what the backward pass computes again, by predicted seconds.

Both save activations and cost seconds: micro-batches repeat what is done for each of them (gathers of weights, the
latency of operations), and what is computed again is computed twice. They pay where memory binds, since what they leave
free lets the integer program choose faster layouts. A *way* is a number of micro-batches and a choice of what is
computed again. Let T(way) be the seconds of its best plan within the budget, and F(way) those of its best plan without
one. More micro-batches and more computed again only add, so

    T(more)  >=  F(more)  >=  F(less),      where more is no fewer micro-batches, and no less computed again,

on each mesh: where T(way) is F(way), or near, nothing more can be faster, and nothing more is tried. Else ways are
tried in columns: without computing anything again, with "selective" and "layer" rematerialisation. A column begins with
one micro-batch. Where a number does not fit, the first of its multiples 2, 4, 8, ... follows that may, by the bytes
that are missing (`sharding.lessons`); one that fits is followed by twice as many, as long as memory binds and there is
a gain. The best seconds so far are the cutoff of each, and it is tried as long as a bound leaves room for a gain and
the time allows. Where time is short, ways are compared on the first mesh alone, and the other meshes are searched for
the best way. Where all layers computed again is the best, fewer of them are tried by bisection: the first k of n layers
(Chen et al. 2016 compute all again; k trades seconds for bytes one layer at a time).

The search may begin with a plan that is known, such as that of a textbook method: whatever the time, what it returns is
no slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from alpa_lite.errors import InfeasibleError, MicrobatchError
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.layers.remat import NOTHING, Remat
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.sharding.lessons import NOTHING_KNOWN, Beaten, Bounds, Lessons, doublings
from alpa_lite.report import units

T = TypeVar("T")

ANY = 1e30
"""A cutoff that every plan is below: where none fits, nothing is then spent on saying what would."""

GAIN = 0.02
"""By what share a way must be faster than one with fewer micro-batches, or less computed again, to be taken."""

FAILURES = 2
"""After so many doublings in a row without a gain, no more micro-batches are tried."""

_EQUAL = 1e-9  # relative difference of seconds that is rounding

HALVINGS = 3
"""How often the number of layers that are computed again is bisected."""


@dataclass(frozen=True)
class Way:
    """How one mesh runs a step: so many micro-batches, and what the backward pass computes again."""

    count: int = 1
    remat: Remat = NOTHING

    def __str__(self) -> str:
        parts = f"{self.count} micro-batch{'es' * (self.count > 1)}"
        return parts if self.remat == NOTHING else f"{parts}, rematerialisation {str(self.remat)!r}"


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The best plan of a way.

    Attributes:
      value: the plan.
      seconds: predicted, of a step.
      free: seconds that no plan of the way undercuts, whatever the budget.
      layers: the number of layers that could be computed again; 0 if that is not known.
      mesh: of the plan; None if that is not known.
      bounds: as `free`, of each mesh.
      rest: the best plan of the meshes that were not searched, too; None if all were.
    """

    value: T
    seconds: float
    free: float
    layers: int = 0
    mesh: LogicalMesh | None = None
    bounds: Bounds = field(default_factory=lambda: NOTHING_KNOWN)
    rest: Callable[[], Outcome[T]] | None = None

    @property
    def is_bound(self) -> bool:
        """Whether more memory would make it faster, by more than a gain that is looked for."""
        return self.seconds * (1 - GAIN) > self.free


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """The best way.

    Attributes:
      value: its plan.
      notes: for the plan: why this way.
      late: ways that the time did not allow to try.
    """

    value: T
    notes: tuple[str, ...]
    late: tuple[Way, ...]


Start = tuple[Way, Outcome[T]]
"""A way, and its best plan that is known."""

Solve = Callable[[Way, float, Lessons], Outcome[T]]
"""The best plan of a way below a cutoff of seconds; `inf` for none. What other ways have shown is given.

Raises MicrobatchError if the step cannot be cut so; Beaten if no plan is below a finite cutoff; without one
InfeasibleError, which says what would fit and takes longer.
"""


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
) -> Chosen[T]:
    """The fastest way that fits.

    Args:
      remats: what may be computed again, the least first. One alone is kept in all layers.
      given: the number of micro-batches, if it is not to be chosen.
      floor: bytes per device of the training state when all of it is sharded; budget: bytes per device.
      deadline: after which nothing more is tried, once something has been.
      must: whether to go on without time until something fits. Else what follows the first misfit is tried where any
        time is left: this mesh is mostly faster than any pipeline where links are.
      start: a plan that is known.

    Raises:
      InfeasibleError: no way fits. MicrobatchError: the step cannot be cut into the given number.
      OutOfTime: without `must`, nothing that fits was found in the time.
    """
    search = _Search(solve, given, floor, budget, deadline, must)
    search.best = search.start = start
    search.columns([Remat(remat) for remat in remats])
    search.wider()
    if search.best is None:
        search.explain()
    search.rest()
    if len(remats) > 1:
        search.fewer_layers()
    assert search.best is not None
    return Chosen(search.best[1].value, search.notes(), tuple(dict.fromkeys(search.skipped)))


def quickest(
    solve: Solve[T], given: int | None, *, floor: float, budget: float, below: float
) -> Start[T] | None:  # fmt: skip
    """The way that `best` finds where nothing is computed again, all of the time is there, and few choices are open.

    Args:
      below: seconds; ways that cannot undercut them are not tried. None is returned where all others do not fit.

    Raises:
      MicrobatchError: the step cannot be cut into the given number.
    """
    search = _Search(solve, given, floor, budget, Deadline(), True)
    search.below = below
    search.columns([NOTHING])
    return search.best


def _is_less(one: Way, other: Way) -> bool:
    """Whether a way has no more micro-batches than another, and computes nothing again that the other does not."""
    return one.count <= other.count and _is_within(one.remat, other.remat)


def _is_within(less: Remat, more: Remat) -> bool:
    """Whether one computes again whatever another does."""
    return less in (NOTHING, more) or (less.choice == "selective" and more == Remat("layer"))


class _Search(Generic[T]):
    """What has been tried."""

    def __init__(
        self, solve: Solve[T], given: int | None, floor: float, budget: float, deadline: Deadline, must: bool
    ) -> None:
        self.solve, self.given, self.floor, self.budget, self.deadline = solve, given, floor, budget, deadline
        self.must, self.below = must, math.inf
        self.best: tuple[Way, Outcome[T]] | None = None
        self.start: Start[T] | None = None
        self.first: tuple[Way, Outcome[T]] | None = None
        self.slowest = 0.0  # seconds that trying a way took
        self.misfits: list[Way] = []
        self.refused: MicrobatchError | None = None
        self.skipped: list[Way] = []
        self.bounds: dict[Way, Bounds] = {}
        self.narrow: list[Way] = []  # misfits on the first meshes, which others may fit

    def cutoff(self, way: Way) -> float:
        """Seconds below which a way is taken."""
        if self.best is None:
            return ANY
        best, found = self.best
        if way == best:
            return found.seconds * (1 + _EQUAL)
        return found.seconds if _is_less(way, best) else found.seconds * (1 - GAIN)

    def is_open(self, way: Way) -> bool:
        """Whether a way may be taken, and the time allows to try it; notes it where the time alone does not."""
        if min(self.known(way).values(), default=0.0) >= min(self.cutoff(way), self.below):
            return False
        if self.best is not None and self.slowest > self.deadline.left:
            self.skipped.append(way)
            return False
        return True

    def known(self, way: Way) -> Bounds:
        """Bounds of the meshes of a way, by those of ways that are no more."""
        out: dict[LogicalMesh, float] = {}
        for other, bounds in self.bounds.items():
            if other.count <= way.count and _is_within(other.remat, way.remat):
                out |= {mesh: max(bound, out.get(mesh, 0.0)) for mesh, bound in bounds.items()}
        return out

    def attempt(self, way: Way, *, quick: bool = False) -> Outcome[T] | Beaten:
        """What comes of a way; it is kept if it is the best."""
        before, cutoff = self.deadline.spent, self.cutoff(way)
        first = None if self.best is None else self.best[1].mesh
        found: Outcome[T] | Beaten
        try:
            found = self.solve(way, cutoff, Lessons(self.known(way), first, quick))
        except Beaten as beaten:
            found = beaten
        self.slowest = max(self.slowest, self.deadline.spent - before)
        self.bounds[way] = found.bounds
        if isinstance(found, Outcome) and found.seconds < cutoff:
            self.first = self.first or (way, found)
            self.best = way, found
        return found

    def columns(self, remats: Sequence[Remat]) -> None:
        """One column for each of what may be computed again; what can win most, by its bound, is next."""
        waiting: dict[Remat, tuple[int, int]] = dict.fromkeys(remats, (self.given or 1, 0))
        while waiting:
            remat = min(
                (remat for remat in remats if remat in waiting),
                key=lambda remat: min(self.known(Way(waiting[remat][0], remat)).values(), default=0.0),
            )
            count, failures = waiting.pop(remat)
            way = Way(count, remat)
            if self.is_open(way) or (self.best is None and not self.bounds):
                more = self.step(way)
                failures = failures + 1 if self.fails(way) else 0
                if more is not None and failures < FAILURES:
                    waiting[remat] = more, failures

    def fails(self, way: Way) -> bool:
        """Whether a way that was tried was no gain. With less than in a plan that is known, nothing need fit."""
        if self.best is None or self.best[0] == way:
            return False
        return self.best is not self.start or not _is_less(way, self.best[0])

    def step(self, way: Way) -> int | None:
        """Tries a way: how many micro-batches of its column are next; None if no more may be a gain."""
        may_fit = self.floor < self.budget and not self.given
        late = self.best is None and not self.must and self.slowest > self.deadline.left
        if late and (len(self.misfits) > 1 or self.deadline.over):  # the first that may fit, by its bytes, mostly does
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
            self.narrow += [way] * found.wider
        return doublings(way.count, found.least, self.floor, self.budget) if may_fit else None

    def wider(self) -> None:
        """What did not fit the first meshes, tried on all."""
        while self.narrow:
            way = self.narrow.pop()
            if self.is_open(way):
                self.attempt(way)

    def rest(self) -> None:
        """The meshes on which the best way was not tried yet."""
        assert self.best is not None
        way, found = self.best
        untried = self.best is not self.start or way not in self.bounds
        if found.rest is not None and untried and not self.deadline.over:
            other = found.rest()
            if other.seconds <= found.seconds:
                self.best = way, other
                self.first = self.best if self.first is not None and self.first[0] == way else self.first

    def explain(self) -> None:
        """Raises why nothing fits; what is found only now, by looking at memory alone, is taken."""
        if not self.misfits:
            raise InfeasibleError("nothing else may be computed again")
        first, last = self.misfits[0], max(way.count for way in self.misfits)
        try:
            self.best = self.first = first, self.solve(first, math.inf, Lessons())
        except InfeasibleError as error:
            why = str(self.refused) if last == first.count and self.refused else ""
            why = f"the step does not fit with {last} of them." if last > first.count else why
            if not why or self.given:
                raise
            raise InfeasibleError(f"{error} Micro-batches do not help: {why}", error.smallest_budget) from error

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
            if middle in (low, high) or not self.is_open(fewer):
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
            less = "fewer" if way.remat == NOTHING else "less"
            out.append(f"{way}: with {less}, the step does not fit into {memory}")
        return tuple(out)
