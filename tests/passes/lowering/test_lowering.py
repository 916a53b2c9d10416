"""Whatever is decided, the lowered step computes what one device computes, with the collectives that the plan lists."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest

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
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.tracing import tracing
from alpa_lite.runtime import meshes
from tests import comparing, zoo
from tests.mlps import mlp
from tests.zoo_base import normal

MESH = LogicalMesh((2, 2), ("x", "y"))


def decide(case: zoo.Case, seed: int) -> tuple[Traced, LocalProgram, Any]:
    """A lowered program with a random strategy for every decision."""
    step, args = case.make()
    traced = tracing.trace(step, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
    cluster = Cluster.local(jax.devices()[: MESH.size])
    space = strategies.build(GroupedStep(traced, groups, rules), MeshCost(cluster, MESH))
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


def check_collectives(traced: Traced, program: LocalProgram) -> None:
    module = verification.lowered_module(
        lambda mesh: emission.emit(program, traced, mesh),
        program.mesh,
        [traced.graph.values[v].aval for v in traced.graph.block.inputs],
        [lowering.spec_of(layout) for layout in program.inputs],
        "cpu",
    )
    shardy.check_shardy(module, program.mesh, [c for c, *_ in lowering.collectives(program, traced)])


def check_results(got: list[Any], step: Any, args: Any) -> None:
    want = jax.jit(step)(*args)
    comparing.compare(jax.tree.unflatten(jax.tree.structure(want), got), want)


SLOW = ["plain_cumulative", "plain_conv_1d", "plain_remat", "plain_while", "plain_scan"]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("plain_scan", 1), ("plain_pick", 0), ("plain_custom_jvp", 1),
        *(pytest.param(name, seed, marks=pytest.mark.slow) for name in SLOW for seed in (2, 3)),
        pytest.param("plain_tied", 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_random_decisions_compute_what_one_device_computes(name, seed):
    case = zoo.get(name)
    traced, program, (step, args) = decide(case, seed)
    assert list(lowering.collectives(program, traced))
    check_collectives(traced, program)
    fun = jax.jit(emission.emit(program, traced, meshes.mesh_of(MESH)))
    check_results(fun(*jax.tree.leaves(args), *traced.graph.constants), step, args)


# -- state that is gathered twice -------------------------------------------------------------------------------------


deep_step, _ = mlp(16, 8, 3)


def deep_program(regather: bool) -> tuple[Traced, LocalProgram, Any]:
    """Weights sharded, batch sharded, every product on whole weights: ZeRO-3 by hand."""
    width = 16
    args = [normal(i, width, width) for i in range(3)], normal(9, 8, width)
    mesh = LogicalMesh((4,), ("x",))
    traced = tracing.trace(deep_step, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    groups = grouping.group(traced, rules)
    constraints = Constraints({groups.leaves[i]: (Layout((("x",), ())),) for i in range(4)})
    cost = MeshCost(Cluster.local(jax.devices()[:4]), mesh)
    space = strategies.build(GroupedStep(traced, groups, rules), cost, constraints=constraints, regather=regather)
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
        check_results(fun(*jax.tree.leaves(args)), deep_step, args)
    assert "optimization_barrier" not in texts[0]
    late = [i for i in again[1].body.instructions if isinstance(i, Reshard) and i.late]
    assert texts[1].count("optimization_barrier") == len(late)
    assert [step.kind for i in late for step in i.steps].count("all_gather") == 2
