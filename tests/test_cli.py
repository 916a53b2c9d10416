"""The command line, without training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from alpa_lite.cli import app
from alpa_lite.cluster import Cluster
from tests.plans import gpt_plan, small_plan

runner = CliRunner()


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    gpt_plan().save(path)
    return str(path)


def test_show_prints_the_plan(file: str) -> None:
    result = runner.invoke(app, ["show", file])
    assert result.exit_code == 0
    assert [line.rstrip() for line in result.stdout.rstrip().splitlines()] == str(gpt_plan()).splitlines()


def test_explain_prints_the_explanation(file: str) -> None:
    result = runner.invoke(app, ["explain", file, "params/h_3/mlp/up/kernel"])
    assert result.exit_code == 0
    assert result.stdout.rstrip() == gpt_plan().explain("params/h_3/mlp/up/kernel")


def test_diff_prints_the_difference(file: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    small_plan().save(other)
    result = runner.invoke(app, ["diff", file, str(other)])
    assert result.exit_code == 0
    assert result.stdout.rstrip() == gpt_plan().diff(small_plan())


def test_clusters_lists_every_preset() -> None:
    result = runner.invoke(app, ["clusters"])
    assert result.exit_code == 0
    assert set(Cluster.preset_names()) <= set(re.findall(r"[\w.-]+", result.stdout))
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize("command", ["demo", "train", "plan", "show", "explain", "diff", "clusters"])
def test_every_command_has_a_help_text(command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show", "nowhere.json"], "nowhere.json"),
        (["diff", "nowhere.json", "nowhere.json"], "nowhere.json"),
        (["explain", "{file}", "h_3/mlp/upp/kernel"], "Did you mean"),
        (["plan", "gpt", "--cluster", "v99", "--batch", "8"], "v99"),
        (["plan", "gpt", "--cluster", "v5p", "--topology", "4by4", "--batch", "8"], "4by4"),
        (["plan", "gpt", "--cluster", "a100", "--batch", "8", "--method", "magic"], "magic"),
        (["plan", "gpt", "--cluster", "a100", "--batch", "8", "--size", "huge"], "huge"),
        (["plan", "gpt", "--cluster", "a100", "--batch", "8", "--set", "seq"], "NAME=VALUE"),
        (["plan", "nothing", "--cluster", "a100", "--batch", "8"], "nothing"),
        (["train", "gpt", "stray"], "stray"),
        (["train", "gpt", "--text", "nowhere.txt", "--steps", "1"], "nowhere.txt"),
        (["train", "gpt", "--devices", "999"], "999"),
    ],
)
def test_mistakes_are_one_message_without_a_traceback(args: list[str], message: str, file: str) -> None:
    result = runner.invoke(app, [arg.format(file=file) for arg in args])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
