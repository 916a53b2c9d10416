"""What the search of one way to run a step on one mesh tells the searches of others.

A way is a number of micro-batches and what is computed again (`programs.ways`). More of either only adds seconds, so
what no plan of a mesh undercuts with less, none undercuts with more: a mesh whose bound reaches the seconds that are to
be undercut is not even built. And the mesh that was best is tried first.

Bytes. Let P(c) be the least bytes per device of any plan with c micro-batches, and `floor` the bytes of the training
state in blocks. Take the layouts of a plan with b >= c of them: with c, all that a micro-batch makes is at most b / c
times as large, and what is left takes at least `floor`. Hence

    P(b)  >=  floor + (P(c) - floor) * c / b :

where c does not fit, `doublings` says which b may.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, log
from types import MappingProxyType
from typing import Protocol, TypeVar

from alpa_lite.layout import LogicalMesh

Bounds = Mapping[LogicalMesh, float]
"""Mesh -> seconds that none of its plans undercuts, whatever the memory."""

NOTHING_KNOWN: Bounds = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Lessons:
    """What is known before a search.

    Attributes:
      bounds: of meshes; those that are left out have none.
      first: the mesh that was best so far.
      quick: whether, where time is short, the first mesh is enough, for a plan or to tell that nothing fits: the others
        are searched for the best way alone.
    """

    bounds: Bounds = field(default_factory=lambda: NOTHING_KNOWN)
    first: LogicalMesh | None = None
    quick: bool = False


class Beaten(Exception):
    """There is no plan below the cutoff, or none was found in the time.

    Attributes:
      bounds: of the meshes that were tried. free: the least of them.
      least: bytes per device that no plan of the meshes tried has less of; 0 if that is not known.
      wider: whether meshes that were not tried may fit.
    """

    def __init__(self, bounds: Bounds, least: float = 0.0, wider: bool = False) -> None:
        self.bounds, self.least, self.wider = bounds, least, wider
        self.free = min(bounds.values(), default=0.0)
        super().__init__(f"no plan undercuts the cutoff; none of any memory undercuts {self.free:.4g} s")


class OnMesh(Protocol):
    """Something to be tried on a mesh."""

    @property
    def mesh(self) -> LogicalMesh:
        """The mesh."""
        ...


T = TypeVar("T", bound=OnMesh)


def ordered(problems: Iterable[T], nodes: int, first: LogicalMesh | None = None) -> list[T]:
    """The most promising meshes first.

    These are the mesh that was best before, of several nodes the mesh with one axis along the nodes and one within
    them, since whatever the mesh of one axis does is also done there, and the mesh of one axis. Then come those of
    fewer axes, the more equal ones first: where a dim does not divide by all devices, two dims may by their roots.
    """

    def key(problem: T) -> tuple[bool, bool, int, float]:
        shape = problem.mesh.shape
        along = nodes > 1 and len(shape) == 2 and shape[0] == nodes
        return problem.mesh != first, not along, len(shape), log(max(shape) / min(shape)) if len(shape) > 1 else 0.0

    return sorted(problems, key=key)


def doublings(count: int, least: float, floor: float, budget: float) -> int:
    """The least 2^k times so many micro-batches, k >= 1, that may fit a budget above the floor; see the module.

    Args:
      least: bytes that do not fit with `count` of them; 0 if that is not known.
    """
    assert floor < budget and least < inf
    more = 2 * count
    while floor + (least - floor) * count / more > budget:
        more *= 2
    return more
