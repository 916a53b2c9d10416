"""`parallelize` and what it returns: plans without running, replays without solving, donation without surprises."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite import errors
from alpa_lite.passes.search import best_first
from alpa_lite.passes.sharding.solver import solve
from gallery.batches import normal, shapes
from gallery.steps import sgd
from tests.comparing import assert_equal, compare
from tests.runtime.cases import pointers

WIDTH, HIDDEN, BATCH = 16, 64, 32


@sgd
def step(s, batch):
    return ((jax.nn.gelu(batch["x"] @ s["w1"] + s["b1"]) @ s["w2"] - batch["y"]) ** 2).mean()


def arguments(batch: int = BATCH) -> tuple[dict[str, Any], dict[str, Any]]:
    state = {"w1": normal(0, WIDTH, HIDDEN), "b1": normal(1, HIDDEN), "w2": normal(2, HIDDEN, WIDTH)}
    return state, {"x": normal(3, batch, WIDTH), "y": normal(4, batch, WIDTH)}


def reference(*args: Any) -> Any:
    return jax.jit(step)(*args)


@functools.cache
def parallel(method: Any = "auto") -> alpa_lite.ParallelStep:
    return alpa_lite.parallelize(step, method=method)


# -- decorating and calling -------------------------------------------------------------------------------------------


def test_parallelize_is_a_decorator_with_and_without_arguments():
    @alpa_lite.parallelize
    def plain(state, batch):
        """What it does."""
        return step(state, batch)

    @alpa_lite.parallelize(method=alpa_lite.DataParallel())
    def keyword(state, *, batch):
        return step(state, batch)

    assert plain.__name__ == "plain" and plain.__doc__ == "What it does."
    assert plain.cluster == alpa_lite.Cluster.local()
    state, batch = arguments()
    compare(plain(state, batch), reference(state, batch))
    compare(keyword(state, batch=batch), reference(state, batch))
    plan = keyword.plan(state, batch=batch)
    assert plan.method == "data parallel"
    assert plan.stages[0].inputs["batch['x']"] == P("x") and plan.stages[0].inputs["state['w1']"] == P()


def test_off_is_plain_jit():
    got = parallel("off")(*arguments())
    assert_equal(jax.tree.leaves(got), jax.tree.leaves(reference(*arguments())))
    assert all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(got))


def test_options_of_jit_with_modules_and_without_a_plan():
    def apply(model, x):
        return model(x)

    rows = NamedSharding(Mesh(jax.devices()[:2], ("d",)), P("d"))
    model, x = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((8, 4))
    off = alpa_lite.parallelize(apply, method="off", in_shardings=(None, rows), out_shardings=rows)
    assert off(model, x).sharding.is_equivalent_to(rows, 2)
    off = alpa_lite.parallelize(apply, method="off", compiler_options={"xla_cpu_enable_fast_math": True})
    with pytest.raises(alpa_lite.OptionError, match=r"compiler_options .* nnx.jit takes none; leave them out"):
        off(model, x)


# -- planning without running -----------------------------------------------------------------------------------------


def test_a_plan_from_shapes_executes_nothing(monkeypatch):
    monkeypatch.setattr("alpa_lite.planned_calls.load", lambda *_, **__: pytest.fail("an executable was made"))
    before = {id(x) for x in jax.live_arrays()}
    run = alpa_lite.parallelize(step, method=alpa_lite.DataParallel())
    plan = run.plan(*shapes(arguments()))
    assert plan.num_devices == 8
    assert plan.fingerprint == run.plan(*arguments()).fingerprint
    sized = [x for x in jax.live_arrays() if id(x) not in before and x.size > 1]
    assert {x.shape for x in sized} <= {x.shape for x in jax.tree.leaves(arguments())}


def test_a_plan_for_a_cluster_that_is_not_here():
    state, batch = shapes(arguments())
    options: dict[str, Any] = {"cluster": alpa_lite.Cluster.preset("h100", nodes=1), "method": alpa_lite.Sharded()}
    plan = alpa_lite.make_plan(step, state, batch, **options)
    assert plan.num_devices == 8 == np.prod(plan.stages[0].mesh_shape)

    def keyword(state, *, batch):
        return step(state, batch)

    again = alpa_lite.make_plan(keyword, state, kwargs={"batch": batch}, **options)
    assert set(again.stages[0].inputs) == set(plan.stages[0].inputs)
    assert again.step_seconds == pytest.approx(plan.step_seconds)


# -- placing and donating ---------------------------------------------------------------------------------------------


def test_place_shards_as_planned_and_never_aliases():
    run = parallel(alpa_lite.DataParallel())
    args = arguments()
    args[0]["b1"] = jax.device_put(args[0]["b1"], jax.devices()[0])
    placed = run.place(*args)
    inputs = run.plan(*args).stages[0].inputs
    flat = jax.tree.leaves(placed)
    assert [x.sharding.spec for x in flat] == list(inputs.values())
    assert not pointers(flat) & pointers(args)
    compare(flat, jax.tree.leaves(args))
    assert not pointers(run.place(*placed)) & pointers(placed)


def test_the_callers_first_arrays_survive_and_placed_state_is_donated():
    state, batch = arguments()
    kept = jax.tree.map(np.array, (state, batch))
    new, _ = parallel()(state, batch)
    newer, _ = parallel()(new, batch)
    compare((state, batch), kept)
    assert all(x.is_deleted() for x in jax.tree.leaves(new))
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, batch, newer)))


def test_nothing_is_donated_on_request():
    run = alpa_lite.parallelize(step, method=alpa_lite.DataParallel(), donate_argnums=())
    state, batch = arguments()
    new, _ = run(state, batch)
    first = run(new, batch)
    compare(run(new, batch), first)


# -- replaying --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto", alpa_lite.Zero(stage=3)])
def test_a_plan_is_saved_as_it_is_and_runs_without_solving(method, tmp_path, monkeypatch):
    plan, want = parallel(method).plan(*arguments()), parallel(method)(*arguments())
    printed, path = str(plan), tmp_path / "plan.json"  # with the figures of other methods, which are saved once known
    plan.save(path)
    loaded = alpa_lite.Plan.load(path)
    assert loaded == plan and hash(loaded) == hash(plan) and str(loaded) == printed
    for module, name in ((solve, "solve"), (best_first, "search")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("the solver was called"))
    for given in (plan, path, str(path)):
        replayed = alpa_lite.parallelize(step, plan=given)
        again = replayed.plan(*arguments())
        assert again.solver.status == "replayed"
        for name in ("method", "fingerprint", "collectives"):
            assert getattr(again, name) == getattr(plan, name)
        for name in ("mesh_shape", "inputs", "outputs"):
            assert getattr(again.stages[0], name) == getattr(plan.stages[0], name)
        assert again.step_seconds == pytest.approx(plan.step_seconds)
    for a, b in zip(jax.tree.leaves(replayed(*arguments())), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_every_kind_of_error_is_exported() -> None:
    kinds = [kind for kind in errors.AlpaLiteError.__subclasses__() if kind.__module__ == errors.__name__]
    assert {kind.__name__ for kind in kinds} <= set(alpa_lite.__all__)
