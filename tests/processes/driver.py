"""Starts the processes of one program on this machine, each with virtual CPU devices, and ends them whatever happens.

A script of `tests/processes/` begins with `worker.start()` and prints what the test looks for. All processes run it;
they find each other on a free port of the loopback interface.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from alpa_lite.processes.local_launch import find_free_port

ROOT = Path(__file__).parents[2]

LONGEST = 500.0
"""Seconds after which processes are killed. It bounds a hang alone: pytest's own limit of a test is 600 s."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its exit status, None if its time was up, and what it wrote."""

    code: int | None
    text: str


def run(
    script: str, processes: int, devices: int, *args: str, seconds: float = LONGEST, env: dict[str, str] | None = None
) -> list[Ended]:
    """Runs a script of this folder in processes of this many devices each, and kills those that take too long.

    `args` come after those of `worker.start`.
    """
    port = find_free_port()
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **(env or {})}
    settings.pop("XLA_FLAGS", None)
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started: list[subprocess.Popen[bytes]] = []
        paths = [Path(folder) / f"{number}.txt" for number in range(processes)]
        try:
            for number, path in enumerate(paths):
                own = [sys.executable, Path(__file__).parent / script, *map(str, (number, processes, devices, port))]
                file = stack.enter_context(path.open("wb"))
                started.append(subprocess.Popen(
                    [*own, *args], stdout=file, stderr=subprocess.STDOUT, env=settings, cwd=folder,
                    start_new_session=True,
                ))  # fmt: skip
            codes = [_wait(process, until) for process in started]
        finally:
            for process in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return [Ended(code, path.read_text(errors="replace")) for code, path in zip(codes, paths, strict=True)]


def agreed(script: str, processes: int, devices: int, *args: str) -> list[str]:
    """What each process wrote; raises AssertionError unless all have ended well."""
    ended = run(script, processes, devices, *args)
    wrong = [f"--- process {n}: {one.code}\n{one.text[-3000:]}" for n, one in enumerate(ended) if one.code != 0]
    assert not wrong, "\n".join(wrong)
    return [one.text for one in ended]


def launch(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs the text of a script in two processes by `alpa-lite launch`."""
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-c", "from alpa_lite.cli import main; main()", "launch", "-n", "2", "--platform", "cpu"]
    return subprocess.run(
        [*command, *options, "--", "script.py"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        capture_output=True, timeout=LONGEST,
    )  # fmt: skip


def _wait(process: subprocess.Popen[bytes], until: float) -> int | None:
    try:
        return process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
