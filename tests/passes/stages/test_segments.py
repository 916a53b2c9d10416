"""Segments: every wire that is read was made, nothing is made for nobody, and cheap values are made again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.errors import PlanError
from alpa_lite.ir.graph import Op
from alpa_lite.passes.lowering.program import Loop, Outside, Reshard
from alpa_lite.passes.stages import cutting
from alpa_lite.passes.stages.segments import Segments, Wire
from tests.passes.layers.division_cases import driven
from tests.pipeline_driver import drive

CASES = [("plain", "1f1b"), ("tied", "gpipe"), ("norm", "1f1b"), ("plain", "zb-h1"), ("tied", "zb-h1")]
each = pytest.mark.parametrize(("kind", "schedule"), CASES)


def stages_of(kind: str, schedule: str) -> list[Segments]:
    return [stage.segments for stage in driven(kind, 2, schedule, devices=2).stages]


def first_op(stage: Segments) -> Op:
    return stage.stage.traced.graph.block.ops[0]


@each
def test_every_wire_that_is_read_was_made(kind: str, schedule: str) -> None:
    for stage in stages_of(kind, schedule):
        ports = zip(stage.stage.inputs, stage.program.body.inputs, strict=False)
        made = {Wire("number", 0), *(Wire("top", register) for _, register in ports)}
        made |= {Wire("top", register) for register in stage.program.body.inputs}
        made |= {Wire("crossing", port.number) for port in stage.stage.inputs if port.kind == "crossing"}
        for segment in stage.items:
            for wire in segment.inputs:
                source = Wire("top", wire.number) if wire.kind == "slice" else wire
                source = Wire("piece", wire.number) if wire.kind == "pieces" else source
                assert source in made, (segment.kind, wire)
            assert len(segment.binds) == len(segment.inputs)
            assert len(segment.reads) == len(segment.outputs)
            made |= set(segment.outputs)
        for port, operand in zip(stage.stage.outputs, stage.finals, strict=True):
            if port.kind == "crossing":
                assert Wire("crossing", port.number) in made
            elif isinstance(operand, int):
                assert Wire("top", operand) in made


@each
def test_nothing_is_made_for_nobody(kind: str, schedule: str) -> None:
    for stage in stages_of(kind, schedule):
        read = {wire for segment in stage.items for wire in segment.inputs}
        read |= {Wire("top", wire.number) for wire in read if wire.kind == "slice"}
        read |= {Wire("top", operand) for operand in stage.finals if isinstance(operand, int)}
        for segment in stage.items:
            for wire in segment.outputs:
                if wire.kind in ("saved", "carry", "top"):
                    assert wire in read, (segment.kind, wire)


@each
def test_weights_are_apart_where_they_should_be(kind: str, schedule: str) -> None:
    for stage in stages_of(kind, schedule):
        kinds = [segment.kind for segment in stage.items]
        assert ("weight" in kinds) == (schedule == "zb-h1")
        sums = [s.kind for s in stage.items for w in s.outputs if w.kind == "carry" and s.kind != "prologue"]
        assert sums.count("backward") <= (0 if schedule == "zb-h1" else len(sums))
        again = cutting.cut(stage.stage, stage.program, split_weights=schedule != "zb-h1")
        assert ("weight" in [s.kind for s in again.items]) == (schedule != "zb-h1")


def test_a_mask_is_made_again_and_not_saved() -> None:
    """Comparing the batch with zero costs less than holding the result; a product's result is held."""
    for stage in stages_of("plain", "1f1b"):
        makers = {v: op.name for op in stage.stage.traced.graph.ops() for v in op.results}
        saved = {w.number for s in stage.items for w in s.outputs if w.kind == "saved"}
        names = {makers.get(stage.value_of[register]) for register in saved}
        assert "gt" not in names
        backward = stage.of("backward")
        assert backward is not None
        assert "gt" in {item.op.name for item in backward.instructions if not isinstance(item, Reshard)}


def test_laying_out_a_stack_of_crossings_is_no_update() -> None:
    """A result that crosses leaves its micro-batch in the loop; what lowering does with the whole stack is dropped."""
    stage = stages_of("plain", "1f1b")[0]
    place = next(i for i, port in enumerate(stage.stage.outputs) if port.kind == "crossing")
    (loop,) = [i for i in stage.program.body.instructions if isinstance(i, Loop) and i.op.index == stage.stage.scan]
    source = stage.program.body.outputs[place]
    assert source in loop.results
    new = len(stage.program.registers)
    laid = Reshard(stage.value_of[source], (), source, new, False, None)  # type: ignore[index, arg-type]
    body = stage.program.body
    outputs = tuple(new if i == place else operand for i, operand in enumerate(body.outputs))
    registers = (*stage.program.registers, stage.program.registers[source])  # type: ignore[index]
    program = replace(
        stage.program, registers=registers, body=replace(body, instructions=(*body.instructions, laid), outputs=outputs)
    )
    cut = cutting.cut(stage.stage, program, split_weights=False)
    assert not [w for s in cut.items for w in s.inputs if w.kind == "pieces"]
    assert [s.kind for s in cut.items] == [s.kind for s in stage.items]


def test_an_operation_outside_regions_is_refused() -> None:
    stage = stages_of("plain", "1f1b")[0]
    body = stage.program.body
    outside = Outside(first_op(stage), (), ())
    program = replace(stage.program, body=replace(body, instructions=(outside, *body.instructions)))
    with pytest.raises(PlanError, match=f"{first_op(stage).name} cannot run inside a pipeline stage"):
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
