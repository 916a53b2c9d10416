"""Candidates of one mesh: configurations, the integer program of each mesh shape, and textbook methods.

A configuration is expanded into one program for each mesh shape, and a program first into itself, built and bounded,
then into its solution. More micro-batches and more rematerialisation are candidates from when memory binds: a program
has no choice within the budget, or a slower one than without it. They inherit the bounds of every configuration that
they only add to (`search.configs`). Textbook methods are floors of every search: a program of few choices each, on the
mesh of one axis. Their first plan makes an incumbent; the others wait, once they are bounded, in the order of bounds.

Where communication overlaps with computation (`Cluster.has_overlap`), the seconds of a plan are those of two streams,
and no sum over choices. One stream takes at most twice as long (`MAX_SPEEDUP`), so half of a bound of the sum is a
bound; each program is solved at full prices and with hideable communication at a share of its price (`sharding.kinds`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.errors import InfeasibleError, MicrobatchError, OptionError
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.strategy import Solution
from alpa_lite.methods import Auto, DataParallel, Sharded, TensorParallel, Zero
from alpa_lite.passes.layers.rematerialisation import NOTHING, Remat
from alpa_lite.passes.microbatches.loop import state_bytes
from alpa_lite.passes.search import best_first, configs
from alpa_lite.passes.search.best_first import Candidate, Expansion, FoundPlan
from alpa_lite.passes.search.configs import (
    Analyses,
    AnalyzedStep,
    ExecutionConfig,
    Family,
    Record,
    next_feasible_microbatches,
)
from alpa_lite.passes.sharding import costs, mesh_program
from alpa_lite.passes.sharding.kinds import OverlapCandidates
from alpa_lite.passes.sharding.mesh_program import MeshProgram, MeshSolution, SolvedProgram
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.textbook import Textbook, least_state, may_be_cut
from alpa_lite.passes.stages import planning
from alpa_lite.plan.decisions import Candidate as Row

MAX_SPEEDUP = 2.0  # how many times faster two streams are than one at most: each does one thing at a time
IMPROVEMENTS = 2  # rounds of sweeps that bound a program before it is solved: mostly to a few percent of the optimum
HALVINGS = 3  # how often the number of recomputed layers is bisected

UNKNOWN_COMMUNICATION = 1.3  # estimated ratio of a step's seconds to those of its products, before any program is built
MAX_COMPUTE_RATIO = 1.5  # estimate of the most by which a step computes longer than its roofline in equal parts
OPTIMISM = 0.9  # share of an estimate that a mesh or a configuration takes at best: estimates err by a tenth
MESH_SPREAD = 0.95  # share of a configuration's estimate that another mesh is expected to take
LAST = 1e30  # seconds of plans that are not expected to fit: they are tried if no others do

BASELINES: tuple[Textbook, ...] = Zero(2), DataParallel(), Zero(1), Zero(3), TensorParallel()
"""The textbook methods among the candidates of a plan, in the order of ties."""


@dataclass(frozen=True, eq=False)
class DecidedMesh:
    """A plan of one mesh, not lowered: the step in its configuration, and the strategy of every group."""

    step: AnalyzedStep
    mesh_solution: MeshSolution


class OneMeshSearch:
    """Candidates of one mesh, and the state that they share: analyses, proven bounds, and known plans.

    Attributes:
      own: the plans of the request's method. first: the configuration that every method begins with, but for `remat`.
      products: seconds that no plan takes less of. divided: the same of a pipeline, from the first program on.
      speedup: of two streams over one, at most; 1 if nothing overlaps.
      refused: why the step cannot be cut into some number of micro-batches. records: of all configurations so far.
    """

    def __init__(self, run: Passes, step: Step, request: PlanRequest) -> None:
        self.run, self.step, self.request = run, step, request
        self.analyses = Analyses(run, step, request)
        floor = state_bytes(step.traced) / request.cluster.num_devices
        self.own, self.first = Family("one mesh", floor), ExecutionConfig(request.num_microbatches or 1)
        self.records: defaultdict[Family, dict[ExecutionConfig, Record]] = defaultdict(dict)
        self.products = costs.products_bound(step.traced, step.rules, request.cluster)
        self.divided = self.products
        self.speedup = MAX_SPEEDUP if request.cluster.has_overlap else 1.0
        self.found: list[FoundPlan] = []
        self.refused: MicrobatchError | None = None
        self._contains = cache(lambda step, method: mesh_program.has_all_plans_of(step, request.cluster, method))
        self._rows: defaultdict[ExecutionConfig, dict[tuple[str, tuple[int, ...]], Row]] = defaultdict(dict)

    def roots(self) -> list[Candidate]:
        """The plans of the request's method, and the textbook methods, unless the request constrains plans itself."""
        request = self.request
        said = request.pins or request.wishes.leaves or request.wishes.forbidden or request.wishes.mesh
        roots = self.open(self.own, replace(self.first, remat=Remat(request.remat[0])))
        if not said and request.method in (Auto(), Sharded()) and request.cluster.num_devices > 1:
            for order, method in enumerate(BASELINES):
                state = max(self.own.state, least_state(self.step.traced, method, request.cluster.num_devices))
                name = type(method).__name__ + (f"({method.stage})" if isinstance(method, Zero) else "")
                roots += self.open(Family(name, state, order, method), self.first)
        return roots

    def bound(self, record: Record, mesh: LogicalMesh | None) -> float:
        """Returns seconds that no plan of a configuration takes less of on a mesh, by all that it only adds to.

        `None` is a mesh of which nothing is known yet.
        """
        config, method, records = record.config, record.family.textbook, [*self.records[record.family].values()]
        own = self.records[self.own].get(config)
        if method and own and mesh in own.bounds and self._contains(own.step.grouped_step, method):
            records += self.records[self.own].values()
        records = [one for one in records if config.only_adds_to(one.config)]
        known = [max(one.peak, one.bounds.get(mesh, 0.0) if mesh else 0.0) for one in records]
        return max(self.products, max(known, default=0.0) / self.speedup)

    def least(self, record: Record) -> float:
        """Returns seconds that no plan of a configuration takes less of, on any of its meshes."""
        records = self.records[record.family].values()
        meshes: set[LogicalMesh | None] = {mesh for one in records for mesh in one.bounds}
        if len(meshes) < max(one.meshes for one in records):
            meshes.add(None)
        return min((self.bound(record, mesh) for mesh in meshes), default=self.products)

    def compute_seconds(self) -> float:
        """Estimated seconds for which a step computes on all devices, by the plans of one mesh and their rooflines.

        A plan in far too many micro-batches, or that replicates most of it, computes for longer than others would.
        """
        peaks = [record.peak for record in self.records[self.own].values() if record.peak]
        if not peaks:
            return UNKNOWN_COMMUNICATION * self.products
        found = min((plan.value.mesh_solution.compute_seconds for plan in self.found), default=min(peaks))
        return min(found, MAX_COMPUTE_RATIO * min(peaks))

    @property
    def least_microbatches(self) -> int:
        """The fewest micro-batches that may fit where nothing is recomputed, by all that is known now."""
        return max((c.microbatches for c in self.records[self.own] if c.remat == NOTHING), default=1)

    def open(self, family: Family, config: ExecutionConfig, interval: tuple[int, int] | None = None) -> list[Candidate]:
        """Returns all plans of a configuration, unless they are a candidate already. `interval`: see `Record`."""
        if config in self.records[family]:
            return []
        record = self.records[family][config] = Record(family, config, interval)
        return [self._candidate(record, "", (0,), partial(self._estimate, record), partial(self._expand, record))]

    def _candidate(
        self, record: Record, shape: str, key: tuple[int, ...], estimate: Callable[[], tuple[float, float]],
        expand: Callable[[float], Expansion],
    ) -> Candidate:  # fmt: skip
        """Returns a candidate; floors come first until there is a plan, then in the order of their bounds."""
        family, config, kind = record.family, record.config, (0, *record.config.rank)
        floor = family.textbook is not None

        def waiting() -> tuple[float, float]:
            bound, _ = estimate()
            return bound, bound if self.found or config != self.first else 0.0

        name, key = f"{family.name}{shape}, {config}", (not floor, *kind, family.order, *key)
        return Candidate(name, kind, key, waiting if floor else estimate, expand, floor, OPTIMISM)

    def take(self, record: Record, found: MeshSolution) -> FoundPlan:
        """Returns a solution as a plan, listed among those of its configuration."""
        seconds = planning.overlapped_seconds(record.step.grouped_step, self.request.cluster, found)
        self._list(record, found.mesh, found.solution.status, seconds, int(found.solution.peak))
        plan = FoundPlan((0, *record.config.rank), seconds, DecidedMesh(record.step, found))
        self.found.append(plan)
        return plan

    def rows(self, chosen: FoundPlan) -> tuple[Row, ...]:
        """Returns the mesh shapes and methods that were compared in the configuration of a plan, which is marked."""
        decided: DecidedMesh = chosen.value
        rows, own = self._rows[decided.step.config].values(), (decided.mesh_solution.mesh.shape, chosen.seconds)
        mine = next((row for row in rows if (row.mesh_shape, row.step_seconds) == own), None)
        status = {row: "chosen" if row is mine else "slower" for row in rows if row.step_seconds is not None}
        return tuple(replace(row, status=status.get(row, row.status)) for row in rows)

    def fit_or_explain(self) -> FoundPlan:
        """Returns the plan of the least memory, where the search found none that fits.

        Raises:
          InfeasibleError: it does not fit, either; names the tensors that bind and the smallest budget that works.
          MicrobatchError: the step cannot be cut into the given number of micro-batches.
        """
        tried = {c: record for c, record in self.records[self.own].items() if record.bounds or record.least}
        if not tried:
            assert self.refused is not None
            raise self.refused
        # The least memory: most recomputed, then most micro-batches; the first configuration stands for its kind.
        config = max(tried, key=lambda c: (c.remat.first is None, c.rank[1], c.microbatches))
        record, request = tried[config], self.request
        least = mesh_program.minimise_memory(self._programs(record))
        if least is not None and (found := least[1]).solution.peak <= request.budget:
            return self.take(record, replace(found, solution=replace(found.solution, status="feasible")))
        error = mesh_program.budget_error(self.step.traced, request.cluster, request.budget, least)
        why = f" Micro-batches do not help: {self.refused}" if self.refused else ""
        why = why if config == self.first else f" This is with {config}."
        raise InfeasibleError(f"{error}{why}", error.smallest_budget)

    def _estimate(self, record: Record) -> tuple[float, float]:
        """Seconds that no plan of a configuration takes less of; and estimated of its best, by the bounds of others.

        One that saves less memory than another that exceeds the budget is not expected to fit.
        """
        config, records = record.config, self.records[record.family].values()
        least = self.least(record)
        if len(record.bounds) >= 2:
            return least, max(least, min(record.bounds.values()) / self.speedup)
        bounded = [(one.config, one.peak, self._expected(one)) for one in records if one.bounds]
        known = [config.scale(*one) / self.speedup for one in bounded]
        unknown = config.scale(ExecutionConfig(), self.products, UNKNOWN_COMMUNICATION * self.products)
        exceeding = [one.config for one in records if one.least and not one.may_fit and one.config.microbatches > 1]
        is_late = any(one != config and one.only_adds_to(config) for one in exceeding)
        return least, max(least, LAST if is_late else min(known, default=unknown))

    def _expected(self, record: Record) -> float:
        """Seconds of the best plan of a configuration by the bounds of two meshes; that of one tells little."""
        least, unknown = min(record.bounds.values()), UNKNOWN_COMMUNICATION * record.peak
        return least if len(record.bounds) >= min(2, record.meshes) else min(least, max(unknown, self.products))

    def _programs(self, record: Record) -> list[MeshProgram]:
        """Returns the programs of a configuration on every mesh that its method admits.

        Raises:
          OptionError: the method cannot be applied to the arguments or the number of devices.
        """
        r, textbook = self.request, record.family.textbook
        said = {} if textbook else {"pins": r.pins, "wishes": r.wishes}
        return mesh_program.mesh_programs(
            record.step.grouped_step, r.cluster, textbook or r.method, budget=r.budget, **said
        )

    def _expand(self, record: Record, _: float) -> Expansion:
        """Returns one candidate for each mesh shape."""
        request, family, method = self.request, record.family, record.family.textbook
        if method and family.state > request.budget:
            return Expansion()
        try:
            step = record.step = self.analyses.analyze(record.config)
            programs = self._programs(record)
            record.meshes = len(programs)
        except (MicrobatchError, OptionError) as error:  # the batch, or a micro-batch, does not divide
            if not method and (request.num_microbatches or isinstance(error, OptionError)):
                raise
            if isinstance(error, MicrobatchError):
                self.refused = self.refused or error
            return Expansion()
        work = 0 if method else best_first.ANALYSIS_PER_OP * step.num_ops
        least = step.grouped_step.peak / request.cluster.num_devices
        if least <= request.budget or (isinstance(method, TensorParallel) and record.config == self.first):
            return Expansion([self._of_program(record, one, number) for number, one in enumerate(programs)], work=work)
        record.least = least
        for program in programs:
            self._list(record, program.mesh, "infeasible")
        return Expansion(self._successors(record), work=work)

    def _of_program(
        self, record: Record, program: MeshProgram, number: int, bounded: solve.SolverState | None = None
    ) -> Candidate:  # fmt: skip
        """Returns all plans of a configuration on the mesh of that number, with its bound once the program is built."""
        shape = program.mesh.shape

        def estimate() -> tuple[float, float]:
            """If it is not built, as good as the best of its configuration, and as unlikely to fit."""
            bound = self.bound(record, program.mesh)
            if bounded is not None:
                return bound, MESH_SPREAD * bound * math.sqrt(max(1.0, record.excess))
            expected, least = self._estimate(record)[1], record.least / self.request.budget
            return bound, MESH_SPREAD * max(bound, expected) * max(1.0, math.sqrt(record.excess), least)

        expand = partial(self._bound, record, program, number)
        if bounded is not None:
            expand = partial(self._solve, record, program, bounded)
        key, size = (1, bounded is None, len(shape), number), " x ".join(map(str, shape))
        return self._candidate(record, f" of {size}", key, estimate, expand)

    def _bound(self, record: Record, program: MeshProgram, number: int, _: float) -> Expansion:
        """The same mesh with its program built and bounded; or configurations that use less memory, if none fits."""
        mesh, space = program.mesh, self.run("sharding", program.build)
        bound = solve.SolverState(space.program)
        if not record.family.textbook:
            plans = [p.value.mesh_solution for p in self.found if p.value.step is record.step]
            plans = [plan for plan in plans if plan.mesh == mesh]
            choices = [mesh_program.map_choice_to(plan, space) for plan in plans]
            bound.choices += [choice for choice in choices if choice is not None]
        for _ in range(IMPROVEMENTS):
            self.run("sharding", bound.improve)
        record.peak = max(record.peak, program.peak_seconds(space))
        if record.config == self.first and self.divided == self.products:
            self.divided = max(self.products, program.divided_seconds(space))
        cells = sum(transfer.cost.size for transfer in space.program.transfers)
        strategies = sum(len(node.strategies) for node in space.nodes)
        work = bound.work + best_first.BUILD_PER_CELL * cells + best_first.BUILD_PER_STRATEGY * strategies
        if not record.bounds and not record.family.textbook:  # tables that all meshes share
            work += best_first.TABLES_PER_OP * record.step.num_ops
        record.bounds[mesh] = max(record.bounds[mesh], bound.seconds)
        if not bound.is_within_budget and self.run("sharding", self._exceeds_budget, record, program):
            self._list(record, mesh, "infeasible")
            return Expansion(self._successors(record), work=work)
        record.may_fit = True
        self._list(record, mesh, "cutoff")
        return Expansion([self._of_program(record, program, number, bound)], work=work)

    def _solve(self, record: Record, program: MeshProgram, bounded: solve.SolverState, cutoff: float) -> Expansion:
        """Returns the solution of a program, and configurations that use less memory where memory binds."""
        bounds, mesh, overlaps = record.bounds, program.mesh, self.request.cluster.has_overlap
        limit = math.inf if overlaps else cutoff  # communication may be hidden
        found = self.run("sharding", mesh_program.solve_within_budget, program, self.request.budget, limit, bounded)
        bounds[mesh] = max(bounds[mesh], found.free_bound)
        least, work, solution = found.solution.bound / self.speedup, found.work, found.solution
        if not solution.choice:
            if solution.status != "cutoff":
                self._list(record, mesh, solution.status)
                self._exceeds_budget(record, program)
            return Expansion(self._successors(record), bound=least, work=work)
        hidden = self._hidden(record.step, found) if overlaps and not record.family.textbook else []
        plans = [self.take(record, MeshSolution(found.space, one)) for one in (solution, *hidden)]
        record.excess = min(record.excess or math.inf, solution.objective / max(found.free_bound, 1e-30))
        is_slowed = solution.objective > found.free_bound * (1 + mesh_program.NEAR_FREE)  # by the budget
        more = self._successors(record) if is_slowed else []
        work += sum(other.work for other in hidden)
        return Expansion([*more, *self._halve(record, fits=True)], plans, least, work)

    def _hidden(self, step: AnalyzedStep, found: SolvedProgram) -> list[Solution]:
        """Returns the solution of the program with hideable communication at a share of its price, at full prices."""
        cheaper = OverlapCandidates(step.loop.traced, self.request.cluster.hidden_kinds).discount_hideable(found.space)
        other = solve.solve(replace(cheaper, budget=None), start=found.solution)
        if other.choice and other.peak > self.request.budget:
            other = solve.solve(replace(cheaper, budget=self.request.budget), start=found.solution)
        if not other.choice:
            return []
        objective, _ = solve.evaluate(found.space.program, other.choice)
        return [replace(other, objective=objective, bound=found.solution.bound)]

    def _successors(self, record: Record) -> list[Candidate]:
        """The configurations that use less memory than one in which memory binds; textbook plans recompute nothing."""
        config, family, request = record.config, record.family, self.request
        out: list[Candidate] = []
        more = config.microbatches
        if family.state < request.budget and request.num_microbatches is None:
            more = next_feasible_microbatches(more, max(record.least, family.state), family.state, request.budget)
            examples = more * request.cluster.num_devices  # at least one of each micro-batch on each device
            is_whole = isinstance(family.textbook, TensorParallel | None)
            if is_whole or may_be_cut(self.analyses.analyze(ExecutionConfig()).grouped_step, examples):
                out += self.open(family, replace(config, microbatches=more))
        if family.textbook:
            return out
        for choice in request.remat:
            if config.remat == NOTHING and choice != "none":
                fits = max(1, more // configs.REMAT_MEMORY_FACTOR[choice]) if record.least else config.microbatches
                out += self.open(family, ExecutionConfig(request.num_microbatches or fits, Remat(choice)))
        return out + self._halve(record, fits=False)

    def _halve(self, record: Record, *, fits: bool) -> list[Candidate]:
        """Rematerialisation of fewer layers than in a plan that fits, by bisection."""
        config, remat, total = record.config, record.config.remat, record.step.layers
        if remat == NOTHING or len(self.request.remat) == 1 or total < 2 or (remat.first is None and not fits):
            return []
        low, high = record.interval or (0, total)
        own = remat.first[0] if remat.first else total
        low, high = (low, own) if fits else (own, high)
        middle = (low + high) // 2
        if middle in (low, high) or (high - low) * 2**HALVINGS < 2 * total:
            return []
        return self.open(record.family, replace(config, remat=Remat(remat.choice, (middle, total))), (low, high))

    def _exceeds_budget(self, record: Record, program: MeshProgram) -> bool:
        """Returns whether no choice of a program fits the budget, which is recorded."""
        bound = mesh_program.peak_bound(program)
        if bound <= self.request.budget or math.isinf(bound):
            return math.isinf(bound)
        record.least = min(record.least or bound, bound)
        return True

    def _list(
        self, record: Record, mesh: LogicalMesh, status: str, seconds: float | None = None, peak: int | None = None
    ) -> None:  # fmt: skip
        """Lists the result of a mesh, unless its plan is no faster than one known; a textbook method needs a plan."""
        rows, textbook = self._rows[record.config], record.family.textbook
        name = record.family.name if textbook else type(self.request.method).__name__
        before = rows[name, mesh.shape].step_seconds if (name, mesh.shape) in rows else None
        if (before is None and not textbook) if seconds is None else (before is None or seconds < before):
            rows[name, mesh.shape] = Row(name, mesh.shape, seconds, peak, status)
