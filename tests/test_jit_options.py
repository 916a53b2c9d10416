"""The options of `jax.jit`, and what its functions offer, mean the same of a planned step, or are refused in a line."""

import functools
import inspect
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite import AlpaLiteError, OptionError, Pipeline, SignatureError, Zero
from alpa_lite.options import Options, StepOptions
from gallery.batches import normal
from gallery.steps import sgd
from tests.comparing import assert_close
from tests.helpers import mesh_of
from tests.marks import slow, slow_but

X = jnp.linspace(-1, 1, 64 * 16).reshape(64, 16)


MESH, WIDE, EXPLICIT = mesh_of(8), mesh_of(4, 2), mesh_of(8, kind=AxisType.Explicit)


def put(*entries: Any, mesh: Any = MESH) -> NamedSharding:
    return NamedSharding(mesh, P(*entries))


def state() -> dict[str, jax.Array]:
    return {"up": normal(0, 16, 32) / 4, "down": normal(1, 32, 16) / 5}


def loss_of(state, batch):
    out = jnp.tanh(batch @ state["up"]) @ state["down"]
    return jnp.mean((out - 1) ** 2), out


def step(state, batch):
    new, (loss, out) = sgd(loss_of, has_aux=True)(state, batch)
    return new, {"loss": loss, "out": out}


on_one_device = jax.jit(step)


COLUMNS = {"up": put(None, "data"), "down": put("data", None)}
TWO = {"up": put(None, "model", mesh=WIDE), "down": put("model", mesh=WIDE)}
SHARDINGS = {
    "state and batch": {"in_shardings": (COLUMNS, put("data")), "out_shardings": (COLUMNS, None)},
    "one for all": {"in_shardings": put()},
    "a part of the state": {"in_shardings": ({"up": put(None, "data"), "down": None}, None)},
    "results": {"out_shardings": (COLUMNS, {"loss": None, "out": put(None, "data")})},
    "two axes": {"in_shardings": (TWO, put("data", mesh=WIDE)), "out_shardings": (None, put(mesh=WIDE))},
    "explicit axes": {"in_shardings": (put(mesh=EXPLICIT), put("data", mesh=EXPLICIT))},
    "names": {"in_shardings": ({"up": P(None, "model"), "down": P("model")}, None)},
    "with a method": {"in_shardings": (COLUMNS, None), "method": Zero(3)},
}


def assert_placed(given: Any, tree: Any) -> None:
    """Every array is where a pytree prefix says."""

    def check(sharding: Any, part: Any) -> None:
        for x in jax.tree.leaves(part):
            if isinstance(sharding, NamedSharding):
                assert x.sharding.is_equivalent_to(sharding, x.ndim), (x.sharding, sharding)

    jax.tree.map(check, given, tree, is_leaf=lambda x: x is None or isinstance(x, NamedSharding | P))


@pytest.mark.parametrize("name", slow_but(("state and batch", "results", "explicit axes"), SHARDINGS))
def test_shardings_are_constraints_of_the_plan(name):
    options = SHARDINGS[name]
    ours = alpa_lite.parallelize(step, **options)
    out, want = ours(state(), X), on_one_device(state(), X)
    assert_close(out, want)
    assert_placed(options.get("out_shardings"), out)
    given = options.get("in_shardings")
    assert_placed(given, ours.place(state(), X))
    if isinstance(given, tuple):
        assert_placed(given[0], out[0])  # state stays
    assert_close(ours(out[0], X), on_one_device(want[0], X))


def test_shardings_of_a_train_state():
    def train(state, batch):
        loss, grads = jax.value_and_grad(lambda p: state.apply_fn(p, batch))(state.params)
        return state.apply_gradients(grads=grads), loss

    def apply(params, x):
        return jnp.mean((x @ params["w"] - 1) ** 2)

    before = TrainState.create(apply_fn=apply, params={"w": state()["up"]}, tx=optax.adam(0.1))
    new, loss = alpa_lite.parallelize(train, in_shardings=(put(), put("data")))(before, X)
    assert_close((new, loss), jax.jit(train)(before, X))
    assert new.params["w"].sharding.is_equivalent_to(put(), 2)


REFUSED = {
    "a mesh of other devices": {"in_shardings": put("data", mesh=mesh_of(4))},
    "a sharding of one device": {"in_shardings": (SingleDeviceSharding(jax.devices()[0]), None)},
    "no prefix": {"in_shardings": ({"up": put()}, None)},
    "too many arguments": {"in_shardings": (None, None, None)},
    "too many dims": {"in_shardings": (put(None, None, "data"), None)},
    "a dim that does not divide": {"in_shardings": (None, put(None, ("data", "model"), mesh=mesh_of(2, 4)))}
    | {"out_shardings": ({"up": put("model", mesh=mesh_of(8, 1)), "down": None}, None)},
    "state placed twice": {"in_shardings": (COLUMNS, None), "out_shardings": ({"up": put("data"), "down": None}, None)},
    "a pipeline": {"in_shardings": (COLUMNS, None), "method": Pipeline(num_stages=2)},
    "options of the compiler": {"compiler_options": ["xla"]},
    "not a flag": {"keep_unused": "yes"},
    "no such option": {"donate_argname": "state"},
    "static and donated": {"static_argnames": "state", "donate_argnames": "state"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_plan_cannot_heed_is_refused_in_a_line(name):
    with pytest.raises(AlpaLiteError) as error:
        alpa_lite.parallelize(step, **REFUSED[name]).plan(state(), X)
    text = str(error.value)
    assert len(text) < 300 and "\n" not in text and next(iter(REFUSED[name])).split("_")[0] in text


@functools.cache
def free() -> alpa_lite.Plan:
    return alpa_lite.parallelize(step).plan(state(), X)


@pytest.mark.parametrize("compiler_options", [{}, None])
def test_options_without_effect_on_a_plan(compiler_options):
    options: dict[str, Any] = {"keep_unused": True, "inline": True, "constrain": None, "forbid": None, "allow": None}
    plan = alpa_lite.parallelize(step, compiler_options=compiler_options, **options).plan(state(), X)
    assert plan.fingerprint == free().fingerprint


@pytest.mark.parametrize("method", ["auto", slow(Pipeline(num_stages=2)), "off"])
def test_options_reach_the_compiler(method):
    options = {"method": method, "compiler_options": {"xla_no_such_option": True}}
    with pytest.raises(Exception, match="xla_no_such_option"):
        alpa_lite.parallelize(step, **options)(state(), X)


@pytest.mark.parametrize("method", ["auto", "off", slow(Pipeline(num_stages=2))])
@pytest.mark.parametrize("keyword", [False, True])
def test_arguments_are_donated_by_name(method, keyword):
    ours = alpa_lite.parallelize(step, method=method, donate_argnames=("state", "absent")[: 1 + (method != "off")])
    first = ours(state=state(), batch=X) if keyword else ours(state(), X)
    kept = jax.tree.map(jnp.copy, first[0])
    ours(state=first[0], batch=X) if keyword else ours(first[0], X)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first[0]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept)) and not X.is_deleted()


def test_a_step_is_lowered_and_compiled():
    lowered = alpa_lite.parallelize(step).lower(state(), X)
    assert "stablehlo" in lowered.as_text() and lowered.compiler_ir() is not None
    compiled = lowered.compile()
    assert compiled.memory_analysis().argument_size_in_bytes > 0 and compiled.cost_analysis()["flops"] > 0
    assert "ENTRY" in compiled.as_text() and compiled.plan == lowered.plan
    assert_close(compiled(state(), X), on_one_device(state(), X))
    with pytest.raises(SignatureError, match="lower it for them"):
        compiled(state(), X[:32])


@pytest.mark.slow
def test_a_pipeline_is_lowered_and_compiled():
    lowered = alpa_lite.parallelize(step, method=Pipeline(num_stages=2), num_microbatches=2).lower(state(), X)
    with pytest.raises(OptionError, match=r"several programs; use \.compile\(\)\.as_text\(\)"):
        lowered.as_text()
    compiled = lowered.compile()
    assert len(compiled.memory_analysis()) == len(compiled.cost_analysis()) > 1
    assert compiled.as_text().count("ENTRY") > 1
    assert_close(compiled(state(), X), on_one_device(state(), X))


def test_the_cache_is_cleared():
    ours = alpa_lite.parallelize(step)
    new, _ = ours(state(), X)
    ours.clear_cache()
    assert "0 signatures planned" in repr(ours)
    assert_close(ours(new, X)[1], on_one_device(on_one_device(state(), X)[0], X)[1])


def test_annotations_are_ignored_on_request():
    def annotated(state, batch):
        return step(state, jax.lax.with_sharding_constraint(batch, put(mesh=WIDE)))

    sharded = jax.device_put(state(), put(None, "model", mesh=WIDE))
    with jax.set_mesh(WIDE):
        applied = alpa_lite.parallelize(annotated).plan(sharded, X)
        ignored = alpa_lite.parallelize(annotated, ignore_annotations=True).plan(sharded, X)
    assert applied.stages[0].axis_names == ("data", "model") and ignored.stages[0].axis_names == ("x",)
    assert ignored.step_seconds == free().step_seconds < applied.step_seconds
    said = " ".join(str(applied).split())
    assert re.search(r"shardings in the code make it \d+ % slower than .*; ignore_annotations=True plans without", said)
    assert not any("applied" in note for note in ignored.notes) and "ignore_annotations" not in str(ignored)


# -- the signature ----------------------------------------------------------------------------------------------------


def test_every_option_is_a_keyword_of_the_signature():
    keywords = [name for name in inspect.signature(alpa_lite.parallelize).parameters if name != "fun"]
    assert keywords == list(Options.__dataclass_fields__) and set(keywords) == set(StepOptions.__annotations__)
    for name in keywords:
        assert name in (alpa_lite.parallelize.__doc__ or ""), name


SCRIPT = """
import alpa_lite

@alpa_lite.parallelize
def step(w: int, x: float) -> tuple[int, float]:
    return w, x

@alpa_lite.parallelize(num_microbatches=2)
def other(w: int, x: float) -> float:
    return x

class Trainer:
    @alpa_lite.parallelize(static_argnums=0)
    def update(self, w: int) -> int:
        return w

good: tuple[int, float] = step(1, 2.0)
fine: float = other(1, x=2.0)
bound: int = Trainer().update(1)
step("a", 2.0)  # wrong
Trainer().update("a")  # wrong
alpa_lite.parallelize(step, methd="auto")  # wrong
alpa_lite.parallelize(num_microbatch=2)  # wrong
alpa_lite.make_plan(step, 1, 2.0, cluster="h100", verfy="off")  # wrong
"""


@pytest.mark.slow
def test_a_type_checker_reports_misspelt_options_and_wrong_arguments(tmp_path):
    pytest.importorskip("pyright")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    found = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(path)], capture_output=True, text=True
    ).stdout
    wrong = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# wrong" in line]
    reported = {int(line.split(":")[1]) for line in found.splitlines() if ": error" in line or "- error" in line}
    assert reported == set(wrong), found
