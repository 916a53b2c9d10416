"""Plans of one case beside each other: under different conditions, and by every method.

`equal_plans`: a plan is a function of the program, the cluster and the options. Each case is planned in processes of
its own: alone (the reference), beside four busy processes, pinned to one core, with another `PYTHONHASHSEED`, and after
ten other plans in the same process. The files that `plan.save` writes are compared.

`pipelines`: predicted seconds of a step for each method on each case; "-" where nothing fits or the batch does not
divide. Auto must be at most the best of them; a row where it is not is marked WORSE, and by how much. How long large
pipelines take to plan is in `planning` ("gpt-39B, pipeline"; Alpa reports 2,393 s for a model of this size on this
cluster, its profiling of stages included).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import planning, workers
from benchmarks.harness import ROOT, Benchmark, Row

EQUAL = (
    "bert-large", "roberta-large", "gpt2-xl", "vit-huge", "xlm-roberta-large", "marian-big", "wav2vec2-large", "unet",
    "albert-xxlarge", "electra-large", "llama-7b-scan", "blenderbot-3b",
)  # fmt: skip
CONDITIONS = ("alone", "beside four busy processes", "on one core", "another hash seed", "after ten other plans")
PIPELINES = {
    name.partition(", ")[2]: planning.CASES[name]
    for name in (
        "gpt-small, fits one node", "gpt-small, fits, fast links", "gpt-small, slow links",
        "gpt-1.3B, slow links, large", "gpt-2.6B, little memory",
    )
}  # fmt: skip
METHODS = ("DataParallel()", "Zero(3)", "TensorParallel()", "Sharded()", "Pipeline()", "Auto()")


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
    planning.plan_of(planning.CASES[name]).save(path)


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


def digests(row: Row) -> list[str]:
    """The digests of a row, in the order of the conditions."""
    return [row.get(condition, "-") for condition in CONDITIONS]


# -- by every method --------------------------------------------------------------------------------------------------


def by_methods(name: str, **options: Any) -> Row:
    """Predicted seconds of every method."""
    from alpa_lite.errors import AlpaLiteError

    seconds: dict[str, float | None] = dict.fromkeys(METHODS)
    chosen, start = "", time.perf_counter()
    for text in METHODS:
        with contextlib.suppress(AlpaLiteError):
            plan = planning.plan_of(PIPELINES[name], text, verify="off", **options)
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


BENCHMARKS = (
    Benchmark(
        "equal_plans", lambda: EQUAL, under_conditions, lambda rows: {"conditions": CONDITIONS, "digests": digests},
        limit=5 * 900,
        sources=planning.BENCHMARKS[0].sources,
    ),
    Benchmark(
        "pipelines", lambda: PIPELINES, by_methods, lambda rows: {"methods": METHODS},
        sources=planning.BENCHMARKS[0].sources,
    ),
)  # fmt: skip
