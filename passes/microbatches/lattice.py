"""The lattice of the data-flow analysis of micro-batches (`transfer`, `analysis`): states of values.

Micro-batching shards the batch over *time*: a mesh with one axis of `parts` positions, of which position t is the
t-th iteration of a loop. Each value is then in one of these states.

    whole     the same in every micro-batch, and computed outside of the loop
    inner     the same in every micro-batch, and computed inside of it (a result of control flow that is inside)
    sliced    micro-batch t has block t of dim `dim`
    partial   the value is the sum over micro-batches of their terms
    local     belongs to one micro-batch alone and stands for the value of the whole batch (inexact)
    after     known only after all micro-batches
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from alpa_lite.ir.layout import Layout

T = TypeVar("T")

AXIS = "microbatch"
"""The name of the axis of time."""


class State(NamedTuple):
    """How a value depends on the micro-batch.

    A tuple, since tables are looked up by it for each operand of each operation.

    Attributes:
      dim: of a sliced value, the dim that is cut.
      segments: the sizes of the segments of that dim, if it has several (`segments`), without common divisors.
    """

    kind: Literal["whole", "inner", "sliced", "partial", "local", "after"]
    dim: int = -1
    segments: tuple[int, ...] = ()

    def segment_sizes(self, size: int) -> tuple[int, ...]:
        """Returns the segments of a dim of some size that is sliced so."""
        unit = size // max(sum(self.segments), 1)
        return tuple(n * unit for n in self.segments) or (size,)

    def shift(self, by: int) -> State:
        """Returns the state with its dim moved, as stacking or unstacking a leading dim does."""
        return self._replace(dim=self.dim + by) if self.kind == "sliced" else self


WHOLE, INNER, PARTIAL, LOCAL, AFTER = (State(kind) for kind in ("whole", "inner", "partial", "local", "after"))


def sliced_state(dim: int, segments: Sequence[int] = ()) -> State:
    """Returns the state of a value of which micro-batch t has block t of `dim`, or of each of its segments."""
    unit = math.gcd(*segments) or 1
    return State("sliced", dim, tuple(n // unit for n in segments) if len(segments) > 1 else ())


def fixed_point(
    start: Sequence[T], run: Callable[[list[T]], list[T]], join: Callable[[T, T], T]
) -> tuple[list[T], list[T]]:
    """Returns the least states of carried values that the body of a loop keeps, and those of its other outputs."""
    carry = list(start)
    while True:
        outputs = run(carry)
        joined = list(map(join, carry, outputs))
        if joined == carry:
            return carry, outputs[len(carry) :]
        carry = joined


def state_of(layout: Layout) -> State:
    """Returns the state that a layout on the axis of time means."""
    if layout.partial:
        return PARTIAL
    return next((sliced_state(dim) for dim, axes in enumerate(layout.dims) if axes), WHOLE)


def join(first: State, second: State) -> State | None:
    """Returns the least state that covers both: of a value that is sometimes in one and sometimes in the other."""
    if first == second:
        return first
    kinds = {first.kind, second.kind}
    if kinds <= {"whole", "inner"}:
        return INNER
    for one, other in ((first, second), (second, first)):
        if one.kind in ("whole", "inner") and other.kind in ("sliced", "partial", "local"):
            return other
    return PARTIAL if kinds == {"local", "partial"} else None
