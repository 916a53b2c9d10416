"""The log of calls by which a process notices that others go through the program with other arguments.

A process plans where the arguments of a step are new, and waits for all processes to plan with it; those whose
arguments are not new run the step, and wait for it there. So a process posts at which *program points* it plans: calls
of a step and prefetched batches, which all processes reach under the same numbers. One that has passed such a point
without planning posts that, and the waiting one raises. Where nobody plans, different programs could wait for each
other for ever, or compute something wrong; so a process also posts the last calls at which a step changed its program.

A call counts from its beginning, since one that runs as planned before may never end; it may also be about to plan, so
a finding counts when a second comparison repeats it.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

CALLS = "calls"
"""The series of the calls of all steps."""

RETAINED_CALLS = 1000
"""Calls with new arguments that are known. Processes are apart by the programs that a device admits, some dozens."""

POSTED_CHANGES = 32
"""How many changes of programs, and how many passed points, are posted."""


class ProgramPoint(NamedTuple):
    """A point of the program that every process reaches: its number, from 1, in a series of calls or of batches."""

    series: str
    number: int

    def __str__(self) -> str:
        return f"call {self.number} of a step" if self.series == CALLS else f"batch {self.number} of {self.series}"


class CallLog:
    """Numbered log of step calls and prefetched batches. Each thread is at a point of its own."""

    def __init__(self) -> None:
        self._reached: dict[str, float] = {CALLS: 0}  # the last point of each series that counts
        self._unplaced: Counter[str] = Counter()  # the last batch of each that was returned unplaced
        self._planned: deque[ProgramPoint] = deque(maxlen=RETAINED_CALLS)
        self._planning: dict[str, int] = {}  # the last point of each series that this process planned at
        self._candidates: set[ProgramPoint] = set()  # others plan there, and the last comparison found them passed
        self._passed: list[ProgramPoint] = []
        self._changes: dict[int, list[tuple[int, str]]] = defaultdict(list)  # of a step: from which call which program
        self._undecided: deque[int] = deque(maxlen=RETAINED_CALLS)  # calls whose program is not known yet
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
        return f"prefetch {next(self._prefetches)}"

    def place_batch(self, series: str, number: int, place: Callable[[Any], Any], item: Any) -> Any:
        """Returns a placed batch, or `item` itself if `place` returns it."""
        self._thread.point = ProgramPoint(series, number)
        try:
            placed = place(item)
        finally:
            self.end()
        (self._unplaced if placed is item else self._reached)[series] = number
        return placed

    def end_prefetch(self, series: str) -> None:
        """Records that there are no more batches."""
        self._reached[series] = math.inf

    def record_new_arguments(self, point: ProgramPoint) -> None:
        """Records that a call has other arguments than the call of this step before."""
        self._planned.append(point)
        self._undecided.append(point.number)

    def record_program(self, point: ProgramPoint, step: int, program: str) -> None:
        """Records the program that a step runs from a call on.

        Args:
          step: the number of its first call, which identifies it in all processes.
          program: its digest, equal in all processes.
        """
        changes = self._changes[step]
        if not changes or changes[-1][1] != program:
            changes.append((point.number, program))
            self._changes[step] = changes[-RETAINED_CALLS:]
        if point.number in self._undecided:
            self._undecided.remove(point.number)

    def record_planning(self) -> ProgramPoint | None:
        """Records that this thread plans. Returns the point that it is at, if it is at one."""
        point: ProgramPoint | None = getattr(self._thread, "point", None)
        if point is not None:
            self._planned.append(point)
            self._planning[point.series] = point.number
        return point

    def to_json(self) -> dict[str, Any]:
        """Returns the part of the log that the other processes need, as JSON values."""
        last = slice(-POSTED_CHANGES, None)
        changes = [(call, step, program) for step, ones in [*self._changes.items()] for call, program in ones[last]]
        return {"planning": {**self._planning}, "passed": self._passed[last], "programs": sorted(changes)[last]}

    def compare(self, others: Mapping[int, Mapping[str, Any]]) -> tuple[int, int] | None:
        """Compares this log with those posted by the others, and records which of their points this one has passed.

        Returns:
          A process, and a call at which it ran another program than this one; at the second comparison that finds it.
        """
        points = {ProgramPoint(*point) for other in others.values() for point in other["planning"].items()}
        candidates = set(filter(self._has_passed, points))
        self._passed += sorted((candidates & self._candidates).difference(self._passed))
        self._candidates = candidates
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
        known = [program for first, program in self._changes.get(step, []) if first <= call]
        return known[-1] if known else None

    def _has_passed(self, point: ProgramPoint) -> bool:
        """Returns whether this process has reached a point without planning there, as far as is known."""
        reached = self._unplaced[point.series] < point.number <= self._reached.get(point.series, 0)
        return reached and point not in self._planned


def find_passed(point: ProgramPoint, others: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Returns a process that posted that it has passed a point without planning."""
    return next((process for process, other in others.items() if [*point] in other["passed"]), None)
