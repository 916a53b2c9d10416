"""What the operations of a step say about its arguments: which results are an argument's new value, which gradients.

A result that has the structure, shapes and dtypes of an argument may be its new value, but also its gradient
(`jax.value_and_grad`), or a prediction for it. An update keeps something of what it updates: the old value goes into
the new one element by element,

    w - lr * g,   b1 * mu + (1 - b1) * g,   count + 1,   cache.at[i].set(x),   where(finite, new, old),

in whatever shape (an optimizer may flatten all parameters into one vector). This module calls a result *carried* from
an argument if a chain of such operations leads from the one to the other. A gradient comes out of the reverse pass,
where JAX marks every operation; chains do not pass through those, so that the gradient of a penalty, 2 * w, is not
carried from w. Products, reductions, draws and solvers end a chain.

A frozen weight may have as many rows as the batch has examples. What tells them apart is the first forward operation
that reads them otherwise than element by element: examples are looked up, or go side by side through products, while a
weight is a table that is looked up in, a kernel, or gives the dim that a product sums over against a dim of features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from alpa_lite import _jax
from alpa_lite.graph import Atom, Block, Graph, Lit, Op, walk
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.ir.loops import ScanView

Origins = frozenset[int]
"""The numbers of the arguments that a value is carried from."""

NONE: Origins = frozenset()


class Evidence:
    """What is known about the results of a graph, computed when it is first asked for."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def origins(self, output: int) -> Origins:
        """The arguments that an output keeps something of, element by element."""
        return _origins(self._graph.block.outputs[output], self._found)

    def carried(self, output: int, argument: int) -> bool:
        """Whether an output keeps something of an argument, element by element."""
        return argument in self.origins(output)

    def unchanged(self, output: int, argument: int) -> bool:
        """Whether an output is an argument as it came."""
        block = self._graph.block
        return block.outputs[output] == block.inputs[argument]

    def hands_through(self, output: int) -> bool:
        """Whether an output is some argument as it came."""
        return self._graph.block.outputs[output] in self._graph.block.inputs

    def learnt(self, output: int) -> bool:
        """Whether an output depends on a reverse pass."""
        atom = self._graph.block.outputs[output]
        return isinstance(atom, int) and atom in self._learnt

    def depends(self, output: int, argument: int) -> bool:
        """Whether an output reads an argument, directly or through other operations.

        All results of an operation are taken to read all its operands.
        """
        block = self._graph.block
        return block.outputs[output] in flow.made_of(block.ops, [block.inputs[argument]])

    @cached_property
    def weights(self) -> Origins:
        """The arguments that forward operations read as weights: their dim 0 holds no examples.

        Followed are elementwise operations, broadcasts and transpositions, and constants of scans.
        """
        found: set[int] = set()
        leading = {value: (number, 0) for number, value in enumerate(self._graph.block.inputs) if self._shape(value)}
        self._read_as_weights(self._graph.block, leading, found)
        return frozenset(found)

    def _read_as_weights(self, block: Block, leading: dict[int, tuple[int, int]], found: set[int]) -> None:
        """Adds the arguments that a block reads as weights.

        Args:
          leading: value -> (argument, the dim of the value that is dim 0 of the argument).
        """
        for op in block.ops:
            held = [leading.get(atom) if isinstance(atom, int) else None for atom in op.operands]
            if not any(held) or _is_reverse(op):
                continue
            if op.name == "dot_general":
                contracted, _ = op.params["dimension_numbers"]
                for side, (dims, others) in enumerate((contracted, contracted[::-1])):
                    have, against = held[side], held[1 - side]
                    examples = {0, against[1]} if against else {0}  # x.T @ y sums over those of both
                    if have and any(d == have[1] and o not in examples for d, o in zip(dims, others, strict=True)):
                        found.add(have[0])
            elif op.name == "gather" and held[0]:
                if held[0][1] in op.params["dimension_numbers"].start_index_map:
                    found.add(held[0][0])
            elif op.name == "conv_general_dilated" and held[1]:
                found.add(held[1][0])
            elif op.name == "scan":
                view = ScanView(op)
                inner = zip(view.inputs.consts, view.taken(held).consts, strict=True)
                self._read_as_weights(view.body, {value: have for value, have in inner if have}, found)
            elif op.name in primitives.ELEMENTWISE or op.name in ("transpose", "broadcast_in_dim"):
                (first, *_) = [have for have in held if have]
                dim = first[1]
                if op.name == "transpose":
                    dim = list(op.params["permutation"]).index(dim)
                elif op.name == "broadcast_in_dim":
                    dim = op.params["broadcast_dimensions"][dim]
                leading.update((result, (first[0], dim)) for result in op.results if self._shape(result))

    @cached_property
    def _found(self) -> dict[int, Origins]:
        found = {value: frozenset({number}) for number, value in enumerate(self._graph.block.inputs)}
        self._walk(self._graph.block, found)
        return found

    @cached_property
    def _learnt(self) -> set[int]:
        block = self._graph.block
        marked = [op for op in block.ops if _is_reverse(op) or any(map(_is_reverse, _nested(op)))]
        return flow.made_of(block.ops, [value for op in marked for value in op.results])

    def _walk(self, block: Block, found: dict[int, Origins]) -> None:
        """Adds the origins of what a block makes to those of its inputs."""
        for op in block.ops:
            if any(_origins(atom, found) for atom in op.operands):
                found.update(zip(op.results, self._results(op, found), strict=True))

    def _results(self, op: Op, found: dict[int, Origins]) -> Sequence[Origins]:
        """The origins of each result of an operation."""
        if _is_reverse(op):
            return [NONE] * len(op.results)
        given = [_origins(atom, found) for atom in op.operands]
        if op.name == "scan":
            return self._scan(ScanView(op), given)
        if op.name == "while":
            conds = op.params["cond_nconsts"]
            consts, carry = given[conds : conds + op.params["body_nconsts"]], given[conds + op.params["body_nconsts"] :]
            return self._repeated(op.bodies[1], consts, carry, [])[0]
        if op.name == "cond":
            branches = [self._body(branch, given[1:]) for branch in op.bodies]
            return [NONE.union(*parts) for parts in zip(*branches, strict=True)]
        if op.name in primitives.PAIRWISE:
            return given
        if op.name in primitives.REARRANGED:
            return [NONE.union(*given)] * len(op.results)
        if op.name in primitives.SCATTERS:
            return [given[0]]
        if op.name in primitives.ELEMENTWISE or op.name in primitives.KERNELS:
            shape = [self._shape(atom) for atom in op.operands]
            return [
                NONE.union(*(g for g, s in zip(given, shape, strict=True) if s == self._shape(result)))
                for result in op.results
            ]
        return [NONE] * len(op.results)

    def _scan(self, view: ScanView, given: Sequence[Origins]) -> list[Origins]:
        parts = view.taken(given)
        carry, stacked = self._repeated(view.body, parts.consts, parts.carry, parts.xs)
        return [*carry, *stacked]

    def _repeated(
        self, body: Block, consts: Sequence[Origins], carry: Sequence[Origins], xs: Sequence[Origins]
    ) -> tuple[list[Origins], list[Origins]]:
        """The origins of what a loop carries and stacks at its end: those of its start, until nothing is added."""
        held = list(carry)
        while True:
            out = self._body(body, [*consts, *held, *xs])
            grown = [a | b for a, b in zip(held, out, strict=False)]
            if grown == held:
                # A loop that overwrites what it carries keeps nothing of it, if it runs at all.
                return out[: len(held)], out[len(held) :]
            held = grown

    def _body(self, block: Block, given: Iterable[Origins]) -> list[Origins]:
        found = dict(zip(block.inputs, given, strict=True))
        self._walk(block, found)
        return [_origins(atom, found) for atom in block.outputs]

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return tuple(atom.aval.shape) if isinstance(atom, Lit) else self._graph.values[atom].shape


def _origins(atom: Atom, found: dict[int, Origins]) -> Origins:
    return found.get(atom, NONE) if isinstance(atom, int) else NONE


def _nested(op: Op) -> Iterable[Op]:
    for body in op.bodies:
        yield from walk(body)


def _is_reverse(op: Op) -> bool:
    return _jax.is_reverse(op.source)
