"""A plan as text of a hundred columns: `str(plan)`, and in colour the output of `alpa-lite show`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from alpa_lite.records import Candidate, Replicated, Solver
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import computing, stages, units
from alpa_lite.report.tables import (
    WIDTH,
    add,
    plain,
    section,
    table,
)

_MAX_REPLICATED = 10
_MAX_CANDIDATES = 16


def render(plan: Plan) -> str:
    """The plan as plain text, at most 100 columns wide."""
    return plain(renderable(plan))


def renderable(plan: Plan) -> Group:
    """The plan as a Rich renderable."""
    parts: list[RenderableType] = [header(plan), *stages.overview(plan), *stages.sections(plan)]
    heavy = computing.heaviest(plan)
    if heavy:
        parts.append(
            section(
                "Where the time goes: operations and the collectives that they wait for, per device",
                f"bound by {computing.bounds_text(heavy)}",
                computing.renderable(heavy),
            )
        )
    whole = stages.replicated(plan)
    if whole:
        parts.append(
            section("Not distributed: computed whole on every device, or left to the compiler", _replicated(whole))
        )
    if plan.candidates:
        parts.append(section("Plans compared", _candidates(plan)))
    parts.append(section("Solver", *_solver(plan)))
    remarks = (("Checked", plan.verification), ("Compiler rewrites", plan.rewrites), ("Notes", plan.notes))
    parts += [section(heading, *lines) for heading, lines in remarks if lines]
    return Group(*parts)


def overview(plan: Plan) -> Group:
    """The beginning of `renderable`: where the time goes, and the memory; for a pipeline also stages and schedule."""
    return Group(header(plan), *stages.overview(plan))


def header(plan: Plan) -> RenderableType:
    """The first two lines of a plan: method and cluster; devices, stages, micro-batches and schedule."""
    head = Text("Plan ", style="bold")
    head.append(plan.method, style="bold cyan")
    head.append(f" for {plan.cluster}", style="default not bold")
    whole = plan.cluster.num_devices
    used = f"{plan.num_devices} of {whole}" if plan.num_devices < whole else f"{plan.num_devices}"
    facts = [f"{used} device{'s' if whole != 1 else ''}"]
    if len(plan.stages) == 1:
        facts.append(f"mesh {stages.meshes(plan)}")
    number = f"{plan.num_stages} stage{'s' if plan.num_stages != 1 else ''}"
    if plan.division.virtual > 1:
        number += f" on {len(plan.division.first_devices)} submeshes"
    facts.append(number)
    facts.append(f"{plan.num_microbatches} micro-batch{'es' if plan.num_microbatches != 1 else ''}")
    if plan.division.token_slices:
        facts.append(f"{len(plan.division.token_slices)} slices of the sequence")
    if plan.schedule != "none":
        facts.append(f"schedule {plan.schedule}")
    facts.append(f"fingerprint {plan.fingerprint[:12]}")
    return Group(head, *map(Text, _filled(f"{facts[0]},", facts[1:])))


def _replicated(rows: Sequence[Replicated]) -> RenderableType:
    out = table("operation", "", "size", "time", "reason and place", right=(1, 2, 3), wide=4)
    for row in rows[:_MAX_REPLICATED]:
        count = f"x {row.count}" if row.count > 1 else ""
        cells = (count, units.nbytes(row.bytes), units.seconds(row.seconds), f"{row.reason}; {row.where}")
        add(out, f"{row.name}", *cells)
    rest = rows[_MAX_REPLICATED:]
    if rest:
        size, seconds = sum(r.bytes * r.count for r in rest), sum(r.seconds for r in rest)
        add(
            out, "smaller operations", f"x {sum(r.count for r in rest)}", units.nbytes(size), units.seconds(seconds), ""
        )
    return out


def _candidates(plan: Plan) -> RenderableType:
    """The chosen plan first, then by seconds. Pipelines are compared by the estimates of the stage search."""
    out = table("plan", "mesh" if plan.solver.model == "step" else "stages", "step", "memory", "", right=(2, 3), wide=0)
    order = sorted(plan.candidates, key=lambda c: (c.status != "chosen", c.step_seconds is None, c.step_seconds or 0.0))
    chosen = order[0].step_seconds if order[0].status == "chosen" else None
    best = plan.step_seconds if chosen is None else chosen
    order = list(dict.fromkeys(order))
    for candidate in order[:_MAX_CANDIDATES]:
        step = "" if candidate.step_seconds is None else units.seconds(candidate.step_seconds)
        memory = "" if candidate.bytes_per_device is None else units.nbytes(candidate.bytes_per_device)
        shape = "x".join([str(size) for size in candidate.mesh_shape if size > 1] or ["1"])
        style = "bold" if candidate.status == "chosen" else ""
        add(out, f"{candidate.method}", shape, step, memory, _status(candidate, best), style=style)
    if len(order) > _MAX_CANDIDATES:
        add(out, f"and {len(order) - _MAX_CANDIDATES} more", "", "", "", "")
    return out


_STATUS = {"cutoff": "not finished: cannot be faster", "optimal": "slower", "met": "not faster"}
_EQUAL = 1e-6  # relative difference of seconds that is rounding


def _status(candidate: Candidate, best: float) -> str:
    """The status, and by how much the candidate is slower, or faster, if that is known.

    A pipeline that the stage search met may be estimated faster than the one that was planned: it was priced at costs
    that are scaled from another number of micro-batches, which the chosen one, priced itself, turned out to exceed.
    """
    status, seconds = _STATUS.get(candidate.status, candidate.status), candidate.step_seconds
    if candidate.status in ("chosen", "cutoff", "infeasible") or seconds is None or best <= 0:
        return status
    if abs(seconds - best) <= _EQUAL * best:
        return "equally fast"
    if seconds < best:
        return f"faster by {units.percent(best - seconds, best)} in a rough estimate, not priced itself"
    if candidate.status == "met":
        return f"slower by {units.percent(seconds - best, best)} when its search stopped"
    return f"{status} by {units.percent(seconds - best, best)}"


def gap(solver: Solver) -> str:
    """How far the choice may be from the best one, such as "gap 0.4 %"."""
    return "no gap" if solver.gap == 0 else "gap < 0.01 %" if solver.gap < 1e-4 else f"gap {100 * solver.gap:.2g} %"


def _solver(plan: Plan) -> list[str]:
    solver = plan.solver
    bounds = f"objective {units.seconds(solver.objective)}", f"lower bound {units.seconds(solver.bound)}"
    costs = *bounds, gap(solver)
    spent = f"{solver.work:.1e} cells visited"
    if solver.status == "replayed":
        costs, effort = costs[:1], "nothing was searched"
    elif solver.status == "fixed":
        effort = "nothing to solve"
    elif solver.variables:
        effort = f"{solver.variables:,} variables, {spent}"
    elif solver.model == "layers":
        effort = f"{spent}; the stages needed no integer program"
    else:
        effort = f"{'proven' if solver.status == 'optimal' else 'bounded'} by dual bounds, {spent} (no LP needed)"
    lines = _filled(f"{solver.status}:", [*costs, effort])
    if solver.model == "layers":
        lines += _filled(
            "objective and bound are sums over layers, by which stages are chosen;",
            [f"the simulated step takes {units.seconds(plan.step_seconds)} and is not comparable with the bound"],
        )
    if plan.planning_seconds:
        parts = [f"{name} {units.seconds(value)}" for name, value in plan.planning_seconds.items()]
        lines += _filled(f"planned in {units.seconds(sum(plan.planning_seconds.values()))}:", parts)
    return lines


def _filled(head: str, parts: Sequence[str]) -> list[str]:
    """Parts joined by commas, in lines that break only between parts."""
    lines = [head]
    for number, part in enumerate(parts):
        piece = part + ("," if number + 1 < len(parts) else "")
        if len(lines[-1]) + 1 + len(piece) <= WIDTH - 2:  # the indent of a section
            lines[-1] += f" {piece}"
        else:
            lines.append(f"  {piece}")
    return lines
