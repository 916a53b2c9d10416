"""Planning of models by two checkouts in turn: how a change alters the seconds of planning, and the plans.

Seconds of planning drift with the machine by a factor of two from day to day, so that the tables of two days say little
of what changed between them. Here each case is planned by both checkouts, one right after the other, in fresh
processes, and the ratios count. Beyond tracing, which is JAX's own, is the rest of planning.

    python benchmarks/planning_against.py ../before                 every case, against the checkout in ../before
    python benchmarks/planning_against.py ../before gpt2-xl unet    the named cases; others keep their results
    python benchmarks/planning_against.py ../before --of toy        those of one kind: issue, toy, own, ...
    python benchmarks/planning_against.py ../before --after ../after --before-options '{"search_time_limit": 600}' \\
        --results search_quality

writes benchmarks/results/planning_against.json and planning_against.md, or files of the given name. A checkout is made
by `git worktree add ../before COMMIT`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import cases_apart
import kept_rows
from planning import KINDS, prepare

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE / "benchmarks" / "results"
SIDES = ("before", "after")


def main() -> None:
    """Plans cases by both checkouts and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another checkout")
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--after", type=Path, default=HERE, help="another checkout than this one")
    parser.add_argument("--before-options", default="{}", metavar="JSON", help="options of make_plan in the former")
    parser.add_argument("--of", choices=KINDS)
    parser.add_argument("--results", default="planning_against", help="the name of the files")
    parser.add_argument("--limit", type=float, default=900, help="seconds of each planning")
    parser.add_argument("--memory", type=float, default=16, help="GiB of each planning")
    arguments = parser.parse_args()
    prepare()
    from cases import CASES

    path = RESULTS / f"{arguments.results}.json"
    given = arguments.before_options, "{}"
    for name in arguments.cases or [name for name, case in CASES.items() if arguments.of in (None, case.of)]:
        row = {}
        for side, checkout, options in zip(SIDES, (arguments.before, arguments.after), given, strict=True):
            row[side] = planned(name, checkout.resolve(), options, arguments.limit, arguments.memory)
            print(name, side, json.dumps(row[side]), flush=True)
        with kept_rows.changed(path, table) as rows:
            rows[name] = row


def planned(name: str, checkout: Path, options: str, limit: float, memory: float) -> dict[str, Any]:
    """Plans a case of this checkout by the library of another one, and returns its seconds and the predicted step."""
    os.environ["PYTHONPATH"] = str(checkout)  # comes before what is installed
    row = cases_apart.run(str(HERE / "benchmarks" / "planning.py"), [name, "--options", options], limit, memory)
    out = {"options": json.loads(options), "status": row["status"]}
    if "plan" in row:
        out |= {
            "seconds": row["seconds"],
            "cpu_seconds": row["cpu_seconds"],
            "tracing": row["planning_seconds"]["tracing"],
            "step_seconds": row["plan"]["step_seconds"],
            "load": row["load_before"],
            **{key: row["environment"][key] for key in ("date", "jax", "commit")},
        }
    return out


def table(rows: dict[str, Any]) -> str:
    """The results as Markdown."""
    from cases import CASES

    options = sorted({str(row["before"]["options"]) for row in rows.values()} - {"{}"})
    lines = [
        "# Planning by two checkouts",
        "",
        "`python benchmarks/planning_against.py`: each case planned by two checkouts, one right after the other, in",
        "fresh processes. Planning seconds are those of one machine at one time, of which only ratios say something;",
        "steps are predicted, each by the prices of its checkout.",
        *([f"Options of the former: {', '.join(options)}."] if options else []),
        "",
        "| case | CPU s before | after | after / before | beyond tracing | step s before | after | after / before |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    ratios: dict[str, list[float]] = {"CPU seconds": [], "seconds beyond tracing": [], "predicted steps": []}
    for name in (name for name in CASES if name in rows):
        one, other = (rows[name][side] for side in SIDES)
        if "seconds" not in one or "seconds" not in other:
            lines.append(f"| {name} | {one['status']} | {other['status']} |" + " |" * 5)
            continue
        found = (
            other["cpu_seconds"] / one["cpu_seconds"],
            (other["seconds"] - other["tracing"]) / (one["seconds"] - one["tracing"]),
            other["step_seconds"] / one["step_seconds"],
        )
        for values, ratio in zip(ratios.values(), found, strict=True):
            values.append(ratio)
        lines.append(
            f"| {name} | {one['cpu_seconds']:.1f} | {other['cpu_seconds']:.1f} | {found[0]:.2f} | {found[1]:.2f} "
            f"| {one['step_seconds']:.4g} | {other['step_seconds']:.4g} | {found[2]:.4f} |"
        )
    for name, values in ratios.items():
        if values:
            mean = statistics.geometric_mean(values)
            lines += ["", f"Ratios of {name} of {len(values)} cases: geometric mean {mean:.4f}, "]
            lines[-1] += f"median {statistics.median(values):.3f}, most {max(values):.3f}."
    when = sorted({(row["after"]["date"], row["after"]["jax"]) for row in rows.values() if "date" in row["after"]})
    pairs = sorted({(row["before"].get("commit", ""), row["after"].get("commit", "")) for row in rows.values()})
    lines += ["", "Measured " + "; ".join(f"{date} with JAX {jax}" for date, jax in when) + ", of the commits "]
    lines[-1] += "; ".join(f"{before} and {after}" for before, after in pairs) + "."
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
