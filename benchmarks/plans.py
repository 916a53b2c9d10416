"""Plans of one case beside each other: under different conditions, by every method, and by two revisions.

`equal_plans`: a plan is a function of the program, the cluster and the options. Each case is planned in processes of
its own: alone (the reference), beside four busy processes, pinned to one core, with another `PYTHONHASHSEED`, and after
ten other plans in the same process. The files that `plan.save` writes are compared.

`pipelines`: predicted seconds of a step for each method on each case; "-" where nothing fits or the batch does not
divide. Auto must be at most the best of them; a row where it is not is marked WORSE, and by how much. How long large
pipelines take to plan is in `planning` ("gpt-39B, pipeline"; Alpa reports 2,393 s for a model of this size on this
cluster, its profiling of stages included).

`planning_against`: seconds of planning drift with the machine by a factor of two from day to day, so that the tables of
two days say little of what changed between them. `python -m benchmarks compare REVISION` plans each case by two
checkouts, one right after the other, and the ratios count.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import planning, workers
from benchmarks.gallery.cases import CASES, PIPELINES
from benchmarks.harness import ROOT, Benchmark, Row, Rows, show, table

EQUAL = (
    "bert-large", "roberta-large", "gpt2-xl", "vit-huge", "xlm-roberta-large", "marian-big", "wav2vec2-large", "unet",
    "albert-xxlarge", "electra-large", "llama-7b-scan", "blenderbot-3b",
)  # fmt: skip
CONDITIONS = ("alone", "beside four busy processes", "on one core", "another hash seed", "after ten other plans")
METHODS = ("DataParallel()", "Zero(3)", "TensorParallel()", "Sharded()", "Pipeline()", "Auto()")
SIDES = ("before", "after")
LARGE = "planning of gpt-39B"
"""A row of before `planning` had its case."""


# -- under different conditions ---------------------------------------------------------------------------------------


def save_plan(name: str, path: str, others: bool = False) -> None:
    """Plans a case in this process and saves the plan."""
    import alpa_lite
    from alpa_lite.models import MODELS

    workers.prepare(8)
    methods = alpa_lite.Zero(1), alpa_lite.Zero(2), alpa_lite.Zero(3)
    before = [(model, method) for model in ("gpt", "vit") for method in methods]
    before += [(model, alpa_lite.Auto()) for model in ("gpt", "bert", "vit", "llama")]
    for model, method in before if others else ():
        step, args = MODELS[model].abstract("tiny", 16)[:2]
        alpa_lite.make_plan(step, *args, cluster=alpa_lite.Cluster.preset("a100"), method=method)
    planning.plan_of(CASES[name]).save(path)


def digest(name: str, condition: str, limit: float) -> str:
    """The digest of the file of a case that is planned under a condition."""
    seed = "77" if condition == "another hash seed" else "0"
    busy = [sys.executable, "-c", "while True: pass"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "plan.json"
        call = f"save_plan({name!r}, {str(path)!r}, {condition == 'after ten other plans'})"
        command = [sys.executable, "-c", f"from benchmarks.plans import save_plan; {call}"]
        if condition == "on one core":
            command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *command]
        for _ in range(4 if condition == "beside four busy processes" else 0):
            stack.callback(subprocess.Popen(busy).kill)
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, timeout=limit, cwd=ROOT)
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def under_conditions(name: str, limit: float = 900) -> Row:
    """The digests of a case under all conditions."""
    return {condition: digest(name, condition, limit) for condition in CONDITIONS}


def conditions_page(rows: Rows) -> list[str]:
    """The digests as Markdown."""
    cells, equal = [], 0
    for name, row in rows.items():
        found = [row.get(condition, "-")[:8] for condition in CONDITIONS]
        same = len(set(found)) == 1
        equal += same
        cells.append([name, *found, "yes" if same else "**no**"])
    lines = table(f"case | {' | '.join(CONDITIONS)} | equal", cells)
    return [*lines, "", f"{equal} of {len(rows)} are equal byte for byte."]


# -- by every method --------------------------------------------------------------------------------------------------


def by_methods(name: str, **options: Any) -> Row:
    """Predicted seconds of every method."""
    from alpa_lite.errors import AlpaLiteError

    seconds: dict[str, float | None] = dict.fromkeys(METHODS)
    chosen, start = "", time.perf_counter()
    for text in METHODS:
        with contextlib.suppress(AlpaLiteError):
            plan = planning.plan_of(PIPELINES[name], planning.method_of(text), verify="off", **options)
            seconds[text], chosen = plan.step_seconds, planning.shown(planning.figures(plan))
    return {
        "seconds": seconds, "chosen": chosen, "verdict": verdict(seconds),
        "planning_seconds": time.perf_counter() - start,
    }  # fmt: skip


def verdict(seconds: Mapping[str, float | None]) -> str:
    """Whether Auto is as fast as the best method, and by how much it is not."""
    auto, best = seconds["Auto()"], min((s for s in seconds.values() if s is not None), default=math.inf)
    if auto is None:
        return "nothing fits" if math.isinf(best) else "WORSE: nothing found"
    return "at most the best" if auto <= best * (1 + 1e-9) else f"WORSE by {auto / best - 1:.2%}"


def methods_page(rows: Rows) -> list[str]:
    """Predicted milliseconds as Markdown."""
    cells = []
    for name, row in ((name, row) for name, row in rows.items() if name in PIPELINES):
        found = [row["seconds"].get(method) for method in METHODS]
        shown = [show(None if s is None else 1e3 * s, ".1f") for s in found]
        cells.append([name, row.get("case", ""), *shown, row["chosen"], row["verdict"]])
    lines = table(f"case | step | {' | '.join(METHODS)} | Auto chose | verdict", cells)
    large = rows.get(LARGE)
    if large is not None:
        lines += [
            "",
            f"Planning {large['case']}: {large['cpu_seconds']:.1f} s CPU, {large['peak_gib']:.1f} GiB; the target is",
            f"30 s. It found {large['chosen']}, predicted at {large['step_seconds']:.1f} s a step and",
            f'{large["bytes_per_device"] / 1e9:.1f} GB a device. `planning` has the case "gpt-39B, no other method".',
        ]
    return lines


# -- by two revisions -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A folder with the library of a revision; a folder is one already."""
    if Path(revision).is_dir():
        yield Path(revision).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkout"
        subprocess.run(["git", "-C", str(ROOT), "worktree", "add", "--detach", str(path), revision], check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "-C", str(ROOT), "worktree", "remove", "--force", str(path)], check=True)


def compared(
    before: str, after: Path, cases: Sequence[str], options: Mapping[str, Any], limit: float | None
) -> Iterator[tuple[str, Row]]:
    """Plans cases by the library of a revision, with some options, and by that of a checkout in turn; yields rows."""
    benchmark = planning.BENCHMARKS[0]
    with checkout(before) as folder:
        for name in benchmark.chosen(cases):
            row: Row = {}
            for side, library, given in zip(SIDES, (folder, after.resolve()), (options, {}), strict=True):
                ((_, found),) = workers.run(benchmark, [name], given, limit=limit, library=library)
                row[side] = {"options": dict(given), "status": found["status"]}
                if "plan" in found:
                    row[side] |= {key: found[key] for key in ("seconds", "cpu_seconds", "load_before", "environment")}
                    row[side]["tracing"] = found["planning_seconds"]["tracing"]
                    row[side]["step_seconds"] = found["plan"]["step_seconds"]
            yield name, {"environment": row["after"].get("environment", {})} | row


def ratios(row: Row) -> tuple[float, float, float] | None:
    """CPU seconds, seconds beyond tracing and the predicted step of the latter over the former."""
    one, other = (row[side] for side in SIDES)
    if "seconds" not in one or "seconds" not in other:
        return None
    beyond = [side["seconds"] - side["tracing"] for side in (one, other)]
    cpu, step = (other[key] / one[key] for key in ("cpu_seconds", "step_seconds"))
    return cpu, beyond[1] / beyond[0], step


def against_page(rows: Rows) -> list[str]:
    """The ratios as Markdown."""
    rows = {name: rows[name] for name in CASES if name in rows}
    cells, found = [], {name: values for name, row in rows.items() if (values := ratios(row))}
    for name, row in rows.items():
        one, other = (row[side] for side in SIDES)
        if name not in found:
            cells.append([name, one["status"], other["status"], *[""] * 5])
            continue
        cpu, beyond, step = found[name]
        cells.append([
            name, show(one["cpu_seconds"], ".1f"), show(other["cpu_seconds"], ".1f"), show(cpu), show(beyond),
            show(one["step_seconds"], ".4g"), show(other["step_seconds"], ".4g"), show(step, ".4f"),
        ])  # fmt: skip
    head = "case | CPU s before | after | after / before | beyond tracing | step s before | after | after / before"
    lines = table(head, cells)
    titles = "CPU seconds", "seconds beyond tracing", "predicted steps"
    for number, title in enumerate(titles if found else ()):
        values = [of_case[number] for of_case in found.values()]
        lines += [
            "", f"Ratios of {title} of {len(values)} cases: geometric mean {statistics.geometric_mean(values):.4f}, "
            f"median {statistics.median(values):.3f}, most {max(values):.3f}."
        ]  # fmt: skip
    commits = {tuple(row[side].get("environment", {}).get("commit", "-") for side in SIDES) for row in rows.values()}
    return [*lines, "", "Of the commits " + "; ".join(f"{one} and {other}" for one, other in sorted(commits)) + "."]


def refused(case: str) -> Row:
    """Says how revisions are compared."""
    raise ValueError("python -m benchmarks compare REVISION plans cases by two revisions")


AGAINST = Benchmark(
    "planning_against", "Planning by two revisions",
    "Each case planned by two checkouts, one right after the other, in fresh processes. Planning seconds are those of "
    "one machine at one time, of which only ratios say something; steps are predicted, each by the prices of its "
    "checkout.",
    lambda: CASES, refused, against_page, sources=planning.BENCHMARKS[0].sources,
)  # fmt: skip
BENCHMARKS = (
    Benchmark(
        "equal_plans", "Plans under different conditions", "Each cell is the start of the SHA-256 of the saved plan.",
        lambda: EQUAL, under_conditions, conditions_page, limit=5 * 900, sources=AGAINST.sources,
    ),
    Benchmark(
        "pipelines", "Pipelines", "Predicted milliseconds of a step by every method; Auto must be at most the best.",
        lambda: PIPELINES, by_methods, methods_page, sources=AGAINST.sources,
    ),
    AGAINST,
)  # fmt: skip
