"""The rewriting of a step into a loop over micro-batches: new values, and graphs of helper functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Graph, Lit
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.rewriting import Rewriter
from alpa_lite.passes.microbatches.cutting import Cuts
from alpa_lite.passes.microbatches.states import AXIS, State, StepStates
from alpa_lite.passes.tracing import conversion


class Builder(Rewriter):
    """The rewriting of a step into a loop over micro-batches."""

    def __init__(self, states: StepStates, strided: bool = False):
        """`strided`: micro-batches are of every m-th example."""
        super().__init__(states.graph)
        self.states, self.parts, self.strided = states, states.parts, strided
        self.cuts = Cuts(self.parts, strided)
        self._graphs: dict[Hashable, Graph] = {}

    def new_part(self, value: int, state: State) -> int:
        """A new value for the part of `value` that one micro-batch has."""
        if state.kind != "sliced":
            return self.fresh(value)
        shape, dim = self.values[value].shape, state.dim
        return self.shaped(value, (*shape[:dim], shape[dim] // self.parts, *shape[dim + 1 :]))

    def trace(self, run: Callable[..., Any], operands: Sequence[Atom], kind: Hashable = None) -> Graph:
        """The graph of a function on arrays like `operands`, of which literals are no inputs.

        Args:
          kind: runs of one kind do the same on operands of the same types, and are traced once; None is like nothing.
        """
        specs = [_jax.spec_of(self.values[a].aval) for a in values_in(operands)]
        is_shared = kind is not None and len(specs) == len(operands)
        key = (kind, *((s.shape, s.dtype, s.weak_type) for s in specs)) if is_shared else None
        if key is None or key not in self._graphs:

            def call(*arrays: Any) -> Any:
                given = iter(arrays)
                return run(*[a.value if isinstance(a, Lit) else next(given) for a in operands])

            jaxpr = jax.make_jaxpr(call, axis_env=[(AXIS, self.parts)])(*specs)
            self._graphs[key] = conversion.graph_of(jaxpr, self.keys)
        return self._graphs[key]
