"""The graph computes what the function computes, bit for bit, for every structured primitive."""

import functools
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa_lite import _jax
from alpa_lite.ir.graph import check, walk
from alpa_lite.passes.ir.evaluation import evaluate
from alpa_lite.passes.tracing.conversion import ELEMENTWISE, graph_of
from tests.comparing import assert_equal

X = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(4, 6)
SQUARE = np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4)
TABLE, HALF = jnp.arange(6.0), jnp.float32(0.5)


def graph_for(fun, *args):
    graph = graph_of(jax.jit(fun).trace(*args).jaxpr)
    check(graph)
    return graph


@functools.cache
def graph_of_program(name):
    return graph_for(PROGRAMS[name], X)


def names_in(graph):
    return [op.name for op in graph.ops()]


def assert_same_program(graph, fun, *args):
    """The graph, evaluated under jit, gives bit-equal results."""
    ours = jax.jit(lambda *flat: evaluate(graph, flat))(*jax.tree.leaves(args))
    assert_equal(ours, jax.tree.leaves(jax.jit(fun)(*args)))


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -0.5, 0.5)


@clipped.defjvp
def _(primals, tangents):
    return clipped(primals[0]), 3.0 * tangents[0]


@jax.custom_vjp
def scaled(x, y):
    return x * y


scaled.defvjp(lambda x, y: (x * y, (x, y)), lambda residual, g: (2.0 * g * residual[1], g * residual[0]))


def rolled(x):
    table = jnp.arange(6.0)

    def body(carry, row):
        unused, total = carry
        return (unused + row.sum(), jnp.tanh(total * table + row)), (total.sum(), row * 2)

    (_, total), (sums, _) = lax.scan(body, (0.0, x[0]), x, reverse=True, unroll=2)
    return total, sums


def looped(x):
    limit = jnp.arange(3.0)
    return lax.while_loop(
        lambda carry: (carry[0] < limit.sum()) & (carry[1].sum() < 1e6),
        lambda carry: (carry[0] + 1, carry[1] * 1.5 + limit[0], carry[2] + 1.0),
        (0.0, x, x),
    )[1]


def branched(x):
    table = jnp.arange(6.0)
    one = lax.cond(x.sum() > 0, lambda y: (y * 2, y), lambda y: (y + table, y), x)[0]
    return lax.switch(jnp.int32(2), [jnp.sin, jnp.cos, lambda y: y - table], one)


def rematerialised(x):
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(y):
        return jnp.sin(jnp.sin(y @ SQUARE) @ SQUARE)

    return jax.grad(lambda y: block(block(y)).sum())(x)


def sharded(x):
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",), axis_types=(AxisType.Auto,))
    inner = jax.shard_map(lambda y: lax.psum(y, "a"), mesh=mesh, in_specs=P("a"), out_specs=P(), check_vma=False)
    return jax.jit(lambda y: inner(y) * 2)(x)


def kernel(x):
    def add_one(source, target):
        target[...] = source[...] + 1.0

    return pl.pallas_call(add_one, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def called_back(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(lambda y: np.asarray(y) * 2, shape, x) + jax.pure_callback(
        lambda y: np.asarray(y) * 3, shape, x
    )


def referenced(x):
    cell = jax.new_ref(x)
    cell[0] = cell[1] * 2.0
    return cell[...]


def nested(x):
    @jax.jit
    def inner(y, factor):
        return jnp.where(y > 0, y * factor, jnp.float32(0.0))

    return lax.map(lambda row: inner(row, 2.0) + inner(row, row.sum()), x)


def random_values(x):
    first, second = jax.random.split(jax.random.key(3))
    return jax.random.normal(first, (3, 2)), jax.random.bernoulli(jax.random.PRNGKey(4), 0.3, (5,)), second, x


def random_loops(x):
    """Keys that a vmapped loop carries."""

    def body(state):
        key, count = state
        return jax.random.split(key)[0], count + jax.random.randint(key, (), 0, 3)

    keys = jax.random.split(jax.random.key(3), 5)
    return jax.vmap(lambda key: lax.while_loop(lambda s: s[1] < 7, body, (key, 0)))(keys)[1], x


def switched(x):
    """The branch of an element of a `switch` under `vmap` is a choice for each operand; all are the same value."""
    branches = [jnp.sin, jnp.negative, lambda row: row * 2]
    return jax.vmap(lambda row, place: lax.switch(place, branches, row))(x, np.array([0, 1, 2, 0]))


def closed_over(x):
    def body(carry, row):
        return carry + jax.jit(lambda r: (r * TABLE) @ np.ones((6, 2), np.float32))(row).sum(), row

    return lax.scan(body, 0.0, x)[0] + (x * TABLE).sum() * HALF


def with_dead_code(x):
    wasted = jnp.sin(x[:, :4]) @ SQUARE

    def body(carry, row):
        kept, dropped = carry
        return (kept + row.sum(), dropped * jnp.cos(row).sum()), (row, wasted)

    return lax.scan(body, (0.0, 1.0), x)[0][0]


PROGRAMS = {
    "custom_jvp": lambda x: jax.grad(lambda y: clipped(y).sum())(x),
    "custom_vjp": lambda x: jax.grad(lambda y: scaled(y, x).sum())(x),
    "custom_vjp_forward": lambda x: scaled(x, x),
    "remat": lambda x: rematerialised(x[:, :4]),
    "scan": rolled,
    "scan_gradient": lambda x: jax.grad(lambda y: rolled(y)[0].sum())(x),
    "while": looped,
    "cond": branched,
    "cond_gradient": lambda x: jax.grad(lambda y: branched(y).sum())(x),
    "map": nested,
    "shard_map": sharded,
    "pallas": kernel,
    "callback": called_back,
    "linear_solve": lambda x: jnp.linalg.solve(SQUARE + 5 * jnp.eye(4), x),
    "custom_linear_solve": lambda x: lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2),
    "vmapped_while": lambda x: jax.vmap(lambda v: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2 + 1, v))(x),
    "vmapped_fori": lambda x: jax.vmap(lambda n, v: lax.fori_loop(0, n, lambda i, c: c * v + i, v))(jnp.arange(4), x),
    "searchsorted": lambda x: (jnp.searchsorted(jnp.linspace(-1, 1, 5), x), jnp.interp(x, jnp.arange(3.0), x[0, :3])),
    "reduce": lambda x: lax.reduce(x, np.float32(1.0), lambda a, b: a * b, (0,)),
    "scatter": lambda x: x.at[jnp.array([0, 2]), 1].add(5.0).at[3].max(0.1),
    "reference": referenced,
    "passed_through": lambda x: (x, x, 3.0, jnp.zeros(2)),
    "keys": random_values,
    "loops with keys": random_loops,
    "switch": switched,
    "closed over": closed_over,
    "dead code": with_dead_code,
    "integers times zero": lambda x: (jnp.argsort(x[0]) * 0, x * 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_computes_the_values_of_the_function(name):
    assert_same_program(graph_of_program(name), PROGRAMS[name], X)


def test_calls_are_inlined_and_control_flow_has_bodies():
    ops = [op for name in PROGRAMS for op in graph_of_program(name).ops()]
    calls = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint", "closed_call"}
    assert not {op.name for op in ops} & (calls | {"call_hi_primitive", "custom_linear_solve"})
    for op in ops:
        assert len(op.bodies) == {"scan": 1, "while": 2, "cond": len(op.bodies)}.get(op.name, 0), op.name
    loops = {n: op for n in ("vmapped_while", "while") for op in graph_of_program(n).ops() if op.name == "while"}
    assert loops["vmapped_while"].params[ELEMENTWISE] and ELEMENTWISE not in loops["while"].params


def test_closed_over_arrays_are_the_last_inputs_and_scalars_are_literals():
    graph = graph_of_program("closed over")
    assert sorted(np.shape(c) for c in graph.constants) == [(6,), (6, 2)]
    assert len(graph.block.inputs) == 3


def test_remat_puts_a_barrier_before_recomputation():
    kept = jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)), prevent_cse=False)
    assert "optimization_barrier" in names_in(graph_of_program("remat"))
    assert "optimization_barrier" not in names_in(graph_for(jax.grad(lambda x: kept(x).sum()), X))


def test_named_scopes_and_source_lines_survive_into_the_compiled_program():
    @jax.jit
    def inner(x):
        with jax.named_scope("deep"):
            return jnp.tanh(x)

    def fun(x):
        with jax.named_scope("outer"):
            return lax.scan(lambda c, row: (inner(c + row), row), x[0], x)[0]

    graph = graph_for(fun, X)
    text = jax.jit(lambda x: evaluate(graph, [x])).lower(X).compile().as_text()
    assert text is not None
    tanh = next(line for line in text.splitlines() if " tanh(" in line)
    assert "outer" in tanh and "deep" in tanh
    (op,) = (op for op in graph.ops() if op.name == "tanh")
    assert "test_conversion.py" in _jax.source_line(op.source)


def test_dead_code_goes_and_inputs_stay():
    graph = graph_for(lambda x, unused: with_dead_code(x), X, X)
    assert len(graph.block.inputs) == 2
    assert not {"sin", "cos"} & set(names_in(graph))
    (scan,) = (op for op in graph.ops() if op.name == "scan")
    assert len(scan.results) == 1 and scan.params["num_consts"] == 0 and scan.params["num_carry"] == 1


def test_operations_on_known_values_go():
    """A choice between equal values, and integers times zero; floats may be infinite."""
    names = names_in(graph_of_program("switch"))
    assert "stop_gradient" not in names and names.count("select_n") == 1  # of the three results
    names = names_in(graph_of_program("integers times zero"))
    assert "sort" not in names and names.count("mul") == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda x, at: lax.dynamic_update_slice_in_dim(x, x[:0], at, 0),
        lambda x, at: x.at[jnp.full((0,), at)].add(1.0),
        lambda x, at: x.at[at, jnp.zeros((0,), int)].set(2.0),
    ],
)
def test_updates_without_elements_are_left_out_with_the_computation_of_their_place(write):
    """Compilers leave them out, so that a plan must not reduce the place over devices."""
    args = jnp.ones((5, 3)), jnp.arange(8)
    graph = graph_for(lambda x, y: write(x, jnp.sum(y)), *args)
    assert graph.block.outputs == graph.block.inputs[:1]
    assert not graph.block.ops


@pytest.mark.parametrize("annotations", [True, False])
def test_each_array_of_one_placement_is_constrained_for_itself(annotations):
    """One mesh has a single device, over which nothing is constrained; annotations may be ignored."""
    several, one = (Mesh(np.array(jax.devices()[:n]), ("a",), axis_types=(AxisType.Auto,)) for n in (4, 1))
    shardings = NamedSharding(several, P("a")), NamedSharding(one, P("a"))
    placed = jax.jit(lambda *xs: jax.device_put(xs, shardings)).trace(X, X)
    graph = graph_of(placed.jaxpr, annotations=annotations)
    assert names_in(graph) == ["user_constraint"] * annotations
    assert [value in graph.block.inputs for value in graph.block.outputs] == [not annotations, True]


def test_keys_are_equal_for_equal_computations_only():
    def layer(x, power):
        return lax.scan(lambda c, row: (jax.nn.gelu(c + row) ** power, row), x[0], x)[0]

    graph = graph_for(lambda x: (layer(x, 2), layer(x + 1, 2), layer(x, 3), jnp.sin(x), jnp.sin(x[:2])), X)
    first, second, third = (op.key for op in graph.ops() if op.name == "scan")
    assert first == second != third
    assert len({op.key for op in graph.ops() if op.name == "sin"}) == 2
    literals = graph_for(lambda x: (x * 2.0, x * 3.0, 2.0 * x, x * 2.0), X)
    keys = [op.key for op in literals.ops()]
    assert keys[0] == keys[-1] and len(set(keys)) == 3
    callbacks = [op.key for op in graph_of_program("callback").ops() if op.name == "pure_callback"]
    assert len(set(callbacks)) == 2


STABLE = ("pallas", "reduce", "scan", "callback", "shard_map", "scatter", "custom_linear_solve")


def all_keys() -> list[str]:
    return [op.key for name in STABLE for op in graph_of_program(name).ops()]


def test_keys_do_not_depend_on_the_process_which_imports_flax_for_its_modules_alone():
    code = (
        "import sys, jax, numpy as np; jax.config.update('jax_platforms', 'cpu');"
        "jax.config.update('jax_num_cpu_devices', 8); from alpa_lite.passes.tracing.tracing import trace;"
        "t = trace(lambda s, b: ({'w': s['w'] + b.sum()}, 1.0), ({'w': np.ones(2)}, np.ones(3)), {});"
        "assert len(t.state) == 1; assert not any(m.split('.')[0] == 'flax' for m in sys.modules);"
        "import tests.passes.tracing.test_conversion as t; print('\\n'.join(t.all_keys()))"
    )
    environment = dict(os.environ, PYTHONHASHSEED="7", PYTHONPATH=os.pathsep.join([os.getcwd(), *sys.path]))
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment, timeout=280
    )
    assert found.stdout.splitlines() == all_keys()
    assert not any(" at 0x" in key or ".py" in key for key in all_keys())


def summed_with_zeros(x):
    total = jnp.zeros_like(x)
    for part in (x, jnp.zeros_like(x), jnp.sin(x)):
        total = total + part
    return total


@pytest.mark.parametrize(
    ("fun", "additions"),
    [
        (summed_with_zeros, 1),
        (lambda x: 0.0 + x, 0),
        (lambda x: jnp.full_like(x, 0.5) + x, 1),
        (lambda x: jnp.zeros_like(x) - x, 0),
        (lambda x: jnp.zeros((3, *x.shape), x.dtype) + x, 1),
        (lambda x: lax.scan(lambda c, a: (c + a, c), jnp.zeros_like(x[0]), x), 1),
    ],
    ids=["sums of a loop", "literal", "halves", "difference", "larger zeros", "carry that begins with zeros"],
)
def test_zeros_are_not_added(fun, additions):
    """As XLA's simplifier does it, for zeros of the operand's own shape; differences are none of additions."""
    signed = X * np.where(X > 0, 1, -0.0).astype(np.float32)
    graph = graph_for(fun, signed)
    assert_same_program(graph, fun, signed)
    assert sum(op.name in ("add", "add_any") for op in walk(graph.block)) == additions
