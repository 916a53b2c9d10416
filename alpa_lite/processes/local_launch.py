"""Launches the processes of a script on this machine, as a cluster's scheduler would: for development only.

`alpa-lite launch -n 4 --devices-per-process 2 -- train.py` tries a script for many machines on one. Each process gets
the variables that SLURM sets for its tasks and `JAX_COORDINATOR_ADDRESS`, so that a plain
`jax.distributed.initialize()` works in the script, here as there.

All processes are ended when one fails, when the launcher gets SIGINT or SIGTERM (which it forwards first), and when the
launcher itself is killed, for which Linux sends each process SIGKILL (`PR_SET_PDEATHSIG`). Each process leads a process
group of its own, so that its descendants are ended with it, except in the last case.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from alpa_lite.errors import OptionError

HOST = "127.0.0.1"
"""The address of the coordinator. All processes are on this machine."""

_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):  # else it has been killed meanwhile
    os.execvp(sys.argv[2], sys.argv[2:])
"""
"""The program that becomes that of a process. Only Linux has PR_SET_PDEATHSIG.

`preexec_fn` would do this between fork and exec, where no Python code is safe in a process with threads.
"""

_POLL_SECONDS = 0.02
_FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OTHER_LAUNCHERS = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "JAX_COORDINATOR_", "JAX_LOCAL_DEVICE_IDS")
"""Prefixes of variables of a job that this launcher runs in, which do not hold for its processes."""


def launch(
    command: Sequence[str],
    *,
    echo: Callable[..., None],
    processes: int = 2,
    devices_per_process: int = 1,
    platform: str | None = None,
    port: int | None = None,
    grace: float = 10.0,
) -> int:
    """Runs a command in several processes that `jax.distributed.initialize()` joins; waits for all of them.

    Args:
      command: a Python script and its arguments; `-m` and a module; or any program and its arguments.
      echo: writes a line, of a process with its number in front; with `err=True` to standard error. As `typer.echo`.
      processes: their number.
      devices_per_process: virtual devices of the CPU, or the share of this machine's accelerators.
      platform: that JAX shall use, such as "cpu"; by default the one that JAX finds.
      port: of the coordinator, which process 0 starts; by default one that is free.
      grace: seconds between the signal that asks a process to end and SIGKILL.

    Returns:
      0 if all processes ended with 0; else the exit code of the first that did not, 128 and the signal's number if a
      signal ended it. The others are ended then.

    Raises:
      OptionError: there is no such script, or the port is in use.
    """
    argv, address = resolve_command(command), f"{HOST}:{find_free_port(port)}"
    group = _ProcessGroup(grace, echo)
    with group.terminated_at_exit():
        for number in range(processes):
            group.start(argv, make_environment(os.environ, number, processes, devices_per_process, platform, address))
        return group.wait()


def resolve_command(command: Sequence[str]) -> list[str]:
    """Returns the command that a process runs: scripts and modules by this Python, unbuffered.

    Raises:
      OptionError: there is no such script or program.
    """
    if not command:
        raise OptionError("there is no script to launch; write alpa-lite launch -n 4 -- SCRIPT ARGS")
    first = command[0]
    if first == "-m" or first.endswith(".py"):
        if first != "-m" and not Path(first).is_file():
            raise OptionError(f"the script {first!r} does not exist; name a Python file, or -m and a module")
        return [sys.executable, "-u", *command]
    if shutil.which(first) is None:
        raise OptionError(
            f"{first!r} is not a Python file, and no program of that name is on the PATH; name a script, or -m "
            "and a module"
        )
    return list(command)


def find_free_port(wanted: int | None = None) -> int:
    """Returns a port of this machine that nobody listens on: the wanted one, or any.

    Raises:
      OptionError: the wanted one is in use.
    """
    with socket.socket() as listener:
        try:
            listener.bind((HOST, wanted or 0))
        except OSError as error:
            raise OptionError(
                f"port {wanted} cannot be used: {error.strerror}; give another --port, or none to take a free one"
            ) from error
        return int(listener.getsockname()[1])


def make_environment(
    base: Mapping[str, str], number: int, processes: int, devices: int, platform: str | None, address: str
) -> dict[str, str]:
    """Returns the environment of one process, with the variables that stock JAX reads.

    Without `JAX_LOCAL_DEVICE_IDS` JAX would give each task of a SLURM job one accelerator. CPU devices are virtual, and
    their number is each process's own.
    """
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(processes),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(number * devices, (number + 1) * devices))),
        "JAX_NUM_CPU_DEVICES": str(devices),
    } | ({} if platform is None else {"JAX_PLATFORMS": platform})
    return {name: value for name, value in base.items() if not name.startswith(_OTHER_LAUNCHERS)} | job


class _ProcessGroup:
    """The processes of one launch."""

    def __init__(self, grace: float, echo: Callable[..., None]) -> None:
        self._grace, self._echo, self._echo_lock = grace, echo, threading.Lock()
        self._report = functools.partial(echo, err=True)
        self._all: list[subprocess.Popen[bytes]] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}  # by number; not reaped, so that the id stays theirs
        self._printers: list[threading.Thread] = []
        self._kill_at = math.inf  # when processes that were asked to end get SIGKILL
        self._signalled = False

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts the next process, and threads that echo its lines with its number in front."""
        number = len(self._all)
        if sys.platform.startswith("linux"):
            argv = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]
        process = subprocess.Popen(
            argv, env=env, process_group=0, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._all.append(process)
        self._running[number] = process
        for stream in (process.stdout, process.stderr):
            given = (f"[{number}] ", stream, stream is process.stderr)
            self._printers.append(threading.Thread(target=self._echo_lines, args=given, daemon=True))
            self._printers[-1].start()

    def wait(self) -> int:
        """Waits until all processes have ended. Returns the exit code of the launch."""
        first = 0
        while self._running:
            for number, process in [*self._running.items()]:
                found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None:
                    continue
                del self._running[number]
                code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
                if code == 0:
                    continue
                how = f"ended with exit code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
                self._report(f"process {number} {how}")
                if first == 0:
                    first = code if code > 0 else 128 - code
                    if self._running and not self._signalled:
                        self._report(f"ending the other processes: {', '.join(map(str, self._running))}")
                        self._signal(signal.SIGTERM)
            if time.monotonic() > self._kill_at and self._running:
                still = ", ".join(map(str, self._running))
                self._report(f"killing what did not end within {self._grace:g} s: {still}")
                self._signal(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        return first

    @contextlib.contextmanager
    def terminated_at_exit(self) -> Iterator[None]:
        """Forwards SIGINT and SIGTERM while its body runs, then kills the remaining processes, descendants too."""
        before = {one: signal.signal(one, self._forward) for one in _FORWARDED_SIGNALS}
        try:
            yield
        finally:
            for process in self._all:
                _signal_group(process, signal.SIGKILL)
                process.wait()
            for thread in self._printers:
                thread.join(timeout=5.0)
            for one, handler in before.items():
                signal.signal(one, handler)

    def _forward(self, number: int, _: Any) -> None:
        """Sends a signal of the launcher to every process; a second one kills them."""
        again, self._signalled = self._signalled, True
        self._report(f"{signal.Signals(number).name} {'again: killing' if again else 'forwarded to'} all processes")
        self._signal(signal.SIGKILL if again else signal.Signals(number))

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal to the processes that run. They have the time of grace to end, unless it is SIGKILL."""
        self._kill_at = math.inf if number == signal.SIGKILL else time.monotonic() + self._grace
        for process in self._running.values():
            _signal_group(process, number)

    def _echo_lines(self, prefix: str, stream: IO[bytes], err: bool) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                with self._echo_lock:
                    self._echo(f"{prefix}{text}", err=err)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Sends a signal to a process that was not waited for, and to its descendants in its group."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
