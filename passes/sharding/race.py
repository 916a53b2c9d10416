"""Mesh shapes, solved in the order of their bounds, and the best plan that was found so far (see `sharding.search`)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.sharding import strategies
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.sharding.lessons import NOTHING_KNOWN, Beaten, Bounds, Lessons
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.space import Space, Strategy
from alpa_lite.records import Candidate
from alpa_lite.strategy import Solution


class Rest(Protocol):
    """The rest of a search."""

    def __call__(self, deadline: Deadline) -> Found:
        """The best plan of all meshes."""
        ...


@dataclass(frozen=True, eq=False)
class Found:
    """The best plan: its program, solution, and the strategy of every group.

    `candidates` lists every mesh shape that was weighed. `free` is what no plan of those tried undercuts, in seconds,
    whatever the budget: where the solution costs as much, more memory would not make it faster. `bounds` says the same
    of each mesh that was tried. `rest` is what is left to be searched, where the search stopped at the first mesh.
    """

    mesh: LogicalMesh
    space: Space
    solution: Solution
    choice: tuple[Strategy, ...]
    candidates: tuple[Candidate, ...]
    free: float = 0.0
    bounds: Bounds = field(default_factory=lambda: NOTHING_KNOWN)
    rest: Rest | None = None

    @property
    def compute_seconds(self) -> float:
        """What of the objective is not communication."""
        nodes, choice = self.space.nodes, self.solution.choice
        return float(sum(n.compute[c] * len(n.members) for n, c in zip(nodes, choice, strict=True)))


Plain = tuple[str, Found]
"""A plan that is known before a race, and the name of its method."""

LATE = "not searched"
"""The status of candidates for which there was no time."""

LITTLE = "not searched: it could save too little"
"""The status of candidates that could not save enough to repay searching them."""

GROWTH = 6.0
"""How many times longer building and bounding a program takes for a mesh of one more axis, by rule of thumb.

With three axes in place of two it took four to eight times as long, of a U-Net, two convolutional nets and a language
model.
"""

CLOSED = 1e-4
"""The relative gap of a proof, as of `solve.solve`: plans that differ by no more are said to be equal."""


@dataclass(frozen=True)
class Least:
    """Bytes per device of a mesh: `bound`, that no plan undercuts, and `peak`, of a plan with few."""

    bound: float
    peak: float
    mesh: LogicalMesh


class Race:
    """Mesh shapes, solved in the order of their bounds, and the best that was found so far.

    Attributes:
      tried: shapes with their programs and bounds.
      best: mesh, program and solution.
      meshes: all shapes. bounds: seconds that none of its plans undercuts, whatever the budget, where that is known.
      at_peak: seconds that no plan of any shape undercuts, once one is tried.
      in_equal_parts: bytes per device that none undercuts.
      least: bytes per device of what was tried, where all of it is known to exceed the budget.
      slowest: seconds that building and bounding a program took at most, by the number of axes of the mesh.
      seconds: of the best. speedup: how many times below its objective the seconds of a plan may be.
    """

    speedup = 1.0

    def __init__(
        self, method: str, budget: float, cutoff: float, meshes: Sequence[LogicalMesh], lessons: Lessons,
        in_equal_parts: float = 0.0,
    ) -> None:  # fmt: skip
        self.method, self.budget, self.in_equal_parts = method, budget, in_equal_parts
        self.tried: list[tuple[solve.Bound, Problem, Space]] = []
        self.best: tuple[LogicalMesh, Space, Solution] | None = None
        self.seconds = math.inf
        self.meshes, self.at_peak = tuple(meshes), 0.0
        self.bounds = {mesh: bound for mesh, bound in lessons.bounds.items() if mesh in meshes}
        self.slowest: dict[int, float] = {}
        self.least: Least | None = None
        self._given = cutoff
        self._within: dict[LogicalMesh, float] = {}  # as `bounds`, within the budget
        self._rows: dict[tuple[str, tuple[int, ...]], Candidate] = {}
        self._chosen: tuple[str, tuple[int, ...]] | None = None
        self._solved: set[LogicalMesh] = set()
        self._known: tuple[Found, ...] = ()

    def begin_with(self, known: Sequence[Plain]) -> None:
        """Takes the best of some plans that are known, if it is below the cutoff, and notes all."""
        self._known = tuple(plan for _, plan in known)
        for name, plan in known:
            self._put(name, plan.mesh, plan.space, plan.solution)

    def is_beaten(self, mesh: LogicalMesh) -> bool:
        """Whether the bound of a shape reaches what it must undercut; noted if so."""
        beaten = self.bounds.get(mesh, 0.0) >= self._cutoff(mesh)
        if beaten:
            self._put(self.method, mesh, None, "cutoff")
        return beaten

    def enter(self, problem: Problem, several: bool) -> None:
        """Builds the program of a mesh shape, and bounds it if there are several."""
        started = time.perf_counter()
        space = problem.build()
        bound = solve.Bound(space.program)
        others = [translated(plan, space) for plan in self._known if plan.mesh == problem.mesh]
        bound.known.choices += [np.array(choice) for choice in others if choice is not None]
        if several:
            bound.improve()
        if not self.tried:
            self.at_peak = problem.at_peak(space)
        bound.seconds = max(bound.seconds, self.bounds.get(problem.mesh, self.at_peak))
        self.tried.append((bound, problem, space))
        self._note(problem.mesh, 0.0, bound.seconds)
        axes = len(problem.mesh.shape)
        self.slowest[axes] = max(self.slowest.get(axes, 0.0), time.perf_counter() - started)

    def entering(self, mesh: LogicalMesh) -> float:
        """Seconds that entering a shape may take, by what it took with as many axes, or with fewer."""
        axes = len(mesh.shape)
        if axes in self.slowest:
            return self.slowest[axes]
        fewer = max((known for known in self.slowest if known < axes), default=0)
        return self.slowest[fewer] * GROWTH ** (axes - fewer) if fewer else max(self.slowest.values(), default=0.0)

    def refusal(self, mesh: LogicalMesh, deadline: Deadline) -> str:
        """Why a shape is not entered, as the status of its candidate, which is noted; none if it is.

        Its bound may reach the cutoff. Or entering it, and solving it in as long, takes more than is left, or than what
        its plans may save repays.
        """
        if self.is_beaten(mesh):
            return "cutoff"
        gain, takes = self._cutoff(mesh) - self.bounds.get(mesh, self.at_peak), 2 * self.entering(mesh)
        if deadline.patience(gain) >= takes:
            return ""
        status = LATE if deadline.left < takes and not deadline.little else LITTLE
        self._put(self.method, mesh, None, status)
        return status

    def begin(self, deadline: Deadline, other: Problem | None) -> bool:
        """Solves the first shape and another, roughly if need be: something to return, or to know that neither fits.

        The one of the lower bound is first. Where it has no plan, and the least memory of both exceeds the budget,
        neither is looked at any more.

        Returns:
          Whether the bounds of both reach the cutoff.
        """
        if other is not None and not self.is_beaten(other.mesh):
            self.enter(other, several=True)
        statuses: list[str] = []
        for one in sorted(self.tried, key=lambda one: one[0].seconds):
            statuses.append(self._begin(one))
            if self.best is None and statuses[-1] != "cutoff" and len(statuses) == 1:
                self.weigh([problem for _, problem, _ in self.tried], Deadline(max(deadline.left, _GRACE)))
                if self.least is not None:
                    break
        return set(statuses) == {"cutoff"}

    def _begin(self, one: tuple[solve.Bound, Problem, Space]) -> str:
        """Solves a shape that was entered: the status of its solution."""
        bound, problem, space = one
        cutoff = self._cutoff(problem.mesh)
        if bound.seconds >= cutoff:
            self._put(self.method, problem.mesh, None, "cutoff")
            self._note(problem.mesh, bound.seconds, bound.seconds)
            self._solved.add(problem.mesh)
            return "cutoff"
        mine, solution, least = solved(problem, space, self.budget, cutoff, bound.known)
        self._put(self.method, problem.mesh, mine, solution)
        bound.seconds = max(bound.seconds, least)  # without the budget, which may be all that rules a plan out
        self._note(problem.mesh, solution.bound if solution.status != "feasible" else 0.0, bound.seconds)
        if is_settled(solution):
            self._solved.add(problem.mesh)
        return solution.status

    def weigh(self, problems: Sequence[Problem], deadline: Deadline) -> None:
        """Finds the least bytes that some shapes need; `least` is set if all of them are known to exceed the budget."""
        found, self.least = [], None
        for problem in problems:
            if deadline.over:
                return
            program = problem.build(regather=problem.platform not in strategies.MERGING).program
            bound, peak = solve.bound_of_peak(program)
            if bound <= self.budget:
                return
            found.append(Least(bound, peak, problem.mesh))
        self.least = min(found, key=lambda least: least.bound)

    @property
    def overflows(self) -> bool:
        """Whether equal parts of what lives exceed the budget."""
        return self.in_equal_parts > self.budget

    @property
    def hopeless(self) -> bool:
        """Whether the first shapes are known to exceed the budget so far that none will do, or equal parts do."""
        return self.least is not None and (self.overflows or self.least.bound > _HOPELESS * self.budget)

    def beaten(self, *, tried_all: bool = True) -> Beaten:
        """What to raise where nothing below the cutoff was found."""
        least = self.in_equal_parts if self.overflows else 0.0
        if self.least is not None and math.isfinite(self.least.bound):  # else no layout is allowed
            least = self.least.bound
        wider = self.least is not None and not tried_all and not self.hopeless
        return Beaten(dict(self.bounds), least, wider)

    def run(
        self, deadline: Deadline, progress: Callable[[str, int, int], None] = lambda what, done, total: None
    ) -> None:
        """Solves shape after shape, while there is time, and while what is won can repay it."""
        waiting, begun = [one for one in self.tried if one[1].mesh not in self._solved], deadline.left
        while waiting:
            number = min(range(len(waiting)), key=lambda i: waiting[i][0].seconds)
            bound, problem, space = waiting[number]
            cutoff = self._cutoff(problem.mesh)
            known = math.isfinite(cutoff)
            if bound.seconds < cutoff and 0 < bound.improved < _IMPROVED and not deadline.over:
                bound.improve()
                continue
            parts = min(len(waiting), _AT_ONCE)
            del waiting[number]
            limit = deadline.share(parts, 0.0 if self.best else _RESERVE * begun)
            patience = deadline.patience(cutoff - bound.seconds) if known else math.inf
            little = deadline.little or patience <= 0 < deadline.left
            status = "cutoff" if bound.seconds >= cutoff else LITTLE if little else LATE
            limit = min(limit, patience)
            if status == "cutoff" or (limit <= 0 and (known or self._rows)):
                self._put(self.method, problem.mesh, None, status)
                self._note(problem.mesh, bound.seconds, bound.seconds)
                continue
            own = sum(name == self.method for name, _ in self._rows)
            progress("mesh shapes solved", own, len(self.tried))
            space, solution, least = solved(problem, space, self.budget, cutoff, bound.known)
            self._note(problem.mesh, max(solution.bound, bound.seconds), max(least, bound.seconds))
            self._put(self.method, problem.mesh, space, solution)
            if is_settled(solution):
                self._solved.add(problem.mesh)

    @property
    def is_late(self) -> bool:
        """Whether a shape that was entered was not solved for want of time."""
        late = {problem.mesh.shape for _, problem, _ in self.tried if problem.mesh not in self._solved}
        return any(row.status == LATE and shape in late for (_, shape), row in self._rows.items())

    def found(self, rest: Rest | None = None) -> Found:
        """The best plan, with the bound of all shapes together."""
        assert self.best is not None
        mesh, space, solution = self.best
        entered = {problem.mesh for _, problem, _ in self.tried}
        for late in self.meshes:
            if late not in entered and (self.method, late.shape) not in self._rows:
                self._put(self.method, late, None, LATE)
        rows = [
            replace(row, status="chosen" if key == self._chosen else "slower" if row.step_seconds else row.status)
            for key, row in self._rows.items()
        ]
        least = min(max(self._within.get(one, 0.0), self.bounds.get(one, self.at_peak)) for one in self.meshes)
        if least < solution.bound * (1 - _EQUAL):
            solution = replace(solution, bound=least)
            solution = solution if solution.gap <= CLOSED else replace(solution, status="feasible")
        free = min(self.free, solution.objective)
        return Found(mesh, space, solution, choice_of(space, solution), tuple(rows), free, dict(self.bounds), rest)

    def take(self, problem: Problem, space: Space, solution: Solution) -> None:
        """Takes a choice that was made for memory alone."""
        self._put(self.method, problem.mesh, space, solution)

    def _cutoff(self, mesh: LogicalMesh) -> float:
        """What the objective of a plan on a mesh must undercut."""
        return self.speedup * self._limit(mesh)

    def _limit(self, mesh: LogicalMesh) -> float:
        """Seconds that a plan on a mesh must undercut.

        Of equals, the mesh of fewer axes is better, and a plan that was searched, whose program has all alternatives.
        """
        if self.best is None or self._chosen is None:
            return self._given
        fewer = len(mesh.shape) < len(self.best[0].shape)
        return self.seconds * (1 + _EQUAL if fewer or self._chosen[0] != self.method else 1.0)

    def _seconds(self, mesh: LogicalMesh, space: Space | None, found: Solution) -> float:
        """Seconds of a plan."""
        return found.objective

    @property
    def free(self) -> float:
        """Seconds that no plan of the shapes tried undercuts, whatever the budget."""
        return min(self.bounds.values(), default=0.0)

    def _note(self, mesh: LogicalMesh, bound: float, free: float) -> None:
        self.bounds[mesh] = max(self.bounds.get(mesh, 0.0), free)
        self._within[mesh] = max(self._within.get(mesh, 0.0), bound)

    def _put(self, name: str, mesh: LogicalMesh, space: Space | None, found: Solution | str) -> None:
        """Notes what came of a shape, a solution or a status, and takes a plan if it is the best."""
        key, row = (name, mesh.shape), Candidate(name, mesh.shape, None, None, str(found))
        if isinstance(found, Solution):
            row = replace(row, status=found.status)
            if found.status in ("optimal", "feasible"):
                seconds = self._seconds(mesh, space, found)
                row = replace(row, step_seconds=seconds, bytes_per_device=int(found.peak))
                if space is not None and seconds < self._limit(mesh):
                    self.best, self.seconds, self._chosen = (mesh, space, found), seconds, key
        before = self._rows.get(key)
        if before is None or before.step_seconds is None or (key == self._chosen and row.step_seconds is not None):
            self._rows[key] = row


def is_settled(solution: Solution) -> bool:
    """Whether no more time would change it: it is optimal, reaches the cutoff, or is proven not to exist."""
    return solution.status in ("optimal", "cutoff") or (solution.status == "infeasible" and math.isinf(solution.bound))


def translated(plan: Found, space: Space) -> tuple[int, ...] | None:
    """The choice of a plan in another program of the same groups and mesh; None if that does not have it."""
    out = []
    for node in space.nodes:
        strategy = plan.choice[node.members[0]]
        if strategy not in node.strategies or any(plan.choice[member] != strategy for member in node.members):
            return None
        out.append(node.strategies.index(strategy))
    return tuple(out)


def choice_of(space: Space, solution: Solution) -> tuple[Strategy, ...]:
    """The strategy of every group."""
    return tuple(space.nodes[n].strategies[solution.choice[n]] for n in space.node_of)


@dataclass(frozen=True, eq=False)
class Problem:
    """The integer program of one mesh, to be built with or without gathering state again for late uses.

    `at_peak` of its space are seconds that no mesh of as many devices has less of (`computing.at_peak`).
    """

    mesh: LogicalMesh
    platform: str
    build: Callable[..., Space]
    at_peak: Callable[[Space], float]


def solved(
    problem: Problem, space: Space, budget: float, cutoff: float, before: solve.Known
) -> tuple[Space, Solution, float]:
    """The best choice on one mesh within the budget, of up to three attempts.

    The third value is what no choice undercuts without the budget, in seconds.

    Raises nothing: the status says whether there is a choice, and "cutoff" whether there can be one below the cutoff.
    """
    regathers = problem.platform not in strategies.MERGING
    program = replace(space.program, budget=None)
    free = solve.solve(program, cutoff=cutoff, roof=budget, known=before)
    if free.status == "cutoff" or (free.choice and free.peak <= budget):
        return space, free, free.bound
    known = free.bound if free.choice and free.peak > budget else None
    solution = solve.solve(space.program, cutoff=cutoff, free=known, known=before)
    if free.peak > budget and regathers and solution.objective * (1 - _NEAR) > free.bound:
        again = problem.build(regather=True)
        limit = min(cutoff, solution.objective) if solution.choice else cutoff
        # What is served twice costs no less: the bound without the budget is one here, too.
        other = solve.solve(again.program, cutoff=limit, free=known, start=solution)
        if other.choice and (not solution.choice or other.objective < solution.objective):
            return again, other, free.bound
    elif solution.choice and regathers and solution.bound > free.bound:
        solution = replace(solution, status="feasible", bound=free.bound)  # gathering again was not tried
    return space, solution, free.bound


_AT_ONCE = 3  # of the shapes that wait, so many share what is left of the time; those after them have larger bounds
_RESERVE = 0.25  # of the time limit, for the smallest budget that works
_GRACE = 1.0  # seconds that the first shape may be solved for, though the time is over
_HOPELESS = 2.0  # times the budget: if the first meshes need more, no mesh of as many devices will do
_IMPROVED = 2  # times that a bound is improved before the mesh is solved
_NEAR = 2e-3  # relative difference to the seconds without a budget that gathering again is not tried for
_EQUAL = 1e-9  # relative difference of seconds that is rounding
