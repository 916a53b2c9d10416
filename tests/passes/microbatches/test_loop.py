"""The loop over micro-batches computes what the step on the whole batch does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.cluster import Cluster
from alpa_lite.errors import MicrobatchError
from alpa_lite.ir import graph as graphs
from alpa_lite.options import DataParallel, Sharded, Zero
from alpa_lite.passes import factors, lowering
from alpa_lite.passes.ir import evaluation
from alpa_lite.passes.lowering import emission
from alpa_lite.passes.microbatches import loop as accumulation
from alpa_lite.passes.sharding import grouping
from alpa_lite.passes.tracing import tracing
from tests import zoo
from tests.passes.microbatches import accumulation_steps as steps
from tests.searching import best_of_meshes

TOLERANCE = 1e-5


def accumulated(fun, args, parts, **options):
    """The traced step, and the same as a loop."""
    traced = tracing.trace(fun, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    found = accumulation.accumulate(traced, rules, parts, **options)
    graphs.check(found.traced.graph)
    loop = next(op for op in found.traced.graph.block.ops if op.index == found.scan)
    assert loop.name == "scan" and loop.params["length"] == parts == found.num_microbatches
    return traced, found


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Most of the time of these tests is LLVM's."""


def outputs(traced, args):
    """The flat outputs, compiled."""
    leaves = jax.tree.leaves(args)
    return jax.jit(lambda *leaves: evaluation.evaluate(traced.graph, leaves), compiler_options=QUICK)(*leaves)


def plain(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(x))
    return np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.inexact) else np.asarray(x)


def compare(got, want, tolerance=TOLERANCE):
    """Floats up to the tolerance, as a share of their own norm or of a thousandth of all; the rest exactly."""
    total = np.sqrt(sum(np.sum(plain(w) ** 2) for w in want if jnp.issubdtype(w.dtype, jnp.inexact)))
    assert len(got) == len(want)
    for number, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape and g.dtype == w.dtype
        if jnp.issubdtype(w.dtype, jnp.inexact):
            error = np.linalg.norm(plain(g) - plain(w))
            assert error <= tolerance * max(np.linalg.norm(plain(w)), 1e-3 * total), (number, error)
        else:
            np.testing.assert_array_equal(plain(g), plain(w))


def equal(made, parts, **options):
    """Asserts equality, and returns what was rewritten."""
    fun, args = made
    traced, found = accumulated(fun, args, parts, **options)
    compare(outputs(found.traced, args), outputs(traced, args))
    return found


@pytest.mark.parametrize("make", steps.EXACT, ids=lambda make: make.__name__)
def test_steps(make):
    found = equal(make(), 4)
    assert not any("inexact" in note for note in found.notes)


BY_POSITION = {"noise", "mixed_up"}
"""Steps of which a micro-batch has consecutive examples: draws and positions."""


@pytest.mark.parametrize("make", steps.EXACT, ids=lambda make: make.__name__)
def test_steps_on_every_fourth_example(make):
    """Results with one value an example come back in their order."""
    fun, args = make()
    traced, found = accumulated(fun, args, 4, strided=True)
    assert any("t, t + 4, t + 8" in note for note in found.notes) == (make.__name__ not in BY_POSITION)
    if make.__name__ not in BY_POSITION:
        compare(outputs(found.traced, args), outputs(traced, args))


def test_a_batch_that_is_taken_apart_stays_in_its_order():
    """Neighbours are compared: every fourth example has others."""

    def loss(p, b):
        pairs = (b["x"] @ p["a"]).reshape(-1, 2, 8)
        return jnp.mean((pairs[:, 0] - 2 * pairs[:, 1]) ** 2)

    made = steps.descent(loss, {"a": steps.normal(0, 4, 8)}, {"x": steps.normal(1, 16, 4)})
    assert not any("moves no data" in note for note in equal(made, 4, strided=True).notes)


@pytest.mark.parametrize("make", [steps.metrics, steps.contrastive, steps.scanned], ids=lambda make: make.__name__)
def test_one_microbatch_is_always_exact(make):
    """The loop is there too, with what pipelines cut."""
    equal(make(), 1)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.sampled_from(steps.LAYERS), max_size=4), st.sampled_from(steps.LOSSES), st.sampled_from([2, 4, 8]))
def test_random_steps(names, loss, parts):
    equal(steps.layers(names, loss), parts, strided=True)


# -- the zoo ----------------------------------------------------------------------------------------------------------

ACROSS = {
    "convnet", "convnet_odd", "user_convnet", "while", "cond", "switch", "fft_batch", "sort_batch", "cumulative",
    "slices", "reshape", "solve",
}  # fmt: skip
ZOO = {case.name: case for case in zoo.CASES if case.style != "nnx"}  # those need what the API does around a step
EXACT = [name for name in ZOO if name.split("_", 1)[1] not in ACROSS]
COVERING = [
    ("plain_scan", 4), ("plain_custom_vjp", 2), ("plain_remat_policy", 4), ("plain_pick", 2), ("plain_dropout_raw", 4),
    ("linen_moe", 2), ("linen_gpt_bf16", 2), ("linen_user_optax", 4), ("nnx_gru", 2), ("nnx_gpt_scan_remat", 2),
]  # fmt: skip
FAST = ["plain_scan"]


def kept(traced, leaves):
    """What is compared: not what Adam makes of gradients that are rounding errors, but its first moment."""
    paths = [a.path for a in traced.outputs]
    if not any("mu" in path for path in paths):
        return list(leaves)
    return [x for path, x in zip(paths, leaves, strict=True) if "mu" in path or x.ndim == 0 or x.dtype.kind in "iub"]


@pytest.mark.parametrize(
    ("name", "parts"), [pytest.param(*pair, marks=[] if pair[0] in FAST else pytest.mark.slow) for pair in COVERING]
)
def test_zoo(name, parts):
    case = ZOO[name]
    fun, args = case.make()
    traced, found = accumulated(fun, args, parts)
    got, want = (kept(traced, outputs(t, args)) for t in (found.traced, traced))
    if case.dtype == "float32":
        compare(got, want)
        return
    assert case.reference is not None
    fun, args = case.reference()
    exact = kept(traced, outputs(tracing.trace(fun, args, {}), args))
    for g, w, e in zip(got, want, exact, strict=True):
        own = np.linalg.norm(plain(w) - plain(e))
        assert np.linalg.norm(plain(g) - plain(e)) <= 2 * own + 1e-6 * np.linalg.norm(plain(e))


@pytest.mark.parametrize("name", [n for n in ZOO if n not in EXACT and n.startswith("plain")])
def test_zoo_across_the_batch_is_refused(name):
    with pytest.raises(MicrobatchError, match=r"num_microbatches=2: [a-z_]+ at .*tests/zoo_plain.py:\d+"):
        accumulated(*ZOO[name].make(), 2)


# -- refusals, and what is allowed to be inexact ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (steps.contrastive, "dot_general"),
        (steps.log_of_mean, "mul"),
        (steps.capacity, "cumsum"),
        (steps.recurrent_over_examples, "scan"),
    ],
)
def test_what_looks_across_the_batch_is_refused_by_name(make, operation):
    fun, args = make()
    with pytest.raises(MicrobatchError, match=rf"num_microbatches=4: {operation} at .*accumulation_steps.py:\d+"):
        accumulated(fun, args, 4)


def test_batch_norm_is_refused_by_name():
    with pytest.raises(
        MicrobatchError, match=r"num_microbatches=2: .* at tests/zoo_linen.py.*BatchNorm.*allow_inexact"
    ):
        accumulated(*zoo.get("linen_convnet").make(), 2)


@pytest.mark.slow
def test_inexact_batch_norm_is_that_of_each_microbatch():
    fun, args = zoo.get("linen_convnet").make()
    _, found = accumulated(fun, args, 2, allow_inexact=True)
    inexact = [note for note in found.notes if "inexact" in note]
    assert inexact and all("zoo_linen.py" in note and "BatchNorm" in note for note in inexact)
    compare(outputs(found.traced, args), jax.tree.leaves(steps.reference(fun, args, 2)))


def test_inexact_load_balance():
    fun, args = steps.balanced()
    with pytest.raises(MicrobatchError, match="allow_inexact=True"):
        accumulated(fun, args, 4)
    _, found = accumulated(fun, args, 4, allow_inexact=True)
    got, want = outputs(found.traced, args), jax.tree.leaves(steps.reference(fun, args, 4))
    del got[2], want[2]  # the loss itself comes after the loop and is that of the whole batch
    compare(got, want)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (3, ["num_microbatches=3", "batch/x", "16 examples", "[1, 2, 4, 8, 16]"]),
        (0, ["num_microbatches=0", "positive"]),
    ],
)
def test_numbers_that_do_not_divide(parts, words):
    with pytest.raises(MicrobatchError) as caught:
        accumulated(*steps.sum_loss(), parts)
    assert all(word in str(caught.value) for word in words)


def test_a_step_without_a_batch():
    with pytest.raises(MicrobatchError, match="batch_argnums"):
        accumulated(lambda w, x: {"w": w["w"] * x}, ({"w": steps.X}, 2.0), 2)


def test_batch_dims_says_whether_it_can_be_exact():
    def dims(make, parts):
        fun, args = make()
        traced = tracing.trace(fun, args, {})
        return accumulation.batch_dims(traced, factors.rules_of(traced.graph.ops(), traced.graph.values), parts)

    assert dims(steps.batch_axis_1, 4) == {"batch['x']": 1, "batch['y']": 1}
    assert dims(steps.contrastive, 2) is None
    assert dims(steps.sum_loss, 3) is None


# -- what the rewritten step looks like -------------------------------------------------------------------------------


def loop_of(found):
    return next(op for op in found.traced.graph.block.ops if op.index == found.scan)


def types(graph, atoms):
    return [(graph.values[v].shape, graph.values[v].dtype) for v in atoms]


def test_arguments_and_results_are_as_before():
    traced, found = accumulated(*steps.metrics(), 4)
    again = found.traced
    assert (again.arguments, again.outputs, again.state) == (traced.arguments, traced.outputs, traced.state)
    assert types(again.graph, again.graph.block.outputs) == types(traced.graph, traced.graph.block.outputs)


def test_tied_gradients_share_one_accumulator():
    _, found = accumulated(*steps.tied(), 4)
    assert loop_of(found).params["num_carry"] == 2  # the weight's gradient and the loss


def test_the_update_is_outside_of_the_loop():
    _, found = accumulated(*steps.multi_steps(), 4)
    assert "cond" in [op.name for op in found.traced.graph.block.ops]
    assert "cond" not in [op.name for op in loop_of(found).bodies[0].ops]


def test_denominators_are_computed_once_and_said():
    _, found = accumulated(*steps.masked(), 4)
    assert any("whole batch, before" in note and "reduce_sum" in note for note in found.notes)
    assert found.notes[0].startswith("4 micro-batches of 4 examples: dim 0 of batch/mask")


def test_narrow_sums_are_accumulated_in_float32():
    def step(state, batch):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(batch["x"].astype(jnp.bfloat16) @ w)).astype(jnp.float32))(state)
        return state - grads

    _, found = accumulated(step, (steps.WEIGHTS["a"].astype(jnp.bfloat16), {"x": steps.X}), 4)
    loop, values = loop_of(found), found.traced.graph.values
    assert {str(values[v].dtype) for v in loop.results} == {"float32"}


def test_names_and_lines_are_kept():
    fun, args = zoo.get("linen_mlp").make()
    traced, found = accumulated(fun, args, 2)

    def stacks(graph):
        return {str(op.source.name_stack) for op in graph.ops() if op.name == "dot_general"}

    assert stacks(found.traced.graph) == stacks(traced.graph)


def test_loop_body_equals_the_step_traced_at_its_size():
    """Tracing the step on a micro-batch is a check, where its constants do not depend on the batch."""
    fun, args = steps.sum_loss()
    _, found = accumulated(fun, args, 4)
    small = jax.tree.map(lambda x: x[:4], args[1])
    inner = [(op.name, found.traced.graph.values[op.results[0]].shape) for op in loop_of(found).bodies[0].ops]
    whole = tracing.trace(fun, (args[0], small), {}).graph
    heavy = {"dot_general", "tanh", "reduce_sum"}
    want = [(op.name, whole.values[op.results[0]].shape) for op in whole.block.ops if op.name in heavy]
    assert [item for item in inner if item[0] in heavy] == want


# -- plans ------------------------------------------------------------------------------------------------------------


def wide_mlp():
    def loss(p, b):
        return jnp.mean((jnp.tanh(jnp.tanh(b["x"] @ p["a"]) @ p["b"]) @ p["c"] - b["y"]) ** 2)

    shapes = {"a": (64, 64), "b": (64, 64), "c": (64, 16)}
    params = {name: steps.normal(i, *shape) / 8 for i, (name, shape) in enumerate(shapes.items())}
    return steps.descent(loss, params, {"x": steps.normal(3, 512, 64), "y": steps.normal(4, 512, 16)})


def planned(found, method, cluster):
    traced = found.traced
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
    best = best_of_meshes(traced, groups, rules, cluster, method)
    return lowering.lower(traced, groups, rules, best.mesh, best.choice, best.space.late_from)


@pytest.mark.parametrize(("method", "kind"), [(DataParallel(), "all_reduce"), (Zero(3), "reduce_scatter")])
def test_gradients_are_synchronised_once_a_step(method, kind):
    fun, args = wide_mlp()
    _, found = accumulated(fun, args, 4)
    program = planned(found, method, Cluster.preset("h100", nodes=1))
    moved = [c for c, *_ in lowering.collectives(program, found.traced) if c.kind in (kind, "all_reduce")]
    loss = ("all_reduce", 4, 1)
    assert sorted((c.kind, c.bytes, c.count) for c in moved) == sorted(
        [loss, *((kind, w.nbytes, 1) for w in args[0].values())]
    )


def test_on_eight_devices():
    fun, args = wide_mlp()
    traced, found = accumulated(fun, args, 4)
    program = planned(found, Sharded(mesh_shape=(4, 2)), Cluster.local(jax.devices()[:8]))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), program.mesh.axis_names)
    run = jax.jit(emission.function_of(program, found.traced, mesh, "explicit"))
    compare(run(*jax.tree.leaves(args), *found.traced.graph.constants), outputs(traced, args))
