"""The search of a plan: floors, effort, truncation, and plans that depend on nothing but their inputs."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError
from tests import zoo
from tests.mlps import mlp, two_machines

ROOT = Path(__file__).parents[3]
METHODS = (
    alpa_lite.DataParallel(), alpa_lite.Zero(1), alpa_lite.Zero(2), alpa_lite.Zero(3), alpa_lite.TensorParallel(),
)  # fmt: skip
A100, V5E, LOCAL = Cluster.preset("a100", nodes=1), Cluster.preset("v5e"), Cluster.local()


def planned(name: str, method: Any, cluster: Cluster, **options: Any) -> alpa_lite.Plan:
    step, args = zoo.get(name).make()
    shapes = jax.eval_shape(lambda: args)
    return alpa_lite.make_plan(step, *shapes, cluster=cluster, method=method, verify="off", **options)


@functools.cache
def floors(name: str, cluster: Cluster) -> dict[str, float]:
    """Seconds of the textbook methods that fit."""
    found = {}
    for method in METHODS:
        try:
            found[method.describe()] = planned(name, method, cluster).step_seconds
        except AlpaLiteError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("linen_gpt", A100),
        ("nnx_gpt", A100),
        ("linen_unet", A100),
        ("linen_unet", LOCAL),
        ("linen_translator", A100),
        ("nnx_resnet", V5E),
        ("linen_moe", LOCAL),
    ],
)
@pytest.mark.parametrize("effort", ["quick", "normal"])
def test_auto_is_no_slower_than_any_textbook_plan(name: str, cluster: Cluster, effort: str) -> None:
    auto = planned(name, alpa_lite.Auto(), cluster, effort=effort)
    others = floors(name, cluster)
    assert len(others) > 2
    assert {method: s for method, s in others.items() if s < auto.step_seconds * (1 - 1e-4)} == {}


@functools.cache
def small(**options: Any) -> alpa_lite.Plan:
    step, args = mlp(256, 512, 3)
    return alpa_lite.make_plan(step, *args, cluster=two_machines(2**30, 1e9), verify="off", **options)


def test_a_plan_says_what_its_search_did() -> None:
    plan = small()
    search = plan.search
    assert search is not None and search.effort == "normal" and 0 < search.work < search.allowed
    assert search.expanded > 0 and not search.truncated
    assert 0 < search.bound <= plan.step_seconds
    assert alpa_lite.Plan.from_json(plan.to_json()).search == search


def test_more_effort_is_never_slower() -> None:
    assert small(effort="quick").step_seconds >= small().step_seconds >= small(effort="thorough").step_seconds


def test_a_plan_that_a_limit_of_seconds_cuts_short_says_so_and_is_not_cached(tmp_path: Path) -> None:
    plan = small(planning_time_limit=1e-9, cache_dir=tmp_path)
    assert plan.search is not None and plan.search.truncated and plan.search.unreached
    assert any("planning_time_limit" in note for note in plan.notes)
    assert not list(tmp_path.iterdir())
    small(cache_dir=tmp_path)
    assert list(tmp_path.iterdir())


def text_of(plan: alpa_lite.Plan) -> str:
    return json.dumps(plan.to_json(), sort_keys=True)


@pytest.mark.slow
def test_a_plan_depends_on_nothing_but_its_inputs() -> None:
    """The same file from processes with other hashes, on one core, and after other plans in this process."""
    program = (
        "import json, jax; jax.config.update('jax_platforms', 'cpu'); jax.config.update('jax_num_cpu_devices', 8);"
        "from tests.passes.search.test_planner import small, text_of; print(text_of(small()))"
    )
    texts = []
    for seed in ("1", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        texts.append(done.stdout.strip().splitlines()[-1])
    planned("linen_mlp", alpa_lite.Auto(), A100)
    assert texts[0] == texts[1] == text_of(small())


def test_no_pass_reads_a_clock() -> None:
    """But for the optional limit of the search, which is off by default."""
    readers = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "passes").rglob("*.py")
        if re.search(r"perf_counter|monotonic|time\.time\(|process_time", path.read_text())
    }
    assert readers == {"passes/search/planner.py"}
