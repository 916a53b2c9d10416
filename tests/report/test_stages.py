from __future__ import annotations

import dataclasses

import pytest

from alpa_lite.plan import Plan
from alpa_lite.report import communication, console, text
from alpa_lite.report import stages as sections
from tests.plans import gpt_plan, pipeline_plan


def _section(printed: str, heading: str) -> list[str]:
    """The lines below a heading."""
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(heading)) + 1
    return lines[start : next((i for i in range(start, len(lines)) if not lines[i]), len(lines))]


@pytest.mark.parametrize("plan", [pipeline_plan(), pipeline_plan("zb-h1"), pipeline_plan("interleaved-1f1b", 3)])
def test_fits_a_hundred_columns(plan: Plan) -> None:
    printed = plan.details()
    assert max(map(len, printed.splitlines())) <= console.WIDTH
    assert "\x1b" not in printed
    assert all(line == line.rstrip() for line in printed.splitlines())


def test_says_how_the_step_is_divided() -> None:
    printed = pipeline_plan().details()
    assert "8 devices, 4 stages, 8 micro-batches, schedule 1f1b" in printed
    rows = [line.split() for line in _section(printed, "Stages (times for one micro-batch)")[1:]]
    assert rows[0][:5] == ["0", "0-2", "0-1", "data=2", "4"]
    assert rows[1][:5] == ["1-2", "3-8", "2-5", "data=2", "2-3"]
    assert rows[2][:5] == ["3", "9-11", "6-7", "data=2", "1"]
    assert rows[0][5:] == ["layer", "1.00", "ms", "2.00", "ms", "0", "s"]
    assert [line.split()[0] for line in _section(printed, "Memory per device")[1:]] == ["0", "1-2", "3"]
    assert "Shardings of stages 1-2 (identical; figures are for one of them)" in printed
    assert "stage 3: gpt.py:101" in printed


def test_virtual_stages_are_told_from_submeshes() -> None:
    assert "12 stages on 4 submeshes" in pipeline_plan("interleaved-1f1b", 3).details()


def test_a_group_of_stages_has_the_counts_and_bytes_of_one() -> None:
    plan = pipeline_plan()
    (line,) = [
        x for x in _section(plan.details(), "Shardings of stages 1-2") if "mlp/up/kernel" in x and "27.0 MiB" in x
    ]
    assert line.split()[:3] == ["mlp/up/kernel", "x", "3"]


def test_the_schedule_is_drawn() -> None:
    lines = _section(pipeline_plan().details(), "Schedule")
    assert [line.split()[:2] for line in lines[1:5]] == [["submesh", str(i)] for i in range(4)]
    assert "7▓" in lines[1]


@pytest.mark.parametrize("plan", [gpt_plan(), pipeline_plan(), pipeline_plan("interleaved-1f1b", 3)])
def test_seconds_of_an_average_device_add_up_to_the_step(plan: Plan) -> None:
    spent = sections.spent(plan)
    assert spent.compute + sum(spent.communication.values()) + spent.idle == pytest.approx(plan.step_seconds)


def test_seconds_are_weighted_by_devices() -> None:
    """Stage 0 alone on one device of three: a third of its seconds counts."""
    plan = pipeline_plan()
    stages = (dataclasses.replace(plan.stages[0], mesh_shape=(1,), compute_seconds=3e-3), plan.stages[1])
    stages = (stages[0], dataclasses.replace(stages[1], compute_seconds=6e-3))
    shape = dataclasses.replace(plan.division, submeshes=(0, 1), first_devices=(0, 1))
    two = dataclasses.replace(plan, num_stages=2, stages=stages, collectives=(), collective_seconds=(), division=shape)
    assert sections.spent(two).compute == pytest.approx((3e-3 + 2 * 6e-3) / 3)


def test_memory_of_submeshes_adds_up_to_their_peak() -> None:
    plan = pipeline_plan()
    for row in sections.memory(plan):
        assert row.peak == sum(size for _, size in row.kinds)


def test_transfers_are_grouped_by_direction_and_nothing_is_lost() -> None:
    plan = pipeline_plan()
    rows = communication.transfer_rows(zip(plan.collectives, plan.collective_seconds, strict=True))
    assert [row.where.split(",")[0] for row, _ in rows] == ["submesh {1-3} to {0-2}", "submesh {0-2} to {1-3}"]
    moved = [c for c in plan.collectives if c.kind == "transfer"]
    assert sum(row.count for row, _ in rows) == sum(c.count for c in moved)
    assert sum(row.bytes * row.count for row, _ in rows) == sum(c.bytes * c.count for c in moved)


def test_transfers_keep_their_submeshes_in_a_file() -> None:
    plan = pipeline_plan()
    data = plan.to_json()
    assert Plan.from_json(data) == plan
    routes = [c.get("route") for c in data["plan"]["collectives"]]
    assert routes[:4] == [None] * 4 and routes[4:6] == [[0, 1], [1, 2]]  # collectives within a stage have none


def test_overview_is_the_beginning_of_the_plan() -> None:
    plan = pipeline_plan()
    assert plan.details().startswith(console.plain(text.overview(plan)))
    assert "Shardings" not in console.plain(text.overview(plan))
    assert "Memory per device" in console.plain(text.overview(gpt_plan()))


def test_diff_of_pipelines_says_what_moved() -> None:
    found = pipeline_plan().diff(pipeline_plan("interleaved-1f1b", 3))
    assert "schedule         1f1b -> interleaved-1f1b" in found
    assert "0-2, 3-5, 6-8, 9-11 -> 0, 1, 2," in found
    assert "535 of the 590 arguments in both plans moved to other stages with the same sharding" in found
    assert "The plans do not differ." in pipeline_plan().diff(pipeline_plan())


def test_diff_of_one_mesh_and_a_pipeline_has_a_row_for_all_layers() -> None:
    found = gpt_plan().diff(pipeline_plan())
    assert max(map(len, found.splitlines())) <= console.WIDTH
    assert "mesh               data=4 model=2 -> stages 0-3: data=2" in found
    (row,) = [line for line in found.splitlines() if "h_{0-11}/mlp/up/kernel" in line and "x 12" in line]
    assert row.split("x 12")[1].split("  ")[-1] == "stages 0-3: replicated 9.00 MiB"
    assert "transfer" in found and "idle" in found and "temporaries" in found


def test_explain_tells_what_alike_stages_share_once() -> None:
    plan = pipeline_plan()
    found = plan.explain("params/h_{0-11}/mlp/up/kernel")
    assert "state/params/h_{0-11}/mlp/up/kernel (stages 0-3)" in found
    assert found.count("What would make another choice win") == 1
    assert "Stage time, micro-batches in sequence, if this choice is forced" in found
    one = plan.explain("state['params']['h_4']['mlp']['up']['kernel']")
    assert "(stage 1)" in one.splitlines()[0]


@pytest.mark.parametrize(
    "name", ["mlp/up/kernel", "h/mlp/up/kernel", "params/h/mlp/up/kernel", "h_{0-11}/mlp/up/kernel"]
)
def test_explain_needs_neither_stage_nor_index(name: str) -> None:
    found = pipeline_plan().explain(name)
    assert found.splitlines()[0] == "state/params/h_{0-11}/mlp/up/kernel (stages 0-3)"
    assert "> [None, model] 41.3 ms" in " ".join(found.split())
    others = found.partition("Other matches of")[2]
    assert ("state/opt/0/{mu,nu}/h_{3-5}/mlp/up/kernel (stage 1)" in others) == (not name.startswith("params"))


def test_explain_tells_stages_apart_by_what_is_printed() -> None:
    found = pipeline_plan().explain("mlp/up/kernel (stages 1-2)")
    assert found.splitlines()[0] == "state/params/h_{3-8}/mlp/up/kernel (stages 1-2)"
    listed = "state/opt/0/{mu,nu}/h_{3-5}/mlp/up/kernel (stage 1)"
    assert listed in found
    assert pipeline_plan().explain(listed).splitlines()[0] == listed


def test_explain_explains_the_first_of_stages_that_differ() -> None:
    plan = pipeline_plan()
    product, weight = plan.stages[1].decisions
    other = dataclasses.replace(weight, alternatives=weight.alternatives[:2])
    changed = dataclasses.replace(plan.stages[1], decisions=(product, other))
    stages = (plan.stages[0], changed, *plan.stages[2:])
    found = dataclasses.replace(plan, stages=stages).explain("params/h/mlp/up/kernel")
    assert found.splitlines()[0] == "state/params/h_{0..11}/mlp/up/kernel (stages 0, 2-3)"
    assert "state/params/h_{3-5}/mlp/up/kernel (stage 1)" in found.partition("Other matches of")[2]
    listed = dataclasses.replace(plan, stages=stages).explain("mlp/up/kernel").partition("Other matches of")[2]
    assert listed.index("state/params") < listed.index("state/opt")


def test_explain_counts_examples_of_the_whole_batch() -> None:
    """A stage in the middle has no batch of its own."""
    found = pipeline_plan().explain("dot_general bsd,df->bsf")
    assert found.splitlines()[0] == "dot_general bsd,df->bsf (stages 0-3)"
    assert "above 118 examples" in found
