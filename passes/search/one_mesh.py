"""Candidates of one mesh: configurations, the integer program of each mesh shape, and textbook methods.

A configuration is expanded into one program for each mesh shape, and a program first into itself, built and bounded,
then into its solution. More micro-batches and more rematerialisation are candidates from when memory binds: a program
has no choice within the budget, or a slower one than without it. They inherit the bounds of every configuration that
they only add to (`search.configs`). Textbook methods are floors of every search, each a program of few choices.

Where communication overlaps with computation (`Cluster.overlaps`), the seconds of a plan are those of two streams, and
no sum over choices. One stream takes at most twice as long (`MAX_SPEEDUP`), so half of a bound of the sum is a bound;
each program is solved at full prices and with hideable communication at a share of its price (`sharding.hiding`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from alpa_lite.asked import PlanRequest, Step
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from alpa_lite.layout import LogicalMesh
from alpa_lite.methods import Auto, DataParallel, Method, Sharded, TensorParallel, Zero
from alpa_lite.passes.layers.remat import NOTHING, Remat
from alpa_lite.passes.microbatches import numbers
from alpa_lite.passes.search import best_first, configs
from alpa_lite.passes.search.best_first import Candidate, Expansion, FoundPlan
from alpa_lite.passes.search.configs import Analyses, AnalyzedStep, ExecutionConfig, next_feasible_microbatches
from alpa_lite.passes.sharding import computing, mesh_program, tables
from alpa_lite.passes.sharding.hiding import Hiding
from alpa_lite.passes.sharding.mesh_program import MeshProgram, MeshSolution, Solved
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.sharding.textbook import least_state, may_be_cut
from alpa_lite.passes.stages import planning
from alpa_lite.records import Candidate as Row
from alpa_lite.runner import Passes
from alpa_lite.strategy import Solution

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
class _Record:
    """The facts about a configuration that are proven so far.

    Attributes:
      bounds: mesh -> seconds that none of its plans takes less of, whatever the budget.
      peak: the same for every mesh: an equal part of the work on each device, at peak rates.
      least: bytes per device that no plan of the meshes weighed takes less of; 0 if unknown.
      rows: the mesh shapes and methods compared, by name and shape.
    """

    bounds: defaultdict[LogicalMesh, float] = field(default_factory=lambda: defaultdict(float))
    peak: float = 0.0
    least: float = 0.0
    rows: dict[tuple[str, tuple[int, ...]], Row] = field(default_factory=dict)


class OneMeshSearch:
    """Candidates of one mesh, and the state that they share: analyses, proven bounds, and known plans.

    Attributes:
      floor: bytes per device of the state in equal parts. products: seconds that no plan takes less of.
      speedup: of two streams over one, at most; 1 if nothing overlaps.
      refused: why the step cannot be cut into some number of micro-batches.
    """

    def __init__(self, run: Passes, step: Step, request: PlanRequest) -> None:
        self.run, self.step, self.request = run, step, request
        self.analyses = Analyses(run, step, request)
        self.floor = numbers.state_bytes(step.traced) / request.cluster.num_devices
        self.products = computing.products_bound(step.traced, step.rules, request.cluster)
        self.speedup = MAX_SPEEDUP if request.cluster.overlaps else 1.0
        self.records: dict[ExecutionConfig, _Record] = defaultdict(_Record)
        self.found: list[FoundPlan] = []
        self.refused: MicrobatchError | None = None
        self._method_name = type(request.method).__name__
        self._intervals: dict[ExecutionConfig, tuple[int, int] | None] = {}  # of opened ones: see `_halve`

    def bound(self, config: ExecutionConfig, mesh: LogicalMesh) -> float:
        """Seconds that no plan of a configuration takes less of on a mesh, by all that it only adds to."""
        known = (record for other, record in self.records.items() if config.only_adds_to(other))
        least = max((max(record.peak, record.bounds.get(mesh, 0.0)) for record in known), default=0.0)
        return max(self.products, least / self.speedup)

    def compute_seconds(self) -> float:
        """Estimated seconds for which a step computes on all devices, by the plans of one mesh and their rooflines.

        A plan in far too many micro-batches, or that replicates most of it, computes for longer than others would.
        """
        peaks = [record.peak for record in self.records.values() if record.peak]
        if not peaks:
            return UNKNOWN_COMMUNICATION * self.products
        found = min((plan.value.found.compute_seconds for plan in self.found), default=min(peaks))
        return min(found, MAX_COMPUTE_RATIO * min(peaks))

    def open(self, config: ExecutionConfig, interval: tuple[int, int] | None = None) -> list[Candidate]:
        """All plans of a configuration, unless they are a candidate already.

        `interval`: numbers of recomputed layers that are known to exceed the budget and to fit it.
        """
        if config in self._intervals:
            return []
        self._intervals[config] = interval
        rank, estimate = config.rank, partial(self._estimate, config)
        return [Candidate(f"one mesh, {config}", (0, *rank), (1, *rank, 0), estimate, lambda _: self._expand(config))]

    def solve_program(self, program: MeshProgram, space: Space, known: solve.Known, cutoff: float) -> Solved:
        """The best choice of a program within the budget; below the cutoff, unless communication may be hidden."""
        limit = math.inf if self.request.cluster.overlaps else cutoff
        solved = mesh_program.solve_within_budget
        return self.run("sharding", solved, program, space, self.request.budget, limit, known)

    def take(self, step: AnalyzedStep, name: str, mesh: LogicalMesh, space: Space, solution: Solution) -> FoundPlan:
        """A solution as a plan, listed among those of its configuration."""
        found = MeshSolution(mesh, space, solution, mesh_program.choice_of(space, solution))
        seconds = planning.settled(step.loop.traced, step.groups, step.rules, self.request.cluster, found)
        self._note(step.config, Row(name, mesh.shape, seconds, int(solution.peak), solution.status))
        plan = FoundPlan((0, *step.config.rank), seconds, DecidedMesh(step, found))
        self.found.append(plan)
        return plan

    def rows(self, chosen: FoundPlan) -> tuple[Row, ...]:
        """The mesh shapes and methods that were compared in the configuration of a plan, which is marked."""
        decided: DecidedMesh = chosen.value
        rows, own = self.records[decided.step.config].rows.values(), (decided.found.mesh.shape, chosen.seconds)
        mine = next((row for row in rows if (row.mesh_shape, row.step_seconds) == own), None)
        status = {row: "chosen" if row is mine else "slower" for row in rows if row.step_seconds is not None}
        return tuple(replace(row, status=status.get(row, row.status)) for row in rows)

    def fit_or_explain(self) -> FoundPlan:
        """The plan of the least memory, where the search found none that fits.

        Raises:
          InfeasibleError: it does not fit, either; names the tensors that bind and the smallest budget that works.
          MicrobatchError: the step cannot be cut into the given number of micro-batches.
        """
        if not self.records:
            assert self.refused is not None
            raise self.refused
        # The least memory: most recomputed, then most micro-batches; the first configuration stands for its kind.
        config = max(self.records, key=lambda c: (c.remat.first is None, c.rank[1], c.microbatches))
        analyzed, request = self.analyses.of(config), self.request
        least = mesh_program.minimise_memory(self.programs(analyzed))
        if least is not None and least.peak <= request.budget:
            solution = replace(least.solution, status="feasible")
            return self.take(analyzed, self._method_name, least.program.mesh, least.space, solution)
        error = mesh_program.budget_error(self.step.traced, request.cluster, request.budget, least)
        why = f" Micro-batches do not help: {self.refused}" if self.refused else ""
        if config != ExecutionConfig(request.num_microbatches or 1):
            why = f" This is with {config}."
        raise InfeasibleError(f"{error}{why}", error.smallest_budget)

    def _estimate(self, config: ExecutionConfig) -> tuple[float, float]:
        """Seconds that no plan of a configuration takes less of; and estimated of its best, by the bounds of others."""
        meshes = {mesh for record in self.records.values() for mesh in record.bounds}
        least = min((self.bound(config, mesh) for mesh in meshes), default=self.products)
        bounded = [(other, record) for other, record in self.records.items() if record.bounds]
        known = [config.scale(one, r.peak, min(r.bounds.values())) / self.speedup for one, r in bounded]
        unknown = config.scale(ExecutionConfig(), self.products, UNKNOWN_COMMUNICATION * self.products)
        return least, max(least, min(known, default=unknown))

    def programs(self, step: AnalyzedStep, method: Method | None = None) -> list[MeshProgram]:
        """The programs of a configuration on every mesh that a method admits; on those of the request without one.

        Raises:
          OptionError: the method cannot be applied to the arguments or the number of devices.
        """
        r = self.request
        said = {} if method else {"pins": r.pins, "wishes": r.wishes}
        return mesh_program.mesh_programs(
            step.loop.traced, step.groups, step.rules, r.cluster, method or r.method, budget=r.budget,
            shared=step.shared, **said,
        )  # fmt: skip

    def _expand(self, config: ExecutionConfig) -> Expansion:
        """One candidate for each mesh shape."""
        request = self.request
        try:
            step = self.analyses.of(config)
            programs = self.programs(step)
        except MicrobatchError as error:
            if request.num_microbatches:
                raise
            self.refused = self.refused or error
            return Expansion()
        work = best_first.ANALYSIS_PER_OP * sum(1 for _ in step.loop.traced.graph.ops())
        least = tables.in_equal_parts(step.shared, request.cluster.num_devices)
        if least <= request.budget:
            return Expansion([self._of_program(step, one, n) for n, one in enumerate(programs)], work=work)
        self.records[config].least = least
        for program in programs:
            self._reject(config, program, "infeasible")
        return Expansion(self._successors(step), work=work)

    def _of_program(
        self, step: AnalyzedStep, program: MeshProgram, number: int, bounded: solve.Bound | None = None
    ) -> Candidate:  # fmt: skip
        """All plans of a configuration on the mesh of that number, with its bound once the program is built."""
        config, shape = step.config, program.mesh.shape

        def estimate() -> tuple[float, float]:
            """If it is not built, as good as the best of its configuration, and as unlikely to fit."""
            bound = self.bound(config, program.mesh)
            if bounded is not None:
                return bound, OPTIMISM * bound
            least = self.records[config].least if config in self.records else 0.0
            return bound, OPTIMISM * max(bound, self._estimate(config)[1]) * max(1.0, least / self.request.budget)

        def expand(cutoff: float) -> Expansion:
            if bounded is None:
                return self._bound(step, program, number)
            return self._solve(step, program, bounded, cutoff)

        name, rank = f"one mesh of {' x '.join(map(str, shape))}, {config}", config.rank
        return Candidate(name, (0, *rank), (1, *rank, 1, bounded is None, len(shape), number), estimate, expand)

    def _bound(self, step: AnalyzedStep, program: MeshProgram, number: int) -> Expansion:
        """The same mesh with its program built and bounded; or configurations that use less memory, if none fits."""
        config, mesh, record = step.config, program.mesh, self.records[step.config]
        space = self.run("sharding", program.build)
        bound = solve.Bound(space.program)
        known = [plan.value.found for plan in self.found if plan.value.step is step and plan.value.found.mesh == mesh]
        choices = [mesh_program.map_choice_to(plan, space) for plan in known]
        bound.known.choices += [choice for choice in choices if choice is not None]
        for _ in range(IMPROVEMENTS):
            self.run("sharding", bound.improve)
        record.peak = max(record.peak, program.peak_seconds(space))
        record.bounds[mesh] = max(record.bounds[mesh], bound.seconds)
        work = bound.work + _build_work(space)
        if not bound.fits and self.run("sharding", self._exceeds_budget, config, program):
            self._reject(config, program, "infeasible")
            return Expansion(self._successors(step), work=work)
        self._reject(config, program, "cutoff")
        return Expansion([self._of_program(step, program, number, bound)], work=work)

    def _solve(self, step: AnalyzedStep, program: MeshProgram, bounded: solve.Bound, cutoff: float) -> Expansion:
        """The solution of a program, and configurations that use less memory where memory binds."""
        bounds, mesh = self.records[step.config].bounds, program.mesh
        found = self.solve_program(program, program.build(), bounded.known, cutoff)
        bounds[mesh] = max(bounds[mesh], found.free_bound)
        least, work, solution = found.solution.bound / self.speedup, found.work, found.solution
        if not solution.choice:
            if solution.status != "cutoff":
                self._reject(step.config, program, solution.status)
                self._exceeds_budget(step.config, program)
            return Expansion(self._successors(step), bound=least, work=work)
        hidden = self._hidden(step, found) if self.request.cluster.overlaps else []
        plans = [self.take(step, self._method_name, mesh, found.space, one) for one in (solution, *hidden)]
        more = self._successors(step) if _is_slowed(found) else []
        work += sum(other.work for other in hidden)
        return Expansion([*more, *self._halve(step, fits=True)], plans, least, work)

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

    def _successors(self, step: AnalyzedStep) -> list[Candidate]:
        """The configurations that use less memory than one in which memory binds."""
        config, request, least = step.config, self.request, self.records[step.config].least
        out: list[Candidate] = []
        more = config.microbatches
        if self.floor < request.budget and request.num_microbatches is None:
            more = next_feasible_microbatches(more, least, self.floor, request.budget)
            out += self.open(replace(config, microbatches=more))
        for choice in request.remat:
            if config.remat == NOTHING and choice != "none":
                fits = max(1, more // configs.REMAT_MEMORY_FACTOR[choice]) if least else config.microbatches
                out += self.open(ExecutionConfig(request.num_microbatches or fits, Remat(choice)))
        return out + self._halve(step, fits=False)

    def _halve(self, step: AnalyzedStep, *, fits: bool) -> list[Candidate]:
        """Rematerialisation of fewer layers than in a plan that fits, by bisection."""
        config, remat, total = step.config, step.config.remat, step.layers
        if remat == NOTHING or len(self.request.remat) == 1 or total < 2 or (remat.first is None and not fits):
            return []
        low, high = self._intervals[config] or (0, total)
        own = remat.first[0] if remat.first else total
        low, high = (low, own) if fits else (own, high)
        middle = (low + high) // 2
        if middle in (low, high) or (high - low) * 2**HALVINGS < 2 * total:
            return []
        return self.open(replace(config, remat=Remat(remat.choice, (middle, total))), (low, high))

    def _exceeds_budget(self, config: ExecutionConfig, program: MeshProgram) -> bool:
        """Whether no choice of a program fits the budget, which is recorded."""
        bound, _ = mesh_program.peak_bound(program)
        if bound <= self.request.budget or math.isinf(bound):
            return math.isinf(bound)
        record = self.records[config]
        record.least = min(record.least or bound, bound)
        return True

    def _reject(self, config: ExecutionConfig, program: MeshProgram, status: str) -> None:
        """Lists a mesh shape without a plan."""
        self._note(config, Row(self._method_name, program.mesh.shape, None, None, status))

    def _note(self, config: ExecutionConfig, row: Row) -> None:
        """Lists the result of a mesh shape or method, unless a faster plan is already listed for it."""
        rows, key, seconds = self.records[config].rows, (row.method, row.mesh_shape), row.step_seconds
        before = rows[key].step_seconds if key in rows else None
        if before is None or (seconds is not None and seconds < before):
            rows[key] = row


def baselines(search: OneMeshSearch) -> list[Candidate]:
    """The textbook methods, where the request admits all of them and constrains nothing that they do not respect."""
    request = search.request
    said = request.pins or request.wishes.leaves or request.wishes.forbidden or request.wishes.mesh
    if said or request.method not in (Auto(), Sharded()) or request.cluster.num_devices == 1:
        return []
    config = ExecutionConfig(request.num_microbatches or 1)
    return [_Baseline(search, name, config).candidate for name in BASELINES]


@dataclass(frozen=True, eq=False)
class _Baseline:
    """All plans of a textbook method in a configuration without rematerialisation.

    By the method's program with fewer micro-batches, none takes less than `least` seconds.
    """

    search: OneMeshSearch
    name: str
    config: ExecutionConfig
    least: float = 0.0

    @property
    def candidate(self) -> Candidate:
        """Before everything else, fewer micro-batches before more."""
        rank, number = self.config.rank, list(BASELINES).index(self.name)
        return Candidate(f"{self.name}, {self.config}", (0, *rank), (0, *rank, number), self._estimate, self._expand)

    def _estimate(self) -> tuple[float, float]:
        """Floors come first; further micro-batches, once there is a plan, in the order of their bounds."""
        search, own = self.search, self.least
        bounds = search.records[self.config].bounds if self.config in search.records else {}
        mesh = next((mesh for mesh in bounds if len(mesh.shape) == 1), None)
        if mesh is not None and self._is_contained:
            own = max(own, search.bound(self.config, mesh))
        return own, own if search.found else 0.0

    @cached_property
    def _is_contained(self) -> bool:
        """Whether the unrestricted program on the mesh of one axis has all plans of the method: computed once."""
        method, cluster = BASELINES[self.name], self.search.request.cluster
        try:
            step = self.search.analyses.of(self.config)
            return mesh_program.has_all_plans_of(step.loop.traced, step.groups, cluster, method, step.shared)
        except (MicrobatchError, OptionError):
            return False

    def _expand(self, cutoff: float) -> Expansion:
        """The best plan of the method, and the method with more micro-batches where memory binds."""
        search, request, method = self.search, self.search.request, BASELINES[self.name]
        devices, count = request.cluster.num_devices, self.config.microbatches
        if least_state(search.step.traced, method, devices) > request.budget:
            return Expansion()
        try:
            if count > 1 and request.num_microbatches is None and not isinstance(method, TensorParallel):
                facts = search.analyses.of(ExecutionConfig()).shared.facts
                if not may_be_cut(facts, count * devices):
                    return Expansion()
            analyzed = search.analyses.of(self.config)
            (program,) = search.programs(analyzed, method)
        except (MicrobatchError, OptionError):  # the batch, or a micro-batch, does not divide
            return Expansion()
        needed = tables.in_equal_parts(analyzed.shared, devices)
        if needed > request.budget:
            return Expansion(self._more(0.0, needed))
        space = search.run("sharding", program.build)
        bound = solve.Bound(space.program)
        search.run("sharding", bound.improve)
        work, least = bound.work + _build_work(space), bound.seconds / search.speedup
        if least >= cutoff:
            return Expansion(bound=least, work=work)
        needed = 0.0 if bound.fits else solve.bound_of_peak(space.program)[0]
        if request.budget < needed < math.inf:
            return Expansion(self._more(least, needed), work=work)
        found = search.solve_program(program, space, bound.known, cutoff)
        work, least = work + found.work, max(least, found.free_bound / search.speedup)
        if not found.solution.choice:
            return Expansion(self._more(least), work=work)
        plan = search.take(analyzed, self.name, program.mesh, found.space, found.solution)
        more = self._more(least) if _is_slowed(found) else []
        return Expansion(more, [plan], found.solution.bound / search.speedup, work)

    def _more(self, least: float, needed: float = 0.0) -> list[Candidate]:
        """The method with the next number of micro-batches that may fit, where this one needs so many bytes."""
        search, request = self.search, self.search.request
        floor = max(search.floor, least_state(search.step.traced, BASELINES[self.name], request.cluster.num_devices))
        if request.num_microbatches or floor >= request.budget:
            return []
        count = next_feasible_microbatches(self.config.microbatches, max(needed, floor), floor, request.budget)
        return [replace(self, config=ExecutionConfig(count), least=max(self.least, least)).candidate]


def _is_slowed(found: Solved) -> bool:
    """Whether the budget makes a solution slower than one without it."""
    return found.solution.objective > found.free_bound * (1 + mesh_program.NEAR_FREE)


def _build_work(space: Space) -> int:
    """The work of building a program."""
    cells = sum(transfer.cost.size for transfer in space.program.transfers)
    strategies = sum(len(node.strategies) for node in space.nodes)
    return best_first.BUILD_PER_CELL * cells + best_first.BUILD_PER_STRATEGY * strategies
