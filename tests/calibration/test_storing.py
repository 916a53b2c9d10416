"""Files of calibrations are read as they were written; the error of a damaged file says the remedy."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import pytest

import alpa_lite
from alpa_lite.calibration import fitting
from alpa_lite.calibration.storing import Calibration, default_path
from alpa_lite.cluster import CALIBRATION, Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.errors import OptionError
from alpa_lite.ir.layout import LogicalMesh
from tests.calibration.test_fitting import ASSUMED, TRUE, measured


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CALIBRATION, raising=False)


@functools.cache
def calibration(cluster: Cluster) -> Calibration:
    cases = tuple(measured(0.1))
    fits, found = fitting.fitted(cluster, cases)
    return Calibration.now(found, fits, cases, len(cases), 1.5)


def stored(path: Path, cluster: Cluster = ASSUMED) -> Calibration:
    made = calibration(cluster)
    made.save(path)
    return made


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "calibration.json"
    made = stored(path)
    assert Calibration.load(path) == made
    assert Cluster.calibrated(path) == made.cluster
    assert Cluster.named(str(path)).fingerprint == made.cluster.fingerprint != ASSUMED.fingerprint
    data = json.loads(path.read_text())
    assert (data["version"], data["device"], data["jax"]) == (2, "x", jax.__version__)
    assert f"JAX {jax.__version__}" in made.cluster.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("format"), "not a calibration"),
        (lambda data: data.update(version=1), "version 1, and 2 is read"),
        (lambda data: data.pop("fits"), "fits"),
        (lambda data: data["cluster"].pop("dispatch"), "dispatch"),
        (lambda data: data["cluster"].update(memory=-1), "memory=-1"),
        (lambda data: data["samples"][0].update(seconds=0), "0 seconds"),
        (lambda data: data["samples"][0].pop("sizes"), "sizes"),
        (lambda data: data["cluster"]["collectives"][0].update(points=[[1, "fast"]]), r"\[0\]\[1\]: .* found str"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path, change, message: str) -> None:
    path = tmp_path / "calibration.json"
    stored(path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(OptionError, match=message) as error:
        Calibration.load(path)
    assert str(path) in str(error.value) and "alpa-lite calibrate" in str(error.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"absent\.json.*alpa-lite calibrate"):
        Cluster.named(str(tmp_path / "absent.json"))
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(OptionError, match=r"text\.json.*damaged"):
        Cluster.calibrated(tmp_path / "text.json")
    with pytest.raises(OptionError, match="cannot be written"):
        stored(tmp_path / "text.json" / "inside.json")


def test_the_devices_here_take_the_figures_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, devices = tmp_path / "calibration.json", jax.devices()[:8]
    here = Cluster.local(devices)
    made = stored(path, dataclasses.replace(ASSUMED, device="cpu"))
    found = Cluster.local(devices, calibration=path)
    assert found.memory == here.memory != made.cluster.memory
    assert dataclasses.replace(found, memory=made.cluster.memory, reserve=made.cluster.reserve) == made.cluster
    monkeypatch.setenv(CALIBRATION, str(path))
    assert Cluster.local(devices) == found
    assert Cluster.local(devices, calibration=None) == here
    with pytest.raises(OptionError, match=f"is of 8 cpu, and here are 4 cpu.*unset {CALIBRATION}"):
        Cluster.local(devices[:4])


def test_plans_take_a_file_in_place_of_a_cluster_and_say_so(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    made = stored(path)
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    plan, other = (
        alpa_lite.make_plan(lambda w, x: (w - x.T @ (x @ w), 0.0), x, x, cluster=cluster, verify="off")
        for cluster in (str(path), ASSUMED)
    )
    assert plan.cluster == made.cluster
    assert any("measured" in note and "products in bf16, f32" in note for note in plan.notes)
    assert not any("measured" in note for note in other.notes)


def test_curves_are_taken_for_their_groups_alone() -> None:
    fits, found = fitting.fitted(ASSUMED, [s for s in measured() if s.group != (4,)])
    assert {fit.name for fit in fits if "all_reduce" in fit.name} == {"all_reduce over 2", "all_reduce over 8"}
    mesh = LogicalMesh((2, 4), ("a", "b"))
    known, larger = (MeshCost(found, mesh).collective("all_reduce", axes, 2**16) for axes in (("a",), ("b",)))
    assert known == pytest.approx(MeshCost(TRUE, mesh).collective("all_reduce", ("a",), 2**16))
    assert larger == MeshCost(found, mesh).collective("all_reduce", ("a", "b"), 2**16)  # that of 8, of 4 in its place
    assert found.node_link.latency == pytest.approx(TRUE.node_link.latency)


def test_every_machine_has_a_path_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path(Cluster.preset("h100")) == tmp_path / "alpa_lite" / "calibration-h100-sxm-8.json"
