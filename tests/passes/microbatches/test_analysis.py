"""The analysis of micro-batches goes back to the sum that was needed, and no further."""

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.passes import factors
from alpa_lite.passes.microbatches.analysis import Analysis, Refused
from alpa_lite.passes.tracing import tracing

LAYERS = 8


def normalised():
    """A gradient step whose layers all take means and variances over the batch."""

    def forward(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
            x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)
        return x

    def step(params, batch):
        grads = jax.grad(lambda p: jnp.mean(forward(p, batch["x"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32) for _ in range(LAYERS)]
    return step, (params, {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)})


def analysed(kind, parts):
    fun, args = normalised()
    traced = tracing.trace(fun, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    arguments = list(zip(traced.arguments, traced.graph.block.inputs, strict=True))
    batch = {value: 0 for argument, value in arguments if argument.role == "batch"}
    bound = {value for argument, value in arguments if argument.role == "state"}
    return kind(traced.graph, rules, parts, batch, bound, may_be_local=True)


class FromTheStart(Analysis):
    """Visits all operations again for each reduction that has to be local."""

    def _visit_all(self, may_be_local):
        while True:
            try:
                super()._visit_all(False)
                return
            except Refused as refused:
                if refused.roots <= self.local:
                    raise
                self._transfer.local |= refused.roots


def plain(roles):
    """Roles without their functions."""
    return {index: (r.kind, r.operands, r.results, r.scale) for index, r in roles.items()}


@pytest.mark.parametrize("parts", [1, 2])
def test_going_back_finds_the_states_of_a_visit_from_the_start(parts):
    found, again = analysed(Analysis, parts), analysed(FromTheStart, parts)
    assert len(found.local) >= LAYERS and found.local == again.local
    assert found.states.state == again.states.state
    for value in found.states.state:
        assert found.states.roots([value]) == again.states.roots([value])
    assert plain(found.states.roles) == plain(again.states.roles)
    assert found.ahead == again.ahead
