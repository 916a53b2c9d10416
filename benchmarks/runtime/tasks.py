"""The cost of a task of a pipeline, of a step and of a transfer, in one process and in several.

`pipeline_overhead`: the stages are tiny, so that the call of the step is timed: from calling until it returns. In it,
every call of a compiled executable, every `jax.device_put` and every wait is timed by itself; the rest is ours: walking
the instruction lists, checking and placing arguments, the pieces of transfers, flattening and unflattening. It is
divided by the number of tasks, which are runs of executables: one for each stage, micro-batch and direction, and those
before and after. `ours_us` is the median over the calls of microseconds per task that are ours, `calls_us` those of the
jit and `device_put` calls, and `ours_us_of_each` the medians of repetitions with fresh states. The devices of a CPU
compete with the call for its cores; `ours_cpu_us` and `calls_cpu_us` count only the time that the calling thread was
running. (A CPU runs some executables within the call that dispatches them: `calls_us` then has their work.) The cases
with many layers show the use of packing (`passes/stages/packing.py`), with small values in packs and without.

`processes`: all runs have four virtual CPU devices in all, in one process, in two of two devices, in four of one. They
alternate, and each is a job of its own on loopback. *A step*: the same plans, on one mesh and as a pipeline of two
stages, with layers so small that dispatching and communicating are timed: seconds from the call until the results are
there, and the CPU seconds of all processes, which other work on the machine changes less. The program of a transfer is
an executable, though no task. Reading the clocks around a call, of which a task has two, takes 1 us in a loop that does
nothing else and 3 to 4 us here, where other threads have emptied the caches; so in every second step each call is timed
once more by clocks that count for nothing, and what these add is taken off. *JAX's calls* are what a bare loop would
spend that makes the same calls with the same arguments and does nothing else. *A transfer* goes from a stage of two
devices to one of two devices of another process, as the runtime moves it, and, alternating, as a bare `ppermute` of the
same bytes over the same devices in a program of its own. Both begin when all devices have met.
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.ir.program import Submesh
from alpa_lite.passes.programs.transfers import plan_transfer
from alpa_lite.passes.stages import packing
from alpa_lite.runtime.multihost.permute import CrossProcessTransfer
from alpa_lite.runtime.pipeline import Launch, Move, PipelineExecutable
from alpa_lite.runtime.transfer import Transfer
from benchmarks.harness import Benchmark, Row
from gallery.steps import distance, sgd
from tests.processes import driver

MICROBATCHES = 8
SUBMESHES: dict[str, tuple[tuple[int, ...], ...]] = {
    "4 submeshes of 1": ((1,),) * 4,
    "4 submeshes of 2": ((2,),) * 4,
    "submeshes of 2, 2 and 4": ((2,), (2,), (4,)),
}
CASES: dict[str, tuple[str, int, bool]] = {
    **{f"{name}, 8 layers": (name, 8, True) for name in SUBMESHES},
    **{
        f"{name}, 64 layers, {'packs' if packs else 'no packs'}": (name, 64, packs)
        for name in list(SUBMESHES)[:2]
        for packs in (True, False)
    },
}
DEVICES, SPLITS, MEBIBYTES = 4, (1, 2, 4), (1, 8, 32)
PLANS: dict[str, dict[str, Any]] = {
    "one mesh": {"method": alpa_lite.Zero(stage=1)},
    "pipeline": {
        "method": alpa_lite.Pipeline(schedule="1f1b", submesh_shapes=(2, 2)), "num_microbatches": MICROBATCHES
    },
}  # fmt: skip
step = sgd(distance)


def arguments_of(layers: int, width: int) -> tuple[Any, Any]:
    """A state, and a batch of eight examples for each micro-batch."""
    draw = np.random.default_rng(0)
    batch = {name: draw.normal(size=(8 * MICROBATCHES, width)).astype(np.float32) for name in "xy"}
    return [draw.normal(size=(width, width)).astype(np.float32) for _ in range(layers)], batch


# -- clocks -----------------------------------------------------------------------------------------------------------


class Clocks:
    """Seconds within timed calls, by the clock and of the calling thread, and their number. Calls within count once."""

    def __init__(self) -> None:
        self.wall = self.busy = 0.0
        self.calls = 0
        self._within = False

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed. The time that the timing itself takes is counted as ours."""

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


Calls = list[tuple[Any, str, Any]]
"""The callers of compiled executables: an object, an attribute of it, and the value that this has."""
ATTRIBUTES = "_items", "_cuts", "_joins", "_reshard", "_call"


def instrument(executable: PipelineExecutable, clocks: Clocks) -> Calls:
    """Times the compiled executables of a pipeline, those within transfers and broadcasts included."""
    moving: dict[int, Any] = {id(item.call): item.call for item in executable._items if isinstance(item, Move)}
    for call in list(moving.values()):
        if isinstance(call, Transfer):
            call._cuts = [(clocks.timed(cut), places) for cut, places in call._cuts]
            call._joins = [(clocks.timed(join), pieces) for join, pieces in call._joins]
        if isinstance(call, (Transfer, CrossProcessTransfer)):
            call._reshard = call._reshard and clocks.timed(call._reshard)
        if isinstance(call, CrossProcessTransfer):
            call._call = clocks.timed(call._call)
    executable._items = [
        replace(item, call=clocks.timed(item.call)) if isinstance(item, Launch) else item for item in executable._items
    ]
    broadcasts = executable._remote._broadcasts
    for one in broadcasts:
        one._call = clocks.timed(one._call)
    objects = executable, *moving.values(), *broadcasts
    return [(one, name, getattr(one, name)) for one in objects for name in ATTRIBUTES if hasattr(one, name)]


@contextlib.contextmanager
def timed_puts(clocks: Clocks) -> Iterator[None]:
    """Times `jax.device_put` and `jax.block_until_ready` while it lasts."""
    put, wait = jax.device_put, jax.block_until_ready
    jax.device_put, jax.block_until_ready = clocks.timed(put), clocks.timed(wait)
    try:
        yield
    finally:
        jax.device_put, jax.block_until_ready = put, wait


# -- tasks in one process ---------------------------------------------------------------------------------------------


def measure(case: str, repetitions: int = 5, rounds: int = 100) -> Row:
    """Microseconds per task (the module's docstring says of what)."""
    name, layers, packs = CASES[case]
    shapes = SUBMESHES[name]
    method = alpa_lite.Pipeline(num_stages=len(shapes), schedule="1f1b", submesh_shapes=shapes, remat="none")
    run = alpa_lite.parallelize(step, method=method, num_microbatches=MICROBATCHES)
    args = arguments_of(layers, 8)
    if not packs:
        packing.FEWEST = 1_000_000  # a buffer for every value, in this process
    executable = run.prepare_call(args, {})[1]
    assert isinstance(executable, PipelineExecutable)
    executable.compiled_executables()
    clocks = Clocks()
    runs = [item.source for item in executable._items if isinstance(item, Launch)]
    transfers = sum(isinstance(item, Move) for item in executable._items)
    instrument(executable, clocks)
    found = [_rounds(run, run.place(*args), clocks, rounds) for _ in range(repetitions)]
    each = [[1e6 * statistics.median(column) / len(runs) for column in zip(*times, strict=True)] for times in found]
    whole, calls, busy, busy_calls = (statistics.median(column) for column in zip(*each, strict=True))
    return {
        "tasks": len(runs), "transfers": transfers,
        "arguments_per_task": round(statistics.mean(len(run.inputs) for run in runs), 1),
        "ours_us": round(whole - calls, 1), "calls_us": round(calls, 1), "ours_cpu_us": round(busy - busy_calls, 1),
        "calls_cpu_us": round(busy_calls, 1), "ours_us_of_each": [round(one[0] - one[1], 1) for one in each],
    }  # fmt: skip


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


# -- several processes ------------------------------------------------------------------------------------------------


def in_processes(case: str, repetitions: int = 5, steps: int = 50) -> Row:
    """Jobs of all numbers of processes in turn, and the medians over the repetitions."""
    rows: dict[str, list[list[Row]]] = {f"steps {count}": [] for count in SPLITS} | {"transfers 2": []}
    for _ in range(repetitions):
        for name, found in rows.items():
            what, count = name.split()
            found.append(job(what, int(count), steps))
    return summary(rows) | {"rows": rows}


def job(what: str, count: int, steps: int) -> list[Row]:
    """The answers of the processes of one job."""
    ended = driver.run(__file__, count, DEVICES // count, what, str(steps), seconds=300.0, env={"OMP_NUM_THREADS": "1"})
    if any(one.code for one in ended):
        raise RuntimeError(
            f"{what} in {count} processes ended with {[one.code for one in ended]}: {ended[0].text[-900:]}"
        )
    return [json.loads(one.text.splitlines()[-1]) for one in ended]


def timed_steps(steps: int) -> Row:
    """Seconds of a step of each plan."""
    out = {}
    for name, options in PLANS.items():
        run = alpa_lite.parallelize(step, **options)
        state, batch = run.place(*arguments_of(4, 32))
        clocks = Clocks()
        for _ in range(5):
            state, loss = run(state, batch)
        float(loss)
        executable = run.prepare_call((state, batch), {})[1]
        is_pipeline = isinstance(executable, PipelineExecutable)
        once: Calls = instrument(executable, clocks) if is_pipeline else []
        twice: Calls = instrument(executable, Clocks()) if is_pipeline else []
        wall, ours, calls, more = [], [], [], []
        busy = time.process_time()
        with timed_puts(clocks):
            for number in range(2 * steps):
                for place, attribute, value in (once, twice)[number % 2]:
                    setattr(place, attribute, value)
                clocks.busy, clocks.calls = 0.0, 0
                start, own = time.perf_counter(), time.thread_time()
                state, loss = run(state, batch)
                (ours, more)[number % 2].append(time.thread_time() - own - clocks.busy)
                calls.append(clocks.busy)
                jax.block_until_ready(loss)
                wall.append(time.perf_counter() - start)
        float(loss)
        cost = statistics.median(more) - statistics.median(ours)
        out[name] = {
            "wall": statistics.median(wall[::2]), "cpu": (time.process_time() - busy) / (2 * steps),
            "tasks": sum(isinstance(item, Launch) for item in executable._items) if is_pipeline else 0,
            "ours": statistics.median(ours) - cost, "calls": statistics.median(calls[::2]),
            "clocks": cost / max(clocks.calls, 1),
        }  # fmt: skip
    return out


def timed_transfers(steps: int) -> Row:
    """Seconds of a transfer of each size, as the runtime moves it and as a bare permutation."""
    devices, half = jax.devices(), DEVICES // 2
    logical, spec, layout = LogicalMesh((half,), ("x",)), PartitionSpec("x"), Layout((("x",), ()))
    source, both = (
        NamedSharding(Mesh(np.array(some), ("x",), axis_types=(AxisType.Auto,)), spec)
        for some in (devices[:half], devices)
    )
    here = jax.process_index() == 0
    pairs = [(i, i + half) for i in range(half)]
    meeting = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(both.mesh, PartitionSpec()))
    everyone = jax.jit(lambda: jnp.ones(DEVICES), out_shardings=both)()
    region = jax.shard_map(
        lambda block: jax.lax.ppermute(block, "x", pairs), mesh=both.mesh, in_specs=spec, out_specs=spec
    )
    out = {}
    for size in MEBIBYTES:
        rows = size * 2**20 // 4 // 1024 * half  # of 1024 float32: `size` MiB a device
        ends, cluster = (Submesh(logical, 0), Submesh(logical, half)), Cluster.local(devices)
        plan = plan_transfer((rows, 1024), np.dtype(np.float32), layout, ends[0], layout, ends[1], cluster)
        mover = CrossProcessTransfer([plan], devices)
        ours = jax.jit(lambda n=rows: jnp.ones((n, 1024), jnp.float32), out_shardings=source)() if here else None
        whole = jax.jit(lambda n=rows: jnp.ones((2 * n, 1024), jnp.float32), out_shardings=both)()
        bare = jax.jit(region).lower(whole).compile()
        seconds: dict[str, list[float]] = {"ours": [], "bare": []}
        for _ in range(max(10, steps // 2)):
            for name, call in (("ours", lambda m=mover, a=ours: m([a])), ("bare", lambda b=bare, a=whole: b(a))):
                jax.block_until_ready(meeting(everyone))
                begin = time.perf_counter()
                jax.block_until_ready([one for one in jax.tree.leaves(call()) if one is not None])
                seconds[name].append(time.perf_counter() - begin)
        out[f"{size} MiB"] = {name: statistics.median(each[3:]) for name, each in seconds.items()}
    return out


def summary(rows: dict[str, list[list[Row]]]) -> Row:
    """The medians over the repetitions."""
    out: Row = {"steps": {}, "transfers": {}}
    for plan, count in ((plan, count) for count in SPLITS for plan in PLANS):
        found = [[process[plan] for process in job] for job in rows[f"steps {count}"]]
        out["steps"][f"{plan}, {count}"] = {
            "wall_ms": median([1e3 * max(p["wall"] for p in job) for job in found]),
            "cpu_ms": median([1e3 * sum(p["cpu"] for p in job) for job in found]),
            "tasks": [p["tasks"] for p in found[0]],
            **{
                f"{part}_us_a_task": median([1e6 * max(p[part] / max(p["tasks"], 1) for p in job) for job in found])
                for part in ("ours", "calls")
            },
        }
    for size in (f"{n} MiB" for n in MEBIBYTES):
        each = [job[-1][size] for job in rows["transfers 2"]]
        ms = {f"{name}_ms": median([1e3 * one[name] for one in each]) for name in ("ours", "bare")}
        out["transfers"][size] = ms | {"ratio": median([one["bare"] / one["ours"] for one in each])}
    return out


def median(values: Sequence[float]) -> float:
    """The median, to four digits."""
    return float(f"{statistics.median(values):.4g}")


BENCHMARKS = (
    Benchmark(
        "pipeline_overhead", lambda: CASES, measure, devices=8, versions=True, sources=("runtime", "alpa_lite/_jax")
    ),
    Benchmark(
        "processes", lambda: ["four devices"], in_processes, limit=3600,
        sources=("runtime", "alpa_lite/_jax", "alpa_lite/processes"),
    ),
)  # fmt: skip


def main() -> None:
    """One process of a job."""
    number, count, devices, port, what, steps = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(count) > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number), heartbeat_timeout_seconds=60)
    print(json.dumps((timed_steps if what == "steps" else timed_transfers)(int(steps))), flush=True)


if __name__ == "__main__":
    main()
