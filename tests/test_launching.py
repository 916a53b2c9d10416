"""`alpa-lite launch` and `alpa_lite.initialize` with real processes: what they print, how they end, what is left."""

import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from alpa_lite.errors import OptionError
from alpa_lite.processes import initialization, local_launch
from tests.processes import driver

launch = functools.partial(local_launch.launch, echo=typer.echo)

ROOT = Path(__file__).parents[1]
SLEEPER = """
import os, pathlib, signal, subprocess, sys, time
number = os.environ["SLURM_PROCID"]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(f"{number}.tmp").write_text(f"{os.getpid()} {child.pid}")
pathlib.Path(f"{number}.tmp").rename(f"{number}.pids")
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for scripts, which leave the ids of processes there; those are killed at last."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for pid in pids(tmp_path):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> list[int]:
    return [int(word) for file in folder.glob("*.pids") for word in file.read_text().split()]


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "not in time"
        time.sleep(0.02)


def ended(folder: Path) -> bool:
    return not any(map(alive, pids(folder)))


def launcher(folder: Path, count: int, body: str, grace: float = 120.0) -> subprocess.Popen[str]:
    """A process that launches a script, without the command line, whose import of JAX takes a second."""
    (folder / "script.py").write_text(body)
    call = f"launch(['script.py'], echo=typer.echo, processes={count}, grace={grace})"
    code = f"import sys, typer; from alpa_lite.processes.local_launch import launch; sys.exit({call})"
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_each_process_has_its_number_its_devices_and_its_lines(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (scripts / "script.py").write_text(
        "import os, sys\n"
        "names = ('SLURM_PROCID', 'SLURM_NTASKS', 'JAX_NUM_CPU_DEVICES', 'JAX_LOCAL_DEVICE_IDS', 'JAX_PLATFORMS')\n"
        "print(*map(os.environ.get, names), *sys.argv[1:])\n"
        "print('OMPI_COMM_WORLD_SIZE' in os.environ, file=sys.stderr)\n"
    )
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    assert launch(["script.py", "--x"], processes=2, devices_per_process=3, platform="cpu") == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] 0 2 3 0,1,2 cpu --x", "[1] 1 2 3 3,4,5 cpu --x"]
    assert sorted(err.splitlines()) == ["[0] False", "[1] False"]


def test_the_first_failure_ends_all_with_its_exit_code(scripts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    ends = """
while number == "1" and len([*pathlib.Path().glob("*.pids")]) < 3:
    time.sleep(0.02)
sys.exit(7) if number == "1" else time.sleep(600)
"""
    (scripts / "script.py").write_text(SLEEPER.replace("number =", stubborn + "number =", 1) + ends)
    start = time.monotonic()
    assert launch(["script.py"], processes=3, grace=0.5) == 7
    assert time.monotonic() - start < 200
    assert len(pids(scripts)) == 6
    eventually(lambda: ended(scripts))
    err = capfd.readouterr().err
    assert "process 1 ended with exit code 7\nending the other processes: 0, 2\n" in err
    assert "killing what did not end within 0.5 s: 0, 2\n" in err


def test_a_signal_is_handed_on_and_processes_may_end_well(scripts: Path) -> None:
    asked = "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(0)))\n"
    one = launcher(scripts, 2, SLEEPER.replace("number =", asked + "number =", 1) + "time.sleep(600)\n")
    try:
        eventually(lambda: len(pids(scripts)) == 4)
        one.send_signal(signal.SIGTERM)
        out, err = one.communicate(timeout=120)
    finally:
        one.kill()
    assert one.returncode == 0, err
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    eventually(lambda: ended(scripts))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process of its parent's end")
def test_processes_die_with_a_launcher_that_is_killed(scripts: Path) -> None:
    one = launcher(scripts, 2, SLEEPER + "time.sleep(600)\n")
    try:
        eventually(lambda: len(pids(scripts)) == 4)
    finally:
        one.kill()
        one.communicate()
    own = [int((scripts / f"{n}.pids").read_text().split()[0]) for n in range(2)]
    eventually(lambda: not any(map(alive, own)))


def test_refused_launches_say_why(scripts: Path) -> None:
    for command, words in (
        (["no.py"], r"the script 'no\.py' does not exist"),
        (["no-such-program"], "'no-such-program' is not a Python file"),
        ([], "there is no script to launch"),
    ):
        with pytest.raises(OptionError, match=words):
            launch(command)
    with socket.socket() as taken:
        taken.bind((local_launch.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"port {port} cannot be used: Address already in use; give another"):
            launch([sys.executable, "-c", ""], port=port)
        with pytest.raises(OptionError, match=rf"cannot start the coordinator at 127\.0\.0\.1:{port}: Address already"):
            initialization.initialize(f"127.0.0.1:{port}", 2, 0, timeout=1)
    start = time.monotonic()
    with pytest.raises(OptionError, match=rf"process 1 cannot reach the coordinator at 127\.0\.0\.1:{port} after 1 s"):
        initialization.initialize(f"127.0.0.1:{port}", 2, 1, timeout=1)
    assert time.monotonic() - start < 60
    with pytest.raises(OptionError, match=r"coordinator_address='here' is not HOST:PORT"):
        initialization.initialize("here", 2, 1)
    with pytest.raises(OptionError, match=r"coordinator_address='here:1', num_processes=None"):
        initialization.initialize("here:1")


def test_a_process_without_a_job_is_alone() -> None:
    assert initialization.initialize() == 1


@pytest.mark.slow
def test_jax_itself_joins_the_processes(tmp_path: Path) -> None:
    """`alpa_lite.initialize` joins those of the other tests."""
    script = (
        "import jax\n"
        "jax.distributed.initialize()\n"
        "print(jax.process_index(), jax.process_count(), jax.device_count(), jax.local_device_count())\n"
    )
    run = driver.launch(tmp_path, script, "--devices-per-process", "2")
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["[0] 0 2 4 2", "[1] 1 2 4 2"]
