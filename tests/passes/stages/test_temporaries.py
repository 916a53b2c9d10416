"""Temporaries of stages against the compiler's."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite import Pipeline
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import compile_step
from alpa_lite.passes.checks.verification import MemoryReport, compiled_reports
from alpa_lite.passes.stages import temporaries
from alpa_lite.runtime import aot
from gallery.batches import f32, shape
from gallery.steps import layers, optimizer_step, square_layers
from gallery.steps import sgd as descent

WIDTH, BATCH = 256, 512


@descent
def products(state, x):
    for w in state:
        x = jax.nn.relu(x @ w)
    return (x * x).mean()


@descent
def small(state, x):
    """Layers whose values are small, so that they go from pass to pass in packs."""
    for w, scale in state:
        w, scale = w.astype(x.dtype), scale.astype(x.dtype)
        x = x + jnp.tanh(x @ w) * jnp.exp(scale)
    return (x * x).mean().astype(jnp.float32)


@descent
def windows(state, x):
    """Convolutions, the gradient of a kernel, and of a maximum over windows."""
    for w in state:
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    return (x * x).mean()


SMALL = [(f32(64, 64), f32(64))] * 12


@dataclasses.dataclass(frozen=True)
class Found:
    """What an executable of a pipeline of two stages takes."""

    name: str
    submesh: int
    memory: MemoryReport
    predicted: int


def compiled(step, arguments, cluster):
    method = Pipeline(num_stages=2, schedule="1f1b", remat="none")
    options = make_options({"method": method, "num_microbatches": 2, "cluster": cluster})
    return compile_step(step, arguments, {}, options, cluster)


def reports(step, arguments, cluster=None) -> list[Found]:
    """Every executable of the step's pipeline, compiled."""
    devices = jax.devices()[:2]
    done = compiled(step, arguments, cluster or Cluster.local(devices))
    executables = list(aot.compile_for_devices(done.staged, done.plan, devices))
    out = []
    for found in compiled_reports(done.plan, done.staged, executables, "cpu"):
        assert found.memory is not None and found.memory.predicted_bytes is not None
        out.append(Found(found.name, found.submesh, found.memory, found.memory.predicted_bytes))
    return out


@pytest.mark.parametrize(
    ("step", "arguments"),
    [(products, ([f32(WIDTH, WIDTH)] * 6, f32(BATCH, WIDTH))),
     (windows, ([f32(3, 3, 32, 32)] * 4, f32(32, 16, 16, 32)))],
    ids=["products", "windows"],
)  # fmt: skip
def test_temporaries_of_stages_are_the_compilers(step, arguments):
    """Of each stage the executable that needs most: products, their operands, and one gradient at a time."""
    found = reports(step, arguments)
    for submesh in (0, 1):
        own = [one for one in found if one.submesh == submesh]
        measured = max(one.memory.temporaries for one in own)
        assert measured > arguments[0][0].size * 4
        assert max(one.predicted for one in own) == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("dtype", "examples"), [(jnp.float32, 512), (jnp.bfloat16, 2048)], ids=["f32", "bf16"])
def test_a_pack_and_what_it_is_joined_of_are_there_together(dtype, examples):
    """In half precision, too: the CPU compiler of JAX 0.10 keeps all of it in float32 until the end."""
    cluster = dataclasses.replace(Cluster.preset("h100").part(2), platform="cpu")  # whose memory copies much in no time
    found = reports(small, (SMALL, jax.ShapeDtypeStruct((examples, 64), dtype)), cluster)
    forward = [one for one in found if "forward" in one.name]
    assert len(forward) == 2
    block = examples // 2 * 64 * jnp.dtype(dtype).itemsize
    for one in forward:
        assert one.memory.outputs > 6 * block  # what it keeps for the backward pass
        assert one.memory.temporaries > 6 * block
        assert one.predicted == pytest.approx(one.memory.temporaries, rel=0.25)


ADAM = optax.adam(1e-3)


def adam_step(loss, turned=False):
    """A step of Adam; if `turned`, it returns moments before parameters."""
    step = optimizer_step(loss, ADAM)

    def back(params, moments, x):
        params, moments, value = step(params, moments, x)
        return moments, params, value

    return back if turned else step


@pytest.mark.parametrize("turned", [False, True])
def test_an_update_writes_every_leaf_over_itself(turned):
    """Where a leaf's new value is written over another leaf, the compiler copies: of Adam's state two thirds."""
    params = {f"w{i}": f32(WIDTH, WIDTH) for i in range(6)}
    arguments = params, jax.eval_shape(ADAM.init, params), f32(8, WIDTH)
    step = adam_step(lambda params, x: square_layers(params.values(), x), turned)
    updates = [one.memory for one in reports(step, arguments) if "update" in one.name]
    assert len(updates) == 2
    for memory in updates:
        assert memory.aliases >= 9 * 4 * WIDTH * WIDTH
        assert memory.temporaries < 1000


def test_what_a_late_round_makes_of_state_waits_for_it():
    """A leaf that two stages read is updated when both gradients are there; nothing made of it is held till then."""

    def loss(params, tokens):
        x = layers(params["layers"], params["embedding"][tokens])
        return jax.nn.log_softmax(x @ params["embedding"].T)[:, :, 0].mean()

    params = {"embedding": f32(512, WIDTH), "layers": [f32(WIDTH, WIDTH)] * 4}
    arguments = params, jax.eval_shape(ADAM.init, params), shape(8, 32)
    found = {one.name: one.memory for one in reports(adam_step(loss), arguments)}
    (late,) = [memory for name, memory in found.items() if name.endswith("update 1")]
    leaf = 512 * WIDTH * 4
    assert late.aliases == 3 * leaf and late.temporaries < 1000
    assert late.arguments < 5 * leaf + 1000  # parameters, two moments, two gradients
    # Of its three layers, not of the embedding:
    assert found["stage 0 update"].outputs < 3 * 3 * WIDTH * WIDTH * 4 + 1000


def temporary(step, arguments, platform):
    """Predicted bytes of the segments of the first stage, by kind."""
    cluster = dataclasses.replace(Cluster.preset("h100").part(2), platform=platform)
    stage = compiled(step, arguments, cluster).staged.stages[0]
    return {segment.kind: size for segment, size in stage.temporary_bytes.items()}


def test_products_of_gpus_are_added_to_sums_where_these_are():
    """A CPU has the gradient of a weight beside the sum that it is added to; a GPU's product adds to the sum."""
    wide = 1024
    arguments = [f32(wide, wide)] * 4, f32(64, wide)
    weight, values = 4 * wide * wide, 4 * 32 * wide
    assert weight <= temporary(products, arguments, "cpu")["backward"] < weight + 8 * values
    assert temporary(products, arguments, "cuda")["backward"] < 8 * values


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
