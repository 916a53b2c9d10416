"""The given placements of leaves and values of a step, which are not searched for.

A pin comes from where the state already is (the plan of another signature, or of another step), from a constraint that
the user wrote, or from an array that arrives sharded. Passes read pins as hard constraints; `why` is for plans and
errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from alpa_lite.ir.layout import Axes, Layout, LogicalMesh
from alpa_lite.plan.records import Leaf, PlanRecord, Stage, spec_axes

_SLICE = re.compile(r"\[\d+:\d+\]$")


@dataclass(frozen=True)
class Pin:
    """The placement of one leaf or value.

    Attributes:
      mesh: the logical mesh of a submesh, or of all devices.
      first_device: the number of the submesh's first device in the cluster; 0 for a mesh of all devices.
      layout: its layout there; without partial sums.
      why: in words, to follow "because", such as "the state is kept where `train_step` put it".
    """

    mesh: LogicalMesh
    first_device: int
    layout: Layout
    why: str


@dataclass(frozen=True)
class Piece:
    """A part of a stacked leaf: `low` to `high` of dim 0, and its placement."""

    low: int
    high: int
    pin: Pin


@dataclass(frozen=True)
class Pins:
    """All pins of one compilation.

    Attributes:
      arguments: flat argument number of the user's step -> its pin.
      pieces: flat argument number -> its parts, in order, for leaves of which several submeshes have a part each.
      state: the flat arguments that are state of the step that the pins come from: never the batch of this one.
    """

    arguments: Mapping[int, Pin] = field(default_factory=dict)
    pieces: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    state: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.arguments or self.pieces)

    def on_submeshes(self, num_devices: int) -> bool:
        """Returns whether something is on fewer devices than all."""
        return any(mesh.size < num_devices for mesh, _ in self.meshes)

    @property
    def meshes(self) -> tuple[tuple[LogicalMesh, int], ...]:
        """The distinct (mesh, first device), in the order of devices: more than one if the state is on submeshes."""
        pins = (*self.arguments.values(), *(piece.pin for parts in self.pieces.values() for piece in parts))
        found = {(pin.mesh, pin.first_device) for pin in pins}
        return tuple(sorted(found, key=lambda pair: (pair[1], pair[0].shape, pair[0].axis_names)))


def pin_of(stage: Stage, first_device: int, leaf: Leaf, why: str) -> Pin:
    """Returns where a stage of a plan has a leaf."""
    mesh = LogicalMesh(tuple(stage.mesh_shape), tuple(stage.axis_names))
    return Pin(mesh, first_device, layout_of_spec(leaf.spec, len(leaf.shape)), why)


def layout_of_spec(spec: PartitionSpec, rank: int) -> Layout:
    """Returns the layout of a value with `rank` dims that a mesh shards as `spec` says."""
    axes = spec_axes(spec)
    return Layout((*axes, *((),) * (rank - len(axes))))


def places(plan: PlanRecord, why: str) -> dict[str, Pin | tuple[Piece, ...]]:
    """Where a plan has the arguments that are no batch, by path; stacked leaves that stages share, in their parts."""
    whole: dict[str, Pin] = {}
    parts: dict[str, list[Piece]] = {}
    for stage, submesh in zip(plan.stages, plan.division.submeshes, strict=True):
        for leaf in stage.arguments:
            if leaf.role == "batch":
                continue
            pin = pin_of(stage, plan.division.first_devices[submesh], leaf, why)
            match = _PART.fullmatch(leaf.path)
            if match is None:
                whole[leaf.path] = pin
            else:
                parts.setdefault(match[1], []).append(Piece(int(match[2]), int(match[3]), pin))
    ordered = {path: tuple(sorted(some, key=lambda piece: piece.low)) for path, some in parts.items()}
    return {**whole, **ordered}


_PART = re.compile(r"(.*)\[(\d+):(\d+)\]")  # how `layers.scans` names the part of a stacked leaf

NO_PINS = Pins()
"""Nothing is placed before planning."""


@dataclass(frozen=True)
class Wish:
    """A user's sharding of one leaf or value, by names of axes; the mesh may still be searched.

    Attributes:
      dims: for each dim the axes that shard it; None leaves the dim free.
      why: the source of the wish, to follow "because of".
    """

    dims: tuple[Axes | None, ...]
    why: str


@dataclass(frozen=True)
class Wishes:
    """All constraints of a user on one step, in addition to the method.

    Attributes:
      mesh: the mesh that the step's own constraints, its arrays, or the context name; None leaves it to the search.
      names: the names of axes that a searched mesh must have, major to minor; none leaves them to the search.
      has_more_axes: whether a searched mesh may have another axis before these.
      why: where the mesh or the names come from, to follow "because of".
      leaves: stored path of an argument -> what is said of it.
      given_paths: stored paths of those leaves that the method itself names: they come before the rest of the method.
      notes: the constraints that are not applied, and why.
      forbidden: names of `methods.STRATEGIES`.
    """

    mesh: LogicalMesh | None = None
    names: Axes = ()
    has_more_axes: bool = False
    why: str = ""
    leaves: Mapping[str, Wish] = field(default_factory=dict)
    given_paths: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    forbidden: frozenset[str] = frozenset()

    def leaf(self, path: str) -> Wish | None:
        """Returns the wish for a leaf, or for the whole that it is a slice of; None if there is none."""
        return self.leaves.get(path) or self.leaves.get(_SLICE.sub("", path))

    def names_leaf(self, path: str) -> bool:
        """Returns whether the method names a leaf, or the whole that it is a slice of."""
        return path in self.given_paths or _SLICE.sub("", path) in self.given_paths


NO_WISHES = Wishes()
"""The user says nothing."""
