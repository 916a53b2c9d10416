"""The exact check of a lowered step, and Shardy's own collectives."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite.errors import VerificationError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.checks.shardy import check_shardy, collectives_of_shardy, shardy_report
from alpa_lite.plan.records import Collective

MESH = LogicalMesh((16, 8), ("data", "model"))
ABSTRACT = AbstractMesh((16, 8), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def aval(shape, spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(ABSTRACT, spec))


def lower(fun, *avals):
    return jax.jit(fun).trace(*avals).lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")


def region(fun, in_specs, out_specs, **options):
    return jax.shard_map(fun, mesh=ABSTRACT, in_specs=in_specs, out_specs=out_specs, check_vma=False, **options)


def c(kind, axes, size, count=1):
    return Collective(kind, axes, size, count, 0, "test")


def megatron(x, w1, w2, y):
    """A multilayer perceptron's step on local shapes, gradients reduce-scattered."""
    hidden = jnp.tanh(x @ w1)
    error = lax.psum(hidden @ w2, "model") - y
    loss = lax.psum((error**2).sum(), "data")
    dw2 = lax.psum_scatter(hidden.T @ error, "data", scatter_dimension=1, tiled=True)
    dh = (error @ w2.T) * (1 - hidden**2)
    dw1 = lax.psum_scatter(x.T @ dh, "data", scatter_dimension=0, tiled=True)
    return loss, dw1, dw2


SPECS = (P("data"), P(None, "model"), P("model"), P("data"))
OUT = (P(), P("data", "model"), P("model", "data"))
PLANNED = [
    c("all_reduce", ("model",), 4 * 32 * 4),
    c("all_reduce", ("data",), 4),
    c("reduce_scatter", ("data",), 16 * 32 * 4),
    c("reduce_scatter", ("data",), 32 * 16 * 4),
]


@pytest.fixture(scope="module")
def step():
    shapes = [(64, 32), (32, 128), (128, 32), (64, 32)]
    return lower(region(megatron, SPECS, OUT), *(aval(s, p) for s, p in zip(shapes, SPECS, strict=True)))


def test_a_step_written_in_one_region_communicates_exactly_as_planned(step):
    before = str(step)
    report = check_shardy(step, MESH, PLANNED)
    assert str(step) == before
    assert report.inserted_collectives == () and report.unknown_loops == ()
    assert sum(x.bytes * x.count for x in report.region_collectives) == sum(x.bytes for x in PLANNED)
    assert all("test_shardy.py:" in x.where for x in report.region_collectives)
    joined = [*PLANNED[:2], c("reduce_scatter", ("data",), 16 * 32 * 4, 2)]
    check_shardy(step, MESH, joined)
    check_shardy(step, LogicalMesh((16, 8, 1), ("data", "model", "one")), [*joined, c("all_reduce", ("one",), 64)])


def test_a_region_that_neither_takes_nor_returns_a_value_is_counted():
    """As of a callback on nothing."""

    def note():
        jax.ffi.ffi_call("note", [], has_side_effect=True)(lax.psum(lax.axis_index("data"), "data"))
        return []

    check_shardy(lower(region(note, (), [])), MESH, [c("all_reduce", ("data",), 4)])


@pytest.mark.parametrize("wrong", ["fewer", "more", "axes", "bytes", "count", "kind"])
def test_every_wrong_plan_is_caught(step, wrong):
    first, *rest = PLANNED
    plans = {
        "fewer": rest,
        "more": [c("all_gather", ("model",), 64), *PLANNED],
        "axes": [c("all_reduce", ("data", "model"), first.bytes), *rest],
        "bytes": [c("all_reduce", ("model",), first.bytes // 2), *rest],
        "count": [c("all_reduce", ("model",), first.bytes, 2), *rest],
        "kind": [c("reduce_scatter", ("model",), first.bytes), *rest],
    }
    with pytest.raises(VerificationError) as error:
        check_shardy(step, MESH, plans[wrong])
    text = str(error.value)
    assert ("found but not planned" in text) == (wrong not in ("more", "count"))
    assert ("planned but not found" in text) == (wrong != "fewer")
    assert "outside" not in text


def test_what_shardy_inserts_outside_regions_is_caught():
    def fun(x, w1, w2, y):
        loss, dw1, dw2 = region(megatron, SPECS, OUT)(x, w1, w2, y)
        return loss, lax.with_sharding_constraint(dw1, NamedSharding(ABSTRACT, P())), dw2.sum()

    shapes = [(64, 32), (32, 128), (128, 32), (64, 32)]
    module = lower(fun, *(aval(s, p) for s, p in zip(shapes, SPECS, strict=True)))
    with pytest.raises(VerificationError, match=r"outside the written regions: 1 x all_gather over \(data, model\)"):
        check_shardy(module, MESH, PLANNED)
    found = {(x.kind, x.axes, x.bytes) for x in shardy_report(module, MESH).inserted_collectives}
    assert found == {("all_gather", ("data", "model"), 32 * 128 * 4), ("all_reduce", ("data", "model"), 4)}


def test_operands_that_do_not_lie_as_the_region_wants_are_caught():
    module = lower(region(lambda x: x * 2, (P("data"),), P("data")), aval((64, 32), P(None, "data")))
    with pytest.raises(VerificationError, match="all_to_all over"):
        check_shardy(module, MESH, [])


def test_every_operand_and_every_result_of_a_region_is_looked_at():
    """More operands than results, more results than operands, and results that nobody reads."""
    rows, columns = P("data"), P(None, "data")  # an all_to_all apart
    right, wrong = aval((64, 32), rows), aval((64, 32), columns)

    def moved(body, takes, gives, out, *avals):
        module = lower(lambda *xs: out(*region(body, takes, gives)(*xs)), *avals)
        return Counter(
            (x.kind, x.axes) for x in shardy_report(module, MESH).inserted_collectives for _ in range(x.count)
        )

    def as_columns(x):
        return lax.with_sharding_constraint(x, NamedSharding(ABSTRACT, columns))

    one = ("all_to_all", ("data",))
    three = (rows, columns, columns)
    assert moved(lambda x, y, z: (x.sum() + y.T @ z,), three, (P(),), lambda a: a, wrong, right, right) == {one: 3}
    assert moved(lambda x, y: (x, y), (rows, columns), (rows, columns), lambda a, b: a, wrong, wrong) == {one: 1}
    assert moved(
        lambda x: (x, 2 * x, 3 * x), (rows,), (rows,) * 3, lambda a, b, c: (a, as_columns(b), as_columns(c)), right
    ) == {one: 2}


def test_loops_calls_and_branches_count_their_executions():
    def fun(x, w, flag):
        shared = jax.jit(lambda x: lax.psum(x, "model"))

        def layer(x, w):
            x = jnp.tanh(shared(x) @ lax.all_gather(w, "data", axis=0, tiled=True))
            return lax.fori_loop(2, 11, lambda _, x: lax.ppermute(x, "model", [(i, i ^ 1) for i in range(8)]), x), None

        x = shared(lax.scan(layer, x, w, reverse=True)[0])
        x = lax.cond(flag > 0, lambda x: lax.pmax(x, "data"), lambda x: shared(x), x)
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), x)

    specs = (P(None, "model"), P(None, "data"), P())
    step = region(fun, specs, P(None, "model"))
    module = lower(step, aval((16, 128), specs[0]), aval((6, 16, 16), specs[1]), aval((), specs[2]))
    with pytest.raises(VerificationError, match="unknown trip count"):
        check_shardy(module, MESH, [])
    report = check_shardy(
        module,
        MESH,
        [
            c("all_reduce", ("model",), 16 * 16 * 4, 6 + 1 + 1),
            c("all_gather", ("data",), 16 * 16 * 4, 6),
            c("collective_permute", ("model",), 16 * 16 * 4, 6 * 9),
            c("all_reduce", ("data",), 16 * 16 * 4),
            c("all_to_all", ("data",), 16 * 16 * 4),
        ],
    )
    assert len(report.unknown_loops) == 1 and "test_shardy.py" in report.unknown_loops[0]


def test_one_bit_items_several_axes_and_axes_of_one_device():
    mesh = LogicalMesh((4, 1, 2), ("a", "one", "b"))
    abstract = AbstractMesh(mesh.shape, mesh.axis_names, axis_types=(AxisType.Auto,) * 3)

    def fun(x):
        flags = lax.all_gather(x > 0, ("a", "b"), axis=0, tiled=True)
        return flags.sum() + lax.psum(x.sum(), "one") + lax.psum(x.astype(jnp.bfloat16), ("b", "a")).sum()

    step = jax.shard_map(fun, mesh=abstract, in_specs=P(("a", "b")), out_specs=P(), check_vma=False)
    arg = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(abstract, P(("a", "b"))))
    check_shardy(lower(step, arg), mesh, [c("all_gather", ("a", "b"), 64), c("all_reduce", ("b", "a"), 16)])


def test_a_region_that_leaves_an_axis_automatic_is_still_partitioned():
    def fun(x, w):
        return lax.psum(x @ w, "data")

    step = region(fun, (P("data"), P()), P(), axis_names={"data"})
    module = lower(step, aval((64, 32), P("data", "model")), aval((32, 8), P("model")))
    report = shardy_report(module, MESH)
    assert [(x.kind, x.axes) for x in report.region_collectives] == [("all_reduce", ("data",))]
    assert [(x.kind, x.axes, x.bytes) for x in report.inserted_collectives] == [("all_reduce", ("model",), 4 * 8 * 4)]


def test_a_plan_left_to_the_compiler_lists_what_shardy_inserts():
    def constrain(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(ABSTRACT, P(*spec)))

    def fun(x, w1, w2):
        hidden = constrain(jnp.tanh(x @ w1), "data", "model")
        out = constrain(hidden @ w2, "data", None)
        moved = constrain(constrain(out, "data", None), None, "data")
        swapped = constrain(constrain(w1, ("data", "model"), None), ("model", "data"), None)
        scanned = lax.scan(lambda c, _: (constrain(c @ w1 @ w2, "data", None), None), x, None, length=7)[0]
        return out.sum(), moved, swapped, scanned, constrain(x, None, None)

    args = aval((128, 128), P("data")), aval((128, 256), P(None, "model")), aval((256, 128), P("model"))
    module = lower(fun, *args)
    found = Counter()
    for x in collectives_of_shardy(module, MESH):
        found[(x.kind, x.axes, x.bytes)] += x.count
    local = 8 * 128 * 4
    assert found[("all_reduce", ("model",), local)] == 1 + 7
    assert found[("all_reduce", ("data",), 4)] == 1
    assert found[("all_gather", ("data",), 128 * 128 * 4)] == 1
    assert found[("all_to_all", ("data",), local)] == 1
    assert found[("collective_permute", ("data", "model"), 256 * 4)] == 1
    sizes = [x.bytes * x.count for x in collectives_of_shardy(module, MESH)]
    assert sizes == sorted(sizes, reverse=True)


PARTS = """
sdy.mesh @mesh = <["data"=16, "model"=8]>
func.func public @main(%x: tensor<64x32xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"data":(1)4}, {"model"}]>})
    -> (tensor<64x32xcomplex<f32>> {sdy.sharding = #sdy.sharding<@mesh, [{"model":(2)4}, {"data"}], replicated={"model":(1)2}>}) {
  %0 = sdy.all_gather [{"data":(1)4}, {}] %x out_sharding=<@mesh, [{}, {"model"}]> : tensor<64x32xcomplex<f32>>
  %1 = sdy.collective_permute %0 out_sharding=<@mesh, [{}, {"data":(2)8}]> : tensor<64x32xcomplex<f32>>
  %2 = sdy.all_reduce {"model":(1)2} %1 out_sharding=<@mesh, [{}, {"data":(2)8}]> : tensor<64x32xcomplex<f32>>
  %3 = sdy.all_to_all [{"data":(2)8}: 1->0] %2 out_sharding=<@mesh, [{"data":(2)8}, {}]> : tensor<64x32xcomplex<f32>>
  %4 = sdy.all_gather [{"data":(2)8}, {}] %3 out_sharding=<@mesh, [{}, {}]> : tensor<64x32xcomplex<f32>>
  %5 = sdy.all_slice [{"model":(2)4}, {"data"}] %4 out_sharding=<@mesh, [{"model":(2)4}, {"data"}], replicated={"model":(1)2}> : tensor<64x32xcomplex<f32>>
  return %5 : tensor<64x32xcomplex<f32>>
}
"""  # noqa: E501


def test_parts_of_axes_and_complex_items():
    item = 64 * 32 * 8
    with mlir.make_ir_context() as context:
        outside = shardy_report(ir.Module.parse(PARTS, context), MESH).inserted_collectives
    assert [(x.kind, x.axes, x.bytes) for x in outside] == [
        ("all_gather", ("data:(1)4",), item // 8),
        ("collective_permute", ("model", "data:(2)8"), item // 8),
        ("all_reduce", ("model:(1)2",), item // 8),
        ("all_to_all", ("data:(2)8",), item // 8),
        ("all_gather", ("data:(2)8",), item),
    ]


def test_collectives_of_many_operations_are_counted():
    def fun(x, ws):
        for w in ws:
            for _ in range(20):
                x = lax.exp(jnp.tanh(x) * 2 + x) - lax.sqrt(x)
            x = lax.psum(x @ w, "model")
        return x

    specs = (P("data"), [P()] * 20)
    module = lower(region(fun, specs, P("data")), aval((128, 8), P("data")), [aval((8, 8), P())] * 20)
    check_shardy(module, MESH, [c("all_reduce", ("model",), 8 * 8 * 4, 20)])
