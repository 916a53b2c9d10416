"""Searches the mesh shapes of a cluster for the best plan of one mesh.

For every logical mesh shape that the method admits, the integer program is built, and what it can reach is bounded
from below, quickly (`sharding.solver.solve.Bound`). Shapes are then solved in the order of their bounds, first without
the memory budget and, if that does not fit, within it; one that is proven no better than the best found so far is cut
off. The best objective wins. Textbook methods are the same program with the layouts of arguments fixed, so the free
program is never worse than a textbook plan on the same mesh.

Under a binding memory budget the program is also solved with state gathered again for late uses
(`sharding.strategies.build`, `regather`), which trades communication for memory.

Of the time until the deadline, two fifths are for building and bounding the programs of further shapes. Where building
alone would take a tenth of it or more, the mesh of one axis and textbook plans are solved first, so that there is
something good to return, and to undercut, and what exceeds the budget by far is told at once. The time limit is one
for all solving: a shape gets a third of what is left, or an equal share of it if fewer than three wait, and divides
that over its attempts, and no more than what can still be won repays (`STEPS` steps of the difference to the bound),
but for a few seconds. Until something fits, a quarter of the limit is kept back for finding the smallest budget that
would have done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from alpa_lite.graph import Traced
from alpa_lite.layout import LogicalMesh
from alpa_lite.methods import Auto, DataParallel, Method, Sharded, TensorParallel, Zero
from alpa_lite.passes.sharding import bans, limits, strategies, tables
from alpa_lite.passes.sharding.deadline import FEW, Deadline, worthwhile
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

    `candidates` lists every mesh shape that was weighed. `free` is what no plan of any of them undercuts, in seconds,
    whatever the budget: where the solution costs as much, more memory would not make it faster.
    """

    mesh: LogicalMesh
    space: Space
    solution: Solution
    choice: tuple[Strategy, ...]
    candidates: tuple[Candidate, ...]
    free: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """What of the objective is not communication."""
        nodes, choice = self.space.nodes, self.solution.choice
        return float(sum(n.compute[c] * len(n.members) for n, c in zip(nodes, choice, strict=True)))


LATE = "not searched"
"""The status of candidates for which there was no time, or that could not save enough to repay solving them."""


class Beaten(Exception):
    """There is no plan below the cutoff, or none was found in the time.

    Attributes:
      free: seconds that no plan undercuts, whatever the budget.
    """

    def __init__(self, free: float) -> None:
        super().__init__(f"no plan undercuts the cutoff; none of any memory undercuts {free:.4g} s")
        self.free = free


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
    deadline: Deadline | None = None,
    cutoff: float = math.inf,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Found:
    """The best plan of one mesh for a method.

    Args:
      budget: bytes per device.
      pins: where arguments already are and stay, all on one mesh of all devices; they come before the method.
      wishes: what the user says of arguments and of the mesh beside the method.
      time_limit: wall-clock seconds for solving all mesh shapes; building their programs is not counted.
      deadline: until when all of it is to be done; none if it is left out. One mesh shape is tried in any case.
      cutoff: seconds; only a plan below it is of interest.
      progress: told what is counted, how many are done, and of how many.

    Raises:
      Beaten: if a cutoff is given and no plan within the budget was found below it.
      InfeasibleError: if no mesh shape admits a plan within the budget, or none was found in the time; names what
        binds and what would fit.
      OptionError: if the method cannot be applied to these arguments or this number of devices.
    """
    deadline = deadline or Deadline()
    shared = tables.Shared(traced, grouping)
    problems = partial(_problems, traced, grouping, rules, cluster, budget=budget, shared=shared)
    waiting = problems(method, pins=pins, wishes=wishes)
    race, count = _Race(type(method).__name__, budget, cutoff), len(waiting)
    race.enter(waiting.pop(0), several=count > 1)
    if race.slowest * count > _SHORT * deadline.left:
        race.begin(deadline.within(_FIRST * deadline.left), waiting[:1])
        if race.hopeless is not None and math.isfinite(cutoff):
            raise Beaten(race.free)
        if race.hopeless is not None:
            raise _too_small(traced, cluster, budget, *race.hopeless)
        if not (pins or wishes.leaves or wishes.forbidden or wishes.mesh) and method in (Auto(), Sharded()):
            race.consider(TEXTBOOK, problems, deadline.within(_TEXTBOOK * deadline.left))
    bounding = deadline.within(_BOUNDING * deadline.left)
    while waiting and not bounding.over:
        progress("mesh shapes bounded", len(race.tried), count)
        race.enter(waiting.pop(0), several=True)
    race.late = tuple(problem.mesh for problem in waiting)
    race.run(deadline.within(time_limit), progress)
    if race.best is None and math.isfinite(cutoff):
        raise Beaten(race.free)
    if race.best is None:
        _take_least(traced, race, cluster, deadline.within(time_limit))
    return race.found()


def _problems(
    traced: Traced, grouping: Grouping, rules: Mapping[Any, Rule], cluster: Cluster, method: Any, *, budget: float,
    shared: tables.Shared, pins: Pins = NO_PINS, wishes: Wishes = NO_WISHES,
) -> list[_Problem]:  # fmt: skip
    """The programs of a method on each mesh shape, yet to be built, the most promising shapes first.

    These are the mesh of one axis, and of several nodes those with one axis along the nodes.
    """
    banned, out = bans.bans(traced, grouping, wishes.forbidden), []
    for mesh, allowed in limits.admitted(traced, grouping, cluster, method, wishes, pins):
        cost, known = MeshCost(cluster, mesh), {"budget": budget, "allowed": allowed, "bans": banned, "shared": shared}
        build = partial(strategies.build, traced, grouping, rules, cost, **known)
        out.append(_Problem(mesh, cluster.platform, build))
    nodes = cluster.nodes
    return sorted(out, key=lambda p: (len(p.mesh.shape), nodes > 1 and p.mesh.shape[0] != nodes))


TEXTBOOK: tuple[Method, ...] = (Zero(stage=3), TensorParallel(), DataParallel())
"""Methods whose plans the search begins with where time may run out, in the order of what memory they need."""


class _Race:
    """Mesh shapes, solved in the order of their bounds, and the best that was found so far.

    Attributes:
      tried: shapes with their programs and bounds; late: those for which there was no time.
      best: mesh, program and solution.
      free: seconds that no plan of the shapes tried undercuts, whatever the budget.
      hopeless: if the first shapes need clearly more than the budget, the least bytes per device, and the mesh.
      slowest: seconds that building and bounding a program took at most.
    """

    def __init__(self, method: str, budget: float, cutoff: float) -> None:
        self.method, self.budget = method, budget
        self.tried: list[tuple[solve.Bound, _Problem, Space]] = []
        self.late: tuple[LogicalMesh, ...] = ()
        self.best: tuple[LogicalMesh, Space, Solution] | None = None
        self.free, self.slowest = math.inf, 0.0
        self._given, self._bound = cutoff, math.inf
        self.hopeless: tuple[float, LogicalMesh] | None = None
        self._rows: dict[tuple[str, tuple[int, ...]], Candidate] = {}
        self._chosen: tuple[str, tuple[int, ...]] | None = None
        self._solved: set[LogicalMesh] = set()

    def enter(self, problem: _Problem, several: bool) -> None:
        """Builds the program of a mesh shape, and bounds it if there are several."""
        started = time.perf_counter()
        space = problem.build()
        bound = solve.Bound(space.program)
        if several:
            bound.improve()
        self.tried.append((bound, problem, space))
        self.slowest = max(self.slowest, time.perf_counter() - started)

    def begin(self, deadline: Deadline, others: Sequence[_Problem]) -> None:
        """Solves the first shape, roughly if need be: something to return, or to know that nothing can fit.

        The latter if its least memory exceeds the budget clearly, and that of other shapes.
        """
        bound, problem, space = self.tried[0]
        seconds = max(deadline.left, _GRACE)
        mine, solution, least = _solve(problem, space, self.budget, self._given, seconds, bound.known)
        self._put(self.method, problem.mesh, mine, solution)
        if not solution.choice and solution.status != "cutoff":
            smallest = math.inf, problem.mesh
            for other in (problem, *others):
                program = other.build(regather=other.platform not in strategies.MERGING).program
                peak, _ = solve.minimal_budget(program, gap=1e-2, time_limit=deadline.left)
                smallest = min(smallest, (peak, other.mesh), key=lambda pair: pair[0])
                if smallest[0] <= _HOPELESS * self.budget:
                    break
            else:
                self.hopeless = smallest
        bound.seconds = max(bound.seconds, least)  # without the budget, which may be all that rules a plan out
        if solution.status != "feasible":
            self._solved.add(problem.mesh)
            self._note(max(bound.seconds, solution.bound), bound.seconds)

    def consider(self, methods: Sequence[Method], problems: Callable[..., list[_Problem]], deadline: Deadline) -> None:
        """Evaluates the plans of textbook methods, as far as there is time: only what is better is then searched.

        The free program admits whatever such a method does: where that is solved, none of them is better.
        """
        for method in methods:
            if deadline.over:
                return
            try:
                (problem,) = problems(method)
            except (OptionError, MicrobatchError):  # the batch, or a micro-batch, does not divide
                continue
            limit, cutoff = deadline.share(2), self._cutoff(problem.mesh)
            built = problem.build()
            space, solution, _ = _solve(problem, built, self.budget, cutoff, limit, solve.Known(built.program))
            if solution.choice:
                self._put(type(method).__name__, problem.mesh, space, solution)

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
            if known:
                limit = min(limit, max(FEW - (begun - deadline.left), worthwhile(cutoff - bound.seconds)))
            if bound.seconds >= cutoff or (limit <= 0 and (known or self._rows)):
                self._put(self.method, problem.mesh, None, "cutoff" if bound.seconds >= cutoff else LATE)
                self._note(bound.seconds, bound.seconds)
                continue
            progress("mesh shapes solved", len(self._rows), len(self.tried))
            space, solution, least = _solve(problem, space, self.budget, cutoff, limit, bound.known)
            self._note(max(solution.bound, bound.seconds), max(least, bound.seconds))
            self._put(self.method, problem.mesh, space, solution)

    def found(self) -> Found:
        """The best plan, with the bound of all shapes together."""
        assert self.best is not None
        mesh, space, solution = self.best
        for late in self.late:
            self._put(self.method, late, None, LATE)
        rows = [
            replace(row, status="chosen" if key == self._chosen else "slower" if row.step_seconds else row.status)
            for key, row in self._rows.items()
        ]
        if self._bound < solution.bound * (1 - _EQUAL):
            solution = replace(solution, bound=self._bound)
            solution = solution if solution.gap <= _CLOSED else replace(solution, status="feasible")
        choice = tuple(space.nodes[n].strategies[solution.choice[n]] for n in space.node_of)
        return Found(mesh, space, solution, choice, tuple(rows), min(self.free, solution.objective))

    def take(self, problem: _Problem, space: Space, solution: Solution) -> None:
        """Takes a choice that was made for memory alone."""
        self._put(self.method, problem.mesh, space, solution)

    def _cutoff(self, mesh: LogicalMesh) -> float:
        """Seconds that a plan on a mesh must undercut: of equals, the mesh of fewer axes is better."""
        if self.best is None:
            return self._given
        fewer = len(mesh.shape) < len(self.best[0].shape)
        return self.best[2].objective * (1 + _EQUAL if fewer else 1.0)

    def _note(self, bound: float, free: float) -> None:
        self._bound, self.free = min(self._bound, bound), min(self.free, free)

    def _put(self, name: str, mesh: LogicalMesh, space: Space | None, found: Solution | str) -> None:
        """Notes what came of a shape, a solution or a status, and takes a plan if it is the best."""
        key, row = (name, mesh.shape), Candidate(name, mesh.shape, None, None, str(found))
        if isinstance(found, Solution):
            row = replace(row, status=found.status)
            if found.status in ("optimal", "feasible"):
                row = replace(row, step_seconds=found.objective, bytes_per_device=int(found.peak))
                if space is not None and found.objective < self._cutoff(mesh):
                    self.best, self._chosen = (mesh, space, found), key
        before = self._rows.get(key)
        if before is None or before.step_seconds is None or (key == self._chosen and row.step_seconds is not None):
            self._rows[key] = row


@dataclass(frozen=True, eq=False)
class _Problem:
    """The integer program of one mesh, to be built with or without gathering state again for late uses."""

    mesh: LogicalMesh
    platform: str
    build: Callable[..., Space]


def _solve(
    problem: _Problem, space: Space, budget: float, cutoff: float, time_limit: float, before: solve.Known
) -> tuple[Space, Solution, float]:
    """The best choice on one mesh within the budget, of up to three attempts that share the time limit.

    The third value is what no choice undercuts without the budget, in seconds.

    Raises nothing: the status says whether there is a choice, and "cutoff" whether there can be one below the cutoff.
    """
    deadline, regathers = Deadline(time_limit), problem.platform not in strategies.MERGING
    program = replace(space.program, budget=None)
    free = solve.solve(program, cutoff=cutoff, time_limit=deadline.share(2 + regathers), roof=budget, known=before)
    if free.status == "cutoff" or (free.choice and free.peak <= budget):
        return space, free, free.bound
    known = free.bound if free.choice and free.peak > budget else None
    limit = deadline.share(1 + regathers)
    solution = solve.solve(space.program, cutoff=cutoff, time_limit=limit, free=known, known=before)
    if free.peak > budget and regathers:
        again = problem.build(regather=True)
        limit = min(cutoff, solution.objective) if solution.choice else cutoff
        # What is served twice costs no less: the bound without the budget is one here, too.
        other = solve.solve(again.program, cutoff=limit, time_limit=deadline.share(1), free=known, start=solution)
        if other.choice and (not solution.choice or other.objective < solution.objective):
            return again, other, free.bound
    return space, solution, free.bound


_AT_ONCE = 3  # of the shapes that wait, so many share what is left of the time; those after them have larger bounds
_RESERVE = 0.25  # of the time limit, for the smallest budget that works
_BOUNDING = 0.4  # of the time, until when further mesh shapes are built
_GRACE = 1.0  # seconds that the first shape may be solved for, though the time is over
_FIRST = 0.15  # of the time, for the first shape where time is short
_HOPELESS = 2.0  # times the budget: a step whose least memory on one mesh exceeds that is taken to fit no other
_SHORT = 0.1  # of the time: if building all programs takes more, some may remain unsolved
_TEXTBOOK = 0.3  # of the time, for textbook plans
_IMPROVED = 2  # times that a bound is improved before the mesh is solved
_CLOSED = 1e-4  # the gap of a proof, as of `solve.solve`
_EQUAL = 1e-9  # relative difference of seconds that is rounding


def _take_least(traced: Traced, race: _Race, cluster: Cluster, deadline: Deadline) -> None:
    """Where no plan was found, takes the one of the least memory if that fits.

    Raises:
      InfeasibleError: it does not; says what binds, the smallest budget that works as far as the time allows to find
        it, and what would fit.
    """
    smallest, where, tried = math.inf, race.tried[0][1].mesh, race.tried
    ways = (False,) if cluster.platform in strategies.MERGING else (False, True)
    for regather in ways:
        for number, (_, problem, space) in enumerate(tried):
            if number and deadline.over:
                break
            own = problem.build(regather=True) if regather else space
            parts = len(tried) - number + len(tried) * (not regather and len(ways) > 1)
            peak, solution = solve.minimal_budget(own.program, gap=1e-2, time_limit=deadline.share(parts))
            if peak <= race.budget:
                race.take(problem, own, replace(solution, status="feasible", bound=min(solution.bound, race.free)))
                return
            if peak < smallest:
                smallest, where = peak, problem.mesh
    if math.isinf(smallest):
        raise InfeasibleError(
            f"no sharding within memory_per_device={units.exact_bytes(race.budget)} was found in "
            f"{deadline.seconds:.3g} seconds; allow more (solver_time_limit, search_time_limit), or more memory."
        )
    raise _too_small(traced, cluster, race.budget, smallest, where)


def _too_small(
    traced: Traced, cluster: Cluster, budget: float, smallest: float, mesh: LogicalMesh
) -> InfeasibleError:  # fmt: skip
    """What binds, the smallest budget that works, on which mesh, and what would fit."""
    values, inputs = traced.graph.values, traced.graph.block.inputs
    sizes = [(values[v].nbytes, shown(a.path)) for v, a in zip(inputs, traced.arguments, strict=False)]
    leaves = sorted(sizes, reverse=True)[:5]
    largest = ", ".join(f"{path} ({units.nbytes(size)})" for size, path in leaves)
    total = sum(traced.graph.values[v].nbytes for v in traced.graph.block.inputs)
    return InfeasibleError(
        f"memory_per_device={units.exact_bytes(budget)} is too small: the smallest budget that works is "
        f"{units.exact_bytes(math.ceil(smallest))} per device, on a mesh of {' x '.join(map(str, mesh.shape))}. The "
        f"arguments alone take {units.nbytes(total)} before they are sharded over {cluster.num_devices} devices; the "
        f"largest of them: {largest}. A larger budget, more devices, rematerialisation "
        f"(jax.checkpoint around a layer) or a smaller batch would fit.",
        smallest,
    )
