"""Folding of repeated layers: a step with a few copies of a repeated layer, which stands for the step with all of them.

Planning takes time in proportion to the operations of a step, and most of them are copies: of each layer of a model,
in the forward pass, in the backward pass and in the update. `fold` leaves out most of the copies in the middle. Passes
then work on the rest, and count what one copy stands for (`Copies`).

Copies are found from the keys of operations: a *stretch* of the program is a sequence that repeats itself a number of
times, its *pieces*. Piece j of one stretch belongs to the same layer as piece i of another if it reads the results of
that, or the same argument; so pieces, their results and the arguments that they alone read get the number of a layer.
Where pieces begin does not matter: a reference from one piece to another is the difference of their layers, the stretch
and the place in it. Layers are copies of each other if their pieces are equal operation by operation, and operand by
operand refer to the same: to another place at the same difference of layers, to a value outside of the layers, or to
the same literal. They may be left out if nothing else reads their values, and new state is made of them alike.

    layers     0 | 1 2 3 4 | 5 6 ... 91 | 92 93 94 95 | 96    of 97 layers, 1 to 95 are copies of each other:
    kept       *   * * * *                *  *  *  *    *     5 to 91 are left out, and 92 reads what 4 makes

Layer 4 stands for those that are left out. `MARGIN` layers around it have the same neighbours as each of those.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from alpa_lite.ir.graph import Block, Lit, Op, Traced
from alpa_lite.passes.ir.repeats import OUTSIDE, SHORTEST, Layers

MARGIN = 4
"""Copies of a layer that are kept on each side of those that are left out."""

_LEAST = 2 * MARGIN + 2  # equal layers of a step that is folded: two of them are left out


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies that a folded step leaves out.

    Attributes:
      whole_step: the step with all of them.
      count: how many are left out.
      arguments, outputs: for each of the whole step the number of that which stands for it in the folded step.
      values: value -> those that it stands for in addition to itself, layer by layer.
      around: value that stands for others -> that of the layer before, and that of the layer after those left out.
      kept_places: for each operation of the folded step its place in the whole one.
      layers: op index -> stretch, place in the piece, and layer of the folded step, of those around the gap.
      starts: for each stretch [layers] where its piece begins in the whole step.
      first: the layer of the folded step that those left out follow.
    """

    whole_step: Traced
    count: int
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    values: Mapping[int, tuple[int, ...]]
    around: Mapping[int, tuple[int, int]]
    kept_places: np.ndarray
    layers: Mapping[int, tuple[int, int, int]]
    starts: tuple[np.ndarray, ...]
    first: int

    def count_values(self, value: int) -> int:
        """Returns how many values of the whole step a value stands for."""
        return 1 + len(self.values.get(value, ()))

    def count_ops(self, op: Op) -> int:
        """Returns how many operations of the whole step an operation stands for."""
        return 1 + self.count if op.index in self.layers and self.layers[op.index][2] == self.first else 1

    def all_of(self, op: Op) -> tuple[Op, ...]:
        """Returns the operations of the whole step that an operation stands for."""
        return self.with_copies(op) if self.count_ops(op) > 1 else (op,)

    def with_copies(self, op: Op) -> tuple[Op, ...]:
        """Returns an operation of a layer, and those that correspond to it in the layers left out."""
        places = self.places(op.index)
        return op, *(self.whole_step.graph.block.ops[n] for n in (() if places is None else places.tolist()))

    def users(self, value: int, op: Op | None) -> list[tuple[tuple[float, int], Op | None]]:
        """The readers of a value and of each that it stands for (None: an output), with their order in the step."""
        values = (value, *self.values.get(value, ()))
        if op is None:
            return [((math.inf, self._outputs[one]), None) for one in values]
        ops = self.with_copies(op) if len(values) > 1 and op.index in self.layers else (op,) * len(values)
        return [((one.index, 0), one) for one in ops]

    def places(self, op: int) -> np.ndarray | None:
        """Places in the whole step of the operations that correspond in the layers left out to one of the folded step.

        None for an operation that belongs to no layer.
        """
        if op not in self.layers:
            return None
        stretch, place, layer = self.layers[op]
        return self.starts[stretch][layer + 1 : layer + 1 + self.count] + place

    def order(self, value: int) -> int:
        """Returns a number by which the values of the whole step are in the order in which they are made."""
        return self._orders.get(value, -1)

    @cached_property
    def _outputs(self) -> dict[Any, int]:
        outputs = self.whole_step.graph.block.outputs
        return {atom: n for n, atom in reversed([*enumerate(outputs)]) if not isinstance(atom, Lit)}

    @cached_property
    def _orders(self) -> dict[int, int]:
        block = self.whole_step.graph.block
        made = (value for op in block.ops for value in op.results)
        return {value: n for n, value in enumerate((*block.inputs, *made))}


def folded_step(traced: Traced) -> Traced:
    """Returns the folded step that stands for a step; the step itself if it has none."""
    short = traced.folded_step
    return short if short is not None and short.copies.whole_step.graph is traced.graph else traced


def whole_step(traced: Traced) -> Traced:
    """Returns the whole step that a folded step stands for; any other step itself."""
    return traced if traced.copies is None else traced.copies.whole_step


def copies_of(traced: Traced, op: Op) -> tuple[Op, ...]:
    """Returns the operations of the whole step that an operation of a step stands for."""
    return (op,) if traced.copies is None else traced.copies.all_of(op)


def all_copies(traced: Traced, ops: Sequence[Op]) -> Sequence[Op]:
    """Returns the operations of the whole step that some operations of a step stand for, in order."""
    if traced.copies is None:
        return ops
    return sorted([one for op in ops for one in traced.copies.all_of(op)], key=lambda op: op.index)


def count_uses(traced: Traced, value: int | None, op: Op | None) -> int:
    """Returns how many uses of values in the whole step one stands for, or how many operations if no value is used."""
    if traced.copies is None:
        return 1
    if value is not None:
        return traced.copies.count_values(value)
    return 1 if op is None else traced.copies.count_ops(op)


def users_of(traced: Traced, value: int, op: Op | None) -> list[tuple[tuple[float, int], Op | None]]:
    """As `Copies.users`."""
    return [((0, 0), op)] if traced.copies is None else traced.copies.users(value, op)


def fold(traced: Traced) -> Traced | None:
    """Returns a step with a few copies of its repeated layers; None where none repeat, or they are read elsewhere."""
    ops = traced.graph.block.ops
    if len(ops) < _LEAST * SHORTEST or traced.stacked is not None or traced.placements:
        return None
    return _Fold(traced).fold()


def add_folded(traced: Traced) -> Traced:
    """Returns a step with the folded step to plan instead, where its layers repeat."""
    return replace(traced, folded_step=fold(traced))


class _Fold:
    """Finds the layers of one block, and leaves out those in the middle."""

    def __init__(self, traced: Traced) -> None:
        self.traced, self.block = traced, traced.graph.block
        layers = Layers(self.block, traced.graph.values, _LEAST)
        self.stretches, self.layer, self.code = layers.stretches, layers.layer, layers.code
        self.at: defaultdict[int, dict[int, int]] = defaultdict(dict)  # code -> layer of a copy -> value

    # -- which layers are copies ----------------------------------------------------------------------------------

    def fold(self) -> Traced | None:
        """Returns the step without most of the layers that are copies of each other; None where that may not be."""
        alike = self.find_copies() if self.stretches else None
        if alike is None:
            return None
        first, last, reach = alike  # layers first to last - 1 are copies
        self.copied = range(first, last)
        self.low, self.high = first + MARGIN, last - MARGIN
        if self.high - self.low < 2 or reach >= MARGIN:
            return None
        self.gone = self.high - self.low
        self.rows = [{int(n): row for row, n in enumerate(one.layer) if n != OUTSIDE} for one in self.stretches]
        self.dropped = (self.layer >= self.low) & (self.layer < self.high)
        renamed = self.rewire_operands(first, last)
        return None if renamed is None else self.build(renamed)

    def find_copies(self) -> tuple[int, int, int] | None:
        """Returns the longest run of layers that are copies, and how many layers away they refer at most."""
        shared = set.intersection(*({int(n) for n in one.layer} - {OUTSIDE} for one in self.stretches))
        if len(shared) < _LEAST:
            return None
        middle = sorted(shared)[len(shared) // 2]
        equal, reach = dict.fromkeys(shared, True), 0
        for one in self.stretches:
            away = self.layer[one.reads] - one.layer[:, None]
            away[self.layer[one.reads] == OUTSIDE] = 0
            codes, rows = self.code[one.reads], {int(n): row for row, n in enumerate(one.layer)}
            own = rows[middle]
            same = (codes == codes[own]).all(1) & (away == away[own]).all(1)
            for n in shared:
                equal[n] &= bool(same[rows[n]])
            reach = max(reach, int(abs(away[own]).max(initial=0)))
        first = last = middle
        while equal.get(first - 1):
            first -= 1
        while equal.get(last):
            last += 1
        return (first, last, reach) if last - first >= _LEAST else None

    def rewire_operands(self, first: int, last: int) -> dict[int, tuple[Any, ...]] | None:
        """Place of an operation -> its operands, for those that read over the gap; None if any other reads into it."""
        ops, inside = self.block.ops, np.zeros(len(self.block.ops), dtype=bool)
        out: dict[int, tuple[Any, ...]] = {}
        for value in np.flatnonzero((self.layer >= first) & (self.layer < last)).tolist():
            self.at[int(self.code[value])][int(self.layer[value])] = value
        for one in self.stretches:
            layers = one.layer[:, None]
            is_copy = (one.layer >= first) & (one.layer < last)
            for row in np.flatnonzero(is_copy).tolist():
                inside[one.start + row * one.period : one.start + (row + 1) * one.period] = True
            theirs = self.layer[one.reads]
            over = ((layers >= self.high) & (theirs < self.high) | (layers < self.low) & (theirs >= self.low)) & (
                theirs != OUTSIDE
            )
            over &= is_copy[:, None]
            for row in np.flatnonzero(over.any(1)).tolist():
                for n in range(one.start + row * one.period, one.start + (row + 1) * one.period):
                    out[n] = tuple([self.rewire(a, int(one.layer[row])) for a in ops[n].operands])
        gone = self.dropped
        if any(gone[a] for n in np.flatnonzero(~inside).tolist() for a in ops[n].reads):
            return None
        return out

    def rewire(self, atom: Any, layer: int) -> Any:
        """Returns the value of the folded step for one that an operation of a kept layer reads; None if none is."""
        if isinstance(atom, Lit) or self.layer[atom] == OUTSIDE:
            return atom
        own = int(self.layer[atom])
        if (own >= self.high) == (layer >= self.high) and not self.dropped[atom]:
            return atom
        return self.at[int(self.code[atom])].get(own - self.gone if layer >= self.high else own + self.gone)

    # -- the folded step ------------------------------------------------------------------------------------------

    def build(self, renamed: Mapping[int, tuple[Any, ...]]) -> Traced | None:
        """Returns the folded step."""
        traced, block = self.traced, self.block
        stays = np.ones(len(block.ops), dtype=bool)
        for one, rows in zip(self.stretches, self.rows, strict=True):
            for layer in range(self.low, self.high):
                start = one.start + rows[layer] * one.period
                stays[start : start + one.period] = False
        kept = np.flatnonzero(stays)
        ops = [block.ops[n] for n in kept.tolist()]
        numbers = {n: i for i, n in enumerate(kept.tolist())}
        for n, operands in renamed.items():
            if n in numbers:
                ops[numbers[n]] = replace(ops[numbers[n]], operands=operands)
        leaves = self.fold_leaves()
        if leaves is None:
            return None
        inputs, outputs, arguments, results = leaves
        count = len(traced.arguments)
        constants = [traced.graph.constants[n - count] for n in inputs if n >= count]
        graph = replace(
            traced.graph,
            block=Block(tuple([block.inputs[n] for n in inputs]), tuple(ops), tuple(outputs.values())),
            constants=tuple(constants),
        )
        number = {n: i for i, n in enumerate(outputs)}
        return replace(
            traced,
            graph=graph,
            arguments=tuple([traced.arguments[n] for n in inputs if n < count]),
            outputs=tuple([traced.outputs[n] for n in outputs]),
            state=tuple([(number[out], arguments[argument]) for out, argument in traced.state if out in number]),
            returned_arguments=(),
            copies=self.copies(kept, tuple(arguments[:count]), tuple(results)),
        )

    def fold_leaves(self) -> tuple[list[int], dict[int, Any], list[int], list[int]] | None:
        """The inputs and outputs that are kept, and for each of all its new number or that of its stand-in.

        None where outputs are not made alike.
        """
        block, state = self.block, dict(self.traced.state)
        layer, code = self.layer.tolist(), self.code.tolist()
        first = self.low - 1
        of_state = {argument: out for out, argument in state.items()}

        def made_of(number: int) -> tuple[int, int, str] | None:
            """Returns the new state that an input of a layer gets, and its role."""
            value, out = block.inputs[number], of_state.get(number)
            role = self.traced.arguments[number].role if number < len(self.traced.arguments) else "constant"
            if out is None:
                return -1, 0, role
            atom = block.outputs[out]
            if isinstance(atom, Lit) or layer[atom] == OUTSIDE:
                return None
            return code[atom], layer[atom] - layer[value], role

        standing = {code[v]: n for n, v in enumerate(block.inputs) if layer[v] == first}
        inputs, arguments, waiting = [], [0] * len(block.inputs), []
        for n, value in enumerate(block.inputs):
            if self.dropped[value]:
                other = standing.get(code[value])
                if other is None or made_of(n) is None or made_of(n) != made_of(other):
                    return None
                waiting.append((n, other))
            else:
                arguments[n] = len(inputs)
                inputs.append(n)
        outputs, results, late = dict[int, Any](), [0] * len(block.outputs), []
        for n, atom in enumerate(block.outputs):
            argument = state.get(n, -1)
            value = block.inputs[argument] if argument >= 0 else -1
            if self.dropped[value]:
                late.append((n, of_state[standing[code[value]]]))
                continue
            is_copy = self.copied.start <= layer[value] < self.copied.stop
            own = self.rewire(atom, layer[value]) if is_copy else atom
            if own is None or (isinstance(own, int) and self.dropped[own]):
                return None
            if own != atom and made_of(argument) != made_of(standing[code[value]]):
                return None
            results[n] = len(outputs)
            outputs[n] = own
        for n, other in waiting:
            arguments[n] = arguments[other]
        for n, other in late:
            results[n] = results[other]
        return inputs, outputs, arguments, results

    def copies(self, kept: np.ndarray, arguments: tuple[int, ...], outputs: tuple[int, ...]) -> Copies:
        """Returns which copies are left out."""
        block, first = self.block, self.low - 1
        values: dict[int, tuple[int, ...]] = {}
        around: dict[int, tuple[int, int]] = {}
        layers: dict[int, tuple[int, int, int]] = {}
        starts = []

        def stand(by_layer: Mapping[int, int]) -> None:
            values[by_layer[first]] = tuple([by_layer[n] for n in range(self.low, self.high)])
            around[by_layer[first]] = by_layer[first - 1], by_layer[self.high]

        for number, (one, rows) in enumerate(zip(self.stretches, self.rows, strict=True)):
            at = {layer: one.start + row * one.period for layer, row in rows.items()}
            starts.append(np.array([at.get(layer, -1) for layer in range(self.high + MARGIN)]))
            for column in one.makes.T.tolist():
                stand({layer: column[row] for layer, row in rows.items()})
            for layer in (*range(self.low - MARGIN, self.low), *range(self.high, self.high + MARGIN)):
                new = layer if layer < self.low else layer - self.gone
                for place in range(one.period):
                    layers[block.ops[at[layer] + place].index] = number, place, new
        inputs: defaultdict[int, dict[int, int]] = defaultdict(dict)
        for value in block.inputs:
            if self.layer[value] != OUTSIDE:
                inputs[int(self.code[value])][int(self.layer[value])] = value
        for by_layer in inputs.values():
            if first in by_layer:
                stand(by_layer)
        return Copies(self.traced, self.gone, arguments, outputs, values, around, kept, layers, tuple(starts), first)
