"""What the instructions of a decided step cost: the one price list of the solver, of plans and of simulations.

The integer program prices groups of operations and the passages of values between them. Instructions belong to these:

    an operation      its share of the seconds of its group, with the strategy that was chosen. Operations share a group
                      in proportion to what each would take by itself, max(FLOPs / peak, bytes / bandwidth), where bytes
                      are those that the compiled program reads and writes for it (`ir.fusion`);
    a collective      alpha * share + bytes * beta, where share is what the program charged of the latency: collectives
                      that the compiler combines start together.

So the seconds of all instructions of a step add up to the objective of its integer program, but for what a pipeline
does a second time (`stages.segments` makes cheap values again rather than keep them).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.cost import MeshCost
from alpa_lite.graph import Traced
from alpa_lite.passes.ir import fusion
from alpa_lite.passes.ir.primitives import work, working_dtype
from alpa_lite.passes.lowering.program import Body, Compute, Instruction, LocalProgram, Loop, collectives
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.prices import combinable
from alpa_lite.passes.sharding.search import Found
from alpa_lite.records import Collective
from alpa_lite.strategy import Rule


@dataclass(frozen=True, eq=False)
class Prices:
    """Seconds of the instructions of one step on one mesh.

    Attributes:
      traced, program: the step.
      cost: of the mesh.
      operations: op index -> seconds per step, all trips of its loops together.
      arguments: seconds per step of reading arguments, which belongs to no operation.
      shares: as in `sharding.space.Space`.
    """

    traced: Traced
    program: LocalProgram
    cost: MeshCost
    operations: Mapping[int, float]
    arguments: float
    shares: Mapping[tuple[int, int], float]

    def compute(self, items: Iterable[Instruction]) -> float:
        """Seconds per step of the operations among some instructions, those in loops included."""
        total = 0.0
        for item in items:
            match item:
                case Compute(op=op):
                    total += self.operations.get(op.index, 0.0)
                case Loop(bodies=bodies):
                    total += sum(self.compute(body.instructions) for body in bodies)
        return total

    def collectives(self, items: Iterable[Instruction]) -> list[tuple[Collective, float]]:
        """The collectives of one run of some instructions, and the seconds of all executions of each."""
        program = replace(self.program, body=Body((), tuple(items), ()))
        return [(found, self.collective(found, move)) for found, move in collectives(program, self.traced)]

    def collective(self, collective: Collective, move: tuple[int, int] | None) -> float:
        """Seconds of a collective; one that the compiler combines with others pays its share of one latency.

        Args:
          move: (value, phase) of the resharding that it belongs to; None where an operation issues it.
        """
        alpha, beta = self.cost.coefficients(collective.kind, collective.axes)
        share = 1.0
        if move is not None and collective.kind in combinable(self.cost):
            share = self.shares.get(move, 1.0)
        return (alpha * share + beta * collective.bytes) * collective.count


def prices(
    traced: Traced, grouping: Grouping, rules: Mapping[Any, Rule], cost: MeshCost, found: Found, program: LocalProgram
) -> Prices:
    """The price list of a step with the strategies that were found for it."""
    alone = _alone(traced, grouping, rules, cost)
    nodes, choice = found.space.nodes, found.solution.choice
    operations: dict[int, float] = {}
    arguments = 0.0
    for group, node in zip(grouping.groups, found.space.node_of, strict=True):
        seconds = float(nodes[node].compute[choice[node]])
        if not group.ops:
            arguments += seconds
            continue
        whole = sum(alone[number] for number in group.ops)
        for number in group.ops:
            share = alone[number] / whole if whole else 1 / len(group.ops)
            operations[number] = operations.get(number, 0.0) + seconds * share
    return Prices(traced, program, cost, operations, arguments, found.space.shares)


def _alone(
    traced: Traced, grouping: Grouping, rules: Mapping[Any, Rule], cost: MeshCost
) -> dict[int, float]:  # fmt: skip
    """Seconds of each operation by itself on one device, to share out its group's."""
    values = traced.graph.values
    moved = fusion.moved(traced.graph.block, values)
    out = {}
    for number, op in grouping.ops.items():
        flops = 0.0 if op.bodies else work(op, rules[op.key], values)
        out[number] = cost.compute(flops, moved[number].bytes, working_dtype(op, values))
    return out
