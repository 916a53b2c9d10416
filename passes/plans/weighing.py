"""The alternatives of a plan's decisions, which are weighed when somebody asks for them.

Weighing takes a tenth of what planning takes, more where there are many kinds of operations (`alternatives`,
`outcomes`), and nothing that is decided depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.passes.plans import alternatives
from alpa_lite.passes.plans.alternatives import Forced
from alpa_lite.passes.plans.decisions import transfer_seconds
from alpa_lite.passes.plans.outcomes import Outcomes
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding.groups import Dims, Grouping
from alpa_lite.passes.sharding.solver.problem import from_graph
from alpa_lite.passes.sharding.space import Node, Strategy, block_count, layout_of, made_layout
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.plan.decisions import Alternative
from alpa_lite.plan.records import Stage

KEPT_ALTERNATIVES = {"leaf": 4, "heavy": 4}
"""How many alternatives of each kind of decision a plan keeps beyond the chosen one: those with the least bounds."""
_KEPT_OF_OTHERS = 2  # elementwise operations follow their neighbours


def of(staged: Staged, budget: float) -> Callable[[Sequence[Stage]], tuple[Stage, ...]]:
    """Returns a function that adds alternatives within `budget` bytes per device to the stages of a planned step."""
    stages = [DecidedStage(one.graph, one.rules, one.grouping, one.found, one.cluster) for one in staged.stages]
    return partial(_with_alternatives, stages, budget)


def _with_alternatives(
    decided: Sequence[DecidedStage], budget: float, stages: Sequence[Stage]
) -> tuple[Stage, ...]:  # fmt: skip
    """The stages of a plan, each decision with its alternatives."""
    known: dict[int, list[tuple[Alternative, ...]]] = {}  # stages that share a solution share what else there was
    out = []
    for planned, stage in zip(decided, stages, strict=True):
        key = id(planned.found.solution)
        if key not in known:
            known[key] = _weighed(planned, budget)
        pairs = zip(stage.decisions, known[key], strict=True)
        out.append(replace(stage, decisions=tuple(replace(one, alternatives=others) for one, others in pairs)))
    return tuple(out)


def _weighed(planned: DecidedStage, budget: float) -> list[tuple[Alternative, ...]]:
    """The alternatives of each decision of a stage."""
    traced, grouping, found = planned.graph.traced, planned.grouping, planned.found
    nodes, choice = found.space.nodes, found.solution.choice
    problem = from_graph(replace(found.space.program, budget=budget))
    kept = [KEPT_ALTERNATIVES.get(grouping.groups[node.group].kind, _KEPT_OF_OTHERS) for node in nodes]
    weighed = alternatives.weigh(problem, choice, kept)
    cost = MeshCost(planned.cluster, found.mesh)
    outcomes = Outcomes(traced, grouping, cost, found.space, problem, choice)
    layouts = _Layouts(traced, grouping, found.mesh)
    return [
        _alternatives(nodes[number], weighed[number], moved, outcomes, layouts)
        for number, moved in transfer_seconds(found)
    ]


def _alternatives(
    node: Node, weighed: Sequence[Forced], moved: np.ndarray, outcomes: Outcomes, layouts: _Layouts
) -> tuple[Alternative, ...]:
    """The strategies of a node with their steps: those that fit first, then by the seconds of the whole step."""
    out = []
    for one in weighed:
        strategy = node.strategies[one.strategy]
        step = outcomes.of(one.fastest if one.fitting is None else one.fitting)
        fastest = outcomes.of(one.fastest) if one.fitting != one.fastest and one.fitting is not None else step
        layout, size = layouts.of(node, strategy)
        out.append(
            Alternative(
                strategy=strategy.axes,
                layout=layout,
                compute_seconds=float(node.compute[one.strategy] * len(node.members)),
                flops_seconds=float(node.terms[0, one.strategy] * len(node.members)),
                bytes_seconds=float(node.terms[1, one.strategy] * len(node.members)),
                communication_seconds=float(node.communication[one.strategy] * len(node.members)),
                transfer_seconds=float(moved[one.strategy]),
                bytes_per_device=size,
                bound_seconds=one.bound,
                step=step,
                fits=one.fitting is not None,
                roomy=fastest if fastest.seconds < step.seconds else None,
                partial=strategy.partial,
            )
        )
    return tuple(sorted(out, key=lambda a: (not a.fits, a.step.seconds)))


class _Layouts:
    """Layouts and bytes of a group's tensors under its strategies."""

    def __init__(self, traced: Traced, grouping: Grouping, mesh: LogicalMesh) -> None:
        self._traced, self._grouping, self._mesh = traced, grouping, mesh
        self._result: dict[int, int] = {}
        for value, home in grouping.homes.items():
            self._result.setdefault(home.group, value)
        self._operands: dict[int, dict[int, Dims]] = {}
        for demand in grouping.demands:
            if demand.op >= 0 and grouping.groups[demand.group].kind == "heavy":
                self._operands.setdefault(demand.group, {}).setdefault(demand.operand, demand.dims)

    def of(self, node: Node, strategy: Strategy) -> tuple[str, int]:
        """The layouts as text, those of a heavy operation's operands too, and bytes per device of a result."""
        group = self._grouping.groups[node.group]
        value = self._result.get(node.group)
        if value is None:
            return "", 0
        placed = made_layout(group, self._grouping.homes[value].dims, strategy, self._mesh)
        size = int(self._traced.graph.values[value].nbytes / block_count(placed, self._mesh))
        operands = [layout_of(dims, strategy) for _, dims in sorted(self._operands.get(node.group, {}).items())]
        return f"{' x '.join(map(str, operands))} -> {placed}" if operands else str(placed), size
