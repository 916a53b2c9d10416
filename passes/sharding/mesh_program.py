"""The integer program of one mesh: which there are, how each is solved within a budget, and how little memory it takes.

A method admits some logical meshes of a cluster, and each has one integer program. A program is solved first without
the memory budget; if that choice does not fit, within it, and also with state gathered again for late uses
(`sharding.strategies.build`, `regather`), which trades communication for memory. Methods that fix operations have the
same program with fewer strategies, so that on one mesh the unrestricted program is never worse.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alpa_lite import _jax
from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import MeshCost
from alpa_lite.errors import InfeasibleError
from alpa_lite.ir import units
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.paths import format_path
from alpa_lite.ir.strategy import Solution
from alpa_lite.methods import Method
from alpa_lite.passes.ir.primitives import CONSTRAINT, PRODUCTS
from alpa_lite.passes.sharding import costs, limits, strategies
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.solver.memory import PeakSearch
from alpa_lite.passes.sharding.solver.problem import problem_from_graph
from alpa_lite.passes.sharding.solver.work import SOLVE_WORK
from alpa_lite.passes.sharding.space import Space, Strategy
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.plan.decisions import Candidate
from alpa_lite.plan.pins import NO_PINS, NO_WISHES, Pins, Wishes

CLOSED = 1e-4
"""The relative gap of a proof, as of `solve.solve`: plans that differ by no more count as equal."""

PROVEN_PEAK = 2e-2
"""Relative difference to its bound up to which a budget is called the smallest."""

PEAK_GAP = 1e-2
"""Relative gap at which the search for the least memory stops."""

NEAR_FREE = 2e-3
"""Relative difference to the seconds without a budget below which gathering state again is not tried."""


PRICED_STRATEGIES = 3000
"""The most strategies of a program that is solved again."""

PRICED_SHARDINGS = 6
"""The most shardings that are told apart."""


@dataclass(frozen=True, eq=False)
class MeshSolution:
    """A plan of one mesh: its program, and the solution.

    Attributes:
      candidates: the mesh shapes and methods that were compared with it.
    """

    space: Space
    solution: Solution
    candidates: tuple[Candidate, ...] = ()

    @property
    def mesh(self) -> LogicalMesh:
        """That of the program."""
        return self.space.mesh

    @functools.cached_property
    def choice(self) -> tuple[Strategy, ...]:
        """The strategy of every group."""
        nodes, choice = self.space.nodes, self.solution.choice
        return tuple([nodes[n].strategies[choice[n]] for n in self.space.node_of])

    @property
    def compute_seconds(self) -> float:
        """The part of the objective that is not communication."""
        nodes, choice = self.space.nodes, self.solution.choice
        return float(sum(n.compute[c] * n.count for n, c in zip(nodes, choice, strict=True)))


@dataclass(frozen=True, eq=False)
class MeshProgram:
    """The integer program of one mesh, built on demand.

    Attributes:
      regathers: whether the platform's compiler keeps repeated gathers of a value apart.
      build: builds it, with or without `regather`; each once.
      peak_seconds: seconds that no mesh of as many devices has less of, given a built program. divided_seconds: the
        same of any division of the operations among them.
    """

    mesh: LogicalMesh
    regathers: bool
    build: Callable[..., Space]
    peak_seconds: Callable[[Space], float]
    divided_seconds: Callable[[Space], float]


@dataclass(frozen=True, eq=False)
class SolvedProgram:
    """The result of solving a program.

    Attributes:
      space: the program of the solution.
      solution: the best choice within the budget; its status reports if there is none.
      free_bound: a lower bound on the seconds of every choice, regardless of memory.
      work: cells visited.
    """

    space: Space
    solution: Solution
    free_bound: float
    work: int


def mesh_programs(
    step: GroupedStep, cluster: Cluster, method: Any, *, budget: float, pins: Pins = NO_PINS, wishes: Wishes = NO_WISHES
) -> list[MeshProgram]:
    """Returns the programs of every mesh that a method admits, the most promising meshes first.

    On several nodes that is the mesh with one axis along the nodes and one within them, and the mesh of one axis. Then
    come those of fewer axes, the more equal ones first: where a dim does not divide by all devices, two dims may by
    their roots.

    Raises:
      OptionError: the method cannot be applied to these arguments or this number of devices.
    """
    out = []
    for mesh, constraints in limits.admissible_meshes(step, cluster, method, wishes, pins):
        cost = MeshCost(cluster, mesh)
        build = functools.partial(strategies.build, step, cost, budget=budget, constraints=constraints)
        bounds = [functools.partial(bound, step, cost) for bound in (costs.seconds_at_peak, costs.divided_bound)]
        regathers = cluster.platform not in strategies.MERGING
        out.append(MeshProgram(mesh, regathers, functools.cache(build), *bounds))

    def key(program: MeshProgram) -> tuple[bool, int, float]:
        shape = program.mesh.shape
        along = cluster.nodes > 1 and len(shape) == 2 and shape[0] == cluster.nodes
        return not along, len(shape), math.log(max(shape) / min(shape)) if len(shape) > 1 else 0.0

    return sorted(out, key=key)


def solve_within_budget(program: MeshProgram, budget: float, cutoff: float, known: solve.SolverState) -> SolvedProgram:
    """Returns the best choice on one mesh within a budget of bytes per device, in up to three solves.

    Raises nothing: the status says whether there is a choice, and "cutoff" whether none can be below the cutoff.
    """
    space = program.build()
    free = solve.solve(replace(space.program, budget=None), cutoff=cutoff, roof=budget, known=known)
    if free.status == "cutoff" or (free.choice and free.peak <= budget):
        return SolvedProgram(space, free, free.bound, free.work)
    bound = free.bound if free.choice else None
    solution = solve.solve(space.program, cutoff=cutoff, free=bound, known=known)
    work = free.work + solution.work
    if free.choice and program.regathers and solution.objective * (1 - NEAR_FREE) > free.bound:
        again = program.build(regather=True)
        # Serving a value twice costs no less: the bound without the budget holds here, too.
        other = solve.solve(again.program, cutoff=min(cutoff, solution.objective), free=bound, start=solution)
        work += other.work
        if other.choice and other.objective < solution.objective:
            return SolvedProgram(again, other, free.bound, work)
    elif solution.choice and program.regathers and solution.bound > free.bound:
        solution = replace(solution, status="feasible", bound=free.bound)  # gathering again was not tried
    return SolvedProgram(space, solution, free.bound, work)


def solve_meshes(programs: Sequence[MeshProgram], budget: float) -> MeshSolution | None:
    """Returns the best plan of some meshes within a budget, in the order of their bounds; None if none fits."""
    bounded = [(solve.SolverState(program.build().program), program) for program in programs]
    for bound, _ in bounded:
        bound.improve()
    best, cutoff = None, math.inf
    for bound, program in sorted(bounded, key=lambda pair: pair[0].seconds):
        if bound.seconds < cutoff:
            found = solve_within_budget(program, budget, cutoff, bound)
            if found.solution.choice and found.solution.objective < cutoff:
                best, cutoff = MeshSolution(found.space, found.solution), found.solution.objective
    return best


def map_choice_to(plan: MeshSolution, space: Space) -> np.ndarray | None:
    """Returns the choice of a plan in another program of the same groups and mesh; None if that does not have it."""
    out = []
    for node in space.nodes:
        strategy = plan.choice[node.members[0]]
        if strategy not in node.strategies or any(plan.choice[member] != strategy for member in node.members):
            return None
        out.append(node.strategies.index(strategy))
    return np.array(out)


def has_all_plans_of(step: GroupedStep, cluster: Cluster, method: Method) -> bool:
    """Returns whether the plans of a method are among those of the unrestricted program on the mesh of one axis.

    They are where the method tells no groups apart that are tied otherwise, and leaves no axis idle where products hold
    examples: its strategies are some of those there are (`strategies.heavy_strategies`).

    Raises:
      OptionError: the method cannot be applied.
    """
    grouping, ((_, constraints),) = step.grouping, limits.admissible_meshes(step, cluster, method)
    groups = [grouping.groups[index] for index in step.examples if index in constraints.limits]
    products = [group for group in groups if group.kind == "heavy" and grouping.ops[group.ops[0]].name in PRODUCTS]
    if not all(constraints.limits[group.index].fills for group in products):
        return False
    return sum(1 for _ in strategies.classes(grouping, constraints)) == len(grouping.classes)


def peak_bound(program: MeshProgram) -> float:
    """Returns bytes per device that no choice on a mesh takes less of; `minimise_memory` takes longer, and is exact."""
    problem = replace(problem_from_graph(program.build(regather=program.regathers).program), budget=None)
    return PeakSearch(problem, PEAK_GAP, SOLVE_WORK).lower_bound()


def minimise_memory(programs: Sequence[MeshProgram]) -> tuple[float, MeshSolution] | None:
    """The plan found that takes the fewest bytes per device on any mesh, after those that none takes less of (or 0).

    None if no program has a choice.
    """
    best: tuple[float, MeshSolution] | None = None
    for program in programs:
        for space in [program.build(), program.build(regather=True)] if program.regathers else [program.build()]:
            peak, solution = solve.find_minimal_budget(space.program, gap=PEAK_GAP)
            if solution.choice and (best is None or peak < best[1].solution.peak):
                best = peak if solution.status == "optimal" else 0.0, MeshSolution(space, solution)
    return best


def budget_error(
    traced: Traced, cluster: Cluster, budget: float, least: tuple[float, MeshSolution] | None
) -> InfeasibleError:
    """Returns the error that names the tensors that bind, the smallest budget that works, and the ways out."""
    if least is None:
        return InfeasibleError(
            f"the method admits no sharding of this step on {cluster.num_devices} devices with any memory: the "
            "constraints on arguments and operations contradict each other. Use method='auto', or constrain less "
            "(constrain, allow, forbid)."
        )
    values, inputs = traced.graph.values, traced.graph.block.inputs
    sizes = [(values[v].nbytes, format_path(a.path)) for v, a in zip(inputs, traced.arguments, strict=False)]
    largest = ", ".join(f"{path} ({units.nbytes(size)})" for size, path in sorted(sizes, reverse=True)[:5])
    total = sum(values[v].nbytes for v in inputs)
    bound, found = least
    peak, shape = found.solution.peak, " x ".join(map(str, found.mesh.shape))
    smallest = units.exact_bytes(math.ceil(peak))
    known = smallest if peak <= bound * (1 + PROVEN_PEAK) else f"at most {smallest}"
    return InfeasibleError(
        f"memory_per_device={units.exact_bytes(budget)} is too small: the smallest budget that works on one mesh is "
        f"{known} per device, on a mesh of {shape}. The arguments alone take {units.nbytes(total)} before they are "
        f"sharded over {cluster.num_devices} devices; the "
        f"largest of them: {largest}. A larger budget, more devices, rematerialisation "
        f"(jax.checkpoint around a layer) or a smaller batch would fit.",
        math.ceil(peak),
    )


def price_constraints(
    step: GroupedStep, cluster: Cluster, method: Any, found: MeshSolution, *, budget: float, pins: Pins, wishes: Wishes
) -> tuple[str, ...]:
    """A note on the cost of each of the user's own shardings: the same program is solved without each, and without all.

    None where there is none, or where that is expensive: nothing is claimed then.

    Args: those of `mesh_program.mesh_programs`, and the solution.
    """
    said = constraints_of(step.traced, wishes)
    size = sum(len(node.strategies) for node in found.space.nodes)
    if not said or len(said) > PRICED_SHARDINGS or size > PRICED_STRATEGIES or found.solution.status != "optimal":
        return ()
    if len(said) > 1:
        ops, leaves = zip(*said.values(), strict=True)
        said["all of the user's shardings"] = frozenset().union(*ops), frozenset().union(*leaves)
    notes = []
    for name, (ops, leaves) in said.items():
        left = {path: wish for path, wish in wishes.leaves.items() if path not in leaves}
        limit = replace(
            limits.limits(step, method, found.mesh, replace(wishes, leaves=left), pins), ignored_constraints=ops
        )
        space = strategies.build(step, MeshCost(cluster, found.mesh), budget=budget, constraints=limit)
        solution = solve.solve(space.program)
        if solution.status == "optimal":
            with_it, without = found.solution.objective, min(solution.objective, found.solution.objective)
            notes.append(f"{name}: the step takes {with_it:.4g} s with it and {without:.4g} s without, on this mesh")
    return tuple(notes)


def constraints_of(traced: Traced, wishes: Wishes) -> dict[str, tuple[frozenset[int], frozenset[str]]]:
    """In words each sharding -> the operations and the paths of arguments that it is said of."""
    found: defaultdict[str, tuple[set[int], set[str]]] = defaultdict(lambda: (set(), set()))
    for op in traced.graph.ops():
        if op.name == CONSTRAINT and any(axes is not None for axes in op.params["dims"]):
            found[f"{op.params['why']} at {_jax.source_line(op.source)}"][0].add(op.index)
    for path, wish in wishes.leaves.items():
        if path not in wishes.given_paths:
            found[wish.why][1].add(path)
    return {name: (frozenset(ops), frozenset(leaves)) for name, (ops, leaves) in found.items()}
