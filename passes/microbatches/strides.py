"""Micro-batches of every m-th example, which no device has to send another.

Problem. A batch of E examples lies on n devices in n blocks of consecutive examples. Cut into m micro-batches of
consecutive examples each, a micro-batch lies on n/m of them and has to be spread over all: an all-to-all of the batch.
If micro-batch t has the examples t, t + m, t + 2m, .. instead, every device has its share already, and cutting is a
reshape of its own block: [E, ..] -> [E/m, m, ..], of which micro-batch t has [:, t].

When. That is a permutation of the batch, and the step computes the same if it does not tell examples apart by their
position: sums do not (but for rounding), nor do operations that work on each example by itself; results that have one
value an example are put back in their order. A draw of random numbers for the batch, a position within it, or a reshape
that takes the batch apart do, and so do prints; then micro-batches are blocks of consecutive examples.

How that is known. Every sliced value (`states`) has a dim of n elements in which each of E examples has n/E consecutive
ones: [E, S] reshaped to [E S] has S. An operation keeps that where the sharded factor of its rule consists of whole
examples, equally many in all that it reads; anything else is `Ordered`. So is a local form that asks for the number of
its block, which is found when it is traced (`building`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax import lax

from alpa_lite.graph import Atom, Block, Lit, Op
from alpa_lite.passes.ir.loops import ScanView, WhileView
from alpa_lite.passes.microbatches.analysis import Analysis
from alpa_lite.passes.microbatches.segments import segments_of
from alpa_lite.passes.microbatches.states import Role, State


class Ordered(Exception):
    """The step tells examples apart by their position."""


class Consecutive:
    """Micro-batches of consecutive examples, in each segment of a dim: how arrays are cut into them, and joined."""

    def __init__(self, parts: int) -> None:
        """`parts`: the number of micro-batches."""
        self.parts = parts

    def of(self, value: int, state: State) -> tuple[int, ...]:
        """The segments of a value along the dim that is cut."""
        del value
        return state.segments

    def cut(self, x: Any, dim: int, segments: Any) -> Any:
        """The micro-batches of an array, stacked along a new leading dim."""
        if segments:
            return lax.concatenate([self.cut(piece, dim, ()) for piece in lax.split(x, segments, dim)], dim + 1)
        shape = (*x.shape[:dim], self.parts, x.shape[dim] // self.parts, *x.shape[dim + 1 :])
        split = lax.reshape(x, shape)
        return lax.transpose(split, (dim, *(d for d in range(len(shape)) if d != dim))) if dim else split

    def one(self, x: Any, dim: int, segments: Any, count: Any) -> Any:
        """The micro-batch of an array with a number."""
        if segments:
            return lax.concatenate([self.one(piece, dim, (), count) for piece in lax.split(x, segments, dim)], dim)
        size = x.shape[dim] // self.parts
        return lax.dynamic_slice_in_dim(x, lax.mul(count, np.int32(size)), size, dim)

    def joined(self, x: Any, dim: int, segments: Any) -> Any:
        """What `cut` has cut."""
        if segments:
            pieces = lax.split(x, [n // self.parts for n in segments], dim + 1)
            return lax.concatenate([self.joined(piece, dim, ()) for piece in pieces], dim)
        if self.parts == 1:
            return lax.squeeze(x, (0,))  # whatever it is, a number without dims among it
        order = (*range(1, dim + 1), 0, *range(dim + 1, x.ndim))
        return _merged(lax.transpose(x, order) if dim else x, dim, 2)


class Strides:
    """Micro-batches of every m-th example: how many examples the dims of sliced values hold, and how they are cut.

    Attributes:
      examples: value -> E, for values that are sliced within the loop.
    """

    def __init__(self, analysis: Analysis) -> None:
        """Raises Ordered where the step tells examples apart by their position."""
        self.analysis, self.parts = analysis, analysis.parts
        self.examples: dict[int, int] = {}
        self._wanted: dict[tuple[int, int], int] = {}
        self._divided: dict[tuple[Any, tuple[State, ...], int], bool] = {}
        for value in analysis.graph.block.inputs:
            state = analysis.state[value]
            if state.kind == "sliced":
                self._define(value, state, analysis.values[value].shape[state.dim])
        self._block(analysis.graph.block)

    def of(self, value: int, state: State) -> int:
        """E of a value that is cut along a dim. Raises Ordered if it is not known."""
        found = self._wanted.get((value, state.dim)) or self.examples.get(value)
        if found is None:
            raise Ordered
        return found

    def want(self, atom: Atom, dim: int, examples: int | None) -> None:
        """Notes that a value is wanted in micro-batches along a dim that holds so many examples."""
        if examples is None or isinstance(atom, Lit):
            return
        known = self._wanted.setdefault((atom, dim), examples)
        if known != examples or self.analysis.values[atom].shape[dim] % examples:
            raise Ordered

    def cut(self, x: Any, dim: int, examples: Any) -> Any:
        """The micro-batches of an array, stacked along a new leading dim."""
        split = lax.reshape(x, self._split(x.shape, dim, examples))
        order = (dim + 1, *(d for d in range(split.ndim) if d != dim + 1))
        return _merged(lax.transpose(split, order), dim + 1, 2)

    def one(self, x: Any, dim: int, examples: Any, count: Any) -> Any:
        """The micro-batch of an array with a number."""
        split = lax.reshape(x, self._split(x.shape, dim, examples))
        return _merged(lax.dynamic_index_in_dim(split, count, dim + 1, keepdims=False), dim, 2)

    def joined(self, x: Any, dim: int, examples: Any) -> Any:
        """What `cut` has cut."""
        shape = x.shape
        each = shape[dim + 1] // (examples // self.parts)
        split = lax.reshape(x, (*shape[: dim + 1], examples // self.parts, each, *shape[dim + 2 :]))
        order = (*range(1, dim + 2), 0, *range(dim + 2, split.ndim))
        return _merged(lax.transpose(split, order), dim, 3)

    def _split(self, shape: Sequence[int], dim: int, examples: Any) -> tuple[int, ...]:
        """A dim as (examples of a micro-batch, micro-batches, elements of an example)."""
        return (*shape[:dim], examples // self.parts, self.parts, shape[dim] // examples, *shape[dim + 1 :])

    # -- one walk -------------------------------------------------------------------------------------------------

    def _define(self, value: int, state: State, examples: int | None) -> None:
        if state.kind != "sliced" or examples is None:
            return
        if self.analysis.values[value].shape[state.dim] % examples or examples % self.parts:
            raise Ordered
        if self.examples.setdefault(value, examples) != examples:
            raise Ordered

    def _known(self, atom: Atom, state: State) -> int | None:
        return self.examples.get(atom) if state.kind == "sliced" and not isinstance(atom, Lit) else None

    def _block(self, block: Block) -> None:
        for op in block.ops:
            role = self.analysis.roles.get(op.index)
            if role is not None:
                self._op(op, role)

    def _op(self, op: Op, role: Role) -> None:
        match role.kind:
            case "barrier":
                for atom, result, state in zip(op.operands, op.results, role.results, strict=True):
                    self._define(result, state, self._known(atom, state))
            case "form":
                self._form(op, role)
            case "map":
                self._like(op, role, self._common(op, role))
            case "scan" | "while" | "cond":
                self._control(op, role)
            case _:
                pass  # whole: outside; copy: on values that are not sliced

    def _common(self, op: Op, role: Role) -> int | None:
        """E of all that an op reads in micro-batches; None if nobody knows it yet."""
        if op.has_effects:
            raise Ordered
        common = None
        for atom, state in zip(op.operands, role.operands, strict=True):
            known = self._known(atom, state)
            if common is None:
                common = known
            elif known is not None and known != common:
                raise Ordered
        return common

    def _like(self, op: Op, role: Role, examples: int | None) -> None:
        """All that an op reads and gives in micro-batches has so many examples."""
        for atom, state in zip(op.operands, role.operands, strict=True):
            if state.kind == "sliced":
                self.want(atom, state.dim, examples)
        for value, state in zip(op.results, role.results, strict=True):
            self._define(value, state, examples)

    def _form(self, op: Op, role: Role) -> None:
        if role.segmented:
            self._segmented(op, role)
            return
        examples = self._common(op, role)
        if examples is not None:
            case = op.key, role.operands, examples
            if case not in self._divided:
                self._divided[case] = self._divides(*case)
            if not self._divided[case]:
                raise Ordered
        self._like(op, role, examples)

    def _segmented(self, op: Op, role: Role) -> None:
        """Segments that have as many rows an example: every m-th example of each is that of the whole dim."""
        values = self.analysis.values
        cut = [(a, s) for a, s in zip(op.operands, role.operands, strict=True) if s.kind == "sliced"]
        dims = [(a, s, values[a].shape[s.dim]) for a, s in cut if isinstance(a, int)]
        known = [(size, self._known(a, s)) for a, s, size in dims]
        rows = {size // examples for size, examples in known if examples is not None}
        if not rows:
            return  # in a loop, before it is known
        if len(rows) != 1:
            raise Ordered
        (each,) = rows
        for atom, state, size in dims:
            if any(n % (each * self.parts) for n in segments_of(state, size)):
                raise Ordered
            self.want(atom, state.dim, size // each)
        (_, first, whole), *_ = dims
        in_segment = segments_of(first, whole)[0] // each  # examples
        for value, state in zip(op.results, role.results, strict=True):
            size = values[value].shape[state.dim]
            if op.name == "reshape":
                each = segments_of(state, size)[0] // in_segment
            self._define(value, state, size // each)

    def _divides(self, key: Any, states: Sequence[State], examples: int) -> bool:
        """Whether the factors along which operations of a key are cut consist of so many examples."""
        rule = self.analysis.rules.get(key)
        for dims, state in zip(rule.operands if rule is not None else (), states, strict=False):
            if state.kind == "sliced" and dims[state.dim]:
                factor = rule.factors[dims[state.dim][0]] if rule is not None else None
                if factor is not None and (factor.kind not in ("parallel", "sum") or factor.size % examples):
                    return False
        return True

    def _control(self, op: Op, role: Role) -> None:
        """Bodies, again until what loops carry is known."""
        if op.has_effects:
            raise Ordered
        before = -1
        while before != len(self.examples):
            before = len(self.examples)
            for body, entering, leaving in self._bodies(op, role):
                for atom, value, more in entering:
                    state = self.analysis.state[value]
                    if state.kind == "sliced":
                        self._define(value, state, self._known(atom, self.analysis.of(atom)))
                        self.want(atom, state.dim + more, self.examples.get(value))
                self._block(body)
                for atom, wanted, values in leaving:
                    for value in values if wanted.kind == "sliced" else ():
                        self._define(value, self.analysis.state[value], self._known(atom, self.analysis.of(atom)))
                        self.want(atom, wanted.dim, self.examples.get(value))

    def _bodies(self, op: Op, role: Role) -> Iterator[_Body]:
        """The bodies of a control-flow operation."""
        if op.name == "scan":
            view = ScanView(op)
            more = [0] * (view.num_consts + view.num_carry) + [1] * len(view.inputs.xs)
            same = [*([c.input, c.end] for c in view.carries), *([result] for _, result in view.ys)]
            entering = list(zip(op.operands, view.body.inputs, more, strict=True))
            yield view.body, entering, list(zip(view.body.outputs, role.inner, same, strict=True))
        elif op.name == "while":
            *own, start = WhileView(op).taken(op.operands)
            carried = [body.inputs[len(consts) :] for body, consts in zip(op.bodies, own, strict=True)]
            same = list(map(list, zip(*carried, op.results, strict=True)))
            for number, (body, consts) in enumerate(zip(op.bodies, own, strict=True)):
                entering = [(a, v, 0) for a, v in zip((*consts, *start), body.inputs, strict=True)]
                yield body, entering, list(zip(body.outputs, role.inner, same, strict=True)) if number else []
        else:
            same = [[result] for result in op.results]
            for body in op.bodies:
                entering = [(a, v, 0) for a, v in zip(op.operands[1:], body.inputs, strict=True)]
                yield body, entering, list(zip(body.outputs, role.inner, same, strict=True))


_Body = tuple[Block, Sequence[tuple[Atom, int, int]], Sequence[tuple[Atom, State, Sequence[int]]]]
"""A body; of each input what it is outside, itself, and how many dims it has less; of each output itself, the state
that it is wanted in, and what else it is: the input of the next turn, the result."""


def _merged(x: Any, dim: int, count: int) -> Any:
    """An array with so many dims made one."""
    return lax.reshape(x, (*x.shape[:dim], math.prod(x.shape[dim : dim + count]), *x.shape[dim + count :]))
