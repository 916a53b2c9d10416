"""Candidates of one mesh: configurations, and the integer program of each mesh shape.

A configuration is expanded into one program for each mesh shape, and a program first into itself, built and bounded,
then into its solution. More micro-batches and more rematerialisation are candidates from when memory binds: a program
has no choice within the budget, or a slower one than without it. They inherit the bounds of every configuration that
they only add to (`search.configs`).

Where communication overlaps with computation (`Cluster.overlaps`), the seconds of a plan are those of two streams, and
no sum over choices. One stream takes at most twice as long (`MAX_SPEEDUP`), so half of a bound of the sum is a bound;
each program is solved at full prices and with hideable communication at a share of its price (`sharding.hiding`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial

from alpa_lite.asked import PlanRequest, Step
from alpa_lite.errors import InfeasibleError, MicrobatchError
from alpa_lite.layout import LogicalMesh
from alpa_lite.passes.layers.remat import NOTHING, Remat
from alpa_lite.passes.microbatches import numbers
from alpa_lite.passes.search import budget as work_units
from alpa_lite.passes.search.analysis import Analyses, AnalyzedStep
from alpa_lite.passes.search.best_first import Candidate, Expansion, FoundPlan
from alpa_lite.passes.search.configs import REMAT_MEMORY_FACTOR, ExecutionConfig, next_feasible_microbatches
from alpa_lite.passes.sharding import computing, mesh_program, tables
from alpa_lite.passes.sharding.hiding import Hiding
from alpa_lite.passes.sharding.mesh_program import MeshProgram, MeshSolution, Solved
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.space import Space
from alpa_lite.passes.stages import planning, staging
from alpa_lite.passes.stages.planning import DecidedStage
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

    def raise_bound(self, mesh: LogicalMesh, seconds: float) -> None:
        """Records a bound of a mesh."""
        self.bounds[mesh] = max(self.bounds.get(mesh, 0.0), seconds)


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
        found = min((plan.value.stage.found.compute_seconds for plan in self.found), default=min(peaks))
        return min(found, MAX_COMPUTE_RATIO * min(peaks))

    def open(self, config: ExecutionConfig, interval: tuple[int, int] | None = None) -> list[Candidate]:
        """All plans of a configuration, unless they are a candidate already.

        Args:
          interval: numbers of recomputed layers that are known to exceed the budget and to fit it, where these are
            bisected.
        """
        if config in self._intervals:
            return []
        self._intervals[config] = interval

        def estimate() -> tuple[float, float]:
            return self._bound_of_all(config), self._expect(config)

        kind = 0, *config.rank
        return [Candidate(f"one mesh, {config}", kind, (1, *config.rank, 0), estimate, partial(self._expand, config))]

    def solve_program(self, program: MeshProgram, space: Space, known: solve.Known, cutoff: float) -> Solved:
        """The best choice of a program within the budget; below the cutoff, unless communication may be hidden."""
        limit = math.inf if self.request.cluster.overlaps else cutoff
        solved = mesh_program.solve_within_budget
        return self.run("sharding", solved, program, space, self.request.budget, limit, known)

    def take(
        self, analyzed: AnalyzedStep, name: str, program: MeshProgram, space: Space, solution: Solution
    ) -> FoundPlan:  # fmt: skip
        """A solution as a plan, listed among those of its configuration."""
        found = MeshSolution(program.mesh, space, solution, mesh_program.choice_of(space, solution))
        cluster, config, loop = self.request.cluster, analyzed.config, analyzed.loop
        seconds = planning.settled(loop.traced, analyzed.groups, analyzed.rules, cluster, found)
        self._note(config, name, program.mesh, solution.status, seconds, int(solution.peak))
        graph = staging.whole(loop.traced, loop.scan)
        stage = DecidedStage(graph, analyzed.rules, analyzed.groups, found, cluster)
        plan = FoundPlan((0, *config.rank), seconds, DecidedMesh(analyzed, stage))
        self.found.append(plan)
        return plan

    def rows(self, chosen: FoundPlan) -> tuple[Row, ...]:
        """The mesh shapes and methods that were compared in the configuration of a plan, which is marked."""
        decided: DecidedMesh = chosen.value
        out, own = [], (decided.stage.found.mesh.shape, chosen.seconds)
        for row in self.records[decided.step.config].rows.values():
            if row.step_seconds is not None:
                is_chosen = (row.mesh_shape, row.step_seconds) == own and all(r.status != "chosen" for r in out)
                row = replace(row, status="chosen" if is_chosen else "slower")
            out.append(row)
        return tuple(out)

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
        least = mesh_program.minimise_memory(self._programs(analyzed))
        if least is not None and least.peak <= request.budget:
            solution = replace(least.solution, status="feasible")
            return self.take(analyzed, self._method_name, least.program, least.space, solution)
        error = mesh_program.budget_error(self.step.traced, request.cluster, request.budget, least)
        why = f" Micro-batches do not help: {self.refused}" if self.refused else ""
        if config != ExecutionConfig(request.num_microbatches or 1):
            why = f" This is with {config}."
        raise InfeasibleError(f"{error}{why}", error.smallest_budget)

    def _bound_of_all(self, config: ExecutionConfig) -> float:
        """Seconds that no plan of a configuration takes less of on any mesh."""
        meshes = {mesh for record in self.records.values() for mesh in record.bounds}
        return min((self.bound(config, mesh) for mesh in meshes), default=self.products)

    def _expect(self, config: ExecutionConfig) -> float:
        """Estimated seconds of the best plan of a configuration, by the bounds of other ones."""
        known = [
            config.scale(other, record.peak, min(record.bounds.values())) / self.speedup
            for other, record in self.records.items()
            if record.bounds
        ]
        unknown = config.scale(ExecutionConfig(), self.products, UNKNOWN_COMMUNICATION * self.products)
        return max(self._bound_of_all(config), min(known, default=unknown))

    def _programs(self, analyzed: AnalyzedStep) -> list[MeshProgram]:
        """The programs of a configuration on every mesh that the method admits."""
        r = self.request
        return mesh_program.mesh_programs(
            analyzed.loop.traced, analyzed.groups, analyzed.rules, r.cluster, r.method, budget=r.budget,
            shared=analyzed.shared, pins=r.pins, wishes=r.wishes,
        )  # fmt: skip

    def _expand(self, config: ExecutionConfig, cutoff: float) -> Expansion:
        """One candidate for each mesh shape."""
        del cutoff
        request = self.request
        try:
            analyzed = self.analyses.of(config)
            programs = self._programs(analyzed)
        except MicrobatchError as error:
            if request.num_microbatches:
                raise
            self.refused = self.refused or error
            return Expansion()
        work = work_units.ANALYSIS_PER_OP * sum(1 for _ in analyzed.loop.traced.graph.ops())
        least = tables.in_equal_parts(analyzed.shared, request.cluster.num_devices)
        if least > request.budget:
            self.records[config].least = least
            for program in programs:
                self._note(config, self._method_name, program.mesh, "infeasible")
            return Expansion(self._successors(analyzed), work=work)
        return Expansion([self._of_program(analyzed, one, n) for n, one in enumerate(programs)], work=work)

    def _of_program(
        self, step: AnalyzedStep, program: MeshProgram, number: int, bounded: solve.Bound | None = None
    ) -> Candidate:  # fmt: skip
        """All plans of a configuration on one mesh.

        Args:
          number: of the mesh, in the order of promise.
          bounded: its program and bound, once they are built.
        """
        config, shape = step.config, program.mesh.shape

        def estimate() -> tuple[float, float]:
            """If it is not built, as good as the best of its configuration, and as unlikely to fit."""
            bound = self.bound(config, program.mesh)
            if bounded is not None:
                return bound, OPTIMISM * bound
            least = self.records[config].least if config in self.records else 0.0
            return bound, OPTIMISM * max(bound, self._expect(config)) * max(1.0, least / self.request.budget)

        def expand(cutoff: float) -> Expansion:
            if bounded is None:
                return self._bound(step, program, number)
            return self._solve(step, program, bounded, cutoff)

        name, rank = f"one mesh of {' x '.join(map(str, shape))}, {config}", config.rank
        return Candidate(name, (0, *rank), (1, *rank, 1, bounded is None, len(shape), number), estimate, expand)

    def _bound(self, step: AnalyzedStep, program: MeshProgram, number: int) -> Expansion:
        """The same mesh with its program built and bounded; or configurations that use less memory, if none fits."""
        config, mesh = step.config, program.mesh
        space = self.run("sharding", program.build)
        bound = solve.Bound(space.program)
        known = [plan.value.stage.found for plan in self.found if plan.value.step is step]
        choices = [mesh_program.map_choice_to(plan, space) for plan in known if plan.mesh == mesh]
        bound.known.choices += [choice for choice in choices if choice is not None]
        for _ in range(IMPROVEMENTS):
            self.run("sharding", bound.improve)
        record = self.records[config]
        record.peak = max(record.peak, program.peak_seconds(space))
        record.raise_bound(mesh, bound.seconds)
        work = bound.work + build_work(space)
        if not bound.fits and self.run("sharding", self._exceeds_budget, config, program):
            self._note(config, self._method_name, mesh, "infeasible")
            return Expansion(self._successors(step), work=work)
        self._note(config, self._method_name, mesh, "cutoff")
        return Expansion([self._of_program(step, program, number, bound)], work=work)

    def _solve(self, step: AnalyzedStep, program: MeshProgram, bounded: solve.Bound, cutoff: float) -> Expansion:
        """The solution of a program, and configurations that use less memory where memory binds."""
        config, name = step.config, self._method_name
        found = self.solve_program(program, program.build(), bounded.known, cutoff)
        self.records[config].raise_bound(program.mesh, found.free_bound)
        least, work = found.solution.bound / self.speedup, found.work
        if not found.solution.choice:
            if found.solution.status != "cutoff":
                self._note(config, name, program.mesh, found.solution.status)
                self._exceeds_budget(config, program)
            return Expansion(self._successors(step), bound=least, work=work)
        plans = [self.take(step, name, program, found.space, found.solution)]
        if self.request.cluster.overlaps:
            for other in self._hidden(step, found):
                work += other.work
                plans.append(self.take(step, name, program, found.space, other))
        more = self._successors(step) if is_slowed(found) else []
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
                fits = max(1, more // REMAT_MEMORY_FACTOR[choice]) if least else config.microbatches
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

    def _note(
        self, config: ExecutionConfig, name: str, mesh: LogicalMesh, status: str, seconds: float | None = None,
        size: int | None = None,
    ) -> None:  # fmt: skip
        """Lists the result of a mesh shape or method, unless a faster plan is already listed for it."""
        rows, key = self.records[config].rows, (name, mesh.shape)
        before = rows[key].step_seconds if key in rows else None
        if before is None or (seconds is not None and seconds < before):
            rows[key] = Row(name, mesh.shape, seconds, size, status)


def is_slowed(found: Solved) -> bool:
    """Whether the budget makes a solution slower than one without it."""
    return found.solution.objective > found.free_bound * (1 + mesh_program.NEAR_FREE)


def build_work(space: Space) -> int:
    """The work of building a program."""
    cells = sum(transfer.cost.size for transfer in space.program.transfers)
    strategies = sum(len(node.strategies) for node in space.nodes)
    return work_units.BUILD_PER_CELL * cells + work_units.BUILD_PER_STRATEGY * strategies
