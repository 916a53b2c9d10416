from __future__ import annotations

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from alpa_lite.plan.decisions import Candidate
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Collective, Leaf
from alpa_lite.report import console, sections, stages, text
from tests.plans import gpt_plan, pipeline_plan, small_plan


def long_names() -> Plan:
    """Paths, places and specs that are wider than the page."""
    plan = gpt_plan(2)
    path = "state" + "".join(f"['a_rather_long_module_name_{i}']" for i in range(6))
    leaf = Leaf(path, (8192, 8192, 8192), "bfloat16", 2 * 8192**3, "state", P(("data", "model"), None, None))
    stage = dataclasses.replace(plan.stages[0], arguments=(leaf, *plan.stages[0].arguments))
    where = "a_module_with_a_long_name.py:1234 " + "scope/" * 40
    collectives = (Collective("collective_permute", ("data", "model"), 2**40, 10**6, 0, where),)
    return dataclasses.replace(
        plan, stages=(stage,), collectives=collectives, collective_seconds=(1.0,), notes=("word " * 60,)
    )


PLANS = {
    "12 layers": gpt_plan, "96 layers": lambda: gpt_plan(96), "small": small_plan, "long names": long_names,
    "pipeline": pipeline_plan, "zb-h1": lambda: pipeline_plan("zb-h1"),
    "interleaved": lambda: pipeline_plan("interleaved-1f1b", 3),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_fits_a_hundred_columns_without_colour(name: str) -> None:
    lines = PLANS[name]().details().splitlines()
    assert max(map(len, lines)) <= console.WIDTH
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)


def test_alike_layers_are_one_row_with_their_bytes() -> None:
    lines = gpt_plan().details().splitlines()
    row = next(line for line in lines if "h_{0-11}/mlp/up/kernel" in line)
    assert row.split() == ["h_{0-11}/mlp/up/kernel", "x", "12", "f32[768,3072]", "P(None,", "'model')", "54.0", "MiB"]
    assert len(gpt_plan(96).details().splitlines()) == len(lines)


def test_says_everything_that_a_plan_holds() -> None:
    printed = gpt_plan().details()
    for wanted in (
        "Plan Auto() for 8 V100-SXM2-16GB", "mesh data=4 model=2", "Predicted step: 48.2 ms", "over model",
        "reduce_scatter", "x 74", "h_{0-11}/attn/out -> [data,",  # a layout is not taken for markup
        "peak, of 14.4 GiB", "no rule describes it; gpt.py:101", "slower by 7 %", "no gap", "tracing 1.10 s",
        "dtype promoted", "the step neither returns nor updates it",
    ):  # fmt: skip
        assert wanted in printed, wanted


def test_estimates_below_the_chosen_plan_are_not_called_slower() -> None:
    """Estimates of the stage search that lie below the pipeline that was priced and planned."""
    rough = "faster by 10 % in a rough estimate, not priced itself"
    for factor, status, said in (
        (0.9, "optimal", rough), (0.9, "slower", rough), (1 - 1e-9, "slower", "equally fast"),
        (1.5, "optimal", "slower by 50 %"), (None, "cutoff", "not finished: cannot be faster"),
    ):  # fmt: skip
        seconds = None if factor is None else factor * 0.05
        assert text._status(Candidate("a", (4,), seconds, 1, status), 0.05) == said


def test_small_leaves_are_folded_and_nothing_is_lost() -> None:
    plan = gpt_plan(1)
    leaves = tuple(
        Leaf(f"p.{chr(97 + i // 26)}{chr(97 + i % 26)}", (i + 1,), "int8", i + 1, "state", P()) for i in range(90)
    )
    stage = dataclasses.replace(plan.stages[0], arguments=leaves)
    lines = dataclasses.replace(plan, stages=(stage,)).details().splitlines()
    (folded,) = [line for line in lines if "smaller arguments" in line]
    shown = [line for line in lines if "i8[" in line]
    assert int(folded.split()[3]) + len(shown) == 90
    assert any("i8[90]" in line for line in shown) and not any("i8[1]" in line for line in shown)


def test_seconds_and_counts_of_collectives_add_up() -> None:
    plan = gpt_plan()
    costs = stages.spent(plan).communication
    assert sum(costs.values()) == pytest.approx(sum(plan.collective_seconds))
    assert next(iter(costs)) == ("model",)
    rows = sections.collective_rows(plan.priced_collectives)
    assert sum(r.count for r, _ in rows) == sum(c.count for c in plan.collectives)
    assert len(rows) == 7
