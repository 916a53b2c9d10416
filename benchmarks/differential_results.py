"""Counts of the differential test, kept over its runs, and the page that shows them."""

from __future__ import annotations

import collections
import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"


@dataclass
class Counts:
    """Of programs: by method, by kind of line, by refusal; failures with their scripts."""

    programs: collections.Counter[str] = field(default_factory=collections.Counter)
    leaves: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)


def keep(counts: Counts, folder: Path) -> None:
    """Adds counts to the results, and writes the page."""
    path = folder / "differential.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    version = known.setdefault(f"jax {jax.__version__}", {})
    for name in ("programs", "leaves", "refused", "kinds", "refusals"):
        total = collections.Counter(version.get(name, {})) + getattr(counts, name)
        version[name] = dict(sorted(total.items()))
    version["failing programs"] = version.get("failing programs", 0) + len(counts.failures)
    version["date"] = datetime.date.today().isoformat()
    path.write_text(json.dumps(known, indent=1) + "\n")
    (folder / "differential.md").write_text(page(known))


def page(known: Mapping[str, Any]) -> str:
    """The results as a page."""
    lines = [
        "# Random programs against plain `jit`",
        "",
        "`benchmarks/differential.py` says what is compared, and how.",
        "",
    ]
    for name, version in known.items():
        if name == "faults":
            continue
        total = {key: sum(version[key].values()) for key in ("programs", "leaves", "refused")}
        lines += [
            f"## {name}",
            "",
            f"{total['programs']} programs until {version['date']}, {total['refused']} of them refused with a reason; "
            f"{total['leaves']} compared leaves; {version['failing programs']} programs failed, as listed below.",
            "",
            "| method | programs | refused | leaves |",
            "|---|--:|--:|--:|",
        ]
        for method, count in version["programs"].items():
            lines.append(
                f"| {method} | {count} | {version['refused'].get(method, 0)} | {version['leaves'].get(method, 0)} |"
            )
        kinds = ", ".join(f"{kind} {count}" for kind, count in version["kinds"].items())
        lines += ["", f"Lines by kind: {kinds}.", ""]
    lines += ["## Faults", "", "| found by seed | what | now |", "|--:|---|---|"]
    lines += [f"| {fault['seed']} | {fault['what']} | {fault['now']} |" for fault in known.get("faults", ())]
    return "\n".join(lines) + "\n"
