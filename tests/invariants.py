"""The invariants of the values that pass from pass to pass. Tests check each value after the pass that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alpa_lite.ir import graph, program
from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.ir.schedules import Schedule
from alpa_lite.passes.layers.division import AssignedStep, LayeredStep
from alpa_lite.passes.layers.types import Assignment, Layering
from alpa_lite.passes.lowering.program import LocalProgram, Loop
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.stages.planning import DecidedStage, PlannedStage
from alpa_lite.passes.stages.stage_graph import StageGraph
from tests import scheduling


def check(value: Any) -> None:
    """Raises AssertionError or PlanError where a value breaks the invariants of its type."""
    match value:
        case Traced():
            graph.check(value.graph)
        case Accumulated() | StageGraph():
            check(value.traced)
        case LayeredStep():
            check(value.layering)
        case AssignedStep():
            check(value.accumulated)
            check(value.assignment)
        case Layering():
            _layers(value)
        case Assignment():
            assert all(0 <= stage < value.num_stages for stage in value.stage.values())
        case Grouping():
            _groups(value)
        case PlannedStage():
            check(value.program)
            check(value.graph)
        case DecidedStage():
            assert len(value.mesh_solution.choice) == len(value.grouping.groups)
        case LocalProgram():
            _local(value)
        case Schedule():
            scheduling.check(value)
        case Staged():
            program.check(value.program)
            division = value.division
            assert division.num_layers >= len(value.stages) == len(division.remat) == len(division.first_layers)
        case tuple() | list():
            for item in value:
                check(item)
        case Mapping():
            for item in value.values():
                check(item)


def _layers(value: Layering) -> None:
    """Each forward operation is in exactly one layer."""
    graph.check(value.traced.graph)
    cut = [index for layer in value.layers for index in layer.ops]
    assert len(cut) == len(set(cut)), "an operation is in two layers"
    assert set(cut) == set(value.forward), "layers and the forward pass differ"


def _groups(value: Grouping) -> None:
    """Every operation is in one group at most, and every home is a group."""
    inside = [number for group in value.groups for number in group.ops]
    assert len(inside) == len(set(inside)), "an operation is in two groups"
    assert all(0 <= home.group < len(value.groups) for home in value.homes.values())


def _local(value: LocalProgram) -> None:
    """Every register is written once, before it is read."""
    assert len(value.body.inputs) == len(value.inputs) and len(value.body.outputs) == len(value.outputs)

    def visit(body: Any) -> None:
        written = set(body.inputs)
        for item in body.instructions:
            assert written.issuperset(item.reads), f"{item} reads a register before it is written"
            assert written.isdisjoint(item.results), f"{item} writes a register again"
            written.update(item.results)
            if isinstance(item, Loop):
                for inner in item.bodies:
                    visit(inner)
        assert all(isinstance(o, Lit) or o in written for o in body.outputs)

    visit(value.body)
