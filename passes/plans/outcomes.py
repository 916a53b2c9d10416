"""Seconds by cause and bytes of a whole plan, from which follows when another plan would win.

    seconds = compute + latency + bandwidth            communication = latency + bandwidth
    seconds = growing + fixed                          growing: the part proportional to the batch

Latency is the communication that remains with unlimited links. To first order, the parts that grow with the batch are
the operations with a dim that the batch's leading dim flows into, and the bytes of the values that have such a dim; the
dims are found by following values from the batch arguments through the groups that use them (`connected`).

A plan differs from the chosen one in a few nodes, so only those and the transfers around them are summed again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from alpa_lite.cluster.cost import MeshCost
from alpa_lite.ir.layout import reshard_steps
from alpa_lite.passes.plans.decisions import touching
from alpa_lite.passes.sharding.connected import connected, leading_part
from alpa_lite.passes.sharding.solver.problem import Problem
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.plan.decisions import Outcome

Parts = tuple[float, float, float, float, float]
"""Compute seconds, communication seconds, latency seconds, seconds that grow with the batch, bytes sent."""


class Outcomes:
    """The outcomes of choices of a stage that differ little from the chosen one."""

    def __init__(self, stage: DecidedStage, problem: Problem) -> None:
        self._stage, self._space, self._problem = stage, stage.found.space, problem
        self._choice, self._cost = np.array(stage.found.solution.choice), MeshCost(stage.cluster, stage.found.mesh)
        traced, homes = stage.graph.traced, stage.grouping.homes
        inputs = zip(traced.arguments, traced.graph.block.inputs, strict=False)
        batch = [homes[v] for a, v in inputs if a.role == "batch" and traced.graph.values[v].shape]
        places = [(home.group, f) for home in batch if home.group for f in home.dims[0][:1]]
        growing = connected(stage.grouping, places, leading_part)
        self._growing = {(self._space.node_of[g], f) for g, f in growing}
        self._node, self._pair = functools.cache(self._node_parts), functools.cache(self._pair_parts)
        self._touching = touching(self._space)
        self._before = [self._transfer(t, self._choice) for t in range(len(self._space.moves))]
        self._total = _sum([*(self._node(i, s) for i, s in enumerate(self._choice.tolist())), *self._before])

    def of(self, choice: np.ndarray) -> Outcome:
        """The outcome of another choice."""
        changed = np.flatnonzero(choice != self._choice).tolist()
        edges = {t for i in changed for t in self._touching[i]}
        new = [*(self._node(i, int(choice[i])) for i in changed), *(self._transfer(t, choice) for t in edges)]
        old = [*(self._node(i, int(self._choice[i])) for i in changed), *(self._before[t] for t in edges)]
        difference = zip(self._total, _sum(new), _sum(old), strict=True)
        compute, communication, latency, batch, sent = (max(a + b - c, 0.0) for a, b, c in difference)
        return Outcome(
            compute_seconds=compute,
            communication_seconds=communication,
            latency_seconds=min(latency, communication),
            batch_seconds=min(batch, compute + communication),
            bytes_sent=round(sent),
            bytes_per_device=round(self._problem.peak(choice)),
            changed=len(changed),
        )

    def _node_parts(self, i: int, s: int) -> Parts:
        """The parts of one node under a strategy."""
        node = self._space.nodes[i]
        count = len(node.members)
        compute, communication = float(node.compute[s]) * count, float(node.communication[s]) * count
        latency, sent = (float(one) * (node.trips * count) for one in node.collectives[1:, s])
        grows = any((i, f) in self._growing for f in range(len(node.strategies[s].axes)))
        starts = float(node.terms[2, s]) * count
        return compute, communication, latency, compute - starts + communication - latency if grows else 0.0, sent

    def _transfer(self, t: int, choice: np.ndarray) -> Parts:
        """The parts of one transfer."""
        transfer = self._space.program.transfers[t]
        p = int(transfer.src_class[choice[transfer.src]])
        return _sum([self._pair(t, p, q) for q in {int(klass[choice[node]]) for node, klass in transfer.consumers}])

    def _pair_parts(self, t: int, p: int, q: int) -> Parts:
        """The parts of resharding a value from its produced layout p to the wanted layout q."""
        move, seconds = self._space.moves[t], float(self._space.program.transfers[t].cost[p, q])
        times, mesh = move.count * move.trips, self._cost.mesh
        size = self._stage.graph.traced.graph.values[move.value].nbytes
        sent = bandwidth = 0.0
        for step in reshard_steps(move.produced[p], move.wanted[q]) or ():
            if step.kind != "slice":
                layout = step.before if step.kind == "reduce_scatter" else step.after
                payload = size / mesh.product(tuple(a for axes in layout.dims for a in axes))
                sent += payload * times
                bandwidth += self._cost.coefficients(step.kind, step.axes, payload)[1] * payload * times
        home = self._stage.grouping.homes[move.value]
        node = self._space.node_of[home.group]
        grows = any((node, f) in self._growing for dim in home.dims for f in dim)
        return 0.0, seconds, seconds - bandwidth, bandwidth if grows else 0.0, sent


def _sum(parts: Sequence[Parts]) -> Parts:
    compute, communication, latency, batch, sent = map(sum, zip((0.0,) * 5, *parts, strict=True))
    return compute, communication, latency, batch, sent
