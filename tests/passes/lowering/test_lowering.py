"""Lowered steps compute what one device computes, with the listed collectives, and share runs that are equal."""

import random
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
import gallery
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.compiler import Compiled, compile_step
from alpa_lite.ir.graph import Lit, Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.options import Method
from alpa_lite.passes import lowering
from alpa_lite.passes.checks import shardy, verification
from alpa_lite.passes.lowering import emission
from alpa_lite.passes.lowering import runs as shared_runs
from alpa_lite.passes.lowering.program import LocalProgram, Reshard
from alpa_lite.passes.sharding import limits, strategies
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.runtime import meshes
from gallery.batches import normal
from gallery.steps import mlp, sgd
from tests import comparing
from tests.helpers import grouped_step
from tests.marks import slow

MESH = LogicalMesh((2, 2), ("x", "y"))


def decide(case: gallery.Case, seed: int) -> tuple[Traced, LocalProgram, Any]:
    """A lowered program with a random strategy for every decision."""
    step, args = case.make()
    grouped = grouped_step(step, *args)
    cluster = Cluster.local(jax.devices()[: MESH.size])
    space = strategies.build(grouped, MeshCost(cluster, MESH))
    rng = random.Random(seed)
    chosen = [rng.choice([i for i, s in enumerate(n.strategies) if not s.partial]) for n in space.nodes]
    for _ in range(40):  # partial sums only where the neighbours can take them
        node = rng.randrange(len(chosen))
        before, chosen[node] = chosen[node], rng.randrange(len(space.nodes[node].strategies))
        if not np.isfinite(solve.evaluate(space.program, chosen)[0]):
            chosen[node] = before
    assert np.isfinite(solve.evaluate(space.program, chosen)[0])
    choice = [space.nodes[k].strategies[chosen[k]] for k in space.node_of]
    lowered = lowering.lower(grouped.traced, grouped.grouping, grouped.rules, MESH, choice)
    return grouped.traced, lowered, (step, args)


def check_collectives(traced: Traced, program: LocalProgram) -> None:
    module = verification.lower_module(
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
        *(slow(name, seed) for name in SLOW for seed in (2, 3)),
        slow("plain_tied", 1),
    ],
)  # fmt: skip
def test_random_decisions_compute_what_one_device_computes(name, seed):
    case = gallery.get("zoo", name)
    traced, program, (step, args) = decide(case, seed)
    assert list(lowering.collectives(program, traced))
    check_collectives(traced, program)
    fun = jax.jit(emission.emit(program, traced, meshes.mesh_of(MESH)))
    check_results(fun(*jax.tree.leaves(args), *traced.graph.constants), step, args)


# -- state that is gathered twice -------------------------------------------------------------------------------------


deep_step, _ = mlp(16, 8, 3)


def deep_program(regather: bool) -> tuple[Traced, LocalProgram, Any]:
    """Weights sharded, batch sharded, every product on whole weights, as on a platform that gathers them again."""
    args = [normal(i, 16, 16) for i in range(3)], normal(9, 8, 16)
    cluster = Cluster.local(jax.devices()[:4])
    grouped = grouped_step(deep_step, *args)
    ((mesh, constraints),) = limits.admissible_meshes(grouped, cluster, alpa_lite.Zero(3))
    space = strategies.build(grouped, MeshCost(cluster, mesh), constraints=constraints, regather=regather)
    choice = MeshSolution(space, solve.solve(space.program)).choice
    lowered = lowering.lower(grouped.traced, grouped.grouping, grouped.rules, mesh, choice, space.late_from)
    return grouped.traced, lowered, args


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
    late = [i for i in again[1].body.instructions if isinstance(i, Reshard) and i.is_late]
    assert texts[1].count("optimization_barrier") == len(late)
    assert [step.kind for i in late for step in i.steps].count("all_gather") == 2


LAYERS, WIDTH = 8, 16


@sgd
def step(state, batch):
    h = batch["x"]
    for layer in state:
        h = h + jnp.tanh(h @ layer["up"] + layer["bias"]) @ layer["down"]
    return ((h - batch["y"]) ** 2).mean()


def arguments() -> Any:
    shapes = {"up": (WIDTH, 4 * WIDTH), "bias": (4 * WIDTH,), "down": (4 * WIDTH, WIDTH)}
    state = [{name: 0.2 * normal(n, *shape) for name, shape in shapes.items()} for n in range(LAYERS)]
    return state, {"x": normal(20, 32, WIDTH), "y": normal(21, 32, WIDTH)}


def planned(method: Method, fun: Any = step, microbatches: int | None = None) -> Compiled:
    more = {} if microbatches is None else {"num_microbatches": microbatches}
    options = make_options({"method": method, "verify": "off", **more})
    return compile_step(fun, arguments(), {}, options, Cluster.local(jax.devices()[:4]))


def program_of(compiled: Compiled) -> LocalProgram:
    return compiled.staged.stages[0].program


def modules(compiled: Compiled) -> list[Any]:
    (stage,) = compiled.staged.stages
    (segment,) = stage.segments.items
    return [verification.module_of(stage, segment, "cpu", shared=shared) for shared in (False, True)]


def results(compiled: Compiled, shared: bool) -> list[Any]:
    program = program_of(compiled)
    leaves = [*jax.tree.leaves(arguments()), *compiled.traced.graph.constants]
    return jax.jit(emission.emit(program, compiled.traced, meshes.mesh_of(program.mesh), shared=shared))(*leaves)


# A layer of data parallelism does less in the body than the shortest run: its sums follow the loop.
@pytest.mark.parametrize(
    ("method", "microbatches"),
    [(alpa_lite.DataParallel(), None), (alpa_lite.TensorParallel(), None), (alpa_lite.Zero(stage=3), 2)],
    ids=lambda x: type(x).__name__ if x else "",
)
def test_a_shared_program_computes_and_communicates_what_it_would_without(method, microbatches):
    """In the body of a loop over micro-batches, too, each distinct run is written once."""
    compiled = planned(method, microbatches=microbatches)
    for a, b in zip(*(results(compiled, shared) for shared in (False, True)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)

    whole, short = modules(compiled)
    totals = []
    for module in (whole, short):
        report = shardy.check_shardy(module, program_of(compiled).mesh, compiled.plan.collectives)
        total: Counter[Any] = Counter()
        for c in report.region_collectives:
            total[c.kind, c.axes, c.bytes] += c.count
        totals.append(total)
        assert not report.inserted_collectives
    assert totals[0] == totals[1]
    assert max(totals[0].values()) >= LAYERS
    written = [str(module).count(" stablehlo.dot_general") for module in (whole, short)]
    assert written[0] >= 4 * LAYERS and written[1] < 0.8 * written[0]  # each distinct run is written once


def test_a_wrong_count_is_found_in_a_shared_program():
    """A collective in a function that eight layers call happens eight times."""
    compiled = planned(alpa_lite.TensorParallel())
    _, short = modules(compiled)
    with pytest.raises(alpa_lite.VerificationError, match="found but not planned: 1 x"):
        shardy.check_shardy(short, program_of(compiled).mesh, compiled.plan.collectives[1:])


def test_layers_that_differ_in_one_instruction_share_the_rest_and_compute_with_their_own():
    """Each reads a row of its own of one array, as of a mask of heads, and is scaled by a number of its own."""

    @sgd
    def rows(state, batch):
        h, mask = batch["x"], batch["y"][:, :LAYERS]
        for n, layer in enumerate(state):
            h = h + jnp.tanh((h * mask[:, n : n + 1]) @ layer["up"] + layer["bias"]) @ layer["down"]
            h = (1 + n % 3) * 0.3 * h
            h = jnp.cos(h) * h / (1.0 + jnp.exp(-jnp.sin(h)))
        return (h**2).mean()

    compiled = planned(alpa_lite.DataParallel(), rows)
    body = program_of(compiled).body
    runs = shared_runs.runs_of(body.instructions, [o for o in body.outputs if not isinstance(o, Lit)], compiled.traced)
    assert [i for run in runs for i in run.body.instructions] == list(body.instructions)
    times = Counter(run.key for run in runs)
    alone = sum(len(run.body.instructions) for run in runs if run.key is None or times[run.key] == 1)
    assert alone < 0.25 * len(body.instructions)
    want = jax.tree.leaves(jax.jit(rows)(*arguments()))
    for a, b in zip(results(compiled, True), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
