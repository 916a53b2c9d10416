"""Plans on disk: found again without solving for the same request, and never for another."""

import dataclasses
import functools
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.compilation import plan_cache
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Stage
from gallery.batches import f32
from gallery.steps import by_momentum, residual_layers
from tests.helpers import record_calls

H100 = alpa_lite.Cluster.preset("h100", nodes=1)
WIDTH = 256


@by_momentum
def step(params: Any, batch: Any) -> Any:
    return ((residual_layers(params["layers"], batch["x"]) - batch["y"]) ** 2).mean()


def arguments(batch: int = 1024, width: int = WIDTH, layers: int = 2) -> tuple[Any, Any]:
    params = {"layers": [{"up": f32(width, 4 * width), "down": f32(4 * width, width)} for _ in range(layers)]}
    return {"params": params, "mu": params}, {"x": f32(batch, width), "y": f32(batch, width)}


def planned(directory: Any, fun: Any = step, args: Any = None, **options: Any) -> Plan:
    options = {"cluster": H100, "verify": "off", "method": alpa_lite.DataParallel(), **options}
    return alpa_lite.make_plan(fun, *(args or arguments()), cache_dir=directory, **options)


@pytest.fixture
def solver(monkeypatch) -> list[Any]:
    """One entry for every call of the solver."""
    return record_calls(monkeypatch, solve, "solve")


def same(one: Plan, other: Plan, *leaving: str) -> None:
    """Equal but for what planning took."""
    one, other = (dataclasses.replace(plan, stages=tuple(map(unsolved, plan.stages))) for plan in (one, other))
    for field in dataclasses.fields(one):
        if field.name not in ("planning_seconds", *leaving):
            assert getattr(one, field.name) == getattr(other, field.name), field.name


def unsolved(stage: Stage) -> Stage:
    """Without what solving took."""
    return dataclasses.replace(stage, solver=dataclasses.replace(stage.solver, work=0))


METHODS: dict[str, dict[str, Any]] = {
    "data parallel": {"method": alpa_lite.DataParallel()},
    "zero-1": {"method": alpa_lite.Zero(stage=1)},
    "zero-2": {"method": alpa_lite.Zero(stage=2)},
    "zero-3": {"method": alpa_lite.Zero(stage=3)},
    "tensor parallel": {"method": alpa_lite.TensorParallel()},
    "sharded": {"method": alpa_lite.Sharded()},
    "micro-batches": {"method": alpa_lite.Sharded((2, 4)), "num_microbatches": 2},
    "remat": {"method": alpa_lite.Sharded((8,), remat="layer")},
    "auto": {"method": "auto"},
    "by the compiler": {"method": alpa_lite.Sharded((2, 4)), "communication": "compiler"},
    "nothing donated": {"method": alpa_lite.Pipeline(num_stages=2), "num_microbatches": 2, "donate_argnums": ()},
    "manual": {"method": alpa_lite.Manual({"state/params/layers/1/up": P(None, "m")}, (2, 4), ("d", "m"))},
    "manual, rest": {"method": alpa_lite.Manual({"*/layers/1/up": P(None, "x")}, rest=alpa_lite.DataParallel())},
    "pipeline": {"method": alpa_lite.Pipeline(num_stages=2, schedule="1f1b")},
    "interleaved": {"method": alpa_lite.Pipeline(2, schedule="interleaved-1f1b"), "args": arguments(layers=4)},
    "split gradients": {"method": alpa_lite.Pipeline(num_stages=2, schedule="zb-h1", remat="layer")},
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_found_again_without_solving(name, tmp_path, solver, caplog):
    first = planned(tmp_path, **METHODS[name])
    assert len(os.listdir(tmp_path)) == 1
    solver.clear()
    again = planned(tmp_path, **METHODS[name])
    assert not solver and not caplog.records
    same(first, again)
    # What the plan says is what replaying it makes, but for arguments, which then have one layout each.
    replayed = planned(None, plan=first, **{**METHODS[name], "num_microbatches": "auto"})
    same(first, replayed, "stages", "solver", "search", "candidates", "comparisons", "notes")
    for stage, other in zip(first.stages, replayed.stages, strict=True):
        kept, found = (
            {(d.key, d.name, d.count, d.strategy, d.partial) for d in one.decisions if not d.paths}
            for one in (stage, other)
        )
        assert found == kept
        same_stage = dataclasses.replace(other, decisions=stage.decisions, solver=stage.solver)
        assert same_stage == stage


def test_results_are_those_of_the_first_process(tmp_path, solver):
    def arrays() -> Any:
        rng = np.random.default_rng(0)
        return jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32) / 8, arguments(16, 8))

    results = []
    for _ in range(2):
        run = alpa_lite.parallelize(step, method=alpa_lite.Zero(stage=3), cache_dir=tmp_path)
        results.append(jax.tree.map(np.asarray, run(*arrays())))
        calls = len(solver)
    assert calls == len(solver) and len(os.listdir(tmp_path)) == 1
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_another_request_is_another_file(tmp_path):
    def renamed(state: Any, batch: Any) -> Any:
        return step(state, batch)

    def other(state: Any, batch: Any) -> Any:
        state, value = step(state, batch)
        return state, value * 2

    planned(tmp_path)
    planned(tmp_path, renamed)
    assert len(os.listdir(tmp_path)) == 1
    requests: list[dict[str, Any]] = [
        {"fun": other}, {"args": arguments(batch=512)}, {"cluster": alpa_lite.Cluster.preset("a100", nodes=1)},
        {"method": alpa_lite.Zero(stage=1)}, {"memory_per_device": 10**9}, {"num_microbatches": 2},
        {"donate_argnums": ()}, {"communication": "compiler"}, {"effort": "quick"},
    ]  # fmt: skip
    for number, request in enumerate(requests):
        planned(tmp_path, **request)
        assert len(os.listdir(tmp_path)) == 2 + number
    for request in ({"dump_dir": tmp_path / "dump"}, {"verify": "shardy"}):
        planned(tmp_path, **request)
    assert len([*tmp_path.glob("*.json")]) == 1 + len(requests)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot be read"),
        (lambda text: "[]", "another program, version, cluster or request"),
        (lambda text: text.replace('"jax": "', '"jax": "9.', 1), "another program, version, cluster or request"),
        (lambda text: text.replace('"schema": ', '"schema": 9', 1), "schema version"),
        (lambda text: text.replace('"num_stages"', '"num_stage"', 1), "damaged plan"),
        (lambda text: _changed(text, "step_seconds", 1.0), "s as written"),
        (lambda text: _changed(text, "stages", []), "num_stages is 1"),
        (lambda text: _without_decisions(text), "no decision for"),
    ],
)
def test_a_file_that_cannot_be_used_is_written_anew(damage, message, tmp_path, caplog, solver):
    method = alpa_lite.Sharded((8,))
    first = planned(tmp_path, method=method)
    (path,) = tmp_path.iterdir()
    good = path.read_text()
    path.write_text(damage(good))
    solver.clear()
    with caplog.at_level(logging.WARNING, "alpa_lite.compilation.plan_cache"):
        same(first, planned(tmp_path, method=method), "solver")
    assert solver and message in caplog.text and str(path) in caplog.text
    solver.clear()
    same(first, planned(tmp_path, method=method), "solver")
    assert not solver


def _changed(text: str, field: str, value: Any) -> str:
    data = json.loads(text)
    data["plan"]["plan"][field] = value
    return json.dumps(data)


def _without_decisions(text: str) -> str:
    data = json.loads(text)
    data["plan"]["plan"]["stages"][0]["decisions"] = []
    return json.dumps(data)


def test_the_environment_names_the_directory_and_a_bad_one_only_warns(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path / "of the environment"))
    planned(None)
    assert len(os.listdir(tmp_path / "of the environment")) == 1
    planned(tmp_path / "given")
    assert len(os.listdir(tmp_path / "given")) == 1
    file = tmp_path / "file"
    file.write_text("")
    with caplog.at_level(logging.WARNING, "alpa_lite.compilation.plan_cache"):
        planned(file / "below")
    assert "cannot be kept" in caplog.text


def test_writers_at_once_leave_one_whole_file(tmp_path):
    plan = planned(None)
    cache = plan_cache.PlanCache(tmp_path, {"program": "one"})
    threads = [threading.Thread(target=functools.partial(cache.save, plan)) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if cache.path.exists():
            assert cache.load() is not None
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == [Path(cache.path).name]
    assert cache.load() == plan
