"""Ways to run a step on one mesh, and what is found of them: the values that the search for the best hands on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.layers.remat import NOTHING, Remat
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.sharding.deadline import Deadline, OutOfTime
from alpa_lite.passes.sharding.lessons import NOTHING_KNOWN, Bounds, Lessons

T = TypeVar("T")

GAIN = 0.02
"""By what share a way must be faster than one with fewer micro-batches, or less computed again, to be taken."""

ADDED = 0.005
"""By what share of the seconds of one micro-batch each further one is slower, by rule of thumb.

Bounds of three language models of 2.6 to 8 billion parameters rise by 0.0033 to 0.0065 for each of 31 to 63 more.
"""

AGAIN: Mapping[Choice, float] = {"none": 0.0, "selective": 0.08, "layer": 1 / 3}
"""As `ADDED`, for what is computed again: with all layers all of the forward pass, a third of the operations."""


@dataclass(frozen=True)
class Way:
    """How one mesh runs a step: so many micro-batches, and what the backward pass computes again."""

    count: int = 1
    remat: Remat = NOTHING

    @property
    def share_added(self) -> float:
        """By what share it is slower than one micro-batch with nothing computed again, by rule of thumb."""
        return ADDED * (self.count - 1) + AGAIN[self.remat.choice]

    def __str__(self) -> str:
        parts = f"{self.count} micro-batch{'es' * (self.count > 1)}"
        return parts if self.remat == NOTHING else f"{parts}, rematerialisation {str(self.remat)!r}"


def unknown(way: Way) -> Bounds:
    """The bounds of a way where nothing is known of it."""
    del way
    return NOTHING_KNOWN


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
      rest: the best plan of the meshes that were not searched, too, until a deadline; None if all were.
      computing: of `seconds`, what the plan does not communicate; 0 if that is not known.
    """

    value: T
    seconds: float
    free: float
    layers: int = 0
    mesh: LogicalMesh | None = None
    bounds: Bounds = field(default_factory=lambda: NOTHING_KNOWN)
    rest: Callable[[Deadline], Outcome[T]] | None = None
    computing: float = 0.0

    @property
    def is_bound(self) -> bool:
        """Whether more memory would make it faster, by more than a gain that is looked for."""
        return self.seconds * (1 - GAIN) > self.free


@dataclass(frozen=True)
class Chosen(Generic[T]):
    """The best way.

    Attributes:
      value: its plan.
      seconds: predicted, of a step.
      notes: for the plan: why this way.
      late: ways that the time did not allow to try.
      little: ways that could not save enough to repay trying them.
      rest: the search goes on; None if all of it was searched.
      known: way -> seconds that none of its plans undercuts, by mesh, as far as they are known.
    """

    value: T
    seconds: float
    notes: tuple[str, ...]
    late: tuple[Way, ...]
    little: tuple[Way, ...] = ()
    rest: Rest[T] | None = None
    known: Callable[[Way], Bounds] = unknown


Start = tuple[Way, Outcome[T]]
"""A way, and its best plan that is known."""


class Rest(Protocol[T]):
    """A search that goes on where it stopped."""

    def __call__(self, deadline: Deadline, below: float = math.inf, *, must: bool = False) -> Chosen[T]:
        """The best way that is known after more time, of which no more is spent than can be won back.

        Args:
          below: seconds of another plan of the same step: what does not undercut them is not searched.
          must: as of `best`.

        Raises:
          As `best`, where nothing was found yet.
        """
        ...


class Unfinished(OutOfTime):
    """Nothing that fits was found in the time.

    Attributes:
      rest: the search goes on.
    """

    def __init__(self, rest: Rest[Any]) -> None:
        super().__init__()
        self.rest = rest


Solve = Callable[[Way, float, Lessons, Deadline], Outcome[T]]
"""The best plan of a way below a cutoff of seconds; `inf` for none. What other ways have shown is given.

Raises MicrobatchError if the step cannot be cut so; Beaten if no plan is below a finite cutoff; without one
InfeasibleError, which says what would fit and takes longer.
"""
