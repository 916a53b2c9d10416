"""Searches mesh shapes at a price of memory, for what shares its budget with others: layers, and stages of a pipeline.

What a stage may fill depends on how many micro-batches are in flight, on what its neighbours send, and on what runs
besides; no budget of its own says that. So in place of a budget memory has a price (Lagrange), and the program is

    minimise  seconds + price * bytes, averaged over the program's points.

Averaging rather than charging the fullest point makes dear what lives long: parameters, gradients, and what waits for
the backward pass. A price is given as a multiple of a unit, at which all bytes of the fastest choice are worth all of
its seconds: at price p, a choice that takes a share s less memory may take a share p s more time.

Prices leave the integer program without a hard constraint, and that is solved by message passing in a fraction of the
time (`sharding_search`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.errors import InfeasibleError
from alpa_lite.graph import Traced
from alpa_lite.layout import LogicalMesh
from alpa_lite.options import Sharded
from alpa_lite.passes import search, strategies
from alpa_lite.passes.grouping import Grouping
from alpa_lite.passes.search import Found
from alpa_lite.passes.sharding_problem import Problem, from_graph, price_memory
from alpa_lite.passes.sharding_search import Search
from alpa_lite.passes.strategies import Shared, Space
from alpa_lite.plan import Candidate
from alpa_lite.strategy import Rule, Solution


@dataclass(frozen=True, eq=False)
class Market:
    """The integer programs of some mesh shapes, each solved with memory for nothing.

    Attributes:
      unit: seconds per byte, of price 1.
      time_limit: seconds for each integer program. gap: at which a choice counts as optimal.
    """

    meshes: tuple[LogicalMesh, ...]
    spaces: tuple[Space, ...]
    problems: tuple[Problem, ...]
    free: tuple[Solution, ...]
    unit: float
    time_limit: float
    gap: float

    def at(self, price: float) -> Found:
        """The best choice on the best mesh at a price of memory; its seconds and bytes are without it."""
        if price:
            scaled = price * self.unit
            solutions = [_solved(problem, scaled, self.time_limit, self.gap) for problem in self.problems]
        else:
            solutions = list(self.free)
        best = min(range(len(solutions)), key=lambda i: solutions[i].objective)
        solution, space = solutions[best], self.spaces[best]
        choice = tuple(space.nodes[n].strategies[solution.choice[n]] for n in space.node_of)
        candidates = []
        for i, (mesh, problem, found) in enumerate(zip(self.meshes, self.problems, solutions, strict=True)):
            status = "chosen" if i == best else "slower"
            candidates.append(
                Candidate("Sharded", mesh.shape, problem.seconds(found.choice), int(problem.peak(found.choice)), status)
            )
        solution = replace(
            solution,
            status=solution.status if not price else "feasible",
            objective=self.problems[best].seconds(solution.choice),
            bound=min(free.bound for free in self.free),
            peak=self.problems[best].peak(solution.choice),
        )
        return Found(self.meshes[best], space, solution, choice, tuple(candidates))


def market(
    traced: Traced,
    grouping: Grouping,
    rules: Mapping[Any, Rule],
    cluster: Cluster,
    method: Sharded,
    *,
    time_limit: float,
    gap: float,
    max_axes: int = 3,
    shared: Shared | None = None,
) -> Market:
    """The programs of the mesh shapes that a method admits.

    Args:
      time_limit: seconds for each integer program.
      gap: (objective - bound) / objective at which a choice counts as optimal.
      max_axes: the most axes of a mesh that is not given.
      shared: what the programs of several meshes have in common, to make it once.

    Raises:
      InfeasibleError: a program has no choice, or none was found in the time.
    """
    meshes = search.meshes(cluster, method, max_axes)
    shared = shared or Shared(traced, grouping)
    spaces = tuple(
        strategies.build(traced, grouping, rules, MeshCost(cluster, mesh), shared=shared) for mesh in meshes
    )  # fmt: skip
    problems = tuple(from_graph(space.program) for space in spaces)
    free = tuple(_solved(problem, 0.0, time_limit, gap) for problem in problems)
    fastest = min(range(len(free)), key=lambda i: free[i].objective)
    unit = free[fastest].objective / max(problems[fastest].peak(free[fastest].choice), 1.0)
    return Market(meshes, spaces, problems, free, unit, time_limit, gap)


def _solved(problem: Problem, price: float, time_limit: float, gap: float) -> Solution:
    """The best choice at a price in seconds per byte; its objective includes what memory costs."""
    started = time.perf_counter()
    points = len(problem.base)
    priced = price_memory(problem, np.full(points, price / max(points, 1)))
    found = Search(priced, np.inf, gap, started + time_limit)
    found.run()
    if found.choice is None:
        raise InfeasibleError(f"no sharding was found in solver_time_limit={time_limit:g} seconds; allow more")
    return found.solution("optimal" if found.closed else "feasible", started)
