"""Cases of a benchmark in processes of their own with limits, and where the CPU time of one goes."""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def run(script: str, arguments: Sequence[str], limit: float, memory: float) -> dict[str, Any]:
    """Runs `script` with `arguments` and `--child FILE`, to which it writes its row as JSON.

    Args:
      limit: seconds after which it is ended; memory: GiB beyond which it is.

    Returns:
      The row, with `status` ("finished", or why it was ended or failed), `wall_seconds`, `load_before`, and the most
      memory that was seen as `peak_gib` unless the row has one.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        start, load = time.perf_counter(), os.getloadavg()[0]
        with log.open("w") as stream:
            command = [sys.executable, script, *arguments, "--child", str(out)]
            process = subprocess.Popen(command, stdout=stream, stderr=stream)
            status, peak = _watch(process, start + limit, memory)
        seconds = time.perf_counter() - start
        row = json.loads(out.read_text()) if out.exists() else {}
        if process.returncode and status == "finished":
            status = f"failed: {' '.join(log.read_text().strip().splitlines()[-1:])}"
        return {"status": status, "wall_seconds": seconds, "load_before": load, "peak_gib": peak} | row


def _watch(process: subprocess.Popen[bytes], end: float, memory: float) -> tuple[str, float]:
    """Waits for a process: "finished", or why it was ended, and the most memory seen (GiB)."""
    peak = 0.0
    while process.poll() is None:
        try:
            text = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            text = ""
        most = [int(line.split()[1]) / 2**20 for line in text.splitlines() if line.startswith("VmHWM")]
        peak = max(peak, *most, 0.0)
        over = "time limit" if time.perf_counter() > end else "memory limit" if peak > memory else None
        if over:
            process.kill()
            process.wait()
            return f"not finished: {over}", peak
        time.sleep(0.25)
    return "finished", peak


def profiled(make: Callable[[], T]) -> T:
    """What `make` returns; prints where its CPU time goes."""
    profiler = cProfile.Profile(time.process_time)
    found = profiler.runcall(make)
    for order, count in (("cumulative", 70), ("tottime", 40)):
        pstats.Stats(profiler).sort_stats(order).print_stats(count)
    return found
