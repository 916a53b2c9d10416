"""Packing: small values share a buffer, large ones and those of other readers do not; the step computes the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.ir import schedules
from alpa_lite.ir.program import Run, peak_bytes
from alpa_lite.passes.stages import cutting, packing, segments
from alpa_lite.passes.stages.segments import Segments
from alpa_lite.runtime.pipeline import PipelineExecutable
from tests import pipeline_driver
from tests.zoo_base import normal, updated

LAYERS, WIDTH, ROWS = 10, 64, 16  # layers of two stages: the fewest whose backward pass has packs, be it split or not
SMALL = WIDTH * 4  # bytes of a bias


def step(state: Any, batch: Any) -> tuple[Any, Any]:
    """Layers of a weight (large), a scale and a bias (small)."""

    def loss_fn(params: Any) -> jax.Array:
        x = batch["x"]
        for layer in params:
            y = jnp.tanh(x @ layer["weight"] + layer["bias"])
            x = x + (y - y.mean(-1, keepdims=True)) * layer["scale"]
        return ((x - batch["y"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    return {"params": updated(state["params"], grads)}, {"loss": loss, "grads": grads}


def arguments(schedule: str = "1f1b") -> tuple[Any, Any]:
    params = [
        {"weight": normal(i, WIDTH, WIDTH) / 8, "bias": normal(20 + i, WIDTH), "scale": normal(40 + i, 1, WIDTH)}
        for i in range(LAYERS * _virtual(schedule))
    ]
    return {"params": params}, {"x": normal(1, ROWS, WIDTH), "y": normal(2, ROWS, WIDTH)}


def _virtual(schedule: str) -> int:
    return 2 if schedule == "interleaved-1f1b" else 1


@functools.cache
def driven(schedule: str, devices: tuple[int, ...] = (2, 2)) -> pipeline_driver.Driven:
    return pipeline_driver.drive(
        step, arguments(schedule), devices=devices, microbatches=4, schedule=schedule, virtual=_virtual(schedule)
    )  # fmt: skip


@functools.cache
def executable(schedule: str) -> PipelineExecutable:
    return driven(schedule).executable()


def unpacked(stage: Segments) -> Segments:
    return cutting.cut(stage.stage, stage.program, split_weights=stage.of("weight") is not None)


def types_of(stage: Segments) -> dict[segments.Wire, Any]:
    return {
        wire: stage.type_of(segment, i, output=output)
        for segment in stage.items
        for output, wires in ((False, segment.inputs), (True, segment.outputs))
        for i, wire in enumerate(wires)
    }


SLOW = ("gpipe", "eager-1f1b", "interleaved-1f1b", "zb-h1")


@pytest.mark.parametrize(
    "schedule", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in schedules.NAMES]
)
def test_the_step_computes_the_same_with_fewer_arguments(schedule: str) -> None:
    found = driven(schedule)
    program = found.pipeline.program
    for stage in found.stages:
        assert stage.segments.packs
        without = unpacked(stage.segments)
        for kind in ("forward", "backward"):
            segment, before = stage.segments.of(kind), without.of(kind)
            assert segment is not None and before is not None
            few = packing.slots(stage.segments, segment)
            assert len(few) <= len(packing.slots(without, before)) - packing.FEWEST + 1
    runs = [item for items in program.lists for item in items if isinstance(item, Run)]
    assert {len(program.executables[r.executable].donated) > 0 for r in runs if r.microbatch >= 0} == {True, False}
    pipeline_driver.compare_steps(executable(schedule), step, arguments(schedule))


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.slow)])
def test_peak_bytes_of_live_arrays_are_the_plans(schedule: str) -> None:
    found = driven(schedule)
    measured = executable(schedule).measure_peak(*arguments())
    assert measured == pytest.approx(peak_bytes(found.pipeline.program), rel=0.05)


def test_members_are_small_of_one_dtype_and_made_and_read_together() -> None:
    for stage in driven("zb-h1").stages:
        parts = stage.segments
        types = types_of(parts)
        for pack in parts.packs:
            assert len(pack.members) >= packing.FEWEST
            made, read = set(), set()
            for wire, size in zip(pack.members, pack.sizes, strict=True):
                assert types[wire][1] == pack.dtype
                assert wire.kind == pack.wire.kind
                assert stage.wire_bytes(*_place(parts, wire)) == size * pack.dtype.itemsize <= packing.limit(3.2e9)
                made.add(tuple(n for n, s in enumerate(parts.items) if wire in s.outputs))
                read.add(tuple(n for n, s in enumerate(parts.items) if wire in s.inputs and s.kind in pack.readers))
            assert len(made) == len(read) == 1


def _place(parts: Segments, wire: segments.Wire) -> tuple[segments.Segment, int]:
    return next((s, s.inputs.index(wire)) for s in parts.items if wire in s.inputs)


def test_the_update_reads_and_replaces_the_arguments_themselves() -> None:
    for stage in driven("1f1b").stages:
        given = {w for pack in stage.segments.packs for w in pack.members if w.number in stage.program.body.inputs}
        given = {w for w in given if w.kind == "top"}
        assert len(given) >= 4
        update = stage.segments.of("update")
        assert update is not None
        assert given <= {slot.wire for slot in packing.slots(stage.segments, update)}


@pytest.mark.parametrize(("most", "kinds"), [(0, set()), (SMALL - 1, set()), (1e9, {"carry", "saved", "top"})])
def test_nothing_larger_than_the_limit_is_packed(most: float, kinds: set[str]) -> None:
    """On submeshes of one device nothing is sharded, so that no block is smaller than a bias."""
    for stage in driven("1f1b", (1, 1)).stages:
        packs = packing.packed(unpacked(stage.segments), most).packs
        assert {pack.wire.kind for pack in packs} == kinds
        if most == 1e9:
            sums = [pack for pack in packs if pack.wire.kind == "carry"]
            assert sum(len(pack.members) for pack in sums) == 3 * LAYERS // 2


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
    tops = [p for stage in found.stages for p in stage.segments.packs if p.wire.kind == "top"]
    assert {p.dtype.name for p in tops} >= {"bfloat16", "float32"}
    assert not any(jnp.issubdtype(p.dtype, jax.dtypes.prng_key) for p in tops)
    monkeypatch.setattr(packing, "FEWEST", 1000)
    alone = pipeline_driver.drive(mixed, args, devices=(1, 1), microbatches=2)
    assert not any(stage.segments.packs for stage in alone.stages)
    got, want = (jax.tree.leaves(one.executable()(*jax.tree.map(jnp.copy, args))) for one in (found, alone))
    for a, b in zip(got, want, strict=True):
        a, b = (jax.random.key_data(x) if "key" in str(x.dtype) else x for x in (a, b))
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
