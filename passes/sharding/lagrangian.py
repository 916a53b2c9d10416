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

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.errors import InfeasibleError
from alpa_lite.ir.strategy import Solution
from alpa_lite.passes.sharding import strategies
from alpa_lite.passes.sharding.limits import AdmittedMeshes
from alpa_lite.passes.sharding.mesh_program import MeshSolution
from alpa_lite.passes.sharding.solver.problem import price_memory
from alpa_lite.passes.sharding.solver.solve import SolverState
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.plan.decisions import Candidate

MAX_SLOWDOWN = 1.3
"""Mesh shapes that are slower by more than this factor with memory for nothing are not tried at a price."""

ROUGH_GAP = 5e-2
"""The gap at which a choice with memory for nothing is good enough to tell the unit of prices, and slow mesh shapes."""


@dataclass(frozen=True, eq=False)
class MeshAtPrices:
    """The integer program of a mesh shape, the state of its solver, and its rough solution."""

    space: Space
    state: SolverState
    rough_solution: Solution

    def figures(self, choice: Sequence[int]) -> tuple[float, float]:
        """Returns seconds and bytes per device of a choice, without the price of memory."""
        return self.state.problem.seconds(choice), self.state.problem.peak(choice)


@dataclass(frozen=True, eq=False)
class LagrangianSearch:
    """The integer programs of some mesh shapes, each solved roughly with memory for nothing.

    Attributes:
      unit: seconds per byte, of price 1: those of the fastest rough solution, unless others are given.
      max_work: of each solve, in the unit of `solver.work`.
      gap: at which a choice counts as optimal: of its seconds, so that at a price it is a part of that.
    """

    programs: tuple[MeshAtPrices, ...]
    unit: float
    max_work: int
    gap: float

    def reset(self) -> LagrangianSearch:
        """The same programs, of which nothing is known but rough solutions: what is found depends on a price alone."""
        again = _solve_roughly([program.space for program in self.programs], self.max_work, self.gap)
        return replace(again, unit=self.unit)

    @property
    def fastest_figures(self) -> tuple[float, float]:
        """Seconds and bytes per device of the fastest rough solution: of all meshes, their ratio is the unit."""
        best = min(self.programs, key=lambda program: program.rough_solution.objective)
        return best.rough_solution.objective, max(best.figures(best.rough_solution.choice)[1], 1.0)

    def restrict_to_shape(self, shape: tuple[int, ...]) -> LagrangianSearch:
        """Returns the same with the meshes of one shape alone, if there are any."""
        kept = tuple(program for program in self.programs if program.space.mesh.shape == shape)
        return replace(self, programs=kept or self.programs)

    def solve_at(self, price: float) -> MeshSolution:
        """Returns the best choice at a price of memory; its seconds and bytes are without it.

        Mesh shapes that are much slower with memory for nothing are not tried at a price.
        """
        fastest = min(program.rough_solution.objective for program in self.programs)
        solutions: dict[MeshAtPrices, Solution] = {}
        for one in self.programs:
            rough = one.rough_solution
            if not price and (rough.gap <= self.gap or rough.bound >= fastest):
                solutions[one] = rough
            elif rough.objective <= MAX_SLOWDOWN * fastest:
                solutions[one] = _solve_at(one.state, price * self.unit, self.max_work, self.gap / max(1.0, price))
        best = min(solutions, key=lambda one: solutions[one].objective)
        least, peak = best.figures(solutions[best].choice)
        candidates, bounds = [], []
        for one in self.programs:
            solution = solutions.get(one, one.rough_solution)
            seconds, size = one.figures(solution.choice)
            status = "chosen" if one is best else "more memory" if seconds < least else "slower"
            candidates.append(Candidate("Sharded", one.space.mesh.shape, seconds, int(size), status))
            bounds.append((one.rough_solution if price else solution).bound)
        status = "feasible" if price else solutions[best].status
        solution = replace(solutions[best], status=status, objective=least, bound=min(bounds), peak=peak)
        return MeshSolution(best.space, solution, tuple(candidates))


def search_at_prices(
    step: GroupedStep, cluster: Cluster, admitted: AdmittedMeshes, *, max_work: int, gap: float
) -> LagrangianSearch:
    """Returns the programs of some mesh shapes.

    Args:
      admitted: the meshes of the cluster's devices, and what is allowed on each.
      max_work: of each solve, in the unit of `solver.work`.
      gap: (objective - bound) / objective at which a choice counts as optimal.

    Raises:
      InfeasibleError: a program has no choice, or none was found.
    """
    spaces = [strategies.build(step, MeshCost(cluster, mesh), constraints=limit) for mesh, limit in admitted]
    return _solve_roughly(spaces, max_work, gap)


def _solve_roughly(spaces: Sequence[Space], max_work: int, gap: float) -> LagrangianSearch:
    """Returns programs with their rough solutions."""
    states = [(space, SolverState(space.program)) for space in spaces]
    programs = [MeshAtPrices(*pair, _solve_at(pair[1], 0.0, max_work, max(gap, ROUGH_GAP))) for pair in states]
    offered = LagrangianSearch(tuple(programs), 1.0, max_work, gap)
    seconds, size = offered.fastest_figures
    return replace(offered, unit=seconds / size)


def _solve_at(state: SolverState, price: float, max_work: int, gap: float) -> Solution:
    """Returns the best choice at a price in seconds per byte; its objective includes the price of memory."""
    points = len(state.problem.base)
    priced = price_memory(state.problem, np.full(points, price / max(points, 1)))
    found = state.solve(priced, gap=gap, max_work=max_work)
    if found.status == "infeasible":
        raise InfeasibleError(
            "no sharding was found: no strategies of the operations are compatible; remove constraints, or use "
            "another method"
        )
    return found
