"""Searches the mesh shapes of a cluster for the best plan of one mesh.

For every logical mesh shape that the method admits, the integer program is built, and what it can reach is bounded
from below, quickly (`sharding.solver.solve.Bound`). Shapes are then solved in the order of their bounds, first without
the memory budget and, if that does not fit, within it; one that is proven no better than the best found so far is cut
off. The best objective wins. Textbook methods are the same program with operations fixed, so the free program is never
worse than a textbook plan on the same mesh where it is solved; where time is short it may not be, and so a search may
begin with plans that are known (`one_mesh`): what it returns is never worse.

Under a binding memory budget the program is also solved with state gathered again for late uses
(`sharding.strategies.build`, `regather`), which trades communication for memory.

Of the time until the deadline, two fifths are for building and bounding the programs of further shapes. Where ways to
run the step are compared, or building alone would take a tenth of the time or more, the first two meshes are solved at
once, so that there is something good to return, and to undercut, and what exceeds the budget is told before anything is
spent on other meshes, which need as many bytes. Where a part of all that lives, as small as there are devices, exceeds
it, no mesh will do, and none is solved. The time limit is one for all solving: a shape gets a third of what is left, or
an equal share of it if fewer than three wait, and divides that over its attempts. Nor is a shape built or solved for
longer than what it can win repays (`Deadline.patience`). Until something fits, a quarter of the limit is kept back for
finding the smallest budget that would have done.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.cost import MeshCost
from alpa_lite.errors import InfeasibleError
from alpa_lite.graph import Traced
from alpa_lite.layout import LogicalMesh
from alpa_lite.methods import Method
from alpa_lite.passes.ir.primitives import PRODUCTS
from alpa_lite.passes.sharding import bans, computing, limits, strategies, tables
from alpa_lite.passes.sharding.deadline import Deadline
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.hiding import Hiding
from alpa_lite.passes.sharding.lessons import Bounds, Lessons, ordered
from alpa_lite.passes.sharding.overlapped import OverlappedRace
from alpa_lite.passes.sharding.race import CLOSED, LATE, LITTLE, Found, Least, Plain, Problem, Race, Rest
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.paths import shown
from alpa_lite.pins import NO_PINS, NO_WISHES, Pins, Wishes
from alpa_lite.report import units
from alpa_lite.strategy import Rule

__all__ = ["CLOSED", "LATE", "LITTLE", "Found", "Plain", "Rest", "Restricted", "search", "unsearched"]


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
    lessons: Lessons | None = None,
    known: Sequence[Plain] = (),
    shared: tables.Shared | None = None,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    settled: Callable[[Found], float] = lambda found: found.solution.objective,
) -> Found:
    """The best plan of one mesh for a method.

    Args:
      budget: bytes per device.
      pins: where arguments already are and stay, all on one mesh of all devices; they come before the method.
      wishes: what the user says of arguments and of the mesh beside the method.
      time_limit: wall-clock seconds for solving all mesh shapes; building their programs is not counted.
      deadline: until when all of it is to be done; none if it is left out. One mesh shape is tried in any case.
      cutoff: seconds; only a plan below it is of interest.
      lessons: what searches of the same step with fewer micro-batches found out.
      known: plans that the method admits: the best of them is what is to be undercut.
      shared: what the programs of several searches of the grouped step have in common, to make it once.
      progress: told what is counted, how many are done, and of how many.
      settled: seconds of a plan that was found, where communication hides behind computing.

    Raises:
      Beaten: if a cutoff is given and no plan within the budget was found below it.
      InfeasibleError: if no mesh shape admits a plan within the budget, or none was found in the time; names what
        binds and what would fit.
      OptionError: if the method cannot be applied to these arguments or this number of devices.
    """
    deadline, lessons = deadline or Deadline(), lessons or Lessons()
    shared = shared or tables.Shared(traced, grouping)
    waiting = ordered(
        _problems(traced, grouping, rules, cluster, method, budget=budget, pins=pins, wishes=wishes, shared=shared),
        cluster.nodes, lessons.first,
    )  # fmt: skip
    race = _race(shared, cluster, method, [problem.mesh for problem in waiting], budget, cutoff, lessons, settled)
    race.begin_with(known)
    count, waiting = len(waiting), [problem for problem in waiting if not race.is_beaten(problem.mesh)]
    if not waiting:
        return _nothing_left(race)
    race.enter(waiting.pop(0), several=count > 1)
    if math.isfinite(cutoff) and race.overflows:
        raise race.beaten()
    rest = functools.partial(_all, traced, race, waiting, cluster, cutoff, time_limit, progress)
    short = max(race.slowest.values()) * count > _SHORT * deadline.left
    if lessons.quick or short:
        is_beaten = race.begin(deadline.within(_FIRST * deadline.left), waiting.pop(0) if waiting else None)
        if race.best is None:
            told = race.least is not None or (is_beaten and short) or (waiting and not is_beaten)
            if math.isfinite(cutoff) and (race.hopeless or (lessons.quick and told)):
                raise race.beaten(tried_all=not waiting or is_beaten)
            if race.hopeless and race.least is not None and math.isfinite(race.least.peak):
                raise _too_small(traced, cluster, budget, race.least)
            if lessons.quick and is_beaten:
                return rest(deadline.within(_FIRST * deadline.left))
        elif lessons.quick and waiting:
            return race.found(rest)
    return rest(deadline)


class Restricted:
    """A method of one mesh and few choices, such as a textbook method: its best plan below a cutoff.

    Nothing but the solver keeps to the time, so that there is a plan whatever the machine. What is found is kept, for
    who asks for it again.

    Raises:
      OptionError: if the method cannot be applied.
    """

    def __init__(
        self, traced: Traced, grouping: Grouping, rules: Mapping[Any, Rule], cluster: Cluster, method: Method, *,
        budget: float, shared: tables.Shared, time_limit: float, cutoff: float, settled: Callable[[Found], float],
    ) -> None:  # fmt: skip
        (self._problem,) = _problems(traced, grouping, rules, cluster, method, budget=budget, shared=shared)
        self._race = _race(shared, cluster, method, [self._problem.mesh], budget, cutoff, Lessons(), settled)
        if self._race.overflows:  # no program is built
            values = traced.graph.values
            self._race.bounds[self._problem.mesh] = computing.products_seconds(grouping, rules, values, cluster)
        self._time_limit = time_limit

    @functools.cached_property
    def _least(self) -> float:
        """Seconds that no plan of any memory undercuts, of the program as it is bounded before it is solved."""
        self._race.enter(self._problem, several=True)
        return self._race.free

    @functools.cached_property
    def _solved(self) -> Race:
        race = self._race
        if not race.tried[0][0].fits:
            race.weigh([self._problem], Deadline(self._time_limit))  # takes a tenth of proving that nothing fits
        if race.least is None:
            race.run(Deadline(self._time_limit))
        return race

    def found(self, below: float) -> Found:
        """The best plan.

        Args:
          below: seconds that the method is to undercut, if need be in another way to run the step: where no plan of any
            memory does, none is looked for.

        Raises:
          Beaten: no plan within the budget was found below the cutoff.
        """
        if self._race.overflows or not self.may_undercut(below) or self._solved.best is None:
            raise self._race.beaten()
        return self._race.found()

    def may_undercut(self, seconds: float) -> bool:
        """Whether a plan of some memory may take less than so many seconds, by the bound of the program."""
        return self._least < self._race.speedup * seconds

    @property
    def bounds(self) -> Bounds:
        """Of the mesh, as far as that is known."""
        return dict(self._race.bounds)


def is_within(traced: Traced, grouping: Grouping, cluster: Cluster, method: Method, shared: tables.Shared) -> bool:
    """Whether the plans of a method are among those of the program with all choices on the same mesh of one axis.

    They are where the method tells no groups apart that are tied else, and leaves no axis idle where products hold
    examples: its strategies are some of those there are (`strategies.heavy_strategies`).

    Raises:
      OptionError: the method cannot be applied.
    """
    ((_, allowed),) = limits.admitted(traced, grouping, cluster, method, facts=shared.facts)
    if allowed.operations is not None:
        groups = [grouping.groups[index] for index in shared.facts.examples]
        products = [group for group in groups if group.kind == "heavy" and grouping.ops[group.ops[0]].name in PRODUCTS]
        if not all(map(allowed.operations.fills, products)):
            return False
    return sum(1 for _ in strategies.classes(grouping, allowed)) == len(grouping.classes)


def unsearched(
    traced: Traced, grouping: Grouping, cluster: Cluster, method: Method, *, budget: float, known: Sequence[Plain],
    shared: tables.Shared, settled: Callable[[Found], float],
) -> Found:  # fmt: skip
    """The best of some known plans of a method, where its meshes are not searched.

    Its bound is that of equal parts on all devices (`computing.at_peak`).
    """
    meshes = [mesh for mesh, _ in limits.admitted(traced, grouping, cluster, method)]
    race = _race(shared, cluster, method, meshes, budget, math.inf, Lessons(), settled)
    race.begin_with(known)
    _, first = known[0]
    race.at_peak = computing.at_peak(shared, MeshCost(cluster, first.mesh), first.space)
    return race.found()


def _race(
    shared: tables.Shared, cluster: Cluster, method: Any, meshes: Sequence[LogicalMesh], budget: float, cutoff: float,
    lessons: Lessons, settled: Callable[[Found], float],
) -> Race:  # fmt: skip
    """A race of some meshes, by the seconds of two streams where communication hides behind computing."""
    in_equal_parts = tables.in_equal_parts(shared, cluster.num_devices)
    entry = type(method).__name__, budget, cutoff, meshes, lessons, in_equal_parts
    if cluster.overlaps:
        return OverlappedRace(*entry, settled, Hiding(shared.traced, cluster.hides))
    return Race(*entry)


def _nothing_left(race: Race) -> Found:
    """What is known, where no mesh can undercut it or the cutoff.

    Raises:
      Beaten: nothing is.
    """
    if race.best is None:
        raise race.beaten()
    return race.found()


def _all(
    traced: Traced, race: Race, waiting: list[Problem], cluster: Cluster, cutoff: float, time_limit: float,
    progress: Callable[[str, int, int], None], deadline: Deadline,
) -> Found:  # fmt: skip
    """The rest of a search: all meshes. Raises as `search`."""
    bounding, count = deadline.within(_BOUNDING * deadline.left), len(race.meshes)
    late: list[Problem] = []
    while waiting and (deadline.over or not bounding.over):  # what is not entered at the end is told why
        problem = waiting.pop(0)
        refusal = race.refusal(problem.mesh, deadline)
        if not refusal:
            progress("mesh shapes bounded", len(race.tried), count)
            race.enter(problem, several=True)
        late += [problem] * (refusal == LATE)
    waiting = late + waiting
    race.run(deadline.within(time_limit), progress)
    if race.best is None and math.isfinite(cutoff):
        race.weigh([problem for _, problem, _ in race.tried], deadline)
        raise race.beaten(tried_all=not waiting)
    if race.best is None:
        _take_least(traced, race, cluster, deadline.within(time_limit))
    again = functools.partial(_all, traced, race, waiting, cluster, cutoff, time_limit, progress)
    return race.found(again if waiting or race.is_late else None)


_BOUNDING = 0.4  # of the time, until when further mesh shapes are built
_PROVEN = 2e-2  # relative difference to its bound, up to which a budget is called the smallest
_FIRST = 0.15  # of the time, for the first shapes where time is short or ways are compared
_SHORT = 0.1  # of the time: if building all programs takes more, some may remain unsolved


def _problems(
    traced: Traced, grouping: Grouping, rules: Mapping[Any, Rule], cluster: Cluster, method: Any, *, budget: float,
    shared: tables.Shared, pins: Pins = NO_PINS, wishes: Wishes = NO_WISHES,
) -> list[Problem]:  # fmt: skip
    """The programs of a method on each mesh shape, yet to be built."""
    banned, out = bans.bans(traced, grouping, wishes.forbidden), []
    for mesh, allowed in limits.admitted(traced, grouping, cluster, method, wishes, pins, facts=shared.facts):
        cost, known = MeshCost(cluster, mesh), {"budget": budget, "allowed": allowed, "bans": banned, "shared": shared}
        build = functools.cache(functools.partial(strategies.build, traced, grouping, rules, cost, **known))
        at_peak = functools.partial(computing.at_peak, shared, cost)
        out.append(Problem(mesh, cluster.platform, build, at_peak))
    return out


def _take_least(traced: Traced, race: Race, cluster: Cluster, deadline: Deadline) -> None:
    """Where no plan was found, takes the one of the least memory if that fits.

    Raises:
      InfeasibleError: it does not; says what binds, the smallest budget that works as far as the time allows to find
        it, and what would fit.
    """
    smallest, where, tried, proven = math.inf, race.tried[0][1].mesh, race.tried, True
    ways = (False,) if cluster.platform in strategies.MERGING else (False, True)
    for regather in ways:
        for number, (_, problem, space) in enumerate(tried):
            if number and deadline.over:
                proven = False
                break
            own = problem.build(regather=True) if regather else space
            peak, solution = solve.minimal_budget(own.program, gap=1e-2)
            if peak <= race.budget:
                race.take(problem, own, replace(solution, status="feasible", bound=min(solution.bound, race.free)))
                return
            if peak < smallest:
                smallest, where = peak, problem.mesh
            proven = proven and math.isinf(solution.bound)
    if math.isinf(smallest) and proven:
        raise InfeasibleError(
            f"method={race.method} admits no sharding of this step on {cluster.num_devices} devices, whatever the "
            "memory: what it fixes of arguments and operations contradicts itself. Use method='auto', or fix less "
            "(constrain, allow, forbid)."
        )
    if math.isinf(smallest):
        raise InfeasibleError(
            f"no sharding within memory_per_device={units.exact_bytes(race.budget)} was found; allow more "
            "(search_time_limit), or more memory."
        )
    raise _too_small(traced, cluster, race.budget, Least(smallest, smallest, where))


def _too_small(traced: Traced, cluster: Cluster, budget: float, least: Least) -> InfeasibleError:
    """What binds, the smallest budget that works as far as it is known, on which mesh, and what would fit."""
    values, inputs = traced.graph.values, traced.graph.block.inputs
    sizes = [(values[v].nbytes, shown(a.path)) for v, a in zip(inputs, traced.arguments, strict=False)]
    leaves = sorted(sizes, reverse=True)[:5]
    largest = ", ".join(f"{path} ({units.nbytes(size)})" for size, path in leaves)
    total = sum(traced.graph.values[v].nbytes for v in traced.graph.block.inputs)
    return InfeasibleError(
        f"memory_per_device={units.exact_bytes(budget)} is too small: the smallest budget that works on one mesh is "
        f"{_smallest(least)} per device, on a mesh of {' x '.join(map(str, least.mesh.shape))}. The "
        f"arguments alone take {units.nbytes(total)} before they are sharded over {cluster.num_devices} devices; the "
        f"largest of them: {largest}. A larger budget, more devices, rematerialisation "
        f"(jax.checkpoint around a layer) or a smaller batch would fit.",
        math.ceil(least.peak) if math.isfinite(least.peak) else None,
    )


def _smallest(least: Least) -> str:
    """The smallest budget that works: exactly, or between which bytes it is, as far as the time allowed to find it."""
    if least.peak <= least.bound * (1 + _PROVEN):
        return units.exact_bytes(math.ceil(least.peak))
    known = f"at least {units.exact_bytes(math.ceil(least.bound))}"
    return f"{known} and at most {units.exact_bytes(math.ceil(least.peak))}" if math.isfinite(least.peak) else known
