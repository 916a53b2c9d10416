"""The records of a plan, without methods that print, so that `report` and `plan` can both build on them.

Units are seconds per step, bytes per device, and FLOPs, unless an attribute says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from alpa_lite.cluster import Cluster
from alpa_lite.ir.timeline import Timeline
from alpa_lite.plan.decisions import Candidate, Decision, FixedStrategy, Replicated, SearchSummary, Solver
from alpa_lite.plan.figures import AxisUse, Comparison, OpCost, Products, Residual

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "transfer")
"""The kinds of collectives."""


@dataclass(frozen=True)
class Collective:
    """One logical collective of a step.

    Attributes:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all, collective_permute or transfer.
      axes: the mesh axes it runs over.
      bytes: per-device result payload at the program's dtype (for reduce_scatter the operand's) of one execution.
      count: executions per step, with loop trip counts multiplied in.
      stage: the pipeline stage.
      where: the user's source line or name scope, and the value that moves.
      route: of a transfer, the submeshes that it goes from and to.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    stage: int
    where: str
    route: tuple[int, int] | None = field(default=None, metadata={"optional": True})


@dataclass(frozen=True)
class Leaf:
    """One flat argument or result of the step.

    Attributes:
      path: the stored path (`alpa_lite.ir.paths`): `jax.tree_util.keystr` after the parameter's name.
      shape: its dims.
      dtype: the dtype's name.
      bytes: of the whole value.
      role: "state", "batch", "frozen" or "other", as in `graph.Argument`.
      spec: how the mesh shards it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    role: str
    spec: PartitionSpec


@dataclass(frozen=True)
class Memory:
    """Bytes per device: the largest amount that each kind takes.

    Attributes:
      params: parameters as they are stored between steps, and their new values.
      gradients: of parameters, as the update reads them.
      optimizer: moments and other state that only new state is made of, and what the update makes in between.
      activations: everything else, the batch included.
      total: the peak. The kinds need not peak together, so it may be less than their sum.
      gathered: copies of weights for the operations that read them: gathered from their shards, cast, or cut out.
      frozen: weights that the step reads and does not return.
      over_step: kind -> its bytes at equal distances from the first operation of a step on one mesh to the last; None
        where that is not known.
    """

    params: int
    gradients: int
    optimizer: int
    activations: int
    total: int
    gathered: int = 0
    frozen: int = 0
    over_step: Mapping[str, tuple[int, ...]] | None = field(default=None, metadata={"optional": True})

    @property
    def kinds(self) -> dict[str, int]:
        """The kinds in the order of reports; weights that are copied, and frozen ones, only where there are any."""
        names = ("params", "frozen", "gathered", "gradients", "optimizer", "activations")
        return {k: getattr(self, k) for k in names if getattr(self, k) or k not in ("frozen", "gathered")}


@dataclass(frozen=True)
class Stage:
    """One mesh and its computation, planned as a separate step. A plan without a pipeline has one stage.

    Attributes:
      mesh_shape, axis_names: the mesh; axes are major to minor in device number.
      arguments, results: the flat arguments and results of the step that the stage keeps, in the step's order.
      received, sent: the values from and to other stages, as flat arguments and results of the stage.
      memory: bytes per device.
      seconds: predicted seconds per step.
      compute_seconds, communication_seconds: `seconds` is their sum less `hidden_seconds`.
      hidden_seconds: of the communication, the part that overlaps with computation; counted where the cluster allows it
        (`Cluster.overlap`).
      hideable_seconds: of the communication, the gradient synchronisation and the gathers of parameters.
      solver: how the shardings of the stage were found.
      decisions: the choices, which replaying needs.
      fixed: the strategies fixed by the method, which replaying needs, too.
      replicated: the operations that are not distributed, the most expensive first.
      ingredients: the key of the stage (JAX version, program, argument signature, mesh), each as text.
      axes: the uses of each mesh axis.
      held: the activations that wait for the backward pass.
      spending: where `compute_seconds` go.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    memory: Memory
    seconds: float
    compute_seconds: float
    communication_seconds: float
    solver: Solver
    received: tuple[Leaf, ...] = ()
    sent: tuple[Leaf, ...] = ()
    decisions: tuple[Decision, ...] = ()
    fixed: tuple[FixedStrategy, ...] = ()
    replicated: tuple[Replicated, ...] = ()
    ingredients: Mapping[str, str] = field(default_factory=dict)
    axes: tuple[AxisUse, ...] = ()
    held: tuple[Residual, ...] = ()
    spending: tuple[OpCost, ...] = ()
    hidden_seconds: float = 0.0
    hideable_seconds: float = 0.0

    @property
    def num_devices(self) -> int:
        """The devices of its mesh."""
        return math.prod(self.mesh_shape)

    @property
    def inputs(self) -> dict[str, PartitionSpec]:
        """The sharding of every argument, by path."""
        return {leaf.path: leaf.spec for leaf in self.arguments}

    @property
    def outputs(self) -> dict[str, PartitionSpec]:
        """The sharding of every result, by path."""
        return {leaf.path: leaf.spec for leaf in self.results}

    def shards(self, spec: PartitionSpec) -> int:
        """Returns into how many different blocks `spec` cuts a value."""
        sizes = dict(zip(self.axis_names, self.mesh_shape, strict=True))
        return math.prod(sizes[axis] for axes in spec_axes(spec) for axis in axes)

    def bytes_per_device(self, leaf: Leaf) -> int:
        """Returns bytes of one device's block of `leaf`."""
        return -(-leaf.bytes // self.shards(leaf.spec))


@dataclass(frozen=True)
class Division:
    """How a plan divides the step and the devices. One mesh is one stage with all layers on one submesh.

    Attributes:
      virtual: the stages of each submesh.
      num_layers: the layers that the forward pass was cut into.
      max_layers: the most layers that it may have been cut into.
      first_layers: of each stage.
      submeshes: the submesh of each stage.
      first_devices: the number of each submesh's first device.
      remat: what each stage's backward pass computes again: "none", "layer" or "selective"; on one mesh also "layer in
        the first 5 of 12 layers".
      buffer_bytes: per device of each submesh, what buffers take between tasks at their peak.
      temporary_bytes: likewise, the most that an executable needs in addition.
      timeline: the simulated step.
      idle_devices: if devices of the cluster are not used, how many are and why; else empty.
      owned: the paths of the arguments that the step was divided by, each on the submesh that has it; empty for a step
        that was divided by its layers.
      token_slices: tokens of each slice that the sequence is cut into; empty for whole sequences.
    """

    virtual: int
    num_layers: int
    max_layers: int
    first_layers: tuple[int, ...]
    submeshes: tuple[int, ...]
    first_devices: tuple[int, ...]
    remat: tuple[str, ...]
    buffer_bytes: tuple[int, ...]
    temporary_bytes: tuple[int, ...]
    timeline: Timeline
    idle_devices: str = ""
    owned: tuple[str, ...] = ()
    token_slices: tuple[int, ...] = ()

    def layers_of(self, stage: int) -> tuple[int, int]:
        """Returns the first layer of a stage, and how many layers it has."""
        bounds = [*self.first_layers, self.num_layers]
        return bounds[stage], bounds[stage + 1] - bounds[stage]


@dataclass(frozen=True)
class PlanRecord:
    """The fields of a `Plan`.

    Attributes:
      method: the method in a few words, such as "auto".
      cluster: the devices that the plan is for.
      num_devices, num_stages, num_microbatches, schedule: 1, 1 and "none" on one mesh without pipelines.
      step_seconds: predicted seconds per step.
      fingerprint: a hash of `ingredients`.
      ingredients: what the plan belongs to (JAX version, program, argument signature, mesh, options), each as text.
      notes: remarks, such as which argument was taken as the batch and why.
      memory_per_device: the budget in bytes per device.
      stages: one a pipeline stage.
      collectives: the logical collectives in program order.
      collective_seconds: one for each of `collectives`: predicted seconds per step of all its executions.
      solver: how the choice was found.
      division: how step and devices are divided.
      rewrites: what the compiler is known to change afterwards, each by name.
      verification: what was checked against the compiler, with the outcome.
      candidates: the mesh shapes and textbook plans that were weighed.
      search: the search that found the plan; None where there was none.
      planning_seconds: measured seconds of planning, by pass; not saved, and two plans are equal whatever they are.
      products: the FLOPs of the step's own matrix products, for its utilisation.
      comparisons: other methods on the same devices, as far as they have been evaluated (`Plan.with_baselines`); two
        plans are equal whichever were.
    """

    method: str
    cluster: Cluster
    num_devices: int
    num_stages: int
    num_microbatches: int
    schedule: str
    step_seconds: float
    fingerprint: str
    memory_per_device: int
    stages: tuple[Stage, ...]
    collectives: tuple[Collective, ...]
    collective_seconds: tuple[float, ...]
    solver: Solver
    division: Division
    rewrites: tuple[str, ...] = ()
    verification: tuple[str, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    notes: tuple[str, ...] = ()
    ingredients: Mapping[str, str] = field(default_factory=dict)
    search: SearchSummary | None = None
    planning_seconds: Mapping[str, float] = field(default_factory=dict, compare=False, metadata={"saved": False})
    products: Products = field(default_factory=Products)
    comparisons: tuple[Comparison, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.collectives) != len(self.collective_seconds):
            raise ValueError(f"{len(self.collectives)} collectives but {len(self.collective_seconds)} seconds")
        if len(self.stages) != self.num_stages:
            raise ValueError(f"num_stages is {self.num_stages} but there are {len(self.stages)} stages")

    def __hash__(self) -> int:
        return hash((self.fingerprint, self.decisions))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of all stages."""
        return tuple(decision for stage in self.stages for decision in stage.decisions)

    @property
    def replicated(self) -> tuple[Replicated, ...]:
        """The operations that are not distributed, of all stages."""
        return tuple(row for stage in self.stages for row in stage.replicated)

    @property
    def priced_collectives(self) -> tuple[tuple[Collective, float], ...]:
        """The collectives, each with its seconds."""
        return tuple(zip(self.collectives, self.collective_seconds, strict=True))

    @property
    def is_pipelined(self) -> bool:
        """Whether stages run micro-batches by a schedule, rather than one executable the whole step."""
        return self.schedule != "none"


def spec_axes(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of each dim: P('a', None, ('b', 'c')) gives (('a',), (), ('b', 'c'))."""
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
