"""A plan as text of a hundred columns: `str(plan)`, and in colour the output of `alpa-lite show`."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from rich.console import Group
from rich.text import Text

from alpa_lite.ir import units
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import console, operations, prose, sections, stages
from alpa_lite.report.tables import Block, Column, Legend, Section, Sentence, Table

_MAX_REPLICATED = 10
_MAX_CANDIDATES = 16


def render_plan(plan: Plan) -> Group:
    """Returns the plan as a Rich renderable."""
    return console.render((*header(plan), *details(plan)))


def overview(plan: Plan) -> Group:
    """The beginning of `render_plan`: where the time goes, and the memory; for a pipeline also stages and schedule."""
    return console.render((*header(plan), *sections.overview(plan)))


def details(plan: Plan) -> Iterator[Section]:
    """Yields all sections of a plan, those of pages too."""
    yield from sections.overview(plan)
    if found := operations.modules(plan):
        note = "Seconds per step of an average device. Open a module for its operations."
        body = Legend(tuple(operations.COLOURS.items())), operations.module_table(found, plan.step_seconds), note
        yield Section("modules", "Time by module and operation", body, only="page")
    yield from sections.placement(plan)
    if heavy := operations.rank_operations(plan):
        heading = "Where the time goes: operations and the collectives that they wait for, per device"
        body = f"bound by {operations.bounds_text(heavy)}", operations.table(heavy)
        yield Section("operations", heading, body)
    if rows := stages.replicated_operations(plan):
        heading = "Not distributed: computed whole on every device, or left to the compiler"
        yield Section(
            "replicated", heading, (Table.from_items(_REPLICATED, rows, _MAX_REPLICATED, "smaller operations"),)
        )
    if any(stage.held for stage in plan.stages):
        heading = "Activations that wait for the backward pass"
        yield Section("activations", heading, (operations.activation_table(plan),), only="page")
    if plan.candidates:
        yield Section("candidates", "Plans compared", (_candidates(plan),))
    yield Section("solver", "Solver", tuple(Sentence(head, tuple(rest)) for head, *rest in prose.parts("solver", plan)))
    remarks = (("Checked", plan.verification), ("Compiler rewrites", plan.rewrites), ("Notes", plan.notes))
    for heading, lines in remarks:
        if lines:
            yield Section("notes", heading, lines)


def header(plan: Plan) -> tuple[Block, ...]:
    """Returns the first lines of a plan: method and cluster; devices, stages, micro-batches and schedule."""
    head = Text("Plan ", style="bold")
    head.append(plan.method, style="bold cyan")
    head.append(f" for {plan.cluster}", style="default not bold")
    return head, facts(plan)


def facts(plan: Plan) -> Sentence:
    """Devices, stages, micro-batches and schedule."""
    return Sentence("", tuple(prose.lines("facts", plan, stages.meshes(plan))))


_REPLICATED = (
    Column("operation", attrgetter("name")),
    Column("", lambda row: row.count if row.count > 1 else None, units.times, attrgetter("count")),
    Column("size", attrgetter("bytes"), units.nbytes, lambda row: row.bytes * row.count),
    Column("time", attrgetter("seconds"), units.seconds, attrgetter("seconds")),
    Column("reason and place", lambda row: f"{row.reason}; {row.where}", wide=True),
)


def _candidates(plan: Plan) -> Table:
    """Returns the chosen plan first, then by seconds. Pipelines are compared by the estimates of the stage search."""
    order = sorted(plan.candidates, key=lambda c: (c.status != "chosen", c.step_seconds is None, c.step_seconds or 0.0))
    chosen = order[0].step_seconds if order[0].status == "chosen" else None
    best = plan.step_seconds if chosen is None else chosen
    columns = (
        Column("plan", attrgetter("method"), wide=True),
        Column("mesh" if plan.solver.model == "step" else "stages", lambda row: units.shape(row.mesh_shape)),
        Column("step", attrgetter("step_seconds"), units.seconds),
        Column("memory", attrgetter("bytes_per_device"), units.nbytes),
        Column("", lambda row: prose.sentence("status", row, best)),
    )
    return Table.from_items(
        columns, dict.fromkeys(order), _MAX_CANDIDATES, "and {} more",
        style=lambda row: "bold" if row.status == "chosen" else "",
    )  # fmt: skip
