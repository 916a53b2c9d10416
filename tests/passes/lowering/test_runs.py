"""Equal runs of instructions are found; a program that calls them as one function computes and communicates alike."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite
from alpa_lite.api import make_options
from alpa_lite.cluster import Cluster
from alpa_lite.compiler import Compiled, compile_step
from alpa_lite.ir.graph import Lit
from alpa_lite.options import Method
from alpa_lite.passes.checks import shardy, verification
from alpa_lite.passes.lowering import emission
from alpa_lite.passes.lowering import runs as shared_runs
from alpa_lite.passes.lowering.program import LocalProgram
from alpa_lite.runtime import meshes
from tests.gallery import sgd
from tests.zoo_base import normal

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
        for c in report.inside:
            total[c.kind, c.axes, c.bytes] += c.count
        totals.append(total)
        assert not report.outside
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


def test_layers_that_differ_in_a_literal_alone_are_shared_and_compute_with_their_own():
    """Elementwise operations' literals are an input of the function that such layers are."""

    @sgd
    def scaled(state, batch):
        h = batch["x"]
        for i, layer in enumerate(state):
            h = h + (1 + i % 3) * 0.1 * jnp.tanh(h @ layer["up"] + layer["bias"]) @ layer["down"]
        return ((h - batch["y"]) ** 2).mean()

    compiled = planned(alpa_lite.TensorParallel(), scaled)
    body = program_of(compiled).body
    wanted = sorted({o for o in body.outputs if not isinstance(o, Lit)})
    numbers = [run.numbers for run in shared_runs.runs_of(body.instructions, wanted, compiled.traced)]
    assert len({tuple(map(float, some)) for some in numbers if some}) >= 3
    want = jax.tree.leaves(jax.jit(scaled)(*arguments()))
    for a, b in zip(results(compiled, True), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_layers_that_differ_in_one_instruction_share_the_rest():
    """Each reads a row of its own of one array, as of a mask of heads."""

    @sgd
    def rows(state, batch):
        h, mask = batch["x"], batch["y"][:, :LAYERS]
        for n, layer in enumerate(state):
            h = h + jnp.tanh((h * mask[:, n : n + 1]) @ layer["up"] + layer["bias"]) @ layer["down"]
            h = jnp.cos(h) * h / (1.0 + jnp.exp(-jnp.sin(h)))
        return (h**2).mean()

    compiled = planned(alpa_lite.DataParallel(), rows)
    body = program_of(compiled).body
    runs = shared_runs.runs_of(body.instructions, [o for o in body.outputs if not isinstance(o, Lit)], compiled.traced)
    assert [i for run in runs for i in run.instructions] == list(body.instructions)
    times = Counter(run.key for run in runs)
    alone = sum(len(run.instructions) for run in runs if run.key is None or times[run.key] == 1)
    assert alone < 0.25 * len(body.instructions)
