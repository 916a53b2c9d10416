"""Running a step: same results as `jit`, nothing of the caller's deleted, no copies of what is already placed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Lit
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.options import Options
from alpa_lite.passes.ir.evaluation import evaluate_block
from alpa_lite.passes.tracing.tracing import trace
from alpa_lite.plan.pins import layout_of_spec
from alpa_lite.runtime.binding import NewSignature
from alpa_lite.runtime.jit_fallback import jit_fallback
from alpa_lite.runtime.load import load_on_mesh
from alpa_lite.runtime.step import Executable, LoadOptions
from gallery.steps import apply_optimizer, in_place
from tests.comparing import assert_close, is_key
from tests.runtime.cases import pointers

OPTIMIZER = optax.adam(1e-2)
MOMENTUM = optax.sgd(0.1, momentum=0.9)  # unlike Adam it does not blow up gradients that are zero but for rounding


def whole(traced, shape, inputs, outputs, donate: Any = "auto") -> Executable:
    """The step on a mesh, from specs of its arguments, perhaps of its constants, and of its results."""
    block, values = traced.graph.block, traced.graph.values
    specs = [*inputs, *[P()] * (len(block.inputs) - len(inputs))]
    taken, given = (
        [layout_of_spec(s, one.aval.ndim if isinstance(one, Lit) else len(values[one].shape)) for s, one in pairs]
        for pairs in (zip(specs, block.inputs, strict=True), zip(outputs, block.outputs, strict=True))
    )
    mesh = LogicalMesh(shape, ("a", "b")[: len(shape)])
    options = LoadOptions(donate=donate)
    return load_on_mesh(
        traced, mesh, [*taken, *given], lambda _: lambda *leaves: evaluate_block(block, leaves), options
    )


def executable(fun, *args, shape=(8,), state=None, donate: Any = "auto", batch_argnums: Any = "auto") -> Executable:
    """State sharded by `state(shape of the leaf)`, batch by its leading dim, the rest replicated."""
    traced = trace(fun, args, {}, batch_argnums=batch_argnums)
    values, inputs = traced.graph.values, traced.graph.block.inputs
    roles = {"state": state or (lambda dims: P()), "batch": lambda dims: P("a"), "other": lambda dims: P()}
    arguments = [roles[one.role](values[n].shape) for one, n in zip(traced.arguments, inputs, strict=False)]
    new_value = dict(traced.state)
    outputs = [arguments[new_value[i]] if i in new_value else P() for i in range(len(traced.outputs))]
    return whole(traced, shape, arguments, outputs, donate)


def mesh_of(run: Executable) -> Mesh:
    """The mesh of a step on one mesh."""
    (mesh,) = run._buffers.meshes
    return mesh


def fsdp(dims):
    return P("a") if dims and dims[0] % 8 == 0 else P()


def make_state():
    params = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4), "b": jnp.zeros(4)}
    return {"params": params, "memory": OPTIMIZER.init(params), "step": jnp.int32(0)}


def make_batch(rows=16):
    return {"x": np.cos(np.arange(rows * 8, dtype=np.float32)).reshape(rows, 8), "y": np.ones((rows, 4), np.float32)}


def step(state, batch):
    def loss_of(params):
        return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()

    new, loss = apply_optimizer(loss_of, state, OPTIMIZER)
    return {**new, "step": state["step"] + 1}, loss


def deleted(tree):
    return [leaf.is_deleted() for leaf in jax.tree.leaves(tree)]


def outcome(run, state, *rest):
    """The state and results of two calls."""
    state, _ = run(state, *rest)
    return run(state, *rest)


@functools.cache
def adam(shape=(8,)) -> Executable:
    """`step` with sharded state."""
    return executable(step, make_state(), make_batch(), shape=shape, state=fsdp)


@pytest.mark.parametrize("shape", [(1,), (8,)])
def test_placed_state_is_donated_without_copies(shape):
    run = adam(shape)
    first, _ = run(make_state(), make_batch())
    before = pointers(first)
    second, _ = run(first, make_batch())
    assert all(deleted(first)) and pointers(second) == before
    placed, batch = run.place(make_state(), make_batch())
    run(placed, batch)
    assert all(deleted(placed)) and not any(deleted(batch))


@pytest.mark.parametrize("shape", [(1,), (8,)])
@pytest.mark.parametrize("kind", ["numpy", "committed", "replicated", "sharded", "half placed", "one leaf replaced"])
def test_a_callers_arrays_are_never_deleted(shape, kind):
    run = adam(shape)
    mesh = Mesh(mesh_of(run).devices, ("z",), axis_types=(AxisType.Auto,))
    start = make_state()
    if kind == "numpy":
        start = jax.tree.map(np.array, start)
    elif kind == "committed":
        start = jax.device_put(start, jax.devices()[0])
    elif kind == "half placed":
        start["memory"] = run.place(make_state(), make_batch())[0]["memory"]
    elif kind == "one leaf replaced":  # in a state that a call returned
        start, _ = run(start, make_batch())
        start["params"]["w"], start["params"]["b"] = make_state()["params"]["w"], jnp.zeros(4)
    else:
        spec = P("z") if kind == "sharded" else P()
        start = jax.tree.map(
            lambda a: jax.device_put(a, NamedSharding(mesh, spec if a.shape[:1] == (8,) else P())), start
        )
    held, expected = pointers(start["params"]), jax.jit(step)(jax.tree.map(np.array, start), make_batch())
    state, loss = run(start, make_batch())
    assert_close((state, loss), expected)
    assert kind == "numpy" or not any(deleted(start["params"]))
    assert not held & pointers(state)
    run(state, make_batch())
    assert_close(start["params"], make_state()["params"])


@pytest.mark.parametrize("batch", ["numpy", "float64", "uncommitted", "committed", "placed", "replicated"])
def test_batches_of_every_placement_are_taken(batch):
    data = {
        "numpy": make_batch,
        "float64": lambda: jax.tree.map(lambda a: a.astype(np.float64), make_batch()),
        "uncommitted": lambda: jax.tree.map(jnp.asarray, make_batch()),
        "committed": lambda: jax.device_put(make_batch(), jax.devices()[1]),
        "placed": lambda: adam().place(make_state(), make_batch())[1],
        "replicated": lambda: jax.device_put(make_batch(), NamedSharding(mesh_of(adam()), P())),
    }[batch]()
    assert_close(outcome(adam(), make_state(), data), outcome(jax.jit(step), make_state(), make_batch()))
    assert batch in ("numpy", "float64") or not any(deleted(data))


def test_arguments_that_are_donated():
    def two(state, extra, batch):
        return {"a": state["a"] + batch.sum(), "b": state["b"] * 2}, extra + 1.0, batch.sum()

    args = ({"a": jnp.ones((8, 2)), "b": jnp.ones(3)}, jnp.ones((5, 5)), np.ones(8, np.float32))
    for donate, expected in [
        ("auto", [True, True, True]),  # `extra` comes back too
        ((), [False] * 3),
        (-2, [False] * 2 + [True]),
    ]:
        run = executable(two, *args, state=fsdp, donate=donate, batch_argnums=2)
        placed = run.place(*args)
        jax.block_until_ready(run(*placed))
        assert deleted(placed)[:3] == expected and not placed[2].is_deleted(), donate
    for wrong, message in (((3,), "argument"), (-4, "argument"), ("everything", "'everything'")):
        with pytest.raises(OptionError, match=message):
            executable(two, *args, donate=wrong, batch_argnums=2)


def test_every_leaf_is_written_over_itself():
    """In whatever order the step returns its state: where they are mixed up, the compiler copies."""

    def fun(params, moments, batch):
        m = 0.9 * moments["m"] + params["w"][::-1] * batch.mean()
        return {"m": m}, {"w": params["w"] - 0.1 * m + jnp.roll(params["w"], 1)}, batch.sum()

    args = ({"w": jnp.ones((8, 8))}, {"m": jnp.ones((8, 8)) * 2}, np.ones(8, np.float32))
    for donate in ("auto", (0, 1)):
        run = executable(fun, *args, donate=donate, batch_argnums=2)
        assert [run._traced.arguments[i].path for i in run._buffers.program.executables[0].donated_inputs] == [
            "moments['m']",
            "params['w']",
        ], donate
        placed = run.place(*args)
        assert_close(run(*placed), jax.jit(fun)(*args))
        assert deleted(placed)[:2] == [True, True]


def test_state_whose_sharding_changes_is_not_donated_and_nothing_warns():
    traced = trace(step, (make_state(), make_batch()), {})
    shapes = [traced.graph.values[v].shape if isinstance(v, int) else () for v in traced.graph.block.outputs]
    outputs = [P("a") if shape[:1] == (8,) else P() for shape in shapes]
    run = whole(traced, (8,), [P()] * len(traced.arguments), outputs)
    state, batch = run.place(make_state(), make_batch())
    new, _ = run(state, batch)
    assert not state["params"]["w"].is_deleted() and state["params"]["b"].is_deleted()
    new, _ = run(new, batch)  # its own output lies elsewhere than its input must: copied
    assert int(new["step"]) == 2


class Costly(list):
    """A state that counts how often its text is asked for: for arrays, that would fetch them."""

    asked = 0

    def __repr__(self):
        Costly.asked += 1
        return super().__repr__()


jax.tree_util.register_pytree_node(Costly, lambda node: (tuple(node), len(node)), lambda _, leaves: Costly(leaves))


def test_a_state_of_another_structure_is_refused_without_reading_it():
    def fun(state, batch):
        return Costly(leaf + batch.sum() for leaf in state), 0

    batch = np.ones(8, np.float32)
    run = executable(fun, Costly([jnp.ones(8), jnp.ones(8)]), batch, state=fsdp)
    state, _ = run(Costly([jnp.ones(8), jnp.ones(8)]), batch)
    for args in ((Costly([jnp.ones(8)]), batch), ({"w": Costly([jnp.ones(8)])}, batch), (state, batch, 1)):
        with pytest.raises(NewSignature):
            run(*args)
    assert Costly.asked == 0
    assert_close(list(run(state, batch)[0]), [np.full(8, 17.0, "float32")] * 2)


def test_new_signatures_are_refused_before_anything_is_donated():
    state, _ = adam()(make_state(), make_batch())
    whole, x = dict(state["params"]), make_batch()["x"]
    for change in [{"w": {"deeper": whole["w"]}}, {"w": [whole["w"]]}, {"w": None}, {"w": ()}, {"more": whole["w"]}]:
        state["params"].update(change)  # in place
        with pytest.raises(NewSignature):
            adam()(state, make_batch())
        state["params"].clear()
        state["params"].update(whole)
    for wrong in [{"deeper": x}, [x]]:
        with pytest.raises(NewSignature):
            adam()(state, {**make_batch(), "x": wrong})
    for args in [
        *((state, {**make_batch(), "x": wrong}) for wrong in (None, x.astype(np.int32), x[:8])),
        (state, "text"),
        ({**state, "step": state["step"].astype(jnp.float32)}, make_batch()),
        (jax.tree.map(lambda a: np.ones((3, *a.shape)), state), make_batch()),
        (state,),
    ]:
        for call in (adam(), adam().place):
            with pytest.raises(NewSignature):
                call(*args)
    assert not any(deleted(state))
    assert int(adam()(state, make_batch())[0]["step"]) == 2


def test_a_sharded_constant_without_elements():
    """A compiled program returns what has no elements as replicated, so it must be asked for as replicated."""
    empty, x = np.zeros((0, 8), np.float32), np.arange(64, dtype=np.float32).reshape(8, 8)
    traced = trace(lambda x: 2 * x + jnp.asarray(empty).sum(), (x,), {}, batch_argnums=())
    assert [constant.shape for constant in traced.graph.constants] == [(0, 8)]
    run = whole(traced, (8,), [P(None, "a"), P(None, "a")], [P()])
    np.testing.assert_array_equal(run(x), 2 * x)


def test_one_compilation_has_text_and_memory_and_runs(caplog):
    run = executable(step, make_state(), make_batch(), state=fsdp)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        (text,), memory = run.hlo(), run.compiled_executables()[0].memory_analysis()
        outcome(run, make_state(), make_batch())
    assert "HloModule jit_step" in text and "input_output_alias" in text
    assert memory.argument_size_in_bytes > 0 and memory.alias_size_in_bytes > 0
    assert sum("Finished XLA compilation of jit(step)" in record.getMessage() for record in caplog.records) == 1


# --- Flax NNX --------------------------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs):
        self.tied = nnx.Linear(8, 8, rngs=rngs)
        self.layers: Any = nnx.List([self.tied, nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)])
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.layers[2](self.layers[1](self.norm(self.tied(x))))


def make_nnx():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, MOMENTUM, wrt=nnx.Param)


@in_place
def nnx_step(model, batch):
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def nnx_arrays(nodes):
    """All arrays but the key of the random streams, which is read and not updated: it stays the caller's."""
    return [leaf for leaf in jax.tree.leaves(nnx.state(list(nodes))) if not is_key(leaf)]


@functools.cache
def module() -> Executable:
    return executable(nnx_step, *make_nnx(), make_batch(), state=fsdp)


def test_nnx_objects_are_updated_in_place_and_their_state_is_donated():
    ours, theirs, off = make_nnx(), make_nnx(), make_nnx()
    first, tied, kernel = nnx_arrays(ours), ours[0].tied, ours[0].tied.kernel
    jitted, unplanned = nnx.jit(nnx_step), jit_fallback(nnx_step, Options(method="off"))
    for number in range(3):
        before = nnx_arrays(ours)
        expected = jitted(*theirs, make_batch())
        for run, nodes in ((module(), ours), (unplanned, off)):
            np.testing.assert_allclose(run(*nodes, make_batch()), expected, rtol=1e-5)
        assert {leaf.is_deleted() for leaf in before} == {number > 0}
    assert ours[0].tied is tied is ours[0].layers[0] and tied.kernel is kernel
    assert not any(deleted(first)) and kernel[...].sharding == NamedSharding(mesh_of(module()), P("a"))
    for nodes in (ours, off):
        for a, b in zip(nnx_arrays(nodes), nnx_arrays(theirs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    ours[0].eval()
    with pytest.raises(NewSignature):
        module()(*ours, make_batch())
    ours[0].train()
    module()(*ours, make_batch())


def test_nnx_objects_are_placed_as_new_ones():
    model, optimizer = make_nnx()
    placed, placed_optimizer, _ = module().place(model, optimizer, make_batch())
    assert placed is not model and placed.tied is placed.layers[0]
    assert placed.tied.kernel[...].sharding == NamedSharding(mesh_of(module()), P("a"))
    assert nnx.graphdef(placed) == nnx.graphdef(model)
    module()(placed, placed_optimizer, make_batch())
    assert not model.tied.kernel[...].is_deleted()
