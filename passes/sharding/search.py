"""Searches the mesh shapes of a cluster for the best plan of one mesh.

For every logical mesh shape that the method admits, the integer program is built, and what it can reach is bounded
from below, quickly (`sharding.solver.solve.Bound`). Shapes are then solved in the order of their bounds, first without
the memory budget and, if that does not fit, within it; one that is proven no better than the best found so far is cut
off. The best objective wins. Textbook methods are the same program with the layouts of arguments fixed, so the free
program is never worse than a textbook plan on the same mesh.

Under a binding memory budget the program is also solved with state gathered again for late uses
(`sharding.strategies.build`, `regather`), which trades communication for memory.

The time limit is one for all of this, building the programs aside: a shape gets a third of what is left, or an equal
share of it if fewer than three wait, and divides that over its attempts. Until something fits, a quarter of the limit
is kept back for finding the smallest budget that would have done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.errors import InfeasibleError
from alpa_lite.graph import Traced
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.sharding import bans, limits, strategies, tables
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.space import Space, Strategy
from alpa_lite.paths import shown
from alpa_lite.pins import NO_PINS, NO_WISHES, Pins, Wishes
from alpa_lite.records import Candidate
from alpa_lite.report import units
from alpa_lite.strategy import Rule, Solution


@dataclass(frozen=True, eq=False)
class Found:
    """The best plan: its program, solution, and the strategy of every group.

    `candidates` lists every mesh shape that was weighed.
    """

    mesh: LogicalMesh
    space: Space
    solution: Solution
    choice: tuple[Strategy, ...]
    candidates: tuple[Candidate, ...]

    @property
    def compute_seconds(self) -> float:
        """What of the objective is not communication."""
        nodes, choice = self.space.nodes, self.solution.choice
        return float(sum(n.compute[c] * len(n.members) for n, c in zip(nodes, choice, strict=True)))


def search(
    traced: Traced,
    grouping: Grouping,
    rules: Mapping[Any, Rule],
    cluster: Cluster,
    method: Any,
    *,
    budget: float,
    pins: Pins = NO_PINS,
    wishes: Wishes = NO_WISHES,
    time_limit: float = 60.0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Found:
    """The best plan of one mesh for a method.

    Args:
      budget: bytes per device.
      pins: where arguments already are and stay, all on one mesh of all devices; they come before the method.
      wishes: what the user says of arguments and of the mesh beside the method.
      time_limit: wall-clock seconds for solving all mesh shapes; building their programs is not counted.
      progress: told what is counted, how many are done, and of how many.

    Raises:
      InfeasibleError: if no mesh shape admits a plan within the budget, or none was found in the time; names what
        binds and what would fit.
      OptionError: if the method cannot be applied to these arguments or this number of devices.
    """
    tried: list[tuple[solve.Bound, _Problem, Space]] = []
    shapes = limits.admitted(traced, grouping, cluster, method, wishes, pins)
    shared = tables.Shared(traced, grouping)
    for position, (mesh, allowed) in enumerate(shapes):
        progress("mesh shapes bounded", position, len(shapes))
        cost = MeshCost(cluster, mesh)
        banned = bans.bans(traced, grouping, wishes.forbidden)
        known = {"budget": budget, "allowed": allowed, "bans": banned, "shared": shared}
        build = partial(strategies.build, traced, grouping, rules, cost, **known)
        problem = _Problem(mesh, cluster.platform, build)
        space = problem.build()
        bound = solve.Bound(space.program)
        if len(shapes) > 1:
            bound.improve()
        tried.append((bound, problem, space))
    best: tuple[LogicalMesh, Space, Solution] | None = None
    candidates: list[Candidate] = []
    deadline = Deadline(time_limit)
    waiting = list(tried)
    while waiting:
        number = min(range(len(waiting)), key=lambda i: waiting[i][0].seconds)
        bound, problem, space = waiting[number]
        cutoff = best[2].objective if best else math.inf
        if best and len(problem.mesh.shape) < len(best[0].shape):
            cutoff *= 1 + _EQUAL  # of equals, the mesh of fewer axes
        if bound.seconds < cutoff and 0 < bound.improved < _IMPROVED:
            bound.improve()
            continue
        parts = min(len(waiting), _AT_ONCE)
        del waiting[number]
        if bound.seconds >= cutoff:
            candidates.append(Candidate(type(method).__name__, problem.mesh.shape, None, None, "cutoff"))
            continue
        progress("mesh shapes solved", len(candidates), len(tried))
        reserve = 0.0 if best else _RESERVE * time_limit
        space, solution = _solve(problem, space, budget, cutoff, deadline.share(parts, reserve))
        finished = solution.status in ("optimal", "feasible")
        candidates.append(
            Candidate(
                type(method).__name__, problem.mesh.shape, solution.objective if finished else None,
                int(solution.peak) if finished else None, solution.status,
            )
        )  # fmt: skip
        if finished and solution.objective < cutoff:
            best = problem.mesh, space, solution
    if best is None:
        raise _infeasible(traced, [(problem, space) for _, problem, space in tried], budget, cluster, deadline)
    mesh, space, solution = best
    choice = tuple(space.nodes[n].strategies[solution.choice[n]] for n in space.node_of)
    named = tuple(
        Candidate(c.method, c.mesh_shape, c.step_seconds, c.bytes_per_device, "chosen" if c.mesh_shape == mesh.shape
                  else "slower" if c.status in ("optimal", "feasible") else c.status)
        for c in candidates
    )  # fmt: skip
    return Found(mesh, space, solution, choice, named)


@dataclass(frozen=True, eq=False)
class _Problem:
    """The integer program of one mesh, to be built with or without gathering state again for late uses."""

    mesh: LogicalMesh
    platform: str
    build: Callable[..., Space]


def _solve(problem: _Problem, space: Space, budget: float, cutoff: float, time_limit: float) -> tuple[Space, Solution]:
    """The best choice on one mesh within the budget, of up to three attempts that share the time limit.

    Raises nothing: the status says whether there is a choice, and "cutoff" whether there can be one below the cutoff.
    """
    deadline, regathers = Deadline(time_limit), problem.platform not in _MERGING
    program = replace(space.program, budget=None)
    free = solve.solve(program, cutoff=cutoff, time_limit=deadline.share(2 + regathers), roof=budget)
    if free.status == "cutoff" or (free.choice and free.peak <= budget):
        return space, free
    known = free.bound if free.choice and free.peak > budget else None
    solution = solve.solve(space.program, cutoff=cutoff, time_limit=deadline.share(1 + regathers), free=known)
    if free.peak > budget and regathers:
        again = problem.build(regather=True)
        limit = min(cutoff, solution.objective) if solution.choice else cutoff
        # What is served twice costs no less: the bound without the budget is one here, too.
        other = solve.solve(again.program, cutoff=limit, time_limit=deadline.share(1), free=known)
        if other.choice and (not solution.choice or other.objective < solution.objective):
            return again, other
    return space, solution


def _by(mesh: LogicalMesh) -> str:
    return " x ".join(map(str, mesh.shape))


_AT_ONCE = 3  # of the shapes that wait, so many share what is left of the time; those after them have larger bounds
_RESERVE = 0.25  # of the time limit, for the smallest budget that works
_IMPROVED = 2  # times that a bound is improved before the mesh is solved
_EQUAL = 1e-9  # relative difference of seconds that is rounding
# Compilers that drop optimization barriers and merge equal gathers, the kept copy with them (measured on CPU, JAX
# 0.10.2): a plan that counts on gathering again would not be true there.
_MERGING = frozenset({"cpu"})


def _infeasible(
    traced: Traced, tried: Sequence[tuple[_Problem, Space]], budget: float, cluster: Cluster, deadline: Deadline
) -> InfeasibleError:
    """What binds, the smallest budget that works as far as the time allows to find it, and what would fit."""
    smallest, where = math.inf, ""
    ways = (False,) if cluster.platform in _MERGING else (False, True)
    for regather in ways:
        for number, (problem, space) in enumerate(tried):
            program = problem.build(regather=True).program if regather else space.program
            parts = len(tried) - number + len(tried) * (not regather and len(ways) > 1)
            peak, _ = solve.minimal_budget(program, gap=1e-2, time_limit=deadline.share(parts))
            if peak < smallest:
                smallest, where = peak, _by(problem.mesh)
    if smallest <= budget or math.isinf(smallest):
        return InfeasibleError(
            f"no sharding within memory_per_device={units.exact_bytes(budget)} was found in "
            f"solver_time_limit={deadline.seconds:g} seconds; allow more seconds, or more memory."
        )
    values, inputs = traced.graph.values, traced.graph.block.inputs
    sizes = [(values[v].nbytes, shown(a.path)) for v, a in zip(inputs, traced.arguments, strict=False)]
    leaves = sorted(sizes, reverse=True)[:5]
    largest = ", ".join(f"{path} ({units.nbytes(size)})" for size, path in leaves)
    total = sum(traced.graph.values[v].nbytes for v in traced.graph.block.inputs)
    return InfeasibleError(
        f"memory_per_device={units.exact_bytes(budget)} is too small: the smallest budget that works is "
        f"{units.exact_bytes(math.ceil(smallest))} per device, on a mesh of {where}. The arguments alone take "
        f"{units.nbytes(total)} before they are sharded over {cluster.num_devices} devices; the largest of "
        f"them: {largest}. A larger budget, more devices, rematerialisation "
        f"(jax.checkpoint around a layer) or a smaller batch would fit.",
        smallest,
    )
