"""A plan in brief, `print(plan)`: the choice, its prediction, and other methods on the same devices.

    utilisation = FLOPs of the step's own products / (predicted seconds x devices x peak FLOP/s)

counts matrix products and convolutions, forward and backward, without what is computed again; the peak is that of
their operands' dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group
from rich.text import Text

from alpa_lite.cluster import trust
from alpa_lite.plan.figures import Comparison
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.report import computing, console, stages, strategy_names, text, units
from alpa_lite.report.tables import Block, Column, Row, Section, Sentence, Table

_MORE = "more: plan.details(), plan.explain(path), plan.activations(), plan.to_html(file)"
_MAX_NOTES = 3
_MAX_OPERATIONS = 3
_MAX_SETS = 2
_EQUAL = 1e-3  # relative difference of seconds that is within the gap of a solution


def renderable(plan: Plan) -> Group:
    """The summary as a Rich renderable."""
    remarks = [*plan.verification[:1], *plan.notes[:_MAX_NOTES]]
    hidden = len(plan.notes) - _MAX_NOTES + max(0, len(plan.verification) - 1)
    lines = [line if len(line) <= console.WIDTH - 2 else f"{line[: console.WIDTH - 6]} ..." for line in remarks]
    lines += [f"and {hidden} more in details()"] if hidden > 0 else []
    notes = [Section("notes", "Notes", tuple(lines))] if remarks else []
    return console.render((*text.header(plan), *sections(plan), *notes, Text(f"\n{_MORE}", style="dim")))


def sections(plan: Plan) -> Iterator[Section]:
    """The choice, the prediction, and other methods on the same devices."""
    yield Section("overview", "Chosen", tuple(strategy_names.sentences(plan)))
    yield Section("predicted", "Predicted", (_predicted(plan),))
    if plan.comparisons:
        yield Section("compared", "Beside it, at the same prices", (_comparisons(plan), *_cost_of_annotations(plan)))


def line(plan: Plan) -> str:
    """A plan in a line: its `repr`."""
    mesh = f"mesh {stages.meshes(plan)}"
    if plan.pipelined:
        mesh = f"{plan.num_stages} stages, {plan.schedule} with {plan.num_microbatches} micro-batches"
    elif plan.num_microbatches > 1:
        mesh += f", {plan.num_microbatches} micro-batches"
    size = units.nbytes(peak(plan))
    return (
        f"<Plan {plan.method!r} for {plan.cluster.num_devices} {plan.cluster.device}: {mesh}, "
        f"step {units.seconds(plan.step_seconds)}, {size} per device, {plan.fingerprint[:12]}>"
    )


def peak(plan: Plan) -> int:
    """Bytes per device of the fullest submesh."""
    return max(use.peak for use in stages.memory(plan))


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
    """The module's formula; 0 where the FLOPs are not known."""
    possible = plan.step_seconds * plan.num_devices * plan.products.peak
    return plan.products.flops / possible if possible else 0.0


def rates(plan: Plan) -> dict[str, str]:
    """Examples and tokens a second, as far as they are known."""
    counts = zip(("examples", "tokens"), batch(plan), strict=True)
    step = plan.step_seconds
    return {name: units.digits(count / step) for name, count in counts if count and step}


def _predicted(plan: Plan) -> Table:
    spent = stages.spent(plan)
    parts = [("compute", spent.compute), ("communication", spent.waiting), ("idle", spent.idle)]
    shares = [f"{name} {units.percent(s, plan.step_seconds)}" for name, s in parts if s > 5e-4 * plan.step_seconds]
    fullest = max(stages.memory(plan), key=lambda use: use.peak)
    size = fullest.peak
    budget = f"{units.percent(size, plan.memory_per_device)} of {units.nbytes(plan.memory_per_device)}"
    virtual = plan.cluster.platform == "cpu" and plan.cluster.devices_per_node > 1
    solved = "the stages, by sums over layers" if plan.solver.model == "layers" else "the sharding of every operation"
    found = "" if plan.solver.status in ("replayed", "fixed") else f", {text.gap(plan.solver)}: {solved}"
    used = (
        f"{100 * utilisation(plan):.3g} % of the peak = {units.flops(plan.products.flops)}FLOP of products / "
        f"({units.seconds(plan.step_seconds)} x {plan.num_devices} devices x {units.flops(plan.products.peak)}FLOP/s)"
    )
    facts = {
        "step": [f"{units.seconds(plan.step_seconds)}: {', '.join(shares)}", stages.overlapped(plan)],
        "throughput": [", ".join(f"{rate} {name}/s" for name, rate in rates(plan).items())],
        "utilisation": [used] if plan.products.flops else [],
        "memory": [
            f"{units.nbytes(size)} per device, {budget}",
            ", ".join(f"{name} {units.nbytes(used)}" for name, used in fullest.kinds),
        ],
        **_operations(plan),
        "rates": [
            trust.origin(plan.cluster),
            trust.agreement(plan.cluster),
            "the CPU devices of a node are virtual: they share its cores" if virtual else "",
        ],
        "solver": [f"{plan.solver.status}{found}"],
        "search": _search(plan),
    }
    said = {name: [line for line in lines if line] for name, lines in facts.items()}
    rows = ((name * (not number), line) for name, lines in said.items() for number, line in enumerate(lines))
    return Table.of((Column(), Column(wide=True)), rows)


def _search(plan: Plan) -> list[str]:
    """The work of the search, the gap that it leaves, and the sets of plans that it left out."""
    found = plan.search
    if found is None or not found.expanded:
        return []
    gap = found.gap(plan.step_seconds)
    share = units.percent(found.work, found.allowed)
    lines = [
        f"{found.expanded} sets of plans expanded, {found.pruned} pruned; {share} of effort={found.effort!r}; "
        f"no plan takes less than {units.seconds(found.bound)} (gap {units.percent(gap, 1.0)})"
    ]
    if found.estimated:
        lines.append(
            f"not expanded, since estimated to be no faster: {'; '.join(units.first(found.estimated, _MAX_SETS))}"
        )
    if found.unreached:
        more = "" if found.effort == "thorough" else "; effort='thorough' searches further"
        lines.append(f"not reached within the budget: {'; '.join(units.first(found.unreached, _MAX_SETS))}{more}")
    return lines


def _operations(plan: Plan) -> dict[str, list[str]]:
    """The resources that bound the operations, and the heaviest of these."""
    rows = computing.heaviest(plan)
    whole = sum(row.total for row in rows)
    heaviest = [
        f"{row.operation}{f' {units.times(row.count)}' if row.count > 1 else ''}: {units.seconds(row.total)}, "
        f"{units.percent(row.total, whole)} ({row.bound}), {computing.line_text(row)}"
        for row in rows[:_MAX_OPERATIONS]
    ]
    return {"bound by": [computing.bounds_text(rows)], "heaviest": heaviest}


def _comparisons(plan: Plan) -> Table:
    """This plan first, then the others as they come."""
    own = "pipeline (this plan)" if plan.pipelined else "this plan"
    shape = f"{plan.num_stages} stages" if plan.pipelined else units.shape(plan.stages[0].mesh_shape)
    rows: list[Row | tuple] = [Row((own, shape, plan.step_seconds, peak(plan), "chosen"), "bold")]
    for row in plan.comparisons:
        shape = units.shape(row.mesh_shape)
        if row.name == "pipeline":
            shape = f"{row.mesh_shape[0]} stages" if row.mesh_shape else ""
        rows.append((row.name, shape, row.step_seconds, row.bytes_per_device, why_not(plan, row)))
    columns = (
        Column("method"), Column("mesh"), Column("step", format=units.seconds),
        Column("per device", format=units.nbytes), Column(wide=True),
    )  # fmt: skip
    return Table.of(columns, rows)


def _cost_of_annotations(plan: Plan) -> list[Block]:
    """A line where the step's own shardings make the plan slower than a baseline of the table."""
    rows = [
        (row.step_seconds, row.name)
        for row in plan.comparisons
        if row.step_seconds is not None and (row.bytes_per_device or 0) <= plan.memory_per_device
    ]
    seconds, name = min(rows, default=(plan.step_seconds, ""))
    if "annotations" not in plan.ingredients or seconds >= plan.step_seconds:
        return []
    share = units.percent(plan.step_seconds - seconds, seconds)
    slower = f"shardings in the code make it {share} slower than {name}"
    return [Sentence("", (slower, "ignore_annotations=True plans without them"), ";")]


def why_not(plan: Plan, row: Comparison) -> str:
    """The reason for not choosing a method: how much it exceeds the memory or is slower, or why it has no figures."""
    if row.step_seconds is None:
        return row.reason or "not evaluated"
    parts = []
    over = (row.bytes_per_device or 0) - plan.memory_per_device
    if over > 0:
        parts.append(f"does not fit by {units.nbytes(over)}")
    more = row.step_seconds / plan.step_seconds - 1 if plan.step_seconds else 0.0
    if abs(more) <= _EQUAL:
        parts.append("equally fast")
    else:
        share = f"{100 * abs(more):.2g}" if abs(more) < 0.095 else f"{100 * abs(more):,.0f}"
        parts.append(f"{'slower' if more > 0 else 'faster'} by {share} %")
    return ", ".join(parts)
