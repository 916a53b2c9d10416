"""`alpa_lite.check`: planned steps that are right are equal, and of those that are wrong it names the operation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import alpa_lite
from alpa_lite import models
from alpa_lite.errors import OptionError
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.lowering import emission, lowering
from alpa_lite.runtime.debug import first_divergence, reference
from gallery.steps import in_place, optimizer_step
from tests.helpers import local
from tests.marks import slow

METHODS = {
    "mesh": {"method": alpa_lite.DataParallel()},
    "loop": {"method": alpa_lite.Zero(stage=3), "num_microbatches": 2},
    "pipeline": {"method": alpa_lite.Pipeline(num_stages=2, submesh_shapes=((2,), (2,))), "num_microbatches": 2},
}
OPTIMIZER = optax.adam(1e-2)


def loss_of(params, x, y):
    hidden = jnp.tanh(x @ params["a"])
    hidden = jnp.sin(hidden @ params["b"])
    return jnp.mean(jnp.square(hidden @ params["c"] - y))


step = optimizer_step(loss_of, OPTIMIZER)


def arguments() -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for name in "abc"}
    x, y = (rng.normal(size=(16, 8)).astype("f4") for _ in range(2))
    return params, OPTIMIZER.init(params), x, y


def planned(name: str, fun=step) -> alpa_lite.ParallelStep:
    return alpa_lite.parallelize(fun, cluster=local(4), **METHODS[name])


def break_form(monkeypatch, primitive: str) -> None:
    """The local form of a primitive gives results that are too large by half."""
    form_of = lowering.local_form

    def broken(op, *args):
        form = form_of(op, *args)
        if form is None or op.name != primitive:
            return form
        return dataclasses.replace(form, own=lambda *blocks: [1.5 * y for y in form.run(*blocks)])

    monkeypatch.setattr(lowering, "local_form", broken)


@pytest.mark.parametrize("name", METHODS)
def test_what_is_right_is_equal_and_nothing_is_donated(name: str) -> None:
    args = arguments()
    checked = alpa_lite.check(planned(name), *args)
    assert checked and checked.ok and checked.difference is None
    assert len(checked.leaves) == 11 and str(checked).startswith("equal: all 11 leaves; the largest error is ")
    assert {leaf.path for leaf in checked.leaves} >= {"result/0/a", "result/1/0/mu/b", "result/2"}
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(args) if isinstance(leaf, jax.Array))


@pytest.mark.parametrize(
    ("name", "stage"),
    [("mesh", -1), slow("loop", -1), slow("pipeline", 0)],
)
def test_names_the_operation_that_is_broken(name: str, stage: int, monkeypatch) -> None:
    break_form(monkeypatch, "tanh")
    checked = alpa_lite.check(planned(name), *arguments())
    assert not checked and not checked.leaves[-1].ok
    found = checked.difference
    assert found is not None and found.operation == "tanh" and "loss_of" in found.where
    assert found.stage == stage and found.error == pytest.approx(0.5)
    assert found.iteration == (() if name == "mesh" else (0,))
    assert "first to differ: " in str(checked) and "result/2" in str(checked)


@pytest.mark.slow
def test_names_the_stage(monkeypatch) -> None:
    """The square of the loss is in the last stage; what stage 0 gets of it is taken from the step as written."""
    break_form(monkeypatch, "square")
    found = alpa_lite.check(planned("pipeline"), *arguments()).difference
    assert found is not None and found.stage == 1 and found.operation in ("square", "integer_pow")


@pytest.mark.slow
def test_names_the_first_of_several_in_the_backward_pass_too(monkeypatch) -> None:
    break_form(monkeypatch, "cos")  # of sin's derivative: the loss is right, and c's gradient
    checked = alpa_lite.check(planned("mesh"), *arguments())
    leaves = {leaf.path: leaf for leaf in checked.leaves}
    assert leaves["result/2"].ok and leaves["result/1/0/mu/c"].ok and not leaves["result/1/0/mu/a"].ok
    assert checked.difference is not None and checked.difference.operation == "cos"


def test_names_a_collective(monkeypatch) -> None:
    """An all-reduce that gives something else than the sum."""
    change = emission.change_layout

    def broken(block, step, shape, mesh):
        return change(block, step, shape, mesh) * (0.5 if step.kind == "all_reduce" else 1)

    monkeypatch.setattr(emission, "change_layout", broken)
    found = alpa_lite.check(planned("mesh"), *arguments()).difference
    assert found is not None and found.operation == "all_reduce over x"


@pytest.mark.slow
def test_rounding_that_the_optimizer_enlarges_is_no_error() -> None:
    """Adam moves a weight whose gradient is zero but for rounding by the learning rate, in either direction."""

    def loss(params, x, y):
        shifted = jax.nn.softmax(x @ params["a"] + params["b"].sum())  # no softmax feels a shift
        return jnp.mean((shifted @ params["c"] - y) ** 2)

    noisy = optimizer_step(loss, optax.adam(1.0, eps=0.0, eps_root=0.0))
    checked = alpa_lite.check(planned("mesh", noisy), *arguments())
    assert checked.ok, str(checked)
    leaves = {leaf.path: leaf for leaf in checked.leaves}
    assert leaves["result/2"].tolerance == 1e-3  # the loss has nothing of it
    assert max(leaf.tolerance for leaf in checked.leaves) > 1e-3


def test_modules_are_not_updated_and_keys_are_compared() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layer, self.dropout = nnx.Linear(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)

    train = in_place(lambda net, x: jnp.mean(net.dropout(net.layer(x)) ** 2))
    before = np.asarray(net.layer.kernel[...])
    checked = alpa_lite.check(planned("mesh", train), net, optimizer, arguments()[2])
    assert checked.ok, str(checked)
    assert np.array_equal(before, np.asarray(net.layer.kernel[...]))
    assert any("rng" in leaf.path.lower() for leaf in checked.leaves)


def test_only_planned_steps_are_checked() -> None:
    for given in (step, alpa_lite.parallelize(step, method="off")):
        with pytest.raises(OptionError, match="give a step of parallelize"):
            alpa_lite.check(given, *arguments())  # type: ignore[arg-type]


def test_errors_see_every_device_and_what_is_not_finite() -> None:
    whole = jnp.arange(8.0)
    assert first_divergence.error(whole, whole) == 0.0
    assert first_divergence.error(whole + 0.7, whole) == pytest.approx(0.1)
    assert first_divergence.error(whole.at[3].set(jnp.nan), whole) == np.inf
    assert first_divergence.error(whole.at[3].set(jnp.nan), whole.at[3].set(jnp.nan)) == 0.0
    assert first_divergence.error(whole.astype(int), whole.astype(int) + 1) == np.inf
    devices = jax.devices()[:2]
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    blocks = [jax.device_put(whole + 7 * i, device) for i, device in enumerate(devices)]
    copies = jax.make_array_from_single_device_arrays((8,), sharding, blocks)
    assert first_divergence.error(copies, whole) == pytest.approx(1.0)  # the second copy differs


def test_repr_of_a_step_says_what_is_planned() -> None:
    one = planned("mesh")
    assert repr(one) == "<ParallelStep step: data parallel, 0 signatures planned>"
    one.plan(*arguments())
    assert repr(one) == "<ParallelStep step: data parallel, 1 signature planned>"
    off = alpa_lite.parallelize(step, method="off")
    assert repr(off) == "<ParallelStep step: off: plain jit, 0 signatures planned>"


@pytest.mark.slow
def test_a_pipeline_of_scanned_layers_is_examined_whole() -> None:
    """Stacked arguments in pieces, and sums that stages exchange in their updates, are found for every stage."""
    fun, args = models.get("gpt").build("tiny", 8, 0, layers=2, seq=8, hidden=16, scan=True)
    method = alpa_lite.Pipeline(num_stages=2)
    piped = alpa_lite.parallelize(fun, cluster=local(4), method=method, num_microbatches=2)
    assert alpa_lite.check(piped, *args).ok
    compiled, _ = piped.prepare_call(args, {})
    leaves = reference.ReferenceRun(compiled.source, args, {}).leaves
    assert reference.first_difference(compiled.staged, leaves, 1e-2) is None
    traced, given = compiled.staged.traced, reference.pieces(compiled.staged.traced, leaves)
    known, want = reference._values(compiled.staged, given), evaluation.evaluate(traced.graph, given)
    for stage in compiled.staged.stages:
        inputs = [known[reference._kind(port), port.number] for port in stage.graph.inputs]
        results = zip(stage.graph.outputs, evaluation.evaluate(stage.graph.traced.graph, inputs), strict=True)
        assert all(reference.error(one, want[port.number]) < 1e-5 for port, one in results if port.kind == "argument")


def test_each_leaf_is_as_exact_as_what_it_is_made_of():
    """A metric in half precision does not excuse errors of weights that are computed in float32."""

    def metrics(w: Any, x: Any) -> Any:
        rough = jnp.sum(x.astype(jnp.bfloat16))
        return w - 0.1 * jnp.sin(x).mean(0), {"rough": rough, "mixed": w * rough.astype(jnp.float32), "rows": len(x)}

    arguments = jnp.ones(8), jnp.ones((16, 8))
    checked = alpa_lite.check(planned("mesh", metrics), *arguments)
    assert checked.ok, str(checked)
    assert [leaf.tolerance for leaf in checked.leaves] == [1e-3, 5e-2, 5e-2, 0.0]  # w, mixed, rough, rows
    run = reference.ReferenceRun(planned("mesh", metrics).prepare_call(arguments, {})[0].source, arguments, {})
    weights, mixed, *_ = run.conditioning()
    assert weights < 1e-6 < 1e-3 < mixed


def test_operations_round_though_all_results_are_integers(monkeypatch):
    """Operations are compared with the tolerance of the step, also where no leaf has one."""

    def classes(w: Any, x: Any) -> Any:
        return (jnp.sin(x @ w) > 0.9).astype(jnp.int32)

    limits: list[float] = []
    monkeypatch.setattr(reference, "first_difference", lambda staged, arguments, limit: limits.append(limit))
    break_form(monkeypatch, "sin")
    rng = np.random.default_rng(0)
    checked = alpa_lite.check(planned("mesh", classes), *(jnp.asarray(rng.normal(size=(16, 16)), "f4") for _ in "wx"))
    assert not checked.ok and [leaf.tolerance for leaf in checked.leaves] == [0.0]
    assert limits == [1e-3]
