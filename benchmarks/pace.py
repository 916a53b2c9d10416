"""How fast a core was while something ran, against how fast it is when nobody shares it.

A virtual core is often half of a physical one. While another machine computes on the other half, everything here takes
up to twice as long, CPU seconds too, and no counter says so; it changes from second to second. `python
benchmarks/pace.py` shows it: a fixed loop, ten seconds of it. So that seconds of different hours can be compared, a
timer interrupts what is measured, and runs the same short loop each time (`Meter`). Let t_i be what the loop took, and
t the least that it takes on that machine with that interpreter (of all meters). Then

    undisturbed seconds = seconds * mean_i(t / t_i)

is what the measured work would have taken by itself. That is an estimate: memory and arithmetic do not suffer alike.
The timer counts CPU seconds, and its loops take about one in fifty of them.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

EVERY = 0.1
"""CPU seconds between two loops."""

TURNS = 22_000
"""Of a loop, which takes about 2 ms."""


@dataclass
class Meter:
    """Runs the loop while its `with` block runs, which must be in the main thread.

    Attributes:
      taken: CPU seconds of each loop.
    """

    taken: list[float] = field(default_factory=list)

    def __enter__(self) -> Meter:
        """Sets the timer; the first loop is not counted, since nothing of it is in a cache."""
        loop()
        self.taken.append(loop())
        self._before = signal.signal(signal.SIGPROF, lambda *_: self.taken.append(loop()))
        signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)
        return self

    def __exit__(self, *_: Any) -> None:
        """Stops the timer."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, self._before)

    @property
    def figures(self) -> dict[str, float]:
        """`least`: seconds of the quickest loop but one in twenty; `rate`: the mean of loops per second."""
        return {
            "least": sorted(self.taken)[len(self.taken) // 20],
            "rate": sum(1 / one for one in self.taken) / len(self.taken),
        }


def loop() -> float:
    """CPU seconds of a fixed piece of work: arithmetic and dictionaries, as of a compiler in Python."""
    start = time.thread_time()
    total, known = 0, {}
    for number in range(TURNS):
        known[number & 1023] = total
        total += number
    return time.thread_time() - start


def share(figures: dict[str, float], least: float) -> float:
    """Undisturbed seconds of a second that was measured; `least` as of `least`."""
    return min(least * figures["rate"], 1.0)


def least(of: Sequence[dict[str, float]]) -> float:
    """Seconds that the loop takes on an undisturbed core, by the figures of several meters."""
    return min(one["least"] for one in of)


def main() -> None:
    """Prints what the loop takes in ten seconds of nothing else."""
    end = time.perf_counter() + 10
    taken = []
    while time.perf_counter() < end:
        taken.append(1e3 * loop())
    tenths = statistics.quantiles(taken, n=10)
    print(f"{len(taken)} loops: tenths at " + ", ".join(f"{one:.2f}" for one in tenths) + " ms")


if __name__ == "__main__":
    main()
