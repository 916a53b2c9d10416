"""Running a step: same results as `jit`, nothing of the caller's deleted, no copies of what is already placed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.errors import OptionError, PlanError
from alpa_lite.layout import LogicalMesh
from alpa_lite.options import Options
from alpa_lite.passes.ir.evaluation import evaluate_block
from alpa_lite.passes.tracing.tracing import trace
from alpa_lite.runtime import meshes, placement
from alpa_lite.runtime.jit_fallback import jit_fallback
from alpa_lite.runtime.signatures import NewSignature
from alpa_lite.runtime.single import SingleExecutable
from alpa_lite.runtime.step import LoadOptions

OPTIMIZER = optax.adam(1e-2)
MOMENTUM = optax.sgd(0.1, momentum=0.9)  # unlike Adam it does not blow up gradients that are zero but for rounding


def mesh_of(shape: tuple[int, ...]) -> Mesh:
    return meshes.mesh_of(LogicalMesh(shape, ("a", "b")[: len(shape)]))


def executable(
    fun, *args, shape=(8,), state=None, donate: Any = "auto", batch_argnums: Any = "auto"
) -> SingleExecutable:
    """State sharded by `state(shape of the leaf)`, batch by its leading dim, the rest replicated."""
    traced = trace(fun, args, {}, batch_argnums=batch_argnums)
    mesh = mesh_of(shape)
    values, block = traced.graph.values, traced.graph.block
    pick = state or (lambda dims: P())
    roles = {"state": pick, "batch": lambda dims: P("a"), "other": lambda dims: P()}
    arguments = [
        roles[argument.role](values[number].shape)
        for argument, number in zip(traced.arguments, block.inputs, strict=False)
    ]
    new_value = dict(traced.state)
    outputs = [arguments[new_value[i]] if i in new_value else P() for i in range(len(traced.outputs))]
    options = LoadOptions(donate=donate)
    return SingleExecutable(
        traced, lambda *leaves: evaluate_block(traced.graph.block, leaves), mesh, arguments, outputs, options
    )


def fsdp(dims):
    return P("a") if dims and dims[0] % 8 == 0 else P()


def make_state():
    params = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(8, 4), "b": jnp.zeros(4)}
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(0)}


def make_batch(rows=16):
    return {"x": np.cos(np.arange(rows * 8, dtype=np.float32)).reshape(rows, 8), "y": np.ones((rows, 4), np.float32)}


def step(state, batch):
    def loss_of(params):
        return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}, loss


def assert_close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6), actual, expected
    )


def deleted(tree):
    return [leaf.is_deleted() for leaf in jax.tree.leaves(tree)]


def pointers(tree) -> set[int]:
    found: set[int] = set()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, np.ndarray):
            found.add(leaf.ctypes.data)
        else:
            found.update(shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards)
    return found


@pytest.mark.parametrize("shape", [(1,), (8,), (2, 4)])
@pytest.mark.parametrize("state", [None, fsdp], ids=["replicated", "sharded"])
def test_results_equal_jit_and_the_callers_state_survives(shape, state):
    run = executable(step, make_state(), make_batch(), shape=shape, state=state)
    ours = theirs = start = make_state()
    for rows in range(3):
        batch = make_batch()
        batch["x"] += rows
        ours, loss = run(ours, batch)
        theirs, expected = jax.jit(step)(theirs, batch)
        assert_close((ours, loss), (theirs, expected))
    assert not any(deleted(start))
    assert_close(start, make_state())


@pytest.mark.parametrize("shape", [(1,), (8,)])
def test_placed_state_is_donated_without_copies(shape):
    run = executable(step, make_state(), make_batch(), shape=shape, state=fsdp)
    first, _ = run(make_state(), make_batch())
    before = pointers(first)
    second, _ = run(first, make_batch())
    assert all(deleted(first))
    assert pointers(second) == before
    placed, batch = run.place(make_state(), make_batch())
    run(placed, batch)
    assert all(deleted(placed)) and not any(deleted(batch))


@pytest.mark.parametrize("shape", [(1,), (8,)])
@pytest.mark.parametrize("kind", ["numpy", "committed", "replicated", "sharded", "other mesh", "half placed"])
def test_a_callers_arrays_are_never_deleted(shape, kind):
    run = executable(step, make_state(), make_batch(), shape=shape, state=fsdp)
    mesh = Mesh(run.mesh.devices, ("z",), axis_types=(AxisType.Auto,))
    if kind == "numpy":
        start = jax.tree.map(np.array, make_state())
    elif kind == "committed":
        start = jax.device_put(make_state(), jax.devices()[0])
    elif kind == "half placed":
        start = make_state()
        start["opt"] = run.place(make_state(), make_batch())[0]["opt"]
    else:
        spec = P("z") if kind == "sharded" else P()
        start = jax.tree.map(
            lambda a: jax.device_put(a, NamedSharding(mesh, spec if a.shape[:1] == (8,) else P())), make_state()
        )
    held = pointers({"params": start["params"]})
    state, _ = run(start, make_batch())
    if kind != "numpy":
        assert not any(deleted(start["params"]))
    assert not held & pointers(state)
    state, _ = run(state, make_batch())
    assert_close(start["params"], make_state()["params"])
    assert int(state["step"]) == 2


def test_state_that_is_not_placed_comes_again():
    run = executable(step, make_state(), make_batch(), state=fsdp)
    state, first = run(make_state(), make_batch())
    state, second = run(state, make_batch())
    again, third = run(make_state(), make_batch())
    state, _ = run(state, make_batch())
    again, fourth = run(again, make_batch())
    assert float(first) == float(third) and float(second) == float(fourth)
    assert int(state["step"]) == 3 and int(again["step"]) == 2


@pytest.mark.parametrize("shape", [(1,), (8,)])
def test_leaves_that_share_a_buffer(shape):
    def average(state, batch):
        w = state["w"] - 0.1 * batch.sum()
        return {"w": w, "ema": 0.9 * state["ema"] + 0.1 * w}, w.sum()

    shared = jnp.ones((8, 4))
    batch = np.ones((8,), np.float32)
    run = executable(average, {"w": shared, "ema": shared}, batch, shape=shape, state=fsdp)
    state, _ = run({"w": shared, "ema": shared}, batch)
    state, _ = run(state, batch)
    expected = {"w": np.asarray(state["w"]), "ema": np.asarray(state["w"])}
    state, _ = run({"w": state["w"], "ema": state["w"]}, batch)  # placed, and one buffer twice
    assert_close(state, jax.jit(average)(expected, batch)[0])
    swapped, _ = run({"w": state["ema"], "ema": state["w"]}, batch)
    assert swapped["w"].shape == (8, 4)


def test_a_leaf_replaced_in_place_is_noticed():
    run = executable(step, make_state(), make_batch(), state=fsdp)
    state, _ = run(make_state(), make_batch())
    mine = jnp.ones((8, 4))
    state["params"]["w"] = mine
    expected = jax.jit(step)(jax.tree.map(np.asarray, state), make_batch())
    state, loss = run(state, make_batch())
    assert_close((state, loss), expected)
    assert not mine.is_deleted()


def test_two_states_in_turn():
    run = executable(step, make_state(), make_batch(), state=fsdp)
    one, _ = run(make_state(), make_batch())
    two, _ = run(make_state(), make_batch())
    for _ in range(3):
        one, loss_one = run(one, make_batch())
        two, loss_two = run(two, make_batch())
        assert float(loss_one) == float(loss_two)


def test_a_dropped_state_is_not_kept_alive():
    run = executable(step, make_state(), make_batch(), state=fsdp)
    state, _ = run(make_state(), make_batch())
    alive = [weakref.ref(leaf) for leaf in jax.tree.leaves(state)]
    del state
    gc.collect()
    assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("batch", ["numpy", "float64", "uncommitted", "committed", "placed", "replicated"])
def test_batches_come_as_they_like(batch):
    run = executable(step, make_state(), make_batch(), state=fsdp)
    data = {
        "numpy": make_batch,
        "float64": lambda: jax.tree.map(lambda a: a.astype(np.float64), make_batch()),
        "uncommitted": lambda: jax.tree.map(jnp.asarray, make_batch()),
        "committed": lambda: jax.device_put(make_batch(), jax.devices()[1]),
        "placed": lambda: run.place(make_state(), make_batch())[1],
        "replicated": lambda: jax.device_put(make_batch(), NamedSharding(run.mesh, P())),
    }[batch]()
    state = make_state()
    for _ in range(2):
        state, loss = run(state, data)
    expected, _ = jax.jit(step)(make_state(), make_batch())
    assert_close((state, loss), jax.jit(step)(expected, make_batch()))
    if batch not in ("numpy", "float64"):
        assert not any(deleted(data))


def test_placed_arguments_share_nothing_with_the_callers():
    run = executable(step, make_state(), make_batch(), state=fsdp)
    start, batch = make_state(), make_batch()
    placed = run.place(start, batch)
    assert not pointers((start, batch)) & pointers(placed)
    assert_close(placed, (start, batch))
    again = run.place(*placed)
    assert not pointers(placed) & pointers(again)
    w = again[0]["params"]["w"]
    assert w.sharding == NamedSharding(run.mesh, P("a")) and len(pointers(w)) == 8
    assert len(pointers(again[0]["params"]["b"])) == 8  # replicas share nothing either
    batch["x"][:] = 7.0
    assert_close(placed[1], make_batch())


def test_what_is_donated():
    def two(state, extra, batch):
        return {"a": state["a"] + batch.sum(), "b": state["b"] * 2}, extra + 1.0, batch.sum()

    args = ({"a": jnp.ones((8, 2)), "b": jnp.ones(3)}, jnp.ones((5, 5)), np.ones(8, np.float32))
    for donate, expected in [
        ("auto", [True, True, True]),  # `extra` comes back too
        ((), [False] * 3),
        ((1,), [False, False, True]),
        (-2, [False] * 2 + [True]),
    ]:
        run = executable(two, *args, state=fsdp, donate=donate, batch_argnums=2)
        placed = run.place(*args)
        jax.block_until_ready(run(*placed))
        assert deleted(placed)[:3] == expected, donate
        assert not placed[2].is_deleted()
    for wrong in ((3,), -4):
        with pytest.raises(OptionError, match="donate_argnums names argument"):
            executable(two, *args, donate=wrong, batch_argnums=2)
    with pytest.raises(OptionError, match="'everything'"):
        executable(two, *args, donate="everything", batch_argnums=2)


def test_every_leaf_is_written_over_itself():
    """In whatever order the step returns its state: where they are mixed up, the compiler copies."""

    def fun(params, moments, batch):
        m = 0.9 * moments["m"] + params["w"][::-1] * batch.mean()
        return {"m": m}, {"w": params["w"] - 0.1 * m + jnp.roll(params["w"], 1)}, batch.sum()

    args = ({"w": jnp.ones((8, 8))}, {"m": jnp.ones((8, 8)) * 2}, np.ones(8, np.float32))
    for donate in ("auto", (0, 1)):
        run = executable(fun, *args, donate=donate, batch_argnums=2)
        assert [run._traced.arguments[i].path for i in run._function.donated] == ["moments['m']", "params['w']"], donate
        placed = run.place(*args)
        found = run(*placed)
        assert_close(found, jax.jit(fun)(*args))
        assert deleted(placed)[:2] == [True, True]


def test_state_whose_sharding_changes_is_not_donated_and_nothing_warns():
    traced = trace(step, (make_state(), make_batch()), {})
    inputs = [P() for _ in traced.arguments]
    outputs = [
        P("a") if isinstance(v, int) and traced.graph.values[v].shape[:1] == (8,) else P()
        for v in traced.graph.block.outputs
    ]
    run = SingleExecutable(traced, lambda *x: evaluate_block(traced.graph.block, x), mesh_of((8,)), inputs, outputs)
    state, batch = run.place(make_state(), make_batch())
    new, _ = run(state, batch)
    assert not state["params"]["w"].is_deleted() and state["params"]["b"].is_deleted()
    new, _ = run(new, batch)  # its own output lies elsewhere than its input must: copied
    assert int(new["step"]) == 2


def test_overwritten_and_unchanged_leaves_are_donated():
    def fun(state, batch):
        return {"frozen": state["frozen"], "cache": jnp.zeros((8, 4)) + batch.sum(), "w": state["w"] + 1}, 0

    start = {"frozen": jnp.ones((8, 4)), "cache": jnp.ones((8, 4)), "w": jnp.ones((8, 4))}
    run = executable(fun, start, np.ones(8, np.float32), state=fsdp)
    state, _ = run(start, np.ones(8, np.float32))
    before = state
    state, _ = run(state, np.ones(8, np.float32))
    assert all(deleted(before))
    assert_close(state, {"frozen": np.ones((8, 4)), "cache": np.full((8, 4), 8.0), "w": np.full((8, 4), 3.0)})


def test_new_signatures_are_refused_before_anything_is_donated():
    run = executable(step, make_state(), make_batch(), state=fsdp)
    state, _ = run(make_state(), make_batch())
    wrong_state = {**state, "step": state["step"].astype(jnp.float32)}
    missing = {k: v for k, v in state.items() if k != "step"}
    for args in [
        (state, make_batch(24)),
        (state, {**make_batch(), "x": make_batch()["x"].astype(np.int32)}),
        (state, {**make_batch(), "z": 1.0}),
        (state, "text"),
        (wrong_state, make_batch()),
        (missing, make_batch()),
        (jax.tree.map(lambda a: np.ones((3, *a.shape)), state), make_batch()),
        (state,),
    ]:
        with pytest.raises(NewSignature):
            run(*args)
        with pytest.raises(NewSignature):
            run.place(*args)
    with pytest.raises(NewSignature):
        run(state, batch=make_batch())
    assert not any(deleted(state))
    run(state, make_batch())


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
    for other in (Costly([jnp.ones(8)]), {"w": Costly([jnp.ones(8)])}):
        with pytest.raises(NewSignature):
            run(other, batch)
    with pytest.raises(NewSignature):
        run(state, batch, 1)
    assert Costly.asked == 0
    assert_close(list(run(state, batch)[0]), [np.full(8, 17.0)] * 2)


def test_a_returned_state_whose_structure_was_changed_in_place():
    run = executable(step, make_state(), make_batch(), state=fsdp)
    state, _ = run(make_state(), make_batch())
    whole = dict(state["params"])
    for change in [{"w": {"deeper": whole["w"]}}, {"w": [whole["w"]]}, {"w": None}, {"w": ()}, {"more": whole["w"]}]:
        state["params"].update(change)
        with pytest.raises(NewSignature):
            run(state, make_batch())
        state["params"].clear()
        state["params"].update(whole)
    for wrong in [{"x": {"deeper": make_batch()["x"]}}, {"x": None}, {"x": [make_batch()["x"]]}]:
        with pytest.raises(NewSignature):
            run(state, {**make_batch(), **wrong})
    state, _ = run(state, make_batch())
    assert int(state["step"]) == 2


def test_weak_types_belong_to_the_signature():
    def fun(state, rate, batch):
        return {"w": state["w"] * rate, "n": state["n"] + 1}, batch.sum()

    half, batch = jnp.ones(8, jnp.bfloat16), np.ones(8, np.float32)
    run = executable(fun, {"w": half, "n": 0}, 0.5, batch, state=fsdp, batch_argnums=2)
    state, _ = run({"w": half, "n": 0}, 0.5, batch)
    state, _ = run(state, jnp.asarray(0.25), batch)  # as weak as the Python number
    assert state["n"].weak_type and state["w"].dtype == jnp.bfloat16
    for strong in (np.float32(0.5), jnp.float32(0.5)):
        with pytest.raises(NewSignature):  # the step would return float32
            run(state, strong, batch)
    with pytest.raises(NewSignature):
        run({"w": half, "n": jnp.int32(0)}, 0.5, batch)
    state, _ = run(state, 0.5, batch)
    assert float(state["w"][0]) == 0.0625 and int(state["n"]) == 3


def test_static_arguments_and_keywords():
    def fun(state, rate, *, batch, mode):
        new = jax.tree.map(lambda w: w - rate * batch["x"].sum(), state)
        return (new, mode) if mode is None else (new, batch["x"].sum())

    start = {"w": jnp.ones((8, 4))}
    traced = trace(fun, (start, 2.0), {"batch": make_batch(), "mode": "sum"}, static_argnums=1, static_argnames="mode")
    specs = [P("a")] * len(traced.arguments)
    outputs = [P("a"), P()]
    run = SingleExecutable(traced, lambda *x: evaluate_block(traced.graph.block, x), mesh_of((8,)), specs, outputs)
    state, total = run(start, 2.0, batch=make_batch(), mode="sum")
    state, total = run(state, 2.0, mode="sum", batch=make_batch())
    assert_close(total, make_batch()["x"].sum())
    (placed, rate), keywords = run.place(start, 2.0, batch=make_batch(), mode="sum")
    assert rate == 2.0 and keywords["mode"] == "sum" and isinstance(placed["w"].sharding, NamedSharding)
    for args, kwargs in [
        ((state, 3.0), {"batch": make_batch(), "mode": "sum"}),
        ((state, 2.0), {"batch": make_batch(), "mode": None}),
        ((state, 2.0), {"batch": make_batch()}),
    ]:
        with pytest.raises(NewSignature):
            run(*args, **kwargs)


def test_constants_are_on_the_mesh():
    table = jnp.arange(32.0).reshape(8, 4)

    def fun(w, x):
        return {"w": w["w"] - table}, (x @ table).sum()

    run = executable(fun, {"w": jnp.zeros((8, 4))}, make_batch()["x"], state=fsdp)
    state, _ = run({"w": jnp.zeros((8, 4))}, make_batch()["x"])
    state, total = run(state, make_batch()["x"])
    assert_close(state, {"w": -2 * np.asarray(table)})
    assert_close(total, (make_batch()["x"] @ np.asarray(table)).sum())
    assert not table.is_deleted()


def test_a_sharded_constant_without_elements():
    """A compiled program returns what has no elements as replicated, so it must be asked for as replicated."""
    empty = np.zeros((0, 8), np.float32)

    def double(x):
        return 2 * x + jnp.asarray(empty).sum()

    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    traced = trace(double, (x,), {}, batch_argnums=())
    assert [constant.shape for constant in traced.graph.constants] == [(0, 8)]
    run = SingleExecutable(
        traced,
        lambda *leaves: evaluate_block(traced.graph.block, leaves),
        mesh_of((8,)),
        [P(None, "a"), P(None, "a")],
        [P()],
    )
    np.testing.assert_array_equal(run(x), 2 * x)


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)], ids=["typed", "raw"])
def test_random_keys_as_state(key):
    def fun(state, batch):
        key, used = jax.random.split(state["key"])
        return {"key": key, "w": state["w"] + jax.random.normal(used, (8, 4))}, batch.sum()

    def make():
        return {"key": key, "w": jnp.zeros((8, 4))}

    run = executable(fun, make(), np.ones(8, np.float32), state=fsdp)
    ours = theirs = make()
    for _ in range(3):
        ours, _ = run(ours, np.ones(8, np.float32))
        theirs, _ = jax.jit(fun)(theirs, np.ones(8, np.float32))
    assert_close(ours["w"], theirs["w"])
    assert not key.is_deleted()


def test_compiled_text_and_memory():
    run = executable(step, make_state(), make_batch(), state=fsdp)
    (text,) = run.hlo()
    assert "HloModule jit_step" in text and "input_output_alias" in text
    (memory,) = run.memory_analysis()
    assert memory.argument_size_in_bytes > 0 and memory.alias_size_in_bytes > 0
    assert run.compiled() is run.compiled()


def test_the_step_is_compiled_once(caplog):
    run = executable(step, make_state(), make_batch(), state=fsdp)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        run.hlo()
        state, _ = run(make_state(), make_batch())
        for _ in range(2):
            state, _ = run(state, make_batch())
    compiled = [record for record in caplog.records if "Finished XLA compilation of jit(step)" in record.getMessage()]
    assert len(compiled) == 1


def test_too_few_devices():
    with pytest.raises(PlanError, match=r"for 16 devices .* there are 8"):
        meshes.mesh_of(LogicalMesh((16,), ("a",)))


def test_meshes_leave_their_axes_to_the_compiler():
    mesh = meshes.mesh_of(LogicalMesh((2, 4), ("a", "b")))
    assert set(mesh.axis_types) == {AxisType.Auto} and mesh.devices.shape == (2, 4)
    assert [d.id for d in mesh.devices[0]] == [d.id for d in jax.devices()[:4]]


def test_copies_go_group_by_group():
    leaves = [np.full((8, n), n, np.float32) for n in (64, 1, 2, 3, 32, 5)]
    shardings = [NamedSharding(mesh_of((8,)), P("a"))] * 6
    out = placement.copies(leaves, shardings)
    for a, b in zip(out, leaves, strict=True):
        np.testing.assert_array_equal(a, b)
    assert placement.copies([], []) == []


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


def nnx_step(model, optimizer, batch):
    def loss_of(model):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def nnx_arrays(*nodes):
    return jax.tree.leaves(nnx.state(list(nodes)))


def test_nnx_objects_are_updated_in_place():
    run = executable(nnx_step, *make_nnx(), make_batch(), state=fsdp)
    ours, theirs = make_nnx(), make_nnx()
    first = nnx_arrays(*ours)
    tied, kernel = ours[0].tied, ours[0].tied.kernel
    jitted = nnx.jit(nnx_step)
    for _ in range(3):
        batch = make_batch()
        np.testing.assert_allclose(run(*ours, batch), jitted(*theirs, batch), rtol=1e-5)
    assert ours[0].tied is tied is ours[0].layers[0] and tied.kernel is kernel
    assert not any(leaf.is_deleted() for leaf in first if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
    assert kernel[...].sharding == NamedSharding(run.mesh, P("a"))
    for a, b in zip(nnx_arrays(*ours), nnx_arrays(*theirs), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_nnx_state_is_donated():
    run = executable(nnx_step, *make_nnx(), make_batch(), state=fsdp)
    model, optimizer = make_nnx()
    run(model, optimizer, make_batch())
    before = nnx_arrays(model, optimizer)
    run(model, optimizer, make_batch())
    for leaf in before:  # the key of the random streams is read and not updated: it stays the caller's
        assert leaf.is_deleted() != jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def test_nnx_objects_are_placed_as_new_ones():
    run = executable(nnx_step, *make_nnx(), make_batch(), state=fsdp)
    model, optimizer = make_nnx()
    placed_model, placed_optimizer, _ = run.place(model, optimizer, make_batch())
    assert placed_model is not model and placed_model.tied is placed_model.layers[0]
    assert placed_model.tied.kernel[...].sharding == NamedSharding(run.mesh, P("a"))
    assert nnx.graphdef(placed_model) == nnx.graphdef(model)
    run(placed_model, placed_optimizer, make_batch())
    assert not model.tied.kernel[...].is_deleted()


def test_a_changed_nnx_structure_is_a_new_signature():
    run = executable(nnx_step, *make_nnx(), make_batch(), state=fsdp)
    model, optimizer = make_nnx()
    run(model, optimizer, make_batch())
    model.eval()
    with pytest.raises(NewSignature):
        run(model, optimizer, make_batch())
    model.train()
    run(model, optimizer, make_batch())


# --- method="off" ----------------------------------------------------------------------------------------------------


def test_plain_jit_through_the_same_interface():
    options = Options(method="off")
    run = jit_fallback(step, options)
    assert_close(run(make_state(), make_batch()), jax.jit(step)(make_state(), make_batch()))
    assert_close(run(make_state(), make_batch(24)), jax.jit(step)(make_state(), make_batch(24)))
    ours, theirs = make_nnx(), make_nnx()
    assert_close(jit_fallback(nnx_step, options)(*ours, make_batch()), nnx.jit(nnx_step)(*theirs, make_batch()))
    assert_close(ours[0].tied.kernel[...], theirs[0].tied.kernel[...])
