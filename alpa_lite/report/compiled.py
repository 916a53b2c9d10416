"""What a target's compiler made of a plan, as text: collectives and memory beside the plan's (`alpa-lite verify`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from alpa_lite.report import units
from alpa_lite.report.tables import add, section, table

_MAX_LINES = 20


def renderable(found: Mapping[str, Any]) -> Group:
    """The result of `verifying.verify` as a Rich renderable."""
    head = Text(f"{found['step']} compiled for {found['devices']} x {found['device']}", style="bold")
    seconds = found["seconds"]["compiling"]
    head.append(
        f" ({found['target']}, {found['compiler']}, JAX {found['jax']}) in {units.seconds(seconds)}", style="not bold"
    )
    parts: list[RenderableType] = [head, section("Collectives of one run of each executable", _collectives(found))]
    for heading, key in (("Compiler rewrites", "rewrites"), ("Differences", "differences")):
        if found[key]:
            parts.append(section(heading, *_some(found[key])))
    if found["memory"]:
        parts.append(section("Memory per device", _memory(found["memory"])))
    parts.append(section("Verdict", *_verdict(found)))
    return Group(*parts)


def _collectives(found: Mapping[str, Any]) -> RenderableType:
    rows = found["collectives"]
    if not rows:
        return Text("none planned, and none to compare with")
    out = table("collective", "axes", "payload", "planned", "found", right=(2, 3, 4))
    for row in rows:
        add(out, row["kind"], row["axes"], units.nbytes(row["bytes"]), str(row["planned"]), str(row["found"]))
    return out


def _memory(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    out = table("executable", "predicted", "compiler", "ratio", "arguments", "temporaries", "code", right=range(1, 7))
    for row in rows:
        ratio = f"{row['predicted'] / row['compiler']:.2f}" if row["compiler"] else "-"
        sizes = (units.nbytes(row[name]) for name in ("predicted", "compiler"))
        rest = (units.nbytes(row[name]) for name in ("arguments", "temporaries", "code"))
        add(out, row["executable"], *sizes, ratio, *rest)
    return out


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
        what, end = ("temporaries of ", ".") if found["fits"] is None else ("", ": more than 15 % apart.")
        lines.append(
            f"Memory: the plan predicts {units.exact_bytes(worst['predicted'])} and the compiler needs "
            f"{units.exact_bytes(worst['compiler'])} for {what}{worst['executable']}"
            f"{', within 15 %.' if found['fits'] else end}"
        )
    return lines


def _some(lines: Sequence[str]) -> list[str]:
    rest = len(lines) - _MAX_LINES
    return [*lines[:_MAX_LINES], *([f"and {rest} more"] if rest > 0 else [])]
