"""Stages and their segments: every operation once, nothing made for nobody, and communication that is paid for."""

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.errors import PlanError
from alpa_lite.ir.layout import reshard_steps
from alpa_lite.passes.checks.hlo_text import read_hlo
from alpa_lite.passes.ir.loops import scan_op
from alpa_lite.passes.lowering.program import GlobalOp, Loop, Reshard
from alpa_lite.passes.stages import cutting
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.passes.stages.segments import Segments, Wire
from alpa_lite.passes.stages.sums import split_sums
from tests import pipeline_driver
from tests.marks import slow
from tests.passes.layers.division_cases import driven, staged
from tests.pipeline_driver import drive
from tests.test_token_pipelines import language_model


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
        saved = {r for s in stage.items for w, some in s.outputs.items() if w.kind == "saved" for r in some}
        assert "gt" not in {makers.get(stage.value_of[r]) for r in saved if isinstance(r, int)}
        backward = stage.find("backward")
        assert backward is not None
        assert "gt" in {item.op.name for item in backward.instructions if not isinstance(item, Reshard)}


def test_values_are_made_again_right_before_they_are_read() -> None:
    """A gathered weight that waited from the start of a pass would be in memory with those of all other layers."""
    places = []
    for stage in stages_of("plain", "1f1b"):
        forward, backward = stage.find("forward"), stage.find("backward")
        assert forward is not None and backward is not None
        items, before = backward.instructions, set(map(id, forward.instructions))
        for place, item in enumerate(items):
            if id(item) in before:
                reader = min(n for n, other in enumerate(items) if not set(item.results).isdisjoint(other.reads))
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
    program = replace(stage.program, body=replace(body, instructions=(GlobalOp(op, (), ()), *body.instructions)))
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


@pytest.mark.parametrize(("kind", "stages"), [("plain", 2), ("tied", 2), ("tied", 4), ("norm", 4)])
def test_operations_and_what_crosses_have_one_stage(kind: str, stages: int) -> None:
    cut = staged(kind, stages)
    traced, assignment = split_sums(cut.accumulated.traced, cut.accumulated.scan, cut.assignment)
    assert bool(cut.assignment.split_sums) == (kind == "tied") and assignment.split_sums == ()
    bodies = [scan_op(one.traced, one.scan).bodies[0].ops for one in cut.graphs]
    made = Counter(v for ops in bodies for op in ops for v in op.results)
    for op in scan_op(traced, cut.accumulated.scan).bodies[0].ops:
        assert op.index in assignment.shared_ops or all(made[value] == 1 for value in op.results), op.name
    updates = [op for one in cut.graphs for op in one.traced.graph.block.ops if op.index > one.scan]
    assert set(Counter(v for op in updates for v in op.results).values()) <= {1}
    for name in ("crossing", "late"):
        given = Counter(p.number for one in cut.graphs for p in one.outputs if p.kind == name)
        taken = {p.number for one in cut.graphs for p in one.inputs if p.kind == name}
        assert set(given.values()) <= {1} and taken == set(given)
    rounds = {number for one in cut.graphs for number in one.rounds.values()}
    assert (max(rounds) > 0) == (kind != "plain")  # the update exchanges values


@pytest.mark.parametrize(("kind", "stages"), [("plain", 4), ("tied", 2), ("norm", 2)])
def test_results_come_from_one_stage_and_state_stays_where_it_is_updated(kind: str, stages: int) -> None:
    cut = staged(kind, stages)
    state = {argument for _, argument in cut.traced.state}
    arguments = [{p.number for p in one.inputs if p.kind == "argument"} for one in cut.graphs]
    outputs = [{p.number for p in one.outputs if p.kind == "argument"} for one in cut.graphs]
    assert sorted(number for some in outputs for number in some) == list(range(len(cut.traced.outputs)))
    for own, results in zip(arguments, outputs, strict=True):
        assert {a for o, a in cut.traced.state if o in results} == own & state
    copies = {p.number for one in cut.graphs for p in one.inputs if p.kind == "copy"}
    assert copies <= state and bool(copies) == (kind == "tied")


MICROBATCHES = 2
LOOP = ("forward", "backward", "weight")


def language_pipeline(tokens: tuple[int, ...], schedule: str = "1f1b") -> pipeline_driver.Driven:
    """A pipeline with memory so expensive that its stages hold parameters sharded."""
    step, args = language_model()
    return pipeline_driver.drive(
        step, args, devices=(4, 4), microbatches=MICROBATCHES, schedule=schedule, tokens=tokens, price=16.0
    )


def gathers_paid(stage: PlannedStage) -> int:
    """The gathers within the loop for which the integer program pays, of one micro-batch."""
    space, choice = stage.mesh_solution.space, stage.mesh_solution.solution.choice
    count = 0
    for move, transfer in zip(space.moves, space.program.transfers, strict=True):
        if move.trips == MICROBATCHES:
            made = move.produced_layouts[transfer.src_class[choice[transfer.src]]]
            for wanted in {int(klass[choice[node]]) for node, klass in transfer.consumers}:
                steps = reshard_steps(made, move.wanted_layouts[wanted]) or ()
                count += move.count * sum(step.kind == "all_gather" for step in steps)
    return count


def gathers_planned(stage: PlannedStage) -> list[int]:
    """The gathers of one run of each segment of the loop."""
    return [
        sum(found.count for found, _ in stage.prices.collectives(s.instructions) if found.kind == "all_gather")
        for s in stage.segments.items
        if s.kind in LOOP
    ]


@pytest.mark.parametrize(
    ("tokens", "schedule"),
    [((), "1f1b"), ((), "zb-h1"), ((5, 4, 3), "1f1b"), slow((3, 3, 3, 3), "1f1b")],
)
def test_the_program_pays_for_what_every_segment_communicates(tokens: tuple[int, ...], schedule: str) -> None:
    several = 0
    for stage in language_pipeline(tokens, schedule).stages:
        found, every = stage.mesh_solution, gathers_planned(stage)
        paid = found.solution.objective - found.compute_seconds
        seconds = sum(stage.communication_seconds[s] * stage.runs(s) for s in stage.segments.items)
        assert seconds == pytest.approx(paid, rel=1e-9)
        assert sum(every) == gathers_paid(stage)
        several += sum(map(bool, every)) > 1
    assert several


@pytest.mark.slow
def test_compiled_slices_gather_as_often_as_the_program_pays_for() -> None:
    run = language_pipeline((6, 6))
    program, made = run.pipeline.program, run.executable().compiled_executables()
    paid = [gathers_paid(stage) for stage in run.stages]
    found = [0] * len(paid)
    for executable, one in zip(program.executables, made, strict=True):
        if executable.kind in LOOP:
            gathers = read_hlo(one.as_text(), program.submeshes[executable.mesh].mesh).collectives
            found[executable.stage] += sum(c.count for c in gathers if c.kind == "all_gather")
    assert found == paid
    assert sum(paid) > 2
