"""What becomes of a job when one of its processes is killed, at every point of it, and how it goes on.

    python -m benchmarks run kills "pipeline, 2 x 2, step, process 1"

`examples/pretrain.py` runs in several processes on this machine. Each process in turn is killed by SIGKILL while it
plans, compiles, is in the middle of a step, and saves. Measured is how long the others live then, and what they say
last. The run is then started again, on as many processes and on half of them, and its losses are compared with those
of a run that nothing happened to. Plans and executables are kept in the folder of a run, as a job's would be: one that
is killed while it compiles has the plan of the run before it, one that is killed later its executables, too, and the
run that goes on has what the killed one left.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from alpa_lite.processes import local_launch
from benchmarks.harness import ROOT, Benchmark, Row

SCRIPT = ROOT / "examples" / "pretrain.py"
SMALL = ("--batch", "12", "--seq", "32", "--hidden", "32", "--layers", "1", "--evaluate-batches", "0", "--verbose")
MOMENTS = ("planning", "compiling", "step", "saving")
PROGRAMS = "programs"
"""The folder of JAX's compilation cache, within that of the run. Plans are in `plans`, as the example has it."""

LAYOUTS = {"zero": ((2, 1), (3, 1)), "pipeline": ((2, 2), (4, 1))}
"""Processes and devices of each that a method is killed with."""

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


@functools.lru_cache(1)
def undisturbed(method: str, processes: int, devices: int) -> tuple[Path, dict[int, float]]:
    """The folder of a run that nothing happens to, and its losses."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return folder, resume(folder, processes, devices, *arguments_of(method))


def arguments_of(method: str) -> tuple[str, ...]:
    """Those of the example."""
    return "--method", method, "--steps", "16", "--save-every", "4"


def measure(case: str) -> Row:
    """Kills a process at a moment, and starts the run again; how the others end, and how far the losses are."""
    method, layout, moment, victim = re.fullmatch(r"(\w+), (.*), (\w+), process (\d+)", case).groups()  # type: ignore
    processes, devices = map(int, layout.split(" x "))
    whole, wanted = undisturbed(method, processes, devices)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, whole, moment)
        with job(folder, processes, devices, *arguments_of(method)) as running:
            found = kill(folder, running, int(victim), moment)
        for number in range(processes) if not found.named else ():
            print(f"--- process {number}:", said(folder, number)[-4000:], sep="\n", flush=True)
        again = processes if (int(victim) + MOMENTS.index(moment)) % 2 else max(1, processes // 2)
        difference = farthest(resume(folder, again, devices, *arguments_of(method)), wanted)
    return asdict(found) | {"devices": devices, "again": again, "difference": difference}


BENCHMARKS = (
    Benchmark(
        "kills",
        lambda: [
            f"{method}, {processes} x {devices}, {moment}, process {victim}"
            for method, layouts in LAYOUTS.items()
            for processes, devices in layouts
            for moment in MOMENTS
            for victim in range(processes)
        ],
        measure, versions=True, together=lambda case: ", ".join(case.split(", ")[:2]), limit=1500,
        sources=("alpa_lite/processes", "alpa_lite/checkpoint", "runtime", "examples"), is_open=True,
    ),
)  # fmt: skip
