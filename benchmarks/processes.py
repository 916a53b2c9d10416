"""What the runtime costs when the devices of a plan are in several processes.

All runs have four virtual CPU devices in all: in one process, in two of two devices, in four of one. They alternate,
and each is a job of its own on loopback.

*A step.* The same plans, on one mesh and as a pipeline of two stages, with layers so small that dispatching and
communicating are what is timed: seconds from the call until the results are there, and the CPU seconds of all
processes, which other work on the machine changes less. *A task* is a run of an executable in a process; what is not
spent in calls of compiled executables, `jax.device_put` and `jax.block_until_ready` is ours, counted as the time that
the calling thread was running. The program of a transfer is such an executable, though no task. Ours are thus all of
the walk over the instructions, dropping arrays, labels of arrays that cross, and what is done before and after. Reading
the clocks around a call, of which a task has two, takes 1 us in a loop that does nothing else and 3 to 4 us here, where
other threads have emptied the caches; so in every second step each call is timed once more by clocks that count for
nothing, and what these add is taken off. *JAX's calls* are what the calls themselves take: what a bare loop would spend
that makes the same calls with the same arguments and does nothing else.

*A transfer* goes from a stage of two devices to one of two devices of another process, as the runtime moves it, and
beside it, alternating, a bare `ppermute` of the same bytes over the same devices in a program of its own. Both begin
when all devices have met, and are timed where they end.

    python benchmarks/processes.py

writes benchmarks/results/processes.json and processes.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
DEVICES = 4
SPLITS = (1, 2, 4)
LAYERS, WIDTH, MICROBATCHES = 4, 32, 8
MEBIBYTES = (1, 8, 32)
TIME_LIMIT = 300.0
NOTE = (
    "Python a task is that of the slowest process, which has half of the tasks and a part in every transfer.",
    "The aim is 30 us; four processes share two cores here. What the machine does for others moves it as it moves",
    "JAX's own calls, and these two compare.",
)


def main() -> None:
    """Runs the jobs and writes the results; with `--process`, one process of a job."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dry-run", action="store_true", help="print only")
    parser.add_argument("--process", nargs=4, metavar=("WHAT", "NUMBER", "COUNT", "PORT"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.process:
        what, number, count, port = asked.process
        answer = worker(what, int(number), int(count), port, asked.steps)
        print(json.dumps(answer), flush=True)
        return
    rows: dict[str, list[list[dict[str, Any]]]] = {f"steps {count}": [] for count in SPLITS}
    rows["transfers 2"] = []
    for _ in range(asked.repetitions):
        for name, found in rows.items():
            what, count = name.split()
            found.append(job(what, int(count), asked.steps))
            print(name, json.dumps(found[-1][0])[:300], flush=True)
    known = summary(rows)
    text = page(known, asked)
    print(text)
    if not asked.dry_run:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "processes.json").write_text(json.dumps(known, indent=1) + "\n")
        (RESULTS / "processes.md").write_text(text)


def job(what: str, count: int, steps: int) -> list[dict[str, Any]]:
    """What each process of one job measured."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    started = []
    try:
        for number in range(count):
            command = [sys.executable, __file__, "--steps", str(steps), "--process", what]
            command += [str(number), str(count), str(port)]
            started.append(subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True))
        texts = [process.communicate(timeout=TIME_LIMIT)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(process.returncode for process in started):
        raise RuntimeError(f"{what} in {count} processes ended with {[process.returncode for process in started]}")
    return [json.loads(text.splitlines()[-1]) for text in texts]


def worker(what: str, number: int, count: int, port: str, steps: int) -> dict[str, Any]:
    """One process of a job."""
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, number, heartbeat_timeout_seconds=60)
    return timed_steps(steps) if what == "steps" else timed_transfers(steps)


def timed_steps(steps: int) -> dict[str, Any]:
    """Seconds of a step of each plan."""
    import jax

    import alpa_lite
    from benchmarks import pipeline_overhead
    from benchmarks.pipeline_overhead import Clocks, timed_puts

    methods: dict[str, dict[str, Any]] = {
        "one mesh": {"method": alpa_lite.Zero(stage=1)},
        "pipeline": {
            "method": alpa_lite.Pipeline(schedule="1f1b", submesh_shapes=(2, 2)), "num_microbatches": MICROBATCHES
        },
    }  # fmt: skip
    pipeline_overhead.WIDTH = WIDTH
    out = {}
    for name, options in methods.items():
        run = alpa_lite.parallelize(pipeline_overhead.step, **options)
        state, batch = run.place(*pipeline_overhead.arguments_of(LAYERS, MICROBATCHES))
        clocks = Clocks()
        for _ in range(5):
            state, loss = run(state, batch)
        float(loss)
        tasks = 0
        once: Calls = []
        twice: Calls = []
        if name == "pipeline":
            executable = run._executable((state, batch), {})
            tasks, once = instrumented(executable, clocks)
            _, twice = instrumented(executable, Clocks())
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
            "wall": statistics.median(wall[::2]), "cpu": (time.process_time() - busy) / (2 * steps), "tasks": tasks,
            "ours": statistics.median(ours) - cost, "calls": statistics.median(calls[::2]),
            "clocks": cost / max(clocks.calls, 1),
        }  # fmt: skip
    return out


Calls = list[tuple[Any, str, Any]]
"""What calls compiled executables: an object, an attribute of it, and the value that this has."""
ATTRIBUTES = "_items", "_cuts", "_joins", "_reshard", "_call"


def instrumented(executable: Any, clocks: Any) -> tuple[int, Calls]:
    """Times the compiled executables of a pipeline, those of transfers included.

    Returns:
      The runs of this process, and what calls executables now.
    """
    from alpa_lite.runtime.pipeline import Launch, Move
    from alpa_lite.runtime.transfer_multihost import CrossProcessTransfer
    from benchmarks import pipeline_overhead

    pipeline_overhead.instrument(executable, clocks)
    moving = {id(item.call): item.call for item in executable._items if isinstance(item, Move)}
    for call in list(moving.values()):
        if isinstance(call, CrossProcessTransfer):
            call._reshard = call._reshard and clocks.timed(call._reshard)
            call._permute._call = clocks.timed(call._permute._call)
            moving[id(call._permute)] = call._permute
    broadcasts = executable._remote._broadcasts if executable._remote is not None else []
    for one in broadcasts:
        one._call = clocks.timed(one._call)
    objects = executable, *moving.values(), *broadcasts
    calls = [(one, name, getattr(one, name)) for one in objects for name in ATTRIBUTES if hasattr(one, name)]
    return sum(isinstance(item, Launch) for item in executable._items), calls


def timed_transfers(steps: int) -> dict[str, Any]:
    """Seconds of a transfer of each size, as the runtime moves it and as a bare permutation."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    from alpa_lite.cluster import Cluster
    from alpa_lite.ir.layout import Layout, LogicalMesh
    from alpa_lite.ir.program import Submesh
    from alpa_lite.passes.programs.transfers import plan_transfer
    from alpa_lite.runtime.transfer_multihost import CrossProcessTransfer

    devices, half = jax.devices(), DEVICES // 2
    logical, spec = LogicalMesh((half,), ("x",)), PartitionSpec("x")
    source = Mesh(np.array(devices[:half]), ("x",), axis_types=(AxisType.Auto,))
    both = NamedSharding(Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,)), spec)
    here = jax.process_index() == 0
    pairs = [(i, i + half) for i in range(half)]
    out = {}
    meeting = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(both.mesh, PartitionSpec()))
    everyone = jax.jit(lambda: jnp.ones(DEVICES), out_shardings=both)()
    for size in MEBIBYTES:
        rows = size * 2**20 // 4 // 1024 * half  # of 1024 float32: `size` MiB a device
        ends = Submesh(logical, 0), Submesh(logical, half)
        layout = Layout((("x",), ()))
        cluster = Cluster.local(devices)
        plan = plan_transfer((rows, 1024), np.dtype(np.float32), layout, ends[0], layout, ends[1], cluster)
        mover = CrossProcessTransfer([plan], devices)
        start = NamedSharding(source, spec)
        ours = jax.jit(lambda n=rows: jnp.ones((n, 1024), jnp.float32), out_shardings=start)() if here else None
        whole = jax.jit(lambda n=rows: jnp.ones((2 * n, 1024), jnp.float32), out_shardings=both)()
        region = jax.shard_map(
            lambda block: jax.lax.ppermute(block, "x", pairs), mesh=both.mesh, in_specs=spec, out_specs=spec
        )
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


def summary(rows: dict[str, list[list[dict[str, Any]]]]) -> dict[str, Any]:
    """The medians over the repetitions."""
    import jax

    known: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "jax": jax.__version__, "python": platform.python_version(),
        "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "steps": {}, "transfers": {}, "rows": rows,
    }  # fmt: skip
    for count in SPLITS:
        for plan in ("one mesh", "pipeline"):
            found = [[process[plan] for process in job] for job in rows[f"steps {count}"]]
            known["steps"][f"{plan}, {count}"] = {
                "wall_ms": median([1e3 * max(p["wall"] for p in job) for job in found]),
                "cpu_ms": median([1e3 * sum(p["cpu"] for p in job) for job in found]),
                "tasks": [p["tasks"] for p in found[0]],
                "ours_us_a_task": median([1e6 * max(p["ours"] / max(p["tasks"], 1) for p in job) for job in found]),
                "calls_us_a_task": median([1e6 * max(p["calls"] / max(p["tasks"], 1) for p in job) for job in found]),
            }
    for size in (f"{n} MiB" for n in MEBIBYTES):
        each = [job[-1][size] for job in rows["transfers 2"]]
        known["transfers"][size] = {
            "ours_ms": median([1e3 * one["ours"] for one in each]),
            "bare_ms": median([1e3 * one["bare"] for one in each]),
            "ratio": median([one["bare"] / one["ours"] for one in each]),
        }
    return known


def median(values: Sequence[float]) -> float:
    """The median, to four digits."""
    return float(f"{statistics.median(values):.4g}")


def page(known: dict[str, Any], asked: argparse.Namespace) -> str:
    """The results in Markdown."""
    lines = [
        "# The runtime in several processes", "",
        f"`python benchmarks/processes.py --repetitions {asked.repetitions} --steps {asked.steps}`, {known['date']}, "
        f"JAX {known['jax']}, Python {known['python']}, {known['cores']} cores, load {known['load']}: four virtual CPU",
        "devices in all, on loopback with gloo. Medians of repetitions that alternate; the script says of what.",
        "", "## A step", "",
        f"{LAYERS} layers of {WIDTH} x {WIDTH}; the pipeline has two stages of two devices and {MICROBATCHES} "
        "micro-batches. Seconds are of the slowest process, CPU seconds of all.", "",
        "| plan | processes | step | against one process | CPU of all | against one process | Python a task "
        "| JAX's calls a task |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for plan in ("one mesh", "pipeline"):
        one = known["steps"][f"{plan}, 1"]
        for count in SPLITS:
            row = known["steps"][f"{plan}, {count}"]
            each = row["ours_us_a_task"], row["calls_us_a_task"]
            task = " | ".join(f"{one:.1f} us" for one in each) if plan == "pipeline" else " | "
            lines.append(
                f"| {plan} | {count} | {row['wall_ms']:.2f} ms | {row['wall_ms'] / one['wall_ms']:.2f} | "
                f"{row['cpu_ms']:.2f} ms | {row['cpu_ms'] / one['cpu_ms']:.2f} | {task} |"
            )
    lines += ["", *NOTE]
    lines += [
        "", "## A transfer", "",
        "From two devices of one process to two of another, so many bytes from each.", "",
        "| bytes of a device | runtime | bare `ppermute` | bandwidth against bare |", "|--:|--:|--:|--:|",
    ]  # fmt: skip
    for size, row in known["transfers"].items():
        lines.append(f"| {size} | {row['ours_ms']:.2f} ms | {row['bare_ms']:.2f} ms | {row['ratio']:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
