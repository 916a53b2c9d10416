"""The rewriting of a step into a loop over micro-batches: new values, and graphs of helper functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Graph, Lit, Op
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.inlining import inlined
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

    def inline(
        self,
        run: Callable[..., Any],
        operands: Sequence[Atom],
        *,
        kind: Hashable = None,
        source: Any = None,
        constant: Callable[[int], Atom] = lambda value: value,
        counter: Callable[[], Atom] | None = None,
    ) -> tuple[list[Op], list[Atom]]:
        """The operations of a function on arrays like `operands`, and its results.

        Args:
          run, operands: the function and its arguments.
          kind: runs of one kind do the same on operands of the same types, and are traced once; None is like nothing.
          source: of the operations, in place of their own.
          constant: a constant of the whole graph -> its value where the operations are placed.
          counter: makes the number of the micro-batch; None outside of the loop.
        """
        atoms, graph = values_in(operands), self._trace(run, operands, kind)
        names: dict[int, Atom] = dict(zip(graph.block.inputs, atoms, strict=False))
        for value, array in zip(graph.block.inputs[len(atoms) :], graph.constants, strict=True):
            names[value] = constant(self.constant(graph.values[value], array))
        for op in graph.block.ops:
            if op.name == "axis_index":
                assert counter is not None
                names[op.results[0]] = counter()
        return inlined(self, graph, names, source)

    def _trace(self, run: Callable[..., Any], operands: Sequence[Atom], kind: Hashable) -> Graph:
        """The graph of a function, of which literals are no inputs, traced once for all runs of one kind."""
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
