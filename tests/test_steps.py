"""Steps by name: models, functions of the user's own modules, and what a plan file remembers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from alpa_lite.errors import OptionError, PlanError
from alpa_lite.steps import NamedStep, attribute, remember, remembered

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
    assert remembered(file) is None
    step = NamedStep("gpt", "tiny", 8, {"seq": 16})
    remember(file, step)
    assert remembered(file) == step
    file.write_text(json.dumps({"step": {"who": "knows"}}))
    with pytest.raises(PlanError, match="plan again"):
        remembered(file)
    assert remembered(tmp_path / "none.json") is None
