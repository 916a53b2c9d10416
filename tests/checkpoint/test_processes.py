"""Checkpoints of several processes: each writes and reads its own part, and an error of one is an error of all."""

from __future__ import annotations

import pickle
from pathlib import Path

import jax
import numpy as np
import pytest
import typer

from alpa_lite import checkpoint
from alpa_lite.processes import local_launch
from tests import comparing
from tests.checkpoint import states, two_processes

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_save_and_restore_what_one_had_and_one_what_two_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    state = jax.jit(states.create, out_shardings=jax.sharding.NamedSharding(states.mesh(0, 8, 8), jax.P()))(
        jax.random.key(0)
    )
    checkpoint.save(tmp_path / "single", state)
    want = {**state, "key": jax.random.key_data(state["key"])}
    (tmp_path / "want.pkl").write_bytes(pickle.dumps(jax.tree.map(np.asarray, want)))
    after, _ = jax.jit(states.train)(state, states.draw(16, states.WIDTH, seed=1))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = ["-m", "tests.checkpoint.two_processes", str(tmp_path)]
    monkeypatch.chdir(ROOT)
    code = local_launch.launch(command, echo=typer.echo, processes=2, devices_per_process=4, platform="cpu")
    assert code == 0, capfd.readouterr()
    said = [pickle.loads((tmp_path / f"said {number}.pkl").read_bytes()) for number in range(2)]
    for number, own in enumerate(said):
        assert "first is float32[8,4] there and float32[8,5] here" in own["model"][0]
        message, seconds = own["no room"]
        assert "no room left" in message and "No space left on device" in message, message
        assert seconds < two_processes.TIMEOUT / 2
        assert ("process 1 failed" in message) == (number == 0)
    message, seconds = said[0]["alone"]
    assert "process 1 did not respond within 5 s" in message and seconds < 60
    shapes = jax.eval_shape(states.create, jax.random.key(0))
    found = checkpoint.restore(tmp_path / "stages", shapes)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(comparing.plain(mine), comparing.plain(other), rtol=1e-4, atol=1e-6)
    for step in (1, 2):
        like = {name: np.zeros_like(value) for name, value in two_processes.values().items() if name != "number"}
        states.equal(checkpoint.restore(tmp_path / "run", {**like, "number": 0}, step=step), two_processes.values())
