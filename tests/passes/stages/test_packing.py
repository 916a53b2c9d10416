"""Packing: small values share a buffer, large ones and those of other readers do not; the step computes the same."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.ir import schedules
from alpa_lite.ir.program import peak_bytes
from alpa_lite.passes.stages import cutting, packing
from alpa_lite.passes.stages.segments import Segments
from gallery.batches import normal
from gallery.steps import descent, updated
from tests import comparing, pipeline_driver
from tests.marks import slow

LAYERS, WIDTH, ROWS = 10, 64, 16  # layers of two stages: the fewest whose backward pass has packs, be it split or not
SMALL = WIDTH * 4  # bytes of a bias


@descent
def step(params: Any, batch: Any) -> jax.Array:
    """Layers of a weight (large), a scale and a bias (small)."""
    x = batch["x"]
    for layer in params:
        y = jnp.tanh(x @ layer["weight"] + layer["bias"])
        x = x + (y - y.mean(-1, keepdims=True)) * layer["scale"]
    return ((x - batch["y"]) ** 2).mean()


def _virtual(schedule: str) -> int:
    return 2 if schedule == "interleaved-1f1b" else 1


def arguments(schedule: str = "1f1b") -> tuple[Any, Any]:
    params = [
        {"weight": normal(i, WIDTH, WIDTH) / 8, "bias": normal(20 + i, WIDTH), "scale": normal(40 + i, 1, WIDTH)}
        for i in range(LAYERS * _virtual(schedule))
    ]
    return {"params": params}, {"x": normal(1, ROWS, WIDTH), "y": normal(2, ROWS, WIDTH)}


@functools.cache
def driven(schedule: str) -> pipeline_driver.Driven:
    return pipeline_driver.drive(
        step, arguments(schedule), devices=(2, 2), microbatches=4, schedule=schedule, virtual=_virtual(schedule)
    )  # fmt: skip


def unpacked(stage: Segments) -> Segments:
    return cutting.cut(stage.stage, stage.program, split_weights=stage.find("weight") is not None)


SLOW = ("gpipe", "eager-1f1b", "interleaved-1f1b", "zb-h1")


@pytest.mark.parametrize("schedule", [slow(name) if name in SLOW else name for name in schedules.NAMES])
def test_the_step_computes_the_same_with_fewer_arguments_in_the_bytes_of_the_plan(schedule: str) -> None:
    found = driven(schedule)
    for stage in found.stages:
        packs, without = stage.segments.packs.values(), unpacked(stage.segments)
        assert packs and max(max(pack.sizes) * pack.dtype.itemsize for pack in packs) <= ROWS * SMALL
        for kind in ("forward", "backward"):
            segment, before = stage.segments.find(kind), without.find(kind)
            assert segment is not None and before is not None
            assert len(segment.inputs) <= len(before.inputs) - packing.FEWEST + 1
    executable = found.executable()
    pipeline_driver.compare_steps(executable, step, arguments(schedule))
    if schedule in ("1f1b", "zb-h1"):
        measured = pipeline_driver.measure_peak(executable, *arguments())
        assert measured == pytest.approx(peak_bytes(found.pipeline.program), rel=0.05)


@pytest.mark.parametrize(("most", "kinds"), [(0, set()), (SMALL // 2 - 1, set()), (1e9, {"carry", "saved", "top"})])
def test_nothing_larger_than_the_limit_is_packed(most: float, kinds: set[str]) -> None:
    """The smallest blocks are halves of a bias."""
    for stage in driven("1f1b").stages:
        packs = packing.pack_segments(unpacked(stage.segments), most).packs
        assert {wire.kind for wire in packs} == kinds
        sums = [pack for wire, pack in packs.items() if wire.kind == "carry"]
        assert sum(len(pack.members) for pack in sums) == (3 * LAYERS // 2 if kinds else 0)


@pytest.mark.slow
def test_random_keys_and_other_dtypes_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dtypes and keys: packs of each dtype, and the keys alone. Bits are those of the step without packs."""

    def mixed(state: Any, batch: Any) -> tuple[Any, Any]:
        def loss_fn(params: Any) -> jax.Array:
            x = batch["x"]
            for low, high, key in zip(params["low"], params["high"], state["keys"], strict=True):
                noise = jax.random.uniform(key, (WIDTH,))
                x = (x.astype(jnp.bfloat16) * low).astype(jnp.float32)
                x = jnp.tanh((x + high) @ params["w"]) + noise
            return ((x - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        return {**state, "params": updated(state["params"], grads)}, {"loss": loss, "grads": grads}

    params = {
        "low": [normal(i, 1, WIDTH).astype(jnp.bfloat16) for i in range(8)],
        "high": [normal(20 + i, WIDTH) for i in range(8)],
        "w": normal(5, WIDTH, WIDTH) / 8,
    }
    keys = [jax.random.key(i) for i in range(8)]
    args = {"params": params, "keys": keys}, arguments()[1]
    found = pipeline_driver.drive(mixed, args, devices=(1, 1), microbatches=2)
    tops = [pack for stage in found.stages for wire, pack in stage.segments.packs.items() if wire.kind == "top"]
    assert {p.dtype.name for p in tops} >= {"bfloat16", "float32"}
    assert not any(jnp.issubdtype(p.dtype, jax.dtypes.prng_key) for p in tops)
    monkeypatch.setattr(packing, "FEWEST", 1000)
    alone = pipeline_driver.drive(mixed, args, devices=(1, 1), microbatches=2)
    assert not any(stage.segments.packs for stage in alone.stages)
    got, want = (jax.tree.leaves(one.executable()(*jax.tree.map(jnp.copy, args))) for one in (found, alone))
    comparing.assert_equal(got, want)
