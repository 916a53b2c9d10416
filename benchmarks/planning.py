"""How long planning takes and what it needs: `make_plan` end to end, tracing and verification included.

Each case runs in a fresh process with a time limit and a memory limit; one that passes either is recorded as not
finished, with what it had done by then. Times are wall seconds and CPU seconds of the process: on a machine that is
shared, the CPU seconds are the ones to compare. Breakdown: `Plan.planning_seconds` (wall), and of the search, building
and solving the program of each mesh shape (wall and CPU), with the program's size. Shapes alone are planned
for: no array is allocated, and no device of the cluster need be here.

    python benchmarks/planning.py                 every case
    python benchmarks/planning.py gpt-small       the named cases; others keep their results

writes benchmarks/results/planning.json and planning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cases_apart

RESULTS = Path(__file__).parent / "results"
GIB = 2**30
LAPS = {"plan": "writing", "checks": "verification"}
"""Laps of the compiler that have other names in the results."""
PARTS = ("tracing", "factors", "grouping", "building", "bounding", "solving", "lowering", "writing", "verification")


@dataclass(frozen=True)
class Case:
    """A model, a cluster and a method.

    Attributes:
      model, size, batch, overrides: of `models.get(model).abstract(size, batch, **overrides)`.
      cluster, nodes: a preset.
      mesh: the mesh shape; None for every shape of the cluster.
      pipelines: whether pipelines are searched besides, and micro-batches, as `Auto` does.
      target_seconds, target_gib: what it should take at most on a quiet machine of two cores; None without a target.
    """

    model: str
    size: str
    batch: int
    cluster: str
    nodes: int
    mesh: tuple[int, ...] | None = None
    pipelines: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    target_seconds: float | None = None
    target_gib: float | None = None


def _gpt_layers(layers: int) -> Case:
    return Case("gpt", "small", 64, "a100", 1, overrides={"layers": layers})


_LLAMA: dict[str, Any] = {"seq": 8192, "layers": 32, "remat": True}
_GPT3: dict[str, Any] = {"remat": True}
CASES = {
    "gpt-small": Case("gpt", "small", 64, "a100", 1, target_seconds=5),
    "gpt-small-auto": Case("gpt", "small", 64, "a100", 1, pipelines=True),
    "gpt-24-layers": _gpt_layers(24),
    "gpt-48-layers": _gpt_layers(48),
    "llama-8B": Case("llama", "8B", 64, "h100", 8, (8, 8), False, _LLAMA, target_seconds=15),
    "llama-8B-scan": Case("llama", "8B", 64, "h100", 8, (8, 8), False, _LLAMA | {"scan": True}, target_seconds=15),
    "gpt-175B": Case("gpt", "175B", 64, "h100", 8, None, False, _GPT3, target_seconds=40, target_gib=6),
    "gpt-175B-auto": Case("gpt", "175B", 64, "h100", 8, None, True, _GPT3),
    "gpt-175B-scan": Case(
        "gpt", "175B", 64, "h100", 8, None, False, _GPT3 | {"scan": True}, target_seconds=40, target_gib=6
    ),
}


def main() -> None:
    """Runs cases and writes the results, or one case within this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--limit", type=float, default=400, help="seconds of each case")
    parser.add_argument("--memory", type=float, default=10, help="GiB of each case")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="print where the CPU time of one case goes")
    arguments = parser.parse_args()
    if arguments.child:
        measure(CASES[arguments.cases[0]], Path(arguments.child))
        return
    if arguments.profile:
        profile(CASES[arguments.cases[0]])
        return
    path = RESULTS / "planning.json"
    for name in arguments.cases:
        row = asdict(CASES[name]) | run(name, arguments.limit, arguments.memory)
        known = json.loads(path.read_text()) if path.exists() else {}
        known[name] = row
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps({key: known[key] for key in CASES if key in known}, indent=1) + "\n")
        (RESULTS / "planning.md").write_text(table(known))
        print(name, row["status"], f"{row['wall_seconds']:.1f} s wall", flush=True)


def run(name: str, limit: float, memory: float) -> dict[str, Any]:
    """One case in a process of its own, which is ended at `limit` seconds or `memory` GiB."""
    return {"limit_seconds": limit} | cases_apart.run(__file__, [name], limit, memory)


def measure(case: Case, out: Path) -> None:
    """Plans the case in this process and writes what it took to `out`, also after each part of the search."""
    make, environment = prepare(case)
    row: dict[str, Any] = {"environment": environment, "parts": []}

    def done(part: dict[str, Any]) -> None:
        row["parts"].append(part)
        row["total_cpu_seconds"] = time.process_time() - cpu
        out.write_text(json.dumps(row))

    instrument(done)
    start, cpu = time.perf_counter(), time.process_time()
    plan = make()
    row["total_seconds"] = time.perf_counter() - start
    row["total_cpu_seconds"] = time.process_time() - cpu
    row["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    row["planning_seconds"] = dict(plan.planning_seconds)
    row["plan"] = {
        "mesh": plan.stages[0].mesh_shape,
        "step_seconds": plan.step_seconds,
        "bytes_per_device": plan.stages[0].memory.total,
        "solver": asdict(plan.solver),
        "collectives": sum(c.count for c in plan.collectives),
        "candidates": [asdict(c) for c in plan.candidates],
        "verification": plan.verification,
    }
    out.write_text(json.dumps(row))


def prepare(case: Case) -> tuple[Callable[[], Any], dict[str, Any]]:
    """What plans the case, with everything imported, and what it runs on."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import alpa_lite
    from alpa_lite import models

    fun, args = models.get(case.model).abstract(case.size, case.batch, **case.overrides)
    cluster = alpa_lite.Cluster.preset(case.cluster, nodes=case.nodes)
    method = alpa_lite.Auto() if case.pipelines else alpa_lite.Sharded(case.mesh)
    environment = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    return lambda: alpa_lite.make_plan(fun, *args, cluster=cluster, method=method), environment


def instrument(done: Callable[[dict[str, Any]], None]) -> None:
    """Has each pass report its seconds; the search, each program that it builds and solves."""
    from alpa_lite.passes.sharding import strategies
    from alpa_lite.passes.sharding.solver import solve
    from alpa_lite.runner import Passes

    def report(
        module: Any, name: str, part: str, describe: Callable[..., dict[str, Any]] = lambda *_, **__: {}
    ) -> None:
        inner = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start, cpu = time.perf_counter(), time.process_time()
            result = inner(*args, **kwargs)
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
            done({"part": part, "seconds": seconds, "cpu_seconds": cpu_seconds} | describe(result, *args, **kwargs))
            return result

        setattr(module, name, timed)

    def of_space(space: Any, traced: Any, groups: Any, rules: Any, cost: Any, **options: Any) -> dict[str, Any]:
        return {
            "mesh": cost.mesh.shape, "regather": bool(options.get("regather")),
            "operations": sum(1 for _ in traced.graph.ops()), "groups": len(groups.groups),
            "nodes": len(space.nodes), "transfers": len(space.moves),
            "strategies": sum(len(node.strategies) for node in space.nodes),
        }  # fmt: skip

    def of_solution(solution: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return {
            "status": solution.status, "objective": solution.objective, "bound": solution.bound,
            "variables": solution.variables,
        }  # fmt: skip

    inner = Passes.__call__

    def lap(self: Passes, name: str, *args: Any, **kwargs: Any) -> Any:
        start, cpu = time.perf_counter(), time.process_time()
        try:
            return inner(self, name, *args, **kwargs)
        finally:
            spent = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
            done({"part": LAPS.get(name, name)} | spent)

    Passes.__call__ = lap
    report(strategies, "build", "building", of_space)
    report(solve.Bound, "improve", "bounding")
    report(solve, "Bound", "bounding")
    report(solve, "solve", "solving", of_solution)


def profile(case: Case) -> None:
    """Prints where the CPU time of a case goes."""
    make, _ = prepare(case)
    cases_apart.profiled(make)


def table(rows: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Planning time",
        "",
        "`make_plan` end to end in a fresh process, verification included; `python benchmarks/planning.py`. The load",
        "is the machine's before the case started: on a machine that is shared, compare CPU seconds, of all threads.",
        "Targets are wall seconds on a quiet machine of two cores. Sizes are those of the largest program; variables",
        "are those that a linear program was given, 0 where bounds alone proved the solution.",
        "",
        "| case | cluster | status | wall s | CPU s | target s | peak GiB | load |",
        "|---|---|---|" + "--:|" * 5,
        *[_whole(name, rows[name]) for name in CASES if name in rows],
        "",
        "CPU seconds of each part:",
        "",
        f"| case | {' | '.join(PARTS)} | meshes | operations | nodes | strategies | variables |",
        "|---|" + "--:|" * (len(PARTS) + 5),
        *[_parts(name, rows[name]) for name in CASES if name in rows],
    ]
    dates = sorted({row["environment"]["date"] for row in rows.values() if "environment" in row})
    jaxes = sorted({row["environment"]["jax"] for row in rows.values() if "environment" in row})
    lines += ["", f"Measured {', '.join(dates)} with JAX {', '.join(jaxes)}.", "", *_depth(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _whole(name: str, row: dict[str, Any]) -> str:
    meshes = "all meshes" if row["mesh"] is None else "mesh " + " x ".join(map(str, row["mesh"]))
    meshes += ", pipelines" if row.get("pipelines") else ""
    cpu = f"{row['total_cpu_seconds']:.1f}" if "total_cpu_seconds" in row else "-"
    cells = [
        name, f"{row['nodes']} x {row['cluster']}, {meshes}", row["status"],
        f"{row.get('total_seconds', row['wall_seconds']):.1f}", cpu, row["target_seconds"] or "-",
        f"{row['peak_gib']:.1f}", f"{row['load_before']:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def _parts(name: str, row: dict[str, Any]) -> str:
    parts = row.get("parts", [])
    cells = [name, *(f"{spent(parts, part):.1f}" if any(p["part"] == part for p in parts) else "-" for part in PARTS)]
    built = [p for p in parts if p["part"] == "building"]
    cells += [len({tuple(p["mesh"]) for p in built})]
    cells += [max((p[key] for p in built), default="-") for key in ("operations", "nodes", "strategies")]
    cells += [max((p["variables"] for p in parts if p["part"] == "solving"), default="-")]
    return "| " + " | ".join(map(str, cells)) + " |"


def spent(parts: list[dict[str, Any]], part: str) -> float:
    """CPU seconds of one part of planning."""
    return sum(p["cpu_seconds"] for p in parts if p["part"] == part)


def _depth(rows: dict[str, Any]) -> list[str]:
    """What doubling the depth does to the solving seconds."""
    names = ("gpt-small", "gpt-24-layers", "gpt-48-layers")
    finished = [n for n in names if n in rows and rows[n]["status"] == "finished"]
    if len(finished) < 2:
        return []
    lines = ["Depth, GPT of width 768 on 8 devices, all mesh shapes:", ""]
    lines += ["| layers | solving CPU s | building CPU s | nodes |", "|--:|--:|--:|--:|"]
    for n in finished:
        parts = rows[n]["parts"]
        nodes = max(p["nodes"] for p in parts if p["part"] == "building")
        cells = f"{spent(parts, 'bounding') + spent(parts, 'solving'):.2f} | {spent(parts, 'building'):.2f} | {nodes}"
        lines.append(f"| {rows[n]['overrides'].get('layers', 12)} | {cells} |")
    return lines


if __name__ == "__main__":
    main()
