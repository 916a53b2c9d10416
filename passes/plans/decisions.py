"""The decisions on each operation and argument of a stage, under readable names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from alpa_lite import _jax
from alpa_lite.ir import registration
from alpa_lite.ir.graph import Lit, Op, Traced
from alpa_lite.passes.ir.folding import whole_step
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.plan.decisions import Decision, FixedStrategy


def decisions_of(stage: DecidedStage) -> tuple[Decision, ...]:
    """The decisions of a stage, without alternatives, in the order of `transfer_seconds` of its solution."""
    traced, grouping, found = stage.graph.traced, stage.grouping, stage.mesh_solution
    paths = _paths(traced, grouping)
    out = []
    for number, seconds in transfer_seconds(found):
        node, chosen = found.space.nodes[number], found.solution.choice[number]
        group, strategy, count = grouping.groups[node.group], node.strategies[chosen], node.count
        own = tuple(path for _, path in sorted(pair for m in node.members for pair in paths.get(m, ())))
        sizes = tuple(f.size for f in group.factors)
        name, where = (own[0], "argument") if own else (f"{group.name} {_shape(sizes)}", "loop or branch value")
        if group.ops and group.index not in paths:
            first = grouping.ops[group.ops[0]]
            name, where = name if own else _op_name(traced, first), _jax.describe_location(first.source)
        total, axes = float((node.compute + node.communication)[chosen] * count + seconds[chosen]), strategy.axes
        out.append(Decision(group.color, name, where, count, sizes, axes, total, (), own, strategy.partial))
    return tuple(out)


def _paths(traced: Traced, grouping: Grouping) -> dict[int, list[tuple[int, str]]]:
    """Group -> number and path of each argument of the whole step that it holds."""
    whole, copies = whole_step(traced), traced.copies
    numbers = copies.arguments if copies is not None else range(len(traced.arguments))
    out: dict[int, list[tuple[int, str]]] = {}
    for number, (argument, own) in enumerate(zip(whole.arguments, numbers, strict=True)):
        if group := grouping.leaves[own]:
            out.setdefault(group, []).append((number, argument.path))
    return out


def transfers_of_nodes(space: Space) -> list[list[int]]:
    """Returns the numbers of the transfers that each node produces or consumes."""
    out: list[list[int]] = [[] for _ in space.nodes]
    for number, transfer in enumerate(space.program.transfers):
        for node in {transfer.src, *(n for n, _ in transfer.consumers)}:
            out[node].append(number)
    return out


def transfer_seconds(found: MeshSolution) -> list[tuple[int, np.ndarray]]:
    """Returns the number of each node that had a choice, and the seconds of its transfers under each strategy.

    The strategies of its neighbours are those that were chosen.
    """
    space, choice, near = found.space, found.solution.choice, transfers_of_nodes(found.space)
    out = []
    for number, node in enumerate(space.nodes):
        if (size := len(node.strategies)) == 1:
            continue
        total = np.zeros(size)
        for transfer in map(space.program.transfers.__getitem__, near[number]):
            produced = transfer.src_class if transfer.src == number else transfer.src_class[choice[transfer.src]]
            wanted = np.zeros((size, transfer.cost.shape[1]), bool)
            for n, klass in transfer.consumers:
                wanted[np.arange(size), klass if n == number else klass[choice[n]]] = True
            paid = np.broadcast_to(transfer.cost[produced], wanted.shape)
            total += np.where(wanted, paid, 0.0).sum(axis=1)
        out.append((number, total))
    return out


def fixed_strategies(grouping: Grouping, found: MeshSolution, arguments: int) -> tuple[FixedStrategy, ...]:
    """Returns the strategies of operations without a choice, and of equal keys that the method distinguishes.

    Args:
      arguments: their number; their layouts are recorded with them.
    """
    if found.mesh.size == 1:
        return ()
    place: dict[int, list[int]] = {}
    for tied in grouping.classes.values():
        for i, group in enumerate(grouping.unfold(tied)):
            place.setdefault(group, []).append(i)
    nodes, leaves = found.space.nodes, set(grouping.leaves[:arguments])
    keys = Counter(grouping.groups[node.group].color for node in nodes)
    out = []
    for node, chosen in zip(nodes, found.solution.choice, strict=True):
        group = grouping.groups[node.group]
        several = keys[group.color] > 1
        if group.kind == "fixed" or (len(node.strategies) > 1 and not several) or not leaves.isdisjoint(node.members):
            continue
        strategy = node.strategies[chosen]
        members = tuple(sorted(i for member in node.members for i in place[member])) if several else ()
        out.append(FixedStrategy(group.color, members, strategy.axes, strategy.partial))
    return tuple(out)


def _shape(sizes: Iterable[int]) -> str:
    return f"[{','.join(map(str, sizes))}]"


def _op_name(traced: Traced, op: Op) -> str:
    values = traced.graph.values
    ins = [_shape(values[a].shape) for a in op.operands if not isinstance(a, Lit)]
    outs = [_shape(values[v].shape) for v in op.results]
    return f"{registration.label(op.primitive, op.params)} {' x '.join(ins)} -> {', '.join(outs)}"
