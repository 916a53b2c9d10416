"""Cases of a benchmark in processes of their own, which are ended at limits of time and memory."""

from __future__ import annotations

import contextlib
import cProfile
import itertools
import json
import os
import pstats
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, Benchmark, Row, environment, get


def run(
    benchmark: Benchmark, cases: Sequence[str], options: Mapping[str, Any], *, part: str = "",
    limit: float | None = None, memory: float | None = None, library: Path | None = None,
) -> Iterator[tuple[str, Row]]:  # fmt: skip
    """Measures cases in processes of their own and yields their rows.

    Args:
      part: of the benchmark; the row itself if empty.
      limit: seconds of a case after which its process is ended. memory: GiB beyond which it is.
      library: a checkout to import the library from, in place of this one.
    """
    environment = {**os.environ, **benchmark.settings(options)}
    for _, group in itertools.groupby(cases, benchmark.together):
        left = list(group)
        while left:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "rows"
                out.touch()
                request = json.dumps([benchmark.name, str(out), part, dict(options), str(library or ""), left])
                process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks", "child", request], cwd=ROOT, env=environment
                )
                for case, row in _watch(process, out, limit or benchmark.limit, memory or benchmark.memory):
                    if left:  # the case that a process does not name is the one that it is at
                        case = case or left[0]
                        left.remove(case)
                        yield case, row


def _watch(process: subprocess.Popen[bytes], out: Path, limit: float, memory: float) -> Iterator[tuple[str, Row]]:
    """The rows of a process as it writes them, and at last, without a case, how it ended."""
    start, load, peak, done, status = time.perf_counter(), os.getloadavg()[0], 0.0, 0, ""
    try:
        while not status:
            if process.poll() is not None:
                status = f"failed: exit code {process.returncode}"
            elif (peak := max(peak, _peak_gib(process.pid))) > memory:
                status = "not finished: memory limit"
            elif time.perf_counter() - start > limit:
                status = "not finished: time limit"
            for line in out.read_text().splitlines()[done:]:
                case, row = json.loads(line)
                seconds, done = time.perf_counter() - start, done + 1
                yield case, {"status": "finished", "wall_seconds": seconds, "load_before": load, "peak_gib": peak} | row
                start, load = time.perf_counter(), os.getloadavg()[0]
            time.sleep(0.0 if status else 0.1)
    finally:
        process.kill()
        process.wait()
    yield "", {"status": status, "wall_seconds": time.perf_counter() - start, "load_before": load, "peak_gib": peak}


def _peak_gib(pid: int) -> float:
    """The most memory that a process had, 0 once it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 2**20 if found else 0.0
    return 0.0


def child(request: str) -> None:
    """Measures the cases of a request of `run` in this process, and writes a line for each."""
    name, out, part, options, library, cases = json.loads(request)
    sys.path[:0] = [library] * bool(library)
    benchmark = get(name)
    prepare(benchmark.devices, quickly=benchmark.quickly)
    measure = benchmark.parts[part] if part else benchmark.measure
    for case in cases:
        row: Row = {}
        try:
            row["value" if part else "row"] = measure(case, **options)
        except Exception as error:
            traceback.print_exc()
            row["row"] = {"status": f"failed: {type(error).__name__}: {error}"[:2000]}
        row = row.get("row", {}) | ({} if "row" in row else row) | {"environment": environment()}
        with Path(out).open("a") as file:
            file.write(json.dumps([case, row], default=float) + "\n")


def prepare(devices: int | None = None, *, quickly: bool = False) -> None:
    """Gives this process virtual CPU devices, or leaves it its accelerators with `devices=0`, before JAX is used.

    With `quickly`, programs are compiled without most optimisations.
    """
    import jax

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if devices != 0:
        jax.config.update("jax_platforms", "cpu")
    if devices:
        jax.config.update("jax_num_cpu_devices", devices)
    if quickly:
        jax.config.update("jax_disable_most_optimizations", True)
        warnings.simplefilter("ignore")


def profiled(make: Callable[[], Any]) -> Any:
    """Calls a function, and prints where its CPU time goes."""
    profiler = cProfile.Profile(time.process_time)
    found = profiler.runcall(make)
    for order, count in (("cumulative", 70), ("tottime", 40)):
        pstats.Stats(profiler).sort_stats(order).print_stats(count)
    return found
