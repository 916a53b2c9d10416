"""Steps by name, and plans against compilers of machines that are not here, skipped where there is no compiler."""

import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from typer.testing import CliRunner

import alpa_lite
from alpa_lite import models, steps, verifying
from alpa_lite.cli import app, tables
from alpa_lite.errors import AlpaLiteError, OptionError, PlanError, VerificationError
from alpa_lite.report.console import render_plain
from alpa_lite.steps import NamedStep, attribute, remember, step_of_plan_file

runner = CliRunner()


@functools.cache
def plan_of_an_mlp() -> alpa_lite.Plan:
    step, args = models.get("mlp").abstract("tiny", 16)
    return alpa_lite.make_plan(step, *args, cluster="v5e", method=alpa_lite.DataParallel())


def planned(folder: Path) -> Path:
    """A plan file that names its step."""
    plan_of_an_mlp().save(folder / "plan.json")
    steps.remember(folder / "plan.json", NamedStep("mlp", "tiny", 16))
    return folder / "plan.json"


KINDS = ("forward", "backward", "update")

FOUND = {
    "plan": "plan.json", "step": "gpt", "target": "v5e:2x4", "device": "TPU v5 lite", "devices": 8, "jax": "0.12",
    "compiler": "libtpu 0.0.50",
    "collectives": [{"kind": "all_reduce", "axes": "x", "bytes": 4096, "planned": 3, "found": 2}],
    "rewrites": ["step: merged duplicates: 1 x all_reduce over (x) of 4096 bytes"], "differences": [],
    "memory": [{"executable": "step", "submesh": 0, "predicted": 2**20, "compiler": 2**21, "arguments": 2**19,
                "outputs": 0, "temporaries": 2**19, "code": 2**18}],
    "communicates": True, "fits": False, "seconds": {"planning again": 1.0, "compiling": 2.0},
}  # fmt: skip


def test_what_was_found_stands_beside_what_was_planned() -> None:
    lines = [" ".join(line.split()) for line in render_plain(tables.verification(FOUND)).splitlines()]
    assert "gpt compiled for 8 x TPU v5 lite (v5e:2x4, libtpu 0.0.50, JAX 0.12) in 2.00 s" in lines
    assert "all_reduce x 4.00 KiB 3 2" in lines
    assert "step 1.00 MiB 2.00 MiB 0.50 512 KiB 512 KiB 256 KiB" in lines
    assert any("more than 15 % apart" in line for line in lines)
    part = render_plain(tables.verification({**FOUND, "fits": None}))
    assert "for temporaries of step." in " ".join(part.split())
    bad = render_plain(
        tables.verification({**FOUND, "communicates": False, "differences": ["step: planned but not found"]})
    )
    assert "does not communicate as planned" in bad and "step: planned but not found" in bad


def test_verify_prints_and_writes_what_was_found_and_ends_with_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = planned(tmp_path), tmp_path / "found.json"
    asked: list[tuple[NamedStep, str | None]] = []

    def answer(path: Path, step: NamedStep, target: str | None, time_limit: float) -> dict:
        asked.append((step, target))
        return {**FOUND, "communicates": target != "v6e:2x4"}

    monkeypatch.setattr(verifying, "verify", answer)
    result = runner.invoke(app, ["verify", str(file), "--target", "v5e:2x4", "--json", str(out)])
    assert result.exit_code == 0 and "Collectives of one run" in result.stdout
    assert json.loads(out.read_text()) == FOUND
    assert asked == [(NamedStep("mlp", "tiny", 16, {}), "v5e:2x4")]
    result = runner.invoke(app, ["verify", str(file), "--target", "v6e:2x4", "--json", "-"])
    assert result.exit_code == 1 and json.loads(result.stdout)["communicates"] is False


def test_a_plan_that_does_not_name_its_step_says_how_to_give_it(tmp_path: Path) -> None:
    file = planned(tmp_path)
    data = json.loads(file.read_text())
    del data["step"]
    file.write_text(json.dumps(data))
    result = runner.invoke(app, ["verify", str(file)])
    assert result.exit_code == 2 and "package.module:function --args" in " ".join(result.stderr.split())


def test_the_compiler_runs_in_a_process_with_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = NamedStep("mlp", "tiny", 16)
    with pytest.raises(OptionError, match="allow more"):
        verifying.verify(planned(tmp_path), step, "v5e:2x4", time_limit=0.05)
    monkeypatch.setattr(verifying.sys, "executable", "/bin/false")
    with pytest.raises(VerificationError, match="exit code 1"):
        verifying.verify(tmp_path / "plan.json", step, "v5e:2x4", time_limit=60)


def test_errors_cross_the_process(tmp_path: Path) -> None:
    """The target is looked at first, so that nothing is planned for one that cannot be."""
    with pytest.raises(AlpaLiteError, match="has 16 devices, and the plan is for 8"):
        verifying.verify(planned(tmp_path), NamedStep("mlp", "tiny", 16), "v5e:4x4", time_limit=120)


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (extra tpu-verify)"
)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("model", "more", "target"),
    [("gpt", [], "v5e:2x4"), ("moe", [], "v5e:2x4"), ("gpt", ["--nodes", "2", "--topology", "2x2"], "v5e:2x2*2")],
    ids=["gpt", "moe", "gpt on two slices"],
)
def test_the_compiler_of_tpus_communicates_as_planned(tmp_path: Path, model: str, more: list[str], target: str) -> None:
    file = tmp_path / "plan.json"
    small = ["--size", "tiny", "--batch", "32", "--cluster", "v5e", "-o", str(file), *more]
    assert runner.invoke(app, ["plan", model, *small]).exit_code == 0
    result = runner.invoke(app, ["verify", str(file), "--target", target, "--json", "-"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["communicates"], found["differences"]
    assert found["device"] == "TPU v5 lite" and found["devices"] == 8
    assert found["memory"] and sum(row["planned"] for row in found["collectives"]) > 0
    crosses = any("between slices" in rewrite for rewrite in found["rewrites"])
    assert crosses == ("*2" in target), found["rewrites"]


@pytest.mark.slow
@needs_libtpu
def test_a_stage_on_each_of_two_slices_is_compiled_for_its_slice(tmp_path: Path) -> None:
    """Every executable of the pipeline, as the runtime lowers it, and nothing of it leaves its slice."""
    file, step = tmp_path / "plan.json", NamedStep("gpt", "tiny", 32)
    method = alpa_lite.Pipeline(schedule="1f1b", submesh_shapes=(4, 4))
    cluster = alpa_lite.Cluster.preset("v5e", nodes=2, topology=(2, 2))
    fun, args = models.get("gpt").abstract("tiny", 32)
    plan = alpa_lite.make_plan(fun, *args, cluster=cluster, method=method, num_microbatches=4)
    plan.save(file)
    assert plan.division.first_devices == (0, 4)
    found = verifying.verify(file, step, "v5e:2x2*2", time_limit=300)
    assert found["communicates"], found["differences"]
    assert {row["submesh"] for row in found["memory"]} == {0, 1}
    assert {row["executable"] for row in found["memory"]} >= {f"stage {i} {kind}" for i in (0, 1) for kind in KINDS}
    assert not [rewrite for rewrite in found["rewrites"] if "between slices" in rewrite]
    assert all(row["arguments"] > 0 for row in found["memory"])


MODULE = """
import jax, jax.numpy as jnp, alpa_lite

def step(w, x, *, scale):
    loss, grad = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(w)
    return w - scale * grad, loss

def abstract_args():
    return jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)

class Holder:
    pair = abstract_args()

kwargs = {"scale": 0.1}
broken = [1, 2]
data = alpa_lite.parallelize(step, method=alpa_lite.DataParallel(), static_argnames="scale")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory, of a name that no other test imports."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_function_of_the_current_directory_with_arguments_by_function_by_value_and_by_keyword(module: str) -> None:
    fun, args, kwargs = NamedStep(f"{module}:step", args=f"{module}:abstract_args", kwargs=f"{module}:kwargs").load()
    assert fun.__name__ == "step" and kwargs == {"scale": 0.1}
    assert [a.shape for a in args] == [(16, 8), (32, 16)]
    _, again, none = NamedStep(f"{module}:step", args=f"{module}:Holder.pair").load()
    assert again == args and none == {}


def test_a_model_with_its_size() -> None:
    fun, args, kwargs = NamedStep("mlp", "tiny", 8, {"layers": 2}).load()
    assert callable(fun) and kwargs == {}
    assert {leaf.shape[0] for leaf in jax.tree.leaves(args[1])} == {8}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"name": "{m}:stop", "args": "{m}:abstract_args"}, "did you mean step"),
        ({"name": "{m}:step"}, "--args"),
        ({"name": "{m}:kwargs", "args": "{m}:abstract_args"}, "is a dict"),
        ({"name": "{m}:step", "args": "{m}:kwargs"}, "give a tuple"),
        ({"name": "{m}:step", "args": "{m}:broken", "kwargs": "{m}:broken"}, "give a mapping"),
        ({"name": "no_such_module.at_all:step", "args": "{m}:broken"}, "no module 'no_such_module'"),
        ({"name": "{m}:", "args": "{m}:broken"}, "package.module:attribute"),
    ],
)
def test_mistakes_say_what_to_write(module: str, step: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError) as error:
        given: dict[str, Any] = {key: value.format(m=module) for key, value in step.items()}
        NamedStep(**given).load()
    assert words in str(error.value)


def test_an_import_that_fails_within_the_module_keeps_its_own_error(tmp_path: Path, module: str) -> None:
    (tmp_path / f"{module}_bad.py").write_text("import surely_not_installed")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        attribute(f"{module}_bad:step", "the step")


def test_a_plan_file_remembers_its_step(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"plan": {}}))
    assert step_of_plan_file(file) is None
    step = NamedStep("gpt", "tiny", 8, {"seq": 16})
    remember(file, step)
    assert step_of_plan_file(file) == step
    file.write_text(json.dumps({"step": {"who": "knows"}}))
    with pytest.raises(PlanError, match="plan again"):
        step_of_plan_file(file)
    assert step_of_plan_file(tmp_path / "none.json") is None
