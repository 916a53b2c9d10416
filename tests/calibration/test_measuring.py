"""Measuring, once and briefly on the devices here: that it ends in time, and that its figures are of this machine."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from alpa_lite.calibration import measuring, samples
from alpa_lite.calibration.samples import Grid, Sample
from alpa_lite.calibration.storing import Calibration
from alpa_lite.cli import app
from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.ir.layout import LogicalMesh

SMALL = Grid(products=(("f32", (8, 8, 8)), ("f32", (256, 256, 256))), elementwise=(2**16,), payloads=(2**10, 2**18))


def test_the_command_measures_writes_and_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two devices, with few sizes and one timing of each."""
    assert len(jax.devices()) == 8  # before the command could set another number
    monkeypatch.setattr(Grid, "of", lambda platform: SMALL)
    monkeypatch.setattr(measuring, "ONE", 5e-4)
    monkeypatch.setattr(measuring, "ROUNDS", 2)
    path = tmp_path / "here.json"
    result = CliRunner().invoke(app, ["calibrate", "--devices", "2", "--seconds", "30", "-o", str(path)])
    assert result.exit_code == 0, result.output
    found = Calibration.load(path)
    assert found.wanted == len(list(samples.cases(SMALL, Cluster.local(jax.devices()[:2])))) == 17
    assert f"{len(found.samples)} of 17 measurements" in result.stdout and str(path) in result.stdout
    assert "all_reduce over 2" in result.stdout and "median error" in result.stdout
    cluster = Cluster.calibrated(path)
    assert cluster.num_devices == 2 and cluster.measured and cluster.source.startswith("measured on")
    taken = {sample.sizes: sample.seconds for sample in found.samples if sample.figure == "product"}
    assert taken[256, 256, 256] > taken.get((8, 8, 8), 0.0)  # which is left out where it is lost in noise


def test_every_operation_is_the_collective_of_its_name() -> None:
    """On a mesh of (2, 2), along one of its axes, on blocks of the payload that is priced."""
    mesh = LogicalMesh((2, 2), ("x", "y"))
    devices = jax.devices()[:4]
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"):
        operation, size = measuring._collective(kind, mesh, ("y",), 1024)
        assert size == (512 if kind == "all_gather" else 1024)
        spec = jax.sharding.PartitionSpec(("x", "y"))
        grid = jax.sharding.Mesh(np.array(devices).reshape(2, 2), ("x", "y"))
        whole = jax.shard_map(
            lambda x, f=operation: f(x[0])[None], mesh=grid, in_specs=spec, out_specs=spec, check_vma=False
        )
        text = jax.jit(whole).lower(jax.ShapeDtypeStruct((4, size), "float32")).as_text()
        assert f"stablehlo.{kind}" in text


def test_measurements_without_time_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(range(100))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: float(next(times)))
    monkeypatch.setattr(measuring, "case", lambda sample, *rest: lambda: 1e-3 * sample.sizes[0])
    found = measuring.calibrate(2, seconds=10.0, grid=SMALL)
    assert 0 < len(found.samples) < found.wanted == 17
    assert found.samples[0] == Sample("product", (8, 8, 8), 0.008)
    assert f"{17 - len(found.samples)} of 17 measurements" in found.cluster.measured[-1]
    with pytest.raises(OptionError, match=r"seconds=0\.5.*give more"):
        measuring.calibrate(2, seconds=0.5, grid=SMALL)


def test_devices_of_other_processes_are_refused() -> None:
    class Far:
        process_index = 1

    with pytest.raises(OptionError, match="several processes"):
        measuring.calibrate([Far()])


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_attention_is_measured_in_both_passes(kind: str) -> None:
    """On CPU by XLA's operations, in place of cuDNN's kernel."""
    sample = Sample("attention", (1, 16, 2, 8), dtype="bf16", kind=kind)
    operation, operands = measuring.attention(sample, "xla")
    out = jax.eval_shape(operation, *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands))
    assert out.shape == sample.sizes
    timed = measuring._loop(jax.devices()[:2], None, operation, operands)
    assert np.isfinite(timed())


def test_kernels_of_a_chain_are_not_joined() -> None:
    text = jax.jit(lambda x: measuring._kernels(5, x)).lower(np.ones(8, np.float32)).as_text()
    assert text.count("optimization_barrier") == 5
