"""Planning of models: how many CPU seconds it takes, and how good the plans are.

Each case of `cases.py` is planned in a fresh process, ended at a limit of memory, and then with every textbook method.
CPU seconds are those of the process and of `make_plan` alone, verification included; they grow by up to a half while
other processes use the other half of a core. MFU is predicted: FLOPs of the step's products over those that the devices
could compute in the predicted step. The best textbook method is the fastest of those that fit, with as many
micro-batches as suit it; Auto must not be slower. Textbook methods share one trace, and are searched, not lowered
(`textbook_plans.py`).

    python benchmarks/planning.py                     every case (needs the extra `outside`)
    python benchmarks/planning.py --of toy            the cases of one kind: issue, published, unusual, toy or own
    python benchmarks/planning.py bert-large          the named cases; others keep their results
    python benchmarks/planning.py --no-textbook ...   without the textbook methods; those keep their results
    python benchmarks/planning.py --only-textbook ... the textbook methods alone; plans keep their results
    python benchmarks/planning.py --list
    python benchmarks/planning.py --profile NAME      prints where the CPU time goes

writes benchmarks/results/planning.json and planning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import cases_apart
import kept_rows

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
KINDS = ("issue", "published", "unusual", "toy", "own")
TEXTBOOK = ("DataParallel()", "Zero(1)", "Zero(2)", "Zero(3)", "TensorParallel()")


def main() -> None:
    """Runs cases and writes the results, or one case within this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--of", choices=KINDS)
    parser.add_argument("--limit", type=float, default=400, help="seconds of each case, textbook methods aside")
    parser.add_argument("--memory", type=float, default=16, help="GiB of each case")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="further ones of make_plan")
    parser.add_argument("--no-textbook", action="store_true")
    parser.add_argument("--only-textbook", action="store_true")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--textbook", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    prepare()
    from cases import CASES

    names = arguments.cases or [name for name, case in CASES.items() if arguments.of in (None, case.of)]
    if arguments.list:
        print("\n".join(f"{name:20} {case.of:10} {case.nodes} x {case.cluster}" for name, case in CASES.items()))
    elif arguments.profile:
        profile(names[0])
    elif arguments.child:
        (textbook if arguments.textbook else measure)(names[0], Path(arguments.child), arguments.options)
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
    row: dict[str, Any] = {}
    if not arguments.only_textbook:
        row = child(name, arguments, [])
        print(name, row["status"], json.dumps(row.get("plan", {})), f"{row['wall_seconds']:.1f} s in all", flush=True)
    if not arguments.no_textbook:
        row["textbook"] = child(name, arguments, ["--textbook"]).get("methods", {})
        print(f"  textbook: {json.dumps(row['textbook'])}", flush=True)
    if not arguments.dry:
        with kept_rows.changed(RESULTS / "planning.json", table) as rows:
            own = ("textbook",) if arguments.no_textbook else ()
            kept = {key: value for key, value in rows.get(name, {}).items() if arguments.only_textbook or key in own}
            rows[name] = {"status": "not planned"} | kept | row


def child(name: str, arguments: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """A case in a process of its own, which is ended at the limits."""
    given = [name, *more, "--options", json.dumps(arguments.options)]
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


def commit() -> str:
    """The commit of the library that plans."""
    import alpa_lite

    root = Path(alpa_lite.__file__).resolve().parent.parent
    found = subprocess.run(["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def planner(name: str) -> Any:
    """A function that plans a case with some method."""
    from cases import CASES

    import alpa_lite

    case = CASES[name]
    fun, args = case.build()
    cluster = cluster_of(case)

    def plan(method: Any, options: dict[str, Any]) -> Any:
        return alpa_lite.make_plan(fun, *args, cluster=cluster, method=method, **case.options, **options)

    return plan


def method_of(name: str) -> Any:
    """The method that a case asks for."""
    from cases import CASES

    import alpa_lite

    kind, values = CASES[name].method
    return getattr(alpa_lite, kind)(*values)


def measure(name: str, out: Path, options: dict[str, Any]) -> None:
    """Plans a case and writes what it took."""
    import jax

    plan = planner(name)
    start, cpu = time.perf_counter(), time.process_time()
    found = plan(method_of(name), options)
    row = {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        "planning_seconds": dict(found.planning_seconds),
        "plan": figures(found),
        "notes": list(found.notes),
        "environment": {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "commit": commit(),
        },
    }
    out.write_text(json.dumps(row))


def textbook(name: str, out: Path, options: dict[str, Any]) -> None:
    """Searches a case with every textbook method and writes their seconds a step, or why there are none."""
    from cases import CASES
    from textbook_plans import Textbook

    import alpa_lite
    from alpa_lite.errors import AlpaLiteError

    case = CASES[name]
    step = Textbook(*case.build(), cluster_of(case), **case.options)
    methods: dict[str, Any] = {}
    for text in TEXTBOOK:
        kind, value = text[:-1].split("(")
        try:
            method = getattr(alpa_lite, kind)(*([int(value)] if value else []))
            methods[text], _ = step.seconds(method, options.get("effort", "normal"))
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
    found = cases_apart.profiled(lambda: plan(method, {}))
    print(json.dumps(figures(found)), dict(found.planning_seconds))


def best_textbook(row: dict[str, Any]) -> tuple[str, float] | None:
    """The fastest textbook method that fits, and its seconds."""
    fits = {name: value for name, value in row.get("textbook", {}).items() if isinstance(value, float)}
    return min(fits.items(), key=lambda item: item[1]) if fits else None


def table(rows: dict[str, Any]) -> str:
    """The results as Markdown."""
    from cases import CASES

    lines = [
        "# Planning",
        "",
        "`python benchmarks/planning.py`: train steps of other libraries and of this project, each planned in a fresh",
        "process, on two cores. Seconds are CPU seconds; steps, MFU and textbook seconds are predictions of one cost",
        "model. Tracing is JAX's own work but for a seventh, and plain `jit` takes as long. Rows are stale where the",
        "commit below is older than the last one that changes the compiler or its prices.",
        "",
        "| case | cluster | planned s | tracing s | GiB | step s | MFU | plan | textbook | Auto / textbook |",
        "|---|---|--:|--:|--:|--:|--:|---|---|--:|",
    ]
    slower = 0
    rows = {name: rows[name] for name in CASES if name in rows}
    for name, row in rows.items():
        case, plan, best = CASES[name], row.get("plan"), best_textbook(row)
        method, values = case.method
        cluster = f"{case.nodes} x {case.cluster}" + ("" if method == "Auto" else f", {method}{values or '()'}")
        if plan is None:
            lines.append(f"| {name} | {cluster} | {row['status']} |" + " |" * 7)
            continue
        shown = plan["meshes"][0] if plan["stages"] == 1 else f"{plan['stages']} stages, {plan['schedule']}"
        shown += f", {plan['microbatches']} micro-batches" if plan["microbatches"] > 1 else ""
        ratio = plan["step_seconds"] / best[1] if best else 0.0
        is_slower = method == "Auto" and ratio > 1 + 1e-4
        slower += is_slower
        cells = [
            name, cluster, f"{row['cpu_seconds']:.1f}", f"{row['planning_seconds']['tracing']:.1f}",
            f"{row['peak_gib']:.1f}", f"{plan['step_seconds']:.4g}", f"{plan['mfu']:.0%}", shown,
            f"{best[0]} {best[1]:.4g}" if best else "none fits" if "textbook" in row else "not planned",
            f"{ratio:.3f}{' SLOWER' * is_slower}" if best else "-",
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    compared = sum(best_textbook(row) is not None and "plan" in row for row in rows.values())
    lines += ["", f"Auto is slower than a textbook plan that fits in {slower} of {compared} cases."]
    planned = {name: row for name, row in rows.items() if "plan" in row}
    for kind in (*KINDS, ""):
        seconds = [row["cpu_seconds"] for name, row in planned.items() if kind in ("", CASES[name].of)]
        if seconds:
            lines += ["", f"{kind or 'all'}: {len(seconds)} planned, median {statistics.median(seconds):.1f} CPU s, "]
            lines[-1] += f"most {max(seconds):.1f} s."
    sums: dict[str, float] = {}
    for row in planned.values():
        for part, seconds in row["planning_seconds"].items():
            sums[part] = sums.get(part, 0.0) + seconds
    if total := sum(sums.values()):
        shares = sorted(((value / total, part) for part, value in sums.items()), reverse=True)
        lines += ["", "Of all seconds: " + ", ".join(f"{part} {share:.0%}" for share, part in shares) + "."]
    environments = {tuple(row["environment"][key] for key in ("date", "jax", "commit")) for row in planned.values()}
    missing = [name for name in CASES if name not in rows]
    if missing:
        lines += ["", f"Not measured: {', '.join(missing)}."]
    lines += ["", "Measured " + "; ".join(f"{d} with JAX {j} at {c}" for d, j, c in sorted(environments)) + "."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
