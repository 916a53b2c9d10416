"""Plans of pipelines as text: how the step is divided, what each submesh holds and sends, and what explains it."""

from __future__ import annotations

import dataclasses

import pytest

from alpa_lite.plan.plan import Plan
from alpa_lite.report import console, sections, stages, text
from tests.plans import gpt_plan, pipeline_plan


def section(printed: str, heading: str) -> list[list[str]]:
    """The words of the lines below a heading."""
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(heading)) + 1
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    return [line.split() for line in lines[start:end]]


def test_says_how_the_step_is_divided() -> None:
    printed = pipeline_plan().details()
    assert "8 devices, 4 stages, 8 micro-batches, schedule 1f1b" in printed
    rows = section(printed, "Stages (times for one micro-batch)")[1:]
    assert rows[0] == ["0", "0-2", "0-1", "data=2", "4", "layer", "1.00", "ms", "2.00", "ms", "0", "s"]
    assert rows[1][:5] == ["1-2", "3-8", "2-5", "data=2", "2-3"]
    assert rows[2][:5] == ["3", "9-11", "6-7", "data=2", "1"]
    assert [words[0] for words in section(printed, "Memory per device")[1:]] == ["0", "1-2", "3"]
    assert "Shardings of stages 1-2 (identical; figures are for one of them)" in printed
    (words,) = [x for x in section(printed, "Shardings of stages 1-2") if x[0] == "mlp/up/kernel" and "27.0" in x]
    assert words[1:3] == ["x", "3"]
    assert "stage 3: gpt.py:101" in printed
    schedule = section(printed, "Schedule")
    assert [words[:2] for words in schedule[1:5]] == [["submesh", str(i)] for i in range(4)]
    assert "7▓" in " ".join(schedule[1])
    assert "12 stages on 4 submeshes" in pipeline_plan("interleaved-1f1b", 3).details()


@pytest.mark.parametrize("plan", [gpt_plan(), pipeline_plan(), pipeline_plan("interleaved-1f1b", 3)])
def test_seconds_of_an_average_device_add_up_to_the_step(plan: Plan) -> None:
    spent = stages.spent(plan)
    assert spent.compute + sum(spent.communication.values()) + spent.idle == pytest.approx(plan.step_seconds)
    for row in stages.memory(pipeline_plan()):
        assert row.peak == sum(size for _, size in row.kinds)


def test_seconds_are_weighted_by_devices() -> None:
    """Stage 0 alone on one device of three: a third of its seconds counts."""
    plan = pipeline_plan()
    first = dataclasses.replace(plan.stages[0], mesh_shape=(1,), compute_seconds=3e-3)
    both = (first, dataclasses.replace(plan.stages[1], compute_seconds=6e-3))
    shape = dataclasses.replace(plan.division, submeshes=(0, 1), first_devices=(0, 1))
    two = dataclasses.replace(plan, num_stages=2, stages=both, collectives=(), collective_seconds=(), division=shape)
    assert stages.spent(two).compute == pytest.approx((3e-3 + 2 * 6e-3) / 3)


def test_transfers_are_grouped_by_direction_and_keep_their_submeshes_in_a_file() -> None:
    plan = pipeline_plan()
    rows = sections.transfer_rows(plan.priced_collectives)
    assert [row.where.split(",")[0] for row, _ in rows] == ["submesh {1-3} to {0-2}", "submesh {0-2} to {1-3}"]
    moved = [c for c in plan.collectives if c.kind == "transfer"]
    assert sum(row.count for row, _ in rows) == sum(c.count for c in moved)
    assert sum(row.bytes * row.count for row, _ in rows) == sum(c.bytes * c.count for c in moved)
    data = plan.to_json()
    assert Plan.from_json(data) == plan
    routes = [c.get("route") for c in data["plan"]["collectives"]]
    assert routes[:6] == [None, None, None, None, [0, 1], [1, 2]]  # collectives within a stage have none


def test_overview_is_the_beginning_of_the_plan() -> None:
    overview = console.plain(text.overview(pipeline_plan()))
    assert pipeline_plan().details().startswith(overview) and "Shardings" not in overview
    assert "Memory per device" in console.plain(text.overview(gpt_plan()))


def test_differences_of_pipelines_and_of_one_mesh() -> None:
    found = pipeline_plan().diff(pipeline_plan("interleaved-1f1b", 3))
    assert "schedule         1f1b -> interleaved-1f1b" in found
    assert "0-2, 3-5, 6-8, 9-11 -> 0, 1, 2," in found
    assert "535 of the 590 arguments in both plans moved to other stages with the same sharding" in found
    assert "The plans do not differ." in pipeline_plan().diff(pipeline_plan())
    found = gpt_plan().diff(pipeline_plan())
    assert max(map(len, found.splitlines())) <= console.WIDTH
    assert "mesh               data=4 model=2 -> stages 0-3: data=2" in found
    (row,) = [line for line in found.splitlines() if "h_{0-11}/mlp/up/kernel" in line and "x 12" in line]
    assert row.split("x 12")[1].split("  ")[-1] == "stages 0-3: replicated 9.00 MiB"
    assert "transfer" in found and "idle" in found and "temporaries" in found


@pytest.mark.parametrize(
    "name", ["mlp/up/kernel", "h/mlp/up/kernel", "params/h/mlp/up/kernel", "params/h_{0-11}/mlp/up/kernel"]
)
def test_explain_needs_neither_stage_nor_index(name: str) -> None:
    found = pipeline_plan().explain(name)
    assert found.splitlines()[0] == "state/params/h_{0-11}/mlp/up/kernel (stages 0-3)"
    assert "> [None, model] 41.3 ms" in " ".join(found.split())
    assert found.count("What would make another choice win") == 1
    assert "Stage time, micro-batches in sequence, if this choice is forced" in found
    others = found.partition("Other matches of")[2]
    assert ("state/opt/0/{mu,nu}/h_{3-5}/mlp/up/kernel (stage 1)" in others) == (not name.startswith("params"))


def test_explain_tells_stages_apart_by_the_printed_name() -> None:
    plan, listed = pipeline_plan(), "state/opt/0/{mu,nu}/h_{3-5}/mlp/up/kernel (stage 1)"
    found = plan.explain("mlp/up/kernel (stages 1-2)")
    assert found.splitlines()[0] == "state/params/h_{3-8}/mlp/up/kernel (stages 1-2)" and listed in found
    assert plan.explain(listed).splitlines()[0] == listed
    assert "(stage 1)" in plan.explain("state['params']['h_4']['mlp']['up']['kernel']").splitlines()[0]


def test_explain_explains_the_first_of_stages_that_differ() -> None:
    plan = pipeline_plan()
    product, weight = plan.stages[1].decisions
    other = dataclasses.replace(weight, alternatives=weight.alternatives[:2])
    changed = dataclasses.replace(plan.stages[1], decisions=(product, other))
    plan = dataclasses.replace(plan, stages=(plan.stages[0], changed, *plan.stages[2:]))
    found = plan.explain("params/h/mlp/up/kernel")
    assert found.splitlines()[0] == "state/params/h_{0..11}/mlp/up/kernel (stages 0, 2-3)"
    assert "state/params/h_{3-5}/mlp/up/kernel (stage 1)" in found.partition("Other matches of")[2]
    listed = plan.explain("mlp/up/kernel").partition("Other matches of")[2]
    assert listed.index("state/params") < listed.index("state/opt")


def test_explain_counts_examples_of_the_whole_batch() -> None:
    """A stage in the middle has no batch of its own."""
    found = pipeline_plan().explain("dot_general bsd,df->bsf")
    assert found.splitlines()[0] == "dot_general bsd,df->bsf (stages 0-3)"
    assert "above 118 examples" in found
