"""Predicted seconds of Auto's plans against every textbook plan that fits, over the models and 8, 16 and 64 devices.

Auto searches a space that holds the textbook plans, so its prediction must not be above theirs; rows where it is are
marked WORSE. All are predictions of one cost model: the table shows what the search gains or loses, not how fast a
cluster would be. "Needs more" is a plan that the memory does not hold.

    python benchmarks/auto_vs_textbook.py               every case
    python benchmarks/auto_vs_textbook.py gpt-tiny      the named cases; others keep their results

writes benchmarks/results/auto_vs_textbook.json and auto_vs_textbook.md.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

import alpa_lite
from alpa_lite import models
from alpa_lite.errors import InfeasibleError, OptionError

RESULTS = Path(__file__).parent / "results"
NODES = (1, 2, 8)
METHODS = {
    "Auto": alpa_lite.Auto(),
    "DataParallel": alpa_lite.DataParallel(),
    "Zero(1)": alpa_lite.Zero(1),
    "Zero(2)": alpa_lite.Zero(2),
    "Zero(3)": alpa_lite.Zero(3),
    "TensorParallel": alpa_lite.TensorParallel(),
}
TEXTBOOK = tuple(METHODS)[1:]


@dataclass(frozen=True)
class Case:
    """A model at a size, with its batch."""

    model: str
    size: str
    batch: int
    overrides: dict[str, Any] = field(default_factory=dict)


CASES = {f"{model}-tiny": Case(model, "tiny", 64) for model in models.MODELS} | {
    "mlp-wide": Case("mlp", "wide", 1024),
    "gpt-1.3B": Case("gpt", "1.3B", 64, {"scan": True, "remat": True}),
    "llama-8B": Case("llama", "8B", 64, {"scan": True, "remat": True}),
}


def main() -> None:
    """Plans and writes the results after each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--cluster", default="h100", help="the preset, of 8 devices a node")
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    path = RESULTS / "auto_vs_textbook.json"
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for nodes in NODES:
        for name in arguments.cases:
            row = compare(CASES[name], arguments.cluster, nodes)
            known[f"{name} on {row['devices']}"] = {"case": name} | row
            print(name, row["devices"], row["verdict"], flush=True)
            RESULTS.mkdir(exist_ok=True)
            keys = [f"{n} on {8 * k}" for n in CASES for k in NODES]
            known = {key: known[key] for key in keys if key in known}
            path.write_text(json.dumps(known, indent=1) + "\n")
            (RESULTS / "auto_vs_textbook.md").write_text(table(known))


def compare(case: Case, cluster: str, nodes: int) -> dict[str, Any]:
    """The plans of every method for one model on one cluster."""
    fun, args = models.get(case.model).abstract(case.size, case.batch, **case.overrides)
    machines = alpa_lite.Cluster.preset(cluster, nodes=nodes)
    start = time.process_time()
    found = {name: predict(fun, args, machines, method) for name, method in METHODS.items()}
    auto = found["Auto"].get("step_seconds")
    others = {name: found[name]["step_seconds"] for name in TEXTBOOK if "step_seconds" in found[name]}
    best = min(others, key=lambda name: others[name]) if others else None
    if auto is None:
        verdict = "no plan" if best is None else "WORSE: no plan found"
    elif best is None:
        verdict = "only Auto fits"
    elif auto <= others[best]:
        verdict = "at most the best"
    else:
        within = auto <= others[best] * (1 + found["Auto"]["gap"])
        verdict = f"WORSE by {auto / others[best] - 1:.2e}" + (", within the solver's gap" if within else "")
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "jax": jax.__version__, "cluster": cluster,
        "devices": machines.num_devices, "batch": case.batch, "plans": found,
        "best_textbook": best, "verdict": verdict,
        "gain": None if auto is None or best is None else others[best] / auto,
        "cpu_seconds": time.process_time() - start,
    }  # fmt: skip


def predict(fun: Callable[..., Any], args: Any, machines: Any, method: Any) -> dict[str, Any]:
    """What one plan costs, or why there is none."""
    try:
        plan = alpa_lite.make_plan(fun, *args, cluster=machines, method=method)
    except InfeasibleError as error:
        return {"status": "needs more", "why": str(error)[:200]}
    except OptionError as error:
        return {"status": "does not apply", "why": str(error)[:200]}
    return {
        "status": plan.solver.status, "step_seconds": plan.step_seconds, "gap": plan.solver.gap,
        "mesh": plan.stages[0].mesh_shape, "bytes_per_device": plan.stages[0].memory.total,
    }  # fmt: skip


def table(rows: dict[str, Any]) -> str:
    """The results as Markdown."""
    worse = [key for key, row in rows.items() if row["verdict"].startswith("WORSE")]
    dates = ", ".join(sorted({row["date"] for row in rows.values()}))
    jaxes = ", ".join(sorted({row["jax"] for row in rows.values()}))
    clusters = ", ".join(sorted({row["cluster"] for row in rows.values()}))
    lines = [
        "# Auto against textbook plans",
        "",
        f"`python benchmarks/auto_vs_textbook.py`, {dates}, JAX {jaxes}; clusters of {clusters}, 8 devices a node.",
        "Predicted milliseconds a step, of one cost model for all. Gain: the best textbook plan that fits over Auto.",
        "What does not fit needs more memory.",
        f"{len(rows)} of {len(CASES) * len(NODES)} rows have been run.",
        "",
        f"Auto is worse than a textbook plan in {len(worse)} of {len(rows)} rows" + (":" if worse else "."),
        *[f"- {key}: {rows[key]['verdict']}" for key in worse],
        "",
        f"| model | devices | Auto | Auto's mesh | {' | '.join(TEXTBOOK)} | gain | verdict |",
        "|---|--:|--:|---|" + "--:|" * (len(TEXTBOOK) + 1) + "---|",
    ]
    for row in rows.values():
        plans = row["plans"]
        mesh = " x ".join(map(str, plans["Auto"].get("mesh", ()))) or "-"
        gain = "-" if row["gain"] is None else f"{row['gain']:.3f}"
        cells = [row["case"], row["devices"], _ms(plans["Auto"]), mesh, *(_ms(plans[n]) for n in TEXTBOOK), gain]
        lines.append("| " + " | ".join(map(str, [*cells, row["verdict"]])) + " |")
    return "\n".join(lines) + "\n"


def _ms(plan: dict[str, Any]) -> str:
    return f"{plan['step_seconds'] * 1e3:.4g}" if "step_seconds" in plan else plan["status"]


if __name__ == "__main__":
    main()
