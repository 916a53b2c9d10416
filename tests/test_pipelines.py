"""A step run as a pipeline computes what the single-device step on the whole batch computes.

Three consecutive steps, so that three updated states, losses and metrics are compared leaf by leaf, with the tolerance
that `comparing` states. A covering design over model, number of stages, number of micro-batches and schedule: every
pair of a schedule with a number of stages, and every kind of model in linen and in NNX, is there.
`benchmarks/numerics/pipelines.py` runs the product in full.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_lite
import gallery
from alpa_lite.ir import schedules
from gallery.batches import normal, rows, tokens
from gallery.steps import descent, distance, layers, updated
from tests import comparing, pipeline_driver
from tests.marks import one_in, slow
from tests.pipeline_driver import drive


@dataclass(frozen=True)
class Way:
    """How a case of the zoo is run: `stages` submeshes, each with `virtual` stages."""

    name: str
    stages: int
    microbatches: int
    schedule: str
    virtual: int = 1

    @property
    def devices(self) -> tuple[int, ...]:
        return pipeline_driver.DEVICES[self.stages]

    def __str__(self) -> str:
        return f"{self.name}-{self.stages}x{self.virtual}-{self.microbatches}-{self.schedule}"


FAST = [
    Way("nnx_mlp", 2, 1, "gpipe"),
    Way("linen_user_optax", 4, 2, "eager-1f1b"),
    Way("plain_masked_mean", 2, 4, "1f1b"),
]
SLOW = [
    Way("nnx_moe", 2, 4, "interleaved-1f1b", 2), Way("linen_unet", 2, 2, "1f1b"),
    Way("linen_resnet", 3, 8, "eager-1f1b"), Way("nnx_translator", 2, 4, "zb-h1"),
    Way("linen_moe", 3, 8, "1f1b"), Way("linen_user_train_state", 2, 2, "interleaved-1f1b", 2),
]  # fmt: skip
THOROUGH = [
    Way("nnx_gpt_scan", 2, 2, "zb-h1"), Way("linen_gpt_dropout", 2, 8, "eager-1f1b"),
    Way("nnx_gpt_tied", 3, 2, "zb-h1"), Way("linen_gpt", 4, 8, "1f1b"), Way("linen_gpt_remat", 3, 4, "gpipe"),
    Way("nnx_unet", 3, 1, "zb-h1"), Way("linen_unet", 4, 4, "interleaved-1f1b", 2),
    Way("linen_translator", 3, 2, "eager-1f1b"), Way("nnx_resnet", 2, 8, "interleaved-1f1b", 2),
    Way("nnx_gpt_dropout", 3, 2, "1f1b"),
]  # fmt: skip


AS_USERS_COMPILE = [pytest.mark.slow, pytest.mark.optimised]
MARKED = [
    *FAST,
    *(pytest.param(way, marks=AS_USERS_COMPILE) for way in SLOW),
    *(pytest.param(way, marks=[*AS_USERS_COMPILE, pytest.mark.thorough]) for way in THOROUGH),
]


@pytest.mark.parametrize("way", MARKED, ids=str)
def test_a_pipeline_computes_the_step(way: Way) -> None:
    case = gallery.get("zoo", way.name)
    step, args = case.make()
    driven = drive(
        step, args, devices=way.devices, microbatches=way.microbatches, schedule=way.schedule, virtual=way.virtual
    )
    assert len(driven.stages) == way.stages * way.virtual
    pipeline_driver.compare_steps(driven.executable(), step, args, case.style)


# -- what stages share, lack, and exchange -----------------------------------------------------------------------------

SIZE, ROWS = 16, 24


def toy(loss_fn: Callable[..., Any], params: Any, *, extra: Callable[..., Any] | None = None) -> tuple[Any, Any]:
    """A step of the zoo's form on (ROWS, SIZE) numbers, and its arguments. `extra`: more metrics, of the new state."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        new, metrics = descent(loss_fn)(state, batch)
        return new, metrics | (extra(new) if extra is not None else {})

    return step, ({"params": params}, rows(ROWS, SIZE))


def weights(count: int) -> list[jax.Array]:
    return [normal(10 + i, SIZE, SIZE) / SIZE**0.5 for i in range(count)]


EVERY = [
    Way("chain", stages, microbatches, schedule, 2 if schedule == "interleaved-1f1b" else 1)
    for stages in (2, 3, 4)
    for microbatches in (1, 3, 8)
    for schedule in schedules.NAMES
    if schedule != "interleaved-1f1b" or microbatches % stages == 0
]


@functools.cache
def layers_in_a_chain() -> tuple[Any, Any]:
    return toy(distance, weights(8))


@functools.cache
def planned_chain(stages: int, microbatches: int, virtual: int, splits_backward: bool) -> pipeline_driver.Driven:
    """Its stages, which differ between schedules only where the backward pass is split."""
    step, args = layers_in_a_chain()
    schedule = "zb-h1" if splits_backward else "interleaved-1f1b" if virtual > 1 else "gpipe"
    devices = pipeline_driver.DEVICES[stages]
    return drive(step, args, devices=devices, microbatches=microbatches, schedule=schedule, virtual=virtual)


@functools.cache
def chain_on_one_device() -> list[Any]:
    return pipeline_driver.on_one_device(*layers_in_a_chain(), "functional")


@pytest.mark.slow
@pytest.mark.parametrize("way", one_in(2, EVERY), ids=str)
def test_every_schedule_with_every_number_of_stages_and_micro_batches(way: Way) -> None:
    """The product in full, on the smallest model that has this many stages."""
    _, args = layers_in_a_chain()
    planned = planned_chain(way.stages, way.microbatches, way.virtual, way.schedule == "zb-h1")
    driven = pipeline_driver.rescheduled(planned, way.schedule)
    assert len(driven.stages) == way.stages * way.virtual
    assert driven.pipeline.program.num_microbatches == way.microbatches
    got = pipeline_driver.consecutive(driven.executable(), args, "functional")
    for a, b in zip(got, chain_on_one_device(), strict=True):
        comparing.compare(a, b)


def one_leaf_on_every_stage() -> tuple[Any, Any]:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params["own"]:
            x = jnp.tanh(x @ w @ params["shared"] + params["bias"])
        return ((x - batch["y"]) ** 2).mean()

    return toy(loss_fn, {"own": weights(4), "shared": normal(3, SIZE, SIZE) / 4, "bias": normal(4, SIZE) / 4})


def stages_without_parameters() -> tuple[Any, Any]:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ params["first"]
        for _ in range(8):
            x = (jnp.sin(x * 1.5) + x) / 2.5  # a slope of at most one: rounding errors do not grow
        return ((x @ params["last"] - batch["y"]) ** 2).mean()

    return toy(loss_fn, {"first": normal(3, SIZE, 64) / 4, "last": normal(4, 64, SIZE) / 8})


def values_that_every_stage_reads() -> tuple[Any, Any]:
    """A mask of the batch, an activation of the first stage, a scalar parameter."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        mask = batch["x"][:, :1] > 0
        first = batch["x"] @ params["first"]
        x = first
        for w in params["own"]:
            x = jnp.where(mask, jnp.tanh(x @ w) * params["scale"], first)
        return ((x - batch["y"]) ** 2).mean()

    return toy(loss_fn, {"first": weights(1)[0], "own": weights(4), "scale": jnp.float32(1.5)})


def constants() -> tuple[Any, Any]:
    """A closed-over array that every stage reads; metrics that are literals or do not depend on the batch."""
    fixed = np.random.default_rng(5).standard_normal((SIZE, SIZE)).astype(np.float32) / 4

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w @ fixed)
        return ((x - batch["y"]) ** 2).mean()

    return toy(
        loss_fn, weights(4), extra=lambda new: {"one": 1.0, "fixed": jnp.asarray(fixed), "first": new["params"][0]}
    )


def no_update() -> tuple[Any, Any]:
    """Forward alone: the state comes back as it is, the predictions row by row; there is nothing to do afterwards."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        return state, {"grads": (), "predicted": layers(state["params"], batch["x"])}

    return step, ({"params": weights(4)}, {"x": normal(1, ROWS, SIZE)})


def leaves_that_nobody_reads() -> tuple[Any, Any]:
    """A parameter without a gradient, a counter, and a state that comes back twice."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(lambda p: distance(p["own"], batch))(state["params"])
        new = {"params": updated(state["params"], grads), "count": state["count"] + 1, "idle": state["idle"]}
        return new, {"loss": loss, "grads": grads, "again": new["params"]["own"][0], "count": new["count"]}

    params = {"own": weights(4), "unused": normal(9, SIZE)}
    state = {"params": params, "count": jnp.int32(0), "idle": normal(8, SIZE)}
    return step, (state, rows(ROWS, SIZE))


def norms_of_all_stages() -> tuple[Any, Any]:
    """Adam behind clipping: the update exchanges values between stages, and its state stays where its parameter is."""
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.scale_by_adam(eps=1e-3), optax.scale(-0.01))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        loss, grads = jax.value_and_grad(distance)(state["params"], batch)
        changes, optimizer = tx.update(grads, state["optimizer"], state["params"])
        new = {"params": optax.apply_updates(state["params"], changes), "optimizer": optimizer}
        return new, {"loss": loss, "grads": grads, "norm": optax.tree.norm(grads)}

    params = weights(6)
    return step, ({"params": params, "optimizer": tx.init(params)}, rows(ROWS, SIZE))


def labels_and_masked_tokens() -> tuple[Any, Any]:
    """A mean over tokens whose number depends on the data; integers that the first and the last stage read."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = layers(params["own"], params["embed"][batch["tokens"]])
        wanted = batch["tokens"] > 3
        logits = x @ params["embed"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"])
        return (losses * wanted).sum() / wanted.sum()

    step, (state, _) = toy(loss_fn, {"own": weights(4), "embed": normal(7, 12, SIZE)})
    return step, (state, {"tokens": tokens(3, 12, ROWS, 6)})


EDGES = [
    (one_leaf_on_every_stage, 2, 1, "zb-h1", 1),
    (stages_without_parameters, 4, 2, "zb-h1", 1),
    (values_that_every_stage_reads, 4, 2, "eager-1f1b", 1),
    (constants, 4, 3, "gpipe", 1),
    (no_update, 3, 4, "1f1b", 1),
    (leaves_that_nobody_reads, 2, 6, "1f1b", 1),
    (labels_and_masked_tokens, 3, 8, "eager-1f1b", 1),
]
SLOW_EDGES = [(one_leaf_on_every_stage, 4, 4, "1f1b", 1), (norms_of_all_stages, 3, 3, "interleaved-1f1b", 2)]


@pytest.mark.parametrize(
    ("make", "stages", "microbatches", "schedule", "virtual"),
    [*EDGES, *(slow(*edge) for edge in SLOW_EDGES)],
    ids=["-".join([make.__name__, *map(str, rest)]) for make, *rest in (*EDGES, *SLOW_EDGES)],
)
def test_what_stages_share(
    make: Callable[[], Any], stages: int, microbatches: int, schedule: str, virtual: int
) -> None:
    step, args = make()
    driven = drive(step, args, devices=(2,) * stages, microbatches=microbatches, schedule=schedule, virtual=virtual)
    pipeline_driver.compare_steps(driven.executable(), step, args)


PUBLIC: list[tuple[str, dict[str, Any], int]] = [
    ("nnx_mlp", {"num_stages": 2, "submesh_shapes": (4, 4)}, 2),
    ("nnx_user_gpt", {"submesh_shapes": (4, (2, 2)), "schedule": "zb-h1"}, 4),
]


@pytest.mark.parametrize(
    ("name", "options", "microbatches"),
    [PUBLIC[0], *(slow(*case) for case in PUBLIC[1:])],
    ids=[name for name, *_ in PUBLIC],
)
def test_through_the_public_interface(name: str, options: dict[str, Any], microbatches: int) -> None:
    case = gallery.get("zoo", name)
    step, args = case.make()
    method = alpa_lite.Pipeline(**options)
    parallel = alpa_lite.parallelize(step, method=method, num_microbatches=microbatches)
    plan = parallel.plan(*args)
    assert (plan.num_stages, plan.num_microbatches) == (options.get("num_stages", 2), microbatches)
    pipeline_driver.compare_steps(parallel, step, args, case.style)
