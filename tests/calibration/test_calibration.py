"""Calibration: fits recover a machine, files are read as they were written, and measuring ends in time."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

import alpa_lite
from alpa_lite.calibration import fitting, measuring, samples
from alpa_lite.calibration.fitting import Calibration, default_path
from alpa_lite.calibration.samples import Grid, Sample
from alpa_lite.cli import app
from alpa_lite.cluster import CALIBRATION, Cluster, Dispatch, Link
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.errors import OptionError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.costs.attention import pairs

ASSUMED = Cluster(
    device="x", platform="cpu", devices_per_node=8, memory=2**30, peak_flops={"f32": 1e12, "bf16": 1e12, "f64": 5e11},
    memory_bandwidth=1e11, node_link=Link(1e10, 1e-6), tile=128,
)  # fmt: skip
TRUE = dataclasses.replace(
    ASSUMED, peak_flops={"f32": 3e10, "bf16": 9e10}, matmul_efficiency=1.0, tile=16, memory_bandwidth=5e9,
    node_link=Link(2e9, 2e-5), dispatch=Dispatch(1e-5, 4e-5), kernel_start=2e-7, kernel_start_alone=2e-7,
    sustained_efficiency=0.7, attention_efficiency={"cudnn": (0.5, 0.25)},
)  # fmt: skip
LENGTHS = ((2, 128, 4, 64), (1, 512, 4, 64))
PASSES = [Sample("attention", sizes, dtype="bf16", kind=kind) for sizes in LENGTHS for kind in samples.PASSES]
USUAL = Grid.from_platform("cpu")
GRID = Grid((*USUAL.work, *PASSES, Sample("sustained", (512, 512, 512), dtype="bf16")), USUAL.payloads)


def ideal(sample: Sample, mesh: LogicalMesh | None, axes: tuple[str, ...]) -> float:
    """Seconds of an operation on a machine that is as the cost model says."""
    one = MeshCost(TRUE, LogicalMesh((1,), ("x",)))
    match sample.figure:
        case "product":
            m, n, k = sample.sizes
            return one.matmul(int(m), int(n), int(k), 1, sample.dtype, {"f32": 4, "bf16": 2}[sample.dtype])
        case "sustained":
            m, n, k = map(int, sample.sizes)
            return one.matmul(m, n, k, 1, "bf16", 2) / 0.7
        case "kernel":
            return TRUE.kernel_start
        case "attention":
            examples, tokens, heads, features = sample.sizes
            forward = 4 * examples * heads * features * pairs(tokens, tokens, causal=True) / 9e10 / 0.5
            return forward if sample.kind == "forward" else forward * (1 + 10 / 4 * 0.5 / 0.25)
        case "elementwise":
            return 2 * sample.sizes[0] / TRUE.memory_bandwidth
        case "run" | "transfer":
            return TRUE.dispatch.seconds(sample.sizes[0])
    assert mesh is not None
    return MeshCost(TRUE, mesh).collective(sample.kind, axes, sample.sizes[0])


def measured(noise: float = 0.0, figures: tuple[str, ...] = ()) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        dataclasses.replace(case, seconds=ideal(case, mesh, axes) * (1 + noise * random.uniform(-1, 1)))
        for case, mesh, axes in samples.cases(GRID, ASSUMED)
        if not figures or case.figure in figures
    ]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_machine_is_recovered(noise: float) -> None:
    fits, found = fitting.fit_cluster(ASSUMED, measured(noise))
    near = pytest.approx(1.0, rel=0.03 + noise)
    assert found.tile == TRUE.tile
    for dtype in ("f32", "bf16"):
        assert found.peak(dtype) * found.matmul_efficiency / TRUE.peak(dtype) == near
    assert found.memory_bandwidth / TRUE.memory_bandwidth == near
    assert found.kernel_start / TRUE.kernel_start == near
    assert found.sustained_efficiency == pytest.approx(0.7, rel=0.05 + 2 * noise)
    reached = [found.attention("cudnn", backward=backward) for backward in (False, True)]
    assert np.array(reached) * found.peak("bf16") == pytest.approx([0.5 * 9e10, 0.25 * 9e10], rel=0.05 + 2 * noise)
    assert found.dispatch.device / TRUE.dispatch.device == near
    mesh = LogicalMesh((2, 4), ("a", "b"))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"):
        for axes in (("a",), ("b",), ("a", "b")):
            for payload in (2**13, 2**20):
                was = MeshCost(TRUE, mesh).collective(kind, axes, payload)
                assert MeshCost(found, mesh).collective(kind, axes, payload) / was == near
    assert max(fit.error for fit in fits) <= 0.02 + noise


def test_the_error_of_a_fit_is_that_of_the_model() -> None:
    """Memory that is twice as fast for small arrays: large ones decide, and the worst error is that of the small."""
    cases = [Sample("elementwise", (2**20,), 2**21 / 2e9), Sample("elementwise", (2**23,), 2**24 / 1e9)]
    (fit,), found = fitting.fit_cluster(ASSUMED, cases)
    rate = 9 / (1 / 2e9 + 8 / 1e9)
    assert found.memory_bandwidth == fit.parameters["bytes/s"] == pytest.approx(rate)
    assert (fit.worst, fit.count) == (pytest.approx(1 - rate / 2e9), 2)


def test_figures_without_measurements_stay_as_they_were() -> None:
    _, found = fitting.fit_cluster(ASSUMED, measured(figures=("run", "transfer")), missing=3)
    assert found.dispatch.device == pytest.approx(4e-5)
    assert dataclasses.replace(found, dispatch=ASSUMED.dispatch, measured=()) == ASSUMED
    assert found.measured[0] == "the start of tasks" and "3 of 10 measurements" in found.measured[1]
    one = [dataclasses.replace(case, seconds=1.0) for case, _, _ in samples.cases(GRID, ASSUMED) if case.kind][:1]
    assert fitting.fit_cluster(ASSUMED, one)[1].collectives == ()  # one payload has no slope
    alpha, beta = fitting.affine([1.0, 2.0, 4.0], [4.0, 2.0, 1.0])
    assert alpha > 0 and beta == 0  # rates are never negative
    products = measured(figures=("product",))
    assert fitting.fit_cluster(ASSUMED, products)[1].peak("f64") == ASSUMED.peak("f64")
    fast = [dataclasses.replace(case, seconds=1e-7) for case in products]
    gpu = fitting.fit_cluster(dataclasses.replace(ASSUMED, platform="cuda"), fast)[1]
    assert gpu.peak("f32") * gpu.matmul_efficiency > ASSUMED.peak("f32")  # faster than the data sheet


def test_cases_have_all_groups_of_a_machine_once_and_products_first() -> None:
    cases = [case for case, _, _ in samples.cases(GRID, ASSUMED)]
    assert len(set(cases)) == len(cases) == 86
    assert [case.figure for case in cases[:10]] == ["product"] * 10
    assert {case.group for case in cases if case.figure == "collective"} == {(2,), (4,), (8,)}
    nodes = dataclasses.replace(ASSUMED, nodes=2, network_link=Link(1e9, 1e-5))
    assert set(samples.groups(nodes)) >= {(8, 2), (8,), (1, 2), (2, 2)}
    alone = {case.figure for case, _, _ in samples.cases(GRID, ASSUMED.part(1))}
    assert alone == {"product", "sustained", "elementwise", "kernel", "attention", "run"}


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CALIBRATION, raising=False)


@functools.cache
def calibration(cluster: Cluster) -> Calibration:
    cases = tuple(measured(0.1))
    fits, found = fitting.fit_cluster(cluster, cases)
    return Calibration.create(found, fits, cases, len(cases), 1.5)


def stored(path: Path, cluster: Cluster = ASSUMED) -> Calibration:
    made = calibration(cluster)
    made.save(path)
    return made


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "calibration.json"
    made = stored(path)
    assert Calibration.load(path) == made
    assert Cluster.load(path) == made.cluster
    assert Cluster.from_name(str(path)).fingerprint == made.cluster.fingerprint != ASSUMED.fingerprint
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
        Cluster.from_name(str(tmp_path / "absent.json"))
    (tmp_path / "text.json").write_text("no JSON")
    with pytest.raises(OptionError, match=r"text\.json.*damaged"):
        Cluster.load(tmp_path / "text.json")
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
    fits, found = fitting.fit_cluster(ASSUMED, [s for s in measured() if s.group != (4,)])
    assert {fit.name for fit in fits if "all_reduce" in fit.name} == {"all_reduce over 2", "all_reduce over 8"}
    mesh = LogicalMesh((2, 4), ("a", "b"))
    known, larger = (MeshCost(found, mesh).collective("all_reduce", axes, 2**16) for axes in (("a",), ("b",)))
    assert known == pytest.approx(MeshCost(TRUE, mesh).collective("all_reduce", ("a",), 2**16))
    assert larger == MeshCost(found, mesh).collective("all_reduce", ("a", "b"), 2**16)  # that of 8, of 4 in its place
    assert found.node_link.latency == pytest.approx(TRUE.node_link.latency)


def test_every_machine_has_a_path_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path(Cluster.preset("h100")) == tmp_path / "alpa_lite" / "calibration-h100-sxm-8.json"


PRODUCTS = [Sample("product", (size,) * 3) for size in (8, 256)]
SMALL = Grid((*PRODUCTS, Sample("elementwise", (2**16,)), Sample("kernel", (64,))), payloads=(2**10, 2**18))


def test_the_command_measures_writes_and_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two devices, with few sizes and one timing of each."""
    assert len(jax.devices()) == 8  # before the command could set another number
    monkeypatch.setattr(Grid, "from_platform", lambda platform: SMALL)
    monkeypatch.setattr(measuring, "ONE", 5e-4)
    monkeypatch.setattr(measuring, "ROUNDS", 2)
    path = tmp_path / "here.json"
    result = CliRunner().invoke(app, ["calibrate", "--devices", "2", "--seconds", "30", "-o", str(path)])
    assert result.exit_code == 0, result.output
    found = Calibration.load(path)
    assert found.wanted == len(list(samples.cases(SMALL, Cluster.local(jax.devices()[:2])))) == 17
    assert f"{len(found.samples)} of 17 measurements" in result.stdout and str(path) in result.stdout
    assert "all_reduce over 2" in result.stdout and "median error" in result.stdout
    cluster = Cluster.load(path)
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
