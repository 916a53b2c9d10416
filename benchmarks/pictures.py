"""The pictures of the documentation, drawn from stored rows by templates of SVGs: `python -m benchmarks pictures`.

What plans look like is a benchmark as well (`python -m benchmarks run pictures`): a GPT of 4 layers is planned as a
pipeline of four virtual CPU devices, whose predicted and executed timelines are kept, and for eight H100, of which
the printed summary is, and the shardings of a block under tensor parallelism.
"""

from __future__ import annotations

import math
import re
from typing import Any

from benchmarks import planning, published
from benchmarks.harness import ROOT, Benchmark, Row, Rows, get, load, templates

FOLDER = ROOT / "docs" / "pictures"


# -- what plans look like ---------------------------------------------------------------------------------------------


def measure(case: str) -> Row:
    """The timelines of a pipeline, and the summary and shardings of a plan on one mesh."""
    import alpa_lite
    from alpa_lite import models

    step, args = models.get("gpt").build("tiny", 16, layers=4)
    method = alpa_lite.Pipeline(num_stages=4, submesh_shapes=(1, 1, 1, 1), schedule="1f1b")
    run = alpa_lite.parallelize(step, method=method, num_microbatches=8)
    executed = [run.profile(None, *args) for _ in range(3)][-1]  # the first runs are slower
    predicted = run.plan(*args).division.timeline
    step, args = models.get("gpt").abstract("1.3B", 32)[:2]
    plan = alpa_lite.make_plan(step, *args, cluster="h100")
    sharded = alpa_lite.make_plan(step, *args, cluster="h100", method=alpa_lite.TensorParallel())
    leaves = {leaf.path: [list(leaf.shape), str(leaf.spec)] for leaf in sharded.stages[0].arguments}
    return {
        "predicted": predicted.to_json(), "executed": executed.to_json(), "summary": str(plan).splitlines(),
        "block": {path: leaf for path, leaf in leaves.items() if re.search(r"params.*(layers?_?\W*0|embed)", path)},
    }  # fmt: skip


# -- drawing ----------------------------------------------------------------------------------------------------------


def _kind_of(name: str) -> str:
    """Returns the kind of a case of planning, by which its mark is coloured."""
    return next((kind for kind in planning.KINDS if kind in planning.CASES[name].tags), "own")


def against_baselines(rows: Rows) -> Row:
    """Predicted seconds of Auto over those of the best textbook plan."""
    values = [
        (row["plan"]["step_seconds"] / best[1], _kind_of(name), f"{name}, {best[0]}")
        for name, row in rows.items()
        if name in planning.CASES and planning.CASES[name].method == "Auto()" and "plan" in row
        and (best := planning.best_textbook(row))
    ]  # fmt: skip
    title = "Predicted step of Auto over that of the fastest textbook plan that fits"
    return {"values": values, "title": title, "mark": 1.0}


def planning_seconds(rows: Rows) -> Row:
    """CPU seconds of planning."""
    values = [
        (row["cpu_seconds"], _kind_of(name), name)
        for name, row in rows.items()
        if name in planning.CASES and "cpu_seconds" in row
    ]
    return {"values": values, "title": "CPU seconds of planning, one core", "mark": 30.0}


def against_published(rows: Rows) -> Row:
    """Logarithms of predicted and of measured seconds of published steps, and the decades of both."""
    presets = list(dict.fromkeys(row["preset"] for row in published.DATA["rows"]))
    points = [
        (*map(math.log10, (published.measured_seconds(row), rows[row["name"]]["seconds"])),
         presets.index(row["preset"]), row["name"])
        for row in published.DATA["rows"]
        if row["name"] in rows and not row["excluded"]
    ]  # fmt: skip
    ends = [value for point in points for value in point[:2]]
    return {"points": points, "low": math.floor(min(ends)), "high": math.ceil(max(ends))}


def leaves(block: Row) -> list[Any]:
    """The names of the leaves of a block, their shapes and their shardings."""
    return [
        (" ".join(re.findall(r"\w+", path)[2:]), shape, re.sub(r"^\w+\(|\)$", "", spec).rstrip(","))
        for path, (shape, spec) in block.items()
    ]


def draw() -> None:
    """Draws every picture of which there are rows, by the templates of `pages/pictures`."""
    FOLDER.mkdir(exist_ok=True)
    values = {"architecture": {}}
    if plans := load(BENCHMARKS[0]).get("gpt"):
        values |= {"plan": plans, "timeline": plans, "block": {"leaves": leaves(plans["block"])}}
    bars = {name: make(load(get("planning"))) for name, make in (("auto", against_baselines),
                                                                 ("planning", planning_seconds))}  # fmt: skip
    values |= {name: one | {"values": sorted(one["values"])} for name, one in bars.items()}
    values["published"] = against_published(load(get("published")))
    forms = {"auto": "bars", "planning": "bars", "published": "scatter"}
    for name, known in values.items():
        text = templates().get_template(f"pictures/{forms.get(name, name)}.svg").render(known)
        (FOLDER / f"{name}.svg").write_text(text.strip() + "\n")


BENCHMARKS = (Benchmark("pictures", lambda: ["gpt"], measure, devices=4),)
