"""Measured seconds of planned steps, several in turn, so that what else the machine does disturbs all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Run = Callable[[], float]
"""Runs a step once more, waits for its results, and returns the seconds."""


def timed(step: Any, held: list[Any]) -> Run:
    """What runs a step once more; it has run once. `held`: its arguments, the state first, which the step replaces."""

    def run() -> float:
        start = time.perf_counter()
        held[0], metrics = step(*held)
        jax.block_until_ready((held[0], metrics))
        return time.perf_counter() - start

    run()
    return run


def alternating(steps: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, in turns of four of which the first does not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            run()
            times[name] += [run() for _ in range(3)]
    return times
