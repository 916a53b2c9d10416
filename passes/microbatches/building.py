"""New operations of the loop over micro-batches: copies on smaller values, and the operations of traced functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax

from alpa_lite.graph import Atom, Graph, Lit, Op
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_atom
from alpa_lite.passes.microbatches.cutting import Cuts, PositionDependent
from alpa_lite.passes.microbatches.states import AXIS, State, spec_of
from alpa_lite.passes.microbatches.step_states import StepStates
from alpa_lite.passes.tracing import conversion

Traceable = Callable[..., Sequence[Any]]
"""A function from arrays to a sequence of arrays."""


class Inputs(Protocol):
    """The inputs that a block of the loop takes from outside."""

    def constant(self, value: int) -> int:
        """One of the new graph's constants."""
        ...

    def counter(self) -> int:
        """The number of the micro-batch, an int32 scalar."""
        ...


class Builder(Rewriter):
    """The rewriting of a step into a loop over micro-batches."""

    def __init__(self, states: StepStates, strided: bool = False):
        """`strided`: micro-batches are of every m-th example."""
        super().__init__(states.graph)
        self.states, self.parts, self.strided = states, states.parts, strided
        self.cuts = Cuts(self.parts, strided)
        self._traces: dict[Hashable, Graph] = {}

    def new_part(self, value: int, state: State) -> int:
        """A new value for the part of `value` that one micro-batch has."""
        if state.kind != "sliced":
            return self.fresh(value)
        shape, dim = self.values[value].shape, state.dim
        return self.shaped(value, (*shape[:dim], shape[dim] // self.parts, *shape[dim + 1 :]))

    def shape_of(self, atom: Atom) -> tuple[int, ...]:
        """The shape of an atom."""
        return tuple(atom.aval.shape) if isinstance(atom, Lit) else self.values[atom].shape

    def append_ops(
        self,
        run: Traceable,
        operands: Sequence[Atom],
        ops: list[Op],
        scope: Inputs | None = None,
        kind: Hashable = None,
        once: bool = False,
    ) -> list[Atom]:
        """Appends the operations that `run` does on arrays like `operands`, and returns its results.

        Args:
          run, operands: the function and its arguments.
          ops: the operations of a block so far.
          scope: that block, if it is in the loop.
          kind: runs of one kind do the same on operands of the same types, and are traced once; None is like nothing.
          once: `run` reads the number of its block to do something in one micro-batch, whichever that is.

        Raises:
          PositionDependent: `run` reads the number of its block, and the examples of a micro-batch are not a block.
        """
        atoms = values_in(operands)
        graph = self._trace(run, operands, kind)
        env: dict[int, Atom] = dict(zip(graph.block.inputs, atoms, strict=False))
        for value, array in zip(graph.block.inputs[len(atoms) :], graph.constants, strict=True):
            constant = self.constant(graph.values[value], array)
            env[value] = constant if scope is None else scope.constant(constant)
        for op in graph.block.ops:
            if op.name == "axis_index":
                if self.strided and not once:
                    raise PositionDependent
                assert scope is not None
                env[op.results[0]] = scope.counter()
                continue
            results = [self.fresh(graph.values[v]) for v in op.results]
            made = self.moved(op, [renamed_atom(a, env) for a in op.operands], results, values=graph.values)
            ops.append(replace(made, key=op.key))
            env.update(zip(op.results, results, strict=True))
        return [renamed_atom(a, env) for a in graph.block.outputs]

    def _trace(self, run: Traceable, operands: Sequence[Atom], kind: Hashable) -> Graph:
        """The graph of a function on arrays like `operands`, traced once for all runs of one kind."""
        atoms = values_in(operands)
        specs = [spec_of(self.values[a]) for a in atoms]

        def call(*arrays: Any) -> Sequence[Any]:
            given = iter(arrays)
            return run(*[a.value if isinstance(a, Lit) else next(given) for a in operands])

        is_known = kind is not None and len(atoms) == len(operands)
        key = (kind, *((s.shape, s.dtype, s.weak_type) for s in specs)) if is_known else None
        graph = self._traces.get(key)
        if graph is None:
            graph = conversion.graph_of(jax.make_jaxpr(call, axis_env=[(AXIS, self.parts)])(*specs), self.keys)
            if key is not None:
                self._traces[key] = graph
        return graph
