"""Values of a cluster: links, the start of tasks, curves of collectives; and which values a machine can have."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from alpa_lite.errors import OptionError

T = TypeVar("T")


@dataclass(frozen=True)
class Link:
    """A connection, one direction.

    Attributes:
      bandwidth: bytes/s.
      latency: seconds of one step of a collective over it.
    """

    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Dispatch:
    """The seconds that a process takes to start a task of a pipeline, a run or a transfer: it starts one at a time.

    Attributes:
      task: seconds for each task.
      device: seconds more for each device of the process that takes part.
    """

    task: float = 0.0
    device: float = 0.0

    def seconds(self, devices: int) -> float:
        """Of a task on this number of devices of a process."""
        return self.task + self.device * devices


USUAL_DISPATCH = Dispatch(1e-4)
"""The start of a task of a pipeline (a run or a transfer), where nothing else is known.

Measured on two CPU cores, 67 and 110 microseconds on submeshes of two virtual devices (two versions of JAX: 112 and 183
a run with the two transfers that follow three runs, benchmarks/results/pipeline_overhead.json, packed values). The
hosts of GPUs and TPUs are taken to be as fast, and to start a task on all their devices at once: not measured.
"""


@dataclass(frozen=True)
class Curve:
    """The measured seconds of a collective over groups of devices, interpolated between payloads.

    Seconds are linear in the payload between two points. Below the first they are those of the first; beyond the last
    they are proportional to the payload. (Linear in log payload instead, they are no nearer to XLA's tables.)

    Attributes:
      kind: as `alpa_lite.cluster.cost.CollectiveKind`.
      group: the devices of a group on each level, as `alpa_lite.cluster.cost.MeshCost.group` says.
      points: (bytes of payload, seconds), both ascending.
    """

    kind: str
    group: tuple[int, ...]
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", tuple(self.group))
        object.__setattr__(self, "points", tuple((float(p), float(s)) for p, s in self.points))

    def tangent(self, payload: float) -> tuple[float, float]:
        """(alpha, beta): seconds = alpha + payload * beta at a payload; neither is negative."""
        points = self.points
        if payload <= points[0][0]:
            return points[0][1], 0.0
        if payload >= points[-1][0]:
            return 0.0, points[-1][1] / points[-1][0]
        after = bisect.bisect_right(points, payload, key=lambda point: point[0])
        (p, s), (q, t) = points[after - 1 : after + 1]
        slope = (t - s) / (q - p)
        seconds = s + (payload - p) * slope
        beta = min(slope, seconds / payload)
        return seconds - payload * beta, beta


def make(kind: type[T], value: Any) -> T:
    """Returns a value of a class from its fields, by name or in order; one that is there already is returned."""
    match value:
        case Mapping():
            return kind(**value)
        case tuple() | list():
            return kind(*value)
    return value


def attention_shares(given: Any) -> tuple[tuple[str, tuple[float, float]], ...]:
    """`Cluster.attention_efficiency` as pairs."""
    items = given.items() if isinstance(given, Mapping) else given
    pairs: list[tuple[str, Any]] = [("", ())]  # which is refused
    with suppress(TypeError, ValueError):
        pairs = [(str(name), (float(x),) * 2 if isinstance(x, int | float) else (*map(float, x),)) for name, x in items]
    if not all(len(shares) == 2 and all(0 < share <= 1 for share in shares) for _, shares in pairs):
        raise OptionError(
            f"Cluster attention_efficiency={given!r}: give kernel -> (forward, backward), fractions of the peak above "
            "0, at most 1"
        )
    return tuple(sorted(pairs))


def _ascends(curve: Curve) -> bool:
    rising = all(p < q and s <= t * (1 + 1e-9) for (p, s), (q, t) in itertools.pairwise(curve.points))
    return bool(curve.points) and min(curve.points[0]) > 0 and rising


RULES: tuple[tuple[str, Callable[[Any, Any], bool], str], ...] = (
    (
        "devices_per_node nodes memory devices_per_card tile parallel_units",
        lambda _, value: isinstance(value, int) and value >= 1, "give a positive whole number",
    ),
    ("reserve", lambda _, value: 0 <= value < 1, "give a fraction of the memory, at least 0 and below 1"),
    (
        "matmul_efficiency sustained_efficiency memory_efficiency",
        lambda _, value: 0 < value <= 1, "give a fraction above 0, at most 1",
    ),
    ("kernel_start kernel_start_alone", lambda _, value: value >= 0, "give seconds >= 0"),
    ("memory_bandwidth", lambda _, value: value > 0, "give bytes/s above 0"),
    (
        "peak_flops", lambda _, value: "f32" in dict(value) and min(dict(value).values()) > 0,
        'give FLOP/s above 0, for "f32" at least',
    ),
    (
        "node_link network_link card_link", lambda _, link: link is None or isinstance(link, Link),
        "give a Link(bytes per second, seconds of latency)",
    ),
    (
        "node_link network_link card_link",
        lambda _, link: link is None or (link.bandwidth > 0 and link.latency >= 0),
        "give bytes/s above 0, seconds >= 0",
    ),
    ("network_link", lambda own, link: link is not None or own.nodes == 1, "several nodes need a network"),
    (
        "dispatch", lambda _, host: isinstance(host, Dispatch) and host.task >= 0 and host.device >= 0,
        "give Dispatch(seconds of a task, seconds for each of its devices), or seconds of a task",
    ),
    ("collectives", lambda _, many: all(map(_ascends, many)), "each needs points (bytes, seconds) above 0, ascending"),
    ("devices_per_card", lambda own, cards: own.devices_per_node % cards == 0, "it must divide devices_per_node"),
    (
        "card_link", lambda own, link: (own.devices_per_card > 1) == (link is not None),
        "give it with devices_per_card above 1, else not",
    ),
    (
        "topology", lambda own, dims: not dims or math.prod(dims) == own.devices_per_node,
        "its product must be devices_per_node",
    ),
    (
        "devices_per_card", lambda own, cards: not own.topology or own.card_link is None or own.topology[-1] == cards,
        "the last dim of a topology is that of the devices of a card",
    ),
    (
        "wraparound", lambda own, rings: len(rings) == len(own.topology),
        "give one truth value for each dim of the topology",
    ),
)  # fmt: skip
"""Fields of a cluster, the values that a machine can have, and the remedy for others."""
