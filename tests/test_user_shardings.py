"""What users say of shardings in the step, in Flax, on arrays and around the call is planned, and told in notes."""

import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite import DataParallel, OptionError, Pipeline, Sharded
from alpa_lite.ir.paths import format_path
from gallery.batches import normal
from gallery.steps import linen_step, nnx_step, sgd, train_state
from tests.comparing import assert_close
from tests.helpers import mesh_of
from tests.marks import slow

FREE = P.UNCONSTRAINED
BATCH = jnp.linspace(-1, 1, 16 * 16).reshape(16, 16)


def put(spec: P, mesh: Mesh | None = None) -> NamedSharding:
    return NamedSharding(mesh or mesh_of(4, 2), spec)


def step_with(say: Callable[[Any], Any]) -> Callable[..., Any]:
    """A step of two products whose hidden activations go through `say`."""
    return sgd(lambda state, batch: ((say(jnp.tanh(batch @ state["up"])) @ state["down"] - 1) ** 2).mean())


def state() -> dict[str, jax.Array]:
    return {"up": normal(0, 16, 32) / 4, "down": normal(1, 32, 16) / 4}


PLAIN = step_with(lambda h: h)


def constrained(sharding: Any, **options: Any) -> Any:
    """The planned step with a constraint on its hidden activations."""
    return alpa_lite.parallelize(step_with(lambda h: jax.lax.with_sharding_constraint(h, sharding)), **options)


def check(step: Any, plain: Any, *args: Any) -> alpa_lite.Plan:
    """The plan of a step whose results are those of plain jit."""
    assert_close(step(*args), jax.jit(plain)(*args), rtol=1e-4)
    return step.plan(*args)


def mesh(plan: alpa_lite.Plan) -> tuple[Any, ...]:
    return (*plan.stages[0].mesh_shape, *plan.stages[0].axis_names)


def said(plan: alpa_lite.Plan) -> list[str]:
    return [note for note in plan.notes if "applied" in note]


DATA_MODEL = (4, 2, "data", "model")


@pytest.mark.parametrize(
    ("say", "gathers"),
    [
        slow(lambda h: jax.lax.with_sharding_constraint(h, put(P("data", "model"))), None),
        slow(lambda h: jax.lax.with_sharding_constraint(h, put(P(FREE, ("model", "data")))), None),
        (lambda h: jax.lax.with_sharding_constraint(h, put(P())), (16, 32)),
        slow(lambda h: jax.device_put(h, put(P("model"))), None),
    ],
    ids=["blocks", "unconstrained", "whole", "device_put"],
)
def test_constraints_in_the_step_are_hard(say, gathers):
    step = alpa_lite.parallelize(step_with(say), verify="hlo")
    plan = check(step, PLAIN, state(), BATCH)
    assert mesh(plan) == DATA_MODEL
    assert said(plan) and all(note.split(": ")[-1].startswith("applied") for note in said(plan))
    assert "test_user_shardings.py" in said(plan)[0]
    (price,) = [note for note in plan.notes if "without, on this mesh" in note]
    with_it, without = map(float, re.findall(r"([0-9.e+-]+) s ", price))
    assert with_it == pytest.approx(plan.step_seconds, rel=1e-3) and with_it > without
    if gathers is not None:  # the plan would keep it in blocks: compiled, it is gathered
        assert f"f32[{gathers[0]},{gathers[1]}]" in "".join(
            line for text in step.hlo(state(), BATCH) for line in text.splitlines() if "all-gather" in line
        )
        free = alpa_lite.parallelize(PLAIN).plan(state(), BATCH)
        assert not [c for c in free.collectives if c.kind == "all_gather" and c.bytes >= 16 * 32 * 4]


@pytest.mark.slow
def test_a_constraint_is_applied_where_the_compiler_communicates():
    step = constrained(put(P()), communication="compiler")
    check(step, PLAIN, state(), BATCH)
    assert "f32[16,32]" in "".join(line for line in step.hlo(state(), BATCH)[0].splitlines() if "all-gather" in line)


def test_a_constraint_survives_micro_batches():
    step = constrained(put(P("data", "model")), num_microbatches=2)
    plan = check(step, PLAIN, state(), BATCH)
    assert said(plan) == [note for note in said(plan) if "[8, 32] to P('data', 'model'): applied" in note] != []


def test_constraints_that_no_mesh_of_the_plan_can_fulfil_are_named():
    half = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    step = constrained(put(P("data"), half))
    notes = said(check(step, PLAIN, state(), BATCH))
    assert "mesh of 4 devices, and the plan 8: not applied" in notes[0] and "no axis 'data'" in notes[1]
    step = constrained(put(P("data")), method=Pipeline(2), num_microbatches=2)
    assert "not applied" in said(step.plan(state(), BATCH))[0]


def test_a_mesh_shape_beside_a_constraint_on_another_mesh_is_an_error():
    step = constrained(put(P("data")), method=Sharded((8,)))
    with pytest.raises(OptionError, match=r"mesh_shape=\(8,\): sharding_constraint at .* data=4 x model=2"):
        step.plan(state(), BATCH)


@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
def test_the_mesh_of_the_context_is_the_mesh_of_the_plan(kind):
    step = constrained(P("data", "model"))
    with jax.set_mesh(mesh_of(2, 4, kind=kind)):
        plan = step.plan(state(), BATCH)
        new, _ = step(state(), BATCH)
        again = step(new, BATCH)[1]
    assert mesh(plan) == (2, 4, "data", "model") and len(said(plan)) == 1
    plain = jax.jit(PLAIN)
    np.testing.assert_allclose(again, plain(plain(state(), BATCH)[0], BATCH)[1], rtol=1e-5)


def test_a_legacy_context_names_the_mesh():
    step = constrained(P("model"))
    with warnings.catch_warnings(action="ignore"), mesh_of(4, 2):  # deprecated, and still written
        assert mesh(step.plan(state(), BATCH)) == DATA_MODEL


def test_a_step_for_explicit_axes_is_refused_with_the_remedy():
    step = alpa_lite.parallelize(step_with(lambda h: jax.sharding.reshard(h, P("data"))))
    with jax.set_mesh(mesh_of(4, 2, kind=AxisType.Explicit)), pytest.raises(OptionError, match=r"AxisType\.Auto"):
        step.plan(state(), BATCH)


@pytest.mark.slow
def test_a_pipeline_runs_in_the_context_of_a_mesh():
    step = alpa_lite.parallelize(PLAIN, method=Pipeline(2), num_microbatches=2)
    with jax.set_mesh(mesh_of(4, 2)):
        loss = step(state(), BATCH)[1]
    np.testing.assert_allclose(loss, jax.jit(PLAIN)(state(), BATCH)[1], rtol=1e-5)


@pytest.mark.parametrize("spec", [slow(P(None, "model")), P(("model", "data"))])
def test_arrays_that_arrive_sharded_stay(spec):
    sharded = state() | {"up": jax.device_put(state()["up"], put(spec))}
    step = alpa_lite.parallelize(PLAIN)
    plan = check(step, PLAIN, sharded, BATCH)
    assert mesh(plan) == DATA_MODEL and plan.stages[0].inputs["state['up']"] == spec
    assert said(plan) == [f"an array that arrives as {spec} on state/up: applied"]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), sharded)
    abstract = alpa_lite.parallelize(PLAIN).plan(shapes, BATCH)
    assert abstract.stages[0].inputs["state['up']"] == spec


@pytest.mark.parametrize("method", [DataParallel(), Sharded((8,))])
def test_arrays_give_way_to_a_method_that_asks_for_something_else(method):
    sharded = state() | {"up": jax.device_put(state()["up"], put(P(None, "model")))}
    plan = alpa_lite.parallelize(PLAIN, method=method).plan(sharded, BATCH)
    assert plan.stages[0].mesh_shape == (8,) and "not applied with" in said(plan)[0]


class Boxed(nn.Module):
    logical: bool

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        box = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("embed", "hidden") if self.logical else (None, "model")
        x = nn.Dense(32, kernel_init=box(init, names))(x)
        if self.logical:
            x = with_logical_constraint(x, ("batch", "hidden"))
        return nn.Dense(16)(jnp.tanh(x))


RULES = (("batch", "data"), ("hidden", "model"))


@pytest.mark.parametrize(
    ("logical", "rules", "context", "names"),
    [
        (False, (), False, "model"),
        slow(False, (), True, "data model"),
        (True, RULES, True, "data model"),
        slow(True, RULES, False, "model"),
    ],
)
def test_boxes_of_linen(logical, rules, context, names):
    before = train_state(Boxed(logical), BATCH)
    step = alpa_lite.parallelize(linen_step)
    with nn.logical_axis_rules(rules), jax.set_mesh(mesh_of(4, 2)) if context else contextlib.nullcontext():
        plan = step.plan(before, BATCH)
        new, loss = step(before, BATCH)
    found = {format_path(path): spec for path, spec in plan.stages[0].inputs.items()}
    for root in ("params", "opt_state/0/mu", "opt_state/0/nu"):
        assert found[f"state/{root}/Dense_0/kernel/value"] == P(None, "model")
    assert set(names.split()) <= set(plan.stages[0].axis_names)
    assert any(("Logically" in note) == logical and "and 2 more: applied" in note for note in said(plan))
    assert any("sharding_constraint" in note for note in said(plan)) == context
    np.testing.assert_allclose(loss, jax.jit(linen_step)(before, BATCH)[1], rtol=1e-5)
    assert new.params["Dense_0"]["kernel"].value.sharding.spec == P(None, "model")


def test_logical_names_without_rules_are_named():
    plan = alpa_lite.parallelize(linen_step).plan(train_state(Boxed(True), BATCH), BATCH)
    assert said(plan) == ["nn.LogicallyPartitioned('embed', 'hidden') without nn.logical_axis_rules: not applied"]


class Annotated(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
        self.up, self.down = nnx.Linear(16, 32, kernel_init=init, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


@pytest.mark.parametrize("eager", [True, slow(False)])
def test_annotations_of_nnx(eager):
    def made():
        model = Annotated(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    before = nnx.using_eager_sharding()
    nnx.use_eager_sharding(eager)
    try:
        with jax.set_mesh(mesh_of(2, 4)) if eager else contextlib.nullcontext():
            ours, theirs = made(), made()
    finally:
        nnx.use_eager_sharding(before)
    step = alpa_lite.parallelize(nnx_step)
    plan = step.plan(*ours, BATCH)
    found = {format_path(path): spec for path, spec in plan.stages[0].inputs.items()}
    assert found["model/up/kernel/value"] == found["optimizer/opt_state/0/mu/up/kernel/value"] == P(None, "model")
    assert mesh(plan) == (2, 4, "data", "model") if eager else "model" in plan.stages[0].axis_names
    np.testing.assert_allclose(step(*ours, BATCH), nnx.jit(nnx_step)(*theirs, BATCH), rtol=1e-5)
    sharding = ours[0].up.kernel[...].sharding
    assert isinstance(sharding, NamedSharding) and sharding.spec == P(None, "model")
