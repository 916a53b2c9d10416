"""Segments: nothing is made for nobody, cheap values are made again, and weights have segments where schedules do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.errors import PlanError
from alpa_lite.passes.lowering.program import Loop, Outside, Reshard, reads, writes
from alpa_lite.passes.stages import cutting
from alpa_lite.passes.stages.segments import Segments, Wire
from tests.passes.layers.division_cases import driven
from tests.pipeline_driver import drive


def stages_of(kind: str, schedule: str) -> list[Segments]:
    return [stage.segments for stage in driven(kind, 2, schedule, devices=2).stages]


@pytest.mark.parametrize(("kind", "schedule"), [("plain", "1f1b"), ("norm", "1f1b"), ("plain", "zb-h1")])
def test_what_is_made_is_read_and_weights_are_apart_where_they_should_be(kind: str, schedule: str) -> None:
    for stage in stages_of(kind, schedule):
        read = {wire for segment in stage.items for wire in segment.inputs}
        read |= {Wire("top", wire.number) for wire in read if wire.kind == "slice"}
        read |= {Wire("top", operand) for operand in stage.finals if isinstance(operand, int)}
        made = {wire for segment in stage.items for wire in segment.outputs if wire.kind in ("saved", "carry", "top")}
        assert made <= read
        for split in (True, False):
            again = cutting.cut(stage.stage, stage.program, split_weights=split)
            sums = {s.kind for s in again.items for w in s.outputs if w.kind == "carry"}
            assert ("weight" in sums) == ("weight" in {s.kind for s in again.items}) == split
            assert ("backward" in sums) != split


def test_a_mask_is_made_again_and_not_saved() -> None:
    """Comparing the batch with zero costs less than holding the result; a product's result is held."""
    for stage in stages_of("plain", "1f1b"):
        makers = {v: op.name for op in stage.stage.traced.graph.ops() for v in op.results}
        saved = {w.number for s in stage.items for w in s.outputs if w.kind == "saved"}
        assert "gt" not in {makers.get(stage.value_of[register]) for register in saved}
        backward = stage.of("backward")
        assert backward is not None
        assert "gt" in {item.op.name for item in backward.instructions if not isinstance(item, Reshard)}


def test_values_are_made_again_right_before_they_are_read() -> None:
    """A gathered weight that waited from the start of a pass would be in memory with those of all other layers."""
    places = []
    for stage in stages_of("plain", "1f1b"):
        forward, backward = stage.of("forward"), stage.of("backward")
        assert forward is not None and backward is not None
        items, before = backward.instructions, set(map(id, forward.instructions))
        for place, item in enumerate(items):
            if id(item) in before:
                reader = min(n for n, other in enumerate(items) if not set(writes(item)).isdisjoint(reads(other)))
                assert before.issuperset(map(id, items[place:reader]))
                places.append(place)
    assert max(places) > 0


def test_laying_out_a_stack_of_crossings_is_no_update() -> None:
    """A result that crosses leaves its micro-batch in the loop; what lowering does with the whole stack is dropped."""
    stage = stages_of("plain", "1f1b")[0]
    body, registers = stage.program.body, stage.program.registers
    place = next(i for i, port in enumerate(stage.stage.outputs) if port.kind == "crossing")
    (loop,) = [i for i in body.instructions if isinstance(i, Loop) and i.op.index == stage.stage.scan]
    source = body.outputs[place]
    assert isinstance(source, int) and source in loop.results
    laid = Reshard(stage.value_of[source], (), source, len(registers), False, None)  # type: ignore[arg-type]
    outputs = tuple(len(registers) if i == place else operand for i, operand in enumerate(body.outputs))
    body = replace(body, instructions=(*body.instructions, laid), outputs=outputs)
    program = replace(stage.program, registers=(*registers, registers[source]), body=body)
    cut = cutting.cut(stage.stage, program, split_weights=False)
    assert not [w for s in cut.items for w in s.inputs if w.kind == "pieces"]
    assert [s.kind for s in cut.items] == [s.kind for s in stage.items]


def test_an_operation_outside_regions_is_refused() -> None:
    stage = stages_of("plain", "1f1b")[0]
    op, body = stage.stage.traced.graph.block.ops[0], stage.program.body
    program = replace(stage.program, body=replace(body, instructions=(Outside(op, (), ()), *body.instructions)))
    with pytest.raises(PlanError, match=f"{op.name} cannot run inside a pipeline stage"):
        cutting.cut(stage.stage, program, split_weights=False)


def test_a_stage_without_a_backward_pass_has_slices_of_its_forward_pass() -> None:
    """What a checkpoint computes again is on the stage where the checkpoint begins; the next one goes forward alone."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = [0.3 * jax.random.normal(key, (8, 8)) for key in keys]
    layer = jax.checkpoint(lambda x, a, b: jnp.tanh(jnp.tanh(x @ a) @ b))

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (layer(jnp.tanh(x @ params[0]), params[1], params[2]) @ params[3]).mean()

    def step(params: Any, x: jax.Array) -> Any:
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    stages = drive(
        step, (params, jnp.ones((2, 8, 8))), devices=(1, 1), microbatches=2, schedule="interleaved-1f1b", virtual=2,
        tokens=(2, 2, 2, 2),
    ).stages  # fmt: skip
    (alone,) = [stage.segments.items for stage in stages if all(s.kind != "backward" for s in stage.segments.items)]
    assert [segment.round for segment in alone if segment.kind == "forward"] == [0, 1, 2, 3]
