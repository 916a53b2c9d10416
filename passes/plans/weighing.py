"""The alternatives of a plan's decisions, each with its whole step, which are weighed when somebody asks for them.

Weighing (`alternatives`) takes a tenth of what planning takes, more where there are many kinds of operations, and
nothing that is decided depends on it. From the seconds of a step by cause follows when another step would win:

    seconds = compute + latency + bandwidth            communication = latency + bandwidth
    seconds = growing + fixed                          growing: the part proportional to the batch

Latency is the communication that remains with unlimited links. To first order, the parts that grow with the batch are
the operations with a dim that the batch's leading dim flows into, and the bytes of the values that have such a dim; the
dims are found by following values from the batch arguments through the groups that use them (`find_connected_factors`).

A step differs from the chosen one in a few nodes, so only those and the transfers around them are summed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import reshard_steps
from alpa_lite.passes.ir.remembered import memoise_method
from alpa_lite.passes.plans import alternatives
from alpa_lite.passes.plans.alternatives import ForcedStrategy
from alpa_lite.passes.plans.decisions import transfer_seconds, transfers_of_nodes
from alpa_lite.passes.programs.staged import Staged
from alpa_lite.passes.sharding.connected import find_connected_factors, leading_part
from alpa_lite.passes.sharding.groups import Dims
from alpa_lite.passes.sharding.solver.problem import Problem, problem_from_graph
from alpa_lite.passes.sharding.space import Node, Strategy, block_count, layout_of, produced_layout
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.plan.decisions import Alternative, Outcome
from alpa_lite.plan.records import Stage

KEPT_ALTERNATIVES = {"leaf": 4, "heavy": 4}
"""How many alternatives of each kind of decision a plan keeps beyond the chosen one: those with the least bounds."""
_KEPT_OF_OTHERS = 2  # elementwise operations follow their neighbours


def add_alternatives(staged: Staged, budget: float) -> Callable[[Sequence[Stage]], tuple[Stage, ...]]:
    """Returns a function that adds alternatives within `budget` bytes per device to the stages of a planned step."""
    decided = [
        DecidedStage(one.graph, one.rules, one.grouping, one.mesh_solution, one.cluster) for one in staged.stages
    ]

    def add_alternatives(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        known: dict[int, list[tuple[Alternative, ...]]] = {}  # stages that share a solution share what else there was
        out = []
        for own, stage in zip(decided, stages, strict=True):
            key = id(own.mesh_solution.solution)
            if key not in known:
                known[key] = _weighed(own, budget)
            pairs = zip(stage.decisions, known[key], strict=True)
            out.append(replace(stage, decisions=tuple(replace(one, alternatives=others) for one, others in pairs)))
        return tuple(out)

    return add_alternatives


def _weighed(stage: DecidedStage, budget: float) -> list[tuple[Alternative, ...]]:
    """Returns the alternatives of each decision of a stage."""
    nodes, found = stage.mesh_solution.space.nodes, stage.mesh_solution
    problem = problem_from_graph(replace(found.space.program, budget=budget))
    kept = [KEPT_ALTERNATIVES.get(stage.grouping.groups[node.group].kind, _KEPT_OF_OTHERS) for node in nodes]
    weighed = alternatives.weigh(problem, found.solution.choice, kept)
    outcomes, layouts = Outcomes(stage, problem), _Layouts(stage)
    return [
        _alternatives(nodes[number], weighed[number], moved, outcomes, layouts)
        for number, moved in transfer_seconds(found)
    ]


def _alternatives(
    node: Node, weighed: Sequence[ForcedStrategy], moved: np.ndarray, outcomes: Outcomes, layouts: _Layouts
) -> tuple[Alternative, ...]:
    """The strategies of a node with their steps: those that fit first, then by the seconds of the whole step."""
    out = []
    for one in weighed:
        strategy, chosen = node.strategies[one.strategy], one.strategy
        step = fastest = outcomes.outcome_of(one.fastest_choice)
        if one.fitting_choice is not None and one.fitting_choice is not one.fastest_choice:
            step = outcomes.outcome_of(one.fitting_choice)
        layout, size = layouts.describe(node, strategy)
        flops, moving, compute, communication = (
            float(seconds[chosen] * node.count) for seconds in (*node.terms[:2], node.compute, node.communication)
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
                fits=one.fitting_choice is not None,
                roomy=fastest if fastest.seconds < step.seconds else None,
                partial=strategy.partial,
            )
        )
    return tuple(sorted(out, key=lambda a: (not a.fits, a.step.seconds)))


class _Layouts:
    """Layouts and bytes of a group's tensors under its strategies."""

    def __init__(self, stage: DecidedStage) -> None:
        self._grouping, self._mesh = stage.grouping, stage.mesh_solution.mesh
        self._values = stage.graph.traced.graph.values
        self._result = {home.group: value for value, home in [*self._grouping.homes.items()][::-1]}  # the first
        self._operands: dict[int, dict[int, Dims]] = {}
        for demand in self._grouping.demands:
            if demand.op >= 0 and self._grouping.groups[demand.group].kind == "heavy":
                self._operands.setdefault(demand.group, {}).setdefault(demand.operand, demand.dims)

    def describe(self, node: Node, strategy: Strategy) -> tuple[str, int]:
        """Returns the layouts as text, those of a heavy operation's operands too, and bytes per device of a result."""
        group = self._grouping.groups[node.group]
        value = self._result.get(node.group)
        if value is None:
            return "", 0
        placed = produced_layout(group, self._grouping.homes[value].dims, strategy, self._mesh)
        size = int(self._values[value].nbytes / block_count(placed, self._mesh))
        operands = [layout_of(dims, strategy) for _, dims in sorted(self._operands.get(node.group, {}).items())]
        return f"{' x '.join(map(str, operands))} -> {placed}" if operands else str(placed), size


class Outcomes:
    """The outcomes of choices of a stage that differ little from the chosen one.

    Each strategy of a node and each resharding of a value has *parts*, whose sums are those of the step: seconds of
    computing, of communication, of latency, seconds that grow with the batch, and bytes sent.
    """

    def __init__(self, stage: DecidedStage, problem: Problem) -> None:
        self._stage, self._space, self._problem = stage, stage.mesh_solution.space, problem
        self._choice = np.array(stage.mesh_solution.solution.choice)
        self._cost = MeshCost(stage.cluster, stage.mesh_solution.mesh)
        traced, homes = stage.graph.traced, stage.grouping.homes
        inputs = zip(traced.arguments, traced.graph.block.inputs, strict=False)
        batch = [homes[v] for a, v in inputs if a.role == "batch" and traced.graph.values[v].shape]
        places = [(home.group, f) for home in batch if home.group for f in home.dims[0][:1]]
        growing = find_connected_factors(stage.grouping, places, leading_part)
        self._growing = {(self._space.node_of[g], f) for g, f in growing}
        self._touching = transfers_of_nodes(self._space)
        self._nodes = [self._parts_of_node(i) for i in range(len(self._space.nodes))]
        self._before = [self._parts_of_transfer(t, self._choice) for t in range(len(self._space.moves))]
        self._total = _sum([*(parts[:, s] for parts, s in zip(self._nodes, self._choice, strict=True)), *self._before])

    def outcome_of(self, choice: np.ndarray) -> Outcome:
        """Returns the outcome of another choice."""
        changed = np.flatnonzero(choice != self._choice).tolist()
        edges = {t for i in changed for t in self._touching[i]}
        new, old = (
            _sum([*(self._nodes[i][:, of[i]] for i in changed), *parts])
            for of, parts in (
                (choice, [self._parts_of_transfer(t, choice) for t in edges]),
                (self._choice, [self._before[t] for t in edges]),
            )
        )
        compute, communication, latency, batch, sent = np.maximum(self._total + new - old, 0.0).tolist()
        return Outcome(
            compute_seconds=compute,
            communication_seconds=communication,
            latency_seconds=min(latency, communication),
            batch_seconds=min(batch, compute + communication),
            bytes_sent=round(sent),
            bytes_per_device=round(self._problem.peak(choice)),
            changed=len(changed),
        )

    def _parts_of_node(self, i: int) -> np.ndarray:
        """[5, strategies] the parts of a node."""
        node = self._space.nodes[i]
        count = node.count
        compute, communication, starts = node.compute * count, node.communication * count, node.terms[2] * count
        latency, sent = node.collectives[1:] * (node.trips * count)
        grows = any((i, f) in self._growing for f in range(len(node.strategies[0].axes)))
        return np.stack([compute, communication, latency, (compute - starts + communication - latency) * grows, sent])

    def _parts_of_transfer(self, t: int, choice: np.ndarray) -> np.ndarray:
        """Returns the parts of moving a value to all that use it."""
        transfer = self._space.program.transfers[t]
        p = int(transfer.src_class[choice[transfer.src]])
        return _sum([self._pair(t, p, q) for q in {int(klass[choice[node]]) for node, klass in transfer.consumers}])

    @memoise_method
    def _pair(self, t: int, p: int, q: int) -> np.ndarray:
        """Returns the parts of resharding a value from its produced layout p to the wanted layout q."""
        move, seconds = self._space.moves[t], float(self._space.program.transfers[t].cost[p, q])
        times, mesh = move.count * move.trips, self._cost.mesh
        size = self._stage.graph.traced.graph.values[move.value].nbytes
        sent = bandwidth = 0.0
        for step in reshard_steps(move.produced_layouts[p], move.wanted_layouts[q]) or ():
            if step.kind != "slice":
                layout = step.source if step.kind == "reduce_scatter" else step.target
                payload = size / mesh.product(tuple(a for axes in layout.dims for a in axes))
                sent += payload * times
                bandwidth += self._cost.coefficients(step.kind, step.axes, payload)[1] * payload * times
        home = self._stage.grouping.homes[move.value]
        grows = any((self._space.node_of[home.group], f) in self._growing for dim in home.dims for f in dim)
        return np.array([0.0, seconds, seconds - bandwidth, bandwidth * grows, sent])


def _sum(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([sum(column) for column in zip([0.0] * 5, *(one.tolist() for one in parts), strict=True)])
