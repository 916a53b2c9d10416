"""Planning of models: how many CPU seconds it takes, and how good the plans are.

CPU seconds are those of `make_plan` alone, verification included; they grow by up to a half while other processes use
the other half of a core. MFU is predicted: FLOPs of the step's products over those that the devices could compute in
the predicted step. The best textbook method is the fastest of those that fit, with as many micro-batches as suit it;
Auto must not be slower. Textbook methods share one trace, and are searched, not lowered: their operations are fixed, so
that each is one integer program of few choices for a number of micro-batches.

    python -m benchmarks run planning toy- --part row      some cases, without the textbook methods
"""

from __future__ import annotations

import collections
import contextlib
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gallery
from benchmarks import workers
from benchmarks.harness import ROOT, Benchmark, Row, Rows
from gallery import Case

GIB = 2**30
CASES = {name: case for name, case in gallery.find("outside").items() if case.published}
KINDS = ("issue", "published", "unusual", "toy", "own")
TEXTBOOK = ("DataParallel()", "Zero(1)", "Zero(2)", "Zero(3)", "TensorParallel()")


def cluster_of(case: Case) -> Any:
    """The cluster of a case."""
    import alpa_lite

    on, _, nodes = case.on.partition(" x ")
    base, _, slice_ = on.partition(":")
    if base == "cpu":
        return alpa_lite.Cluster.local()
    more: dict[str, Any] = {"topology": tuple(map(int, slice_.split("x")))} if slice_ else {}
    return alpa_lite.Cluster.preset(base, nodes=int(nodes or 1), **more)


def plan_of(case: Case, method: str = "", built: Any = None, **options: Any) -> Any:
    """The plan of a case, of a built step if it is given, by its own method or by that of a text, such as "Zero(3)"."""
    import alpa_lite

    fun, args = built or case.plan()
    own = eval(method or case.method, dict(vars(alpa_lite)))
    return alpa_lite.make_plan(fun, *args, cluster=cluster_of(case), **{"method": own, **case.options, **options})


def measure(name: str, **options: Any) -> Row:
    """Plans a case; the cost of planning, and figures of the plan."""
    case = CASES[name]
    built = case.plan()
    start, cpu = time.perf_counter(), time.process_time()
    plan = plan_of(case, built=built, **options)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "planning_seconds": dict(plan.planning_seconds),
        "plan": figures(plan),
        "notes": list(plan.notes),
    }


def figures(plan: Any) -> Row:
    """The figures of a plan."""
    possible = plan.step_seconds * plan.num_devices * plan.products.peak
    return {
        "step_seconds": plan.step_seconds,
        "mfu": plan.products.flops / possible if possible else 0.0,
        "stages": len(plan.stages),
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule if plan.is_pipelined else "",
        "meshes": ["x".join(map(str, stage.mesh_shape)) for stage in plan.stages][:4],
        "gib_per_device": max(stage.memory.total for stage in plan.stages) / GIB,
        "bound": plan.solver.bound,
        "status": plan.solver.status,
    }


def textbook(name: str, effort: str = "normal", **_: Any) -> dict[str, Any]:
    """The seconds a step of every textbook method, or why there are none; the step is traced once."""
    import alpa_lite
    from alpa_lite import _jax, compiler
    from alpa_lite.api import make_options
    from alpa_lite.compilation.request import PlanRequest, Step
    from alpa_lite.compilation.runner import passes
    from alpa_lite.errors import AlpaLiteError
    from alpa_lite.passes import factors
    from alpa_lite.passes.search.planner import search_plan
    from alpa_lite.passes.sharding import wishes
    from alpa_lite.plan.pins import NO_PINS
    from alpa_lite.processes.effects import reduced_gc

    case = CASES[name]
    fun, args = case.plan()
    cluster = cluster_of(case)
    checked = make_options({**case.options, "cluster": cluster})
    trace = compiler.tracer(fun, args, {}, checked, NO_PINS, cluster.platform)
    found: dict[str, Any] = {}
    with reduced_gc, _jax.clear_mesh_context():
        traced = trace()
        step = Step(traced, factors.rules_of(traced.graph.ops(), traced.graph.values))
        for text in TEXTBOOK:
            method = eval(text, dict(vars(alpa_lite)))
            options = replace(checked, method=method, effort=effort)
            try:
                wished = wishes.collect_wishes(traced, method, cluster.num_devices)
                with passes("textbook", None) as run:
                    asked = replace(PlanRequest(checked, cluster, trace), options=options, wishes=wished)
                    found[text] = search_plan(run, step, asked)[0].seconds
            except AlpaLiteError as error:
                found[text] = f"{type(error).__name__}: {str(error)[:120]}"
    return found


def best_textbook(row: Row) -> tuple[str, float] | None:
    """The fastest textbook method that fits, and its seconds."""
    methods = row.get("textbook")
    fits = [(value, name) for name, value in methods.items() if isinstance(value, float)] if methods else []
    seconds, name = min(fits, default=(0.0, ""))
    return (name, seconds) if fits else None


def shown(plan: Row) -> str:
    """A plan in a few words, of its figures."""
    words = plan["meshes"][0] if plan["stages"] == 1 else f"{plan['stages']} stages, {plan['schedule']}"
    return words + (f", {plan['microbatches']} micro-batches" if plan["microbatches"] > 1 else "")


def view(rows: Rows) -> Row:
    """The rows by case, the best textbook plans and how Auto compares with them, and where seconds go."""
    planned = {name: rows[name] for name in CASES if name in rows}
    best = {name: found for name, row in planned.items() if (found := best_textbook(row))}
    ratios = {name: planned[name]["plan"]["step_seconds"] / seconds for name, (_, seconds) in best.items()}
    slower = [name for name, ratio in ratios.items() if CASES[name].method == "Auto()" and ratio > 1 + 1e-4]
    seconds = {
        kind: [row["cpu_seconds"] for name, row in planned.items() if kind == "all" or kind in CASES[name].tags]
        for kind in (*KINDS, "all")
    }
    sums: collections.Counter[str] = collections.Counter()
    for row in planned.values():
        sums.update(row["planning_seconds"])
    shares = sorted(((value / sums.total(), part) for part, value in sums.items()), reverse=True)
    known = {"specs": CASES, "planned": planned, "best": best, "ratios": ratios, "slower": slower}
    return known | {"cpu_seconds": seconds, "shares": shares, "shown": shown}


# -- two revisions ----------------------------------------------------------------------------------------------------


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


def compared(before: str, after: Path, cases: Sequence[str], options: Row, limit: float | None) -> Iterator[str]:
    """Plans cases by the library of a revision, with some options, and by that of a checkout, in turn.

    Planning seconds of two days say little, since machines drift by a factor of two; the ratios of this table count.

    Yields:
      Lines of a table as they come, and at last the means of the ratios.
    """
    (benchmark,) = BENCHMARKS
    yield "case | CPU s before | after | after / before | beyond tracing | step s before | after | after / before"
    ratios: list[tuple[float, ...]] = []
    with checkout(before) as folder:
        for name in benchmark.chosen(cases):
            sides = [
                row
                for library, given in ((folder, options), (after.resolve(), {}))
                for _, row in workers.run(benchmark, [name], given, limit=limit, library=library)
            ]
            if not all("plan" in row for row in sides):
                yield f"{name} | {' | '.join(row['status'] for row in sides)}"
                continue
            cpu = [row["cpu_seconds"] for row in sides]
            beyond = [row["seconds"] - row["planning_seconds"]["tracing"] for row in sides]
            step = [row["plan"]["step_seconds"] for row in sides]
            found = tuple(second / first for first, second in (cpu, beyond, step))
            ratios.append(found)
            figures = (f"{one:.4g}" for one in (*cpu, *found[:2], *step, found[2]))
            yield f"{name} | {' | '.join(figures)}"
    for number, title in enumerate(("CPU seconds", "seconds beyond tracing", "predicted steps") if ratios else ()):
        values = [found[number] for found in ratios]
        mean = statistics.geometric_mean(values)
        yield f"Ratios of {title}, {len(values)} cases: geometric mean {mean:.4f}, most {max(values):.3f}."


BENCHMARKS = (
    Benchmark(
        "planning", lambda: CASES, measure, view, parts={"textbook": textbook}, devices=8, limit=400,
        sources=("alpa_lite", "passes"),
    ),
)  # fmt: skip
