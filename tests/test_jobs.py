"""The job files of `examples/jobs`: they parse, and the script knows the options that they give it."""

from __future__ import annotations

import argparse
import re
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_examples import load

JOBS = Path(__file__).parents[1] / "examples" / "jobs"
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
