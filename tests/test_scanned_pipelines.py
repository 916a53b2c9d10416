"""Pipelines of models whose layers are a scan: one shorter scan a stage, rematerialisation, and whole leaves for users.

Three consecutive steps equal the single-device step, leaf by leaf.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

import alpa_lite
from alpa_lite.ir.program import peak_bytes
from alpa_lite.passes.layers.rematerialisation import Choice
from gallery import linen, nnx
from tests import comparing, pipeline_driver

MODELS = {"linen": linen.gpt, "nnx": nnx.gpt}


def trips(texts: Sequence[str]) -> list[int]:
    """The trip counts of the while loops that the compiler knows."""
    return [int(n) for text in texts for n in re.findall(r"known_trip_count\W+n\W+(\d+)", text)]


def driven(kind: str, remat: Sequence[Choice] = (), **options: Any) -> Any:
    devices, schedule = options.pop("devices", (4, 4)), options.pop("schedule", "1f1b")
    microbatches, layers = options.pop("microbatches", 2), options.pop("layers", 4)
    step, arguments = MODELS[kind](scan=True, layers=layers, **options)
    found = pipeline_driver.drive(
        step, arguments, devices=devices, microbatches=microbatches, schedule=schedule, remat=remat
    )
    return step, arguments, found


@pytest.mark.slow
def test_two_stages_have_a_scan_of_half_the_layers_each():
    step, arguments, found = driven("linen", ("layer", "selective"))
    executable = found.executable()
    pipeline_driver.compare_steps(executable, step, arguments)
    layers = [length for length in trips(executable.hlo()) if length in (2, 4)]  # others are scatters that XLA expands
    assert layers == [2, 2, 2, 2]  # forward and backward of each
    plain = driven("linen")[2]
    for less, more in zip(peak_bytes(found.pipeline.program), peak_bytes(plain.pipeline.program), strict=True):
        assert less < more
    leaf = executable(*pipeline_driver._copied(arguments, "functional"))[0]["params"]["Block_0"]["q"]["kernel"]
    assert leaf.shape[0] == 4 and len(leaf.sharding.device_set) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "remat", "options"),
    [
        pytest.param(
            "nnx",
            ("none", "selective", "layer", "none"),
            {"devices": (2, 2, 2, 2), "layers": 8, "schedule": "zb-h1"},
            marks=pytest.mark.thorough,
        ),
        ("linen", ("selective", "layer"), {"layers": 3, "microbatches": 4}),
        ("nnx", ("layer", "selective"), {"dropout": 0.25}),
    ],
    ids=["four-stages", "odd", "dropout"],
)
def test_scanned_pipelines(kind: str, remat: Sequence[Choice], options: dict[str, Any]):
    step, arguments, found = driven(kind, remat, **options)
    executable = found.executable()
    pipeline_driver.compare_steps(executable, step, arguments, "nnx" if kind == "nnx" else "functional")
    assert len(pipeline_driver.measure_peak(executable, *arguments)) == len(remat)


@pytest.mark.slow
def test_little_memory_leads_to_rematerialisation_which_plans_replay(tmp_path: Path):
    step, arguments = linen.gpt(scan=True, layers=4)
    method = alpa_lite.Pipeline(num_stages=2, schedule="gpipe")
    pipelined = alpa_lite.parallelize(step, method=method, num_microbatches=4, memory_per_device=300_000)
    plan = pipelined.plan(*arguments)
    assert set(plan.division.remat) != {"none"}  # which takes 317,000 bytes
    used = zip(plan.division.buffer_bytes, plan.division.temporary_bytes, strict=True)
    assert all(sum(pair) <= 300_000 for pair in used)
    assert any("[0:2]" in leaf.path for leaf in plan.stages[0].arguments)
    plan.save(tmp_path / "plan.json")
    assert alpa_lite.Plan.load(tmp_path / "plan.json") == plan
    want = comparing.called(jax.jit(step), arguments, "functional")
    comparing.compare(comparing.called(pipelined, arguments, "functional"), want)
    again = alpa_lite.parallelize(step, plan=tmp_path / "plan.json")
    comparing.compare(comparing.called(again, arguments, "functional"), want)
    assert again.plan(*arguments).division.remat == plan.division.remat
