"""Planning of models from outside by two checkouts in turn: what a change made quicker, on whatever machine.

Seconds of planning drift with the machine by a factor of two from day to day, so that the tables of two days say little
of what changed between them. Here each case of `outside_models.py` is planned by both checkouts, one right after the
other, in fresh processes, and what counts are the ratios. Beyond tracing, which is JAX's own, is the rest of planning.

    python benchmarks/outside_against.py ../before                 every case, against the checkout in ../before
    python benchmarks/outside_against.py ../before gpt2-xl unet    the named cases; others keep their results
    python benchmarks/outside_against.py ../before --of toy        those of one kind: issue, published, unusual or toy

writes benchmarks/results/outside_against.json and outside_against.md. A checkout is made by
`git worktree add ../before COMMIT`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import cases_apart
import kept_rows
from outside_models import KINDS, prepare

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE / "benchmarks" / "results"
SIDES = ("before", "after")


def main() -> None:
    """Plans cases by both checkouts and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--of", choices=KINDS)
    parser.add_argument("--limit", type=float, default=400, help="seconds of each planning")
    parser.add_argument("--memory", type=float, default=16, help="GiB of each planning")
    arguments = parser.parse_args()
    prepare()
    from outside_unusual import CASES

    path = RESULTS / "outside_against.json"
    for name in arguments.cases or [name for name, case in CASES.items() if arguments.of in (None, case.of)]:
        row = {}
        for side, checkout in zip(SIDES, (arguments.before.resolve(), HERE), strict=True):
            row[side] = planned(name, checkout, arguments.limit, arguments.memory)
            print(name, side, json.dumps(row[side]), flush=True)
        with kept_rows.changed(path, table) as rows:
            rows[name] = row


def planned(name: str, checkout: Path, limit: float, memory: float) -> dict[str, Any]:
    """What a checkout took to plan a case, and the step that it predicts."""
    os.environ["PYTHONPATH"] = str(checkout)  # comes before what is installed
    row = cases_apart.run(str(checkout / "benchmarks" / "outside_models.py"), [name], limit, memory)
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    out = {"commit": commit.stdout.strip(), "status": row["status"]}
    if "plan" in row:
        out |= {
            "seconds": row["seconds"],
            "cpu_seconds": row["cpu_seconds"],
            "tracing": row["planning_seconds"]["tracing"],
            "step_seconds": row["plan"]["step_seconds"],
            "load": row["load_before"],
            **{key: row["environment"][key] for key in ("date", "jax")},
        }
    return out


def table(rows: dict[str, Any]) -> str:
    """The results as Markdown."""
    from outside_unusual import CASES

    lines = [
        "# Models from outside, by two checkouts",
        "",
        "`python benchmarks/outside_against.py`: each case planned by two checkouts, one right after the other, in",
        "fresh processes. Seconds are those of one machine at one time; ratios are what is compared. Steps are",
        "predicted; the search is limited by wall seconds, so that a quicker one may find more.",
        "",
        "| case | before s | after s | after / before | CPU | beyond tracing | step before s | step after s |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    ratios: dict[str, list[float]] = {"planning": [], "CPU seconds": [], "beyond tracing": []}
    for name in (name for name in CASES if name in rows):
        row = rows[name]
        one, other = (row[side] for side in SIDES)
        if "seconds" not in one or "seconds" not in other:
            lines.append(f"| {name} | {one['status']} | {other['status']} |" + " |" * 5)
            continue
        found = (
            other["seconds"] / one["seconds"],
            other["cpu_seconds"] / one["cpu_seconds"],
            (other["seconds"] - other["tracing"]) / (one["seconds"] - one["tracing"]),
        )
        for values, ratio in zip(ratios.values(), found, strict=True):
            values.append(ratio)
        shown = " | ".join(f"{ratio:.2f}" for ratio in found)
        lines.append(
            f"| {name} | {one['seconds']:.1f} | {other['seconds']:.1f} | {shown} | {one['step_seconds']:.4g} "
            f"| {other['step_seconds']:.4g} |"
        )
    said = [f"{what} {statistics.median(values):.2f}" for what, values in ratios.items() if values]
    if said:
        lines += ["", f"Medians of the ratios of {len(ratios['planning'])} cases: {', '.join(said)}."]
    when = sorted({(row["after"]["date"], row["after"]["jax"]) for row in rows.values() if "date" in row["after"]})
    pairs = sorted({(row["before"]["commit"], row["after"]["commit"]) for row in rows.values()})
    lines += ["", "Measured " + "; ".join(f"{date} with JAX {jax}" for date, jax in when) + ", of the commits "]
    lines[-1] += "; ".join(f"{before} and {after}" for before, after in pairs) + "."
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
