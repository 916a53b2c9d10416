"""Candidates of textbook methods on one mesh: floors of every search, each an integer program of few choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from alpa_lite.errors import MicrobatchError, OptionError
from alpa_lite.methods import Auto, DataParallel, Sharded, TensorParallel, Zero
from alpa_lite.passes.search.best_first import Candidate, Expansion
from alpa_lite.passes.search.configs import ExecutionConfig, next_feasible_microbatches
from alpa_lite.passes.search.one_mesh import OneMeshSearch, build_work, is_slowed
from alpa_lite.passes.sharding import mesh_program, tables
from alpa_lite.passes.sharding.solver import solve
from alpa_lite.passes.sharding.textbook import least_state, may_be_cut

BASELINES: Mapping[str, DataParallel | Zero | TensorParallel] = {
    "Zero(2)": Zero(stage=2),
    "DataParallel": DataParallel(),
    "Zero(1)": Zero(stage=1),
    "Zero(3)": Zero(stage=3),
    "TensorParallel": TensorParallel(),
}
"""The textbook methods by their names among the candidates of a plan."""


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

    Attributes:
      name: of the method.
      least: seconds that none takes less of, by the method's program with fewer micro-batches.
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
            return Expansion(self._more(0.0, needed))
        space = search.run("sharding", program.build)
        bound = solve.Bound(space.program)
        search.run("sharding", bound.improve)
        work, least = bound.work + build_work(space), bound.seconds / search.speedup
        if least >= cutoff:
            return Expansion(bound=least, work=work)
        needed = 0.0 if bound.fits else solve.bound_of_peak(space.program)[0]
        if request.budget < needed < math.inf:
            return Expansion(self._more(least, needed), work=work)
        found = search.solve_program(program, space, bound.known, cutoff)
        work, least = work + found.work, max(least, found.free_bound / search.speedup)
        if not found.solution.choice:
            return Expansion(self._more(least), work=work)
        plan = search.take(analyzed, self.name, program, found.space, found.solution)
        more = self._more(least) if is_slowed(found) else []
        return Expansion(more, [plan], found.solution.bound / search.speedup, work)

    def _more(self, least: float, needed: float = 0.0) -> list[Candidate]:
        """The method with the next number of micro-batches that may fit, where this one needs so many bytes."""
        search, request = self.search, self.search.request
        state = least_state(search.step.traced, BASELINES[self.name], request.cluster.num_devices)
        floor = max(search.floor, state)
        if request.num_microbatches or floor >= request.budget:
            return []
        count = next_feasible_microbatches(self.config.microbatches, max(needed, floor), floor, request.budget)
        return [replace(self, config=ExecutionConfig(count), least=max(self.least, least)).candidate]
