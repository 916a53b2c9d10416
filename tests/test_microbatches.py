"""`num_microbatches` on one mesh: the step as the user calls it computes what it does on one device."""

import re
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import alpa_lite
import gallery
from alpa_lite.cluster import Cluster
from alpa_lite.options import Auto, DataParallel, Manual, Sharded, TensorParallel, Zero
from gallery import accumulation as steps
from gallery.batches import shapes
from gallery.steps import square_layers
from tests import comparing
from tests.marks import slow

H100 = Cluster.preset("h100", nodes=1)
METHODS = {
    "auto": Auto(), "data": DataParallel(), "zero-2": Zero(2), "zero-3": Zero(3), "tensor": TensorParallel(),
    "mesh": Sharded((4, 2), remat="none"),
    "manual": Manual({"state['a']": jax.sharding.PartitionSpec(None, "m")}, (2, 4), "dm"),
}  # fmt: skip


def wide(batch: int = 512, width: int = 64) -> gallery.Built:
    """Products large enough that devices share them."""

    def loss(p, b):
        return jax.numpy.mean((jax.numpy.tanh(jax.numpy.tanh(b["x"] @ p["a"]) @ p["b"]) @ p["c"] - b["y"]) ** 2)

    shapes = {"a": (64, width), "b": (width, width), "c": (width, 16)}
    params = {name: steps.normal(i, *shape) / 8 for i, (name, shape) in enumerate(shapes.items())}
    return steps.descent(loss, params, {"x": steps.normal(3, batch, 64), "y": steps.normal(4, batch, 16)})


def plan_of(made: gallery.Built, cluster: Cluster | str = H100, **options: Any) -> alpa_lite.Plan:
    fun, args = made
    return alpa_lite.make_plan(fun, *shapes(args), cluster=cluster, **options)


def equals_jit(fun: Any, args: Any, got: Any) -> None:
    comparing.assert_close_in_norm(jax.tree.leaves(got), jax.tree.leaves(jax.jit(fun)(*args)))


# -- what is computed, on eight devices -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "method", "parts"),
    [
        (wide, "data", 4), (wide, "zero-3", 2), (steps.masked_loss, "zero-2", 2), slow(steps.metrics, "mesh", 4),
        (steps.batch_axis_1, "auto", 2), slow(wide, "manual", 2), slow(steps.noise, "mesh", 2),
        slow(steps.several_losses, "data", 2), slow(steps.multi_steps, "zero-3", 2),
        slow(steps.scanned_layers, "tensor", 4),
        slow(steps.regularised_loss, "auto", 4), slow(steps.mixed_up, "mesh", 4),
    ],
)  # fmt: skip
def test_steps_on_eight_devices(make, method, parts):
    fun, args = make()
    run = alpa_lite.parallelize(fun, method=METHODS[method], num_microbatches=parts, donate_argnums=())
    got = run(*args)
    assert run.plan(*args).num_microbatches == parts
    equals_jit(fun, args, got)


@pytest.mark.parametrize(
    ("name", "method", "parts", "devices"),
    [
        ("linen_mlp", "data", 2, 8), ("nnx_mlp", "zero-3", 2, 8),
        slow("linen_gpt_scan", "zero-3", 2, 4), slow("nnx_gpt_tied", "data", 4, 2), slow("linen_moe", "mesh", 4, 8),
        slow("nnx_unet", "mesh", 2, 8), slow("nnx_user_gpt", "zero-3", 4, 2),
    ],
)  # fmt: skip
def test_models_on_several_devices(name, method, parts, devices):
    """Textbook methods on as many devices as a micro-batch has examples, at most."""
    case, cluster = gallery.get("zoo", name), Cluster.local(jax.devices()[:devices])
    step, args = case.make()
    parallel = alpa_lite.parallelize(step, method=METHODS[method], num_microbatches=parts, cluster=cluster)
    got = comparing.called(parallel, args, case.style)
    assert [plan.num_microbatches for plan in parallel.plans] == [parts]
    step, args = case.make()
    comparing.compare(got, comparing.called((nnx.jit if case.style == "nnx" else jax.jit)(step), args, case.style))


# -- communication ----------------------------------------------------------------------------------------------------


def test_cutting_a_sharded_batch_moves_nothing_and_the_compiled_program_synchronises_once():
    """The HLO verifier counts what the compiled loop runs; and no all-reduce is inside of it."""
    fun, args = wide()
    step = alpa_lite.parallelize(fun, method=DataParallel(), num_microbatches=4, verify="hlo", donate_argnums=())
    plan = step.plan(*args)
    assert {c.kind for c in plan.collectives} == {"all_reduce"}
    (text,) = step.hlo(*args)
    assert set(re.findall(r"= .* (all-\w+|collective-\w+|reduce-scatter)\(", text)) == {"all-reduce"}
    blocks = re.split(r"\n(?=(?:ENTRY )?%)", text)
    where = [block.split(" ", 1)[0] for block in blocks if re.search(r"= .* all-reduce(-start)?\(", block)]
    assert where == ["ENTRY"]
    assert any("compiled: the step has the planned collectives" in line for line in plan.verification)


@pytest.mark.parametrize("method", ["data", "zero-3"])
def test_gradients_and_the_loss_are_synchronised_once(method):
    made = wide()
    plan = plan_of(made, method=METHODS[method], num_microbatches=4)
    kind = "all_reduce" if method == "data" else "reduce_scatter"
    gradients = sorted(w.nbytes for w in made[1][0].values())
    moved = [(c.kind, c.bytes) for c in plan.collectives if c.kind in (kind, "all_reduce") for _ in range(c.count)]
    assert sorted(moved) == sorted([("all_reduce", 4), *((kind, size) for size in gradients)])


def scanned(layers: int = 4, width: int = 64, batch: int = 64) -> gallery.Built:
    """Layers in a scan, with biases."""

    def layer(x, p):
        return x + jax.numpy.tanh(x @ p["w"] + p["b"]), None

    def loss(p, b):
        return jax.numpy.mean((jax.lax.scan(layer, b["x"], p)[0] - b["y"]) ** 2)

    params = {"w": steps.normal(0, layers, width, width) / 8, "b": steps.normal(1, layers, width) / 8}
    return steps.descent(loss, params, {"x": steps.normal(2, batch, width), "y": steps.normal(3, batch, width)})


@pytest.mark.parametrize("parts", [1, slow(4)])
@pytest.mark.parametrize("method", ["data", *(slow(m) for m in ("zero-3", "mesh"))])
def test_gradients_of_scanned_layers_are_synchronised_once(method, parts):
    """After both loops, in the plan and in what is compiled."""
    fun, args = scanned()
    options = {"method": METHODS[method], "verify": "hlo", "donate_argnums": ()}
    step = alpa_lite.parallelize(fun, num_microbatches=parts, **options)
    equals_jit(fun, args, step(*args))
    reduced = [c for c in step.plan(*args).collectives if c.kind in ("all_reduce", "reduce_scatter")]
    if method == "data":
        assert sorted(c.bytes * c.count for c in reduced) == sorted([4, *(leaf.nbytes for leaf in args[0].values())])


@pytest.mark.slow
def test_stacked_gradients_are_whole_where_memory_allows():
    """Zero(3) reduces them once if whole gradients fit, and in every micro-batch if they do not."""
    made = scanned(layers=8, width=2048, batch=2048)
    many, few = (
        plan_of(made, method=Zero(3), num_microbatches=8, memory_per_device=budget) for budget in (None, 100 << 20)
    )
    often = [max(c.count for c in plan.collectives if c.kind == "reduce_scatter") for plan in (many, few)]
    assert often[0] == 1 and often[1] >= 8 and few.step_seconds > many.step_seconds
    memory = [max(stage.memory.total for stage in plan.stages) for plan in (many, few)]
    assert memory[1] <= 100 << 20 < memory[0]


@pytest.mark.slow
def test_communication_left_to_the_compiler():
    """It may use a part of an axis, which the plan shows as it is, and synchronise more often."""
    fun, args = wide()
    options = {"method": DataParallel(), "communication": "compiler", "donate_argnums": ()}
    step = alpa_lite.parallelize(fun, num_microbatches=4, **options)
    equals_jit(fun, args, step(*args))
    assert step.plan(*args).collectives and "micro-batches" in step.plan(*args).details()


# -- plans ------------------------------------------------------------------------------------------------------------


def test_the_plan_says_what_was_cut(tmp_path):
    fun, args = wide()
    options = {"method": Zero(3), "donate_argnums": ()}
    step = alpa_lite.parallelize(fun, num_microbatches=4, **options)
    plan = step.plan(*args)
    assert plan.num_microbatches == 4 and "4 micro-batches" in plan.details()
    assert "4 micro-batches of 128 examples: dim 0 of batch/x, dim 0 of batch/y" in plan.notes
    whole = alpa_lite.parallelize(fun, **options).plan(*args)
    assert whole.num_microbatches == 1 and whole.fingerprint != plan.fingerprint
    assert "micro-batches" in whole.diff(plan)
    assert "dot_general" in plan.explain("dot_general") and "state/b" in plan.explain("state['b']")

    plan.save(tmp_path / "plan.json")
    again = alpa_lite.parallelize(fun, plan=tmp_path / "plan.json", donate_argnums=())
    replayed = again.plan(*args)
    assert (replayed.num_microbatches, replayed.fingerprint) == (4, plan.fingerprint)
    assert replayed.collectives == plan.collectives and plan.notes[1] in replayed.notes
    equals_jit(fun, args, again(*args))
    with pytest.raises(alpa_lite.OptionError, match="num_microbatches=2: the given plan has 4"):
        alpa_lite.parallelize(fun, plan=plan, num_microbatches=2).plan(*args)


# -- the number that is chosen ----------------------------------------------------------------------------------------


def deep(batch: int = 16384) -> gallery.Built:
    """Activations many times as large as the weights."""

    def loss(p, b):
        return square_layers(p.values(), b["x"])

    params = {f"w{i}": steps.normal(i, 64, 64) / 8 for i in range(4)}
    return steps.descent(loss, params, {"x": np.zeros((batch, 64), np.float32)})


def test_micro_batches_save_memory():
    """In the plan, and in what is compiled."""
    fun, args = deep()
    planned, compiled = [], []
    for parts in (1, 8):
        step = alpa_lite.parallelize(fun, method=DataParallel(), num_microbatches=parts, donate_argnums=())
        planned.append(step.plan(*args).stages[0].memory.activations)
        executable: Any = step.prepare_call(args, {})[1]
        compiled.append(executable.compiled_executables()[0].memory_analysis().temp_size_in_bytes)
    assert planned[1] < planned[0] / 2 and compiled[1] < compiled[0] / 2


@pytest.mark.parametrize("method", ["data", "mesh"])
def test_auto_takes_the_fewest_that_fit_or_more_that_are_faster(method):
    free = plan_of(deep(), method=METHODS[method])
    assert free.num_microbatches == 1
    budget = free.stages[0].memory.total // 3
    plan = plan_of(deep(), method=METHODS[method], memory_per_device=budget)
    chosen = plan.num_microbatches
    assert chosen in (2, 4, 8) and plan.stages[0].memory.total <= budget
    assert any(note.startswith(f"{chosen} micro-batches: ") and "memory_per_device" in note for note in plan.notes)
    for fewer in (count for count in (1, 2, 4) if count < chosen):
        try:
            other = plan_of(deep(), method=METHODS[method], memory_per_device=budget, num_microbatches=fewer)
        except alpa_lite.InfeasibleError:
            continue
        assert other.step_seconds > plan.step_seconds


def test_auto_on_one_device():
    one = Cluster.local(jax.devices()[:1])
    whole = plan_of(deep(), one).stages[0].memory.total
    plan = plan_of(deep(), one, memory_per_device=int(whole * 0.7))
    assert plan.num_microbatches == 2 and plan.num_devices == 1


def test_auto_takes_one_where_micro_batches_are_not_exact():
    assert plan_of(steps.expert_balance(), method=Sharded()).num_microbatches == 1
    with pytest.raises(alpa_lite.InfeasibleError, match=r"Micro-batches do not help: num_microbatches=\d+: .*_balance"):
        plan_of(steps.expert_balance(), Cluster.local(jax.devices()[:1]), memory_per_device=4000)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["contrastive", "capacity", "expert_balance", "log_of_mean"])
def test_what_is_not_exact_is_refused(name):
    with pytest.raises(alpa_lite.MicrobatchError) as caught:
        plan_of(gallery.get("micro-batches", name).make(), num_microbatches=2)
    assert re.search(r"num_microbatches=2: \w+ at .*accumulation.py:\d+.*use num_microbatches=1", str(caught.value))


def test_what_is_allowed_to_be_inexact_is_said():
    fun, args = steps.expert_balance()
    step = alpa_lite.parallelize(fun, num_microbatches=4, allow_inexact=True, method=Sharded((8,)), donate_argnums=())
    got, want = jax.tree.leaves(step(*args)), jax.tree.leaves(steps.reference(fun, args, 4))
    del got[2], want[2]  # the loss itself comes after the loop and is that of the whole batch
    comparing.assert_close_in_norm(got, want)
    notes = step.plan(*args).notes
    assert any(re.match(r"inexact, computed within each micro-batch: reduce_sum at .*:\d+", note) for note in notes)


@pytest.mark.slow
def test_batch_norm():
    fun, args = gallery.get("zoo", "linen_convnet").make()
    with pytest.raises(alpa_lite.MicrobatchError, match=r"at gallery/linen.py:\d+.*BatchNorm.*allow_inexact"):
        alpa_lite.parallelize(fun, num_microbatches=2).plan(*args)
    assert alpa_lite.parallelize(fun, method=Sharded()).plan(*args).num_microbatches == 1


def test_a_number_that_does_not_divide_the_batch():
    with pytest.raises(alpa_lite.MicrobatchError) as caught:
        plan_of(wide(), num_microbatches=3)
    for part in ("num_microbatches=3", "batch/x", "512 examples", "use one of [1, 2, 4"):
        assert part in str(caught.value)
