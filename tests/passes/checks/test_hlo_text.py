"""Collectives read from optimised HLO in the syntax of each backend, and axes from replica groups in every syntax."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks import replica_groups
from alpa_lite.passes.checks.hlo_text import read_hlo

MESH = LogicalMesh((4, 2), ("d", "m"))
GPU, TPU = ((Path(__file__).parents[2] / "golden" / "hlo" / f"{name}.txt").read_text() for name in ("gpu", "tpu"))


def parsed(text, mesh=MESH):
    return read_hlo(text, mesh).collectives


def summary(text):
    return sorted((c.kind, c.axes, c.bytes, c.count, c.dtype) for c in parsed(text))


def test_gpu_syntax():
    assert summary(GPU) == [
        ("all_gather", ("d",), 128, 1, "bf16"),
        ("all_gather", ("d",), 128, 1, "f32"),
        ("all_gather", ("m",), 64, 1, "bf16"),
        ("all_reduce", ("d",), 512, 1, "f32"),
        ("all_reduce", ("m",), 32, 1, "f32"),
        ("all_reduce", ("m",), 512, 1, "f32"),
        ("collective_permute", ("d",), 32, 1, "bf16"),
        ("reduce_scatter", ("d",), 512, 1, "f32"),
        ("reduce_scatter", ("m",), 512, 1, "f32"),
        ("send", ("d", "m"), 32, 1, "bf16"),
    ]
    assert next(c for c in parsed(GPU) if c.op == "ar").where == "jit(step)/psum"


def test_tpu_syntax_loops_branches_and_fusions():
    assert summary(TPU) == [
        ("all_gather", ("m",), 8 * 256 * 2, 3, "bf16"),
        ("all_reduce", ("d",), 64 * 256 * 2, 1, "bf16"),
        *(("all_reduce", ("d", "m"), 4 * n, 1, "f32") for n in range(16, 22)),
        ("all_to_all", ("m",), 2 * 8 * 128 * 2, 2, "bf16"),
        ("collective_permute", ("m",), 8 * 128 * 2, 15, "bf16"),
    ]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_damaged_text_never_stops_the_parser(data):
    text = data.draw(st.sampled_from([GPU, TPU]))
    lines = text.splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        cut = data.draw(st.integers(0, len(lines[at])))
        lines[at] = lines[at][:cut] + data.draw(st.text(alphabet="(){}[]=,% a1\"'<", max_size=5)) + lines[at][cut + 1 :]
    read_hlo("\n".join(lines), MESH)
    read_hlo("", MESH)


UNREADABLE = [
    '%"a name" = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add',
    "%new = f32[8]{0}!all-gather(%x), replica_groups={{0,1}}, dimensions={0}",
    "%new = (f32[8]{0} all-to-all(%x), replica_groups={}, dimensions={0}",
    "%new : f32[8]{0} = collective-permute(%x), source_target_pairs={{0,1}}",
    "all-reduce(%x)",
]


@pytest.mark.parametrize("line", UNREADABLE)
@pytest.mark.parametrize("text", [GPU, TPU], ids=["gpu", "tpu"])
def test_a_line_that_may_communicate_and_cannot_be_read_is_reported(text, line):
    assert read_hlo(text, MESH).unread_lines == ()
    head, tail = text.rsplit("  ROOT ", 1)
    read = read_hlo(f"{head}  {line}\n  ROOT {tail}", MESH)
    assert read.collectives == parsed(text)
    assert read.unread_lines == (f"main: {line}",)
    assert read_hlo(f"  {line}\n", MESH).unread_lines == (f": {line}",)


def test_lines_that_cannot_communicate_may_be_unreadable():
    lines = ["%new : f32[8]{0} = add(%x)", 'note {op_name="jit(step)/all-reduce"}', "~ send(%x)", "%a-wall-clock ~"]
    head, tail = GPU.rsplit("  ROOT ", 1)
    text = head + "".join(f"  {line}\n" for line in lines) + "  ROOT " + tail
    assert read_hlo(text, MESH) == read_hlo(GPU, MESH)


def test_collectives_that_the_entry_is_not_seen_to_reach_are_reported():
    text = TPU.replace("true_computation=%yes", "when_true=%yes").replace("to_apply=%yes", "target=%yes")
    assert read_hlo(text, MESH).unread_lines == ()  # it is a branch of the other conditional
    read = read_hlo(TPU.replace("kind=kCustom, calls=%fused", "kind=kCustom, runs=%fused"), MESH)
    assert read.unread_lines == ("fused, which the entry is not seen to reach: summed (all_reduce)",)
    assert ("all_reduce", ("d",)) not in {(c.kind, c.axes) for c in read.collectives}


def test_asynchronous_calls_and_unknown_names_of_collectives():
    started = GPU.replace(" async-start(%x), calls=%wrapped", " call-start(%x), to_apply=%wrapped")
    assert read_hlo(started, MESH) == read_hlo(GPU, MESH)
    renamed = parsed(GPU.replace(" all-gather-start(%y)", " fast-all-gather-start(%y)"))
    assert [c.kind for c in renamed if c.op == "ag"] == ["fast-all-gather"]


def test_steps_of_one_collective_that_is_fused_into_other_work_count_once():
    """TPU, libtpu 0.0.50: each fusion of a chain has a copy of the instruction."""
    line = (
        "f32[64,128]{0,1:T(8,128)} all-gather(%p), channel_id=1, replica_groups=mesh['x'=8] {'x'}, dimensions={1}, "
        'use_global_device_ids=true, frontend_attributes={chain_id="CHAIN"}, backend_config={}'
    )
    fused = "\n".join(
        f"%fused.{i} (p: f32[64,16]) -> f32[64,128] {{\n  %p = f32[64,16]{{0,1}} parameter(0)\n"
        f"  ROOT %all-gather.{i} = {line.replace('CHAIN', chain)}\n}}\n"
        for i, chain in enumerate(["0", "0", "1", "0"])
    )
    calls = "\n".join(f"  %f{i} = f32[64,128] fusion(%x), kind=kCustom, calls=%fused.{i}" for i in range(4))
    text = f"HloModule m, is_scheduled=true\n\n{fused}\nENTRY %main (x: f32[64,16]) -> f32[64,128] {{\n{calls}\n}}\n"
    found = parsed(text, LogicalMesh((8,), ("x",)))
    assert [(c.kind, c.axes, c.bytes, c.count, c.chain) for c in found] == [
        ("all_gather", ("x",), 64 * 128 * 4, 1, 0), ("all_gather", ("x",), 64 * 128 * 4, 1, 1)
    ]  # fmt: skip


@st.composite
def meshes_and_axes(draw):
    """A mesh of up to four axes, some of one device, and a subset of its axes longer than one."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    mesh = LogicalMesh(shape, tuple(f"a{i}" for i in range(len(shape))))
    long = [name for name, n in zip(mesh.axis_names, shape, strict=True) if n > 1]
    axes = tuple(name for name in long if draw(st.booleans()))
    return mesh, axes


def listed(groups):
    return str(groups.tolist()).replace("[", "{").replace("]", "}").replace(" ", "")


def iota(mesh, axes):
    inside = [mesh.axis_names.index(a) for a in axes]
    order = [i for i in range(len(mesh.shape)) if i not in inside] + inside
    rows, width = mesh.size // mesh.product(axes), mesh.product(axes)
    return f"[{rows},{width}]<=[{','.join(map(str, mesh.shape))}]T({','.join(map(str, order))})"


def named(mesh, axes):
    sizes = ",".join(f"'{n}'={s}" for n, s in zip(mesh.axis_names, mesh.shape, strict=True))
    return f"mesh[{sizes}] {{{','.join(repr(a) for a in axes)}}}"


@settings(max_examples=80, deadline=None)
@given(meshes_and_axes(), st.randoms())
def test_every_syntax_gives_the_axes_back(case, random):
    mesh, axes = case
    groups = replica_groups.groups_of_axes(axes, mesh)
    coordinates = zip(mesh.axis_names, np.unravel_index(groups, mesh.shape), strict=True)
    assert tuple(name for name, c in coordinates if np.ptp(c, axis=1).any()) == axes
    assert groups.shape[1] == mesh.product(axes) and sorted(groups.ravel()) == [*range(mesh.size)]
    assert replica_groups.axes_of_groups(groups, mesh) == axes
    rows = groups.tolist()
    random.shuffle(rows)
    shuffled = np.array(rows)
    for text in (listed(shuffled), str(rows), iota(mesh, axes), named(mesh, axes)):
        assert replica_groups.axes_from_text(text, mesh) == axes, text


@settings(max_examples=50, deadline=None)
@given(meshes_and_axes())
def test_permutations_name_the_axes_along_which_they_move(case):
    mesh, axes = case
    source = np.stack(np.unravel_index(np.arange(mesh.size), mesh.shape))
    step = np.array([axis in axes for axis in mesh.axis_names])[:, None]
    target = np.ravel_multi_index(tuple((source + step) % np.array(mesh.shape)[:, None]), mesh.shape)
    pairs = np.stack([np.arange(mesh.size), target], axis=1)
    for text in (listed(pairs), str(pairs.tolist())):
        assert replica_groups.axes_from_pairs(text, mesh) == axes


def test_groups_that_no_axes_give_are_named_as_printed():
    mesh = LogicalMesh((4, 2), ("d", "m"))
    for text in ("{{0,1,2,3},{4,5,6,7}}", "{{0,1},{2,3}}", "{{0,1,2},{3,4,5,6,7}}", "[4,2]<=[4,4]", "nonsense"):
        (axis,) = replica_groups.axes_from_text(text, mesh)
        assert text in axis
    assert replica_groups.axes_from_text("", mesh) == ("d", "m")
    assert replica_groups.axes_from_text("{}", mesh) == ("d", "m")
    assert replica_groups.axes_from_text("{{0},{1},{2},{3},{4},{5},{6},{7}}", mesh) == ()
    assert replica_groups.axes_from_pairs("{}", mesh) == ("pairs {}",)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("[4,2]<=[2,2,2]T(2,1,0)", [[0, 4], [2, 6], [1, 5], [3, 7]]),
        ("mesh['d'=4,'m'=2] {'d':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['d'=4,'m'=2] {'d':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['d'=2,'m'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'m'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['d'=4,'m'=2] {'d','d'}", None),
        ("mesh['d'=4,'m'=3] {'d'}", None),
        ("[4,2]<=[2,2,2]T(7,1,0)", None),
        ("[3,2]<=[8]", None),
    ],
)
def test_printed_groups(text, groups):
    parsed = replica_groups.parse_groups(text, 8)
    assert (None if parsed is None else parsed.tolist()) == groups


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="mesh[]{}()<=T,:'0123456789dx ", max_size=40))
def test_no_text_stops_the_parser(text):
    mesh = LogicalMesh((4, 2), ("d", "m"))
    assert isinstance(replica_groups.axes_from_text(text, mesh), tuple)
    assert isinstance(replica_groups.axes_from_pairs(text, mesh), tuple)


def test_normal_axes_drop_what_has_one_device_and_follow_the_mesh():
    mesh = LogicalMesh((4, 1, 2), ("d", "one", "m"))
    assert replica_groups.normal_axes(("m", "one", "d"), mesh) == ("d", "m")
    assert replica_groups.normal_axes(("other", "m"), mesh) == ("m", "other")
