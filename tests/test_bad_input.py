"""What cannot be planned is refused, with an error that names the argument, its value and the remedy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.cluster import Cluster
from gallery.batches import f32
from gallery.steps import sgd

H100 = Cluster.preset("h100", nodes=1)
TRACING, OPTION, PLAN = alpa_lite.TracingError, alpa_lite.OptionError, alpa_lite.PlanError


@sgd
def step(s, batch):
    return ((jax.nn.relu(batch["x"] @ s["w1"]) @ s["w2"] - batch["y"]) ** 2).mean()


def arguments(batch: int = 16, width: int = 32, hidden: int = 64) -> tuple[Any, Any]:
    return {"w1": f32(width, hidden), "w2": f32(hidden, width)}, {"x": f32(batch, width), "y": f32(batch, width)}


def manual(specs: dict[str, P]) -> alpa_lite.Manual:
    return alpa_lite.Manual(specs, (8,), ("a",))


def make(fun=step, args: tuple[Any, ...] | None = None, **options: Any) -> alpa_lite.Plan:
    cluster = options.pop("cluster", H100)
    return alpa_lite.make_plan(fun, *(arguments() if args is None else args), cluster=cluster, **options)


@functools.cache
def planned() -> alpa_lite.Plan:
    return make(method=alpa_lite.Sharded())


def refused(error: type[Exception], *parts: str, fun=step, args: tuple[Any, ...] | None = None, **options: Any) -> None:
    """The error that planning raises has these parts."""
    with pytest.raises(error) as caught:
        make(fun, args, **options)
    assert isinstance(caught.value, alpa_lite.AlpaLiteError)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


# -- the step and its arguments ---------------------------------------------------------------------------------------


def test_what_needs_a_batch_names_the_option_that_settles_it():
    """Arrays of one argument that share no dim may be weights: that is a note, until something needs the batch."""

    def total(one):
        return jnp.square(one["a"]).sum() + one["b"].sum()

    args = ({"a": f32(16, 32), "b": f32(32, 64)},)
    assert any("batch_argnums" in note for note in make(total, args).notes)
    data: dict[str, Any] = {"fun": total, "args": args, "method": alpa_lite.DataParallel()}
    refused(OPTION, "batch_argnums", "batch", **data)
    refused(alpa_lite.MicrobatchError, "num_microbatches=2", "batch_argnums", fun=total, args=args, num_microbatches=2)
    assert "batch" in {leaf.role for leaf in make(batch_argnums=0, **data).stages[0].arguments}


def branches(state, batch):
    new, value = step(state, batch)
    if value < 1e3:
        return new, value
    return state, value


def averages(state, batch):
    new, value = step(state, batch)
    return jax.lax.pmean(new, "devices"), value


@pytest.mark.parametrize(
    ("fun", "parts"),
    [
        (branches, ["truth value of a traced array", "jax.lax.cond"]),
        (averages, ["axis 'devices'", "jax.pmap", "Leave pmean"]),
    ],
)
def test_what_jax_cannot_trace(fun, parts):
    refused(TRACING, *parts, "test_bad_input.py:", fun=fun)


def test_a_step_without_a_batch_is_planned_all_the_same():
    state, _ = arguments()
    assert make(lambda state: jax.tree.map(lambda x: 0.5 * x, state), (state,)).num_devices == 8


# -- batches and meshes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [alpa_lite.DataParallel(), alpa_lite.Zero(stage=3)])
def test_a_batch_that_does_not_divide(method):
    parts = "batch/x", "12", "8 devices", "multiple of 8", "method='auto'"
    refused(OPTION, *parts, args=arguments(batch=12), method=method)


def test_a_batch_that_does_not_divide_is_no_error_where_the_plan_is_free():
    assert make(args=arguments(batch=12), method=alpa_lite.Sharded()).num_devices == 8
    assert make(args=arguments(batch=12)).num_devices <= 8


def test_a_manual_path_of_two_arguments():
    state, batch = {"w1": {"a": f32(32, 64)}, "w1/a": f32(32, 64), "w2": f32(64, 32)}, {"x": f32(16, 32)}

    def twins(state, batch):
        return {"w1": {"a": state["w1/a"]}, "w1/a": state["w1"]["a"], "w2": state["w2"] + batch["x"].sum()}, 0.0

    parts = "'state/w1/a'", "state['w1']['a'], state['w1/a']", "write one of these"
    refused(OPTION, *parts, fun=twins, args=(state, batch), method=manual({"state/w1/a": P("a")}))


def test_a_manual_spec_that_does_not_fit():
    for spec, part in ((P("a", None, None), "shape (12, 64)"), (P("a"), "12 does not divide")):
        method = manual({"state['w1']": spec})
        refused(OPTION, "state/w1", str(spec), part, args=arguments(width=12), method=method)


# -- memory -----------------------------------------------------------------------------------------------------------


def test_an_impossible_budget():
    parts = "memory_per_device=1000", "state/w1 (4.00 MiB)", "state/w2 (4.00 MiB)", "more devices", "jax.checkpoint"
    options: dict[str, Any] = {"cluster": H100.part(2), "memory_per_device": 1000}
    more = "smallest budget that works on one mesh", "smaller batch"
    refused(alpa_lite.InfeasibleError, *parts, *more, args=arguments(16, 512, 2048), **options)


# -- plans ------------------------------------------------------------------------------------------------------------


def renamed(state, batch):
    new, value = step({"w1": state["a"], "w2": state["w2"]}, batch)
    return {"a": new["w1"], "w2": new["w2"]}, value


@sgd
def another_model(s, batch):
    gram = jnp.tanh(s["w1"] @ s["w2"])
    return (jnp.cumsum(batch["x"] @ gram @ gram, axis=1) * batch["y"]).sum()


STATE, BATCH = arguments()
HALF = {**BATCH, "x": jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)}
RENAMED = ["state/a is not in the plan", "state/w1 is in the plan but was not passed"]


@pytest.mark.parametrize(
    ("parts", "given"),
    [
        (
            ["state/w1 is float32[48, 64], planned float32[32, 64]", "batch/x", "Plan again"],
            {"args": arguments(width=48)},
        ),
        (["batch/x is bfloat16[16, 32], planned float32[16, 32]"], {"args": (STATE, HALF)}),
        (RENAMED, {"fun": renamed, "args": ({"a": STATE["w1"], "w2": STATE["w2"]}, BATCH)}),
        (["no decision", "program was", "Plan again"], {"fun": another_model}),
        (["8 devices", "16", "plan again"], {"cluster": Cluster.preset("h100", nodes=2)}),
    ],
    ids=["shapes", "dtypes", "tree", "model", "devices"],
)
def test_a_plan_for_something_else(parts, given):
    refused(PLAN, *parts, plan=planned(), **given)


def test_a_plan_file_that_is_no_plan(tmp_path):
    path = tmp_path / "plan.json"
    refused(PLAN, str(path), "cannot be read", plan=path)
    path.write_text("{}")
    refused(PLAN, str(path), "not an alpa_lite plan", plan=path)


# -- options ----------------------------------------------------------------------------------------------------------


MESH = ["mesh_shape=(3, 2)", "6 devices", "8", "another cluster"]
TWICE = ["'state/w1' two specs", "\"state['w1']\"", "give one"]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"state_argnums": 1, "batch_argnums": 1}, ["state_argnums", "[1]", "leave them out"]),
        ({"method": alpa_lite.Sharded((3, 2))}, MESH),
        ({"method": alpa_lite.Manual({"state['w1']": P("a")}, (3, 2), ("a", "b"))}, MESH),
        ({"method": manual({"state['w3']": P("a")})}, ["state['w3']", "state/w1"]),
        ({"method": manual({"state/w1": P("a"), "state['w1']": P()})}, TWICE),
        ({"metod": "auto"}, ["metod", "method"]),
        ({"method": "fastest"}, ["'fastest'", "DataParallel()"]),
        ({"cluster": "h1000"}, ["'h1000'", "h100"]),
        ({"num_microbatches": 0}, ["num_microbatches=0", "positive number", '"auto"']),
        ({"num_microbatches": 4, "method": "off"}, ["num_microbatches=4", 'method="off"', "leave one of the two out"]),
        ({"memory_per_device": -1}, ["memory_per_device=-1", "above 0"]),
        ({"communication": "fast"}, ["'fast'", "explicit", "compiler"]),
    ],
)
def test_options_that_cannot_be_used(options, parts):
    refused(OPTION, *parts, **options)


def test_a_batch_that_is_not_there():
    refused(alpa_lite.SignatureError, "batch_argnums", "argument 5", "2 positional arguments", batch_argnums=5)


def test_parallelize_wants_a_function():
    with pytest.raises(alpa_lite.OptionError, match="give the train step, a function"):
        alpa_lite.parallelize(3)  # type: ignore[arg-type]


def test_a_step_without_its_arguments():
    with pytest.raises((alpa_lite.SignatureError, TypeError), match="batch"):
        make(args=arguments()[:1])
