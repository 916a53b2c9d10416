"""The decisions of a plan with their alternatives, and the search that made them.

Units are seconds per step, bytes per device, and FLOPs, unless an attribute says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Solver:
    """How the choice was found.

    Attributes:
      status: "optimal", "feasible" (a gap remains), or "replayed", "fixed" where nothing was solved.
      objective, bound: predicted seconds of the choice, and the proven lower bound.
      gap: (objective - bound) / objective.
      work: spent solving, counted in cells of cost matrices that are visited.
      variables: of the largest program given to the solver.
      model: what `objective` and `bound` are of: "step", the integer program of the whole step on one mesh, or
        "layers", sums over layers, by which stages are chosen. The latter are no bound of the simulated step; where it
        is below them, `bound` is its seconds.
    """

    status: str
    objective: float
    bound: float
    gap: float
    work: int
    variables: int
    model: str = "step"


@dataclass(frozen=True)
class SearchSummary:
    """The search that found a plan.

    Attributes:
      effort: the budget of work by name.
      work, allowed: spent, and the budget, in cells (`passes.search.best_first`).
      expanded, pruned: numbers of sets of plans that were searched, and that a proven bound left out.
      bound: predicted seconds that no plan takes less of, which is proven.
      estimated: sets of plans that were not searched since they are estimated to be no faster.
      unreached: sets of plans that the budget left out.
      truncated: whether a limit of wall-clock time ended the search.
    """

    effort: str
    work: int
    allowed: int
    expanded: int
    pruned: int
    bound: float
    estimated: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    truncated: bool = False

    def gap(self, step_seconds: float) -> float:
        """Returns the share by which a plan of these seconds may exceed the best one: 1 - bound / seconds."""
        return max(0.0, 1 - self.bound / step_seconds) if step_seconds else 0.0


@dataclass(frozen=True)
class Outcome:
    """A whole step, as predicted: where its seconds go, and its bytes.

    Attributes:
      compute_seconds, communication_seconds: their sum is the step.
      latency_seconds: the part of the communication that faster links do not shorten.
      batch_seconds: the part of the step that is proportional to the batch, to first order.
      bytes_sent: per device and step, the payload of all collectives.
      bytes_per_device: the peak of memory.
      changed: the number of decisions that differ from the plan, its own included; tied ones count once.
    """

    compute_seconds: float
    communication_seconds: float
    latency_seconds: float
    batch_seconds: float
    bytes_sent: int
    bytes_per_device: int
    changed: int

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.compute_seconds + self.communication_seconds


@dataclass(frozen=True)
class Alternative:
    """One strategy that an operation could have taken, the chosen one included.

    The seconds are per step and for all `Decision.count` tied operations together. `step` is a plan that was found, not
    one that is proven the best: no plan with this alternative is faster than `bound_seconds`, and the best one lies
    between the two. All is for the mesh, and within the method, of the plan.

    Attributes:
      strategy: the mesh axes of each factor.
      layout: the layouts of operands and results as text, such as "[d, None] x [None, m] -> [d, m]".
      compute_seconds: the roofline time of the operation itself.
      communication_seconds: collectives of the operation itself (reductions).
      transfer_seconds: resharding of its operands and results, given the neighbours' chosen strategies.
      bytes_per_device: the size of one of its results; zero if it makes no new value.
      bound_seconds: a lower bound of the whole step within the memory budget, by message passing.
      step: the best whole step that descent found with this alternative. It fits the memory budget if `fits` is true;
        otherwise none that fits was found, and it is the fastest of all.
      fits: whether `step` fits the memory budget.
      flops_seconds, bytes_seconds: what the FLOPs take and what the bytes take; the larger, with the starts of kernels,
        is `compute_seconds`.
      roomy: where `step` fits, a faster one that was found and does not; None if there is none.
      partial: as `Decision.partial`.
    """

    strategy: tuple[tuple[str, ...], ...]
    layout: str
    compute_seconds: float
    communication_seconds: float
    transfer_seconds: float
    bytes_per_device: int
    bound_seconds: float
    step: Outcome
    fits: bool
    roomy: Outcome | None = None
    partial: tuple[str, ...] = ()
    flops_seconds: float = 0.0
    bytes_seconds: float = 0.0

    @property
    def link_seconds(self) -> float:
        """The collectives that the operation issues and those that bring it its operands and take away its results."""
        return self.communication_seconds + self.transfer_seconds


@dataclass(frozen=True)
class Decision:
    """The choice for one operation or argument, and for all that are tied to it.

    Attributes:
      key: structural and stable across JAX versions; replaying finds the operation by it.
      name: readable, such as "dot_general bsd,df->bsf", or the path of an argument.
      where: the user's source line and name scope.
      count: how many tied operations share this decision.
      factors: a size for each factor, or for an argument for each dim.
      strategy: the mesh axes that shard each factor, major to minor.
      seconds: predicted, per step, for all tied operations: compute, collectives and resharding.
      alternatives: the chosen strategy and the most promising others: those that fit the budget first, then by the
        seconds of the whole step; as far as they have been weighed (`Plan.with_alternatives`). Two plans are equal
        whether or not theirs have.
      paths: for arguments, the paths of all that are tied; empty for operations.
      partial: the axes over which an addition's operands and result stay partial sums.
    """

    key: str
    name: str
    where: str
    count: int
    factors: tuple[int, ...]
    strategy: tuple[tuple[str, ...], ...]
    seconds: float
    alternatives: tuple[Alternative, ...] = field(default=(), compare=False)
    paths: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()

    @property
    def chosen_alternative(self) -> Alternative | None:
        """The alternative that was chosen; None if alternatives were not kept."""
        alike = [a for a in self.alternatives if a.strategy == self.strategy]
        return next((a for a in alike if a.partial == self.partial), alike[0] if alike else None)


@dataclass(frozen=True)
class FixedStrategy:
    """A strategy that the method, not the search, fixed; replaying needs it where the program alone allows more.

    Attributes:
      key: as `Decision.key`.
      members: which of the operations with this key, in program order; empty for all of them.
      strategy, partial: as `Decision.strategy` and `Decision.partial`.
    """

    key: str
    members: tuple[int, ...]
    strategy: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replicated:
    """An operation that every device computes whole, or that leaves the region of written collectives.

    Attributes:
      name: the operation.
      where: the user's source line and name scope.
      reason: why.
      bytes: of its operands and results, whole.
      seconds: what it costs per step, for all `count`.
      count: the number of identical operations.
    """

    name: str
    where: str
    reason: str
    bytes: int
    seconds: float
    count: int


@dataclass(frozen=True)
class Candidate:
    """A mesh shape or a textbook plan that was compared with this plan.

    Attributes:
      method: "Sharded", "DataParallel", ...
      mesh_shape: the mesh.
      step_seconds: predicted; None if it was not finished (cut off by a better one, or infeasible).
      bytes_per_device: predicted peak; None if unknown.
      status: "chosen", "slower", "cutoff", "infeasible", ...
    """

    method: str
    mesh_shape: tuple[int, ...]
    step_seconds: float | None
    bytes_per_device: int | None
    status: str
