"""Good choices without an optimiser: coordinate descent on a sharding problem.

One node at a time takes the strategy that is best while its neighbours stay, until nobody moves. It gives upper bounds,
which scale the linear program and let reduced costs forbid most of it. Memory is not looked at: price it first.
"""

from __future__ import annotations

import numpy as np

from alpa_lite.passes.sharding.solver.problem import Edge, Problem
from alpa_lite.passes.sharding.solver.reductions import edges_of


def descend(problem: Problem, choice: np.ndarray | None = None, sweeps: int = 20) -> np.ndarray:
    """A choice that no change of one node improves, from `choice` or from each node's cheapest."""
    choice = np.array([node.cost.argmin() for node in problem.nodes] if choice is None else choice, dtype=int)
    touching = [[problem.edges[e] for e in edges] for edges in edges_of(problem)]
    waiting = dict.fromkeys(range(len(choice)))
    for _ in range(sweeps * len(choice)):
        if not waiting:
            break
        i = next(iter(waiting))
        del waiting[i]
        if len(problem.nodes[i].cost) == 1:
            continue
        cost, forbidden = _replies(problem, touching[i], choice, i)
        now = choice[i]
        best = np.lexsort((cost, forbidden))[0]
        if (forbidden[best], cost[best]) < (forbidden[now], cost[now]):
            choice[i] = best
            waiting.update(dict.fromkeys(n for edge in touching[i] for n in edge.nodes if n != i))
    return choice


def _replies(problem: Problem, edges: list[Edge], choice: np.ndarray, i: int) -> tuple[np.ndarray, np.ndarray]:
    """[S] the seconds that node i and its edges cost under each strategy, and how many forbidden pairs they hold."""
    total = problem.nodes[i].cost.copy()
    forbidden = np.isinf(total).astype(int)
    for edge in edges:
        p = edge.src_class if edge.src == i else np.full(len(total), edge.src_class[choice[edge.src]])
        others = sorted({int(klass[choice[node]]) for node, klass in edge.consumers if node != i})
        paid = edge.cost[p][:, others]
        total = total + paid.sum(1)
        forbidden = forbidden + np.isinf(paid).sum(1)
        own: list[np.ndarray] = []
        for node, klass in edge.consumers:
            if node == i:
                new = ~np.isin(klass, others)
                for before in own:
                    new &= klass != before
                own.append(klass)
                paid = np.where(new, edge.cost[p, klass], 0.0)
                total = total + paid
                forbidden = forbidden + np.isinf(paid)
    return total, forbidden
