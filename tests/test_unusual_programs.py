"""Programs unlike a model's, each of which once went wrong: they run as under plain `jit`, planned and checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.cluster import Cluster, Link
from alpa_lite.errors import MicrobatchError
from tests.gallery import sgd

pytestmark = pytest.mark.usefixtures("compiled_quickly")

FREE_LINKS = Cluster(
    device="cpu", platform="cpu", devices_per_node=8, memory=1 << 30, peak_flops={"f32": 1e4}, memory_bandwidth=1e4,
    node_link=Link(1e15), tile=1,
)  # fmt: skip
"""Communication costs nothing, so that plans shard what they can."""


def same(step: Any, args: tuple[Any, ...], tolerance: float = 1e-6, **options: Any) -> alpa_lite.Plan:
    """Runs a step planned and plain, compares every leaf, and returns the plan."""
    want = jax.tree.map(np.asarray, jax.tree.map(_words, jax.jit(step)(*args)))
    planned = alpa_lite.parallelize(step, **options)
    got = jax.tree.map(_words, planned(*args))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)
    return planned.plan(*args)


def _words(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def draw_for_many_keys(state, batch):
    mine, following = jax.random.split(state["key"])
    keys = jax.random.split(mine, 32)
    folded = jax.vmap(jax.random.fold_in)(keys, jnp.arange(32))
    x = jax.vmap(lambda k, v: v * jax.random.bernoulli(k, 0.5, v.shape))(keys, batch["x"])
    x = x + jax.vmap(lambda k: jax.random.normal(jax.random.split(k)[0], (4,)))(folded)
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"key": following, "w": state["w"] - 0.1 * gradient}, loss


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg", "threefry2x32"])
def test_draws_for_many_keys_do_not_depend_on_the_plan(generator, parts):
    state = {"key": jax.random.key(0, impl=generator), "w": jnp.ones((4, 8))}
    batch = {"x": jnp.arange(128.0).reshape(32, 4) / 128}
    plan = same(draw_for_many_keys, (state, batch), method=alpa_lite.DataParallel(), num_microbatches=parts)
    assert plan.num_microbatches == parts


def test_a_reordering_of_axes_is_listed_over_those_that_it_moves_along():
    def step(state, batch):
        return {"w": state["w"] - 0.1 * batch["x"]}

    args = {"w": jnp.ones((32, 8))}, {"x": jnp.arange(256.0).reshape(32, 8)}
    pins = {"state['w']": P(("x", "y")), "batch['x']": P(("y", "x"))}
    method = alpa_lite.Manual(pins, mesh_shape=(2, 2, 2), axis_names="xyz")
    plan = same(step, args, method=method, cluster=FREE_LINKS, verify="hlo")
    assert any(c.kind == "collective_permute" and set(c.axes) == {"x", "y"} for c in plan.collectives), plan.collectives


def test_a_step_with_complex_constants_is_checked_in_the_compiled_program():
    def loss(params, batch):
        return jnp.mean(jnp.abs((batch["x"] @ params["w"]) * (1 + 1j) + 2j) ** 2)

    args = {"w": jnp.ones((8, 16))}, {"x": jnp.ones((16, 8))}
    same(sgd(loss), args, method=alpa_lite.DataParallel(), verify="hlo")


def test_complex_sums_are_shared_and_cut_into_micro_batches():
    def loss(params, batch):
        return jnp.sum((batch["x"] @ params["w"]) * jnp.complex64(1j)).imag

    args = {"w": jnp.ones((8, 16))}, {"x": jnp.ones((16, 8))}
    plan = same(sgd(loss), args, method=alpa_lite.DataParallel(), num_microbatches=4)
    assert plan.num_microbatches == 4
    assert not any("reduce_sum" in note for note in plan.notes)


WHOLE = alpa_lite.Manual({"batch['x']": P("x")}, mesh_shape=(8,), axis_names=("x",))
"""The batch is sharded, so that a sum over it is a collective."""


def test_a_collective_in_the_condition_of_a_loop_is_found_in_the_compiled_program():
    def step(state, batch):
        h = lax.while_loop(lambda h: jnp.sum(h) < 1e3, lambda h: h * 2 + 1, batch["x"] * state["s"])
        return {"s": state["s"] * 0.9}, h.sum()

    args = {"s": jnp.ones(())}, {"x": jnp.arange(32.0) / 100}
    plan = same(step, args, method=WHOLE, cluster=FREE_LINKS, verify="hlo")
    assert sum(c.count for c in plan.collectives if c.kind == "all_reduce") == 2


@pytest.mark.parametrize("verify", ["shardy", "hlo"])
@pytest.mark.parametrize(("last", "trips"), [(3, 3), (7, 4)])
def test_a_collective_in_a_counted_loop_is_counted_once_an_iteration(verify, last, trips):
    def body(carry):
        i, x = carry
        return i + (1 if trips == last else 2), jnp.tanh(x * 2) + jnp.sum(x)

    def step(state, batch):
        _, h = lax.while_loop(lambda carry: carry[0] < last, body, (0, batch["x"] * state["s"]))
        return {"s": state["s"] * 0.9}, h.sum()

    args = {"s": jnp.ones(())}, {"x": jnp.arange(32.0) / 100}
    plan = same(step, args, method=WHOLE, cluster=FREE_LINKS, verify=verify)
    assert sum(c.count for c in plan.collectives if c.kind == "all_reduce") == trips + 1


def test_what_takes_the_whole_batch_is_named_where_nothing_is_left_to_cut():
    def loss(params, batch):
        h = jnp.tanh(batch["x"] @ params["w"])
        return (h * jnp.sort(h, 0)).mean()

    args = {"w": jnp.ones((8, 16))}, {"x": jnp.ones((16, 8))}
    with pytest.raises(MicrobatchError, match=r"sort at .*test_unusual_programs.* across the examples"):
        alpa_lite.parallelize(sgd(loss), method=alpa_lite.DataParallel(), num_microbatches=4).plan(*args)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("read", [0, 1])
def test_the_largest_of_a_sharded_row_and_their_places_need_not_both_be_read(read, dtype):
    def step(state, batch):
        h = batch["x"] * state["s"].astype(dtype)
        return {"s": state["s"] * 0.9}, lax.top_k(h, 3)[read]

    x = np.random.default_rng(0).permutation(np.repeat(np.arange(16.0), 4)).astype(dtype)  # with ties
    plan = same(step, ({"s": jnp.ones(())}, {"x": jnp.asarray(x)}), method=WHOLE, cluster=FREE_LINKS, verify="hlo")
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 8 * 3 * 2 * 4)]


def test_a_loop_that_never_runs_is_what_it_starts_with():
    def step(state, batch):
        h, rows = lax.scan(lambda a, w: (jnp.tanh(a @ w), jnp.sum(a, 0)), batch["x"], state["w"])
        return {"w": state["w"] * 0.9}, (h, rows)

    args = {"w": jnp.ones((0, 8, 8))}, {"x": jnp.ones((16, 8))}
    plan = same(step, args, method=alpa_lite.Sharded((8,)), cluster=FREE_LINKS, verify="hlo")
    assert not plan.collectives


def test_state_without_elements_is_passed_on_from_call_to_call():
    def step(state, batch):
        h = batch["x"] @ state["w"]
        return {"w": state["w"] * 0.9, "none": state["none"] + h[:0, :8]}, h.sum()

    state = {"w": jnp.ones((8, 16)), "none": jnp.ones((0, 8))}
    planned = alpa_lite.parallelize(step, method=alpa_lite.Zero(3), verify="hlo")
    for _ in range(3):
        state, _ = planned(state, {"x": jnp.ones((16, 8))})
    np.testing.assert_allclose(state["w"], np.full((8, 16), 0.9**3), rtol=1e-6)


def test_a_product_of_nothing_is_planned():
    def step(state, batch):
        return {"w": state["w"] * 0.9}, batch["x"] @ state["w"]

    args = {"w": jnp.ones((8, 16))}, {"x": jnp.ones((0, 8))}
    method = alpa_lite.Manual({"state['w']": P(None, "x")}, mesh_shape=(8,), axis_names=("x",))
    same(step, args, method=method, verify="hlo")


@pytest.mark.parametrize("method", [alpa_lite.DataParallel(), alpa_lite.Pipeline(submesh_shapes=((4,), (4,)))])
def test_the_old_value_of_state_that_is_overwritten_can_be_returned_beside_the_new_one(method):
    descent = sgd(lambda state, batch: jnp.mean((jnp.tanh(batch["x"] @ state["a"]) @ state["b"]) ** 2))

    def step(state, batch):
        new, value = descent(state, batch)
        return new, {"loss": value, "before": state["a"]}

    state, batch = {"a": jnp.ones((8, 16)) / 9, "b": jnp.ones((16, 8))}, {"x": jnp.ones((32, 8))}
    planned, before = alpa_lite.parallelize(step, method=method, num_microbatches=2), state["a"]
    for _ in range(3):
        state, aux = planned(state, batch)
        np.testing.assert_allclose(aux["before"], before, rtol=1e-6)
        before = np.asarray(state["a"])


@pytest.mark.parametrize("size", [8, 16])
def test_the_place_of_the_largest_of_a_sharded_row_is_gathered_where_blocks_have_several(size):
    def step(state, batch):
        return {"s": state["s"] * 0.9}, jnp.argmax(batch["x"] * state["s"])

    x = np.random.default_rng(0).permutation(np.repeat(np.arange(size / 2), 2)).astype("float32")
    plan = same(step, ({"s": jnp.ones(())}, {"x": jnp.asarray(x)}), method=WHOLE, cluster=FREE_LINKS, verify="hlo")
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 32)] * (1 if size == 8 else 2)


def test_integers_that_are_divided_are_left_to_the_compiler():
    def step(state, batch):
        return {"w": state["w"] * 0.9}, (batch["x"] @ batch["x"].T) % 7

    args = {"w": jnp.ones((8, 16))}, {"x": jnp.arange(64).reshape(8, 8)}
    same(step, args, method=alpa_lite.Sharded((4, 2)), cluster=FREE_LINKS, communication="compiler")


def test_branches_that_end_in_other_layouts_are_left_to_the_compiler():
    def step(state, batch):
        sort, add = (lambda a: jnp.sort(a, -1)), (lambda a: jnp.cumsum(a, 0) / 8)
        return {"w": lax.cond(jnp.max(batch["n"]) > 3, sort, add, state["w"])}, batch["n"] + 1

    args = {"w": jnp.arange(96.0).reshape(6, 16) / 96}, {"n": jnp.arange(8)}
    method = alpa_lite.Manual({"state['w']": P("x", None)}, mesh_shape=(2, 2, 2), axis_names="xyz")
    same(step, args, method=method, communication="compiler")


@pytest.mark.parametrize("reduce", [jnp.bitwise_and.reduce, jnp.bitwise_xor.reduce])
def test_bitwise_reductions_over_a_sharded_dim_are_not_left_to_the_compiler(reduce):
    def step(state, batch):
        return {"s": state["s"] * 0.9}, reduce(batch["x"] * 3)

    args = {"s": jnp.ones(())}, {"x": jnp.arange(1, 25)}
    same(step, args, method=WHOLE, cluster=FREE_LINKS, communication="compiler")


def test_a_convolution_in_groups_is_not_left_to_the_compiler():
    """XLA's partitioner takes the outputs of each device for all groups, or does not compile them."""

    def step(state, batch):
        x, dims = jnp.concatenate([batch["x"], batch["x"][:, :-1]], 1), ("NWC", "WIO", "NWC")
        out = lax.conv_general_dilated(x, state["w"], (2,), "SAME", dimension_numbers=dims, feature_group_count=2)
        return {"w": state["w"] * 0.9}, out

    method = alpa_lite.Manual({"state['w']": P(None, None, "x")}, mesh_shape=(8,), axis_names=("x",))
    rng = np.random.default_rng(0)
    args = {"w": jnp.asarray(rng.normal(size=(1, 1, 16)))}, {"x": jnp.asarray(rng.normal(size=(12, 8, 2)))}
    same(step, args, method=method, cluster=FREE_LINKS, communication="compiler")


@pytest.mark.parametrize("scanned", [False, True])
def test_a_product_on_a_mesh_of_three_axes_is_not_left_to_the_compiler(scanned):
    """XLA's partitioner exchanges blocks of the result where one axis is summed over and divides it after."""

    def step(state, batch):
        def product(x, b):
            return lax.dot(x, state["w"]) * b, x[0, 0]

        out = lax.scan(product, batch["x"], batch["b"]) if scanned else product(batch["x"], batch["b"])
        return {"w": state["w"] * 0.9}, out

    runs = (3,) * scanned
    specs = {"batch['x']": P(None, "y"), "state['w']": P("y", None)}
    specs["batch['b']"] = P(*[None] * scanned, ("z", "x"), "y")
    method = alpa_lite.Manual(specs, mesh_shape=(2, 2, 2), axis_names="xyz")
    rng = np.random.default_rng(0)
    x, w, b = (jnp.asarray(rng.normal(size=size), "float32") for size in ((4, 16), (16, 16), (*runs, 4, 16)))
    same(step, ({"w": w}, {"x": x, "b": b}), 1e-5, method=method, cluster=FREE_LINKS, communication="compiler")


def test_indices_into_dims_of_one_element_are_brought_nowhere():
    """They can only mean 0: compilers drop them, and what computes them."""

    def step(state, batch):
        places = jnp.argsort(batch["x"], 0)
        row = lax.dynamic_slice(state["s"], (places[0, 0], places[0, 1], 1), (1, 1, 2))
        new = lax.dynamic_update_slice(state["s"], row, (places[1, 0], places[1, 1], 3))
        return {"s": new}, state["s"][places, places % 1]

    method = alpa_lite.Manual({"state['s']": P(), "batch['x']": P("z", "x")}, mesh_shape=(2, 2, 2), axis_names="xyz")
    x = np.random.default_rng(0).integers(0, 9, (6, 6))
    args = {"s": jnp.arange(6.0).reshape(1, 1, 6)}, {"x": jnp.asarray(x, "float32")}
    plan = same(step, args, method=method, cluster=FREE_LINKS, verify="hlo")
    assert not plan.collectives


def test_a_step_whose_arguments_have_no_elements_is_compiled():
    """XLA refuses a region whose operands are all constants to it."""

    def step(state, batch):
        return {"s": state["s"] * 0.9}, (jnp.linalg.norm(batch["x"] + 1, axis=-1), jnp.bitwise_xor.reduce(batch["n"]))

    args = {"s": jnp.zeros((0,))}, {"x": jnp.zeros((5, 0)), "n": jnp.zeros((0,), int)}
    same(step, args, method=alpa_lite.DataParallel(), cluster=FREE_LINKS, verify="hlo")


def test_a_part_of_an_axis_that_the_partitioner_uses_is_compared():
    def step(state, batch):
        return {"s": state["s"] + 1}, batch["a"] - batch["b"]

    specs = {"batch['a']": P(), "batch['b']": P("x", "y")}
    method = alpa_lite.Manual(specs, mesh_shape=(4, 2), axis_names="xy", rest=alpa_lite.Zero(3))
    args = {"s": jnp.ones(())}, {"a": jnp.ones((8, 12)), "b": jnp.ones((8, 12))}
    same(step, args, method=method, num_microbatches=4, communication="compiler", verify="hlo")


@pytest.mark.parametrize("method", [alpa_lite.DataParallel(), alpa_lite.Pipeline(submesh_shapes=((4,), (4,)))])
def test_what_is_handed_through_comes_back_in_arrays_of_jax(method):
    descent = sgd(lambda state, batch: jnp.mean(jnp.tanh(jnp.tanh(batch["x"] @ state["w"]) @ state["w"]) ** 2))

    def step(state, batch):
        new, loss = descent(state, batch)
        return new, (loss, batch["y"], batch["n"])

    batch = {"x": np.ones((8, 8), "float32"), "y": np.ones((8, 4), "float32"), "n": 3}
    want = jax.jit(step)({"w": jnp.ones((8, 8))}, batch)
    got = alpa_lite.parallelize(step, method=method)({"w": jnp.ones((8, 8))}, batch)
    assert [type(leaf) for leaf in jax.tree.leaves(got)] == [type(leaf) for leaf in jax.tree.leaves(want)]
    assert [leaf.weak_type for leaf in jax.tree.leaves(got)] == [leaf.weak_type for leaf in jax.tree.leaves(want)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_a_transform_beside_a_collective_runs_on_cpus():
    """Plain `shard_map` fails: the compiler hands the collective's order of dims to the transform that it follows."""

    def loss(w, batch):
        spectrum = jnp.fft.rfft((batch["x"] @ w["in"]).swapaxes(1, 2), n=64) * jnp.fft.rfft(w["filter"], n=64)
        mixed = jnp.fft.irfft(spectrum, n=64)[..., :32].swapaxes(1, 2) * batch["x"]
        return jnp.mean((mixed @ w["out"] - batch["y"]) ** 2)

    keys = iter(jax.random.split(jax.random.key(0), 5))
    w = {name: jax.random.normal(next(keys), shape) for name, shape in
         (("filter", (16, 32)), ("in", (16, 16)), ("out", (16, 16)))}  # fmt: skip
    batch = {name: jax.random.normal(next(keys), (8, 32, 16)) for name in "xy"}
    plan = same(sgd(loss), (w, batch), tolerance=1e-4, method=alpa_lite.TensorParallel())
    assert any(one.kind == "all_gather" for one in plan.collectives)


@pytest.mark.parametrize("method", [alpa_lite.DataParallel(), alpa_lite.TensorParallel()])
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_of_branches_for_platforms_one_is_planned(platform, method):
    """All were, though one is lowered: what the others communicate was missed."""

    def loss(w, x):
        hidden = jnp.tanh(x @ w["in"])
        out = lax.platform_dependent(hidden, tpu=lambda h: -h @ w["out"], default=lambda h: h @ w["out"])
        return jnp.mean((out - 1) ** 2)

    w = {"in": jnp.full((16, 64), 0.1), "out": jnp.full((64, 8), 0.1)}
    cluster = Cluster.local() if platform == "cpu" else "a100"
    plan = same(sgd(loss), (w, jnp.ones((32, 16))), method=method, cluster=cluster)
    assert plan.collectives and plan.verification
