"""Temporaries of stages against the compiler's."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite import Pipeline
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import compile_step
from alpa_lite.passes.checks.verification import MemoryReport, compiled_reports
from alpa_lite.passes.ir.items import Item
from alpa_lite.passes.stages import temporaries
from alpa_lite.runtime import aot

WIDTH, BATCH = 256, 512


def step(state, x):
    def loss(state):
        y = x
        for w in state:
            y = jax.nn.relu(y @ w)
        return (y * y).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], value


@dataclasses.dataclass(frozen=True)
class Found:
    """What an executable of a pipeline of two stages takes."""

    name: str
    submesh: int
    memory: MemoryReport

    @property
    def predicted(self) -> int:
        assert self.memory.predicted is not None
        return self.memory.predicted


def reports(step, arguments, cluster=None) -> list[Found]:
    """Every executable of the step's pipeline, compiled."""
    devices = jax.devices()[:2]
    cluster = cluster or Cluster.local(devices)
    options = make_options(
        {"method": Pipeline(num_stages=2, schedule="1f1b", remat="none"), "num_microbatches": 2, "cluster": cluster}
    )
    compiled = compile_step(step, arguments, {}, options, cluster)
    executables = list(aot.compiled_for(compiled.staged, compiled.plan, devices))
    out = []
    for found in compiled_reports(compiled.plan, compiled.staged, executables, "cpu"):
        assert found.memory is not None
        out.append(Found(found.name, found.submesh, found.memory))
    return out


def most(found: list[Found]):
    """Of each stage the most predicted and the most measured bytes."""
    out = {0: [0, 0], 1: [0, 0]}
    for one in found:
        pair = one.predicted, one.memory.temporaries
        out[one.submesh] = [max(a, b) for a, b in zip(out[one.submesh], pair, strict=True)]
    return out.values()


def test_temporaries_of_stages_are_the_compilers():
    """Of each stage the executable that needs most: products, their operands, and one gradient at a time."""
    state = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 6
    for predicted, measured in most(reports(step, (state, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)))):
        assert measured > WIDTH * WIDTH * 4
        assert predicted == pytest.approx(measured, rel=0.25)


def small_step(state, x):
    """Layers whose values are small, so that they go from pass to pass in packs."""

    def loss(state):
        y = x
        for w, scale in state:
            y = y + jnp.tanh(y @ w) * jnp.exp(scale)
        return (y * y).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value


def test_a_pack_and_what_it_is_joined_of_are_there_together():
    state = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64,)))] * 12
    cluster = dataclasses.replace(Cluster.preset("h100").part(2), platform="cpu")  # whose memory copies much in no time
    found = reports(small_step, (state, jax.ShapeDtypeStruct((512, 64), jnp.float32)), cluster)
    forward = [one for one in found if "forward" in one.name]
    assert len(forward) == 2
    block = 256 * 64 * 4
    for one in forward:
        assert one.memory.outputs > 6 * block  # what it keeps for the backward pass
        assert one.memory.temporaries > 6 * block
        assert one.predicted == pytest.approx(one.memory.temporaries, rel=0.25)


def test_temporaries_of_half_precision_are_the_compilers():
    """In packs and apart: the CPU compiler of JAX 0.10 keeps all of it in float32 until the end."""

    def step(state, x):
        def loss(state):
            y = x
            for w, scale in state:
                w, scale = w.astype(jnp.bfloat16), scale.astype(jnp.bfloat16)
                y = y + jnp.tanh(y @ w) * jnp.exp(scale)
            return (y * y).mean().astype(jnp.float32)

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), value

    state = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64,)))] * 12
    cluster = dataclasses.replace(Cluster.preset("h100").part(2), platform="cpu")
    found = reports(step, (state, jax.ShapeDtypeStruct((2048, 64), jnp.bfloat16)), cluster)
    forward = [one for one in found if "forward" in one.name]
    assert len(forward) == 2
    for one in forward:
        assert one.memory.temporaries > 8 * 1024 * 64 * 2
        assert one.predicted == pytest.approx(one.memory.temporaries, rel=0.25)


def window_step(state, x):
    """Convolutions, the gradient of a kernel, and of a maximum over windows."""

    def loss(state):
        y = x
        for w in state:
            y = jax.lax.conv_general_dilated(y, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            y = jax.nn.relu(y)
        y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return (y * y).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], value


def test_temporaries_of_convolutions_are_the_compilers():
    state = [jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)] * 4
    x = jax.ShapeDtypeStruct((32, 32, 32, 32), jnp.float32)
    for predicted, measured in most(reports(window_step, (state, x))):
        assert predicted == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("first", ["params", "moments"])
def test_an_update_writes_every_leaf_over_itself(first: str):
    """Where a leaf's new value is written over another leaf, the compiler copies: of Adam's state two thirds."""
    adam = optax.adam(1e-3)

    def step(params, moments, x):
        def loss(params):
            y = x
            for w in params.values():
                y = jnp.tanh(y @ w)
            return (y * y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = adam.update(grads, moments)
        params = optax.apply_updates(params, updates)
        return (params, moments, value) if first == "params" else (moments, params, value)

    params = {f"w{i}": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for i in range(6)}
    arguments = params, jax.eval_shape(adam.init, params), jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    updates = [one.memory for one in reports(step, arguments) if "update" in one.name]
    assert len(updates) == 2
    leaf = 4 * WIDTH * WIDTH
    for memory in updates:
        assert memory.aliased >= 9 * leaf
        assert memory.temporaries < 1000


def test_what_a_late_round_makes_of_state_waits_for_it():
    """A leaf that two stages read is updated when both gradients are there; nothing made of it is held till then."""
    adam = optax.adam(1e-3)

    def step(state, tokens):
        def loss(params):
            x = params["embedding"][tokens]
            for w in params["layers"]:
                x = jnp.tanh(x @ w)
            return jax.nn.log_softmax(x @ params["embedding"].T)[:, :, 0].mean()

        params, moments = state
        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = adam.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    layers = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
    params = {"embedding": jax.ShapeDtypeStruct((512, WIDTH), jnp.float32), "layers": layers}
    state = params, jax.eval_shape(adam.init, params)
    found = reports(step, (state, jax.ShapeDtypeStruct((8, 32), jnp.int32)))
    (late,) = [one.memory for one in found if one.name.endswith("update 1")]
    leaf = 512 * WIDTH * 4
    assert late.aliased == 3 * leaf and late.temporaries < 1000
    assert late.arguments < 5 * leaf + 1000  # parameters, two moments, two gradients
    (early,) = [one.memory for one in found if one.name == "stage 0 update"]
    assert early.outputs < 3 * 3 * WIDTH * WIDTH * 4 + 1000  # of its three layers, not of the embedding


def temporary(step, arguments, platform):
    """Predicted bytes of the segments of the first stage, by kind."""
    cluster = dataclasses.replace(Cluster.preset("h100").part(2), platform=platform)
    options = make_options(
        {"method": Pipeline(num_stages=2, schedule="1f1b", remat="none"), "num_microbatches": 2, "cluster": cluster}
    )
    stage = compile_step(step, arguments, {}, options, cluster).staged.stages[0]
    return {segment.kind: size for segment, size in stage.temporary.items()}


def test_products_of_gpus_are_added_to_sums_where_these_are():
    """A CPU has the gradient of a weight beside the sum that it is added to; a GPU's product adds to the sum."""
    wide = 1024
    state = [jax.ShapeDtypeStruct((wide, wide), jnp.float32)] * 4
    arguments = state, jax.ShapeDtypeStruct((64, wide), jnp.float32)
    weight, values = 4 * wide * wide, 4 * 32 * wide
    assert weight <= temporary(step, arguments, "cpu")["backward"] < weight + 8 * values
    assert temporary(step, arguments, "cuda")["backward"] < 8 * values


def test_a_product_that_is_split_is_added_nowhere():
    """Queries and keys of one product: a loop of two results follows it."""

    def split_step(state, x):
        def loss(state):
            a, b = jnp.split(x @ state[0], 2, axis=1)
            return ((jnp.tanh(a * b) @ state[1]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return [w - 0.1 * g for w, g in zip(state, grads, strict=True)], value

    state = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 1024), (512, 64))]
    found = temporary(split_step, (state, jax.ShapeDtypeStruct((64, 64), jnp.float32)), "cuda")
    assert found["forward"] >= 32 * 1024 * 4


def test_what_gpus_join_in_a_pack_is_made_where_it_is_joined():
    """The functions of a layer are written to the pack by one loop, and products alone are there before it."""
    state = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (64,)))] * 12
    arguments = state, jax.ShapeDtypeStruct((512, 64), jnp.float32)
    block = 256 * 64 * 4
    on_cpu, on_gpu = (temporary(small_step, arguments, platform)["forward"] for platform in ("cpu", "cuda"))
    assert on_cpu > 6 * block
    assert 0 <= on_gpu <= on_cpu - 3 * block


def placed_by_trying(values, rooms):
    """The most bytes of values of which each has a room of its own, or none."""
    if not values:
        return 0
    fits = [n for n, room in enumerate(rooms) if values[0] <= room]
    put = [values[0] + placed_by_trying(values[1:], [*rooms[:n], *rooms[n + 1 :]]) for n in fits]
    return max([placed_by_trying(values[1:], rooms), *put])


sizes = st.lists(st.integers(1, 9), max_size=5).map(lambda found: sorted(found, reverse=True))


@given(sizes, sizes)
def test_the_most_bytes_find_a_room(values, rooms):
    assert temporaries._placed(values, rooms) == placed_by_trying(values, rooms)


def test_an_output_holds_one_value_at_a_time_until_it_is_written():
    """Of three values of 4, 3 and 2 bytes an output of 10 holds one until slot 2; one that is written holds none."""
    inner = np.zeros(6)
    values = np.array([(0, 3, 4), (1, 3, 3), (1, 2, 2)])
    assert temporaries._fullest(values, np.array([(0, 0, 0)]), inner) == 9
    assert temporaries._fullest(values, np.array([(3, 5, 10)]), inner) == 7
    assert temporaries._fullest(values, np.array([(5, 5, 10)]), inner) == 5
    assert temporaries._fullest(values, np.array([(5, 5, 10), (5, 5, 3)]), inner) == 2
    assert temporaries._fullest(values, np.array([(5, 5, 10)]), np.array([0, 0, 0, 0, 0, 8.0])) == 8


@pytest.mark.parametrize(
    ("kind", "start", "in_place", "most"),
    [("loop", 1, False, 8), ("update", 1, True, 8), ("update", 1, False, 16), ("library", 1, True, 16),
     ("library", 0.5, False, 8)],
)  # fmt: skip
def test_what_writes_over_its_operand_takes_no_bytes_beside_it(kind, start, in_place, most):
    """Value 1 is read by what makes value 3, last; half a place early are loops alone."""
    items = [Item("library", (), (1,), 2), Item(kind, (1,), (3,), 2), Item("library", (3,), (4,), 2)]
    lives = {1: (0, start), 3: (start, 2), 4: (2, 3)}
    slots = temporaries._slots(items, lives, {1: 8, 3: 8, 4: 8}, (4,), in_place=in_place)
    assert temporaries._fullest(*slots, np.zeros(8)) == most
