"""Equal runs of instructions are found; a program that calls them as one function computes and communicates alike."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import alpa_lite
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import Compiled, compile_step
from alpa_lite.ir.graph import Lit
from alpa_lite.options import Method
from alpa_lite.passes.checks import shardy, verification
from alpa_lite.passes.lowering import emission
from alpa_lite.passes.lowering import runs as shared_runs
from alpa_lite.passes.lowering.program import LocalProgram, Reshard
from alpa_lite.runtime import meshes

LAYERS, WIDTH = 12, 16


def step(state, batch):
    def loss(state):
        h = batch["x"]
        for layer in state:
            h = h + jnp.tanh(h @ layer["up"] + layer["bias"]) @ layer["down"]
        return ((h - batch["y"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def arguments() -> Any:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> Any:
        return jnp.asarray(0.2 * rng.standard_normal(shape, np.float32))

    state = [
        {"up": array(WIDTH, 4 * WIDTH), "bias": array(4 * WIDTH), "down": array(4 * WIDTH, WIDTH)}
        for _ in range(LAYERS)
    ]
    return state, {"x": array(32, WIDTH), "y": array(32, WIDTH)}


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


METHODS = [alpa_lite.DataParallel(), alpa_lite.TensorParallel(), alpa_lite.Zero(stage=3)]
# A layer of data parallelism does less in the body than the shortest run: its sums follow the loop.
CASES = [*((method, None) for method in METHODS), *((method, 2) for method in METHODS[1:])]


@pytest.mark.parametrize(("method", "microbatches"), CASES, ids=lambda x: type(x).__name__ if x else "")
def test_a_shared_program_computes_and_communicates_what_it_would_without(method, microbatches):
    """In the body of a loop over micro-batches, too, each distinct run is written once."""
    compiled = planned(method, microbatches=microbatches)
    program = program_of(compiled)
    leaves = [*jax.tree.leaves(arguments()), *compiled.traced.graph.constants]
    mesh = meshes.mesh_of(program.mesh)
    alone, shared = (
        jax.jit(emission.emit(program, compiled.traced, mesh, shared=shared))(*leaves) for shared in (False, True)
    )
    for a, b in zip(alone, shared, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)

    whole, short = modules(compiled)
    reports = [shardy.check_shardy(m, program.mesh, compiled.plan.collectives) for m in (whole, short)]
    totals = []
    for report in reports:
        total: Counter[Any] = Counter()
        for c in report.inside:
            total[c.kind, c.axes, c.bytes] += c.count
        totals.append(total)
        assert not report.outside
    assert totals[0] == totals[1]
    assert max(totals[0].values()) >= LAYERS
    written = [str(module).count(" stablehlo.dot_general") for module in (whole, short)]
    assert written[0] >= 4 * LAYERS and written[1] < 0.8 * written[0]  # each distinct run is written once


def test_a_wrong_count_is_found_in_a_shared_program():
    """A collective in a function that twelve layers call happens twelve times."""
    compiled = planned(alpa_lite.TensorParallel())
    _, short = modules(compiled)
    with pytest.raises(alpa_lite.VerificationError, match="found but not planned: 1 x"):
        shardy.check_shardy(short, program_of(compiled).mesh, compiled.plan.collectives[1:])


def test_layers_that_differ_in_a_literal_alone_are_shared_and_compute_with_their_own():
    """Elementwise operations' literals are an input of the function that such layers are."""

    def scaled(state, batch):
        def loss(state):
            h = batch["x"]
            for i, layer in enumerate(state):
                h = h + (1 + i % 3) * 0.1 * jnp.tanh(h @ layer["up"] + layer["bias"]) @ layer["down"]
            return ((h - batch["y"]) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    compiled = planned(alpa_lite.TensorParallel(), scaled)
    body = program_of(compiled).body
    wanted = sorted({o for o in body.outputs if not isinstance(o, Lit)})
    numbers = [run.numbers for run in shared_runs.runs_of(body.instructions, wanted, compiled.traced)]
    assert len({tuple(map(float, some)) for some in numbers if some}) >= 3
    leaves = [*jax.tree.leaves(arguments()), *compiled.traced.graph.constants]
    fun = emission.emit(program_of(compiled), compiled.traced, meshes.mesh_of(program_of(compiled).mesh), shared=True)
    want = jax.tree.leaves(jax.jit(scaled)(*arguments()))
    for a, b in zip(jax.jit(fun)(*leaves), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_runs_are_the_instructions_in_order_and_pass_on_what_is_read_later():
    compiled = planned(alpa_lite.TensorParallel())
    body = program_of(compiled).body
    wanted = sorted({o for o in body.outputs if not isinstance(o, Lit)})
    runs = shared_runs.runs_of(body.instructions, wanted, compiled.traced)
    assert [i for run in runs for i in run.instructions] == list(body.instructions)
    known = set(body.inputs)
    for run in runs:
        assert known.issuperset(run.inputs)
        made: set[int] = set()
        for item in run.instructions:
            read = (item.source,) if isinstance(item, Reshard) else item.operands
            assert (made | set(run.inputs)).issuperset(o for o in read if not isinstance(o, Lit))
            made.update((item.result,) if isinstance(item, Reshard) else item.results)
        assert made.issuperset(run.outputs)
        known.update(run.outputs)
    assert known.issuperset(wanted)
    times = Counter(run.key for run in runs if run.key is not None)
    assert max(times.values()) >= LAYERS - 2
    once = {run.key: run for run in runs if run.key is not None}
    distinct = sum(len(r.instructions) for r in once.values()) + sum(len(r.instructions) for r in runs if r.key is None)
    assert distinct < 0.7 * len(body.instructions)


def test_layers_that_differ_in_one_instruction_share_the_rest():
    """Each reads a row of its own of one array, as of a mask of heads."""

    def rows(state, batch):
        def loss(state):
            h, mask = batch["x"], batch["y"][:, :LAYERS]
            for n, layer in enumerate(state):
                h = h + jnp.tanh((h * mask[:, n : n + 1]) @ layer["up"] + layer["bias"]) @ layer["down"]
                h = jnp.cos(h) * h / (1.0 + jnp.exp(-jnp.sin(h)))
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    compiled = planned(alpa_lite.DataParallel(), rows)
    body = program_of(compiled).body
    runs = shared_runs.runs_of(body.instructions, [o for o in body.outputs if not isinstance(o, Lit)], compiled.traced)
    assert [i for run in runs for i in run.instructions] == list(body.instructions)
    times = Counter(run.key for run in runs if run.key is not None)
    lengths = {run.key: len(run.instructions) for run in runs}
    alone = sum(len(run.instructions) * (run.key is None or times[run.key] == 1) for run in runs)
    assert alone < 0.25 * len(body.instructions), [(lengths[key], n) for key, n in times.items()]


def test_what_repeats_but_for_one_token_is_cut_around_that():
    layer = np.arange(20)
    tokens = np.concatenate([np.concatenate([layer[:7], [100 + n], layer[7:]]) for n in range(6)])
    assert shared_runs._cuts(tokens) == [0, *(c for n in range(5) for c in (8 + 21 * n, 28 + 21 * n)), 126]


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 4)), max_size=5))
def test_any_sequence_is_cut_in_order(pieces):
    tokens = np.array([t for piece, times in pieces for _ in range(times) for t in piece], dtype=np.int64)
    cuts = shared_runs._cuts(tokens)
    assert cuts[0] == 0 and cuts[-1] == len(tokens) and cuts == sorted(set(cuts))
