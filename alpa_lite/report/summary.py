"""A plan as text of a hundred columns: in brief (`print(plan)`), in full, in a line (its `repr`), and in the log.

In brief it is the choice, its prediction, and other methods.

The choice is in the field's words: data, tensor, sequence and expert parallelism, FSDP, ZeRO, pipelines.

    utilisation = FLOPs of the step's own products / (predicted seconds x devices x peak FLOP/s)

counts matrix products and convolutions, forward and backward, without what is computed again; the peak is that of
their operands' dtypes.
"""

from __future__ import annotations

import heapq
import math
import textwrap
from collections.abc import Iterable, Iterator
from operator import attrgetter

from rich.console import Group
from rich.text import Text

from alpa_lite.cluster import trust
from alpa_lite.ir import units
from alpa_lite.plan.figures import AxisUse, Comparison
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.plan.records import Stage
from alpa_lite.report import console, grouping, operations, prose, stages
from alpa_lite.report import sections as parts
from alpa_lite.report.tables import Block, Column, Legend, Row, Section, Sentence, Table

_MORE = "more: plan.details(), plan.explain(path), plan.activations(), plan.to_html(file)"
_MAX_NOTES = 3
_MAX_REPLICATED = 10  # rows of replicated operations, the largest first
_MAX_CANDIDATES = 16  # rows of compared candidates
_MAX_LAPS = 3  # of planning, in the log
_ALL = 0.98  # the share from which on something counts as all
_SOME = 0.02  # the share below which something is left out


def render_summary(plan: Plan) -> Group:
    """Returns the summary as a Rich renderable."""
    remarks = [*plan.verification[:1], *plan.notes[:_MAX_NOTES]]
    hidden = len(plan.notes) - _MAX_NOTES + max(0, len(plan.verification) - 1)
    lines = [textwrap.shorten(line, console.WIDTH - 2, placeholder=" ...") for line in remarks]
    lines += [f"and {hidden} more in details()"] if hidden > 0 else []
    notes = [Section("notes", "Notes", tuple(lines))] if remarks else []
    return console.render((*header(plan), *sections(plan), *notes, Text(f"\n{_MORE}", style="dim")))


def sections(plan: Plan) -> Iterator[Section]:
    """Yields the choice, the prediction, and other methods on the same devices."""
    yield Section("overview", "Chosen", tuple(choice_lines(plan)))
    yield Section("predicted", "Predicted", (_predicted(plan),))
    if plan.comparisons:
        yield Section(
            "compared", "Other methods, at the same prices", (_comparisons(plan), *_cost_of_annotations(plan))
        )


# -- in a line ---------------------------------------------------------------------------------------------------------


def line(plan: Plan) -> str:
    """Returns a plan in a line: its `repr`."""
    return prose.sentence("in_a_line", plan, stages.meshes(plan), stages.peak(plan))


def planned_message(name: str, plan: Plan, why: str) -> str:
    """Describes a planning for the log: why it was done, the choice, its predicted cost, and the time it took.

    Args:
      name: of the step.
      why: why it was planned now, such as "its first call".
    """
    choice = " ".join("; ".join(sentence.parts) for sentence in choice_lines(plan)).rstrip(".")
    laps = plan.planning_seconds
    longest = [(lap, laps[lap]) for lap in heapq.nlargest(_MAX_LAPS, laps, laps.__getitem__)]
    return prose.sentence("planned", name, plan, why, choice, stages.peak(plan), list(laps.values()), longest)


def compiled_message(name: str, executables: int, seconds: float) -> str:
    """Describes a compilation for the log."""
    return prose.sentence("compiled", name, executables, seconds)


# -- the choice --------------------------------------------------------------------------------------------------------


def choice_lines(plan: Plan) -> Iterator[Sentence]:
    """Returns lines for the pipeline, the mesh axes of its stages, the state, and operations that are not distributed.

    Those that go on with the stages of the line before are indented.
    """
    remat = [kind for kind in dict.fromkeys(plan.division.remat) if kind != "none"]
    lines = [(tuple(prose.lines("division", plan, stages.sizes(plan), remat)), 0)]
    found = stages.numbers_by_value(map(_stage, plan.stages))
    for (work, *state), numbers in found.items():
        where = f"{stages.name_stages(numbers)}: " if len(found) > 1 else ""
        lines += [((where + work[0], *work[1:]), 0), *((line, len(where)) for line in state)]
    lines.append((_replicated(plan), 0))
    return (Sentence("", parts, ";", indent) for parts, indent in lines if parts)


def _stage(stage: Stage) -> tuple[tuple[str, ...], ...]:
    """Returns a line for the work of a stage, and one for its state."""
    if stage.num_devices == 1:
        return (("one device",),)
    if not stage.axes:
        return ((f"mesh {units.mesh(stage.mesh_shape, stage.axis_names)}",),)
    axes = [axis for axis in stage.axes if axis.size > 1]
    found = grouping.group_by_key(axes, _products).items()
    work = (f"{product} over {' '.join(f'{axis.name}={axis.size}' for axis in same)}" for product, same in found)
    return tuple(work), _state(axes)


def _products(axis: AxisUse) -> str:
    """A name, such as "data parallel", or "data parallel (71 % of the products' FLOPs) and tensor parallel (28 %)"."""
    return prose.sentence("products", [(name, share) for name, share in axis.products.items() if share >= _SOME], _ALL)


def _state(axes: Iterable[AxisUse]) -> tuple[str, ...]:
    """The sharding of the state: FSDP where parameters are over an axis that is data parallel, ZeRO for moments."""
    found = grouping.group_by_key(axes, lambda axis: tuple(prose.lines("state", axis, _SOME, _ALL))).items()
    return tuple(" ".join([name, "over", *(axis.name for axis in same), *part]) for (name, *part), same in found)


def _replicated(plan: Plan) -> tuple[str, ...]:
    """Operations that every device computes whole, or the compiler divides, if they take a hundredth of the step."""
    rows = stages.replicated_operations(plan)
    seconds = sum(row.seconds for row in rows)
    if seconds < 0.01 * plan.step_seconds:
        return ()
    names = ", ".join(dict.fromkeys(row.name.split(" ")[0] for row in rows[:4]))
    return (f"not distributed: {names}, {units.percent(seconds, plan.step_seconds)} of the step",)


# -- the prediction ----------------------------------------------------------------------------------------------------


def batch(plan: Plan) -> tuple[int, int]:
    """The examples of a step, and its tokens: the batch's leading dim, and the elements of [batch, sequence] integers.

    Zero where no argument says.
    """
    leaves = {leaf.path: leaf for stage in plan.stages for leaf in stage.arguments if leaf.role == "batch"}
    examples = max((leaf.shape[0] for leaf in leaves.values() if leaf.shape), default=0)
    tokens = [
        math.prod(leaf.shape)
        for leaf in leaves.values()
        if len(leaf.shape) == 2 and leaf.dtype.startswith(("int", "uint")) and leaf.shape[0] == examples
    ]
    return examples, max(tokens, default=0)


def utilisation(plan: Plan) -> float:
    """Returns the module's formula; 0 where the FLOPs are not known."""
    possible = plan.step_seconds * plan.num_devices * plan.products.peak
    return plan.products.flops / possible if possible else 0.0


def rates(plan: Plan) -> dict[str, str]:
    """Returns examples and tokens a second, as far as they are known."""
    counts = zip(("examples", "tokens"), batch(plan), strict=True)
    step = plan.step_seconds
    return {name: units.digits(count / step) for name, count in counts if count and step}


def budget(plan: Plan) -> str:
    """Returns the share of the memory budget that the peak takes."""
    return f"{units.percent(stages.peak(plan), plan.memory_per_device)} of {units.nbytes(plan.memory_per_device)}"


def _predicted(plan: Plan) -> Table:
    """Returns the figures of the prediction, each with its name."""
    spent = stages.seconds_by_use(plan)
    seconds = [("compute", spent.compute), ("communication", spent.waiting_seconds), ("idle", spent.idle)]
    ranked = operations.rank_operations(plan)
    found = prose.parts(
        "predicted", plan, seconds, stages.overlapped_share(plan), rates(plan), utilisation(plan),
        max(stages.memory(plan), key=lambda use: use.peak), budget(plan), ranked,
        list(map(operations.line_text, ranked)), operations.bounds_text(ranked), trust,
    )  # fmt: skip
    rows = [(name * (n == 0 or found[n - 1][0] != name), line) for n, (name, line) in enumerate(found)]
    return Table.from_items((Column(), Column(is_wide=True)), rows)


# -- other methods -----------------------------------------------------------------------------------------------------


def _comparisons(plan: Plan) -> Table:
    """This plan first, then the others as they come."""
    own = "pipeline (this plan)" if plan.is_pipelined else "this plan"
    shape = f"{plan.num_stages} stages" if plan.is_pipelined else units.shape(plan.stages[0].mesh_shape)
    rows: list[Row | tuple] = [Row((own, shape, plan.step_seconds, stages.peak(plan), "chosen"), "bold")]
    for row in plan.comparisons:
        shape = units.shape(row.mesh_shape)
        if row.name == "pipeline":
            shape = f"{row.mesh_shape[0]} stages" if row.mesh_shape else ""
        rows.append((row.name, shape, row.step_seconds, row.bytes_per_device, explain_rejection(plan, row)))
    columns = (
        Column("method"), Column("mesh"), Column("step", format=units.seconds),
        Column("per device", format=units.nbytes), Column(is_wide=True),
    )  # fmt: skip
    return Table.from_items(columns, rows)


def _cost_of_annotations(plan: Plan) -> list[Block]:
    """Returns a line where the step's own shardings make the plan slower than a baseline of the table."""
    rows = [
        (row.step_seconds, row.name)
        for row in plan.comparisons
        if row.step_seconds is not None and (row.bytes_per_device or 0) <= plan.memory_per_device
    ]
    seconds, name = min(rows, default=(plan.step_seconds, ""))
    if "annotations" not in plan.ingredients or seconds >= plan.step_seconds:
        return []
    share = units.percent(plan.step_seconds - seconds, seconds)
    return [Sentence("", tuple(parts), ";") for parts in prose.parts("annotated", share, name)]


def explain_rejection(plan: Plan, row: Comparison) -> str:
    """The reason for not choosing a method: how much it exceeds the memory or is slower, or why it has no figures."""
    if row.step_seconds is None:
        return row.reason or "not evaluated"
    over, pace = (row.bytes_per_device or 0) - plan.memory_per_device, units.pace(row.step_seconds, plan.step_seconds)
    return f"does not fit by {units.nbytes(over)}, {pace}" if over > 0 else pace


# -- in full -----------------------------------------------------------------------------------------------------------


def render_plan(plan: Plan) -> Group:
    """Returns the plan as a Rich renderable."""
    return console.render((*header(plan), *details(plan)))


def overview(plan: Plan) -> Group:
    """The beginning of `render_plan`: where the time goes, and the memory; for a pipeline also stages and schedule."""
    return console.render((*header(plan), *parts.overview(plan)))


def details(plan: Plan) -> Iterator[Section]:
    """Yields all sections of a plan, those of pages too."""
    yield from parts.overview(plan)
    if found := operations.modules(plan):
        note = "Seconds per step of an average device. Open a module for its operations."
        body = Legend(tuple(operations.COLOURS.items())), operations.module_table(found, plan.step_seconds), note
        yield Section("modules", "Time by module and operation", body, only="page")
    yield from parts.placement(plan)
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
    Column("reason and place", lambda row: f"{row.reason}; {row.where}", is_wide=True),
)


def _candidates(plan: Plan) -> Table:
    """Returns the chosen plan first, then by seconds. Pipelines are compared by the estimates of the stage search."""
    order = sorted(plan.candidates, key=lambda c: (c.status != "chosen", c.step_seconds is None, c.step_seconds or 0.0))
    chosen = order[0].step_seconds if order[0].status == "chosen" else None
    best = plan.step_seconds if chosen is None else chosen
    columns = (
        Column("plan", attrgetter("method"), is_wide=True),
        Column("mesh" if plan.solver.model == "step" else "stages", lambda row: units.shape(row.mesh_shape)),
        Column("step", attrgetter("step_seconds"), units.seconds),
        Column("memory", attrgetter("bytes_per_device"), units.nbytes),
        Column("", lambda row: prose.sentence("status", row, best)),
    )
    return Table.from_items(
        columns, dict.fromkeys(order), _MAX_CANDIDATES, "and {} more",
        style=lambda row: "bold" if row.status == "chosen" else "",
    )  # fmt: skip
