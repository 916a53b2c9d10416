"""Which values may be communicated while a device computes: gradients that only the update reads, and parameters.

Where that hides (`passes.lowering.overlap`), the seconds T of a step are no sum over choices. With compute C, hideable
communication H and other communication W,

    T  >=  max(C + W, H + W)  >=  C + W + theta (H - C)    for every theta between 0 and 1,

so a good plan minimises C + W + theta H for some theta: 1 where links are busier than devices, small where they are
not. Each program is therefore solved at full prices and with the hideable communication at `SHARE` of its price, and
plans are compared by T itself, that of two streams.
"""

from __future__ import annotations

from dataclasses import replace

from alpa_lite import _jax
from alpa_lite.ir.graph import Block, Lit, Op, Traced
from alpa_lite.ir.strategy import StrategyGraph
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.sharding import kinds
from alpa_lite.passes.sharding.space import Space

SHARE = 0.1
"""The share of its price at which hideable communication enters the program that counts on hiding it."""

_FORMS = primitives.LINEAR_CHAIN | primitives.ADDITIONS | {"concatenate", "stack", "pad", "dynamic_update_slice"}


class Hiding:
    """The values of a step that may be communicated while a device computes.

    Args:
      hides: the kinds of collectives that the compiler runs concurrently with computing.
    """

    def __init__(self, traced: Traced, hides: frozenset[str]) -> None:
        self._sums, self._gathers = not hides.isdisjoint(("all_reduce", "reduce_scatter")), "all_gather" in hides
        self._weights = kinds.parameter_of(traced).keys()
        self._reverse: set[int] = set()  # values that a reverse pass makes
        self._marked: set[int] = set()  # operations of derivatives
        self._readers: dict[int, list[Op]] = {}
        self._handed: dict[int, list[int]] = {}  # output of a body -> what it is handed on as; -1: to what is unknown
        self._waiting: dict[int, bool] = {}
        self._enter(traced.graph.block, False, False)

    def is_weight(self, value: int) -> bool:
        """Whether a value is a parameter, or one in another form, and gathers may hide."""
        return self._gathers and value in self._weights

    def is_gradient(self, value: int) -> bool:
        """Whether a reverse pass made a value that only the update reads, and sums may hide."""
        return self._sums and value in self._reverse and self._waits(value)

    def cheaper(self, space: Space) -> StrategyGraph:
        """Returns the program of a mesh with hideable transfers at `SHARE` of their price."""
        transfers = (
            replace(transfer, cost=SHARE * transfer.cost)
            if self.is_weight(move.value) or self.is_gradient(move.value)
            else transfer
            for move, transfer in zip(space.moves, space.program.transfers, strict=True)
        )
        return replace(space.program, transfers=tuple(transfers))

    def _enter(self, block: Block, reverse: bool, marked: bool) -> None:
        """Notes the operations of a block; those of a body belong to the pass that its loop belongs to."""
        for op in block.ops:
            backward = reverse or _jax.is_reverse(op.source)
            inside = marked or _jax.derivative(op.source) is not None
            self._reverse.update(op.results if backward else ())
            self._marked.update([op.index] if inside else ())
            for atom in op.operands:
                if not isinstance(atom, Lit):
                    self._readers.setdefault(atom, []).append(op)
            pairs = [(atom, -1) for body in op.bodies for atom in body.outputs]
            if op.name == "scan":
                view = ScanView(op)
                pairs = [*view.ys, *((one.output, later) for one in view.carries for later in (one.end, one.input))]
            for atom, handed in pairs:
                if not isinstance(atom, Lit):
                    self._handed.setdefault(atom, []).append(handed)
            for body in op.bodies:
                self._enter(body, backward, inside)

    def _waits(self, value: int) -> bool:
        """Whether no operation of a derivative computes with a value, or with another form or a sum of it."""
        if value not in self._waiting:
            self._waiting[value] = False  # what a loop adds to is complete behind it
            self._waiting[value] = all(
                op.index not in self._marked or (op.name in _FORMS and all(map(self._waits, op.results)))
                for op in self._readers.get(value, ())
                if op.name != "scan"
            ) and all(handed >= 0 and self._waits(handed) for handed in self._taken(value))
        return self._waiting[value]

    def _taken(self, value: int) -> list[int]:
        """Returns the numbers of a value where a body hands it on, or a loop takes it; -1 where they are unknown."""
        inner = [
            inside
            for op in self._readers.get(value, ())
            if op.name == "scan"
            for atom, inside in zip(op.operands, op.bodies[0].inputs, strict=True)
            if atom == value
        ]
        return [*self._handed.get(value, ()), *inner]
