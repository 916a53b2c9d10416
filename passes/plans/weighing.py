"""The alternatives of a plan's decisions, which are weighed when somebody asks for them.

Weighing takes a tenth of what planning takes, more where there are many kinds of operations (`alternatives`,
`outcomes`), and nothing that is decided depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from alpa_lite.passes.plans import alternatives
from alpa_lite.passes.plans.alternatives import Forced
from alpa_lite.passes.plans.decisions import transfer_seconds
from alpa_lite.passes.plans.outcomes import Outcomes
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding.groups import Dims
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
    decided = [DecidedStage(one.graph, one.rules, one.grouping, one.found, one.cluster) for one in staged.stages]

    def add_alternatives(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        known: dict[int, list[tuple[Alternative, ...]]] = {}  # stages that share a solution share what else there was
        out = []
        for own, stage in zip(decided, stages, strict=True):
            key = id(own.found.solution)
            if key not in known:
                known[key] = _weighed(own, budget)
            pairs = zip(stage.decisions, known[key], strict=True)
            out.append(replace(stage, decisions=tuple(replace(one, alternatives=others) for one, others in pairs)))
        return tuple(out)

    return add_alternatives


def _weighed(stage: DecidedStage, budget: float) -> list[tuple[Alternative, ...]]:
    """The alternatives of each decision of a stage."""
    nodes, found = stage.found.space.nodes, stage.found
    problem = from_graph(replace(found.space.program, budget=budget))
    kept = [KEPT_ALTERNATIVES.get(stage.grouping.groups[node.group].kind, _KEPT_OF_OTHERS) for node in nodes]
    weighed = alternatives.weigh(problem, found.solution.choice, kept)
    outcomes, layouts = Outcomes(stage, problem), _Layouts(stage)
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
        strategy, chosen = node.strategies[one.strategy], one.strategy
        step = fastest = outcomes.of(one.fastest)
        if one.fitting is not None and one.fitting is not one.fastest:
            step = outcomes.of(one.fitting)
        layout, size = layouts.of(node, strategy)
        flops, moving, compute, communication = (
            float(seconds[chosen] * len(node.members))
            for seconds in (*node.terms[:2], node.compute, node.communication)
        )
        out.append(
            Alternative(
                strategy=strategy.axes,
                layout=layout,
                compute_seconds=compute,
                flops_seconds=flops,
                bytes_seconds=moving,
                communication_seconds=communication,
                transfer_seconds=float(moved[chosen]),
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

    def __init__(self, stage: DecidedStage) -> None:
        self._grouping, self._mesh = stage.grouping, stage.found.mesh
        self._values = stage.graph.traced.graph.values
        self._result = {home.group: value for value, home in [*self._grouping.homes.items()][::-1]}  # the first
        self._operands: dict[int, dict[int, Dims]] = {}
        for demand in self._grouping.demands:
            if demand.op >= 0 and self._grouping.groups[demand.group].kind == "heavy":
                self._operands.setdefault(demand.group, {}).setdefault(demand.operand, demand.dims)

    def of(self, node: Node, strategy: Strategy) -> tuple[str, int]:
        """The layouts as text, those of a heavy operation's operands too, and bytes per device of a result."""
        group = self._grouping.groups[node.group]
        value = self._result.get(node.group)
        if value is None:
            return "", 0
        placed = made_layout(group, self._grouping.homes[value].dims, strategy, self._mesh)
        size = int(self._values[value].nbytes / block_count(placed, self._mesh))
        operands = [layout_of(dims, strategy) for _, dims in sorted(self._operands.get(node.group, {}).items())]
        return f"{' x '.join(map(str, operands))} -> {placed}" if operands else str(placed), size
