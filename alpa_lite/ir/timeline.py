"""The timeline of one pipelined step, predicted by a simulation, or measured. A value.

Times are seconds from the start of the step. The kind of an event distinguishes runs on a submesh from transfers that
leave it: transfers overlap with computation, everything else on one submesh takes turns.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal

EventKind = Literal["prologue", "forward", "backward", "weight", "update", "step", "transfer"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time on a submesh.

    Attributes:
      mesh: the number of the submesh; of a transfer, the one that sends.
      start, end: seconds from the start of the step.
      name: such as "forward 3" (of micro-batch 3).
      kind: as in `program.Kind`, or "transfer".
      stage: the pipeline stage, or -1. Of a transfer between stages, the one that sends.
      microbatch: or -1.
      destination: of a transfer, the submesh that receives; -1 otherwise.
      bytes: of a transfer, what one device of the source holds of it; 0 where unknown.
    """

    mesh: int
    start: float
    end: float
    name: str
    kind: EventKind
    stage: int = -1
    microbatch: int = -1
    destination: int = -1
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, repr=False)
class Timeline:
    """The events of one step.

    Attributes:
      events: in no particular order.
      num_meshes: the number of submeshes.
      name: such as "predicted" or "executed".
    """

    events: tuple[Event, ...]
    num_meshes: int
    name: str = ""

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<Timeline{name}: {len(self.events)} events on {self.num_meshes} submeshes, {self.seconds:.4g} s>"

    def to_json(self) -> dict[str, Any]:
        """JSON values: an event is the list of its fields."""
        return {
            "name": self.name,
            "num_meshes": self.num_meshes,
            "events": [list(dataclasses.astuple(event)) for event in self.events],
        }

    @classmethod
    def from_json(cls, data: Any) -> Timeline:
        """Returns the timeline that `to_json` wrote.

        Raises:
          ValueError: if the data are damaged.
        """
        if not isinstance(data, dict) or set(data) != {"name", "num_meshes", "events"}:
            raise ValueError("a timeline has a name, num_meshes and events")
        try:
            events = tuple(Event(*fields) for fields in data["events"])
        except TypeError as error:
            raise ValueError(f"an event of the timeline: {error}") from error
        return cls(events, int(data["num_meshes"]), str(data["name"]))

    @functools.cached_property
    def seconds(self) -> float:
        """When the last event ends."""
        return max((event.end for event in self.events), default=0.0)

    @functools.cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds that each submesh computes. Transfers do not count."""
        out = [0.0] * self.num_meshes
        for event in self.events:
            if event.kind != "transfer":
                out[event.mesh] += event.end - event.start
        return tuple(out)

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Seconds that each submesh does not compute."""
        return tuple(self.seconds - busy for busy in self.busy_seconds)

    @property
    def idle_fraction(self) -> tuple[float, ...]:
        """The share of the step in which each submesh does not compute; 0 where the step takes no time."""
        return tuple(idle / self.seconds if self.seconds else 0.0 for idle in self.idle_seconds)
