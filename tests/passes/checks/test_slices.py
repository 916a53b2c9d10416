"""Planned and found collectives of several slices, in both levels."""

import pytest

from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks import slices
from alpa_lite.passes.checks.hlo import compare_hlo
from alpa_lite.plan.records import Collective
from tests.passes.checks.test_hlo import as_written

MESH = LogicalMesh((8,), ("x",))
HEAD = "HloModule jit_step, is_scheduled=true, num_partitions=4\n\nENTRY %main (p: f32[64]) -> f32[64] {\n"
WITHIN = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"


def planned(kind: str, axes: tuple[str, ...], size: int, count: int) -> Collective:
    """A collective of a plan."""
    return Collective(kind, axes, size, count, 0, "")


PLAN = (
    planned("reduce_scatter", ("x",), 65536, 1),
    planned("all_gather", ("x",), 65536, 1),
    planned("all_reduce", ("x",), 512, 3),
    planned("all_reduce", ("x",), 4, 1),
)


def between(number: int, kind: str, sent: str, received: str) -> list[str]:
    """A transfer as libtpu 0.0.50 prints it."""
    name = f'rendezvous="{kind.lower()}_{number}",_xla_megascale_target="{{1,2}}x{{0:3}}"'
    name = f'_xla_host_transfer_{name},_xla_megascale_transfer_type="{kind}"'
    rest = f"is_host_transfer=true, frontend_attributes={{{name}}}"
    return [
        f"  %send.{number} = ({sent}{{0:T(8,128)}}, u32[]{{:S(2)}}, token[]) send(%p, %t), channel_id={number}, {rest}",
        f"  %recv.{number} = ({received}{{0:T(8,128)}}, u32[]{{:S(2)}}, token[]) recv(%t), channel_id={number}, {rest}",
    ]


LINES = [
    f"  %all-reduce.1 = (f32[128,8,16]{{0}}, f32[8,16]{{0}}) all-reduce(%p, %p), {WITHIN}, to_apply=%add",
    f"  %all-gather.2 = f32[4,2,16]{{0}} all-gather(%p), {WITHIN}, dimensions={{0}}",
    f"  %all-reduce.3 = f32[3,128]{{0}} all-reduce(%p), {WITHIN}, to_apply=%add",
    f"  %all-gather.4 = f32[8,16,128]{{0}} all-gather(%p), {WITHIN}, dimensions={{0}}",
    *between(1, "REDUCE_SCATTER", "f32[4096]", "f32[2048]"),
    *between(2, "ALL_REDUCE", "f32[256]", "f32[256]"),
    *between(3, "ALL_REDUCE", "f32[384]", "f32[384]"),
    *between(4, "ALL_GATHER", "f32[16,8,16]", "f32[32,8,16]"),
]


def report(lines: list[str], plan: tuple[Collective, ...] = PLAN):
    text = HEAD + "\n".join(lines) + "\n  ROOT %r = f32[64]{0} copy(%p)\n}\n"
    return compare_hlo(text, MESH, plan, as_written(plan))


def test_a_collective_over_slices_is_found_in_both_levels() -> None:
    found = report(LINES)
    assert found.ok, found.differences
    said = [str(rewrite) for rewrite in found.rewrites]
    assert "reduce-scatter as all-reduce: 1 x reduce_scatter over (x) of 65536 bytes" in said
    assert any(line.startswith("packed into tiles: 2 x all_reduce over (x) of 512 bytes, 1536") for line in said)
    assert said[-1].startswith("between slices: 4 x for 6 collectives: 1 x all_gather, 2 x all_reduce, 1 x reduce_sc")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (LINES[:-2], "bytes between slices, fewer than"),
        ([*LINES, *between(5, "ALL_TO_ALL", "f32[4]", "f32[4]")], "1 x all_to_all between slices"),
        ([line.replace("f32[3,128]", "f32[5,128]") for line in LINES], "all_reduce over (x) of 2560 bytes"),
        ([*LINES, LINES[1].replace("all-gather.2", "all-gather.5").replace("16]", "32]")], "found but not planned"),
    ],
)
def test_a_lack_or_an_excess_in_either_level_is_a_difference(lines: list[str], words: str) -> None:
    assert any(words in line for line in report(lines).differences)


def test_a_transfer_that_nothing_in_the_plan_needs_is_a_difference() -> None:
    plan = (planned("all_reduce", ("y",), 4, 1),)
    text = HEAD + f"  %a = f32[] all-reduce(%p), {WITHIN}, to_apply=%add\n"
    mesh = LogicalMesh((2, 4), ("x", "y"))
    assert compare_hlo(text + "}\n", mesh, plan, as_written(plan)).ok
    text += "\n".join(between(1, "ALL_REDUCE", "f32[1]", "f32[1]")) + "\n}\n"
    assert "1 transfers between slices, of 0" in compare_hlo(text, mesh, plan, as_written(plan)).differences[0]


@pytest.mark.parametrize(
    ("shape", "partitions", "part"),
    [((8,), 8, (8,)), ((2, 4), 4, (1, 4)), ((4, 2), 4, (2, 2)), ((2, 2, 2), 2, (1, 1, 2)), ((3, 2), 3, (3, 2))],
)  # fmt: skip
def test_the_major_axes_are_divided_by_slices(shape, partitions, part) -> None:
    mesh = LogicalMesh(shape, ("x", "y", "z")[: len(shape)])
    assert slices.part_of(f"HloModule m, num_partitions={partitions}\n", mesh).shape == part
    assert slices.part_of("HloModule m\n", mesh) is mesh
