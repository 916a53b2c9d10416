"""`Manual`: which arguments its entries name, what the rest does, and that the compiled step says the same."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite import DataParallel, Manual, OptionError, Pipeline, Sharded, Zero
from alpa_lite.ir.paths import format_path
from alpa_lite.methods import matches
from alpa_lite.options import Auto
from gallery.steps import Net, linen_step, nnx_step, train_state
from tests.comparing import assert_close
from tests.marks import slow

X = jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)


@functools.cache
def linen_state() -> Any:
    return train_state(Net(), X)


@functools.cache
def on_one_device() -> Any:
    return jax.jit(linen_step)(linen_state(), X)


def sharded(plan: alpa_lite.Plan) -> dict[str, P]:
    """Printed path of each argument that is sharded -> spec."""
    return {format_path(path): spec for path, spec in plan.stages[0].inputs.items() if any(spec)}


@functools.cache
def planned(method: Manual) -> alpa_lite.Plan:
    return alpa_lite.parallelize(linen_step, method=method, verify="off").plan(linen_state(), X)


KERNELS = {"*/h_0/Dense_*/kernel": P(None, "x")}


def test_a_glob_shards_kernels_and_moments_follow_them():
    state, method = linen_state(), Manual(KERNELS, rest=DataParallel())
    step = alpa_lite.parallelize(linen_step, method=method)
    found = sharded(step.plan(state, X))
    roots = ("params", "opt_state/0/mu", "opt_state/0/nu")
    kernels = {f"state/{root}/h_0/Dense_{i}/kernel" for root in roots for i in (0, 1)}
    assert found == dict.fromkeys(kernels, P(None, "x")) | {"batch": P("x")}
    new, loss = step(state, X)
    wanted, expected = on_one_device()
    assert new.params["h_0"]["Dense_0"]["kernel"].sharding.spec == P(None, "x")
    assert new.opt_state[0].nu["h_0"]["Dense_0"]["kernel"].addressable_shards[0].data.shape == (16, 1)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(new.params, wanted.params, rtol=1e-4)


def test_nnx_paths_are_globbed_and_their_moments_follow():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    def made():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    run = alpa_lite.parallelize(nnx_step, method=Manual({"model/up/kernel": P(None, "m")}, rest=DataParallel()))
    found = sharded(run.plan(*made(), X))
    assert {path.split("/")[0] for path in found} == {"model", "optimizer", "batch"}
    assert [spec for path, spec in found.items() if path != "batch"] == [P(None, "m")] * 3
    ours, theirs = made(), made()
    np.testing.assert_allclose(run(*ours, X), nnx.jit(nnx_step)(*theirs, X), rtol=1e-6)
    np.testing.assert_allclose(ours[0].up.kernel[...], theirs[0].up.kernel[...], rtol=1e-4, atol=1e-6)
    sharding = ours[0].up.kernel[...].sharding
    assert isinstance(sharding, NamedSharding) and sharding.spec == P(None, "m")


@pytest.mark.parametrize(
    ("specs", "found"),
    [
        ({re.compile(r"params/h_\d/Dense_0/kernel$"): P(None, "m")}, ["h_0/Dense_0/kernel", "h_1/Dense_0/kernel"]),
        ({"re:params/h_1.*Dense_1/kernel": P(None, "m")}, ["h_1/Dense_1/kernel"]),
        ({"state/params/h_1/Dense_0": P("m")}, None),
        ({"state/params": {"h_1": {"Dense_0": {"kernel": P(None, "m"), "bias": None}}}}, ["h_1/Dense_0/kernel"]),
        ({"*/kernel": P(None, "m"), "*/h_0/*": P()}, ["h_1/Dense_0/kernel", "h_1/Dense_1/kernel"]),
        ({"state/params/h_0/Dense_0/kernel": P(None, "m"), "*/kernel": P()}, ["h_0/Dense_0/kernel"]),
    ],
    ids=["regex", "regex text", "prefix", "pytree", "the last wins", "an exact path wins"],
)
def test_keys(specs, found):
    plan = planned(Manual(specs, rest=Zero(1)))
    ours = {path.removeprefix("state/params/"): spec for path, spec in sharded(plan).items() if "/params/" in path}
    if found is None:  # a prefix names kernel and bias
        assert ours == {"h_1/Dense_0/kernel": P("m"), "h_1/Dense_0/bias": P("m")}
    else:
        assert ours == dict.fromkeys(found, P(None, "m"))


def test_moments_that_are_named_do_not_follow():
    name = "h_0/Dense_0/kernel"
    found = sharded(planned(Manual({f"*/{name}": P(None, "x"), f"*/mu/{name}": P("x")}, rest=DataParallel())))
    assert found[f"state/params/{name}"] == found[f"state/opt_state/0/nu/{name}"] == P(None, "x")
    assert found[f"state/opt_state/0/mu/{name}"] == P("x")


def test_data_parallelism_of_the_rest_uses_the_axes_that_no_spec_names():
    method = Manual({"*/Dense_0/kernel": P(None, "model")}, (4, 2), ("data", "model"), rest=DataParallel())
    plan = planned(method)
    assert plan.stages[0].mesh_shape == (4, 2) and plan.stages[0].axis_names == ("data", "model")
    assert sharded(plan)["batch"] == P("data")


@pytest.mark.parametrize("axes", [slow(("a", "b")), ("b", "a")])
def test_both_orders_of_axes(axes):
    method = Manual({"*/params/h_0/Dense_1/kernel": P(axes)}, (4, 2), ("a", "b"))
    step = alpa_lite.parallelize(linen_step, method=method)
    new, loss = step(linen_state(), X)
    assert new.params["h_0"]["Dense_1"]["kernel"].sharding.spec == P(axes)
    np.testing.assert_allclose(loss, on_one_device()[1], rtol=1e-6)


def test_unconstrained_dims_are_left_to_the_rest():
    fixed = P("y", P.UNCONSTRAINED)
    spec = sharded(planned(Manual({"*/params/h_0/Dense_1/kernel": fixed})))["state/params/h_0/Dense_1/kernel"]
    assert spec[0] == "y"


@pytest.mark.slow
def test_specs_of_a_pipeline_hold_on_each_submesh():
    rest = Pipeline(2, submesh_shapes=((2, 2), (2, 2)))
    method = Manual({"*/h_*/Dense_0/kernel": P(None, "model")}, axis_names=("data", "model"), rest=rest)
    step = alpa_lite.parallelize(linen_step, method=method, num_microbatches=2)
    plan = step.plan(linen_state(), X)
    specs = [(format_path(path), spec) for stage in plan.stages for path, spec in stage.inputs.items()]
    found = {path: spec for path, spec in specs if path.endswith("Dense_0/kernel")}
    assert len(found) == 6 and set(found.values()) == {P(None, "model")}
    assert [stage.axis_names for stage in plan.stages] == [("data", "model")] * 2
    np.testing.assert_allclose(step(linen_state(), X)[1], on_one_device()[1], rtol=1e-6)


@pytest.mark.slow
def test_moments_are_sharded_within_the_stages_of_a_pipeline():
    """ZeRO-1 over the axis of data parallelism, beside tensor parallelism over the other one."""
    rest = Pipeline(2, submesh_shapes=((2, 2), (2, 2)))
    kernels = {"*/h_*/Dense_0/kernel": P(None, "model"), "*/h_*/Dense_1/kernel": P("model")}
    moments = {
        f"*/{moment}/*/{kernel}": spec
        for moment in ("mu", "nu")
        for kernel, spec in (("Dense_0/kernel", P("data", "model")), ("Dense_1/kernel", P("model", "data")))
    }
    method = Manual(kernels | moments, axis_names=("data", "model"), rest=rest)
    step = alpa_lite.parallelize(linen_step, method=method, num_microbatches=2)
    plan = step.plan(linen_state(), X)
    found = {format_path(path): spec for stage in plan.stages for path, spec in stage.inputs.items()}
    of = {path: spec for path, spec in found.items() if path.endswith("h_1/Dense_1/kernel")}
    assert len(of) == 3 and set(of.values()) == {P("model"), P("model", "data")}
    assert any(c.kind == "all_gather" and c.axes == ("data",) for c in plan.collectives)
    new, loss = step(linen_state(), X)
    expected, value = on_one_device()
    np.testing.assert_allclose(loss, value, rtol=1e-6)
    assert_close(new.opt_state, expected.opt_state, atol=1e-7)


def test_shapes_are_tried_for_names_without_a_shape():
    plan = planned(Manual({"batch": P("data"), "*/Dense_0/kernel": P(None, "model")}))
    assert plan.stages[0].axis_names == ("data", "model")
    assert {candidate.mesh_shape for candidate in plan.candidates} == {(4, 2), (2, 4)}


@pytest.mark.parametrize(
    ("specs", "parts"),
    [
        ({"*/h_3/*": P("x")}, ["'*/h_3/*'", "not an argument", "state/"]),
        ({"state/params/h_0/Dense_0/kernle": P("x")}, ["similar", "state/params/h_0/Dense_0/kernel"]),
        ({"state/params/h_0": P(None, "x")}, ["state/params/h_0/Dense_0/bias", "2 entries for 1 dims"]),
        ({"state/step": P("x")}, ["state/step", "scalar"]),
        ({"state/params/h_0/Dense_1/kernel": P(("x", "y"))}, ["8 does not divide"]),
    ],
)
def test_errors_name_key_and_remedy(specs, parts):
    nodes = 2 if "'y'" in str(specs) else 1
    method = Manual(specs, (8, 2) if nodes == 2 else (8,))
    with pytest.raises(OptionError) as error:
        alpa_lite.make_plan(
            linen_step, linen_state(), X, cluster=alpa_lite.Cluster.preset("h100", nodes=nodes), method=method
        )
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"specs": {"w": P("a")}, "rest": Auto()}, "rest="),
        ({"specs": {"w": P("a")}, "mesh_shape": (4, 2)}, "give axis_names"),
        ({"specs": {"w": P("a")}, "mesh_shape": (8,), "rest": Sharded((4, 2))}, "one mesh shape"),
        ({"specs": {"w": P("a")}, "mesh_shape": (8,), "rest": Pipeline()}, "submesh_shapes"),
        ({"specs": {"w": P("a")}, "rest": Pipeline(submesh_shapes=((2, 2), (4,)))}, "submesh 2 x 2"),
        ({"specs": {3: P("a")}}, "path, a glob"),
        ({"specs": {"re:(": P("a")}}, "not a regular expression"),
        ({"specs": {re.compile("w", re.IGNORECASE): P("a")}}, "flags"),
        ({"specs": {"w": {"a": 3}}}, "PartitionSpec"),
        ({"specs": [P("a")]}, "mapping"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        Manual(**arguments)


def test_matching_of_keys():
    path = "state/params/h_0/Dense_1/kernel"
    some: list[Any] = [path, "state/params", "*/h_0/Dense_?/kernel", "*/h_[01]", "re:Dense_\\d", "state['params']"]
    assert all(matches(key, path) for key in some)
    assert not any(matches(key, path) for key in ("h_0", "state/par", "*/h_1", "re:^params", "*/Dense_1/bias"))
