"""`constrain`, `allow` and `forbid`: what they fix and leave out, and what is said where that cannot be."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite import DataParallel, Manual, OptionError, Pipeline, Sharded
from alpa_lite.ir.paths import format_path
from alpa_lite.methods import STRATEGIES
from gallery.batches import f32, normal, random_arrays
from gallery.steps import Net, by_momentum, sgd
from tests.comparing import assert_close
from tests.marks import slow

X = jnp.linspace(-1, 1, 16 * 8).reshape(16, 8)


@sgd
def linen_step(params, batch):
    net: Any = Net().apply
    return ((net({"params": params}, batch) - 1) ** 2).mean()


def linen_state() -> Any:
    return random_arrays(jax.eval_shape(Net().init, jax.random.key(0), X))["params"]


def fixed(plan: alpa_lite.Plan) -> list[str]:
    return [note for note in plan.notes if note.startswith("constrain[") and " fixes " in note]


@pytest.mark.parametrize("count", [slow(1), 2])
def test_the_output_of_a_scope_is_fixed(count):
    specs = {"*/h_*/Dense_1": P("data", "model"), "Net/h_1": P(None, "model")}
    step = alpa_lite.parallelize(linen_step, constrain=specs, num_microbatches=count, verify="hlo")
    plan = step.plan(linen_state(), X)
    assert plan.stages[0].axis_names == ("data", "model")
    rows = 16 // count
    up, last = fixed(plan)
    assert up.endswith(f"fixes [{rows}, 16] to P('data', 'model'): applied (2 times)")
    assert "constrain['Net/h_1']" in last and last.endswith(f"fixes [{rows}, 8] to P(None, 'model'): applied")
    (new, loss), (wanted, expected) = step(linen_state(), X), jax.jit(linen_step)(linen_state(), X)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_close(new, wanted, rtol=1e-4)


def test_the_output_in_a_scan_over_layers_is_fixed():
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w), None

    step, weights = sgd(lambda weights, x: (jax.lax.scan(layer, x, weights)[0] ** 2).mean()), normal(0, 3, 8, 8) / 3
    run = alpa_lite.parallelize(step, constrain={"*layer": P("x")}, method=Sharded((8,)))
    (note,) = fixed(run.plan(weights, X))
    assert note.endswith("fixes [16, 8] to P('x', None): applied")
    np.testing.assert_allclose(run(weights, X)[1], jax.jit(step)(weights, X)[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"constrain": {"*/h_7": P("x")}}, ["constrain['*/h_7']", "there are", "Net/h_1"]),
        ({"constrain": {"Net": P("x", None, None)}}, ["constrain['Net']", "no output", "3 dims"]),
        ({"constrain": {"Net": P("z")}, "method": Sharded((4, 2))}, ["constrain['Net']", "no axis 'z'"]),
        ({"constrain": {"Net": ("x",)}}, ["constrain['Net']", "PartitionSpec"]),
        ({"constrain": {"Net": P("x", "x")}}, ["one dim only"]),
        ({"constrain": [P("x")]}, ["constrain=", "mapping"]),
        ({"forbid": "magic"}, ["forbid='magic'", *STRATEGIES]),
        ({"allow": ("fsdp", "pipeline")}, ["allow=", "'pipeline'", *STRATEGIES]),
        ({"forbid": "fsdp", "method": DataParallel()}, ["forbid=('fsdp',)", "Sharded()"]),
        ({"allow": "fsdp", "method": Manual({"batch": P()}, rest=Pipeline(2))}, ["allow=('fsdp',)", "Sharded()"]),
    ],
)
def test_what_cannot_be_is_an_error(options, parts):
    with pytest.raises(OptionError) as error:
        alpa_lite.parallelize(linen_step, **options).plan(linen_state(), X)
    for part in parts:
        assert part in str(error.value)


@by_momentum
def momentum_step(params, batch):
    return ((batch + jnp.tanh(batch @ params["a"]) @ params["b"]) ** 2).mean()


CLUSTER = dataclasses.replace(alpa_lite.Cluster.preset("h100", nodes=1), collectives=())


@functools.cache
def chosen(batch: int, **options: Any) -> tuple[dict[str, P], collections.Counter[str], float]:
    """Specs by printed path, collectives by kind, and seconds, on eight H100s."""
    params = {"a": f32(1024, 4096), "b": f32(4096, 1024)}
    plan = alpa_lite.make_plan(
        momentum_step, {"params": params, "mu": params}, f32(batch, 1024),
        cluster=CLUSTER, method=Sharded((8,), remat="none"), num_microbatches=1, verify="off", **options,
    )  # fmt: skip
    specs = {format_path(path): spec for path, spec in plan.stages[0].inputs.items()}
    return specs, collections.Counter(c.kind for c in plan.collectives), plan.step_seconds


SMALL, LARGE = 64, 65536


def test_without_tensor_parallelism_parameters_are_whole_in_products():
    free, _, seconds = chosen(SMALL)
    assert free["state/params/a"] == P(None, "x")  # the Megatron pattern
    specs, kinds, more = chosen(SMALL, forbid="tensor parallel")
    assert kinds["all_gather"] and more > seconds
    specs, kinds, most = chosen(SMALL, forbid=("tensor parallel", "fsdp"))
    assert specs["state/params/a"] == specs["state/params/b"] == P() and most >= more


def test_without_data_parallelism_the_batch_is_never_cut():
    assert chosen(LARGE)[0]["batch"] == P("x")
    specs, _, _ = chosen(LARGE, forbid="data parallel")
    assert specs["batch"] == P() and specs["state/params/a"] == P(None, "x")


def test_without_zero_and_fsdp_gradients_are_all_reduced():
    assert chosen(LARGE)[1]["reduce_scatter"]
    specs, kinds, _ = chosen(LARGE, forbid=("zero", "fsdp"))
    assert specs["batch"] == P("x") and set(kinds) == {"all_reduce"}
    assert not any(any(spec) for path, spec in specs.items() if path.startswith("state"))


def test_what_alone_is_allowed():
    specs, kinds, seconds = chosen(LARGE, allow=("data parallel",))
    assert set(kinds) == {"all_reduce"} and seconds >= chosen(LARGE)[2]
    specs, kinds, _ = chosen(LARGE, allow=("data parallel", "fsdp"))
    assert kinds["all_gather"] and specs["state/params/a"] != P()
