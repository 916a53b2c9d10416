"""Options and results of `dp.slicing`."""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.ir.schedules import NAMES

VIRTUAL = 2
"""Stages of each submesh with interleaved-1f1b."""


@dataclass(frozen=True)
class StageChoice:
    """One stage: layers [first, stop) as variant `variant` on submesh number `mesh`, of kind `kind`."""

    first: int
    stop: int
    kind: int
    variant: int
    mesh: int


@dataclass(frozen=True)
class StageSlices:
    """A pipeline.

    Attributes:
      stages: first to last; stage s is on submesh s modulo the number of submeshes.
      num_microbatches, schedule, virtual: B, one of `schedules.NAMES`, and the stages of each submesh.
      seconds: predicted, of a step.
      devices: the number of devices of each submesh.
      first_devices: the number of each submesh's first device, in order of the stages where that is aligned, else by
        falling size.
      bytes: per device of each submesh.
    """

    stages: tuple[StageChoice, ...]
    num_microbatches: int
    schedule: str
    virtual: int
    seconds: float
    devices: tuple[int, ...]
    first_devices: tuple[int, ...]
    bytes: tuple[float, ...]

    @property
    def num_meshes(self) -> int:
        """S, the number of submeshes."""
        return len(self.devices)

    @property
    def devices_used(self) -> int:
        """The devices of all submeshes."""
        return sum(self.devices)


@dataclass(frozen=True)
class WeighedSchedule:
    """One schedule with one number of micro-batches, all devices used.

    Attributes:
      num_microbatches, schedule, virtual: which.
      num_stages: the number of submeshes; None where no pipeline was found before a better schedule cut the search off.
      seconds, bytes: of the best pipeline met with these, the bytes of its fullest submesh; None if none was met.
      bound: no pipeline with this B, schedule and number of virtual stages is faster, whatever its number of stages;
        inf: none is possible.
      status: "chosen", "optimal" (the best for this B and schedule), "met" (others may be faster), "cutoff" (proven
        slower than the chosen one, not finished), "not searched" or "infeasible".
    """

    num_microbatches: int
    schedule: str
    virtual: int
    num_stages: int | None
    seconds: float | None
    bytes: float | None
    bound: float
    status: str


@dataclass(frozen=True)
class Infeasibility:
    """Why there is no pipeline on all devices.

    Attributes:
      constraint: "memory", "devices" (no stages of the allowed kinds and number use all devices, whatever the memory),
        or "schedule" (no schedule exists for the given numbers).
      message: in words, with values.
      smallest_budget: bytes per device that would do; None where memory is not what binds.
    """

    constraint: str
    message: str
    smallest_budget: float | None


@dataclass(frozen=True)
class StageSlicing:
    """The result of `slice_stages`.

    Attributes:
      all_devices: the fastest pipeline that uses every device; None if there is none.
      fewer_devices: the fastest of all, if it uses fewer devices and is faster than `all_devices`; else None.
      bound: no pipeline on any number of devices is faster.
      infeasible: why `all_devices` is None.
      weighed: by B and schedule, fastest first.
    """

    all_devices: StageSlices | None
    fewer_devices: StageSlices | None
    bound: float
    infeasible: Infeasibility | None
    weighed: tuple[WeighedSchedule, ...]

    @property
    def best(self) -> StageSlices | None:
        """The fastest pipeline."""
        return self.fewer_devices or self.all_devices


@dataclass(frozen=True)
class SliceOptions:
    """Options that are given rather than searched.

    Attributes:
      budget: bytes per device.
      schedules: names to choose from.
      num_stages: the number of submeshes; None to search it.
      kinds: the kind of submesh of each stage, first to last; None to search them.
      gap: stop within this fraction of the optimum; 0 for the optimum itself.
      allowed: the kinds of submesh to search; None for all.
      has_equal_submeshes: whether only pipelines of equal submeshes on all devices are searched, which takes a fraction
        of the time.
    """

    budget: float
    schedules: tuple[str, ...] = NAMES
    num_stages: int | None = None
    kinds: tuple[int, ...] | None = None
    gap: float = 0.0
    allowed: tuple[int, ...] | None = None
    has_equal_submeshes: bool = False
