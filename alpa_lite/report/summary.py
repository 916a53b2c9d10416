"""A plan in brief: `print(plan)` with the choice, its prediction and other methods; its `repr`; messages of the log.

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

from rich.console import Group
from rich.text import Text

from alpa_lite.cluster import trust
from alpa_lite.ir import units
from alpa_lite.plan.figures import AxisUse, Comparison
from alpa_lite.plan.records import PlanRecord as Plan
from alpa_lite.plan.records import Stage
from alpa_lite.report import console, grouping, operations, stages, text
from alpa_lite.report.tables import Block, Column, Row, Section, Sentence, Table

_MORE = "more: plan.details(), plan.explain(path), plan.activations(), plan.to_html(file)"
_MAX_NOTES = 3
_MAX_OPERATIONS = 3
_MAX_SETS = 2
_MAX_LAPS = 3  # of planning, in the log
_ALL = 0.98  # the share from which on something counts as all
_SOME = 0.02  # the share below which something is left out
_KINDS = {
    "data": "data parallel", "tensor": "tensor parallel", "sequence": "sequence parallel",
    "space": "spatially parallel", "expert": "expert parallel",
}  # fmt: skip


def render_summary(plan: Plan) -> Group:
    """Returns the summary as a Rich renderable."""
    remarks = [*plan.verification[:1], *plan.notes[:_MAX_NOTES]]
    hidden = len(plan.notes) - _MAX_NOTES + max(0, len(plan.verification) - 1)
    lines = [textwrap.shorten(line, console.WIDTH - 2, placeholder=" ...") for line in remarks]
    lines += [f"and {hidden} more in details()"] if hidden > 0 else []
    notes = [Section("notes", "Notes", tuple(lines))] if remarks else []
    return console.render((*text.header(plan), *sections(plan), *notes, Text(f"\n{_MORE}", style="dim")))


def sections(plan: Plan) -> Iterator[Section]:
    """Yields the choice, the prediction, and other methods on the same devices."""
    yield Section("overview", "Chosen", tuple(choice_lines(plan)))
    yield Section("predicted", "Predicted", (_predicted(plan),))
    if plan.comparisons:
        yield Section(
            "compared", "Other methods, at the same prices", (_comparisons(plan), *_cost_of_annotations(plan))
        )


def line(plan: Plan) -> str:
    """Returns a plan in a line: its `repr`."""
    mesh = f"mesh {stages.meshes(plan)}"
    if plan.is_pipelined:
        mesh = f"{plan.num_stages} stages, {plan.schedule} with {plan.num_microbatches} micro-batches"
    elif plan.num_microbatches > 1:
        mesh += f", {plan.num_microbatches} micro-batches"
    costs = f"step {units.seconds(plan.step_seconds)}, {units.nbytes(stages.peak(plan))} per device"
    machine = f"{plan.cluster.num_devices} {plan.cluster.device}"
    return f"<Plan {plan.method!r} for {machine}: {mesh}, {costs}, {plan.fingerprint[:12]}>"


def planned_message(name: str, plan: Plan, why: str) -> str:
    """Describes a planning for the log: why it was done, the choice, its predicted cost, and the time it took.

    Args:
      name: of the step.
      why: why it was planned now, such as "its first call".
    """
    words = " ".join("; ".join(sentence.parts) for sentence in choice_lines(plan)).rstrip(".")
    laps = plan.planning_seconds
    longest = [f"{lap} {units.seconds(laps[lap])}" for lap in heapq.nlargest(_MAX_LAPS, laps, laps.__getitem__)]
    laps_text = f" ({', '.join(longest)})" if longest else ""
    return (
        f"planned {name} for {plan.cluster.num_devices} {plan.cluster.device} ({why}): {words}; predicted "
        f"{units.seconds(plan.step_seconds)} a step and {units.nbytes(stages.peak(plan))} of "
        f"{units.nbytes(plan.memory_per_device)} per device; in {units.seconds(sum(laps.values()))}{laps_text}"
    )


def compiled_message(name: str, executables: int, seconds: float) -> str:
    """Describes a compilation for the log."""
    return f"compiled {name}: {units.count_of(executables, 'executable')} in {units.seconds(seconds)}"


# -- the choice --------------------------------------------------------------------------------------------------------


def choice_lines(plan: Plan) -> Iterator[Sentence]:
    """Returns lines for the pipeline, the mesh axes of its stages, the state, and operations that are not distributed.

    Those that go on with the stages of the line before are indented.
    """
    lines = [(_division(plan), 0)]
    found = stages.numbers_by_value(map(_stage, plan.stages))
    for (work, *state), numbers in found.items():
        where = f"{stages.name_stages(numbers)}: " if len(found) > 1 else ""
        lines += [((where + work[0], *work[1:]), 0), *((line, len(where)) for line in state)]
    lines.append((_replicated(plan), 0))
    return (Sentence("", parts, ";", indent) for parts, indent in lines if parts)


def _division(plan: Plan) -> tuple[str, ...]:
    """Returns the schedule of a pipeline, or the micro-batches of one mesh; and the recomputation."""
    count, meshes, tokens = plan.num_microbatches, stages.sizes(plan), plan.division.token_slices
    parts = [f"{count} micro-batches, one after another"] if count > 1 else []
    if plan.is_pipelined:
        alike = len(set(meshes)) == 1
        sizes = str(meshes[0]) if alike else ", ".join(map(str, meshes))
        where = f" in {len(meshes)} submeshes" if plan.division.virtual > 1 else ""
        slices = f" in slices of {', '.join(map(str, tokens))} tokens" if tokens else ""
        parts = [
            f"pipeline of {plan.num_stages} stages{where} on {sizes} device{'s' * (sizes != '1')}{' each' * alike}, "
            f"{plan.schedule} with {units.count_of(count, 'micro-batch')}{slices}"
        ]
    kinds = [kind for kind in dict.fromkeys(plan.division.remat) if kind != "none"]
    return *parts, *([f"recomputes {', '.join(kinds)}"] if kinds else [])


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
    shares = [(_KINDS[name], share) for name, share in axis.products.items() if share >= _SOME]
    if not shares:
        return "nothing of the products divided"
    if len(shares) == 1 and shares[0][1] >= _ALL:
        return shares[0][0]
    of = (" of the products' FLOPs", *[""] * len(shares))
    return " and ".join(f"{name} ({units.percent(s, 1)}{more})" for (name, s), more in zip(shares, of, strict=False))


def _state(axes: Iterable[AxisUse]) -> tuple[str, ...]:
    """The sharding of the state: FSDP where parameters are over an axis that is data parallel, ZeRO for moments."""

    def placement(axis: AxisUse) -> tuple[str, str]:
        """Returns the sharding over an axis, and the share of the bytes that has it."""
        data = axis.products.get("data", 0.0) >= 0.5
        if axis.params >= _SOME:
            name, share = "FSDP of parameters" if data else "parameters sharded", axis.params
        elif axis.optimizer >= _SOME:
            name, share = f"parameters replicated, optimizer state sharded{' (ZeRO)' * data}", axis.optimizer
        else:
            name, share = "parameters replicated", 1.0
        return name, "" if share >= _ALL else f" ({100 * share:.0f} % of the bytes)"

    found = grouping.group_by_key(axes, placement).items()
    return tuple(f"{name} over {' '.join(axis.name for axis in same)}{part}" for (name, part), same in found)


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
    spent, solver = stages.seconds_by_use(plan), plan.solver
    parts = [("compute", spent.compute), ("communication", spent.waiting_seconds), ("idle", spent.idle)]
    shares = [f"{name} {units.percent(s, plan.step_seconds)}" for name, s in parts if s > 5e-4 * plan.step_seconds]
    fullest = max(stages.memory(plan), key=lambda use: use.peak)
    virtual = plan.cluster.platform == "cpu" and plan.cluster.devices_per_node > 1
    solved = "the stages, by sums over layers" if solver.model == "layers" else "the sharding of every operation"
    found = "" if solver.status in ("replayed", "fixed") else f", {text.gap(solver)}: {solved}"
    used = (
        f"{100 * utilisation(plan):.3g} % of the peak = {units.flops(plan.products.flops)}FLOP of products / "
        f"({units.seconds(plan.step_seconds)} x {plan.num_devices} devices x {units.flops(plan.products.peak)}FLOP/s)"
    )
    facts = {
        "step": [f"{units.seconds(plan.step_seconds)}: {', '.join(shares)}", stages.overlapped_share(plan)],
        "throughput": [", ".join(f"{rate} {name}/s" for name, rate in rates(plan).items())],
        "utilisation": [used] if plan.products.flops else [],
        "memory": [
            f"{units.nbytes(fullest.peak)} per device, {budget(plan)}",
            ", ".join(f"{name} {units.nbytes(size)}" for name, size in fullest.kinds),
        ],
        **_operations(plan),
        "rates": [
            trust.origin(plan.cluster),
            trust.agreement(plan.cluster),
            "the CPU devices of a node are virtual: they share its cores" if virtual else "",
        ],
        "solver": [f"{solver.status}{found}"],
        "search": _search(plan),
    }
    lines = {name: [line for line in lines if line] for name, lines in facts.items()}
    rows = ((name * (not number), line) for name, own in lines.items() for number, line in enumerate(own))
    return Table.from_items((Column(), Column(wide=True)), rows)


def _search(plan: Plan) -> list[str]:
    """Returns the work of the search, the gap that it leaves, and the sets of plans that it left out."""
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
            f"not expanded, since estimated to be no faster: {'; '.join(units.first(found.estimated, _MAX_SETS))}; to "
            "plan one, ask for it: method=Pipeline(num_stages=...) or Sharded(mesh_shape=...), and num_microbatches=..."
        )
    if found.unreached:
        more = "" if found.effort == "thorough" else "; effort='thorough' searches further"
        lines.append(f"not reached within the budget: {'; '.join(units.first(found.unreached, _MAX_SETS))}{more}")
    return lines


def _operations(plan: Plan) -> dict[str, list[str]]:
    """Returns the resources that bound the operations, and the heaviest of these."""
    rows = operations.rank_operations(plan)
    whole = sum(row.total for row in rows)
    heaviest = [
        f"{row.operation}{f' {units.times(row.count)}' if row.count > 1 else ''}: {units.seconds(row.total)}, "
        f"{units.percent(row.total, whole)} ({row.bound}), {operations.line_text(row)}"
        for row in rows[:_MAX_OPERATIONS]
    ]
    return {"bound by": [operations.bounds_text(rows)], "heaviest": heaviest}


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
        Column("per device", format=units.nbytes), Column(wide=True),
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
    slower = f"shardings in the code make it {share} slower than {name}"
    return [Sentence("", (slower, "ignore_annotations=True plans without them"), ";")]


def explain_rejection(plan: Plan, row: Comparison) -> str:
    """The reason for not choosing a method: how much it exceeds the memory or is slower, or why it has no figures."""
    if row.step_seconds is None:
        return row.reason or "not evaluated"
    over, pace = (row.bytes_per_device or 0) - plan.memory_per_device, units.pace(row.step_seconds, plan.step_seconds)
    return f"does not fit by {units.nbytes(over)}, {pace}" if over > 0 else pace
