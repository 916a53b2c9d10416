"""The program of a target's compiler beside the plan, as text: collectives and memory (`alpa-lite verify`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from rich.console import Group
from rich.text import Text

from alpa_lite.report import console, units
from alpa_lite.report.tables import Block, Column, Section, Table

_MAX_LINES = 20


def renderable(found: Mapping[str, Any]) -> Group:
    """The result of `verifying.verify` as a Rich renderable."""
    head = Text(f"{found['step']} compiled for {found['devices']} x {found['device']}", style="bold")
    seconds = found["seconds"]["compiling"]
    head.append(
        f" ({found['target']}, {found['compiler']}, JAX {found['jax']}) in {units.seconds(seconds)}", style="not bold"
    )
    parts: dict[str, Sequence[Block]] = {
        "Collectives of one run of each executable": [_collectives(found["collectives"])],
        "Compiler rewrites": units.first(found["rewrites"], _MAX_LINES),
        "Differences": units.first(found["differences"], _MAX_LINES),
        "Memory per device": [_memory(found["memory"])] if found["memory"] else [],
        "Verdict": _verdict(found),
    }
    return console.render([head, *(Section("", heading, tuple(body)) for heading, body in parts.items() if body)])


def _collectives(rows: Sequence[Mapping[str, Any]]) -> Block:
    if not rows:
        return "none planned, and none to compare with"
    columns = (
        Column("collective", itemgetter("kind")),
        Column("axes", itemgetter("axes")),
        Column("payload", itemgetter("bytes"), units.nbytes),
        Column("planned", itemgetter("planned"), str),
        Column("found", itemgetter("found"), str),
    )
    return Table.of(columns, rows)


def _memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    def ratio(row: Mapping[str, Any]) -> str:
        return f"{row['predicted'] / row['compiler']:.2f}" if row["compiler"] else "-"

    names = "predicted", "compiler", "arguments", "temporaries", "code"
    sizes = [Column(name, itemgetter(name), units.nbytes) for name in names]
    executable = Column("executable", itemgetter("executable"))
    return Table.of((executable, *sizes[:2], Column("ratio", ratio, str), *sizes[2:]), rows)


def _verdict(found: Mapping[str, Any]) -> list[str]:
    """In words: whether the program communicates as planned, and whether the memory was predicted."""
    lines = []
    if found["communicates"]:
        rewritten = ", apart from the listed rewrites" if found["rewrites"] else ""
        lines.append(f"The compiled program has the planned collectives{rewritten}.")
    else:
        lines.append("The compiled program does not communicate as planned: see the differences.")
    if not found["memory"]:
        lines.append("The compiler says nothing about memory.")
    else:
        worst = max(found["memory"], key=lambda row: row["compiler"])
        part, end = ("temporaries of ", ".") if found["fits"] is None else ("", ": more than 15 % apart.")
        lines.append(
            f"Memory: the plan predicts {units.exact_bytes(worst['predicted'])} and the compiler needs "
            f"{units.exact_bytes(worst['compiler'])} for {part}{worst['executable']}"
            f"{', within 15 %.' if found['fits'] else end}"
        )
    return lines
