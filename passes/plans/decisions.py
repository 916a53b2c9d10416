"""The decisions on each operation and argument of a stage, under readable names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from alpa_lite import _jax
from alpa_lite.ir import kernels
from alpa_lite.ir.graph import Lit, Op, Traced
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.space import Node, Space
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.plan.decisions import Decision, Fixed


def decisions_of(planned: PlannedStage, like: Sequence[Decision] | None) -> tuple[Decision, ...]:
    """The decisions of a stage, without alternatives.

    Args:
      like: those of an identical stage with the same solution, which differ in names alone; None if there is none.
    """
    traced, grouping, found = planned.graph.traced, planned.grouping, planned.found
    paths = {g: a.path for g, a in zip(grouping.leaves, traced.arguments, strict=False) if g}
    nodes, out = [node for node in found.space.nodes if len(node.strategies) > 1], []
    for node, decision in zip(nodes, _unnamed(grouping, found) if like is None else like, strict=True):
        name, where, own = _named(traced, grouping, node, paths)
        out.append(replace(decision, key=grouping.groups[node.group].color, name=name, where=where, paths=own))
    return tuple(out)


def _unnamed(grouping: Grouping, found: MeshSolution) -> list[Decision]:
    """The decisions of a solution without names."""
    out = []
    for number, moved in transfer_seconds(found):
        node, chosen = found.space.nodes[number], found.solution.choice[number]
        group, strategy = grouping.groups[node.group], node.strategies[chosen]
        seconds = float((node.compute + node.communication)[chosen] * len(node.members) + moved[chosen])
        sizes = tuple(f.size for f in group.factors)
        count = len(node.members)
        out.append(Decision("", "", "", count, sizes, strategy.axes, seconds, paths=(), partial=strategy.partial))
    return out


def touching(space: Space) -> list[list[int]]:
    """For each node, the numbers of the transfers that it produces or consumes."""
    out: list[list[int]] = [[] for _ in space.nodes]
    for number, transfer in enumerate(space.program.transfers):
        for node in {transfer.src, *(n for n, _ in transfer.consumers)}:
            out[node].append(number)
    return out


def transfer_seconds(found: MeshSolution) -> list[tuple[int, np.ndarray]]:
    """Of each node that had a choice, its number and the seconds of its transfers under each of its strategies.

    The strategies of its neighbours are those that were chosen. Decisions are in the order of these nodes.
    """
    near = touching(found.space)
    chosen = [number for number, node in enumerate(found.space.nodes) if len(node.strategies) > 1]
    return [(number, _transfer_seconds(found, number, near[number])) for number in chosen]


def fixed_of(grouping: Grouping, found: MeshSolution, arguments: int) -> tuple[Fixed, ...]:
    """Returns the strategies of operations without a choice, and of equal keys that the method distinguishes.

    Args:
      arguments: their number; their layouts are recorded with them.
    """
    if found.mesh.size == 1:
        return ()
    place = {group: i for members in grouping.classes.values() for i, group in enumerate(members)}
    nodes, leaves = found.space.nodes, set(grouping.leaves[:arguments])
    keys = Counter(grouping.groups[node.group].color for node in nodes)
    out = []
    for node, chosen in zip(nodes, found.solution.choice, strict=True):
        group = grouping.groups[node.group]
        several = keys[group.color] > 1
        if group.kind == "fixed" or (len(node.strategies) > 1 and not several) or not leaves.isdisjoint(node.members):
            continue
        strategy = node.strategies[chosen]
        members = tuple(place[member] for member in node.members) if several else ()
        out.append(Fixed(group.color, members, strategy.axes, strategy.partial))
    return tuple(out)


def _named(
    traced: Traced, grouping: Grouping, node: Node, paths: Mapping[int, str]
) -> tuple[str, str, tuple[str, ...]]:
    """Returns the name of a decision, its source location, and the paths of the arguments that it decides."""
    group = grouping.groups[node.group]
    own = tuple(paths[m] for m in node.members if m in paths)
    first = grouping.ops[group.ops[0]] if group.ops and group.index not in paths else None
    name = (
        own[0] if own else _op_name(traced, first) if first else f"{group.name} {_shape(f.size for f in group.factors)}"
    )
    return name, _jax.where(first.source) if first else "argument" if own else "loop or branch value", own


def _shape(sizes: Iterable[int]) -> str:
    return f"[{','.join(map(str, sizes))}]"


def _op_name(traced: Traced, op: Op) -> str:
    values = traced.graph.values
    ins = [_shape(values[a].shape) for a in op.operands if not isinstance(a, Lit)]
    outs = [_shape(values[v].shape) for v in op.results]
    return f"{kernels.label(op.primitive, op.params)} {' x '.join(ins)} -> {', '.join(outs)}"


def _transfer_seconds(found: MeshSolution, number: int, touching: Sequence[int]) -> np.ndarray:
    """For each strategy of a node, the seconds of its transfers, the neighbours' strategies given."""
    node, choice = found.space.nodes[number], found.solution.choice
    total = np.zeros(len(node.strategies))
    for t in touching:
        transfer = found.space.program.transfers[t]
        produced = transfer.src_class if transfer.src == number else transfer.src_class[choice[transfer.src]]
        wanted = np.zeros((len(total), transfer.cost.shape[1]), bool)
        for n, klass in transfer.consumers:
            wanted[np.arange(len(total)), klass if n == number else klass[choice[n]]] = True
        paid = np.broadcast_to(transfer.cost[produced], wanted.shape)
        total += np.where(wanted, paid, 0.0).sum(axis=1)
    return total
