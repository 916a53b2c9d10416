"""Texts of plans are those that are stored, and fit the page.

python -m tests.report.test_golden stores them again: what changes is then seen as a difference of texts.
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec as P

from alpa_lite.ir import schedules
from alpa_lite.ir.timeline import Event, Timeline
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Collective, Leaf
from alpa_lite.report import console, summary, timeline
from tests.plans import gpt_plan, pipeline_plan, small_plan, with_comparisons
from tests.report.test_timeline import draw, example

FOLDER = Path(__file__).parents[1] / "golden" / "report"


def drawn(name: str, meshes: int, microbatches: int, width: int = 100) -> str:
    return draw(schedules.schedule(name, meshes, microbatches), width).plain


def interleaved():
    return pipeline_plan("interleaved-1f1b", 3)


def long_names() -> Plan:
    """Paths, places and specs that are wider than the page: long ends of paths move into headings of several lines."""
    plan, spec = gpt_plan(2), P(("data", "model"), None, None)
    layers = [f"['m']['blocks']['layers'][{i}]['attention_of_many_heads']" for i in range(3)]
    sizes = {f"{layer}['{name}']": size for layer in layers for size, name in enumerate("qkvo")}
    sizes |= {"".join(f"['a_rather_long_module_name_{i}']" for i in range(6)): 13, "['m']['norm']": 0, "['count']": 4}
    leaves = tuple(
        Leaf(f"state{path}", (8192, 8192, 2**n), "bfloat16", 2**n, "state", spec) for path, n in sizes.items()
    )
    stage = dataclasses.replace(plan.stages[0], arguments=(*leaves, *plan.stages[0].arguments[:4]))
    where = "a_module_with_a_long_name.py:1234 " + "scope/" * 40
    moved = (Collective("collective_permute", ("data", "model"), 2**40, 10**6, 0, where),)
    notes = ("word " * 60,)
    return dataclasses.replace(plan, stages=(stage,), collectives=moved, collective_seconds=(1.0,), notes=notes)


UNEVEN = Event(0, 0.0, 1.0, "forward 0", "forward", 0, 0), Event(0, 2.0, 5.0, "backward 0", "backward", 0, 0)


TEXTS: dict[str, Callable[[], str]] = {
    "mesh": lambda: str(with_comparisons(gpt_plan())),
    "mesh, details": lambda: gpt_plan().details(),
    "mesh, overview": lambda: console.render_plain(summary.overview(gpt_plan())),
    "pipeline": lambda: str(pipeline_plan()),
    "pipeline, details": lambda: pipeline_plan().details(),
    "pipeline, overview": lambda: console.render_plain(summary.overview(pipeline_plan())),
    "interleaved": lambda: str(interleaved()),
    "interleaved, details": lambda: interleaved().details(),
    "zb-h1, details": lambda: pipeline_plan("zb-h1").details(),
    "long names, details": lambda: long_names().details(),
    "small, details": lambda: small_plan().details(),
    "mesh to pipeline": lambda: gpt_plan().diff(pipeline_plan()),
    "pipeline to interleaved": lambda: pipeline_plan().diff(interleaved()),
    "pipeline, mlp/up/kernel": lambda: pipeline_plan().explain("mlp/up/kernel"),
    "pipeline, params/h/mlp/up/kernel": lambda: pipeline_plan().explain("params/h/mlp/up/kernel"),
    "pipeline, mlp/up/kernel (stages 1-2)": lambda: pipeline_plan().explain("mlp/up/kernel (stages 1-2)"),
    "pipeline, dot_general": lambda: pipeline_plan().explain("dot_general bsd,df->bsf"),
    "1f1b": lambda: drawn("1f1b", 2, 3, 41),
    "zb-h1": lambda: drawn("zb-h1", 2, 3, 60),
    "64 micro-batches": lambda: drawn("1f1b", 4, 64),
    "a program": lambda: timeline.draw(example()).plain,
    "uneven and missing tasks": lambda: timeline.draw(Timeline(UNEVEN, 1)).plain,
    "no tasks": lambda: timeline.draw(Timeline((), 2, "empty")).plain,
    "log": lambda: "\n".join(
        [
            *(summary.planned_message("train_step", plan, "asked for") for plan in (gpt_plan(), small_plan())),
            summary.compiled_message("train_step", 3, 1.5),
        ]
    ),
    "reprs": lambda: "\n".join(map(repr, (gpt_plan(), pipeline_plan(), pipeline_plan().division.timeline))),
}


def stored(name: str) -> Path:
    return FOLDER / f"{re.sub('[^a-z0-9-]+', '_', name)}.txt"


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_the_stored_one(name: str) -> None:
    found = TEXTS[name]()
    assert found == stored(name).read_text(encoding="utf-8").removesuffix("\n")
    if name not in ("reprs", "log"):
        lines = found.splitlines()
        assert max(map(len, lines)) <= console.WIDTH and not any("\x1b" in line for line in lines)


if __name__ == "__main__":
    for each in TEXTS:
        stored(each).write_text(TEXTS[each]() + "\n", encoding="utf-8")
