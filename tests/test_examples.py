"""The examples run as they are, and the README's step as it is printed there.

`examples/pretrain.py` in several processes: preempted, killed, and started again on fewer. The job files of
`examples/jobs` parse, and the script knows the options that they give it.
"""

import argparse
import importlib.util
import itertools
import json
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.runtime import kills
from tests.marks import slow_but

ROOT = Path(__file__).parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.optimised
def test_gpt_trains(capsys: pytest.CaptureFixture[str]) -> None:
    losses = load("train_gpt").main(30)
    assert losses[-1] < losses[0] - 1
    assert "Predicted\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", slow_but({"haiku_mlp"}, ("haiku_mlp", "equinox_mlp", "lora", "vision_batch_norm")))
def test_it_learns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    losses = load(name).main(12)
    assert losses[-1] < 0.95 * losses[0]
    assert f"loss {losses[0]:.4f} -> {losses[-1]:.4f}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_loop_with_evaluation_and_checkpoints_goes_on_under_another_plan(caplog: pytest.LogCaptureFixture) -> None:
    losses = load("evaluate_and_checkpoint").main(2)
    assert len(losses) == 4
    assert all(after < before for before, after in itertools.pairwise(losses))
    assert "moves" not in caplog.text


@pytest.mark.slow
def test_linen_mlp_computes_the_same_under_every_method() -> None:
    losses = load("linen_mlp").main(10)
    assert len(losses) == 4
    for found in losses.values():
        assert found[-1] < found[0]
        np.testing.assert_allclose(found, losses["auto"], rtol=1e-4)
    assert losses["from a file"] == losses["auto"]


@pytest.mark.slow
def test_the_readme_s_script_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "readme.py").write_text("\n".join(blocks))
    run = subprocess.run(
        [sys.executable, "readme.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "plan.json").exists()
    assert "Plan auto for TPU v5p 4x4x4" in run.stdout
    assert "params/up" in run.stdout


# -- pretrain.py ------------------------------------------------------------------------------------------------------

ARGUMENTS = ("--method", "zero", "--steps", "12", "--save-every", "3")


def events(folder: Path, name: str) -> list[dict[str, object]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line.get("event") == name]


def test_batches_depend_on_the_step_alone_and_rows_are_parts_of_them() -> None:
    source = load("pretrain").Text(None, 6, 5, 0)
    whole, again = source.batch(3), source.batch(3)
    assert whole["inputs"].shape == (6, 5) and (whole["inputs"] == again["inputs"]).all()
    assert (whole["inputs"][:, 1:] == whole["targets"][:, :-1]).all()
    part = source.batch(3, rows={"inputs": [4, 5], "targets": []})
    assert (part["inputs"] == whole["inputs"][4:]).all() and part["targets"].shape == (0, 5)
    assert (source.batch(4)["inputs"] != whole["inputs"]).any()
    assert (source.batch(3, "evaluation")["inputs"] != whole["inputs"]).any()


def test_one_process_is_asked_to_end_by_a_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        preemption = load("pretrain").Preemption()
        assert not preemption.reached(1)
        signal.raise_signal(signal.SIGTERM)
        assert preemption.reached(2)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_a_run_goes_on_with_half_of_its_processes_when_one_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    wanted = kills.resume(tmp_path / "whole", 1, 2, *ARGUMENTS)
    assert sorted(wanted) == list(range(12)) and wanted[11] < wanted[0]
    folder = tmp_path / "run"
    with kills.job(folder, 2, 1, *ARGUMENTS) as running:
        kills.wait_for((folder / "checkpoints" / "3").is_dir, running, 240, folder)
        found = kills.kill(folder, running, 1, "step")
    assert found.named, kills.said(folder, 0)
    # JAX ends it, unless the error of its own collective has ended it before.
    assert found.codes in ([-signal.SIGABRT], [1]), kills.said(folder, 0)
    assert kills.farthest(kills.resume(folder, 1, 1, *ARGUMENTS), wanted) < 1e-6
    assert [start["step"] for start in events(folder, "start")][:2] in ([0, 3], [0, 6], [0, 9])


@pytest.mark.slow
def test_all_processes_save_and_end_when_one_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    with kills.job(tmp_path, 2, 1, "--method", "zero", "--steps", "100000") as running:
        kills.wait_for(lambda: max(kills.losses(tmp_path), default=-1) >= 1, running, 240, tmp_path)
        running[1].send_signal(signal.SIGTERM)  # JAX tells the other
        assert [process.wait(timeout=120) for process in running] == [0, 0], kills.said(tmp_path, 0)
    (end,) = events(tmp_path, "end")
    assert end["preempted"] and end["saved"] == end["step"]
    assert (tmp_path / "checkpoints" / str(end["saved"])).is_dir()


# -- job files --------------------------------------------------------------------------------------------------------

JOBS = ROOT / "examples" / "jobs"
SHELL = ("pretrain.slurm", "pretrain-tpu.sh")
COMMAND = r"examples/pretrain\.py(?:\\?\s)+(--folder(?:[^;&|)]|\\\n)*?)(?:\|\||\"\n|$)"


def options(text: str) -> argparse.Namespace:
    """What the script makes of the arguments that a job gives it."""
    found = re.search(COMMAND, text, re.DOTALL)
    assert found is not None
    return load("pretrain").parsed(shlex.split(found[1].replace("\\\n", " ")))


def documents() -> dict[str, dict[str, Any]]:
    text = (JOBS / "pretrain-jobset.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.mark.parametrize("name", SHELL)
def test_scripts_are_shell_and_their_options_are_known(name: str) -> None:
    run = subprocess.run(["bash", "-n", JOBS / name], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert (JOBS / name).stat().st_mode & stat.S_IXUSR
    given = options((JOBS / name).read_text())
    assert given.steps == 100000 and given.end_after == 1800 and given.heartbeat_timeout == 60


def test_the_jobset_is_whole() -> None:
    found = documents()
    assert set(found) == {"ServiceAccount", "Role", "RoleBinding", "JobSet"}
    assert {document["metadata"]["name"] for document in found.values()} == {"pretrain"}
    (job,) = found["JobSet"]["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    assert pod["serviceAccountName"] == "pretrain"
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    command = container["args"][0]
    assert container["command"] == ["bash", "-c"] and command.startswith("exec python ") and "\n" not in command
    given = options(command)
    assert given.heartbeat_timeout < pod["terminationGracePeriodSeconds"]
    assert any(str(given.folder).startswith(mount["mountPath"]) for mount in container["volumeMounts"])


@pytest.mark.parametrize(
    ("code", "last", "restarts", "requeued"),
    [
        (0, '{"event": "end", "preempted": false}', 0, False),
        (0, '{"event": "end", "preempted": true}', 0, True),
        (134, '{"step": 7}', 0, True),
        (134, '{"step": 7}', 20, False),
    ],
)
def test_a_slurm_job_goes_on_only_where_there_is_more_to_do(
    tmp_path: Path, code: int, last: str, restarts: int, requeued: bool
) -> None:
    for folder in ("bin", "venv/bin", "gpt"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "venv/bin/activate").touch()
    (tmp_path / "gpt/metrics.jsonl").write_text(last + "\n")
    for name, body in (("srun", f"exit {code}"), ("scontrol", 'echo "$@"')):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "RUNS": str(tmp_path), "SLURM_JOB_ID": "7"}
    run = subprocess.run(
        ["bash", JOBS / "pretrain.slurm"], env=env | {"SLURM_RESTART_COUNT": str(restarts)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (run.stdout == "requeue 7\n") == requeued, run.stderr
    assert run.returncode == (1 if code and not requeued else 0)
