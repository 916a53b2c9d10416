"""Searches mesh shapes at a price of memory, for programs that share a budget: layers, and stages of a pipeline.

The bytes that a stage may fill depend on how many micro-batches are in flight, on the values that its neighbours send,
and on other work that runs meanwhile; no separate budget expresses that. So in place of a budget memory has a price
(Lagrange), and the program is

    minimise  seconds + price * bytes, averaged over the program's points.

Averaging, in place of charging the fullest point, charges long-lived values most: parameters, gradients, saved
activations. A price is given as a multiple of a unit, at which all bytes of the fastest choice are worth all of
its seconds: at price p, a choice that takes a share s less memory may take a share p s more time.

Prices leave the integer program without a hard constraint, and that is solved by message passing in a fraction of the
time (`sharding.solver.search`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.errors import InfeasibleError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.strategy import Solution
from alpa_lite.passes.sharding import strategies
from alpa_lite.passes.sharding.limits import Admitted
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.solver.problem import price_memory
from alpa_lite.passes.sharding.solver.search import Search
from alpa_lite.passes.sharding.solver.solve import SolverState
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.plan.records import Candidate

MAX_SLOWDOWN = 1.3
"""Mesh shapes that are slower by more than this factor with memory for nothing are not tried at a price."""

ROUGH_GAP = 5e-2
"""The gap at which a choice with memory for nothing is good enough to tell the unit of prices, and slow mesh shapes."""


@dataclass(frozen=True, eq=False)
class LagrangianSearch:
    """The integer programs of some mesh shapes, each solved roughly with memory for nothing.

    Attributes:
      known: each program, with what its solves found out for the next. rough: these solutions.
      unit: seconds per byte, of price 1: those of the fastest rough solution, unless others are given.
      max_work: of each solve, in the unit of `solver.work`.
      gap: at which a choice counts as optimal: of its seconds, so that at a price it is a part of that.
    """

    spaces: tuple[Space, ...]
    known: tuple[SolverState, ...]
    rough: tuple[Solution, ...]
    unit: float
    max_work: int
    gap: float

    @property
    def meshes(self) -> tuple[LogicalMesh, ...]:
        """Those of the programs."""
        return tuple(space.mesh for space in self.spaces)

    def reset(self) -> LagrangianSearch:
        """The same programs, of which nothing is known but rough solutions: what is found depends on a price alone."""
        return replace(_solve_roughly(self.spaces, self.max_work, self.gap), unit=self.unit)

    @property
    def fastest(self) -> tuple[float, float]:
        """Seconds and bytes per device of the fastest rough solution: of all meshes, their ratio is the unit."""
        i = min(range(len(self.rough)), key=lambda i: self.rough[i].objective)
        return self.rough[i].objective, max(self.known[i].problem.peak(self.rough[i].choice), 1.0)

    def on(self, shape: tuple[int, ...]) -> LagrangianSearch:
        """The same with the meshes of one shape alone, if there are any."""
        kept = [i for i, mesh in enumerate(self.meshes) if mesh.shape == shape]
        fields = {
            name: tuple(getattr(self, name)[i] for i in kept) for name in ("spaces", "known", "rough")
        }  # fmt: skip
        return replace(self, **fields) if kept else self

    def at(self, price: float) -> MeshSolution:
        """The best choice at a price of memory; its seconds and bytes are without it.

        Mesh shapes that are much slower with memory for nothing are not tried at a price.
        """
        fastest = min(rough.objective for rough in self.rough)
        solutions: dict[int, Solution] = {}
        waiting: dict[int, SolverState] = {}
        for i, rough in enumerate(self.rough):
            if not price and (rough.gap <= self.gap or rough.bound >= fastest):
                solutions[i] = rough
            elif rough.objective <= MAX_SLOWDOWN * fastest:
                waiting[i] = self.known[i]
        solutions |= _solved(waiting, price * self.unit, gap=self.gap / max(1.0, price), max_work=self.max_work)
        free = self.rough if price else [solutions.get(i, rough) for i, rough in enumerate(self.rough)]
        best = min(solutions, key=lambda i: solutions[i].objective)
        problem, space, solution = self.known[best].problem, self.spaces[best], solutions[best]
        candidates = []
        for i, other in enumerate(self.known):
            found = solutions.get(i, self.rough[i])
            seconds, size = other.problem.seconds(found.choice), int(other.problem.peak(found.choice))
            faster = seconds < problem.seconds(solution.choice)
            status = "chosen" if i == best else "more memory" if faster else "slower"
            candidates.append(Candidate("Sharded", self.spaces[i].mesh.shape, seconds, size, status))
        solution = replace(
            solution,
            status="feasible" if price else solution.status,
            objective=problem.seconds(solution.choice),
            bound=min(solution.bound for solution in free),
            peak=problem.peak(solution.choice),
        )
        return MeshSolution(space, solution, tuple(candidates))


def search_at_prices(
    step: GroupedStep, cluster: Cluster, admitted: Admitted, *, max_work: int, gap: float
) -> LagrangianSearch:
    """The programs of some mesh shapes.

    Args:
      admitted: the meshes of the cluster's devices, and what is allowed on each.
      max_work: of each solve, in the unit of `solver.work`.
      gap: (objective - bound) / objective at which a choice counts as optimal.

    Raises:
      InfeasibleError: a program has no choice, or none was found.
    """
    programs = [strategies.build(step, MeshCost(cluster, mesh), constraints=limit) for mesh, limit in admitted]
    return _solve_roughly(tuple(programs), max_work, gap)


def _solve_roughly(spaces: tuple[Space, ...], max_work: int, gap: float) -> LagrangianSearch:
    """Programs with their rough solutions."""
    known = tuple(SolverState(space.program) for space in spaces)
    rough = tuple(_solved(dict(enumerate(known)), 0.0, gap=max(gap, ROUGH_GAP), max_work=max_work).values())
    offered = LagrangianSearch(spaces, known, rough, 1.0, max_work, gap)
    seconds, size = offered.fastest
    return replace(offered, unit=seconds / size)


def _solved(problems: Mapping[int, SolverState], price: float, *, gap: float, max_work: int) -> dict[int, Solution]:
    """Returns the best choices at a price in seconds per byte; objectives include the price of memory."""
    out = {}
    for i, known in problems.items():
        points = len(known.problem.base)
        priced = price_memory(known.problem, np.full(points, price / max(points, 1)))
        found = Search(priced, gap, max_work, messages=known.messages)
        found.starts = list(known.choices)
        found.run()
        known.note(found)
        if found.choice is None:
            raise InfeasibleError("no sharding was found: no strategies of the operations go together")
        out[i] = found.solution("optimal" if found.closed else "feasible")
    return out
