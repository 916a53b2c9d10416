"""Whether several processes compute what one process computes by the same plan, and what one device computes.

    PYTHONPATH=. python benchmarks/process_correctness.py             what the results lack for this version of JAX
    PYTHONPATH=. python benchmarks/process_correctness.py 2x4 4x1     of these layouts

`process_cases.py` has the cases. The processes of a layout are started once and run its cases in turn; if one hangs or
dies, all are killed, the case counts as failed, and the others are tried in new processes. An error of 1 is what is
allowed: ||a - b|| = 1e-5 * max(||b||, 1e-3 * ||all gradients||) for each leaf in float32, of steps with Adam the first
moment in place of what Adam makes of it. A leaf is put together from the blocks of all processes; of copies of a block
the worst counts. Writes benchmarks/results/process_correctness.json after every group of cases, and
process_correctness.md. Remove a row to run it again. LLVM's optimisations are off on both sides, as in the tests.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import jax

from benchmarks import kept_rows, process_cases
from benchmarks.process_cases import CASES, METHODS, SUBMESHES, Case
from tests.processes import driver

RESULTS = Path(__file__).parent / "results" / "process_correctness.json"
SCRIPT = str(Path(process_cases.__file__))
VERSION = f"jax {jax.__version__}"


def main() -> None:
    """Runs the cases that the results lack."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=", ".join(SUBMESHES))
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--folder", type=Path, help="where the processes leave what they had; removed otherwise")
    options = parser.parse_args()
    unknown = {*options.layouts} - {*SUBMESHES}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: give layouts of {', '.join(SUBMESHES)}")
    with tempfile.TemporaryDirectory() as name:
        for layout in options.layouts or SUBMESHES:
            cases = [case for case in CASES if case.layout == layout and case.method in options.methods]
            run([case for case in cases if case.name not in known()], options.folder or Path(name))


def run(cases: list[Case], folder: Path) -> None:
    """Runs cases of one layout in its processes, then in one, and keeps their rows."""
    if not cases:
        return
    folder.mkdir(parents=True, exist_ok=True)
    processes, devices = cases[0].processes, cases[0].devices
    failed = attempted(cases, folder, processes, devices, [f"{n}.pkl" for n in range(processes)])
    ran = [case for case in cases if case.name not in failed]
    failed |= attempted(ran, folder, 1, processes * devices, ["row.json"])
    for case in cases:
        keep(case, {"failed": failed[case.name]} if case.name in failed else _row(case, folder))


def attempted(cases: list[Case], folder: Path, processes: int, devices: int, files: list[str]) -> dict[str, str]:
    """Runs cases until each has left its files or failed; the failures, by the names of the cases."""
    failed: dict[str, str] = {}
    left = [case for case in cases if not all((folder / case.name / file).exists() for file in files)]
    while left:
        seconds = process_cases.SECONDS + 60.0 * len(left)
        ended = driver.run(SCRIPT, processes, devices, str(folder), *[case.name for case in left], seconds=seconds)
        print(ended[0].text, flush=True)
        for case in left:
            errors = sorted((folder / case.name).glob(f"* of {processes}.error"))
            if errors:
                failed[case.name] = errors[0].read_text()[:2000]
        missing = [case for case in left if not all((folder / case.name / file).exists() for file in files)]
        hung = next((case for case in missing if case.name not in failed), None)
        if hung is None:
            break
        failed[hung.name] = "hung, or a process died: " + " | ".join(f"{one.code}: {one.text[-700:]}" for one in ended)
        left = missing[missing.index(hung) + 1 :]
    return failed


def _row(case: Case, folder: Path) -> dict[str, Any]:
    return json.loads((folder / case.name / "row.json").read_text())


def known() -> dict[str, Any]:
    """The rows that this version of JAX has, without those of cases that failed."""
    return {name: row for name, row in kept_rows.known(RESULTS, VERSION).items() if "error" in row}


def keep(case: Case, row: dict[str, Any]) -> None:
    """Adds a row, and writes the page. Several versions may run at once."""
    with kept_rows.changed(RESULTS, page) as rows:
        rows.setdefault(VERSION, {})[case.name] = row


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The results as a page: for each version a table of methods and layouts."""
    about = (
        "The largest error of any leaf in three consecutive steps, as a share of what is allowed, of several processes "
        "against the step as written on one device; in brackets against one process with as many devices that runs "
        "the same plan. A layout is processes x devices of each. `benchmarks/process_correctness.py` says what is "
        "compared; the model of each cell, its leaves, blocks and meshes are in `process_correctness.json`."
    )
    lines = ["# Several processes against one", "", *textwrap.wrap(about, 118)]
    for version, found in rows.items():
        lines += ["", f"## {version}", "", "| method | " + " | ".join(SUBMESHES) + " |"]
        lines.append("|---|" + "--:|" * len(SUBMESHES))
        for method in METHODS:
            cells = [_cell(found, layout, method) for layout in SUBMESHES]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
        good = [row for row in found.values() if "error" in row]
        lines += ["", *textwrap.wrap(_summary(good, len(found)), 118)]
        lines += [f"\n{name}: {row['failed'][:300]}" for name, row in found.items() if "failed" in row]
    return "\n".join([*lines, "", f"Made {datetime.date.today()}.", ""])


def _cell(found: dict[str, Any], layout: str, method: str) -> str:
    row = next((found[c.name] for c in CASES if (c.layout, c.method) == (layout, method) and c.name in found), None)
    if row is None:
        return ""
    return "failed" if "failed" in row else f"{row['error']:.3f} ({row['alone']:.3f})"


def _summary(good: list[dict[str, Any]], count: int) -> str:
    """What the rows of a version come to."""
    if not good:
        return f"0 of {count} cases ran."
    blocks, leaves = (sum(row[name] for row in good) for name in ("blocks", "leaves"))
    equal = sum(row["alone"] == 0 for row in good)
    return (
        f"{len(good)} of {count} cases ran, of {len(CASES)}: {leaves} leaves in {blocks} blocks. "
        f"{sum(row['error'] > 1 for row in good)} are above 1 against one device, "
        f"{sum(row['alone'] > 1 for row in good)} against one process; {equal} equal one process in every bit."
    )


if __name__ == "__main__":
    sys.exit(main())
