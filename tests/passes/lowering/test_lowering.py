"""Whatever is decided, the lowered step computes what one device computes, with the collectives that the plan lists."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import Layout, LogicalMesh
from alpa_lite.passes import factors, lowering
from alpa_lite.passes.checks import shardy, verification
from alpa_lite.passes.lowering import emission
from alpa_lite.passes.lowering.program import LocalProgram, Reshard
from alpa_lite.passes.sharding import grouping, strategies
from alpa_lite.passes.sharding.limits import Constraints
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.tracing import tracing
from alpa_lite.runtime import meshes
from tests import zoo

MESH = LogicalMesh((2, 2), ("x", "y"))


def decide(case: zoo.Case, seed: int) -> tuple[Traced, LocalProgram, Any]:
    """A lowered program with a random strategy for every decision."""
    step, args = case.make()
    traced = tracing.trace(step, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
    cluster = Cluster.local(jax.devices()[: MESH.size])
    space = strategies.build(traced, groups, rules, MeshCost(cluster, MESH))
    rng = random.Random(seed)
    chosen = [rng.choice([i for i, s in enumerate(n.strategies) if not s.partial]) for n in space.nodes]
    for _ in range(40):  # partial sums only where the neighbours can take them
        node = rng.randrange(len(chosen))
        before, chosen[node] = chosen[node], rng.randrange(len(space.nodes[node].strategies))
        if not np.isfinite(solve.evaluate(space.program, chosen)[0]):
            chosen[node] = before
    assert np.isfinite(solve.evaluate(space.program, chosen)[0])
    choice = [space.nodes[k].strategies[chosen[k]] for k in space.node_of]
    return traced, lowering.lower(traced, groups, rules, MESH, choice), (step, args)


def run(traced: Traced, program: LocalProgram, args: Any) -> list[Any]:
    fun = jax.jit(emission.emit(program, traced, meshes.mesh_of(MESH)))
    return list(fun(*jax.tree.leaves(args), *traced.graph.constants))


def check_collectives(traced: Traced, program: LocalProgram) -> None:
    module = verification.lowered_module(
        lambda mesh: emission.emit(program, traced, mesh),
        program.mesh,
        [traced.graph.values[v].aval for v in traced.graph.block.inputs],
        [lowering.spec_of(layout) for layout in program.inputs],
        "cpu",
    )
    shardy.check_shardy(module, program.mesh, [c for c, *_ in lowering.collectives(program, traced)])


def check_results(got: list[Any], want: list[Any], traced: Traced) -> None:
    def norm(x: Any) -> float:
        return float(np.linalg.norm(np.asarray(x, np.float64).ravel()))

    total = np.sqrt(sum(norm(b) ** 2 for b, o in zip(want, traced.outputs, strict=True) if "grads" in o.path))
    for a, b, output in zip(got, want, traced.outputs, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, output.path
        if jnp.issubdtype(b.dtype, jnp.inexact):
            wrong = norm(np.asarray(a, np.float64) - np.asarray(b, np.float64))
            assert wrong <= 1e-5 * max(norm(b), 1e-3 * total), (output.path, wrong, norm(b))
        else:
            np.testing.assert_array_equal(a, b, err_msg=output.path)


def check(name: str, seed: int) -> None:
    traced, program, (step, args) = decide(zoo.get(name), seed)
    assert list(lowering.collectives(program, traced))
    check_collectives(traced, program)
    check_results(run(traced, program, args), jax.tree.leaves(jax.jit(step)(*args)), traced)


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param("plain_tied", 1, marks=pytest.mark.slow),
        ("plain_scan", 1),
        ("plain_pick", 0),
        ("plain_custom_jvp", 1),
    ],
)
def test_random_decisions_compute_what_one_device_computes(name, seed):
    check(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain_cumulative", "plain_conv_1d", "plain_remat", "plain_while", "plain_scan"])
@pytest.mark.parametrize("seed", [2, 3])
def test_more_random_decisions(name, seed):
    check(name, seed)


# -- state that is gathered twice -------------------------------------------------------------------------------------


def deep_step(state, batch):
    def loss(weights):
        h = batch["x"]
        for w in weights:
            h = jnp.tanh(h @ w)
        return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def deep_program(regather: bool) -> tuple[Traced, LocalProgram, Any]:
    """Weights sharded, batch sharded, every product on whole weights: ZeRO-3 by hand."""
    width = 16
    state = [jnp.asarray(np.random.default_rng(i).standard_normal((width, width), np.float32)) for i in range(3)]
    args = state, {"x": jnp.asarray(np.random.default_rng(9).standard_normal((8, width), np.float32))}
    mesh = LogicalMesh((4,), ("x",))
    traced = tracing.trace(deep_step, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
    constraints = Constraints({groups.leaves[i]: (Layout((("x",), ())),) for i in range(4)})
    cost = MeshCost(Cluster.local(jax.devices()[:4]), mesh)
    space = strategies.build(traced, groups, rules, cost, constraints=constraints, regather=regather)
    rows = []
    for node in space.nodes:
        wanted = _zero_3_axes([f.size for f in groups.groups[node.group].factors])
        found = [i for i, s in enumerate(node.strategies) if not s.partial and s.axes == wanted]
        rows.append(found[0] if found else 0)
    choice = [space.nodes[k].strategies[rows[k]] for k in space.node_of]
    assert np.isfinite(solve.evaluate(space.program, rows)[0])
    return traced, lowering.lower(traced, groups, rules, mesh, choice, space.late_from), args


def _zero_3_axes(sizes: list[int]) -> tuple[tuple[str, ...], ...]:
    """The rows of weights and of their updates; the batch (8) of everything else."""
    if sizes == [16, 16]:
        return ("x",), ()
    return tuple(("x",) if size == 8 else () for size in sizes)


def gathers(program: LocalProgram, traced: Traced) -> list[tuple[str, int]]:
    return [(c.kind, c.bytes) for c, *_ in lowering.collectives(program, traced) if c.kind == "all_gather"]


def test_state_used_late_is_gathered_again_behind_a_barrier():
    once, again = deep_program(False), deep_program(True)
    few, many = (gathers(program, traced) for traced, program, _ in (once, again))
    # Three weights in the forward pass; in the backward pass the last two once more.
    assert len(few) == 3 and len(many) == 5 and set(few) == set(many)
    mesh = meshes.mesh_of(LogicalMesh((4,), ("x",)))
    texts = []
    for traced, program, args in (once, again):
        fun = jax.jit(emission.emit(program, traced, mesh))
        texts.append(fun.lower(*jax.tree.leaves(args)).as_text())
        check_collectives(traced, program)
        check_results(list(fun(*jax.tree.leaves(args))), jax.tree.leaves(jax.jit(deep_step)(*args)), traced)
    assert "optimization_barrier" not in texts[0]
    late = [i for i in again[1].body.instructions if isinstance(i, Reshard) and i.late]
    assert texts[1].count("optimization_barrier") == len(late)
    assert [step.kind for i in late for step in i.steps].count("all_gather") == 2


# -- small pieces -----------------------------------------------------------------------------------------------------


def test_the_spec_of_a_layout():
    assert lowering.spec_of(Layout((("x",), (), ("y", "z"), ()))) == P("x", None, ("y", "z"))
    assert lowering.spec_of(Layout(((), ()))) == P()


def test_collectives_in_a_scan_count_once_for_each_trip():
    trips = 5

    def step(state, batch):
        def body(h, _):
            return jnp.tanh(h @ state["a"] @ state["b"]), None

        h, _ = jax.lax.scan(body, batch["x"], None, length=trips)
        return state, h

    shape = jax.ShapeDtypeStruct
    args = (
        {"a": shape((1024, 65536), jnp.float32), "b": shape((65536, 1024), jnp.float32)},
        {"x": shape((64, 1024), jnp.float32)},
    )
    method = alpa_lite.Manual({"state/a": P(None, "x"), "state['b']": P("x")}, (8,), ("x",))
    plan = alpa_lite.make_plan(step, *args, cluster=Cluster.preset("h100", nodes=1), method=method)
    assert [(c.kind, c.bytes, c.count) for c in plan.collectives] == [("all_reduce", 64 * 1024 * 4, trips)]
