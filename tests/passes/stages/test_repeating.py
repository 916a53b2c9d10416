"""What each segment of a stage gathers for itself, the integer program pays for, and the compiled segments contain."""

from __future__ import annotations

import pytest

from alpa_lite.ir.layout import reshard_steps
from alpa_lite.passes.checks.hlo_text import parse_hlo
from alpa_lite.passes.stages.planning import PlannedStage
from tests import pipeline_driver
from tests.test_token_pipelines import language_model

MICROBATCHES = 2
LOOP = ("forward", "backward", "weight")


def driven(tokens: tuple[int, ...], schedule: str = "1f1b") -> pipeline_driver.Driven:
    """A pipeline with memory so expensive that its stages hold parameters sharded."""
    step, args = language_model()
    return pipeline_driver.drive(
        step, args, devices=(4, 4), microbatches=MICROBATCHES, schedule=schedule, tokens=tokens, price=16.0
    )


def gathers_paid(stage: PlannedStage) -> int:
    """The gathers within the loop for which the integer program pays, of one micro-batch."""
    space, choice = stage.found.space, stage.found.solution.choice
    count = 0
    for move, transfer in zip(space.moves, space.program.transfers, strict=True):
        if move.trips == MICROBATCHES:
            made = move.produced[transfer.src_class[choice[transfer.src]]]
            for wanted in {int(klass[choice[node]]) for node, klass in transfer.consumers}:
                steps = reshard_steps(made, move.wanted[wanted]) or ()
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
    [((), "1f1b"), ((), "zb-h1"), ((5, 4, 3), "1f1b"), pytest.param((3, 3, 3, 3), "1f1b", marks=pytest.mark.slow)],
)
def test_the_program_pays_for_what_every_segment_communicates(tokens: tuple[int, ...], schedule: str) -> None:
    several = 0
    for stage in driven(tokens, schedule).stages:
        found, every = stage.found, gathers_planned(stage)
        paid = found.solution.objective - found.compute_seconds
        seconds = sum(stage.communication_seconds[s] * stage.runs(s) for s in stage.segments.items)
        assert seconds == pytest.approx(paid, rel=1e-9)
        assert sum(every) == gathers_paid(stage)
        several += sum(map(bool, every)) > 1
    assert several


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_quickly")
def test_compiled_slices_gather_as_often_as_the_program_pays_for() -> None:
    run = driven((6, 6))
    program, made = run.pipeline.program, run.executable().compiled()
    paid = [gathers_paid(stage) for stage in run.stages]
    found = [0] * len(paid)
    for executable, one in zip(program.executables, made, strict=True):
        if executable.kind in LOOP:
            gathers = parse_hlo(one.as_text(), program.submeshes[executable.mesh].mesh)
            found[executable.stage] += sum(c.count for c in gathers if c.kind == "all_gather")
    assert found == paid
    assert sum(paid) > 2
