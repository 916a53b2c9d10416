"""Programs unlike a model's, each of which once went wrong: they run as under plain `jit`, planned and checked."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.errors import MicrobatchError
from gallery.batches import normal
from gallery.steps import sgd
from tests.comparing import assert_close, close_to_jit
from tests.helpers import FREE_LINKS


def same(step: Any, args: tuple[Any, ...], tolerance: float = 1e-6, **options: Any) -> alpa_lite.Plan:
    """Runs a step planned and plain, compares every leaf, and returns the plan."""
    return close_to_jit(step, *args, rtol=tolerance, atol=tolerance, **options).plan(*args)


def shrinking(result: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A step that takes a tenth off its state and gives a result of state and batch."""
    return lambda state, batch: (jax.tree.map(lambda x: x * 0.9, state), result(state, batch))


def manual(specs: dict[str, P], *shape: int, **options: Any) -> alpa_lite.Manual:
    return alpa_lite.Manual(specs, mesh_shape=shape, axis_names="xyz"[: len(shape)], **options)


WHOLE = manual({"batch['x']": P("x")}, 8)
"""The batch is sharded, so that a sum over it is a collective."""
SCALAR = {"s": jnp.ones(())}
CHECKED: dict[str, Any] = {"cluster": FREE_LINKS, "verify": "hlo"}
BY_COMPILER: dict[str, Any] = {"cluster": FREE_LINKS, "communication": "compiler"}


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


def grouped_convolution(state, batch):
    """XLA's partitioner takes the outputs of each device for all groups, or does not compile them."""
    x, dims = jnp.concatenate([batch["x"], batch["x"][:, :-1]], 1), ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, state["w"], (2,), "SAME", dimension_numbers=dims, feature_group_count=2)


def product(state, batch):
    """XLA's partitioner exchanges blocks of the result where one axis is summed over and divides it after."""
    return lax.dot(batch["x"], state["w"]) * batch["b"], batch["x"][0, 0]


def scanned_product(state, batch):
    return lax.scan(lambda x, b: product(state, {"x": x, "b": b}), batch["x"], batch["b"])


def product_on_three_axes(*runs: int) -> tuple[Any, dict[str, Any]]:
    """Arguments and options."""
    specs = {"batch['x']": P(None, "y"), "state['w']": P("y", None)}
    specs["batch['b']"] = P(*[None] * len(runs), ("z", "x"), "y")
    args = {"w": normal(0, 16, 16)}, {"x": normal(1, 4, 16), "b": normal(2, *runs, 4, 16)}
    return args, {"method": manual(specs, 2, 2, 2), "tolerance": 1e-5, **BY_COMPILER}


def either_layout(state, batch):
    sort, add = (lambda a: jnp.sort(a, -1)), (lambda a: jnp.cumsum(a, 0) / 8)
    return {"w": lax.cond(jnp.max(batch["n"]) > 3, sort, add, state["w"])}, batch["n"] + 1


def complex_loss(params, batch):
    return jnp.mean(jnp.abs((batch["x"] @ params["w"]) * (1 + 1j) + 2j) ** 2)


def norms(state, batch):
    """XLA refuses a region whose operands are all constants to it."""
    return jnp.linalg.norm(batch["x"] + 1, axis=-1), jnp.bitwise_xor.reduce(batch["n"])


W, X = {"w": jnp.ones((8, 16))}, {"x": jnp.ones((16, 8))}
PARTS = manual({"batch['a']": P(), "batch['b']": P("x", "y")}, 4, 2, rest=alpa_lite.Zero(3))
PROGRAMS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "complex constants are checked in the compiled program": (
        sgd(complex_loss), (W, X), {"method": alpa_lite.DataParallel(), "verify": "hlo"},
    ),
    "a product of nothing": (
        shrinking(lambda state, batch: batch["x"] @ state["w"]), (W, {"x": jnp.ones((0, 8))}),
        {"method": manual({"state['w']": P(None, "x")}, 8), "verify": "hlo"},
    ),
    "no argument has elements": (
        shrinking(norms), ({"s": jnp.zeros((0,))}, {"x": jnp.zeros((5, 0)), "n": jnp.zeros((0,), int)}),
        {"method": alpa_lite.DataParallel(), **CHECKED},
    ),
    "a part of an axis that the partitioner uses is compared": (
        lambda state, batch: ({"s": state["s"] + 1}, batch["a"] - batch["b"]),
        (SCALAR, {"a": jnp.ones((8, 12)), "b": jnp.ones((8, 12))}),
        {"method": PARTS, "num_microbatches": 4, "communication": "compiler", "verify": "hlo"},
    ),
    "integers that are divided, by the compiler": (
        shrinking(lambda state, batch: (batch["x"] @ batch["x"].T) % 7), (W, {"x": jnp.arange(64).reshape(8, 8)}),
        {"method": alpa_lite.Sharded((4, 2)), **BY_COMPILER},
    ),
    "branches that end in other layouts, by the compiler": (
        either_layout, ({"w": jnp.arange(96.0).reshape(6, 16) / 96}, {"n": jnp.arange(8)}),
        {"method": manual({"state['w']": P("x", None)}, 2, 2, 2), "communication": "compiler"},
    ),
    "a convolution in groups, not by the compiler": (
        shrinking(grouped_convolution), ({"w": normal(0, 1, 1, 16)}, {"x": normal(1, 12, 8, 2)}),
        {"method": manual({"state['w']": P(None, None, "x")}, 8), **BY_COMPILER},
    ),
    "a product on three axes, not by the compiler": (shrinking(product), *product_on_three_axes()),
    "a scanned product on three axes, not by the compiler": (shrinking(scanned_product), *product_on_three_axes(3)),
    **{
        f"a bitwise {name} over a sharded dim, not by the compiler": (
            shrinking(lambda state, batch, reduce=reduce: reduce(batch["x"] * 3)), (SCALAR, {"x": jnp.arange(1, 25)}),
            {"method": WHOLE, **BY_COMPILER},
        )
        for name, reduce in (("and", jnp.bitwise_and.reduce), ("xor", jnp.bitwise_xor.reduce))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_run_as_under_plain_jit(name):
    step, args, options = PROGRAMS[name]
    same(step, args, **options)


def test_a_reordering_of_axes_is_listed_over_those_that_it_moves_along():
    args = {"w": jnp.ones((32, 8))}, {"x": jnp.arange(256.0).reshape(32, 8)}
    method = manual({"state['w']": P(("x", "y")), "batch['x']": P(("y", "x"))}, 2, 2, 2)
    plan = same(lambda state, batch: {"w": state["w"] - 0.1 * batch["x"]}, args, method=method, **CHECKED)
    assert any(c.kind == "collective_permute" and set(c.axes) == {"x", "y"} for c in plan.collectives), plan.collectives


def test_complex_sums_are_shared_and_cut_into_micro_batches():
    def loss(params, batch):
        return jnp.sum((batch["x"] @ params["w"]) * jnp.complex64(1j)).imag

    plan = same(sgd(loss), (W, X), method=alpa_lite.DataParallel(), num_microbatches=4)
    assert plan.num_microbatches == 4
    assert not any("reduce_sum" in note for note in plan.notes)


def test_a_collective_in_the_condition_of_a_loop_is_found_in_the_compiled_program():
    def doubled(state, batch):
        return lax.while_loop(lambda h: jnp.sum(h) < 1e3, lambda h: h * 2 + 1, batch["x"] * state["s"]).sum()

    plan = same(shrinking(doubled), (SCALAR, {"x": jnp.arange(32.0) / 100}), method=WHOLE, **CHECKED)
    assert sum(c.count for c in plan.collectives if c.kind == "all_reduce") == 2


@pytest.mark.parametrize(("last", "trips"), [(3, 3), (7, 4)])
def test_a_collective_in_a_counted_loop_is_counted_once_an_iteration(last, trips):
    def body(carry):
        i, x = carry
        return i + (1 if trips == last else 2), jnp.tanh(x * 2) + jnp.sum(x)

    def summed(state, batch):
        return lax.while_loop(lambda carry: carry[0] < last, body, (0, batch["x"] * state["s"]))[1].sum()

    plan = same(shrinking(summed), (SCALAR, {"x": jnp.arange(32.0) / 100}), method=WHOLE, **CHECKED)
    assert sum(c.count for c in plan.collectives if c.kind == "all_reduce") == trips + 1


def test_what_takes_the_whole_batch_is_named_where_nothing_is_left_to_cut():
    def loss(params, batch):
        h = jnp.tanh(batch["x"] @ params["w"])
        return (h * jnp.sort(h, 0)).mean()

    with pytest.raises(MicrobatchError, match=r"sort at .*test_unusual_programs.* across the examples"):
        alpa_lite.parallelize(sgd(loss), method=alpa_lite.DataParallel(), num_microbatches=4).plan(W, X)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("read", [0, 1])
def test_the_largest_of_a_sharded_row_and_their_places_need_not_both_be_read(read, dtype):
    step = shrinking(lambda state, batch: lax.top_k(batch["x"] * state["s"].astype(dtype), 3)[read])
    x = np.random.default_rng(0).permutation(np.repeat(np.arange(16.0), 4)).astype(dtype)  # with ties
    plan = same(step, (SCALAR, {"x": jnp.asarray(x)}), method=WHOLE, **CHECKED)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 8 * 3 * 2 * 4)]


@pytest.mark.parametrize("size", [8, 16])
def test_the_place_of_the_largest_of_a_sharded_row_is_gathered_where_blocks_have_several(size):
    x = np.random.default_rng(0).permutation(np.repeat(np.arange(size / 2), 2)).astype("float32")
    step = shrinking(lambda state, batch: jnp.argmax(batch["x"] * state["s"]))
    plan = same(step, (SCALAR, {"x": jnp.asarray(x)}), method=WHOLE, **CHECKED)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 32)] * (1 if size == 8 else 2)


def test_a_loop_that_never_runs_is_what_it_starts_with():
    def scanned(state, batch):
        return lax.scan(lambda a, w: (jnp.tanh(a @ w), jnp.sum(a, 0)), batch["x"], state["w"])

    args = {"w": jnp.ones((0, 8, 8))}, {"x": jnp.ones((16, 8))}
    assert not same(shrinking(scanned), args, method=alpa_lite.Sharded((8,)), **CHECKED).collectives


def test_state_without_elements_is_passed_on_from_call_to_call():
    def step(state, batch):
        h = batch["x"] @ state["w"]
        return {"w": state["w"] * 0.9, "none": state["none"] + h[:0, :8]}, h.sum()

    state = {"w": jnp.ones((8, 16)), "none": jnp.ones((0, 8))}
    planned = alpa_lite.parallelize(step, method=alpa_lite.Zero(3), verify="hlo")
    for _ in range(3):
        state, _ = planned(state, {"x": jnp.ones((16, 8))})
    np.testing.assert_allclose(state["w"], np.full((8, 16), 0.9**3), rtol=1e-6)


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
    assert_close(got, want, rtol=1e-6, atol=0, weak_types=True)


def test_a_transform_beside_a_collective_runs_on_cpus():
    """Plain `shard_map` fails: the compiler hands the collective's order of dims to the transform that it follows."""

    def loss(w, batch):
        spectrum = jnp.fft.rfft((batch["x"] @ w["in"]).swapaxes(1, 2), n=64) * jnp.fft.rfft(w["filter"], n=64)
        mixed = jnp.fft.irfft(spectrum, n=64)[..., :32].swapaxes(1, 2) * batch["x"]
        return jnp.mean((mixed @ w["out"] - batch["y"]) ** 2)

    w = {"filter": normal(0, 16, 32), "in": normal(1, 16, 16), "out": normal(2, 16, 16)}
    batch = {"x": normal(3, 8, 32, 16), "y": normal(4, 8, 32, 16)}
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
