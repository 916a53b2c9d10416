"""Who goes through a place of the program with other arguments than the others.

A process plans where the arguments of a step are others than before, and waits for all processes to plan with it. If
those of the others are as before, they do not come: they run the step, and wait for it there. A *turn* is a place that
every process comes to by the same number, as all run the same program: a call of a step, or a batch that a thread of
`step.prefetch` places. A process that plans in a turn tells so, in the key-value store of JAX's runtime. Who has gone
through that turn without planning will not come: it tells that, and the process that waits raises.

A call counts from its beginning, for one that runs as planned before may never end; it may still be about to plan, and
so is told of at the second look that finds it so. A batch counts when it is placed; one that comes as it is, since the
step has no plan yet, is planned for in its call. Who has no more batches has gone through those of the others.

Where all have planned for those arguments before, nobody waits for the others. They run different programs, which wait
for each other for ever, or compute something wrong where their collectives happen to be alike. So a process also tells
the last calls in which a step ran another program than before, and which; who ran another one there says so at the
second look.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

CALLS = "calls"
"""The series of the calls of steps, of whichever step."""

Words = Iterable[tuple[str, str]]
"""Keys of the store, and the texts there."""

PLANS = "alpa_lite/plans/"
PASSED = "alpa_lite/passed/"
RUNS = "alpa_lite/runs/"
"""How the keys begin under which processes tell in which turns they plan, which they passed without planning, and which
programs they run."""

KEPT = 1000
"""How many calls back anything is known. Processes are apart by the programs that a device admits, some dozens."""

TOLD = 32
"""Of how many changes of programs the others are told."""


class Turn(NamedTuple):
    """A place that every process comes to.

    Attributes:
      series: the calls, or the batches of one prefetch.
      number: within it, from 1.
    """

    series: str
    number: int

    def __str__(self) -> str:
        return f"call {self.number} of a step" if self.series == CALLS else f"batch {self.number} of {self.series}"


class Turns:
    """What this process has gone through. A turn is that of the thread that has entered it."""

    def __init__(self) -> None:
        self._reached: dict[str, float] = {CALLS: 0}  # the last turn of each series that counts
        self._unplaced: Counter[str] = Counter()  # the last batch of each that came as it is
        self._planned: set[Turn] = set()
        self._passed: set[Turn] = set()  # those that others plan in, and that this process had passed at the last look
        self._programs: dict[int, list[tuple[int, str]]] = defaultdict(list)  # of a step: from which call which runs
        self._changing: set[int] = set()  # calls whose program is not known yet
        self._told: list[tuple[int, int, str]] = []
        self._unlike: tuple[int, int] | None = None  # at the last look
        self._here = threading.local()
        self._prefetches = itertools.count(1)

    @property
    def calls(self) -> int:
        """How many calls of steps have begun."""
        return int(self._reached[CALLS])

    def call(self) -> Turn:
        """Begins a call of a step."""
        self._reached[CALLS] += 1
        self._here.turn = turn = Turn(CALLS, self.calls)
        return turn

    def leave(self) -> None:
        """Ends what this thread has entered."""
        self._here.turn = None

    def prefetch(self) -> str:
        """A series for the batches of one prefetch; all processes make theirs in the same order."""
        return f"prefetch {next(self._prefetches)}"

    def batch(self, series: str, number: int, place: Callable[[Any], Any], item: Any) -> Any:
        """A batch as it is placed; `item` itself if it comes as it is."""
        self._here.turn = Turn(series, number)
        try:
            placed = place(item)
        finally:
            self.leave()
        if placed is item:
            self._unplaced[series] = number
        else:
            self._reached[series] = number
        return placed

    def over(self, series: str) -> None:
        """Takes note that there are no more batches."""
        self._reached[series] = math.inf

    def is_new(self, turn: Turn) -> None:
        """Takes note that a call has arguments that are not those of the call of this step before."""
        self._planned.add(turn)
        self._changing.add(turn.number)

    def runs(self, turn: Turn, step: int, program: str) -> None:
        """Takes note of the program that a step runs from a call on.

        Args:
          step: the number of its first call, which stands for it in all processes.
          program: the same text in all processes for the same program.
        """
        changes = self._programs[step]
        if not changes or changes[-1][1] != program:
            changes.append((turn.number, program))
            self._programs[step] = changes[-KEPT:]
        self._changing.discard(turn.number)

    def programs(self, own: int) -> tuple[str, str] | None:
        """What to tell of the programs of this process; None if that has been told."""
        changes = [(call, step, one) for step, ones in list(self._programs.items()) for call, one in ones[-TOLD:]]
        changes = sorted(changes)[-TOLD:]
        if changes == self._told:
            return None
        self._told = changes
        return f"{RUNS}{own}", json.dumps(changes)

    def unlike(self, own: int, runs: Words) -> tuple[int, int] | None:
        """Another process, and a call in which it ran another program than this one; at the second look.

        Args:
          own: the number of this process.
          runs: what has been told under `RUNS`.
        """
        found = None
        for key, text in runs:
            process = int(key.removeprefix(RUNS))
            for call, step, program in json.loads(text):
                here = self._program(step, call)
                if process != own and here is not None and here != program:
                    found = found or (process, call)
        before, self._unlike = self._unlike, found
        return found if found == before else None

    def _program(self, step: int, call: int) -> str | None:
        """What a step ran in a call; None if that is not known (yet), or the call belongs to another step."""
        if call > self.calls or call in self._changing or step not in self._programs:
            return None
        changes = self._programs[step]
        place = bisect.bisect_right(changes, call, key=lambda change: change[0])
        return changes[place - 1][1] if place else None

    def plans(self) -> Turn | None:
        """Takes note that this thread plans; the turn that it is in, if it is in one."""
        turn: Turn | None = getattr(self._here, "turn", None)
        if turn is not None:
            self._planned.add(turn)
        return turn

    def look(self, own: int, plans: Words) -> list[tuple[str, str]]:
        """What to tell of the turns that others plan in and that this process has passed, at the second look.

        Args:
          own: the number of this process.
          plans: what has been told under `PLANS`.
        """
        for turn in [turn for turn in list(self._planned) if self._is_old(turn)]:
            self._planned.discard(turn)
            self._changing.discard(turn.number)
        passed = {turn for process, turn in _turns(plans, PLANS) if process != own and self._has_passed(turn)}
        twice, self._passed = passed & self._passed, passed
        return [(f"{PASSED}{own}/{turn.series}/{turn.number}", str(turn.number)) for turn in twice]

    def _has_passed(self, turn: Turn) -> bool:
        reached = self._unplaced[turn.series] < turn.number <= self._reached.get(turn.series, 0)
        return reached and turn not in self._planned and not self._is_old(turn)

    def _is_old(self, turn: Turn) -> bool:
        return turn.series == CALLS and turn.number <= self.calls - KEPT


def plan_of(turn: Turn, own: int) -> tuple[str, str]:
    """What a process tells that plans in a turn."""
    return f"{PLANS}{own}/{turn.series}", str(turn.number)


def who_passed(turn: Turn, passed: Words) -> int | None:
    """A process that has passed a turn without planning, of what has been told under `PASSED`."""
    return next((process for process, other in _turns(passed, PASSED) if other == turn), None)


def _turns(words: Words, prefix: str) -> Iterator[tuple[int, Turn]]:
    for key, text in words:
        process, series, *_ = key.removeprefix(prefix).split("/")
        yield int(process), Turn(series, int(text))
