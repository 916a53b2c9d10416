"""Candidates of one mesh: configurations, the integer program of each mesh shape, and textbook methods.

A configuration is expanded into one program for each mesh shape, and a program first into itself, built and bounded,
then into its solution. More micro-batches and more rematerialisation are candidates from when memory binds: a program
has no choice within the budget, or a slower one than without it. They inherit the bounds of every configuration that
they only add to (`search.configs`). Textbook methods are floors of every search: a program of few choices each, on the
mesh of one axis. Their first plan makes an incumbent; the others wait, once they are bounded, in the order of bounds.

Where communication overlaps with computation (`Cluster.overlaps`), the seconds of a plan are those of two streams, and
no sum over choices. One stream takes at most twice as long (`MAX_SPEEDUP`), so half of a bound of the sum is a bound;
each program is solved at full prices and with hideable communication at a share of its price (`sharding.kinds`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial

from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.strategy import Solution
from alpa_lite.methods import Auto, DataParallel, Method, Sharded, TensorParallel, Zero
from alpa_lite.passes.layers.rematerialisation import NOTHING, Remat
from alpa_lite.passes.microbatches.loop import state_bytes
from alpa_lite.passes.search import best_first, configs
from alpa_lite.passes.search.best_first import Candidate, Expansion, FoundPlan
from alpa_lite.passes.search.configs import Analyses, AnalyzedStep, ExecutionConfig, next_feasible_microbatches
from alpa_lite.passes.sharding import costs, mesh_program
from alpa_lite.passes.sharding.kinds import Hiding
from alpa_lite.passes.sharding.mesh_program import MeshProgram, MeshSolution, Solved
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.sharding.textbook import least_state, may_be_cut
from alpa_lite.passes.stages import planning
from alpa_lite.plan.decisions import Candidate as Row

MAX_SPEEDUP = 2.0
"""How many times faster two streams are than one at most: each does one thing at a time."""

IMPROVEMENTS = 2
"""Rounds of sweeps that bound a program before it is solved: mostly within a few percent of the optimum."""

UNKNOWN_COMMUNICATION = 1.3
"""Estimated ratio of the seconds of a step to those of its products, before any program is bounded."""

MAX_COMPUTE_RATIO = 1.5
"""The most by which a step is estimated to compute longer than its roofline in equal parts on all devices."""

OPTIMISM = 0.9
"""Share of the seconds of the best mesh known that another mesh of a configuration is estimated to take."""

LAST = 1e30
"""Estimated seconds of plans that are not expected to fit: they are tried if no others do."""

HALVINGS = 3
"""How often the number of recomputed layers is bisected."""

BASELINES: Mapping[str, DataParallel | Zero | TensorParallel] = {
    "Zero(2)": Zero(stage=2),
    "DataParallel": DataParallel(),
    "Zero(1)": Zero(stage=1),
    "Zero(3)": Zero(stage=3),
    "TensorParallel": TensorParallel(),
}
"""The textbook methods by their names among the candidates of a plan."""


@dataclass(frozen=True, eq=False)
class DecidedMesh:
    """A plan of one mesh, not lowered: the step in its configuration, and the strategy of every group."""

    step: AnalyzedStep
    found: MeshSolution


@dataclass(eq=False)
class Record:
    """The facts about a configuration that are proven so far.

    Attributes:
      bounds: mesh -> seconds that none of its plans takes less of, whatever the budget.
      peak: the same for every mesh: an equal part of the work on each device, at peak rates.
      least: bytes per device that no plan of the meshes that exceed the budget takes less of; 0 if unknown.
      may_fit: whether a mesh was weighed that may not exceed it.
    """

    bounds: defaultdict[LogicalMesh, float] = field(default_factory=lambda: defaultdict(float))
    peak: float = 0.0
    least: float = 0.0
    may_fit: bool = False


@dataclass(eq=False)
class Family:
    """The plans of one mesh that one method admits, by configuration.

    Attributes:
      name: of the method, among the candidates of a plan.
      order: of textbook methods. textbook: which of them it is; None for the method of the request.
      state: bytes per device that the state takes at least.
      opened: configurations that are candidates, with an interval of recomputed layers: see `OneMeshSearch.open`.
    """

    name: str
    state: float
    order: int = 0
    textbook: DataParallel | Zero | TensorParallel | None = None
    records: defaultdict[ExecutionConfig, Record] = field(default_factory=lambda: defaultdict(Record))
    opened: dict[ExecutionConfig, tuple[int, int] | None] = field(default_factory=dict)

    @property
    def first(self) -> ExecutionConfig:
        """The configuration that was opened first."""
        return next(iter(self.opened))

    @property
    def label(self) -> str:
        """The family in names of candidates."""
        return self.name if self.textbook else "one mesh"

    @property
    def cuts_examples(self) -> bool:
        """Whether each of its micro-batches has at least one example for each device."""
        return isinstance(self.textbook, DataParallel | Zero)


class OneMeshSearch:
    """Candidates of one mesh, and the state that they share: analyses, proven bounds, and known plans.

    Attributes:
      own: the plans of the request's method. products: seconds that no plan takes less of.
      speedup: of two streams over one, at most; 1 if nothing overlaps.
      refused: why the step cannot be cut into some number of micro-batches.
    """

    def __init__(self, run: Passes, step: Step, request: PlanRequest) -> None:
        self.run, self.step, self.request = run, step, request
        self.analyses = Analyses(run, step, request)
        floor = state_bytes(step.traced) / request.cluster.num_devices
        self.own = Family(type(request.method).__name__, floor)
        self.products = costs.products_bound(step.traced, step.rules, request.cluster)
        self.speedup = MAX_SPEEDUP if request.cluster.overlaps else 1.0
        self.found: list[FoundPlan] = []
        self.refused: MicrobatchError | None = None
        self._is_contained = cache(self._contains)
        self._rows: defaultdict[ExecutionConfig, dict[tuple[str, tuple[int, ...]], Row]] = defaultdict(dict)

    def roots(self) -> list[Candidate]:
        """The plans of the request's method, and the textbook methods, unless the request constrains plans itself."""
        request, count = self.request, self.request.num_microbatches or 1
        said = request.pins or request.wishes.leaves or request.wishes.forbidden or request.wishes.mesh
        families: list[Family] = []
        if not said and request.method in (Auto(), Sharded()) and request.cluster.num_devices > 1:
            for order, (name, method) in enumerate(BASELINES.items()):
                state = max(self.own.state, least_state(self.step.traced, method, request.cluster.num_devices))
                families.append(Family(name, state, order, method))
        floors = [candidate for family in families for candidate in self.open(family, ExecutionConfig(count))]
        return floors + self.open(self.own, ExecutionConfig(count, Remat(request.remat[0])))

    def bound(self, family: Family, config: ExecutionConfig, mesh: LogicalMesh) -> float:
        """Seconds that no plan of a configuration takes less of on a mesh, by all that it only adds to."""
        records, own = [*family.records.items()], self.own.records
        if family.textbook and config in own and mesh in own[config].bounds and self._is_contained(family, config):
            records += own.items()
        known = (record for other, record in records if config.only_adds_to(other))
        least = max((max(record.peak, record.bounds.get(mesh, 0.0)) for record in known), default=0.0)
        return max(self.products, least / self.speedup)

    def bound_of(self, config: ExecutionConfig) -> float:
        """Seconds that no plan of a configuration takes less of on the meshes weighed; 0 if there are none."""
        return min((self.bound(self.own, config, mesh) for mesh in self.own.records[config].bounds), default=0.0)

    def _contains(self, family: Family, config: ExecutionConfig) -> bool:
        """Whether the unrestricted program on the mesh of one axis has all plans of a textbook method."""
        step, cluster = self.analyses.of(config), self.request.cluster
        assert family.textbook is not None
        return mesh_program.has_all_plans_of(step.grouped, cluster, family.textbook)

    def compute_seconds(self) -> float:
        """Estimated seconds for which a step computes on all devices, by the plans of one mesh and their rooflines.

        A plan in far too many micro-batches, or that replicates most of it, computes for longer than others would.
        """
        peaks = [record.peak for record in self.own.records.values() if record.peak]
        if not peaks:
            return UNKNOWN_COMMUNICATION * self.products
        found = min((plan.value.found.compute_seconds for plan in self.found), default=min(peaks))
        return min(found, MAX_COMPUTE_RATIO * min(peaks))

    def open(
        self, family: Family, config: ExecutionConfig, interval: tuple[int, int] | None = None
    ) -> list[Candidate]:  # fmt: skip
        """All plans of a configuration, unless they are a candidate already.

        `interval`: numbers of recomputed layers that are known to exceed the budget and to fit it.
        """
        if config in family.opened:
            return []
        family.opened[config] = interval
        estimate, expand = partial(self._estimate, family, config), partial(self._expand, family, config)
        return [self._candidate(family, f"{family.label}, {config}", config, (0,), estimate, expand)]

    def _candidate(
        self, family: Family, name: str, config: ExecutionConfig, key: tuple[int, ...],
        estimate: Callable[[], tuple[float, float]], expand: Callable[[float], Expansion],
    ) -> Candidate:  # fmt: skip
        """A candidate; floors come first until there is a plan, then in the order of their bounds."""
        if not family.textbook:
            return Candidate(name, (0, *config.rank), (1, *config.rank, *key), estimate, expand)

        def waiting() -> tuple[float, float]:
            bound, _ = estimate()
            return bound, bound if self.found or config != family.first else 0.0

        key = (0, *config.rank, family.order, *key)
        return Candidate(name, (0, *config.rank), key, waiting, expand, is_floor=True)

    def take(self, step: AnalyzedStep, name: str, found: MeshSolution) -> FoundPlan:
        """A solution as a plan, listed among those of its configuration."""
        seconds = planning.settled(step.grouped, self.request.cluster, found)
        peak, status = int(found.solution.peak), found.solution.status
        self._note(step.config, Row(name, found.mesh.shape, seconds, peak, status))
        plan = FoundPlan((0, *step.config.rank), seconds, DecidedMesh(step, found))
        self.found.append(plan)
        return plan

    def rows(self, chosen: FoundPlan) -> tuple[Row, ...]:
        """The mesh shapes and methods that were compared in the configuration of a plan, which is marked."""
        decided: DecidedMesh = chosen.value
        rows, own = self._rows[decided.step.config].values(), (decided.found.mesh.shape, chosen.seconds)
        mine = next((row for row in rows if (row.mesh_shape, row.step_seconds) == own), None)
        status = {row: "chosen" if row is mine else "slower" for row in rows if row.step_seconds is not None}
        return tuple(replace(row, status=status.get(row, row.status)) for row in rows)

    def fit_or_explain(self) -> FoundPlan:
        """The plan of the least memory, where the search found none that fits.

        Raises:
          InfeasibleError: it does not fit, either; names the tensors that bind and the smallest budget that works.
          MicrobatchError: the step cannot be cut into the given number of micro-batches.
        """
        if not self.own.records:
            assert self.refused is not None
            raise self.refused
        # The least memory: most recomputed, then most micro-batches; the first configuration stands for its kind.
        config = max(self.own.records, key=lambda c: (c.remat.first is None, c.rank[1], c.microbatches))
        analyzed, request = self.analyses.of(config), self.request
        least = mesh_program.minimise_memory(self.programs(analyzed))
        if least is not None and (found := least[1]).solution.peak <= request.budget:
            solution = replace(found.solution, status="feasible")
            return self.take(analyzed, self.own.name, replace(found, solution=solution))
        error = mesh_program.budget_error(self.step.traced, request.cluster, request.budget, least)
        why = f" Micro-batches do not help: {self.refused}" if self.refused else ""
        if config != ExecutionConfig(request.num_microbatches or 1):
            why = f" This is with {config}."
        raise InfeasibleError(f"{error}{why}", error.smallest_budget)

    def _estimate(self, family: Family, config: ExecutionConfig) -> tuple[float, float]:
        """Seconds that no plan of a configuration takes less of; and estimated of its best, by the bounds of others.

        One that saves less memory than another that exceeds the budget is not expected to fit.
        """
        records = family.records
        meshes = {mesh for record in records.values() for mesh in record.bounds}
        least = min((self.bound(family, config, mesh) for mesh in meshes), default=self.products)
        bounded = [(other, record) for other, record in records.items() if record.bounds]
        known = [config.scale(one, r.peak, min(r.bounds.values())) / self.speedup for one, r in bounded]
        unknown = config.scale(ExecutionConfig(), self.products, UNKNOWN_COMMUNICATION * self.products)
        exceeding = [other for other, r in records.items() if r.least and not r.may_fit and other.microbatches > 1]
        if any(other != config and other.only_adds_to(config) for other in exceeding):
            return least, max(least, LAST)
        return least, max(least, min(known, default=unknown))

    def programs(self, step: AnalyzedStep, method: Method | None = None) -> list[MeshProgram]:
        """The programs of a configuration on every mesh that a method admits; on those of the request without one.

        Raises:
          OptionError: the method cannot be applied to the arguments or the number of devices.
        """
        r = self.request
        said = {} if method else {"pins": r.pins, "wishes": r.wishes}
        return mesh_program.mesh_programs(step.grouped, r.cluster, method or r.method, budget=r.budget, **said)

    def _expand(self, family: Family, config: ExecutionConfig, cutoff: float) -> Expansion:
        """One candidate for each mesh shape."""
        del cutoff
        request, method = self.request, family.textbook
        if method and family.state > request.budget:
            return Expansion()
        try:
            step = self.analyses.of(config)
            programs = self.programs(step, method)
        except MicrobatchError as error:
            if request.num_microbatches and not method:
                raise
            self.refused = self.refused or error
            return Expansion()
        except OptionError:
            if method:  # the batch, or a micro-batch, does not divide
                return Expansion()
            raise
        work = 0 if method else best_first.ANALYSIS_PER_OP * sum(1 for _ in step.loop.traced.graph.ops())
        least = step.grouped.peak / request.cluster.num_devices
        if least <= request.budget or (method and not family.cuts_examples and config == family.first):
            return Expansion([self._of_program(family, step, one, n) for n, one in enumerate(programs)], work=work)
        family.records[config].least = least
        for program in programs:
            self._reject(family, config, program, "infeasible")
        return Expansion(self._successors(family, step), work=work)

    def _of_program(
        self, family: Family, step: AnalyzedStep, program: MeshProgram, number: int,
        bounded: solve.SolverState | None = None,
    ) -> Candidate:  # fmt: skip
        """All plans of a configuration on the mesh of that number, with its bound once the program is built."""
        config, shape = step.config, program.mesh.shape

        def estimate() -> tuple[float, float]:
            """If it is not built, as good as the best of its configuration, and as unlikely to fit."""
            bound = self.bound(family, config, program.mesh)
            if bounded is not None:
                return bound, OPTIMISM * bound
            least, (_, expected) = family.records[config].least, self._estimate(family, config)
            return bound, OPTIMISM * max(bound, expected) * max(1.0, least / self.request.budget)

        def expand(cutoff: float) -> Expansion:
            if bounded is None:
                return self._bound(family, step, program, number)
            return self._solve(family, step, program, bounded, cutoff)

        name = f"{family.label} of {' x '.join(map(str, shape))}, {config}"
        return self._candidate(family, name, config, (1, bounded is None, len(shape), number), estimate, expand)

    def _bound(self, family: Family, step: AnalyzedStep, program: MeshProgram, number: int) -> Expansion:
        """The same mesh with its program built and bounded; or configurations that use less memory, if none fits."""
        config, mesh, record = step.config, program.mesh, family.records[step.config]
        space = self.run("sharding", program.build)
        bound = solve.SolverState(space.program)
        if not family.textbook:
            plans = [plan.value.found for plan in self.found if plan.value.step is step]
            choices = [mesh_program.map_choice_to(plan, space) for plan in plans if plan.mesh == mesh]
            bound.choices += [choice for choice in choices if choice is not None]
        for _ in range(IMPROVEMENTS):
            self.run("sharding", bound.improve)
        record.peak = max(record.peak, program.peak_seconds(space))
        record.bounds[mesh] = max(record.bounds[mesh], bound.seconds)
        work = bound.work + _build_work(space)
        if not bound.fits and self.run("sharding", self._exceeds_budget, family, config, program):
            self._reject(family, config, program, "infeasible")
            return Expansion(self._successors(family, step), work=work)
        record.may_fit = True
        self._reject(family, config, program, "cutoff")
        return Expansion([self._of_program(family, step, program, number, bound)], work=work)

    def _solve(
        self, family: Family, step: AnalyzedStep, program: MeshProgram, bounded: solve.SolverState, cutoff: float
    ) -> Expansion:  # fmt: skip
        """The solution of a program, and configurations that use less memory where memory binds."""
        bounds, mesh = family.records[step.config].bounds, program.mesh
        limit = math.inf if self.request.cluster.overlaps else cutoff  # communication may be hidden
        found = self.run("sharding", mesh_program.solve_within_budget, program, self.request.budget, limit, bounded)
        bounds[mesh] = max(bounds[mesh], found.free_bound)
        least, work, solution = found.solution.bound / self.speedup, found.work, found.solution
        if not solution.choice:
            if solution.status != "cutoff":
                self._reject(family, step.config, program, solution.status)
                self._exceeds_budget(family, step.config, program)
            return Expansion(self._successors(family, step), bound=least, work=work)
        hidden = self._hidden(step, found) if self.request.cluster.overlaps and not family.textbook else []
        plans = [self.take(step, family.name, MeshSolution(found.space, one)) for one in (solution, *hidden)]
        more = self._successors(family, step) if _is_slowed(found) else []
        work += sum(other.work for other in hidden)
        return Expansion([*more, *self._halve(family, step, fits=True)], plans, least, work)

    def _hidden(self, step: AnalyzedStep, found: Solved) -> list[Solution]:
        """The solution of the program with hideable communication at a share of its price, at full prices."""
        cheaper = Hiding(step.loop.traced, self.request.cluster.hides).cheaper(found.space)
        budget = self.request.budget
        other = solve.solve(replace(cheaper, budget=None), start=found.solution)
        if other.choice and other.peak > budget:
            other = solve.solve(replace(cheaper, budget=budget), start=found.solution)
        if not other.choice:
            return []
        objective, _ = solve.evaluate(found.space.program, other.choice)
        return [replace(other, objective=objective, bound=found.solution.bound)]

    def _successors(self, family: Family, step: AnalyzedStep) -> list[Candidate]:
        """The configurations that use less memory than one in which memory binds; textbook plans recompute nothing."""
        config, request, least = step.config, self.request, family.records[step.config].least
        out: list[Candidate] = []
        more = config.microbatches
        if family.state < request.budget and request.num_microbatches is None:
            more = next_feasible_microbatches(more, max(least, family.state), family.state, request.budget)
            whole = self.analyses.of(ExecutionConfig()).grouped if family.cuts_examples else None
            if whole is None or may_be_cut(whole, more * request.cluster.num_devices):
                out += self.open(family, replace(config, microbatches=more))
        if family.textbook:
            return out
        for choice in request.remat:
            if config.remat == NOTHING and choice != "none":
                fits = max(1, more // configs.REMAT_MEMORY_FACTOR[choice]) if least else config.microbatches
                out += self.open(family, ExecutionConfig(request.num_microbatches or fits, Remat(choice)))
        return out + self._halve(family, step, fits=False)

    def _halve(self, family: Family, step: AnalyzedStep, *, fits: bool) -> list[Candidate]:
        """Rematerialisation of fewer layers than in a plan that fits, by bisection."""
        config, remat, total = step.config, step.config.remat, step.layers
        if remat == NOTHING or len(self.request.remat) == 1 or total < 2 or (remat.first is None and not fits):
            return []
        low, high = family.opened[config] or (0, total)
        own = remat.first[0] if remat.first else total
        low, high = (low, own) if fits else (own, high)
        middle = (low + high) // 2
        if middle in (low, high) or (high - low) * 2**HALVINGS < 2 * total:
            return []
        return self.open(family, replace(config, remat=Remat(remat.choice, (middle, total))), (low, high))

    def _exceeds_budget(self, family: Family, config: ExecutionConfig, program: MeshProgram) -> bool:
        """Whether no choice of a program fits the budget, which is recorded."""
        bound = mesh_program.peak_bound(program)
        if bound <= self.request.budget or math.isinf(bound):
            return math.isinf(bound)
        record = family.records[config]
        record.least = min(record.least or bound, bound)
        return True

    def _reject(self, family: Family, config: ExecutionConfig, program: MeshProgram, status: str) -> None:
        """Lists a mesh shape without a plan, unless it is of a textbook method."""
        if not family.textbook:
            self._note(config, Row(family.name, program.mesh.shape, None, None, status))

    def _note(self, config: ExecutionConfig, row: Row) -> None:
        """Lists the result of a mesh shape or method, unless a faster plan is already listed for it."""
        rows, key, seconds = self._rows[config], (row.method, row.mesh_shape), row.step_seconds
        before = rows[key].step_seconds if key in rows else None
        if before is None or (seconds is not None and seconds < before):
            rows[key] = row


def _is_slowed(found: Solved) -> bool:
    """Whether the budget makes a solution slower than one without it."""
    return found.solution.objective > found.free_bound * (1 + mesh_program.NEAR_FREE)


def _build_work(space: Space) -> int:
    """The work of building a program."""
    cells = sum(transfer.cost.size for transfer in space.program.transfers)
    strategies = sum(len(node.strategies) for node in space.nodes)
    return best_first.BUILD_PER_CELL * cells + best_first.BUILD_PER_STRATEGY * strategies
