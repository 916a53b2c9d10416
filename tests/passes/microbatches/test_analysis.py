"""The analysis of micro-batches goes back to the sum that was needed, and no further."""

import jax
import jax.numpy as jnp
import pytest

from alpa_lite.passes import factors
from alpa_lite.passes.microbatches.analysis import Analysis, Refused
from alpa_lite.passes.tracing import tracing

LAYERS = 8


def normalised(layers):
    """A gradient step whose layers all take means and variances over the batch."""

    def forward(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
            x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-3)
        return x

    def step(params, batch):
        grads = jax.grad(lambda p: jnp.mean(forward(p, batch["x"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - g, params, grads)

    params = [jax.ShapeDtypeStruct((8, 8), jnp.float32) for _ in range(layers)]
    return step, (params, {"x": jax.ShapeDtypeStruct((16, 8), jnp.float32)})


def analysed(kind, parts, may_be_local, layers=LAYERS):
    fun, args = normalised(layers)
    traced = tracing.trace(fun, args, {})
    rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    arguments = list(zip(traced.arguments, traced.graph.block.inputs, strict=True))
    batch = {value: 0 for argument, value in arguments if argument.role == "batch"}
    bound = {value for argument, value in arguments if argument.role == "state"}
    return kind(traced.graph, rules, parts, batch, bound, may_be_local=may_be_local)


class Counted(Analysis):
    """Counts the visits of operations."""

    count = 0

    def _visit(self, op):
        self.count += 1
        super()._visit(op)


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
    found, again = analysed(Analysis, parts, True), analysed(FromTheStart, parts, True)
    assert len(found.local) >= LAYERS and found.local == again.local
    for name in ("state", "free", "roots"):
        assert getattr(found.states, name) == getattr(again.states, name), name
    assert plain(found.states.roles) == plain(again.states.roles)
    assert found.ahead == again.ahead


def test_layers_are_not_visited_again_for_those_behind_them():
    few, many = (analysed(Counted, 1, True, layers) for layers in (3, 9))
    assert many.count / len(many.graph.block.ops) < 1.1 * few.count / len(few.graph.block.ops)


def test_what_may_not_be_local_is_refused_at_once():
    with pytest.raises(Refused) as caught:
        analysed(Analysis, 2, False)
    assert caught.value.roots
