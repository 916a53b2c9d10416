"""Collectives read from optimised HLO in the syntax of each backend; `test_hlo.py` reads programs of this JAX."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks.hlo_text import parse_hlo, read_hlo

MESH = LogicalMesh((4, 2), ("d", "m"))

GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (p: f32[32,4]) -> f32[8,4] {
  %p = f32[32,4]{1,0} parameter(0)
  ROOT %scattered = f32[8,4]{1,0} reduce-scatter(%p), channel_id=9, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
}

ENTRY %main (x: f32[32,4], y: bf16[16]) -> (f32[32,4], f32[8,4], bf16[32], bf16[16]) {
  %x = f32[32,4]{1,0} parameter(0)
  %y = bf16[16]{0} parameter(1)
  %ar = f32[32,4]{1,0} all-reduce-start(%x), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/psum" source_file="step.py" source_line=3}, backend_config={"collective_backend_config":{"is_sync":false}}
  %ar-done = f32[32,4]{1,0} all-reduce-done(%ar)
  %many = (f32[32,4]{1,0}, f32[8]{0}) all-reduce-start(%x, %z), channel_id=2, replica_groups=[4,2]<=[8], to_apply=%add
  %many-done = (f32[32,4]{1,0}, f32[8]{0}) all-reduce-done(%many)
  %ag = (bf16[16]{0}, bf16[32]{0}) all-gather-start(%y), channel_id=3, replica_groups=[4,2]<=[8], dimensions={0}
  %ag-done = bf16[32]{0} all-gather-done(%ag)
  %two = ((bf16[16]{0}, f32[8]{0}), (bf16[64]{0}, f32[32]{0})) all-gather-start(%y, %z), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
  %two-done = (bf16[64]{0}, f32[32]{0}) all-gather-done(%two)
  %rs = ((f32[32,4]{1,0}), f32[8,4]{1,0}) async-start(%x), calls=%wrapped
  %rs-done = f32[8,4]{1,0} async-done(%rs), calls=%wrapped
  %sugar = ((f32[32,4]{1,0}), f32[16,4]{1,0}) reduce-scatter-start(%x), channel_id=11, replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
  %sugar-done = f32[16,4]{1,0} reduce-scatter-done(%sugar)
  %cp = (bf16[16]{0}, bf16[16]{0}) collective-permute-start(%y), channel_id=4, source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}
  %cp-done = bf16[16]{0} collective-permute-done(%cp)
  %one = f32[32,4]{1,0} all-reduce(%x), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %s = (bf16[16]{0}, u32[], token[]) send(%y, %t), channel_id=7
  %s-done = token[] send-done(%s), channel_id=7
  ROOT %out = (f32[32,4]{1,0}, f32[8,4]{1,0}, bf16[32]{0}, bf16[16]{0}) tuple(%ar-done, %rs-done, %ag-done, %cp-done)
}
"""  # noqa: E501

TPU = """HloModule jit_step, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[]{:T(256)} parameter(0)
  %b = bf16[]{:T(256)} parameter(1)
  ROOT %sum = bf16[]{:T(256)} add(%a, %b)
}

%fused (p: bf16[64,256]) -> bf16[16,256] {
  %p = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(0)
  %summed = bf16[64,256]{1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=5, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  ROOT %part = bf16[16,256]{1,0:T(8,128)(2,1)} dynamic-slice(%summed, %i, %j), dynamic_slice_sizes={16,256}
}

%inner_condition (c: (s32[], bf16[8,128])) -> pred[] {
  %c = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %n = s32[]{:T(128)} constant(3)
  ROOT %less = pred[]{:T(512)} compare(%i, %n), direction=LT
}

%inner_body (c: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %c = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} get-tuple-element(%c), index=1
  %permuted = (bf16[8,128]{1,0:T(8,128)(2,1)}, bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%x), channel_id=3, source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}
  %permuted-done = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} collective-permute-done(%permuted)
  ROOT %out = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%i, %permuted-done)
}

%outer_condition (c: (s32[], bf16[8,128])) -> pred[] {
  %c = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %less = pred[]{:T(512)} custom-call(%c), custom_call_target="opaque"
}

%outer_body (c: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %c = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %w = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) while(%c), condition=%inner_condition, body=%inner_body
}

%yes (p: bf16[8,128]) -> bf16[8,256] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gathered = bf16[8,256]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=8, replica_groups=mesh['d'=4,'m'=2] {'m'}, dimensions={1}
}

%no (p: bf16[8,128]) -> bf16[8,256] {
  %p = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %pieces = bf16[2,8,128]{2,1,0:T(8,128)(2,1)} all-to-all(%p), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
}

ENTRY %main (x: bf16[64,256]) -> bf16[16,256] {
  %x = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(0)
  %w = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) while(%t), condition=%outer_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"5"},"flag_configs":[]}
  %c = bf16[8,256]{1,0:T(8,128)(2,1)} conditional(%flag, %y, %y), true_computation=%yes, false_computation=%no
  %b = bf16[8,256]{1,0:T(8,128)(2,1)} conditional(%which, %y, %y), branch_computations={%yes, %no}
  %called = bf16[8,256]{1,0:T(8,128)(2,1)} call(%y), to_apply=%yes
  %wide = (f32[16]{0}, f32[17]{0}, f32[18]{0}, f32[19]{0}, f32[20]{0}, /*index=5*/f32[21]{0}) all-reduce(%a, %b, %c, %d, %e, /*index=5*/%f), replica_groups={}, to_apply=%add
  ROOT %scattered = bf16[16,256]{1,0:T(8,128)(2,1)} fusion(%x), kind=kCustom, calls=%fused
}
"""  # noqa: E501


def summary(text, mesh=MESH):
    return sorted((c.kind, c.axes, c.bytes, c.count, c.dtype) for c in parse_hlo(text, mesh))


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
    first = next(c for c in parse_hlo(GPU, MESH) if c.op == "ar")
    assert (first.where, first.loops) == ("jit(step)/psum", 0)


def test_tpu_syntax_loops_branches_and_fusions():
    assert summary(TPU) == [
        ("all_gather", ("m",), 8 * 256 * 2, 3, "bf16"),
        ("all_reduce", ("d",), 64 * 256 * 2, 1, "bf16"),
        *(("all_reduce", ("d", "m"), 4 * n, 1, "f32") for n in range(16, 22)),
        ("all_to_all", ("m",), 2 * 8 * 128 * 2, 2, "bf16"),
        ("collective_permute", ("m",), 8 * 128 * 2, 15, "bf16"),
    ]
    assert next(c.loops for c in parse_hlo(TPU, MESH) if c.kind == "collective_permute") == 2

    # A device count stands for one axis.
    assert {c.axes for c in parse_hlo(TPU, 8) if c.kind == "all_reduce" and c.dtype == "f32"} == {("devices",)}


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_damaged_text_never_stops_the_parser(data):
    text = data.draw(st.sampled_from([GPU, TPU]))
    lines = text.splitlines()
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        cut = data.draw(st.integers(0, len(lines[at])))
        lines[at] = lines[at][:cut] + data.draw(st.text(alphabet="(){}[]=,% a1\"'<", max_size=5)) + lines[at][cut + 1 :]
    parse_hlo("\n".join(lines), MESH)
    parse_hlo("", MESH)


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
    assert read_hlo(text, MESH).unread == ()
    head, tail = text.rsplit("  ROOT ", 1)
    read = read_hlo(f"{head}  {line}\n  ROOT {tail}", MESH)
    assert read.collectives == parse_hlo(text, MESH)
    assert read.unread == (f"main: {line}",)
    assert read_hlo(f"  {line}\n", MESH).unread == (f": {line}",)


def test_lines_that_cannot_communicate_may_be_unreadable():
    lines = ["%new : f32[8]{0} = add(%x)", 'note {op_name="jit(step)/all-reduce"}', "~ send(%x)", "%a-wall-clock ~"]
    head, tail = GPU.rsplit("  ROOT ", 1)
    text = head + "".join(f"  {line}\n" for line in lines) + "  ROOT " + tail
    assert read_hlo(text, MESH) == read_hlo(GPU, MESH)


def test_collectives_that_the_entry_is_not_seen_to_reach_are_reported():
    text = TPU.replace("true_computation=%yes", "when_true=%yes").replace("to_apply=%yes", "target=%yes")
    assert read_hlo(text, MESH).unread == ()  # it is a branch of the other conditional
    read = read_hlo(TPU.replace("kind=kCustom, calls=%fused", "kind=kCustom, runs=%fused"), MESH)
    assert read.unread == ("fused, which the entry is not seen to reach: summed (all_reduce)",)
    assert ("all_reduce", ("d",)) not in {(c.kind, c.axes) for c in read.collectives}


def test_asynchronous_calls_and_unknown_names_of_collectives():
    started = GPU.replace(" async-start(%x), calls=%wrapped", " call-start(%x), to_apply=%wrapped")
    assert read_hlo(started, MESH) == read_hlo(GPU, MESH)
    renamed = parse_hlo(GPU.replace(" all-gather-start(%y)", " fast-all-gather-start(%y)"), MESH)
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
    found = parse_hlo(text, LogicalMesh((8,), ("x",)))
    assert [(c.kind, c.axes, c.bytes, c.count, c.chain) for c in found] == [
        ("all_gather", ("x",), 64 * 128 * 4, 1, 0), ("all_gather", ("x",), 64 * 128 * 4, 1, 1)
    ]  # fmt: skip
