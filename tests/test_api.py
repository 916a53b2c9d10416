"""`parallelize` and what it returns: plans without running, replays without solving, donation without surprises."""

from __future__ import annotations

import functools
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite import errors
from alpa_lite.passes.search import best_first
from alpa_lite.passes.sharding.solver import solve

H100 = alpa_lite.Cluster.preset("h100", nodes=1)
WIDTH, HIDDEN, BATCH = 16, 64, 32


def step(state, batch):
    def loss(s):
        return ((jax.nn.gelu(batch["x"] @ s["w1"] + s["b1"]) @ s["w2"] - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def arguments(batch: int = BATCH) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32))

    state = {"w1": normal(WIDTH, HIDDEN), "b1": normal(HIDDEN), "w2": normal(HIDDEN, WIDTH)}
    return state, {"x": normal(batch, WIDTH), "y": normal(batch, WIDTH)}


def shapes(args: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def same(got: Any, want: Any) -> None:
    """Equal up to 1e-5 of each leaf's norm."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= 1e-5 * np.linalg.norm(b)


def reference(*args: Any) -> Any:
    return jax.jit(step)(*args)


# -- decorating and calling -------------------------------------------------------------------------------------------


def test_parallelize_is_a_decorator_with_and_without_arguments():
    @alpa_lite.parallelize
    def plain(state, batch):
        """What it does."""
        return step(state, batch)

    @alpa_lite.parallelize(method=alpa_lite.DataParallel())
    def configured(state, batch):
        return step(state, batch)

    assert plain.__name__ == "plain" and plain.__doc__ == "What it does."
    assert plain.cluster == alpa_lite.Cluster.local()
    same(plain(*arguments()), reference(*arguments()))
    same(configured(*arguments()), reference(*arguments()))
    assert configured.plan(*arguments()).method == "data parallel"


def test_a_loop_of_steps_computes_what_one_device_computes():
    parallel, single = alpa_lite.parallelize(step, method=alpa_lite.Zero(stage=3)), jax.jit(step)
    (state, batch), (other, _) = arguments(), arguments()
    for _ in range(4):
        state, loss = parallel(state, batch)
        other, expected = single(other, batch)
        same((state, loss), (other, expected))


def test_planning_leaves_the_garbage_collector_as_it_was():
    before = gc.get_threshold()
    method = alpa_lite.DataParallel()
    alpa_lite.make_plan(step, *arguments(), cluster=H100, method=method)
    assert gc.get_threshold() == before
    with pytest.raises(alpa_lite.InfeasibleError):
        alpa_lite.make_plan(step, *arguments(), cluster=H100, method=method, memory_per_device=16)
    assert gc.get_threshold() == before


def test_keyword_batches():
    def keyword(state, *, batch):
        return step(state, batch)

    state, batch = arguments()
    parallel = alpa_lite.parallelize(keyword, method=alpa_lite.DataParallel())
    same(parallel(state, batch=batch), reference(state, batch))
    inputs = parallel.plan(state, batch=batch).stages[0].inputs
    assert inputs["batch['x']"] == P("x") and inputs["state['w1']"] == P()


def test_a_second_signature_plans_again():
    parallel = alpa_lite.parallelize(step)
    for batch in (BATCH, 2 * BATCH, BATCH):
        same(parallel(*arguments(batch)), reference(*arguments(batch)))
    first, second = (parallel.plan(*arguments(n)) for n in (BATCH, 2 * BATCH))
    assert first.fingerprint != second.fingerprint
    assert parallel.plan(*arguments()) is first


def test_off_is_plain_jit():
    parallel = alpa_lite.parallelize(step, method="off")
    got, want = parallel(*arguments()), reference(*arguments())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
        assert len(a.devices()) == 1


# -- planning without running -----------------------------------------------------------------------------------------


def test_a_plan_from_shapes_executes_nothing(monkeypatch):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("an executable was made")

    monkeypatch.setattr("alpa_lite.api.load", refuse)
    before = {id(x) for x in jax.live_arrays()}
    parallel = alpa_lite.parallelize(step)
    plan = parallel.plan(*shapes(arguments()))
    assert plan.num_devices == 8
    assert plan.fingerprint == parallel.plan(*arguments()).fingerprint
    sized = [x for x in jax.live_arrays() if id(x) not in before and x.size > 1]
    assert sized == [] or {x.shape for x in sized} <= {x.shape for x in jax.tree.leaves(arguments())}


def test_a_plan_for_a_cluster_that_is_not_here():
    plan = alpa_lite.make_plan(step, *shapes(arguments()), cluster=H100)
    assert plan.num_devices == 8 == np.prod(plan.stages[0].mesh_shape)
    keyword = alpa_lite.make_plan(
        lambda state, *, batch: step(state, batch),
        shapes(arguments()[0]),
        kwargs={"batch": shapes(arguments()[1])},
        cluster=H100,
    )
    assert set(keyword.stages[0].inputs) == set(plan.stages[0].inputs)
    assert keyword.step_seconds == pytest.approx(plan.step_seconds)


def test_the_plan_says_what_took_how_long():
    plan = alpa_lite.parallelize(step).plan(*arguments())
    assert list(plan.planning_seconds) == [
        "tracing", "factors", "grouping", "sharding", "lowering", "programs", "plan", "checks",
    ]  # fmt: skip
    assert all(seconds >= 0 for seconds in plan.planning_seconds.values())
    assert plan.verification


def test_dumps_hold_every_stage(tmp_path):
    alpa_lite.parallelize(step, dump_dir=tmp_path / "dump").plan(*shapes(arguments()))
    files = sorted((tmp_path / "dump").iterdir())
    laps = ["tracing", "factors", "grouping", "sharding", "lowering", "programs", "plan", "checks"]
    assert list(dict.fromkeys(f.stem.split("_", 1)[1] for f in files)) == laps  # textbook methods are solved first
    assert "dot_general" in files[0].read_text()
    assert all(f.read_text().strip() for f in files)


# -- placing and donating ---------------------------------------------------------------------------------------------


def pointers(tree: Any) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards}


def test_place_shards_as_planned_and_never_aliases():
    parallel = alpa_lite.parallelize(step, method=alpa_lite.DataParallel())
    args = arguments()
    args[0]["b1"] = jax.device_put(args[0]["b1"], jax.devices()[0])
    placed = parallel.place(*args)
    inputs = parallel.plan(*args).stages[0].inputs
    flat = jax.tree.leaves(placed)
    assert [x.sharding.spec for x in flat] == list(inputs.values())
    assert not pointers(flat) & pointers(args)
    same(jax.tree.leaves(placed), jax.tree.leaves(args))
    # What is placed already is not aliased either.
    again = parallel.place(*arguments())
    assert not pointers(again) & pointers(placed)


def test_the_callers_first_arrays_survive_and_placed_state_is_donated():
    parallel = alpa_lite.parallelize(step)
    state, batch = arguments()
    kept = jax.tree.map(np.array, (state, batch))
    new, _ = parallel(state, batch)
    newer, _ = parallel(new, batch)
    same((state, batch), kept)
    assert all(x.is_deleted() for x in jax.tree.leaves(new))
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, batch, newer)))


def test_nothing_is_donated_on_request():
    parallel = alpa_lite.parallelize(step, donate_argnums=())
    state, batch = arguments()
    new, _ = parallel(state, batch)
    first = parallel(new, batch)
    same(parallel(new, batch), first)


def test_two_leaves_that_share_a_buffer():
    def doubled(state, batch):
        def loss(s):
            return ((batch["x"] @ s["a"] @ s["b"].T - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    state, batch = arguments()
    weights = 0.05 * state["w1"]  # small, or the loss diverges
    shared = {"a": weights, "b": weights}
    parallel, single = alpa_lite.parallelize(doubled), jax.jit(doubled)
    got, want = shared, shared
    for _ in range(3):
        got, value = parallel(got, batch)
        want, expected = single(want, batch)
        same((got, value), (want, expected))
    # Nor can placed leaves that share a buffer both be donated.
    placed = {"a": got["a"], "b": got["a"]}
    expected = single(jax.tree.map(np.array, placed), batch)
    same(parallel(placed, batch), expected)


def test_hlo_is_the_compilers_text():
    parallel = alpa_lite.parallelize(step, method=alpa_lite.DataParallel())
    (text,) = parallel.hlo(*shapes(arguments()))
    assert text.startswith("HloModule") and "all-reduce" in text


# -- replaying --------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_solver(monkeypatch):
    """After the call of the fixture's value, solving fails."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the solver was called")

    def engage() -> None:
        monkeypatch.setattr(solve, "solve", refuse)
        monkeypatch.setattr(best_first, "search", refuse)

    return engage


@pytest.mark.parametrize("method", ["auto", alpa_lite.Zero(stage=3), alpa_lite.TensorParallel()])
def test_a_plan_runs_without_solving(method, tmp_path, no_solver):
    original = alpa_lite.parallelize(step, method=method)
    plan = original.plan(*arguments())
    want = original(*arguments())
    path = tmp_path / "plan.json"
    plan.save(path)
    no_solver()
    for given in (plan, alpa_lite.Plan.load(path), path, str(path)):
        replayed = alpa_lite.parallelize(step, plan=given)
        again = replayed.plan(*arguments())
        assert again.solver.status == "replayed"
        assert again.method == plan.method
        assert again.fingerprint == plan.fingerprint
        assert again.stages[0].mesh_shape == plan.stages[0].mesh_shape
        assert again.stages[0].inputs == plan.stages[0].inputs
        assert again.stages[0].outputs == plan.stages[0].outputs
        assert again.collectives == plan.collectives
        assert again.step_seconds == pytest.approx(plan.step_seconds)
    got = replayed(*arguments())
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_a_real_plan_survives_saving(tmp_path):
    plan = alpa_lite.parallelize(step, method=alpa_lite.Zero(stage=2)).plan(*arguments())
    printed = str(plan)  # with the figures of other methods, which are saved once they are known
    plan.save(tmp_path / "plan.json")
    loaded = alpa_lite.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert hash(loaded) == hash(plan)
    assert str(loaded) == printed


# -- communication left to the compiler -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [alpa_lite.DataParallel(), alpa_lite.TensorParallel()])
def test_communication_left_to_the_compiler(method):
    parallel = alpa_lite.parallelize(step, method=method, communication="compiler")
    same(parallel(*arguments()), reference(*arguments()))
    plan = parallel.plan(*arguments())
    assert plan.ingredients["communication"] == "compiler"
    # The plan lists what Shardy inserts, so a check against Shardy has to find the same.
    assert plan.collectives and "all_reduce" in {c.kind for c in plan.collectives}
    assert plan.fingerprint != alpa_lite.parallelize(step, method=method).plan(*arguments()).fingerprint


def test_what_cannot_be_in_a_region_splits_it(capfd):
    """A `shard_map` of the user's own, on a mesh of another name, and an ordered print, which runs once."""
    own = jax.sharding.Mesh(np.array(jax.devices()), ("mine",))
    spec = jax.sharding.PartitionSpec("mine")

    def step(state, batch):
        def loss_fn(w):
            hidden = jnp.tanh(batch["x"] @ w["up"])
            here = [(i, i) for i in range(8)]
            turn = functools.partial(jax.lax.ppermute, axis_name="mine", perm=here)
            doubled = 2 * jax.shard_map(turn, mesh=own, in_specs=spec, out_specs=spec)(hidden)
            jax.debug.print("here {n}", n=doubled.shape[0], ordered=True)
            return jnp.mean((doubled @ w["down"] - batch["y"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), loss

    rng = np.random.default_rng(0)
    state = {"up": rng.normal(size=(16, 32)).astype("f4"), "down": rng.normal(size=(32, 8)).astype("f4")}
    batch = {"x": rng.normal(size=(64, 16)).astype("f4"), "y": rng.normal(size=(64, 8)).astype("f4")}
    parallel = alpa_lite.parallelize(step, method=alpa_lite.Zero(stage=3))
    new, loss = parallel(state, batch)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here 64") == 1
    plan = parallel.plan(state, batch)
    assert {row.name for row in plan.replicated} >= {"shard_map"}
    assert not any("order" in note for note in plan.notes)  # the print keeps its order

    hidden = 2 * np.tanh(batch["x"] @ state["up"])
    error = hidden @ state["down"] - batch["y"]
    np.testing.assert_allclose(loss, np.mean(error**2), rtol=1e-5)
    gradient = hidden.T @ (2 * error / error.size)
    np.testing.assert_allclose(new["down"], state["down"] - 0.1 * gradient, rtol=1e-5, atol=1e-6)


def test_every_kind_of_error_is_exported() -> None:
    kinds = [kind for kind in errors.AlpaLiteError.__subclasses__() if kind.__module__ == errors.__name__]
    assert {kind.__name__ for kind in kinds} <= set(alpa_lite.__all__)
