"""Evidence in the operations of a step for the roles of its arguments: updates, gradients, weights.

A result that has the structure, shapes and dtypes of an argument may be its new value, but also its gradient
(`jax.value_and_grad`), or a prediction for it. An update keeps something of what it updates: the old value goes into
the new one element by element,

    w - lr * g,   b1 * mu + (1 - b1) * g,   count + 1,   cache.at[i].set(x),   where(finite, new, old),

in whatever shape (an optimizer may flatten all parameters into one vector). This module calls a result *carried* from
an argument if a chain of such operations leads from the one to the other. A gradient comes out of the reverse pass,
where JAX marks every operation; chains do not pass through those, so that the gradient of a penalty, 2 * w, is not
carried from w. Products, reductions, draws and solvers end a chain.

A frozen weight may have as many rows as the batch has examples. They differ in the first forward operation that reads
them otherwise than element by element: examples are looked up, or go side by side through products, while a weight is a
table that is looked up in, a kernel, or gives the dim that a product sums over against a dim of features.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op, walk
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.ir.loops import ScanView, ports
from alpa_lite.passes.ir.remembered import memoise_method

Row = tuple[int, int]
"""An argument, and the dim of a value that is its dim 0."""


class Evidence:
    """The facts about the results of a graph, each computed when it is first read."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._outputs = graph.block.outputs
        self._numbers = {value: number for number, value in enumerate(graph.block.inputs)}

    @memoise_method
    def origins(self, output: int) -> frozenset[int]:
        """Returns the arguments that an output keeps something of, element by element."""
        found = flow.reach(flow.values_in([self._outputs[output]]), lambda value: self._carriers.get(value, ()))
        return frozenset(self._numbers[value] for value in found if value in self._numbers)

    def returned_argument(self, output: int) -> int | None:
        """Returns the argument, or the constant behind them, that an output is as it came; None if it is none."""
        atom = self._outputs[output]
        return self._numbers.get(atom) if isinstance(atom, int) else None

    def is_learnt(self, output: int) -> bool:
        """Returns whether an output depends on a reverse pass."""
        return self._outputs[output] in self._learnt

    @memoise_method
    def _dependents(self, argument: int) -> set[int]:
        return flow.find_dependents(self._graph.block.ops, [self._graph.block.inputs[argument]])

    def depends(self, output: int, argument: int) -> bool:
        """Returns whether an output reads an argument, directly or through other operations.

        All results of an operation are taken to read all its operands.
        """
        return self._outputs[output] in self._dependents(argument)

    @cached_property
    def weights(self) -> frozenset[int]:
        """The arguments that forward operations read as weights: their dim 0 holds no examples.

        Followed are elementwise operations, broadcasts and transpositions, and constants of scans.
        """
        rows = {value: (number, 0) for value, number in self._numbers.items() if self._shape(value)}
        return frozenset(self._read_as_weights(self._graph.block, rows))

    def _read_as_weights(self, block: Block, rows: dict[int, Row]) -> Iterator[int]:
        """The arguments that a block reads as weights; `rows`: of its values."""
        for op in block.ops:
            held = [rows.get(atom) if isinstance(atom, int) else None for atom in op.operands]
            known = next(filter(None, held), None)
            if known is None or _jax.is_reverse(op.source):
                continue
            yield from _weights_of(op, held)
            if op.name == "scan":
                consts = zip(ScanView(op).inputs.consts, held, strict=False)
                yield from self._read_as_weights(op.bodies[0], {value: have for value, have in consts if have})
            elif op.name in primitives.ELEMENTWISE or op.name in ("transpose", "broadcast_in_dim"):
                number, dim = known
                if op.name == "transpose":
                    dim = list(op.params["permutation"]).index(dim)
                elif op.name == "broadcast_in_dim":
                    dim = op.params["broadcast_dimensions"][dim]
                rows.update((result, (number, dim)) for result in op.results if self._shape(result))

    @cached_property
    def _learnt(self) -> set[int]:
        block = self._graph.block
        marked = [op for op in block.ops if any(_jax.is_reverse(one.source) for one in walk(Block((), (op,), ())))]
        return flow.find_dependents(block.ops, [value for op in marked for value in op.results])

    @cached_property
    def _carriers(self) -> Mapping[int, Sequence[int]]:
        """Value -> the values that it keeps something of."""
        found: dict[int, list[int]] = {}
        for op in self._graph.ops():
            for value, atom in () if _jax.is_reverse(op.source) else self._kept(op):
                if isinstance(atom, int):
                    found.setdefault(value, []).append(atom)
        return found

    def _kept(self, op: Op) -> Iterable[tuple[int, Atom | None]]:
        """Returns the results of an operation, and the inputs of its bodies, with all that they keep something of."""
        pairs = itertools.product(op.results, op.operands)
        if op.bodies:
            return _runs(op)
        if op.name in primitives.PAIRWISE or op.name in primitives.SCATTERS:
            return zip(op.results, op.operands, strict=False)  # a scatter has one result
        if op.name in primitives.REARRANGED:
            return pairs
        if op.name in primitives.ELEMENTWISE or op.name in primitives.KERNELS:
            return [(result, atom) for result, atom in pairs if self._shape(result) == self._shape(atom)]
        return ()

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return tuple(atom.aval.shape) if isinstance(atom, Lit) else self._graph.values[atom].shape


def _runs(op: Op) -> Iterator[tuple[int, Atom | None]]:
    """For an operation with bodies, each result and each input of a body, with the atoms that it is in some run.

    A loop that overwrites a carry keeps nothing of its start, if it runs at all.
    """
    for port in ports(op):
        for value in port.inputs:
            yield from ((value, atom) for atom in (port.operand, *port.outputs))
        if port.result is not None:
            yield from ((port.result, atom) for atom in port.outputs)


def _weights_of(op: Op, held: Sequence[Row | None]) -> Iterator[int]:
    """Yields the arguments that an operation reads as weights, from the rows that its operands are."""
    if op.name == "dot_general":
        contracted, _ = op.params["dimension_numbers"]
        for have, against, dims in zip(held, held[::-1], (contracted, contracted[::-1]), strict=True):
            examples = {0, against[1]} if against else {0}  # x.T @ y sums over those of both
            if have and any(own == have[1] and other not in examples for own, other in zip(*dims, strict=True)):
                yield have[0]
    elif op.name == "gather" and held[0] and held[0][1] in op.params["dimension_numbers"].start_index_map:
        yield held[0][0]
    elif op.name == "conv_general_dilated" and held[1]:
        yield held[1][0]
