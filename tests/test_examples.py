"""The examples run as they are, and the README's step as it is printed there."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

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


@pytest.mark.parametrize(
    "name",
    ["haiku_mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("equinox_mlp", "lora", "vision_batch_norm"))],
)
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
    assert "Plan auto for 64 v5p" in run.stdout
    assert "params/up" in run.stdout
