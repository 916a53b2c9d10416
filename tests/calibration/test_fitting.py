"""Fits recover the parameters of a machine from its measurements, and say how far off they are."""

import dataclasses

import numpy as np
import pytest

from alpa_lite.calibration import fitting, samples
from alpa_lite.calibration.samples import Grid, Sample
from alpa_lite.cluster import Cluster, Dispatch, Link
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.ir.attention import pairs

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
GRID = dataclasses.replace(Grid.of("cpu"), sustained=(("bf16", (512, 512, 512)),), attention=LENGTHS)


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
    fits, found = fitting.fitted(ASSUMED, measured(noise))
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
    (fit,), found = fitting.fitted(ASSUMED, cases)
    rate = 9 / (1 / 2e9 + 8 / 1e9)
    assert found.memory_bandwidth == fit.parameters["bytes/s"] == pytest.approx(rate)
    assert (fit.worst, fit.count) == (pytest.approx(1 - rate / 2e9), 2)


def test_figures_without_measurements_stay_as_they_were() -> None:
    _, found = fitting.fitted(ASSUMED, measured(figures=("run", "transfer")), missing=3)
    assert found.dispatch.device == pytest.approx(4e-5)
    assert dataclasses.replace(found, dispatch=ASSUMED.dispatch, measured=()) == ASSUMED
    assert found.measured[0] == "the start of tasks" and "3 of 10 measurements" in found.measured[1]
    one = [dataclasses.replace(case, seconds=1.0) for case, _, _ in samples.cases(GRID, ASSUMED) if case.kind][:1]
    assert fitting.fitted(ASSUMED, one)[1].collectives == ()  # one payload has no slope
    alpha, beta = fitting.affine([1.0, 2.0, 4.0], [4.0, 2.0, 1.0])
    assert alpha > 0 and beta == 0  # rates are never negative
    products = measured(figures=("product",))
    assert fitting.fitted(ASSUMED, products)[1].peak("f64") == ASSUMED.peak("f64")
    fast = [dataclasses.replace(case, seconds=1e-7) for case in products]
    gpu = fitting.fitted(dataclasses.replace(ASSUMED, platform="cuda"), fast)[1]
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
