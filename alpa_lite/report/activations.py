"""The activations that wait for the backward pass, as text that can be compared line by line.

A line holds where an activation is made, by which operation, its type, its layout, and the bytes of one device's block.
Layers that differ in numbers alone are one line. Lines are in the order of their texts, not of the program, so that
two plans of one step differ where their activations do.
"""

from __future__ import annotations

import re

from alpa_lite.figures import Held
from alpa_lite.records import PlanRecord as Plan
from alpa_lite.report import grouping, units

_LINE = re.compile(r"(\S+:\d+ \(\S+\))?\s*(.*)")


def render(plan: Plan) -> str:
    """The activations of every stage with their sums; of a pipeline, those of one micro-batch."""
    parts = []
    for number, stage in enumerate(plan.stages):
        rows = sorted(_row(same) for same in _alike(stage.held))
        size = sum(row.bytes * row.count for row in stage.held)
        of = f"stage {number}: " if len(plan.stages) > 1 else ""
        each = " of each micro-batch" if plan.num_microbatches > 1 else ""
        count = sum(row.count for row in stage.held)
        parts.append(f"{of}{count} activations{each} wait for the backward pass, {size:,} bytes per device")
        parts += [f"  {row}" for row in rows]
    return "\n".join(parts)


def _alike(rows: tuple[Held, ...]) -> list[list[Held]]:
    """Activations that differ in the numbers of their scopes alone."""
    found: dict[tuple, list[Held]] = {}
    for row in rows:
        line, scope = place(row.where)
        key = line, re.sub(r"\d+", "#", scope), row.operation, row.shape, row.dtype, row.spec, row.bytes
        found.setdefault(key, []).append(row)
    return list(found.values())


def place(where: str) -> tuple[str, str]:
    """The source line, and the name scope, of where something is."""
    match = _LINE.fullmatch(where)
    return (match[1] or "", match[2]) if match else ("", where)


def _row(same: list[Held]) -> str:
    first, count = same[0], sum(row.count for row in same)
    line, _ = place(first.where)
    scope = grouping.template([place(row.where)[1] for row in same])
    times = f" x {count}" if count > 1 else ""
    kind = units.type_name(first.dtype, first.shape)
    return (
        f"{line} {scope} | {first.operation}{times} | {kind} {units.spec(first.spec)} | {first.bytes:,} bytes".strip()
    )
