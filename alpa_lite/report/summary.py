"""A plan in brief: `print(plan)`. What was chosen, what it yields, and how other methods would do on the same devices.

    utilisation = FLOPs of the step's own products / (predicted seconds x devices x peak FLOP/s)

counts matrix products and convolutions, forward and backward, without what is computed again; the peak is that of
their operands' dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from alpa_lite import trust
from alpa_lite.figures import Comparison
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import computing, stages, text, units, words
from alpa_lite.report.tables import WIDTH, add, plain, section, table

_MORE = "more: plan.details(), plan.explain(path), plan.activations(), plan.to_html(file)"
_MOST_NOTES = 3
_MOST_OPERATIONS = 3
_MOST_SETS = 2
_EQUAL = 1e-3  # relative difference of seconds that is within the gap of a solution


def render(plan: Plan) -> str:
    """The summary as plain text, at most a hundred columns wide."""
    return plain(renderable(plan))


def renderable(plan: Plan) -> Group:
    """The summary as a Rich renderable."""
    parts: list[RenderableType] = [
        text.header(plan),
        section("Chosen", *(line for said in words.chosen(plan) for line in _wrapped(said))),
        section("Predicted", _predicted(plan)),
    ]
    if plan.comparisons:
        parts.append(section("Beside it, at the same prices", _comparisons(plan), *_cost_of_annotations(plan)))
    remarks = [*plan.verification[:1], *plan.notes[:_MOST_NOTES]]
    hidden = len(plan.notes) - _MOST_NOTES + max(0, len(plan.verification) - 1)
    more = [f"and {hidden} more in details()"] if hidden > 0 else []
    if remarks:
        parts.append(section("Notes", *(_short(remark) for remark in remarks), *more))
    parts.append(Text(f"\n{_MORE}", style="dim"))
    return Group(*parts)


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
    if len(plan.stages) == 1:
        return plan.stages[0].memory.total
    return max(row.peak for row in stages.memory(plan))


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


def flops(value: float) -> str:
    """FLOPs with three significant digits and a unit, such as "81.3 T"."""
    for unit, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * scale:
            return f"{units.digits(value / scale)} {unit}"
    return f"{units.digits(value)} "


def _predicted(plan: Plan) -> RenderableType:
    out = table("", "", wide=1)
    spent = stages.spent(plan)
    parts = [("compute", spent.compute), ("communication", spent.waiting), ("idle", spent.idle)]
    shares = [f"{name} {units.percent(s, plan.step_seconds)}" for name, s in parts if s > 5e-4 * plan.step_seconds]
    add(out, "step", f"{units.seconds(plan.step_seconds)}: {', '.join(shares)}")
    if said := stages.overlapped(plan):
        add(out, "", said)
    examples, tokens = batch(plan)
    if examples and plan.step_seconds:
        rates = [(examples, "examples")] + ([(tokens, "tokens")] if tokens else [])
        said = (f"{units.digits(count / plan.step_seconds)} {name}/s" for count, name in rates)
        add(out, "throughput", ", ".join(said))
    if plan.products.flops:
        formula = (
            f"{flops(plan.products.flops)}FLOP of products / ({units.seconds(plan.step_seconds)} x "
            f"{plan.num_devices} devices x {flops(plan.products.peak)}FLOP/s)"
        )
        add(out, "utilisation", f"{100 * utilisation(plan):.3g} % of the peak = {formula}")
    size = peak(plan)
    share = units.percent(size, plan.memory_per_device)
    add(out, "memory", f"{units.nbytes(size)} per device, {share} of {units.nbytes(plan.memory_per_device)}")
    add(out, "", _kinds(plan))
    _operations(plan, out)
    add(out, "rates", trust.origin(plan.cluster))
    add(out, "", trust.agreement(plan.cluster))
    if plan.cluster.platform == "cpu" and plan.cluster.devices_per_node > 1:
        add(out, "", "the CPU devices of a node are virtual: they share its cores")
    what = "the stages, by sums over layers" if plan.solver.model == "layers" else "the sharding of every operation"
    searched = plan.solver.status not in ("replayed", "fixed")
    add(out, "solver", f"{plan.solver.status}{f', {text.gap(plan.solver)}: {what}' * searched}")
    for number, line in enumerate(_search(plan)):
        add(out, "" if number else "search", line)
    return out


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
        lines.append(f"not expanded, since estimated to be no faster: {_named(found.estimated)}")
    if found.unreached:
        more = "" if found.effort == "thorough" else "; effort='thorough' searches further"
        lines.append(f"not reached within the budget: {_named(found.unreached)}{more}")
    return lines


def _named(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    rest = len(names) - _MOST_SETS
    return "; ".join(names[:_MOST_SETS]) + (f"; and {rest} more" if rest > 0 else "")


def _operations(plan: Plan, out: Table) -> None:
    """What bounds the operations, and the heaviest of them."""
    rows = computing.heaviest(plan)
    if not rows:
        return
    whole = sum(row.total for row in rows)
    add(out, "bound by", computing.bounds_text(rows))
    for number, row in enumerate(rows[:_MOST_OPERATIONS]):
        time = f"{units.seconds(row.total)}, {units.percent(row.total, whole)} ({row.bound})"
        name = " ".join(part for part in (row.operation, computing.count_text(row)) if part)
        add(out, "" if number else "heaviest", f"{name}: {time}, {computing.line_text(row)}")


def _kinds(plan: Plan) -> str:
    """What the memory of the fullest device is for."""
    if len(plan.stages) == 1:
        kinds = plan.stages[0].memory.kinds
    else:
        kinds = max(stages.memory(plan), key=lambda row: row.peak).kinds
    return ", ".join(f"{name} {units.nbytes(size)}" for name, size in kinds.items())


def _comparisons(plan: Plan) -> RenderableType:
    out = table("method", "mesh", "step", "per device", "", right=(2, 3), wide=4)
    own = "pipeline" if plan.pipelined else "this plan"
    shape = (plan.num_stages,) if plan.pipelined else plan.stages[0].mesh_shape
    cells = units.seconds(plan.step_seconds), units.nbytes(peak(plan)), "chosen"
    add(out, f"{own}{' (this plan)' * plan.pipelined}", shape_text(shape, plan.pipelined), *cells, style="bold")
    for row in plan.comparisons:
        step = "" if row.step_seconds is None else units.seconds(row.step_seconds)
        size = "" if row.bytes_per_device is None else units.nbytes(row.bytes_per_device)
        add(out, row.name, shape_text(row.mesh_shape, row.name == "pipeline"), step, size, why_not(plan, row))
    return out


def _cost_of_annotations(plan: Plan) -> list[RenderableType]:
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
    said = f"shardings in the code make it {share} slower than {name}; ignore_annotations=True plans without them"
    return [*_wrapped(said)]


def shape_text(shape: tuple[int, ...], pipelined: bool) -> str:
    """A mesh, such as "4x2", or the stages of a pipeline."""
    if pipelined and not shape:
        return ""
    return f"{shape[0]} stages" if pipelined else "x".join([str(size) for size in shape if size > 1] or ["1"])


def why_not(plan: Plan, row: Comparison) -> str:
    """Why a method was not chosen: by how much it does not fit, or is slower; or why there are no figures."""
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


def _short(remark: str) -> str:
    return remark if len(remark) <= WIDTH - 2 else f"{remark[: WIDTH - 6]} ..."


def _wrapped(said: str) -> list[str]:
    """A line in lines that fit, broken after a semicolon."""
    lines = [""]
    for part in said.split("; "):
        joined = f"{lines[-1]}; {part}" if lines[-1] else part
        if len(joined) <= WIDTH - 2:
            lines[-1] = joined
        else:
            lines[-1] += ";" if lines[-1] else ""
            lines.append(f"  {part}")
    return [line for line in lines if line]
