"""Candidates of one mesh: baseline methods, configurations, and the integer program of each mesh shape.

    OneMesh(config)            all plans of a configuration, expanded into one `Program` for each mesh shape
    Program(config, mesh)      expanded first into itself with the program built and bounded, then into its solution
    Baseline(method, config)   all plans of a textbook method: one integer program of few choices

More micro-batches and more rematerialisation are candidates from when memory binds: a program has no choice within the
budget, or a slower one than without it. They inherit the bounds of every configuration that they only add to
(`search.configs`).

Where communication overlaps with computation (`Cluster.overlaps`), the seconds of a plan are those of two streams, and
no sum over choices. One stream takes at most twice as long (`MAX_SPEEDUP`), so half of a bound of the sum is a bound;
each program is solved at full prices and with hideable communication at a share of its price (`sharding.hiding`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from alpa_lite.asked import PlanRequest, Step
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from alpa_lite.layout import LogicalMesh
from alpa_lite.methods import Auto, DataParallel, Sharded, TensorParallel, Zero
from alpa_lite.passes.layers.remat import NOTHING, Remat
from alpa_lite.passes.microbatches import numbers
from alpa_lite.passes.search import budget as work_units
from alpa_lite.passes.search.analysis import Analyses, AnalyzedStep, Run
from alpa_lite.passes.search.best_first import Candidate, Expansion, FoundPlan, Key, Kind
from alpa_lite.passes.search.configs import (
    REMAT_MEMORY_FACTOR,
    ExecutionConfig,
    next_feasible_microbatches,
)
from alpa_lite.passes.sharding import computing, mesh_program, tables
from alpa_lite.passes.sharding.hiding import Hiding
from alpa_lite.passes.sharding.mesh_program import MeshProgram, MeshSolution, Solved
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.sharding.textbook import least_state, may_be_cut
from alpa_lite.passes.stages import planning, staging
from alpa_lite.passes.stages.planning import DecidedStage
from alpa_lite.records import Candidate as Row
from alpa_lite.strategy import Solution

BASELINES: Mapping[str, DataParallel | Zero | TensorParallel] = {
    "Zero(2)": Zero(stage=2),
    "DataParallel": DataParallel(),
    "Zero(1)": Zero(stage=1),
    "Zero(3)": Zero(stage=3),
    "TensorParallel": TensorParallel(),
}
"""The textbook methods by their names among the candidates of a plan."""

MAX_SPEEDUP = 2.0
"""How many times faster two streams are than one at most: each does one thing at a time."""

IMPROVEMENTS = 2
"""Rounds of sweeps that bound a program before it is solved: mostly within a few percent of the optimum."""

UNKNOWN_COMMUNICATION = 1.3
"""Estimated ratio of the seconds of a step to those of its products, before any program is bounded."""

OPTIMISM = 0.9
"""Share of the seconds of the best mesh known that another mesh of a configuration is estimated to take."""

HALVINGS = 3
"""How often the number of recomputed layers is bisected."""


@dataclass(frozen=True, eq=False)
class DecidedMesh:
    """A plan of one mesh, not lowered.

    Attributes:
      step: the step in its configuration. stage: all of it, with the strategy of every group.
    """

    step: AnalyzedStep
    stage: DecidedStage


@dataclass(eq=False)
class _Record:
    """The facts about a configuration that are proven so far.

    Attributes:
      bounds: mesh -> seconds that none of its plans takes less of, whatever the budget.
      peak: the same for every mesh: an equal part of the work on each device, at peak rates.
      least: bytes per device that no plan of the meshes weighed takes less of; 0 if unknown.
      rows: the mesh shapes and methods compared, by name and shape.
    """

    bounds: dict[LogicalMesh, float] = field(default_factory=dict)
    peak: float = 0.0
    least: float = 0.0
    rows: dict[tuple[str, tuple[int, ...]], Row] = field(default_factory=dict)


class OneMeshSearch:
    """The state that candidates of one mesh share: analyses, proven bounds, and known plans."""

    def __init__(self, run: Run, step: Step, request: PlanRequest) -> None:
        self.run, self.step, self.request = run, step, request
        self.analyses = Analyses(run, step, request)
        self.num_devices = request.cluster.num_devices
        self.floor = numbers.state_bytes(step.traced) / self.num_devices
        self.method_name = type(request.method).__name__
        self.records: dict[ExecutionConfig, _Record] = {}
        self.plans: dict[tuple[ExecutionConfig, LogicalMesh], list[MeshSolution]] = {}
        self.found: list[FoundPlan] = []
        self.refused: MicrobatchError | None = None
        self.unusable: set[ExecutionConfig] = set()  # with which the step cannot be cut, or the method not divide it
        self.products = computing.products_bound(step.traced, step.rules, request.cluster)
        self._closed: set[ExecutionConfig] = set()
        self._speedup = MAX_SPEEDUP if request.cluster.overlaps else 1.0

    def roots(self) -> list[Candidate]:
        """The candidates to begin with: baselines, where the method admits all of them, and the first configuration."""
        first = ExecutionConfig(self.request.num_microbatches or 1, Remat(self.request.remat[0]))
        baselines: list[Candidate] = []
        if is_baseline_allowed(self.request):
            plain = ExecutionConfig(first.microbatches)
            baselines = [Baseline(self, n, name, plain) for n, name in enumerate(BASELINES)]
        return [*baselines, *self.open(first)]

    def open(self, config: ExecutionConfig, interval: tuple[int, int] | None = None) -> list[Candidate]:
        """The candidate of a configuration, unless there was one."""
        if config in self._closed:
            return []
        self._closed.add(config)
        return [OneMesh(self, config, interval)]

    def record(self, config: ExecutionConfig) -> _Record:
        """The facts about a configuration."""
        return self.records.setdefault(config, _Record())

    def bound(self, config: ExecutionConfig, mesh: LogicalMesh) -> float:
        """Seconds that no plan of a configuration takes less of on a mesh, by all that it only adds to."""
        known = (r for other, r in self.records.items() if config.only_adds_to(other))
        least = max((max(record.peak, record.bounds.get(mesh, 0.0)) for record in known), default=0.0)
        return max(self.products, least / self._speedup)

    def bound_of_all(self, config: ExecutionConfig) -> float:
        """Seconds that no plan of a configuration takes less of on any mesh."""
        meshes = {mesh for record in self.records.values() for mesh in record.bounds}
        return min((self.bound(config, mesh) for mesh in meshes), default=self.products)

    def expected(self, config: ExecutionConfig) -> float:
        """Estimated seconds of the best plan of a configuration, by the bounds of others."""
        known = [
            config.scale(other, record.peak, min(record.bounds.values())) / self._speedup
            for other, record in self.records.items()
            if record.bounds
        ]
        unknown = config.scale(ExecutionConfig(), self.products, UNKNOWN_COMMUNICATION * self.products)
        return max(self.bound_of_all(config), min(known, default=unknown))

    def overflow(self, config: ExecutionConfig) -> float:
        """Returns the least factor by which a configuration's bytes exceed the budget, as far as known; else 1."""
        record = self.records.get(config)
        return 1.0 if record is None else max(1.0, record.least / self.request.budget)

    def successors(self, config: ExecutionConfig, interval: tuple[int, int] | None = None) -> list[Candidate]:
        """The configurations that use less memory than one in which memory binds."""
        record, request = self.record(config), self.request
        out: list[Candidate] = []
        more = config.microbatches
        if self.floor < request.budget and request.num_microbatches is None:
            more = next_feasible_microbatches(more, record.least, self.floor, request.budget)
            out += self.open(replace(config, microbatches=more))
        for choice in request.remat:
            if config.remat == NOTHING and choice != "none":
                fits = config.microbatches if not record.least else max(1, more // REMAT_MEMORY_FACTOR[choice])
                count = request.num_microbatches or max(config.microbatches if not record.least else 1, fits)
                out += self.open(ExecutionConfig(count, Remat(choice)))
        return out + self.halve(config, interval, fits=False)

    def halve(self, config: ExecutionConfig, interval: tuple[int, int] | None, *, fits: bool) -> list[Candidate]:
        """Rematerialisation of fewer layers than in a plan that fits, by bisection."""
        if config not in self.analyses or config.remat == NOTHING or len(self.request.remat) == 1:
            return []
        total = self.analyses.of(config).layers
        if total < 2 or (config.remat.first is None and not fits):
            return []
        low, high = interval or (0, total)
        own = config.remat.first[0] if config.remat.first else total
        low, high = (low, own) if fits else (own, high)
        middle = (low + high) // 2
        if middle in (low, high) or (high - low) * 2**HALVINGS < 2 * total:
            return []
        return self.open(replace(config, remat=Remat(config.remat.choice, (middle, total))), (low, high))

    def weigh(self, config: ExecutionConfig, program: MeshProgram) -> bool:
        """Whether no choice of a program fits the budget, which is noted."""
        bound, _ = mesh_program.peak_bound(program)
        if bound <= self.request.budget or math.isinf(bound):
            return math.isinf(bound)
        record = self.record(config)
        record.least = bound if not record.least else min(record.least, bound)
        return True

    def take(
        self, analyzed: AnalyzedStep, name: str, program: MeshProgram, space: Space, solution: Solution
    ) -> FoundPlan:  # fmt: skip
        """A solution as a plan, listed among those of its configuration."""
        found = MeshSolution(program.mesh, space, solution, mesh_program.choice_of(space, solution))
        cluster, config = self.request.cluster, analyzed.config
        seconds = planning.settled(analyzed.loop.traced, analyzed.groups, analyzed.rules, cluster, found)
        self.note(config, name, program.mesh, solution.status, seconds, int(solution.peak))
        self.plans.setdefault((config, program.mesh), []).append(found)
        graph = staging.whole(analyzed.loop.traced, analyzed.loop.scan)
        stage = DecidedStage(graph, analyzed.rules, analyzed.groups, found, cluster)
        plan = FoundPlan(
            f"one mesh, {config}, {name}", (0, *config.rank), seconds, DecidedMesh(analyzed, stage)
        )  # fmt: skip
        self.found.append(plan)
        return plan

    def note(
        self, config: ExecutionConfig, name: str, mesh: LogicalMesh, status: str, seconds: float | None = None,
        size: int | None = None,
    ) -> None:  # fmt: skip
        """Lists the result of a mesh shape or method, unless a faster plan is already listed for it."""
        rows, key = self.record(config).rows, (name, mesh.shape)
        before = rows.get(key)
        if before is None or before.step_seconds is None or (seconds is not None and seconds < before.step_seconds):
            rows[key] = Row(name, mesh.shape, seconds, size, status)

    def rows(self, chosen: FoundPlan) -> tuple[Row, ...]:
        """The mesh shapes and methods that were compared in the configuration of a plan, which is marked."""
        decided: DecidedMesh = chosen.value
        shape = decided.stage.found.mesh.shape
        out, marked = [], False
        for row in self.record(decided.step.config).rows.values():
            if row.step_seconds is not None:
                is_chosen = not marked and row.mesh_shape == shape and row.step_seconds == chosen.seconds
                marked = marked or is_chosen
                row = replace(row, status="chosen" if is_chosen else "slower")
            out.append(row)
        return tuple(out)

    def fit_or_explain(self) -> FoundPlan:
        """The plan of the least memory, where the search found none that fits.

        Raises:
          InfeasibleError: it does not fit, either; names the tensors that bind and the smallest budget that works.
          MicrobatchError: the step cannot be cut into the given number of micro-batches.
        """
        known = [config for config in self.records if config in self.analyses and config not in self.unusable]
        if not known:
            assert self.refused is not None
            raise self.refused
        # The least memory: most recomputed, then most micro-batches; the first configuration stands for its kind.
        config = max(known, key=lambda c: (c.remat.first is None, c.rank[1], c.microbatches))
        analyzed = self.analyses.of(config)
        least = mesh_program.minimise_memory(self.programs(analyzed))
        request = self.request
        if least is not None and least.peak <= request.budget:
            solution = replace(least.solution, status="feasible")
            return self.take(analyzed, self.method_name, least.program, least.space, solution)
        error = mesh_program.budget_error(self.step.traced, request.cluster, request.budget, least)
        why = f" Micro-batches do not help: {self.refused}" if self.refused else ""
        if config != ExecutionConfig(request.num_microbatches or 1):
            why = f" This is with {config}."
        raise InfeasibleError(f"{error}{why}", error.smallest_budget)

    def programs(self, analyzed: AnalyzedStep) -> list[MeshProgram]:
        """The programs of a configuration on every mesh that the method admits."""
        r = self.request
        return mesh_program.mesh_programs(
            analyzed.loop.traced, analyzed.groups, analyzed.rules, r.cluster, r.method, budget=r.budget,
            shared=analyzed.shared, pins=r.pins, wishes=r.wishes,
        )  # fmt: skip


def is_baseline_allowed(request: PlanRequest) -> bool:
    """Whether the method admits all textbook plans, and the user constrains nothing that they do not respect."""
    said = request.pins or request.wishes.leaves or request.wishes.forbidden or request.wishes.mesh
    return not said and request.method in (Auto(), Sharded()) and request.cluster.num_devices > 1


@dataclass(frozen=True, eq=False)
class OneMesh:
    """All plans of one mesh in a configuration; `interval`: of recomputed layers, where their number is bisected."""

    search: OneMeshSearch
    config: ExecutionConfig
    interval: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The configuration."""
        return f"one mesh, {self.config}"

    @property
    def kind(self) -> Kind:
        """One mesh, and its rank."""
        return (0, *self.config.rank)

    @property
    def key(self) -> Key:
        """After baselines, less before more."""
        return (1, *self.config.rank, 0)

    def estimate(self) -> tuple[float, float]:
        """By the configurations that it only adds to."""
        bound = self.search.bound_of_all(self.config)
        return bound, max(bound, self.search.expected(self.config))

    def expand(self, cutoff: float) -> Expansion:
        """One program for each mesh shape."""
        del cutoff
        search = self.search
        try:
            analyzed = search.analyses.of(self.config)
            programs = search.programs(analyzed)
        except MicrobatchError as error:
            if search.request.num_microbatches:
                raise
            search.refused = search.refused or error
            search.unusable.add(self.config)
            return Expansion()
        work = work_units.ANALYSIS_PER_OP * sum(1 for _ in analyzed.loop.traced.graph.ops())
        least = tables.in_equal_parts(analyzed.shared, search.request.cluster.num_devices)
        if least > search.request.budget:
            search.record(self.config).least = least
            for program in programs:
                search.note(self.config, search.method_name, program.mesh, "infeasible")
            return Expansion(search.successors(self.config, self.interval), work=work)
        return Expansion(
            [Program(search, analyzed, program, n, self.interval) for n, program in enumerate(programs)], work=work
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Program:
    """All plans of a configuration on one mesh.

    Attributes:
      number: of the mesh, in the order of promise.
      bounded: its program and bound, once they are built.
    """

    search: OneMeshSearch
    step: AnalyzedStep
    program: MeshProgram
    number: int
    interval: tuple[int, int] | None = None
    bounded: solve.Bound | None = None

    @property
    def name(self) -> str:
        """The configuration and the mesh."""
        return f"one mesh of {' x '.join(map(str, self.program.mesh.shape))}, {self.step.config}"

    @property
    def kind(self) -> Kind:
        """One mesh, and the rank of its configuration."""
        return (0, *self.step.config.rank)

    @property
    def key(self) -> Key:
        """Within its configuration built programs first, then in the order of promise."""
        return (1, *self.step.config.rank, 1, self.bounded is None, len(self.program.mesh.shape), self.number)

    def estimate(self) -> tuple[float, float]:
        """Its bound; where it is not built, as good as the best of its configuration, and as unlikely to fit."""
        search, config = self.search, self.step.config
        bound = search.bound(config, self.program.mesh)
        if self.bounded is not None:
            return bound, OPTIMISM * bound
        return bound, OPTIMISM * max(bound, search.expected(config)) * search.overflow(config)

    def expand(self, cutoff: float) -> Expansion:
        """Itself with its program built and bounded; or its solution, and configurations that use less memory."""
        return self._bound() if self.bounded is None else self._solve(self.bounded, cutoff)

    def _bound(self) -> Expansion:
        search, config, program = self.search, self.step.config, self.program
        space = search.run("sharding", program.build)
        bound = solve.Bound(space.program)
        choices = [mesh_program.map_choice_to(plan, space) for plan in search.plans.get((config, program.mesh), ())]
        bound.known.choices += [choice for choice in choices if choice is not None]
        for _ in range(IMPROVEMENTS):
            search.run("sharding", bound.improve)
        record = search.record(config)
        record.peak = max(record.peak, program.peak_seconds(space))
        record.bounds[program.mesh] = max(record.bounds.get(program.mesh, 0.0), bound.seconds)
        work = bound.work + build_work(space)
        if not bound.fits and search.run("sharding", search.weigh, config, program):
            search.note(config, search.method_name, program.mesh, "infeasible")
            return Expansion(search.successors(config, self.interval), work=work)
        search.note(config, search.method_name, program.mesh, "cutoff")
        return Expansion([replace(self, bounded=bound)], work=work)

    def _solve(self, bounded: solve.Bound, cutoff: float) -> Expansion:
        search, config, program, budget = self.search, self.step.config, self.program, self.search.request.budget
        space, overlaps = program.build(), search.request.cluster.overlaps
        limit = math.inf if overlaps else cutoff
        found: Solved = search.run(
            "sharding", mesh_program.solve_within_budget, program, space, budget, limit, bounded.known
        )  # fmt: skip
        record = search.record(config)
        record.bounds[program.mesh] = max(record.bounds.get(program.mesh, 0.0), found.free_bound)
        least, work = found.solution.bound / search._speedup, found.work
        if not found.solution.choice:
            if found.solution.status != "cutoff":
                search.note(config, search.method_name, program.mesh, found.solution.status)
                search.weigh(config, program)
            return Expansion(search.successors(config, self.interval), bound=least, work=work)
        plans = [search.take(self.step, search.method_name, program, found.space, found.solution)]
        if overlaps:
            for other in self._hidden(found, budget):
                work += other.work
                plans.append(search.take(self.step, search.method_name, program, found.space, other))
        more: list[Candidate] = []
        if found.solution.objective > found.free_bound * (1 + mesh_program.NEAR_FREE):
            more = search.successors(config, self.interval)
        more += search.halve(config, self.interval, fits=True)
        return Expansion(more, plans, least, work)

    def _hidden(self, found: Solved, budget: float) -> list[Solution]:
        """The solution of the program with hideable communication at a share of its price, at full prices."""
        hiding = Hiding(self.step.loop.traced, self.search.request.cluster.hides)
        cheaper = hiding.cheaper(found.space)
        other = solve.solve(replace(cheaper, budget=None), start=found.solution)
        if other.choice and other.peak > budget:
            other = solve.solve(replace(cheaper, budget=budget), start=found.solution)
        if not other.choice:
            return []
        objective, _ = solve.evaluate(found.space.program, other.choice)
        return [replace(other, objective=objective, bound=found.solution.bound)]


@dataclass(frozen=True, eq=False)
class Baseline:
    """All plans of a textbook method in a configuration: a floor of every search.

    Attributes:
      number, method_name: of `BASELINES`.
      least: seconds that none takes less of, by the method's program with fewer micro-batches.
    """

    search: OneMeshSearch
    number: int
    method_name: str
    config: ExecutionConfig
    least: float = 0.0

    @property
    def name(self) -> str:
        """The method and the configuration."""
        return f"{self.method_name}, {self.config}"

    @property
    def kind(self) -> Kind:
        """One mesh, and the rank of its configuration."""
        return (0, *self.config.rank)

    @property
    def key(self) -> Key:
        """Before everything else, fewer micro-batches before more."""
        return (0, *self.config.rank, self.number)

    def estimate(self) -> tuple[float, float]:
        """Floors come first; further micro-batches, once there is a plan, in the order of their bounds."""
        search = self.search
        own = max(self.least, self._inherited())
        return own, own if search.found else 0.0

    def _inherited(self) -> float:
        """The bound of the unrestricted program on the mesh of one axis, if it has all plans of the method."""
        record = self.search.records.get(self.config)
        mesh = next((mesh for mesh in record.bounds if len(mesh.shape) == 1), None) if record else None
        if mesh is None:
            return 0.0
        return self.search.bound(self.config, mesh) if self._is_contained else 0.0

    @cached_property
    def _is_contained(self) -> bool:
        """Whether the unrestricted program has all plans of the method: once, not at every estimate."""
        search, method = self.search, BASELINES[self.method_name]
        try:
            analyzed = search.analyses.of(self.config)
            return mesh_program.has_all_plans_of(
                analyzed.loop.traced, analyzed.groups, search.request.cluster, method, analyzed.shared
            )  # fmt: skip
        except (MicrobatchError, OptionError):
            return False

    def expand(self, cutoff: float) -> Expansion:
        """The best plan of the method, and the method with more micro-batches where memory binds."""
        search, request, method = self.search, self.search.request, BASELINES[self.method_name]
        devices = request.cluster.num_devices
        if least_state(search.step.traced, method, devices) > request.budget:
            return Expansion()
        try:
            if self.config.microbatches > 1 and request.num_microbatches is None:
                facts = search.analyses.of(ExecutionConfig()).shared.facts
                data = not isinstance(method, TensorParallel)
                if data and not may_be_cut(facts, self.config.microbatches * devices):
                    return Expansion()
            analyzed = search.analyses.of(self.config)
            (program,) = mesh_program.mesh_programs(
                analyzed.loop.traced, analyzed.groups, analyzed.rules, request.cluster, method, budget=request.budget,
                shared=analyzed.shared,
            )  # fmt: skip
        except (MicrobatchError, OptionError):  # the batch, or a micro-batch, does not divide
            return Expansion()
        needed = tables.in_equal_parts(analyzed.shared, devices)
        if needed > request.budget:
            return self._more(0.0, needed, work=0)
        space = search.run("sharding", program.build)
        bound = solve.Bound(space.program)
        search.run("sharding", bound.improve)
        work = bound.work + build_work(space)
        least = bound.seconds / search._speedup
        if least >= cutoff:
            return Expansion(bound=least, work=work)
        needed = 0.0 if bound.fits else solve.bound_of_peak(space.program)[0]
        if request.budget < needed < math.inf:
            return self._more(least, needed, work=work)
        limit = math.inf if request.cluster.overlaps else cutoff
        found = search.run(
            "sharding", mesh_program.solve_within_budget, program, space, request.budget, limit, bound.known
        )  # fmt: skip
        work += found.work
        least = max(least, found.free_bound / search._speedup)
        if not found.solution.choice:
            return self._more(least, 0.0, work=work)
        plan = search.take(analyzed, self.method_name, program, found.space, found.solution)
        binds = found.solution.objective > found.free_bound * (1 + mesh_program.NEAR_FREE)
        more = self._more(least, 0.0, work=work) if binds else Expansion(work=work)
        return replace(more, plans=[plan], bound=found.solution.bound / search._speedup)

    def _more(self, least: float, needed: float, *, work: int) -> Expansion:
        """The method with the next number of micro-batches that may fit, where this one needs so many bytes."""
        search, budget = self.search, self.search.request.budget
        floor = max(search.floor, least_state(search.step.traced, BASELINES[self.method_name], search.num_devices))
        if search.request.num_microbatches or floor >= budget:
            return Expansion(work=work)
        count = next_feasible_microbatches(self.config.microbatches, max(needed, floor), floor, budget)
        config = replace(self.config, microbatches=count)
        return Expansion([replace(self, config=config, least=max(self.least, least))], work=work)


def build_work(space: Space) -> int:
    """The work of building a program."""
    cells = sum(transfer.cost.size for transfer in space.program.transfers)
    strategies = sum(len(node.strategies) for node in space.nodes)
    return work_units.BUILD_PER_CELL * cells + work_units.BUILD_PER_STRATEGY * strategies
