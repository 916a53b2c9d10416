"""What a task of a pipeline costs in Python, beyond the jit and `device_put` calls that it makes.

The stages are tiny, so that what is timed is the call of the step: from calling until it returns. In it, every call of
a compiled executable, every `jax.device_put` and every wait is timed by itself; the rest is ours: walking the
instruction lists, checking and placing arguments, the pieces of transfers, flattening and unflattening. It is divided
by the number of tasks, which are runs of executables: one for each stage, micro-batch and direction, and those before
and after.

All is repeated with fresh states. `ours_us` is the median over the calls of microseconds per task that are ours,
`calls_us` those of the jit and `device_put` calls, and `ours_us_of_each` the medians of the repetitions. The devices
of a CPU compete with the call for its cores; `ours_cpu_us` and `calls_cpu_us` count only the time that the calling
thread was running. (A CPU runs some executables within the call that dispatches them: `calls_us` then has their work.)

Last comes what packing is for (`passes/stages/packing.py`): the same with many layers, with small values in packs and
without.

    python benchmarks/pipeline_overhead.py

writes benchmarks/results/pipeline_overhead.json. Run it on an idle machine: the numbers are tens of microseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite
from alpa_lite.passes.stages import packing
from alpa_lite.runtime.pipeline import Launch, Move, PipelineExecutable
from alpa_lite.runtime.transfer import Transfer

RESULTS = Path(__file__).parent / "results" / "pipeline_overhead.json"
SUBMESHES = {
    "4 submeshes of 1": ((1,),) * 4,
    "4 submeshes of 2": ((2,),) * 4,
    "submeshes of 2, 2 and 4": ((2,), (2,), (4,)),
}
FEW, MANY, WIDTH = 8, 64, 8


def main() -> None:
    """Measures and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--dry-run", action="store_true", help="print only")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    cases = [(name, FEW, True) for name in SUBMESHES]
    cases += [(name, MANY, packs) for name in list(SUBMESHES)[:2] for packs in (True, False)]
    for name, layers, packs in cases:
        with contextlib.nullcontext() if packs else no_packs():
            measured = measure(
                SUBMESHES[name], layers, arguments.microbatches, arguments.repetitions, arguments.rounds
            )  # fmt: skip
        case = {"submeshes": name, "layers": layers, "packs": packs, "microbatches": arguments.microbatches}
        rows.append({**case, **measured})
        print(rows[-1])
    if arguments.dry_run:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    machine = {
        "python": platform.python_version(),
        "backend": jax.default_backend(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "repetitions": arguments.repetitions,
    }
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[f"jax {jax.__version__}"] = {"machine": machine, "rows": rows}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def step(state: Any, batch: Any) -> tuple[Any, Any]:
    """Least squares of a small deep network."""

    def loss_fn(params: Any) -> Any:
        hidden = batch["x"]
        for weight in params:
            hidden = jnp.tanh(hidden @ weight)
        return jnp.mean((hidden - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], loss


@contextlib.contextmanager
def no_packs() -> Iterator[None]:
    """Plans made meanwhile have a buffer for every value."""
    fewest, packing.FEWEST = packing.FEWEST, 1_000_000
    try:
        yield
    finally:
        packing.FEWEST = fewest


def arguments_of(layers: int, microbatches: int) -> tuple[Any, Any]:
    """A state, and a batch of eight examples for each micro-batch."""
    random = np.random.default_rng(0)
    batch = {name: random.normal(size=(8 * microbatches, WIDTH)).astype(np.float32) for name in "xy"}
    return [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) for _ in range(layers)], batch


def measure(shapes: Any, layers: int, microbatches: int, repetitions: int, rounds: int) -> dict[str, Any]:
    """Microseconds per task (the module's docstring says of what)."""
    method = alpa_lite.Pipeline(num_stages=len(shapes), schedule="1f1b", submesh_shapes=shapes, remat="none")
    run = alpa_lite.parallelize(step, method=method, num_microbatches=microbatches)
    args = arguments_of(layers, microbatches)
    executable = run._executable(args, {})
    assert isinstance(executable, PipelineExecutable)
    executable.compiled()
    clocks = Clocks()
    instrument(executable, clocks)
    items = executable._items
    runs = [item.source for item in items if isinstance(item, Launch)]
    tasks = len(runs)
    found = [_rounds(run, run.place(*args), clocks, rounds) for _ in range(repetitions)]
    each = [[1e6 * statistics.median(column) / tasks for column in zip(*times, strict=True)] for times in found]
    whole, calls, busy, busy_calls = (statistics.median(column) for column in zip(*each, strict=True))
    return {
        "tasks": tasks,
        "transfers": sum(isinstance(item, Move) for item in items),
        "arguments_per_task": round(statistics.mean(len(run.inputs) for run in runs), 1),
        "ours_us": round(whole - calls, 1),
        "calls_us": round(calls, 1),
        "ours_cpu_us": round(busy - busy_calls, 1),
        "calls_cpu_us": round(busy_calls, 1),
        "ours_us_of_each": [round(one[0] - one[1], 1) for one in each],
    }


class Clocks:
    """Seconds within timed calls, by the clock and of the calling thread, and their number. Calls within count once."""

    def __init__(self) -> None:
        self.wall = self.busy = 0.0
        self.calls = 0
        self._within = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed. What the timing itself takes is counted as ours."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return call(*args, **kwargs)
            start, busy = time.perf_counter(), time.thread_time()
            self._within = True
            try:
                return call(*args, **kwargs)
            finally:
                self._within = False
                self.busy += time.thread_time() - busy
                self.wall += time.perf_counter() - start
                self.calls += 1

        return run


def instrument(executable: PipelineExecutable, clocks: Clocks) -> None:
    """Times the compiled executables, those within transfers included."""
    moves = [item.call for item in executable._items if isinstance(item, Move)]
    for transfer in {id(call): call for call in moves if isinstance(call, Transfer)}.values():
        transfer._cuts = [(clocks.timed(cut), places) for cut, places in transfer._cuts]
        transfer._joins = [(clocks.timed(join), pieces) for join, pieces in transfer._joins]
        transfer._reshard = transfer._reshard and clocks.timed(transfer._reshard)
    executable._items = [
        replace(item, call=clocks.timed(item.call)) if isinstance(item, Launch) else item for item in executable._items
    ]


@contextlib.contextmanager
def timed_puts(clocks: Clocks) -> Iterator[None]:
    """Times `jax.device_put` and `jax.block_until_ready` while it lasts."""
    put, wait = jax.device_put, jax.block_until_ready
    jax.device_put, jax.block_until_ready = clocks.timed(put), clocks.timed(wait)
    try:
        yield
    finally:
        jax.device_put, jax.block_until_ready = put, wait


def _rounds(run: Any, args: Any, clocks: Clocks, rounds: int) -> list[tuple[float, float, float, float]]:
    """Seconds of each call: by the clock, in timed calls; of the calling thread, in timed calls."""
    state, batch = args
    for _ in range(5):
        state, loss = jax.block_until_ready(run(state, batch))
    times = []
    gc.collect()
    gc.disable()
    with timed_puts(clocks):
        for _ in range(rounds):
            clocks.wall = clocks.busy = 0.0
            start, busy = time.perf_counter(), time.thread_time()
            state, loss = run(state, batch)
            busy, wall = time.thread_time() - busy, time.perf_counter() - start
            times.append((wall, clocks.wall, busy, clocks.busy))
            jax.block_until_ready((state, loss))
    gc.enable()
    return times


if __name__ == "__main__":
    main()
