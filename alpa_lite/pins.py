"""Where leaves and values of a step must lie, whatever is cheaper: what is given, not searched for.

A pin comes from where the state already is (the plan of another signature, or of another step), from a constraint that
the user wrote, or from an array that arrives sharded. Passes read pins as hard constraints; `why` is for plans and
errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from alpa_lite.layout import Axes, Layout, LogicalMesh


@dataclass(frozen=True)
class Pin:
    """Where one leaf or value lies.

    Attributes:
      mesh: the logical mesh of a submesh, or of all devices.
      first_device: the number of the submesh's first device in the cluster; 0 for a mesh of all devices.
      layout: how it lies there; without partial sums.
      why: in words, to follow "because", such as "the state is kept where `train_step` put it".
    """

    mesh: LogicalMesh
    first_device: int
    layout: Layout
    why: str


@dataclass(frozen=True)
class Pins:
    """All pins of one compilation.

    Attributes:
      arguments: flat argument number of the user's step -> its pin.
      state: the flat arguments that are state of the step that the pins come from: never the batch of this one.
    """

    arguments: Mapping[int, Pin] = field(default_factory=dict)
    state: frozenset[int] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.arguments)

    def on_submeshes(self, num_devices: int) -> bool:
        """Whether something lies on fewer devices than all."""
        return any(mesh.size < num_devices for mesh, _ in self.meshes)

    @property
    def meshes(self) -> tuple[tuple[LogicalMesh, int], ...]:
        """The distinct (mesh, first device), in the order of devices: more than one if the state is on submeshes."""
        found = {(pin.mesh, pin.first_device) for pin in self.arguments.values()}
        return tuple(sorted(found, key=lambda pair: (pair[1], pair[0].shape, pair[0].axis_names)))


NO_PINS = Pins()
"""Everything lies where the plan wants it."""


@dataclass(frozen=True)
class Wish:
    """What a user says of where one leaf or value lies, by names of axes; the mesh may still be searched.

    Attributes:
      dims: for each dim the axes that shard it; None leaves the dim free.
      why: who says so, to follow "because of".
    """

    dims: tuple[Axes | None, ...]
    why: str


@dataclass(frozen=True)
class Wishes:
    """All that a user says of one step, beside the method.

    Attributes:
      mesh: the mesh that the step's own constraints, its arrays, or the context name; None leaves it to the search.
      names: the names of axes that a searched mesh must have, major to minor; none leaves them to the search.
      more: whether a searched mesh may have another axis before these.
      why: where the mesh or the names come from, to follow "because of".
      leaves: stored path of an argument -> what is said of it.
      given: stored paths of those leaves that the method itself names: they come before the rest of the method.
      notes: what is not heeded, and why.
    """

    mesh: LogicalMesh | None = None
    names: Axes = ()
    more: bool = False
    why: str = ""
    leaves: Mapping[str, Wish] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


NO_WISHES = Wishes()
"""The user says nothing."""
