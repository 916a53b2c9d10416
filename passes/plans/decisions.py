"""The decisions on each operation and argument of a stage, under readable names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from alpa_lite import _jax, kernels
from alpa_lite.graph import Lit, Op, Traced
from alpa_lite.passes.sharding.groups import Group, Grouping
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.space import Node
from alpa_lite.passes.stages.planning import PlannedStage
from alpa_lite.records import Decision, Fixed


def decisions_of(planned: PlannedStage, like: Sequence[Decision] | None) -> tuple[Decision, ...]:
    """The decisions of a stage, without alternatives.

    Args:
      like: those of an identical stage with the same solution, which differ in names alone; None if there is none.
    """
    traced, grouping, found = planned.graph.traced, planned.grouping, planned.found
    paths = _paths(traced, grouping)
    if like is not None:
        return _renamed(traced, grouping, found, like, paths)
    out = []
    for number, moved in transfer_seconds(found):
        node, chosen = found.space.nodes[number], found.solution.choice[number]
        group = grouping.groups[node.group]
        name, where, own = _named(traced, grouping, node, paths)
        out.append(
            Decision(
                key=group.color,
                name=name,
                where=where,
                count=len(node.members),
                factors=tuple(f.size for f in group.factors),
                strategy=node.strategies[chosen].axes,
                seconds=float((node.compute + node.communication)[chosen] * len(node.members) + moved[chosen]),
                paths=own,
                partial=node.strategies[chosen].partial,
            )
        )
    return tuple(out)


def transfer_seconds(found: MeshSolution) -> list[tuple[int, np.ndarray]]:
    """Of each node that had a choice, its number and the seconds of its transfers under each of its strategies.

    The strategies of its neighbours are those that were chosen. Decisions are in the order of these nodes.
    """
    touching: dict[int, list[int]] = {}
    for number, transfer in enumerate(found.space.program.transfers):
        for node in {transfer.src, *(n for n, _ in transfer.consumers)}:
            touching.setdefault(node, []).append(number)
    chosen = [number for number, node in enumerate(found.space.nodes) if len(node.strategies) > 1]
    return [(number, _transfer_seconds(found, number, touching.get(number, ()))) for number in chosen]


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


def _renamed(
    traced: Traced, grouping: Grouping, found: MeshSolution, like: Sequence[Decision], paths: Mapping[int, str]
) -> tuple[Decision, ...]:
    """The decisions of an identical step under the names of this one."""
    nodes = [node for node in found.space.nodes if len(node.strategies) > 1]
    out = []
    for node, decision in zip(nodes, like, strict=True):
        name, where, own = _named(traced, grouping, node, paths)
        key = grouping.groups[node.group].color
        out.append(replace(decision, key=key, name=name, where=where, paths=own))
    return tuple(out)


def _named(
    traced: Traced, grouping: Grouping, node: Node, paths: Mapping[int, str]
) -> tuple[str, str, tuple[str, ...]]:
    """Returns the name of a decision, its source location, and the paths of the arguments that it decides."""
    group = grouping.groups[node.group]
    own = tuple(paths[m] for m in node.members if m in paths)
    first = grouping.ops[group.ops[0]] if group.ops and group.index not in paths else None
    name = own[0] if own else _op_name(traced, first) if first else f"{group.name} {_shape(group)}"
    return name, _jax.where(first.source) if first else "argument" if own else "loop or branch value", own


def _paths(traced: Traced, grouping: Grouping) -> dict[int, str]:
    return {g: a.path for g, a in zip(grouping.leaves, traced.arguments, strict=False) if g}


def _shape(group: Group) -> str:
    return "[" + ",".join(str(f.size) for f in group.factors) + "]"


def _op_name(traced: Traced, op: Op) -> str:
    values = traced.graph.values
    ins = [f"[{','.join(map(str, values[a].shape))}]" for a in op.operands if not isinstance(a, Lit)]
    outs = [f"[{','.join(map(str, values[v].shape))}]" for v in op.results]
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
