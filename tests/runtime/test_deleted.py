"""A deleted array ends no process: each case runs in a process of its own, which would take the tests with it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SETUP = """
    import jax, jax.numpy as jnp, alpa_lite
    from alpa_lite.errors import DonatedError
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)

    def gone(*trees):
        negated = jax.jit(lambda *t: jax.tree.map(jnp.negative, t), donate_argnums=range(len(trees)))(*trees)
        jax.block_until_ready(negated)
        assert all(x.is_deleted() for x in jax.tree.leaves(trees))

    def refused(what, *args):
        try:
            run(*args)
        except DonatedError as error:
            assert str(error).startswith(what), error
            print("refused", what)
"""
DICT = """
    def step(state, batch, frozen):
        loss, grads = jax.value_and_grad(lambda s: (((batch @ s["a"] @ frozen) @ s["b"]) ** 2).mean())(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    def make():
        return {"a": jnp.ones((8, 8)), "b": jnp.eye(8)}, jnp.ones((16, 8)), jnp.eye(8)

    run = alpa_lite.parallelize(step, batch_argnums=1, METHOD)
    first, batch, frozen = run.place(*make())
    second, _ = run(first, batch, frozen)
    refused("state/a", first, batch, frozen)
    third, _ = run(second, batch, frozen)
    refused("state/a", first, batch, frozen)
    refused("state/b", {**third, "b": second["b"]}, batch, frozen)
    gone(third["b"])  # of what the last call returned
    refused("state/b", third, batch, frozen)
    state, _ = run(*run.place(*make()))
    gone(batch)
    refused("batch", state, batch, frozen)
    gone(frozen)
    refused("frozen", state, make()[1], frozen)
    print(float(run(state, *make()[1:])[1]) > 0)
"""
NNX = """
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def step(model, batch):
        loss, grads = nnx.value_and_grad(lambda m: (m.b(jnp.tanh(m.a(batch))) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return loss

    run = alpa_lite.parallelize(step, METHOD)
    model, batch = run.place(Model(nnx.Rngs(0)), jnp.ones((16, 8)))
    run(model, batch)
    old = jax.tree.map(lambda x: x, nnx.state(model))
    run(model, batch)
    new = jax.tree.map(lambda x: x, nnx.state(model))
    nnx.update(model, old)
    refused("model/a/bias", model, batch)
    nnx.update(model, new)
    gone(model.b.kernel[...])
    refused("model/b/kernel", model, batch)
"""
MESH = "method=alpa_lite.Zero(stage=3)"
PIPELINE = "method=alpa_lite.Pipeline(num_stages=2), num_microbatches=2"
CASES = {
    "one mesh": (DICT, MESH, 6),
    "pipeline": (DICT, PIPELINE, 6),
    "NNX, one mesh": (NNX, MESH, 2),
    "NNX, pipeline": (NNX, PIPELINE, 2),
}


@pytest.mark.parametrize("case", ["one mesh", *(pytest.param(c, marks=pytest.mark.slow) for c in [*CASES][1:])])
def test_a_deleted_array_is_refused_and_the_process_lives(case):
    text, method, refusals = CASES[case]
    program = textwrap.dedent(SETUP) + textwrap.dedent(text).replace("METHOD", method)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], cwd=root, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("refused") == refusals, done.stdout
