"""Texts of plans: layers, stages and collectives, how rows are grouped, and how figures are written."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from alpa_lite.ir import units
from alpa_lite.plan.decisions import Candidate
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.records import Leaf
from alpa_lite.report import console, grouping, prose, sections, stages
from tests.plans import gpt_plan, pipeline_plan


def test_alike_layers_are_one_row_with_their_bytes() -> None:
    lines, more = (gpt_plan(layers).details().splitlines() for layers in (12, 96))
    assert len(more) == len(lines) and max(map(len, more)) <= console.WIDTH


def test_estimates_below_the_chosen_plan_are_not_called_slower() -> None:
    """Estimates of the stage search that lie below the pipeline that was priced and planned."""
    rough = "faster by 10 % in a rough estimate, not priced itself"
    for factor, status, said in (
        (0.9, "optimal", rough), (0.9, "slower", rough), (1 - 1e-9, "slower", "equally fast"),
        (1.5, "optimal", "slower by 50 %"), (None, "cutoff", "not finished: cannot be faster"),
    ):  # fmt: skip
        seconds = None if factor is None else factor * 0.05
        assert prose.sentence("status", Candidate("a", (4,), seconds, 1, status), 0.05) == said


def test_every_sentence_of_the_template_is_said_somewhere() -> None:
    folder = Path(prose.__file__).parents[1]
    template = (folder / "report" / "prose.txt").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in folder.glob("**/*.py"))
    for name in re.findall(r"{% macro (\w+)", template):
        assert f'"{name}"' in code or re.search(rf"(?<!macro ){name}\(", template), name


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
    costs = stages.seconds_by_use(plan).communication
    assert sum(costs.values()) == pytest.approx(sum(plan.collective_seconds))
    assert next(iter(costs)) == ("model",)
    rows = sections.collective_rows(plan.priced_collectives)
    assert sum(r.count for r, _ in rows) == sum(c.count for c in plan.collectives)
    assert len(rows) == 7


@pytest.mark.parametrize("plan", [gpt_plan(), pipeline_plan(), pipeline_plan("interleaved-1f1b", 3)])
def test_seconds_of_an_average_device_add_up_to_the_step(plan: Plan) -> None:
    spent = stages.seconds_by_use(plan)
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
    assert stages.seconds_by_use(two).compute == pytest.approx((3e-3 + 2 * 6e-3) / 3)


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


def test_explain_finds_stages_by_the_end_of_a_path_and_by_the_printed_name() -> None:
    plan = pipeline_plan()
    short, long = (plan.explain(f"{name}h{rest}/mlp/up/kernel") for name, rest in (("", ""), ("params/", "_{0-11}")))
    for found in (short, long):
        assert found.splitlines()[0] == "state/params/h_{0-11}/mlp/up/kernel (stages 0-3)"
    listed = "state/opt/0/{mu,nu}/h_{3-5}/mlp/up/kernel (stage 1)"
    assert listed in short and listed not in long and plan.explain(listed).splitlines()[0] == listed
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


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        ([f"s['h_{i}']['k']" for i in range(12)], ["s/h_{0-11}/k"]),
        ([f"s.a['h_{i}']['{name}'].w" for i in range(2) for name in "qkv"], ["s/a/h_{0,1}/{q,k,v}/w"]),
        (["s.mu['a']", "s.nu['a']"], ["s/{mu,nu}/a"]),
        (["s.mu", "s['nu']"], ["s/mu", "s/nu"]),  # an attribute and a key
        (["a['x']", "b['x']"], ["a/x", "b/x"]),  # two arguments
        ([f"s['{n}']" for n in "abcdefgh"], ["s/{a,b,c,d,+4}"]),
    ],
)
def test_names_that_differ_in_one_key_are_one_row(names: list[str], rows: list[str]) -> None:
    found = grouping.group((n, None) for n in names)
    assert [row.path for row in found] == rows
    assert sorted(path for row in found for path in row.members) == sorted(names)


def test_different_attributes_keep_rows_apart() -> None:
    rows = grouping.group((f"s['h_{i}']", i == 2) for i in range(4))
    assert [row.path for row in rows] == ["s/h_{0,1,3}", "s/h_2"]


keys = st.one_of(
    st.sampled_from(["['a']", "['b']", ".c", ".d"]), st.integers(0, 12).map(lambda i: f"['h_{i}']"), st.just("[3]")
)


@given(st.lists(st.tuples(st.lists(keys, max_size=4).map(lambda k: "s" + "".join(k)), st.booleans()), unique=True))
@settings(max_examples=50)
def test_every_path_is_in_exactly_one_row(items: list[tuple[str, bool]]) -> None:
    rows = grouping.group(items)
    members = [path for row in rows for path in row.members]
    assert sorted(members) == sorted(path for path, _ in items)
    sections = grouping.sections(rows)
    assert sorted(path for s in sections for row in s.rows for path in row.members) == sorted(members)
    for section in sections:
        for row in section.rows:
            assert row.tokens[: len(section.prefix)] == section.prefix
            assert len(row.tokens) > len(section.prefix)


FIGURES: dict[Callable[..., str], dict[Any, str]] = {
    units.seconds: {
        0.0: "0 s", 1.0: "1.00 s", 0.9999: "1.00 s", 0.0413: "41.3 ms", 8.2e-4: "820 µs", 3e-9: "3.00 ns",
        1234.5: "1,234 s", -0.002: "-2.00 ms", float("inf"): "inf",
    },
    units.nbytes: {0: "0 B", 1023: "1023 B", 2**20: "1.00 MiB", 3_389_050_880: "3.16 GiB", 2**41: "2.00 TiB"},
    units.exact_bytes: {1000: "1000 B", 2**30: "1.00 GiB (1,073,741,824 bytes)", 1536.0: "1.50 KiB (1,536 bytes)"},
    units.spec: {
        P(): "replicated", P(None, ()): "replicated", P("a", None): "P('a')", P(None, "a"): "P(None, 'a')",
        P(("a", "b"), None, "c"): "P(('a', 'b'), None, 'c')", P((), "a"): "P(None, 'a')",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "value"), [(function, value) for function in FIGURES for value in FIGURES[function]]
)
def test_text(function: Callable[..., str], value: Any) -> None:
    assert function(value) == FIGURES[function][value]


def test_types_and_percent() -> None:
    types = {"float32": "f32", "bfloat16": "bf16", "int8": "i8", "uint32": "u32", "complex64": "c64", "bool": "bool"}
    for dtype, shown in {**types, "key<fry>": "key<fry>", "float8_e4m3fn": "f8_e4m3fn"}.items():
        assert units.type_name(dtype, (2, 3)) == f"{shown}[2,3]"
    for part, shown in {0: "0 %", 0.001: "<1 %", 0.5: "50 %", 1: "100 %"}.items():
        assert units.percent(part, 1.0) == shown


@given(st.floats(0, 2), st.integers(1, 60))
def test_bars_fit_and_show_what_is_not_zero(part: float, width: int) -> None:
    bar = units.bar(part, 1.0, width)
    assert len(bar) <= width and bool(bar) == (part > 0)
    assert part < 1 or bar == "█" * width
