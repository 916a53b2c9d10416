"""The log of calls by which a process notices that others go through the program with other arguments.

A process plans where the arguments of a step are new, and waits for all processes to plan with it; those whose
arguments are not new run the step, and wait for it there. So every process posts which *program points* it has reached
(calls of a step and prefetched batches, which all processes reach under the same numbers), and at which of them its
arguments were new: one that plans at a point that another has passed raises. Where nobody plans, different programs
could wait for each other for ever, or compute something wrong; so a process also posts the last calls at which a step
changed its program.

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


class CallLog:
    """Numbered log of step calls and prefetched batches. Each thread is at a point of its own."""

    def __init__(self) -> None:
        self._reached: dict[str, float] = {CALLS: 0}  # the last point of each series
        self._new: dict[str, tuple[int, ...]] = {}  # of each series the points with new arguments
        self._changes: dict[int, tuple[tuple[int, str], ...]] = {}  # of a step: from which call which program
        self._undecided: tuple[int, ...] = ()  # calls whose program is not known yet
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
            self._record_new(point)
        self._reached[series] = number
        return placed

    def end_prefetch(self, series: str) -> None:
        """Records that there are no more batches."""
        self._reached[series] = math.inf

    def record_new_arguments(self, call: ProgramPoint) -> None:
        """Records that a call has other arguments than the call of this step before."""
        self._record_new(call)
        self._undecided = (*self._undecided, call.number)[-RETAINED_CALLS:]

    def record_planning(self) -> ProgramPoint | None:
        """Records that this thread plans. Returns the point that it is at, if it is at one."""
        point: ProgramPoint | None = getattr(self._thread, "point", None)
        if point is not None:
            self._record_new(point)
        return point

    def _record_new(self, point: ProgramPoint) -> None:
        self._new[point.series] = (*self._new.get(point.series, ()), point.number)[POSTED]

    def record_program(self, call: ProgramPoint, step: int, program: str) -> None:
        """Records the program that a step runs from a call on.

        Args:
          step: the number of its first call, which identifies it in all processes.
          program: its digest, equal in all processes.
        """
        changes = self._changes.get(step, ())
        if not changes or changes[-1][1] != program:
            self._changes[step] = (*changes, (call.number, program))[-RETAINED_CALLS:]
        self._undecided = tuple(number for number in self._undecided if number != call.number)

    def to_json(self) -> dict[str, Any]:
        """Returns the part of the log that the other processes need, as JSON values."""
        changes = [(call, step, program) for step, ones in [*self._changes.items()] for call, program in ones[POSTED]]
        points = {one: (self._reached[one], self._new.get(one, ())) for one in (CALLS, *[*self._reached][POSTED])}
        return {"points": points, "programs": sorted(changes)[POSTED]}

    def compare(self, others: Mapping[int, Mapping[str, Any]]) -> tuple[int, int] | None:
        """Compares the programs of this process with those posted by the others.

        Returns:
          A process, and a call at which it ran another program than this one; at the second comparison that finds it.
        """
        mismatches = (
            (process, call) for process, other in others.items() for call, step, program in other["programs"]
            if self._program_at(step, call) not in (None, program)
        )  # fmt: skip
        before, self._mismatch = self._mismatch, next(mismatches, None)
        return self._mismatch if self._mismatch == before else None

    def _program_at(self, step: int, call: int) -> str | None:
        """Returns the program of a step at a call; None if it is not known (yet), or the call is of another step."""
        if call > self.calls or call in self._undecided:
            return None
        known = [program for first, program in self._changes.get(step, ()) if first <= call]
        return known[-1] if known else None


def has_passed(log: Mapping[str, Any], point: ProgramPoint) -> bool:
    """Returns whether the process of a posted log has reached a point without new arguments there."""
    reached, new = log["points"].get(point.series, (0, ()))
    return point.number <= reached and point.number not in new
