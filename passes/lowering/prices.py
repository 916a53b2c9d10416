"""The costs of the instructions of a decided step: the one price list of the solver, of plans and of simulations.

The integer program prices groups of operations and the passages of values between them. Instructions belong to these:

    an operation      its share of the seconds of its group, with the strategy that was chosen. Operations share a group
                      in proportion to what each would take by itself, max(FLOPs / peak, bytes / bandwidth) + starts,
                      where bytes and starts are those of the compiled program (`costs.fusion`);
    a collective      alpha * share + bytes * beta, where share is the part of the latency that the program charged:
                      collectives that the compiler combines start together.

An operation is bound by the larger of the two terms of its group: the operations of a fused chain are bound by its
bytes together, whatever each computes.

So the seconds of all instructions of a step add up to the objective of its integer program, but for what a pipeline
does a second time (`stages.segments` makes cheap values again rather than keep them).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes.costs.flops import flops_of, working_dtype
from alpa_lite.passes.ir.folding import count_uses
from alpa_lite.passes.lowering.program import (
    Compute,
    Instruction,
    IssuedCollective,
    LocalProgram,
    Loop,
    collectives,
    source_line_of,
)
from alpa_lite.passes.sharding.costs import attention_efficiency, combinable_kinds
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.plan.records import Collective


@dataclass(frozen=True)
class Price:
    """The cost of an operation per device and step, all trips of its loops together.

    Attributes:
      flops, bytes: seconds that its FLOPs take at the rate that they reach, and that its bytes take.
      starts: seconds that its kernels take to start.
      runs: how often it runs.
    """

    flops: float = 0.0
    bytes: float = 0.0
    starts: float = 0.0
    runs: int = 0

    @property
    def seconds(self) -> float:
        """The roofline and the starts of kernels."""
        return max(self.flops, self.bytes) + self.starts


FREE = Price()


@dataclass(frozen=True, eq=False)
class Prices:
    """Seconds of the instructions of one step on one mesh.

    Attributes:
      traced, program: the step.
      cost: of the mesh.
      operations: op index -> what it costs.
      arguments: seconds per step of reading arguments, which belongs to no operation.
      shares: as in `sharding.space.Space`.
    """

    traced: Traced
    program: LocalProgram
    cost: MeshCost
    operations: Mapping[int, Price]
    arguments: float
    shares: Mapping[tuple[int, int], float]

    def compute(self, items: Iterable[Instruction]) -> float:
        """Returns seconds per step of the operations among some instructions, those in loops included."""
        total = 0.0
        for item in items:
            match item:
                case Compute(op=op):
                    total += self.operations.get(op.index, FREE).seconds
                case Loop(bodies=bodies):
                    total += sum(self.compute(body.instructions) for body in bodies)
        return total

    def links(self, items: Iterable[Instruction]) -> Iterator[tuple[IssuedCollective, float, float]]:
        """Yields each collective of one run of some instructions, its seconds of latency, and those on the links.

        They are those of all its executions together. One that the compiler combines with others pays its share of one
        latency.
        """
        for communicated in collectives(self.program, self.traced, items):
            found, move, _ = communicated
            alpha, beta = self.cost.coefficients(found.kind, found.axes, found.bytes)
            joins = found.kind in combinable_kinds(self.cost)
            share = self.shares.get(move, 1.0) if move is not None and joins else 1.0
            yield communicated, alpha * share * found.count, beta * found.bytes * found.count

    def collectives(self, items: Iterable[Instruction]) -> list[tuple[Collective, float]]:
        """Returns the collectives of one run of some instructions, and the seconds of all executions of each."""
        return [(found, latency + moving) for (found, *_), latency, moving in self.links(items)]

    def listed_collectives(self, items: Iterable[Instruction]) -> list[tuple[Collective, float]]:
        """Returns the same of the whole step that a folded one stands for, each where it is there, in that order."""
        copies = self.traced.copies
        if copies is None:
            return self.collectives(items)
        out: list[tuple[tuple[float, int], Collective, float]] = []
        for (found, move, op), latency, moving in self.links(items):
            issued = [((one.index, 0), one) for one in copies.all_of(op)] if op is not None else []
            for order, one in issued if move is None else copies.users(move[0], op):
                out.append((order, replace(found, where=source_line_of(one)), latency + moving))
        return [(found, seconds) for _, found, seconds in sorted(out, key=lambda one: one[0])]

    def steady_seconds(self, items: Iterable[Instruction], values: Container[int]) -> float:
        """Of `collectives`, seconds that do not depend on the size of most values: latency, and where some values move.

        Args:
          values: these, by number.
        """
        total = 0.0
        for (_, move, _), latency, moving in self.links(items):
            total += latency + (moving if move is not None and move[0] in values else 0.0)
        return total


def prices(
    traced: Traced,
    grouping: Grouping,
    rules: Mapping[Any, Rule],
    cost: MeshCost,
    found: MeshSolution,
    program: LocalProgram,
) -> Prices:
    """Returns the price list of a step with the strategies that were found for it."""
    values = traced.graph.values
    alone = {}  # seconds of each operation by itself on one device, to share out its group's
    for number, op in grouping.ops.items():
        work_flops = 0.0 if op.bodies else flops_of(op, rules[op.key], values)
        share = attention_efficiency(op, values, cost.cluster)
        moved = found.space.traffic[number]
        seconds = cost.compute(work_flops, moved.bytes, working_dtype(op, values), share)
        alone[number] = seconds + moved.starts * cost.cluster.kernel_start
    nodes, choice = found.space.nodes, found.solution.choice
    operations: dict[int, Price] = {}
    arguments = 0.0
    for group, node in zip(grouping.groups, found.space.node_of, strict=True):
        flops, size, starts = (float(term) for term in nodes[node].terms[:, choice[node]])
        if not group.ops:
            arguments += group.copies * (max(flops, size) + starts)
            continue
        counts = [count_uses(traced, None, grouping.ops[number]) for number in group.ops]
        is_all = group.kind == "fixed"  # the seconds are those of all copies of its operations
        whole = sum(alone[number] * (n if is_all else 1) for number, n in zip(group.ops, counts, strict=True))
        every = sum(counts) if is_all else len(group.ops)
        for number, count in zip(group.ops, counts, strict=True):
            share = count * (alone[number] / whole if whole else 1 / every)
            operations[number] = Price(flops * share, size * share, starts * share, group.trips * count)
    return Prices(traced, program, cost, operations, arguments, found.space.shares)
