"""Tracing: the graph computes what the function computes, bit for bit, and knows its state and its batch."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from alpa_lite import _jax
from alpa_lite.errors import SignatureError, TracingError
from alpa_lite.graph import Traced, check, walk
from alpa_lite.passes import modules, pruning
from alpa_lite.passes.conversion import graph_of
from alpa_lite.passes.evaluation import evaluate
from alpa_lite.passes.tracing import trace

X = np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(4, 6)
SQUARE = np.cos(np.arange(16, dtype=np.float32)).reshape(4, 4)


def graph_for(fun, *args):
    graph = graph_of(jax.jit(fun).trace(*args).jaxpr)
    check(graph)
    return graph


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_same_program(fun, *args):
    """The graph, evaluated under jit, gives bit-equal results."""
    graph = graph_for(fun, *args)
    leaves = jax.tree.leaves(args)
    expected = jax.tree.leaves(jax.jit(fun)(*args))
    assert_equal(jax.jit(lambda *flat: evaluate(graph, flat))(*leaves), expected)
    return graph


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


def random_values(key, raw):
    first, second = jax.random.split(key)
    return jax.random.normal(first, (3, 2)), jax.random.bernoulli(raw, 0.3, (5,)), second


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
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "shard_map": sharded,
    "pallas": kernel,
    "callback": called_back,
    "sort": lambda x: (jnp.sort(x, axis=0), jnp.argsort(-x, axis=1)),
    "top_k": lambda x: lax.top_k(x, 2),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "conv": lambda x: lax.conv_general_dilated(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + jnp.eye(4)),
    "linear_solve": lambda x: jnp.linalg.solve(SQUARE + 5 * jnp.eye(4), x),
    "custom_linear_solve": lambda x: lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2),
    "reduce": lambda x: lax.reduce(x, np.float32(1.0), lambda a, b: a * b, (0,)),
    "window": lambda x: lax.reduce_window(x, -np.inf, lax.max, (2, 2), (1, 1), "VALID"),
    "scatter": lambda x: x.at[jnp.array([0, 2]), 1].add(5.0).at[3].max(0.1),
    "reference": referenced,
    "integers": lambda x: (jnp.argmax(x, 1), x > 0, (x > 0).sum(), x.astype(jnp.int8)),
    "low_precision": lambda x: (x.astype(jnp.bfloat16) * 2.5 + 1).sum(0),
    "passed_through": lambda x: (x, x, 3.0, jnp.zeros(2)),
    "linen": lambda x: linen.LayerNorm().apply({"params": {"scale": jnp.ones(6), "bias": jnp.zeros(6)}}, x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_graph_computes_what_the_function_computes(name):
    assert_same_program(PROGRAMS[name], X)


def test_calls_are_inlined_and_control_flow_has_bodies():
    def everything(x):
        return [
            PROGRAMS[name](x) for name in ("custom_jvp", "custom_vjp_forward", "remat", "scan", "while", "cond", "map")
        ]

    graph = graph_for(everything, X)
    names = {op.name for op in graph.ops()}
    assert not names & {"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint", "closed_call"}
    for op in graph.ops():
        assert len(op.bodies) == {"scan": 1, "while": 2, "cond": len(op.bodies)}.get(op.name, 0), op.name
    assert {"scan", "while", "cond"} <= names


def test_random_keys_typed_and_raw():
    assert_same_program(random_values, jax.random.key(3), jax.random.PRNGKey(4))


def test_weak_types_and_python_scalars():
    graph = assert_same_program(lambda x, s, n: (x * s, s * n, n), X.astype(jnp.bfloat16), 1.5, 3)
    assert graph.values[graph.block.inputs[1]].aval.weak_type


def test_callbacks_run_though_nobody_reads_them():
    seen = []

    def fun(x):
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return x

    graph = graph_for(fun, np.ones(3, np.float32))
    jax.block_until_ready(jax.jit(lambda x: evaluate(graph, [x]))(np.ones(3, np.float32)))
    jax.effects_barrier()
    assert seen == [3.0]


def test_callbacks_with_different_functions_have_different_keys():
    keys = [op.key for op in graph_for(called_back, X).ops() if op.name == "pure_callback"]
    assert len(set(keys)) == 2


def test_closed_over_arrays_are_the_last_inputs():
    table, other = jnp.arange(6.0), np.ones((6, 2), np.float32)

    def fun(x):
        def body(carry, row):
            return carry + jax.jit(lambda r: (r * table) @ other)(row).sum(), row

        return lax.scan(body, 0.0, x)[0] + (x * table).sum()

    graph = assert_same_program(fun, X)
    assert sorted(np.shape(c) for c in graph.constants) == [(6,), (6, 2)]
    assert len(graph.block.inputs) == 3


def test_closed_over_scalars_are_literals():
    half = jnp.float32(0.5)
    assert assert_same_program(lambda x: x * half, X).constants == ()


def test_remat_puts_a_barrier_before_what_is_computed_again():
    graph = graph_for(PROGRAMS["remat"], X)
    assert any(op.name == "optimization_barrier" for op in graph.ops())
    kept = jax.checkpoint(lambda y: jnp.sin(jnp.sin(y)), prevent_cse=False)
    graph = graph_for(jax.grad(lambda x: kept(x).sum()), X)
    assert not any(op.name == "optimization_barrier" for op in graph.ops())


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
    assert "test_tracing.py" in _jax.source_line(op.source)


def test_dead_code_goes_and_inputs_stay():
    def fun(x, unused):
        wasted = jnp.sin(x) @ SQUARE

        def body(carry, row):
            kept, dropped = carry
            return (kept + row.sum(), dropped * jnp.cos(row).sum()), (row, wasted)

        return lax.scan(body, (0.0, 1.0), x)[0][0]

    graph = assert_same_program(fun, X[:, :4], X)
    assert len(graph.block.inputs) == 2
    names = [op.name for op in graph.ops()]
    assert "sin" not in names and "cos" not in names
    (scan,) = (op for op in graph.ops() if op.name == "scan")
    assert len(scan.results) == 1 and scan.params["num_consts"] == 0 and scan.params["num_carry"] == 1


def test_pruning_twice_changes_nothing():
    graph = graph_for(PROGRAMS["scan_gradient"], X)
    again = pruning.prune(graph)
    assert [op.key for op in again.ops()] == [op.key for op in graph.ops()]
    assert again.block.outputs == graph.block.outputs


def test_ops_and_values_are_numbered_densely_bodies_before_their_op():
    graph = graph_for(PROGRAMS["scan_gradient"], X)
    assert [op.index for op in walk(graph.block)] == list(range(len(list(graph.ops()))))
    numbers = set(graph.block.inputs)
    for op in graph.ops():
        numbers.update(op.results, *(body.inputs for body in op.bodies))
    assert numbers == set(range(len(graph.values)))


def test_keys_are_equal_for_equal_computations_only():
    def layer(x, power):
        return lax.scan(lambda c, row: (jax.nn.gelu(c + row) ** power, row), x[0], x)[0]

    graph = graph_for(lambda x: (layer(x, 2), layer(x + 1, 2), layer(x, 3), jnp.sin(x), jnp.sin(x[:2])), X)
    first, second, third = (op.key for op in graph.ops() if op.name == "scan")
    assert first == second != third
    assert len({op.key for op in graph.ops() if op.name == "sin"}) == 2
    assert all(isinstance(hash(op.key), int) for op in graph.ops())
    literals = graph_for(lambda x: (x * 2.0, x * 3.0, 2.0 * x, x * 2.0), X)
    keys = [op.key for op in literals.ops()]
    assert keys[0] == keys[-1] and len(set(keys)) == 3


def test_keys_do_not_depend_on_the_process():
    graphs = [graph_for(PROGRAMS[name], X) for name in ("pallas", "reduce", "scan", "callback", "shard_map", "scatter")]
    jax.clear_caches()
    again = [graph_for(PROGRAMS[name], X) for name in ("pallas", "reduce", "scan", "callback", "shard_map", "scatter")]
    for one, two in zip(graphs, again, strict=True):
        assert [op.key for op in one.ops()] == [op.key for op in two.ops()]
        assert not any(" at 0x" in op.key or ".py" in op.key for op in one.ops())


# --- state and batch -------------------------------------------------------------------------------------------------


def roles(traced: Traced) -> dict[str, str]:
    return {argument.path: argument.role for argument in traced.arguments}


def by_role(traced: Traced, role: str) -> list[str]:
    return [path for path, found in roles(traced).items() if found == role]


def assert_traced(fun, *args, **kwargs):
    """The traced step evaluates to what the step returns, and each state pair has one type."""
    traced = trace(fun, args, kwargs)
    check(traced.graph)
    values, block = traced.graph.values, traced.graph.block
    for output, argument in traced.state:
        before = values[block.inputs[argument]]
        after = traced.graph.block.outputs[output]
        assert isinstance(after, int)
        assert values[after].shape == before.shape and values[after].dtype == before.dtype
    assert [o.role == "state" for o in traced.outputs] == [i in dict(traced.state) for i in range(len(traced.outputs))]
    leaves = jax.tree.leaves(traced.extra["calling"].traced(args, kwargs))
    assert_equal(jax.jit(partial(evaluate, traced.graph))(leaves), jax.tree.leaves(jax.jit(fun)(*args, **kwargs)))
    return traced


PARAMS = {"w": X.T.copy(), "b": np.zeros(4, np.float32)}
BATCH = {"x": np.ones((8, 6), np.float32), "y": np.zeros((8, 4), np.float32)}
OPTIMIZER = optax.adam(1e-2)


def loss_of(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


def sgd(params, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def adam(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def test_state_and_batch():
    traced = assert_traced(sgd, PARAMS, BATCH)
    assert roles(traced) == {
        "params['b']": "state",
        "params['w']": "state",
        "batch['x']": "batch",
        "batch['y']": "batch",
    }
    assert traced.state == ((0, 0), (1, 1))
    assert [o.path for o in traced.outputs] == ["result[0]['b']", "result[0]['w']", "result[1]"]
    assert "batch" in traced.notes[0] and "leading dim 8" in traced.notes[0]


def test_params_optimizer_state_and_batch():
    traced = assert_traced(adam, PARAMS, OPTIMIZER.init(PARAMS), BATCH)
    assert by_role(traced, "batch") == ["batch['x']", "batch['y']"]
    assert by_role(traced, "other") == []
    assert "opt_state[0].mu['w']" in by_role(traced, "state")


def test_a_stateless_optimizer_does_not_confuse():
    def step(params, opt_state, batch):
        params, loss = sgd(params, batch)
        return params, opt_state, loss

    traced = assert_traced(step, PARAMS, optax.EmptyState(), BATCH)
    assert by_role(traced, "state") == ["params['b']", "params['w']"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda params, loss: (loss, params),
        lambda params, loss: {"loss": loss, "new": {"deep": params}},
        lambda params, loss: (None, [loss, (params, None)], {}),
    ],
)
def test_state_is_found_anywhere_in_the_result(wrap):
    traced = assert_traced(lambda params, batch: wrap(*sgd(params, batch)), PARAMS, BATCH)
    assert by_role(traced, "state") == ["params['b']", "params['w']"]


def test_state_alone_is_returned():
    traced = assert_traced(lambda params, batch: sgd(params, batch)[0], PARAMS, BATCH)
    assert len(traced.state) == 2 and by_role(traced, "batch") == ["batch['x']", "batch['y']"]


def test_state_and_batch_in_one_argument():
    def step(everything):
        params, loss = sgd(everything["params"], everything["batch"])
        return params, loss

    traced = assert_traced(step, {"params": PARAMS, "batch": BATCH})
    assert by_role(traced, "state") == ["everything['params']['b']", "everything['params']['w']"]
    assert by_role(traced, "batch") == ["everything['batch']['x']", "everything['batch']['y']"]


def test_train_state_with_its_static_fields():
    module = linen.Dense(4)
    state = TrainState.create(apply_fn=module.apply, params=module.init(jax.random.key(0), BATCH["x"]), tx=OPTIMIZER)

    def step(state, batch):
        def loss(params):
            return ((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    traced = assert_traced(step, state, BATCH)
    assert "state.params['params']['kernel']" in by_role(traced, "state")
    assert set(by_role(traced, "state")) == {p for p in roles(traced) if p.startswith("state")}


def test_predictions_of_the_batch_shape_are_not_state():
    def step(params, x):
        return jax.tree.map(lambda p: p - 0.1 * x.sum(), params), x * params["b"].sum()

    traced = assert_traced(step, PARAMS, X)
    assert roles(traced)["x"] == "batch"


def test_bare_arrays_can_be_state():
    traced = assert_traced(lambda w, x: (w - 0.1 * (x @ w).sum(), (x @ w).sum()), SQUARE, SQUARE)
    assert roles(traced) == {"w": "state", "x": "batch"}
    traced = assert_traced(lambda w, b, x, y: (w - (x * y).sum(), b + x.sum(), y.sum()), X, X[0], SQUARE, SQUARE)
    assert roles(traced) == {"w": "state", "b": "state", "x": "batch", "y": "batch"}


def test_a_loss_is_not_the_new_value_of_a_scalar_setting():
    def step(params, rate, batch):
        params, loss = sgd(params, batch)
        return params, loss * rate

    assert roles(assert_traced(step, PARAMS, 0.1, BATCH))["rate"] == "other"


def test_counters_and_keys_that_come_back_are_state():
    def step(params, count, key, batch):
        key, used = jax.random.split(key)
        params, loss = sgd(params, batch)
        return params, count + 1, key, loss + jax.random.uniform(used)

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        found = roles(assert_traced(step, PARAMS, np.int32(0), key, BATCH))
        assert found["count"] == found["key"] == "state"


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_state_batch_and_key(key):
    def step(params, batch, key):
        return sgd(params, {"x": batch["x"] + jax.random.normal(key, (8, 6)), "y": batch["y"]})

    traced = assert_traced(step, PARAMS, BATCH, key)
    assert by_role(traced, "other") == ["key"] and by_role(traced, "batch") == ["batch['x']", "batch['y']"]


def test_several_arguments_with_one_leading_dim_are_all_batch():
    traced = assert_traced(lambda params, x, y: sgd(params, {"x": x, "y": y}), PARAMS, BATCH["x"], BATCH["y"])
    assert by_role(traced, "batch") == ["x", "y"]


def test_keyword_arguments_are_named_by_their_parameters():
    traced = assert_traced(lambda params, *, batch, scale=1.0: sgd(params, batch), PARAMS, batch=BATCH, scale=2.0)
    assert by_role(traced, "batch") == ["batch['x']", "batch['y']"] and roles(traced)["scale"] == "other"


def test_variadic_arguments_are_numbered():
    traced = assert_traced(
        lambda params, *data, **more: sgd(params, {"x": data[0], **more}), PARAMS, BATCH["x"], y=BATCH["y"]
    )
    assert by_role(traced, "batch") == ["data[0]", "y"]


def test_static_arguments():
    def step(params, depth, batch, mode="train"):
        for _ in range(depth):
            params, loss = sgd(params, batch)
        return params, loss if mode == "train" else None

    traced = trace(step, (PARAMS, 2, BATCH), {"mode": "train"}, static_argnums=-2, static_argnames="mode")
    assert sorted(roles(traced)) == ["batch['x']", "batch['y']", "params['b']", "params['w']"]
    calling = traced.extra["calling"]
    assert calling.matches((PARAMS, 2, BATCH), {"mode": "train"})
    assert not calling.matches((PARAMS, 3, BATCH), {"mode": "train"})
    assert not calling.matches((PARAMS, 2, BATCH), {"mode": "test"})
    assert not calling.matches((PARAMS, 2, BATCH), {})
    with pytest.raises(SignatureError, match="depth is not hashable"):
        trace(step, (PARAMS, [2], BATCH), {}, static_argnums=1)
    with pytest.raises(SignatureError, match="static_argnums names argument 7"):
        trace(step, (PARAMS, 2, BATCH), {}, static_argnums=7)
    with pytest.raises(SignatureError, match="'depht'"):
        trace(step, (PARAMS, 2, BATCH), {}, static_argnames="depht")


def test_abstract_arguments_trace_alike():
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, BATCH))
    one, two = trace(sgd, abstract, {}), trace(sgd, (PARAMS, BATCH), {})
    assert [op.key for op in one.graph.ops()] == [op.key for op in two.graph.ops()]
    assert one.arguments == two.arguments


def test_none_leaves_and_empty_containers():
    def step(state, batch):
        params, loss = sgd(state["params"], batch)
        return {"params": params, "ema": None, "extra": {}}, loss

    assert_traced(step, {"params": PARAMS, "ema": None, "extra": {}}, BATCH)


def test_a_leaf_that_changes_type_is_no_state_and_a_note_says_so():
    def step(state, batch):
        params, loss = sgd(state["params"], batch)
        return {"params": params, "step": state["step"] + 1.0}, loss

    traced = assert_traced(step, {"params": PARAMS, "step": np.int32(0)}, BATCH)
    assert roles(traced)["state['step']"] == "other"
    assert any("state['step'] is int32[] but comes back as float32[]" in note for note in traced.notes)


def test_the_batch_can_be_named():
    def step(params, frozen, batch):
        return sgd(params, {"x": batch["x"] * frozen, "y": batch["y"]})

    frozen = np.ones(6, np.float32)
    with pytest.raises(SignatureError, match=r"frozen with leading dims \[6\]; batch with leading dims \[8\]"):
        trace(step, (PARAMS, frozen, BATCH), {})
    options: dict[str, Any]
    for options in ({"batch_argnums": 2}, {"batch_argnums": (-1,)}, {"batch_argnames": "batch"}):
        traced = trace(step, (PARAMS, frozen, BATCH), {}, **options)
        assert roles(traced)["frozen"] == "other" and by_role(traced, "batch") == ["batch['x']", "batch['y']"]
    with pytest.raises(SignatureError, match="said to be bach"):
        trace(step, (PARAMS, frozen, BATCH), {}, batch_argnames="bach")


def test_leaves_of_the_batch_without_its_leading_dim_are_other():
    def step(params, batch):
        return sgd(params, {"x": batch["x"] * batch["mask"], "y": batch["y"]})

    traced = assert_traced(step, PARAMS, {**BATCH, "mask": np.ones(6, np.float32)})
    assert roles(traced)["batch['mask']"] == "other" and len(by_role(traced, "batch")) == 2


def test_no_state_is_an_error_with_a_remedy():
    with pytest.raises(SignatureError, match=r"\(params, batch\).*Return the new state"):
        trace(lambda params, batch: loss_of(params, batch), (PARAMS, BATCH), {})


def test_everything_comes_back_is_an_error_unless_there_is_no_batch():
    def step(one, two):
        return sgd(one, BATCH)[0], sgd(two, BATCH)[0]

    with pytest.raises(SignatureError, match=r"every argument \(one, two\).*batch_argnums=\(\)"):
        trace(step, (PARAMS, PARAMS), {})
    assert len(trace(step, (PARAMS, PARAMS), {}, batch_argnums=()).state) == 4


def test_an_argument_that_is_no_array():
    with pytest.raises(SignatureError, match=r"mode is a str.*static_argnames"):
        trace(lambda params, batch, mode: sgd(params, batch), (PARAMS, BATCH, "train"), {})


@pytest.mark.parametrize(
    ("misuse", "what"),
    [
        (lambda x: 1.0 if x.sum() > 0 else 2.0, "truth value"),
        (lambda x: np.sin(x).sum(), "NumPy array"),
        (lambda x: sum(range(x.astype(int).sum())), "Python integer"),
        (lambda x: x[x > 0].sum(), "mask"),
    ],
    ids=["bool", "numpy", "integer", "mask"],
)
def test_values_used_in_python_are_errors_with_the_line(misuse, what):
    def step(params, batch):
        return sgd(params, batch)[0], misuse(batch["x"])

    with pytest.raises(TracingError, match=what) as error:
        trace(step, (PARAMS, BATCH), {})
    line = misuse.__code__.co_firstlineno
    assert f"test_tracing.py:{line} (in <lambda>)" in str(error.value)
    assert "jnp.where or jax.lax.cond" in str(error.value)


# --- Flax NNX --------------------------------------------------------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers: Any = nnx.List([nnx.Linear(6, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.tied = self.layers[0]
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.norm(self.layers[1](self.tied(x)))


def nnx_step(model, optimizer, batch):
    def loss(model):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def test_nnx_objects_are_state_with_the_paths_of_nnx_state():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))))
    traced = trace(nnx_step, (model, optimizer, BATCH), {})
    check(traced.graph)
    expected = [
        f"{name}{jax.tree_util.keystr(path)}"
        for name, node in (("model", model), ("optimizer", optimizer))
        for path, _ in jax.tree_util.tree_flatten_with_path(nnx.state(node))[0]
    ]
    assert by_role(traced, "state") == expected
    assert by_role(traced, "batch") == ["batch['x']", "batch['y']"]
    assert [o.path for o in traced.outputs] == [*expected, "result"]
    after = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState))))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def run_in_place(fun, traced, *args):
    """What the executor does: split, evaluate, merge."""
    tag = object()
    with modules.updating(tag):
        leaves = jax.tree.leaves(modules.split_arguments(traced.extra["calling"].traced(args, {}), tag))
        out = jax.jit(partial(evaluate, traced.graph))(leaves)
        return modules.merge_results(jax.tree.unflatten(traced.out_tree, out), tag)


def assert_same_objects(one, two):
    graph_one, state_one = nnx.split(one)
    graph_two, state_two = nnx.split(two)
    assert graph_one == graph_two
    assert_equal(jax.tree.leaves(state_one), jax.tree.leaves(state_two))


def test_nnx_objects_are_updated_as_nnx_jit_does():
    def make():
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    ours, theirs = make(), make()
    traced = trace(nnx_step, (*ours, BATCH), {})
    tied = ours[0].tied
    jitted = nnx.jit(nnx_step)
    for _ in range(3):
        np.testing.assert_array_equal(run_in_place(nnx_step, traced, *ours, BATCH), jitted(*theirs, BATCH))
    assert_same_objects(ours, theirs)
    assert ours[0].tied is tied is ours[0].layers[0]
    assert int(ours[0].calls[...]) == 3


def test_nnx_structure_that_changes_is_written_back():
    def step(model: Any, batch):
        model.layers.append(nnx.Linear(4, 4, rngs=nnx.Rngs(1)))
        model.layers[1].deterministic = True
        model.seen = nnx.Variable(batch["x"].sum())
        return model(batch["x"]).sum()

    ours: Any = Net(nnx.Rngs(0))
    theirs: Any = Net(nnx.Rngs(0))
    traced = trace(step, (ours, BATCH), {})
    np.testing.assert_array_equal(run_in_place(step, traced, ours, BATCH), nnx.jit(step)(theirs, BATCH))
    assert_same_objects(ours, theirs)
    assert ours.layers[1].deterministic and float(ours.seen[...]) == 48.0


def test_nnx_objects_inside_containers_shared_between_arguments_and_returned():
    def step(pair, batch, *, metrics, rngs):
        model, shared = pair["model"], pair["layer"]
        out = model(batch["x"]) + jax.random.normal(rngs.noise(), (8, 4))
        shared.bias[...] += out.mean(0)
        metrics.update(values=out.mean())
        return out, nnx.Linear(2, 2, rngs=nnx.Rngs(5))

    def make():
        model = Net(nnx.Rngs(0))
        pair = {"model": model, "layer": model.layers[0]}
        return (pair, BATCH), {"metrics": nnx.metrics.Average(), "rngs": nnx.Rngs(noise=3)}

    (args, kwargs), (their_args, their_kwargs) = make(), make()
    traced = trace(step, args, kwargs)
    paths = list(roles(traced))
    assert len(paths) == len(set(paths))
    assert "pair['layer']['bias'].value" in paths and "rngs['noise']['count'].value" in paths
    assert "pair['model']['layers'][0]['bias'].value" not in paths  # shared: named once, where it is met first
    tag = object()
    with modules.updating(tag):
        leaves = jax.tree.leaves(modules.split_arguments(traced.extra["calling"].traced(args, kwargs), tag))
        out = jax.tree.unflatten(traced.out_tree, jax.jit(partial(evaluate, traced.graph))(leaves))
        ours, layer = modules.merge_results(out, tag)
    theirs, their_layer = nnx.jit(step)(*their_args, **their_kwargs)
    np.testing.assert_array_equal(ours, theirs)
    assert_same_objects((args[0], kwargs, layer), (their_args[0], their_kwargs, their_layer))


def test_a_closed_over_nnx_module_is_constant():
    teacher = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
    traced = assert_traced(lambda params, x: sgd(params, {"x": x, "y": teacher(x)}), PARAMS, BATCH["x"])
    assert sorted(np.shape(c) for c in traced.graph.constants) == [(4,), (6, 4)]


def test_flax_is_imported_only_for_nnx_arguments():
    import subprocess
    import sys

    code = (
        "import sys, numpy as np; from alpa_lite.passes.tracing import trace;"
        "t = trace(lambda s, b: ({'w': s['w'] + b.sum()}, 1.0), ({'w': np.ones(2)}, np.ones(3)), {});"
        "assert len(t.state) == 1; assert not any(m.split('.')[0] == 'flax' for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_warnings_are_not_raised_by_tracing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(adam, (PARAMS, OPTIMIZER.init(PARAMS), BATCH), {})
