"""One mesh: how many micro-batches, and what the backward pass computes again, by predicted seconds.

Both save activations and cost seconds: micro-batches repeat what is done for each of them (gathers of weights, the
latency of operations), and what is computed again is computed twice. They pay where memory binds, since what they leave
free lets the integer program choose faster layouts. A *way* is a number of micro-batches and a choice of what is
computed again. Let T(way) be the seconds of its best plan within the budget, and F(way) those of its best plan without
one. More micro-batches and more computed again only add, so

    T(more)  >=  F(more)  >=  F(less):

where T(way) is F(way), or near, nothing more can be faster, and nothing more is tried. This holds of each mesh by
itself, too. The least number of micro-batches that fits is looked for: 1, and where that does not fit, the first of 2,
4, 8, ... that may, by the bytes that are missing (`sharding.lessons`), and so on. Where memory binds, it is followed by
twice as many, four times as many, and so on while there is a gain; then by
"selective" and "layer" rematerialisation with as many micro-batches as the best, or fewer; each with the best seconds
so far as a cutoff, as long as a bound leaves room for a gain and the time allows. Where all layers computed again is
the best, fewer of them are tried by bisection: the first k of n layers (Chen et al. 2016 compute all again; k trades
seconds for bytes one layer at a time).
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
    """

    value: T
    seconds: float
    free: float
    layers: int = 0
    mesh: LogicalMesh | None = None
    bounds: Bounds = field(default_factory=lambda: NOTHING_KNOWN)

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
    also: Sequence[Choice] = (),
    must: bool = True,
) -> Chosen[T]:
    """The fastest way that fits.

    Args:
      remats: what may be computed again so that something fits, the least first. One alone is kept in all layers.
      given: the number of micro-batches, if it is not to be chosen.
      floor: bytes per device of the training state when all of it is sharded; budget: bytes per device.
      deadline: after which nothing more is tried, once something has been.
      also: what may be computed again where something fits without, if that is faster.
      must: whether to go on without time until something fits.

    Raises:
      InfeasibleError: no way fits. MicrobatchError: the step cannot be cut into the given number.
      OutOfTime: without `must`, nothing that fits was found in the time.
    """
    search = _Search(solve, given, floor, budget, deadline, must)
    for remat in map(Remat, remats):
        if search.best is not None:
            search.again(remat)
        else:
            search.fitting(remat)
            if search.best is not None and not given:
                search.more()
    if search.best is None:
        search.explain()
    for remat in map(Remat, also):
        search.again(remat)
    search.wider()
    if len(remats) + len(also) > 1:
        search.fewer_layers()
    assert search.best is not None
    return Chosen(search.best[1].value, search.notes(), tuple(dict.fromkeys(search.skipped)))


class _Search(Generic[T]):
    """What has been tried."""

    def __init__(
        self, solve: Solve[T], given: int | None, floor: float, budget: float, deadline: Deadline, must: bool
    ) -> None:
        self.solve, self.given, self.floor, self.budget, self.deadline = solve, given, floor, budget, deadline
        self.must = must
        self.best: tuple[Way, Outcome[T]] | None = None
        self.first: tuple[Way, Outcome[T]] | None = None
        self.slowest = 0.0  # seconds that trying a way took
        self.misfits: list[Way] = []
        self.refused: MicrobatchError | None = None
        self.skipped: list[Way] = []
        self.bounds: dict[int, Bounds] = {}  # number of micro-batches -> bounds of as many, or more
        self.narrow: list[Way] = []  # misfits on the first meshes, which others may fit

    @property
    def cutoff(self) -> float:
        """Seconds below which another way is a gain."""
        return ANY if self.best is None else self.best[1].seconds * (1 - GAIN)

    def is_open(self, way: Way) -> bool:
        """Whether a way may be a gain, and the time allows to try it; notes it where the time alone does not."""
        if min(self.known(way).values(), default=0.0) >= self.cutoff:
            return False
        if self.best is not None and self.slowest > self.deadline.left:
            self.skipped.append(way)
            return False
        return True

    def known(self, way: Way) -> Bounds:
        """Bounds of the meshes of a way, by those of fewer micro-batches."""
        out: dict[LogicalMesh, float] = {}
        for count, bounds in self.bounds.items():
            if count <= way.count:
                out |= {mesh: max(bound, out.get(mesh, 0.0)) for mesh, bound in bounds.items()}
        return out

    def attempt(self, way: Way, *, quick: bool = False) -> Outcome[T] | Beaten:
        """What comes of a way; it is kept if it is the best."""
        before = self.deadline.spent
        first = None if self.best is None else self.best[1].mesh
        found: Outcome[T] | Beaten
        try:
            found = self.solve(way, self.cutoff, Lessons(self.known(way), first, quick))
        except Beaten as beaten:
            found = beaten
        self.slowest = max(self.slowest, self.deadline.spent - before)
        if way.remat == NOTHING:
            self.bounds[way.count] = found.bounds
        if isinstance(found, Outcome) and found.seconds < self.cutoff:
            self.first = self.first or (way, found)
            self.best = way, found
        return found

    def fitting(self, remat: Remat) -> None:
        """The least number of micro-batches that fits, if any does."""
        count, may_fit = self.given or 1, self.floor < self.budget
        while self.is_open(way := Way(count, remat)) or not self.misfits:
            try:
                found = self.attempt(way, quick=may_fit and not self.given)
            except MicrobatchError as refusal:
                if self.given or not self.misfits:
                    raise
                self.refused = self.refused or refusal
                break
            if isinstance(found, Outcome) and self.best is not None:
                return
            least = 0.0
            if isinstance(found, Beaten):
                least = found.least
                self.narrow += [way] * found.wider
            self.misfits.append(way)
            if self.given or not may_fit:
                break
            if not self.must and self.slowest > self.deadline.left:
                raise OutOfTime
            count = doublings(count, least, self.floor, self.budget)
        self.wider()

    def wider(self) -> None:
        """What did not fit the first meshes, tried on all."""
        while self.narrow:
            way = self.narrow.pop()
            if self.is_open(way):
                self.attempt(way)

    def more(self) -> None:
        """More micro-batches than the best, as long as there is a gain."""
        assert self.best is not None
        way, found = self.best
        is_bound, failures = found.is_bound, 0
        while is_bound and failures < FAILURES and self.is_open(way := Way(2 * way.count, way.remat)):
            try:
                tried = self.attempt(way)
            except MicrobatchError:
                return
            is_bound = not isinstance(tried, Outcome) or tried.is_bound
            failures = 0 if self.best[0] == way else failures + 1

    def again(self, remat: Remat) -> None:
        """The same or fewer micro-batches, since activations take less, with something computed again."""
        assert self.best is not None
        count, failures = self.best[0].count, 0
        while count and failures < FAILURES:
            way = Way(count, remat)
            if self.is_open(way):
                try:
                    self.attempt(way)
                except MicrobatchError:
                    return
                failures = 0 if self.best[0] == way else failures + 1
            count = 0 if self.given else count // 2

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
        assert self.best is not None and self.first is not None
        way, found = self.best
        memory = f"memory_per_device={units.exact_bytes(self.budget)}"
        out = []
        if way != self.first[0]:
            seconds = self.first[1].seconds
            out.append(f"{way}: {self.first[0]} would take {seconds:.4g} s within {memory}, this {found.seconds:.4g} s")
        elif self.misfits:
            less = "fewer" if way.remat == NOTHING else "less"
            out.append(f"{way}: with {less}, the step does not fit into {memory}")
        return tuple(out)
