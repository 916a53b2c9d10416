"""The log of calls by which a process notices that others go through the program with other arguments.

Every process posts which *program points* it has reached (calls of a step and prefetched batches, which all processes
reach under the same numbers), and at which of them its arguments were new: one that plans at a point that another has
passed raises. It also posts the last calls at which a step changed its program, since different programs in one call
could wait for each other for ever, or compute something wrong.

A call counts from its beginning, since one that runs as planned before may never end; it may also be about to plan, so
a finding counts when a second comparison repeats it. The log is read by another thread: its parts are replaced, and
not changed.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

CALLS = "calls"
"""The series of the calls of all steps."""

RETAINED_CALLS = 1000
"""Calls with new arguments that are known. Processes are apart by the programs that a device admits, some dozens."""

POSTED = slice(-32, None)
"""The part of each list that is posted: its end."""


class ProgramPoint(NamedTuple):
    """A point of the program that every process reaches: its number, from 1, in a series of calls or of batches."""

    series: str
    number: int

    def __str__(self) -> str:
        return f"call {self.number} of a step" if self.series == CALLS else f"batch {self.number} of {self.series}"


class NewArguments(NamedTuple):
    """The number of a point with new arguments; of a call, its step and the digest of its program, once known."""

    number: int
    step: int
    program: str | None


class CallLog:
    """Numbered log of step calls and prefetched batches. Each thread is at a point of its own."""

    def __init__(self) -> None:
        self._reached: dict[str, float] = {CALLS: 0}  # the last point of each series
        self._new: dict[str, tuple[NewArguments, ...]] = {}  # of each series
        self._mismatch: tuple[int, int] | None = None  # at the last comparison
        self._thread = threading.local()
        self._prefetches = itertools.count(1)

    @property
    def calls(self) -> int:
        """The number of calls of steps that have begun."""
        return int(self._reached[CALLS])

    def begin_call(self) -> ProgramPoint:
        """Begins a call of a step."""
        self._reached[CALLS] += 1
        self._thread.point = point = ProgramPoint(CALLS, self.calls)
        return point

    def end(self) -> None:
        """Ends the call or batch of this thread."""
        self._thread.point = None

    def begin_prefetch(self) -> str:
        """Returns a new series, for the batches of one prefetch. All processes begin theirs in the same order."""
        series = f"prefetch {next(self._prefetches)}"
        self._reached[series] = 0
        return series

    def place_batch(self, series: str, number: int, place: Callable[[Any], Any], item: Any) -> Any:
        """Returns a placed batch, or `item` itself if `place` returns it: it is planned for in its call."""
        self._thread.point = point = ProgramPoint(series, number)
        try:
            placed = place(item)
        finally:
            self.end()
        if placed is item:
            self.record_new_arguments(point)
        self._reached[series] = number
        return placed

    def end_prefetch(self, series: str) -> None:
        """Records that there are no more batches."""
        self._reached[series] = math.inf

    def record_new_arguments(self, point: ProgramPoint, step: int = 0, program: str | None = None) -> None:
        """Records that a call has other arguments than the call of this step before, or a batch than that before.

        Args:
          step: the number of its first call, which identifies it in all processes.
          program: the digest of the program that it runs from then on, equal in all processes, once it is known.
        """
        known = (one for one in self._new.get(point.series, ()) if one.number != point.number)
        self._new[point.series] = (*known, NewArguments(point.number, step, program))[-RETAINED_CALLS:]

    def record_planning(self) -> ProgramPoint | None:
        """Records that this thread plans. Returns the point that it is at, if it is at one."""
        point: ProgramPoint | None = getattr(self._thread, "point", None)
        if point is not None:
            self.record_new_arguments(point)
        return point

    def to_json(self) -> dict[str, Any]:
        """Returns the part of the log that the other processes need, as JSON values."""
        posted = (CALLS, *[*self._reached][POSTED])
        return {series: (self._reached[series], self._new.get(series, ())[POSTED]) for series in posted}

    def compare(self, others: Mapping[int, Mapping[str, Any]]) -> tuple[int, int] | None:
        """Compares the programs of this process with those posted by the others.

        Returns:
          A process, and a call at which it ran another program than this one; at the second comparison that finds it.
        """
        mismatches = (
            (process, call) for process, other in others.items() for call, step, program in other[CALLS][1]
            if program is not None and self._program_at(step, call) not in (None, program)
        )  # fmt: skip
        before, self._mismatch = self._mismatch, next(mismatches, None)
        return self._mismatch if self._mismatch == before else None

    def _program_at(self, step: int, call: int) -> str | None:
        """Returns the program of a step at a call; None if it is not known (yet), or the call is of another step."""
        new = self._new.get(CALLS, ())
        known = [one.program for one in new if one.step == step and one.number <= call]
        is_undecided = call > self.calls or any(one.number == call and one.program is None for one in new)
        return None if is_undecided or not known else known[-1]


def has_passed(log: Mapping[str, Any], point: ProgramPoint) -> bool:
    """Returns whether the process of a posted log has reached a point without new arguments there."""
    reached, new = log.get(point.series, (0, ()))
    return point.number <= reached and all(number != point.number for number, *_ in new)
