"""Compiled programs against plans: real train steps of this JAX, and what must not pass."""

import functools
import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.errors import VerificationError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks.hlo import compare_hlo
from alpa_lite.passes.checks.redundancy import REASONS, Redundancy, redundant_collectives
from alpa_lite.passes.checks.shardy import check_shardy, shardy_report
from alpa_lite.plan.records import Collective

MESH = LogicalMesh((4, 2), ("d", "m"))


def psum(x, *axes):
    return lax.psum(x, axes)


def gather(x, axis, dim):
    return lax.all_gather(x, axis, axis=dim, tiled=True)


def scatter(x, axis, dim):
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def megatron(dtype, w1, w2, x, y):
    """Tensor parallelism over m, ZeRO-2 gradients over d, an update in place."""
    h = jnp.tanh(x @ w1)
    error = (psum(h @ w2, "m") - y).astype(dtype)
    loss = psum((error.astype(jnp.float32) ** 2).sum(), "d")
    dw2 = scatter(h.T @ error, "d", 1)
    dw1 = scatter(x.T @ ((error @ w2.T) * (1 - h**2)), "d", 0)
    return w1 - gather(dw1, "d", 0), w2 - gather(dw2, "d", 1), loss


def zero3_scan(w, x):
    """Layers in a scan, parameters gathered in each direction, gradients reduce-scattered."""

    def layer(x, w):
        return jnp.tanh(x @ gather(w, "d", 0)), x

    top, inputs = lax.scan(layer, x, w)

    def back(g, wx):
        w, x = wx
        full = gather(w, "d", 0)
        g = g * (1 - jnp.tanh(x @ full) ** 2)
        return g @ full.T, scatter(x.T @ g, "d", 0)

    _, grads = lax.scan(back, top, (w, inputs), reverse=True)
    return w - grads, psum(top.sum(), "d")


def zero3_unrolled(w, x):
    """As `zero3_scan`, without the scan: backward gathers are duplicates of forward ones."""
    inputs, top = [], x
    for i in range(4):
        inputs.append(top)
        top = jnp.tanh(top @ gather(w[i], "d", 0))
    g, grads = top, []
    for i in reversed(range(4)):
        full = gather(w[i], "d", 0)
        g = g * (1 - jnp.tanh(inputs[i] @ full) ** 2)
        grads.append(scatter(inputs[i].T @ g, "d", 0))
        g = g @ full.T
    return w - jnp.stack(grads[::-1]), psum(top.sum(), "d")


def attention(wq, wk, wv, x):
    """Heads over m, sequence resharded by all-to-all, keys passed around a ring over d; data parallel gradients."""
    q, k, v = (lax.all_to_all(x @ w, "m", 1, 0, tiled=True) for w in (wq, wk, wv))
    out = jnp.zeros_like(q)
    for _ in range(4):
        out += jax.nn.softmax(q @ k.T) @ v
        k = lax.ppermute(k, "d", [(i, (i + 1) % 4) for i in range(4)])
    out = lax.all_to_all(out, "m", 0, 1, tiled=True)
    grads = [psum(x.T @ out * s, "d") for s in (1.0, 2.0, 3.0)]
    norm = psum(sum((g**2).sum() for g in grads), "m")
    return *(w - g / norm for w, g in zip((wq, wk, wv), grads, strict=True)), norm


def loop_invariant(w, x):
    """A gather of what a loop does not change, in the loop; a branch; a fixed number of steps."""
    x = lax.scan(lambda c, _: (jnp.tanh(c @ gather(w, "d", 0)), None), x, None, length=5)[0]
    x = lax.cond(x.sum() > 0, lambda x: psum(x, "m"), lambda x: x * 2, x)
    return w, lax.fori_loop(0, 3, lambda _, x: psum(x, "d") * 0.1, x)


def one_twice_the_other(w, x):
    """Promoted to float32, the smaller one is as large as the larger one was."""
    return gather(w, "d", 0), gather(x, "d", 0)


def half_beside_twice_the_same(wide, half):
    """A gather of one value twice, which is merged, and one of half the bytes, which is sent in twice the width."""
    first, again = gather(wide, "d", 0), gather(wide, "d", 0)
    return jnp.sin(first) @ again.T, gather(half, "d", 0)


def f32(*shapes):
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]


def bf16(*shapes):
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]


W, X = P(None, "d"), P("d")
MLP = (P(None, "m"), P("m"), P("d"), P("d"))
MLP_OUT = (*MLP[:2], P())
MLP_SHAPES = ((32, 64), (64, 32), (16, 32), (16, 32))
STEPS = {
    "megatron": (functools.partial(megatron, jnp.float32), MLP, MLP_OUT, f32(*MLP_SHAPES)),
    "megatron bf16": (functools.partial(megatron, jnp.bfloat16), MLP, MLP_OUT, bf16(*MLP_SHAPES)),
    "zero3 scan": (zero3_scan, (W, X), (W, P()), f32((6, 32, 32), (16, 32))),
    "zero3 unrolled": (zero3_unrolled, (W, X), (W, P()), f32((4, 32, 32), (16, 32))),
    "attention": (attention, (P(None, "m"),) * 3 + (X,), (P(None, "m"),) * 3 + (P(),), f32(*[(16, 16)] * 3, (64, 16))),
    "loop invariant": (loop_invariant, (P("d"), X), (P("d"), X), f32((32, 32), (16, 32))),
    "one twice the other": (one_twice_the_other, (P("d"), P("d")), (P(), P()), bf16((64, 32), (32, 32))),
}
REWRITES = {
    "megatron": set(), "megatron bf16": {"dtype promoted"}, "zero3 scan": set(),
    "zero3 unrolled": {"merged duplicates"}, "attention": {"combined", "split all-to-all"},
    "loop invariant": {"hoisted"}, "one twice the other": {"dtype promoted"},
}  # fmt: skip


AMBIGUOUS = {
    "half beside twice the same": (
        half_beside_twice_the_same, (P("d"), P("d")), (P(), P()), (*f32((32, 32)), *bf16((32, 32)))
    ),
}  # fmt: skip
"""Steps whose compiled program is that of other plans, too."""


@functools.cache
def compiled(name):
    """The lowered module of a step on eight CPU devices, its optimised HLO, what Shardy finds, and what may be lost."""
    fun, in_specs, out_specs, avals = {**STEPS, **AMBIGUOUS}[name]
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)
    step = jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s))
        for a, s in zip(avals, in_specs, strict=True)
    ]
    lowered = jax.jit(step, donate_argnums=0).lower(*args)
    module = lowered.compiler_ir("stablehlo")
    text = lowered.compile().as_text()
    assert text is not None
    return module, text, shardy_report(module, MESH).region_collectives, redundant_collectives(module, MESH)


@pytest.mark.parametrize("name", STEPS)
def test_a_written_step_compiles_to_its_plan_up_to_named_rewrites(name):
    module, text, planned, redundancy = compiled(name)
    check_shardy(module, MESH, planned)
    report = compare_hlo(text, MESH, planned, redundancy)
    report.raise_if_bad()
    assert report.ok
    assert {r.name for r in report.rewrites} == REWRITES[name], [str(r) for r in report.rewrites]


def test_what_is_sent_in_twice_the_width_stands_for_nothing_else():
    """The two payloads of 4 KiB that are found are one that was planned twice, and one of 2 KiB."""
    module, text, planned, redundancy = compiled("half beside twice the same")
    check_shardy(module, MESH, planned)
    report = compare_hlo(text, MESH, planned, redundancy)
    report.raise_if_bad()
    assert sum(c.count for c in planned) == 3 and sum(c.count for c in report.collectives) == 2
    assert {r.name for r in report.rewrites} == {"dtype promoted", "merged duplicates"}
    twice = [*planned, *(c for c in planned if c.bytes == 2048)]
    assert not compare_hlo(text, MESH, twice, redundancy).ok


@pytest.mark.parametrize("name", STEPS)
def test_every_single_change_of_a_plan_is_caught(name):
    _, text, planned, redundancy = compiled(name)
    for i, c in enumerate(planned):
        others = [*planned[:i], *planned[i + 1 :]]
        wrong_axis = {("d",): ("m",), ("m",): ("d",), ("d", "m"): ("d",)}[c.axes]
        kind = "all_gather" if c.kind != "all_gather" else "all_to_all"
        changes = {
            "left out": others,
            "axes": [*others, Collective(c.kind, wrong_axis, c.bytes, c.count, 0, c.where)],
            "kind": [*others, Collective(kind, c.axes, c.bytes, c.count, 0, c.where)],
            "bytes": [*others, Collective(c.kind, c.axes, c.bytes * 3, c.count, 0, c.where)],
            "count": [*others, Collective(c.kind, c.axes, c.bytes, c.count + 40, 0, c.where)],
        }
        for plan in changes.values():
            with pytest.raises(VerificationError):
                compare_hlo(text, MESH, plan, redundancy).raise_if_bad()


@pytest.mark.parametrize("name", ["megatron", "zero3 scan", "attention"])
def test_every_single_change_of_a_program_is_caught(name):
    """Each collective in turn vanishes from the text, doubles its size, or runs over other devices."""
    _, text, planned, redundancy = compiled(name)
    lines = text.splitlines()
    at = [
        i for i, line in enumerate(lines) if re.search(r" (all-\w+(-\w+)?|reduce-scatter|collective-permute)\(", line)
    ]
    assert len(at) >= 3
    for i in at:
        changed = [
            "",
            re.sub(r"= (\(?)(\w+)\[", r"= \1\2[5,", lines[i]),
            re.sub(
                r"(replica_groups|source_target_pairs)=.*?(, (?=\w+=))",
                r"\1={{0,3},{1,2},{4,7},{5,6}}\2",
                lines[i] + ", z=1",
            ),
        ]
        for line in changed:
            assert line != lines[i]
            report = compare_hlo("\n".join([*lines[:i], line, *lines[i + 1 :]]), MESH, planned, redundancy)
            assert not report.ok, line
    assert compare_hlo("\n".join(lines), MESH, planned, redundancy).ok


@pytest.mark.parametrize("name", ["megatron", "zero3 scan"])
def test_an_added_collective_that_cannot_be_read_is_caught(name):
    _, text, planned, redundancy = compiled(name)
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if re.search(r" (all-reduce|reduce-scatter)\(", line))
    for unreadable in (lines[at].replace(" = ", " : "), lines[at].replace("(", "<", 1), "  all-gather<%x>"):
        report = compare_hlo("\n".join([*lines[:at], unreadable, *lines[at:]]), MESH, planned, redundancy)
        assert any("cannot be read: " in line and unreadable.strip() in line for line in report.differences)
        with pytest.raises(VerificationError, match="may communicate, but cannot be read"):
            report.raise_if_bad()


def snippet(*instructions):
    body = "\n".join(f"  %i{n} = {line}" for n, line in enumerate(instructions))
    return f"HloModule m\n\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


D = "replica_groups={{0,2,4,6},{1,3,5,7}}"


def plan(kind, size, count=1):
    return Collective(kind, ("d",), size, count, 0, "")


def as_written(planned, bits=32):
    """A lowered module that has the planned collectives, of items of one width, none of which may be lost."""
    written = Counter()
    for c in planned:
        written[c.kind, c.axes, c.bytes, bits] += c.count
    return Redundancy({reason: Counter() for reason in REASONS}, written)


@pytest.mark.parametrize(
    ("planned", "line", "rewrite"),
    [
        (plan("all_gather", 64), f"bf16[16]{{0}} all-gather(%x), {D}, dimensions={{0}}", "dtype narrowed"),
        (plan("all_gather", 64), f"f32[32]{{0}} all-gather(%x), {D}, dimensions={{0}}", "dtype promoted"),
        (plan("all_gather", 64), f"s32[32]{{0}} all-gather(%x), {D}, dimensions={{0}}", None),
        (plan("all_gather", 64), f"f32[8]{{0}} all-gather(%x), {D}, dimensions={{0}}", None),
        (plan("all_gather", 64), f"f32[16]{{0}} all-reduce(%x), {D}, to_apply=%add", "all-gather as all-reduce"),
        (
            plan("reduce_scatter", 64),
            f"f32[16]{{0}} all-reduce(%x), {D}, to_apply=%add",
            "reduce-scatter as all-reduce",
        ),
        (plan("all_reduce", 64), f"f32[4]{{0}} reduce-scatter(%x), {D}, to_apply=%add", "all-reduce as reduce-scatter"),
        (plan("all_reduce", 64), f"f32[16]{{0}} all-gather(%x), {D}, dimensions={{0}}", None),
        (plan("all_reduce", 16), f"u32[1,1,128]{{2,1,0}} all-reduce(%x), {D}, to_apply=%or", "packed into a tile"),
        (plan("all_reduce", 16), f"f32[1,1,128]{{2,1,0}} all-reduce(%x), {D}, to_apply=%or", None),
        (plan("all_reduce", 64), f"(f32[16]{{0}}, u32[], token[]) send(%x), {D}", None),
    ],
)
def test_rewrites_of_other_backends(planned, line, rewrite):
    written = as_written([planned], 16 if rewrite == "dtype promoted" else 32)
    report = compare_hlo(snippet(line), MESH, [planned], written)
    assert report.ok == (rewrite is not None)
    assert [r.name for r in report.rewrites] == ([rewrite] if rewrite else [])
    if rewrite is None:
        with pytest.raises(VerificationError, match=r"planned but not found(?s:.*)found but not planned"):
            report.raise_if_bad()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_combination_of_admitted_rewrites_is_recognised(data):
    """Payloads of which some are left out and some sent in another width, where they are as large as others are."""
    written, lost, lines, out = Counter(), Counter(), [], 0
    for items, bits in itertools.product((16, 32), (16, 32)):
        sent = "all_gather", ("d",), items * bits // 8, bits
        written[sent] = data.draw(st.integers(0, 3))
        lost[sent] = data.draw(st.integers(0, written[sent]))
        gone = data.draw(st.integers(0, lost[sent]))
        changed = data.draw(st.integers(0, written[sent] - gone))
        own, other = ("bf16", "f32") if bits == 16 else (data.draw(st.sampled_from(["f32", "s32"])), "bf16")
        lines += [f"{own}[{items}]"] * (written[sent] - gone - changed) + [f"{other}[{items}]"] * changed
        out += gone
    planned = [Collective(kind, axes, size, n, 0, "") for (kind, axes, size, _), n in written.items()]
    redundancy = Redundancy({reason: Counter() for reason in REASONS} | {"merged duplicates": lost}, written)

    def report(shapes):
        gathers = (f"{shape}{{0}} all-gather(%x), {D}, dimensions={{0}}" for shape in shapes)
        return compare_hlo(snippet(*gathers), MESH, planned, redundancy)

    assert report(lines).ok, report(lines).differences
    assert out or not report([*lines, "f32[32]"]).ok
    assert out < lost.total() or not lines or not report(lines[1:]).ok


def test_all_reduces_that_become_one_flat_operand():
    """JAX's CUDA plugin 0.12.0.1: the combiner flattens small all-reduces into one."""
    groups = "replica_groups={{0,2,4,6},{1,3,5,7}}"
    text = (
        "HloModule m\n\nENTRY %main (x: f32[641]) -> f32[641] {\n"
        f"  %x = f32[641]{{0}} parameter(0)\n  ROOT %ar = f32[641]{{0}} all-reduce(%x), {groups}\n}}\n"
    )
    planned = [Collective("all_reduce", ("d",), 512, 5, 0, "psum"), Collective("all_reduce", ("d",), 4, 1, 0, "psum")]
    report = compare_hlo(text, MESH, planned, as_written(planned))
    assert report.ok and [(r.name, r.count) for r in report.rewrites] == [("joined", 5), ("joined", 1)]
    other = Collective("all_reduce", ("m",), 512, 5, 0, "psum")
    for wrong in (planned[:1], [*planned, planned[1]], [other, planned[1]]):
        assert not compare_hlo(text, MESH, wrong, as_written(wrong)).ok
