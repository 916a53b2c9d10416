"""What becomes of a job when one of its processes is killed, at every point of it, and how it goes on.

    PYTHONPATH=. python benchmarks/kills.py [--processes 2 3] [--devices 2] [--method zero] [--moments ...]

`examples/pretrain.py` runs in several processes on this machine. Each process in turn is killed by SIGKILL while it
plans, compiles, is in the middle of a step, and saves. Measured is how long the others live then, and what they say
last. The run is then started again, on as many processes and on half of them, and its losses are compared with those
of a run that nothing happened to. Plans and executables are kept in the folder of a run, as a job's would be: one that
is killed while it compiles has the plan of the run before it, one that is killed later its executables, too, and the
run that goes on has what the killed one left.

Writes benchmarks/results/kills_METHOD.json after every process that is killed, and kills_METHOD.md, in place of rows of
the same numbers, moments and version of JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alpa_lite.processes import local_launch
from benchmarks import kept_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCRIPT = ROOT / "examples" / "pretrain.py"
SMALL = ("--batch", "12", "--seq", "32", "--hidden", "32", "--layers", "1", "--evaluate-batches", "0", "--verbose")
MOMENTS = ("planning", "compiling", "step", "saving")
PROGRAMS = "programs"
"""The folder of JAX's compilation cache, within that of the run. Plans are in `plans`, as the example has it."""

HEARTBEAT = 5
"""Seconds; JAX's own default is 100."""
LIMIT = HEARTBEAT + 10
"""Seconds that survivors may live, on a busy machine."""


@dataclass(frozen=True)
class Killed:
    """What became of a job.

    Attributes:
      processes, victim, moment: how many there were, which was killed, and when.
      seconds: that the last survivor lived.
      codes: exit codes of the survivors, negative for signals.
      named: whether each survivor's output names the victim.
    """

    processes: int
    victim: int
    moment: str
    seconds: float
    codes: list[int]
    named: bool


@contextlib.contextmanager
def job(folder: Path, processes: int, devices: int, *arguments: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of a run; each writes its output to `N.log` in the folder. Those that are left are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    address = f"{local_launch.HOST}:{local_launch.find_free_port()}"
    base = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", JAX_COMPILATION_CACHE_DIR=str(folder / PROGRAMS))
    base |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    command = [sys.executable, "-u", str(SCRIPT), "--folder", str(folder), *SMALL, *arguments]
    command += ["--heartbeat-timeout", str(HEARTBEAT), "--join-timeout", "240"]
    running = []
    try:
        for number in range(processes):
            env = local_launch.make_environment(base, number, processes, devices, "cpu", address)
            with (folder / f"{number}.log").open("wb") as log:
                running.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def said(folder: Path, number: int) -> str:
    """The output of a process."""
    return (folder / f"{number}.log").read_text(errors="replace")


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step; of one that was computed twice, the second."""
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    found = [json.loads(line) for line in lines]
    return {line["step"]: line["loss"] for line in found if "event" not in line}


def has_come(moment: str, folder: Path, victim: int, before: int = 0) -> Callable[[], bool]:
    """Whether a process is at a moment: its log says so, or the files of the run do.

    Args:
      before: steps that were done when the run was started.
    """
    checkpoints = folder / "checkpoints"
    match moment:
        case "planning":
            return lambda: "has joined" in said(folder, victim)
        case "compiling":
            return lambda: re.search(r"^planned train_step", said(folder, victim), re.MULTILINE) is not None
        case "step":
            return lambda: max(losses(folder), default=-1) >= before + 3
        case "saving":
            return lambda: checkpoints.is_dir() and any(not p.name.isdigit() for p in checkpoints.iterdir())
    raise ValueError(moment)


def wait_for(what: Callable[[], bool], running: list[subprocess.Popen[bytes]], seconds: float, folder: Path) -> None:
    """Waits until something is so, as long as all processes run."""
    until = time.monotonic() + seconds
    while not what():
        ended = [n for n, process in enumerate(running) if process.poll() is not None]
        if ended or time.monotonic() > until:
            number = ended[0] if ended else 0
            raise RuntimeError(f"process {number} ended too soon, or nothing came:\n{said(folder, number)[-3000:]}")
        time.sleep(0.005)


def kill(folder: Path, running: list[subprocess.Popen[bytes]], victim: int, moment: str, before: int = 0) -> Killed:
    """Kills one process at a moment, and waits for the others; those that live longer than the limit count as such."""
    wait_for(has_come(moment, folder, victim, before), running, 240, folder)
    running[victim].send_signal(signal.SIGKILL)
    start = time.monotonic()
    others = [n for n in range(len(running)) if n != victim]
    while any(running[n].poll() is None for n in others) and time.monotonic() - start < 4 * LIMIT:
        time.sleep(0.02)
    seconds = time.monotonic() - start
    codes = [running[n].poll() for n in others]
    named = all(names(said(folder, n), victim) for n in others)
    return Killed(len(running), victim, moment, seconds, [0 if code is None else code for code in codes], named)


def names(text: str, victim: int) -> bool:
    """Whether the last lines of a process say that this one is lost; JAX calls process 0 the leader.

    The traceback of a step that fails at the same time may come after them.
    """
    last = text[-12_000:]
    if victim == 0 and "Either the leader task was preempted/died" in last:
        return True
    return (
        re.search(rf"Task {victim} heartbeat timeout|stopped sending heartbeats\):\s+(.*task:)?{victim}\b", last)
        is not None
    )


def prepare(folder: Path, whole: Path, moment: str) -> None:
    """Gives a run what one before it left, as far as it is to come quickly to the moment at which it is killed."""
    left = {"planning": [], "compiling": ["plans"], "step": ["plans", PROGRAMS], "saving": ["plans", PROGRAMS]}
    for name in left[moment]:
        shutil.copytree(whole / name, folder / name)


def resume(folder: Path, processes: int, devices: int, *arguments: str) -> dict[int, float]:
    """Runs to the end; the losses."""
    with job(folder, processes, devices, *arguments) as running:
        codes = [process.wait(timeout=500) for process in running]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}:\n{said(folder, 0)[-3000:]}")
    return losses(folder)


def farthest(found: dict[int, float], wanted: dict[int, float]) -> float:
    """The largest relative difference of two curves; infinite if one has other steps."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(abs(found[step] - wanted[step]) / abs(wanted[step]) for step in wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--method", default="zero")
    parser.add_argument("--victims", type=int, nargs="+", help="by default each process in turn")
    parser.add_argument("--moments", nargs="+", choices=MOMENTS, default=MOMENTS)
    options = parser.parse_args()
    arguments = ("--method", options.method, "--steps", "16", "--save-every", "4")
    with tempfile.TemporaryDirectory() as name:
        for processes in options.processes:
            whole = Path(name) / f"whole{processes}"
            wanted = resume(whole, processes, options.devices, *arguments)
            for moment in options.moments:
                for victim in options.victims or range(processes):
                    folder = Path(name) / f"{processes}{victim}{moment}"
                    prepare(folder, whole, moment)
                    with job(folder, processes, options.devices, *arguments) as running:
                        found = kill(folder, running, victim, moment)
                    for number in range(processes) if not found.named else ():
                        print(f"--- process {number}:", said(folder, number)[-4000:], sep="\n", flush=True)
                    again = processes if (victim + MOMENTS.index(moment)) % 2 else max(1, processes // 2)
                    difference = farthest(resume(folder, again, options.devices, *arguments), wanted)
                    row = asdict(found) | {"devices": options.devices, "again": again, "difference": difference}
                    print(row, flush=True)
                    keep(row, options.method)
                    shutil.rmtree(folder)


def keep(row: dict[str, Any], method: str) -> None:
    """Adds a row to the results, or replaces it, and writes the page. Several versions of JAX may run at once."""
    import jax

    path = RESULTS / f"kills_{method}.json"
    with kept_rows.changed(path, lambda rows: page(rows, method)) as rows:
        version = rows.setdefault(f"jax {jax.__version__}", [])
        version[:] = sorted([old for old in version if _place(old) != _place(row)] + [row], key=_place)


def _place(row: dict[str, Any]) -> tuple[int, int, int, int]:
    return row["processes"], row["devices"], MOMENTS.index(row["moment"]), row["victim"]


def page(rows: dict[str, list[dict[str, Any]]], method: str) -> str:
    """The results as tables."""
    about = (
        f"`benchmarks/kills.py --method {method}`, heartbeat_timeout_seconds={HEARTBEAT}. The losses are compared with "
        "those of a run that nothing happened to, on as many processes as at first: the farthest is relative."
    )
    lines = ["# Killed processes", "", *textwrap.wrap(about, 118)]
    for version, found in rows.items():
        lines += ["", f"## {version}", ""]
        lines.append(
            "| processes x devices | killed | while | the others end after | they name it | started again on | "
            "farthest loss |"
        )
        lines.append("|---|---|---|---|---|---|---|")
        lines += [
            f"| {row['processes']} x {row['devices']} | {row['victim']} | {row['moment']} | {row['seconds']:.1f} s | "
            f"{'yes' if row['named'] else 'no'} | {row['again']} | {row['difference']:.1e} |"
            for row in found
        ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
