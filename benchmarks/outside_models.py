"""Planning of models from outside this project: how long it takes, and how good the plans are.

Each case of `outside_cases.py`, `outside_habits.py`, `outside_further.py`, `outside_deep.py` and `outside_unusual.py`
is planned in a fresh process, with a time limit and a memory limit, and then with every textbook method. Times are wall
seconds of `make_plan`, verification included, and CPU seconds of the process. Both grow while other machines use the
same cores; undisturbed seconds are an estimate of what planning takes where none does (`pace.py`). MFU is predicted:
FLOPs of the step's products over what the devices could do in the predicted step. The best textbook method is the
fastest of those that fit, with as many micro-batches as suit it; Auto must not be slower. Textbook methods share one
trace, and are searched, not lowered (`textbook_plans.py`).

    python benchmarks/outside_models.py                     every case (needs the extra `outside`)
    python benchmarks/outside_models.py --of toy            the cases of one kind: issue, published, unusual or toy
    python benchmarks/outside_models.py bert-large          the named cases; others keep their results
    python benchmarks/outside_models.py --no-textbook ...   without the textbook methods; those keep their results
    python benchmarks/outside_models.py --only-textbook ... the textbook methods alone; plans keep their results
    python benchmarks/outside_models.py --list
    python benchmarks/outside_models.py --profile NAME      where the CPU time goes

writes benchmarks/results/outside_models.json and outside_models.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import cases_apart
import pace

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
KINDS = ("issue", "published", "unusual", "toy")
TEXTBOOK = ("DataParallel()", "Zero(1)", "Zero(2)", "Zero(3)", "TensorParallel()")


def main() -> None:
    """Runs cases and writes the results, or one case within this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--of", choices=KINDS)
    parser.add_argument("--limit", type=float, default=400, help="seconds of each case, textbook methods aside")
    parser.add_argument("--memory", type=float, default=16, help="GiB of each case")
    parser.add_argument("--effort", choices=("quick", "normal", "thorough"), default="normal")
    parser.add_argument("--no-textbook", action="store_true")
    parser.add_argument("--only-textbook", action="store_true")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--textbook", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    prepare()
    from outside_unusual import CASES

    names = arguments.cases or [name for name, case in CASES.items() if arguments.of in (None, case.of)]
    if arguments.list:
        print("\n".join(f"{name:20} {case.of:10} {case.nodes} x {case.cluster}" for name, case in CASES.items()))
    elif arguments.profile:
        profile(names[0])
    elif arguments.child:
        (textbook if arguments.textbook else measure)(names[0], Path(arguments.child), arguments.effort)
    else:
        for name in names:
            one(name, arguments)


def prepare() -> None:
    """JAX on virtual devices, and nothing that other libraries log."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def one(name: str, arguments: argparse.Namespace) -> None:
    """Plans a case, and writes the results."""
    path = RESULTS / "outside_models.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    if arguments.only_textbook:
        row = rows.get(name, {"status": "not planned"})
    else:
        kept = {"textbook": rows[name]["textbook"]} if "textbook" in rows.get(name, {}) else {}
        row = kept | child(name, arguments, [])
        print(name, row["status"], json.dumps(row.get("plan", {})), f"{row['wall_seconds']:.1f} s in all", flush=True)
    if not arguments.no_textbook:
        found = child(name, arguments, ["--textbook"])
        row["textbook"] = found.get("methods", {})
        print(f"  textbook: {json.dumps(row['textbook'])}", flush=True)
    if arguments.dry:
        return
    from outside_unusual import CASES

    rows = json.loads(path.read_text()) if path.exists() else {}
    rows[name] = row
    rows = {key: rows[key] for key in CASES if key in rows}
    path.write_text(json.dumps(rows, indent=1) + "\n")
    (RESULTS / "outside_models.md").write_text(table(rows))


def child(name: str, arguments: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """A case in a process of its own, which is ended at the limits."""
    given = [name, *more, "--effort", arguments.effort]
    return cases_apart.run(__file__, given, arguments.limit, arguments.memory)


def cluster_of(case: Any) -> Any:
    """The cluster of a case."""
    import alpa_lite

    base, _, slice_ = case.cluster.partition(":")
    if base == "cpu":
        return alpa_lite.Cluster.local()
    if slice_:
        return alpa_lite.Cluster.preset(base, nodes=case.nodes, topology=tuple(map(int, slice_.split("x"))))
    return alpa_lite.Cluster.preset(base, nodes=case.nodes)


def planner(name: str) -> Any:
    """A function that plans a case with some method."""
    from outside_unusual import CASES

    import alpa_lite

    case = CASES[name]
    fun, args = case.build()
    cluster = cluster_of(case)

    def plan(method: Any, effort: Any) -> Any:
        return alpa_lite.make_plan(fun, *args, cluster=cluster, method=method, effort=effort, **case.options)

    return plan


def method_of(name: str) -> Any:
    """The method that a case asks for."""
    from outside_unusual import CASES

    import alpa_lite

    kind, values = CASES[name].method
    return getattr(alpa_lite, kind)(*values)


def measure(name: str, out: Path, effort: str) -> None:
    """Plans a case and writes what it took."""
    import jax

    plan = planner(name)
    start, cpu = time.perf_counter(), time.process_time()
    with pace.Meter() as meter:
        found = plan(method_of(name), effort)
    row = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "pace": meter.figures,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "planning_seconds": dict(found.planning_seconds),
        "plan": figures(found),
        "notes": list(found.notes),
        "environment": {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "jax": jax.__version__,
            "python": platform.python_version(),
        },
    }
    out.write_text(json.dumps(row))


def textbook(name: str, out: Path, effort: str) -> None:
    """Searches a case with every textbook method and writes their seconds a step, or why there are none."""
    from outside_unusual import CASES
    from textbook_plans import Textbook

    import alpa_lite
    from alpa_lite.errors import AlpaLiteError

    case = CASES[name]
    step = Textbook(*case.build(), cluster_of(case), **case.options)
    methods: dict[str, Any] = {}
    for text in TEXTBOOK:
        kind, value = text[:-1].split("(")
        try:
            methods[text], _ = step.seconds(getattr(alpa_lite, kind)(*([int(value)] if value else [])), effort)
        except AlpaLiteError as error:
            methods[text] = f"{type(error).__name__}: {str(error)[:120]}"
        out.write_text(json.dumps({"methods": methods}))


def figures(plan: Any) -> dict[str, Any]:
    """What a plan says."""
    possible = plan.step_seconds * plan.num_devices * plan.products.peak
    return {
        "step_seconds": plan.step_seconds,
        "mfu": plan.products.flops / possible if possible else 0.0,
        "stages": len(plan.stages),
        "microbatches": plan.num_microbatches,
        "schedule": plan.schedule if plan.pipelined else "",
        "meshes": ["x".join(map(str, stage.mesh_shape)) for stage in plan.stages][:4],
        "gib_per_device": max(stage.memory.total for stage in plan.stages) / GIB,
        "bound": plan.solver.bound,
        "status": plan.solver.status,
    }


def profile(name: str) -> None:
    """Prints where the CPU time of a case goes."""
    plan, method = planner(name), method_of(name)
    found = cases_apart.profiled(lambda: plan(method, "normal"))
    print(json.dumps(figures(found)), dict(found.planning_seconds))


def undisturbed(rows: dict[str, Any]) -> dict[str, float]:
    """Estimated seconds of planning where no other machine uses the cores, of the rows that have a pace.

    Rows of one day are taken to be of one machine: another may be quicker, which tells nothing of these.
    """
    metered: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for name, row in rows.items():
        if "pace" in row:
            of = row["environment"]
            metered.setdefault((of["date"], of["python"]), {})[name] = row["pace"]
    return {
        name: rows[name]["seconds"] * pace.share(figures, pace.least(list(group.values())))
        for group in metered.values()
        for name, figures in group.items()
    }


def _middle(seconds: list[float]) -> str:
    """Their median and the most, in words."""
    return f"median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s"


def best_textbook(row: dict[str, Any]) -> tuple[str, float] | None:
    """The fastest textbook method that fits, and its seconds."""
    fits = {name: value for name, value in row.get("textbook", {}).items() if isinstance(value, float)}
    return min(fits.items(), key=lambda item: item[1]) if fits else None


def table(rows: dict[str, Any]) -> str:
    """The results as Markdown."""
    from outside_unusual import CASES

    lines = [
        "# Models from outside",
        "",
        "`python benchmarks/outside_models.py`: train steps of other libraries and habits, planned in fresh processes.",
        "Step, MFU and textbook seconds are predictions of one cost model. The load is the machine's before the case",
        "began: the search is limited by wall seconds, so that above the number of cores (two here) it finds less than",
        "it would. Undisturbed seconds are an estimate, too (`pace.py`): other machines share these cores, which takes",
        "up to half of their speed, from second to second, and no load shows it. Eleven cases that the limit does not",
        "end, measured on two days, took 1.04 to 1.37 times as long the second time, and 0.93 to 1.17 times as many",
        "undisturbed seconds. Those are comparable within a day: another machine may be quicker by itself. Tracing is",
        "JAX's own work but for a seventh, and plain `jit` takes as long.",
        "",
        "| case | cluster | planned s | undisturbed s | tracing s | target s | load | step s | MFU | plan | textbook "
        "| Auto / textbook |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|---|--:|",
    ]
    alone = undisturbed(rows)
    for name, row in rows.items():
        case, plan, best = CASES[name], row.get("plan"), best_textbook(row)
        cluster = f"{case.nodes} x {case.cluster}" + ("" if case.method[0] == "Auto" else f", {case.method[0]}")
        if plan is None:
            lines.append(f"| {name} | {cluster} | {row['status']} |" + " |" * 9)
            continue
        what = plan["meshes"][0] if plan["stages"] == 1 else f"{plan['stages']} stages, {plan['schedule']}"
        what += f", {plan['microbatches']} micro-batches" if plan["microbatches"] > 1 else ""
        worse = best and plan["step_seconds"] > best[1] * (1 + 1e-4)
        cells = [
            name, cluster, f"{row['seconds']:.1f}", f"{alone[name]:.1f}" if name in alone else "-",
            f"{row['planning_seconds']['tracing']:.1f}", case.target or "-",
            f"{row['load_before']:.1f}", f"{plan['step_seconds']:.4g}", f"{plan['mfu']:.0%}", what,
            f"{best[0]} {best[1]:.4g}" if best else "none fits" if "textbook" in row else "not planned",
            f"{plan['step_seconds'] / best[1]:.2f}{' WORSE' if worse else ''}" if best else "-",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    for of in KINDS:
        planned = {name: row for name, row in rows.items() if CASES[name].of == of and "seconds" in row}
        if planned:
            beyond = statistics.median(row["seconds"] - row["planning_seconds"]["tracing"] for row in planned.values())
            all_of = [row["seconds"] for row in planned.values()]
            known = [alone[name] for name in planned if name in alone]
            lines += ["", f"{of}: {len(planned)} planned, {_middle(all_of)}; beyond tracing, median {beyond:.1f} s"]
            lines[-1] += f"; undisturbed, {_middle(known)}" if len(known) == len(planned) else ""
    measured = {
        (row["environment"]["date"], row["environment"]["jax"]) for row in rows.values() if "environment" in row
    }
    missing = [name for name in CASES if name not in rows]
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    lines += ["", "Measured " + "; ".join(f"{date} with JAX {jax}" for date, jax in sorted(measured)) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
