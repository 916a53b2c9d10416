"""The costs of computation and communication on a cluster, in seconds.

**Collectives** cost alpha + payload * beta, where the payload is what plans report
(`alpa_lite.plan.plan.Collective.bytes`): the bytes of the result per device, for a reduce-scatter those of the operand.
The axes of a collective occupy g_1, g_2, ... devices of the machine's levels, innermost first
(`alpa_lite.cluster.topology`), and the collective is hierarchical over them. An all-gather runs from the outermost
level inwards, so that slow links carry the smallest blocks, a reduce-scatter in the opposite order, and an all-reduce
is the one after the other. With b_k the bytes/s of a device over level k,

    gather or scatter   beta = sum_k  (g_k - 1) / g_k / (b_k * g_1 ... g_{k-1})   the ring's term on each level
    all_reduce          twice that
    all_to_all          beta = sum_k  (g_1 ... g_k - g_1 ... g_{k-1}) / n / b_k   peers first met on level k
    collective_permute  beta = 1 / b of the outermost level

and alpha counts one step for starting the collective and those of the better of ring and tree, min(g - 1, ceil(log2 g))
on each level. (An affine cost takes each term from the algorithm that is best at it; double binary trees nearly reach
both.)

Where a cluster has measured `collectives`, these are taken for the groups that they are of, and for the innermost level
of others. Their seconds are interpolated between payloads, so alpha and beta then depend on the payload: the tangent of
the curve there.

**Torus dims** are one level together: an axis sends over all the torus dims that it lies on at once. A dim gives two
links per device where the axis closes a ring and one where it is a line, divided by the number of groups that are
interleaved on the same links; a step is a hop. All-to-all is bound by the bisection of the worst dim: with s devices a
ring carries payload * s / 8 over its fullest link and a line payload * s / 4.

**Compute** is a roofline, the larger of FLOPs over reached peak and bytes over reached memory bandwidth. See
`MeshCost.matmul_efficiency` for how small matrix products fall short of the peak. Rates are those of whole steps
(`Cluster.sustained_efficiency`, `Cluster.memory_efficiency`), in which each kernel also takes `Cluster.kernel_start`;
`MeshCost.matmul` prices a product by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal, get_args

from alpa_lite.cluster import Cluster, Curve
from alpa_lite.cluster.topology import Level, Piece, decompose
from alpa_lite.ir.layout import Axes, LogicalMesh

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"]

#: The longest part of k that one tile works through before splitting k over idle units pays, in tiles.
_SPLIT_TILES = 8
#: The shortest side of a tile: two instructions of tensor cores (m16n8k16), two registers' rows of a TPU at bfloat16.
_LEAST_TILE = 16
#: A tile of half the usual size on both sides still keeps the matrix unit busy, one of a quarter no more.
_REUSE = 4


@dataclass(frozen=True)
class _Rung:
    """One level as a collective sees it.

    size: devices of the group on it. bandwidth: bytes/s of a device. step: seconds of one step's latency. steps: the
    same of all steps of a gather. exchange: seconds per payload byte of an all-to-all on this rung alone.
    """

    size: int
    bandwidth: float
    step: float
    steps: float
    exchange: float


@dataclass(frozen=True)
class MeshCost:
    """Prices on one logical mesh of a cluster: a value, so that whatever is derived from it is derived once.

    The mesh takes the cluster's first `mesh.size` devices in order: its last axis joins neighbours.

    Raises:
      OptionError: if the mesh has more devices than the cluster.
    """

    cluster: Cluster
    mesh: LogicalMesh

    def __post_init__(self) -> None:
        self._levels  # noqa: B018  raises if the mesh is too large

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """A cluster is a tree of values: its hash is computed once, not at each look into a table."""
        return hash((self.cluster, self.mesh))

    @cached_property
    def _peak(self) -> Callable[[Any], float]:
        return cache(self.cluster.peak)

    @cached_property
    def _derived(self) -> Callable[[str, Axes, float], tuple[float, float]]:
        return cache(self._derive)

    @cached_property
    def _levels(self) -> tuple[Level, ...]:
        return tuple(self.cluster.levels(self.mesh.size))

    @cached_property
    def _pieces(self) -> tuple[tuple[Piece, ...], ...] | None:
        return decompose(self.mesh.shape, tuple(level.size for level in self._levels))

    def collective(self, kind: str, axes: Axes, payload: float) -> float:
        """Returns seconds of one collective.

        Args:
          kind: one of `CollectiveKind`, or "slice", which costs nothing.
          axes: the mesh axes it runs over, in any order.
          payload: bytes of one device's result; for reduce_scatter of its operand.

        Raises:
          ValueError: for an unknown kind or axis.
        """
        alpha, beta = self.coefficients(kind, axes, payload)
        return alpha + beta * payload

    def coefficients(self, kind: str, axes: Axes, payload: float = 0.0) -> tuple[float, float]:
        """(alpha, beta) of a collective: seconds, and seconds per byte of payload. Both 0 where nothing is sent.

        Args:
          payload: where they are taken; they depend on it where the cluster has measured collectives.
        """
        return self._derived(kind, axes, payload if self.cluster.collectives else 0.0)

    def compute(self, flops: float, bytes_moved: float, dtype: Any, efficiency: float | None = None) -> float:
        """Returns seconds of an operation of a step on one device: max(flops / (peak * efficiency), bytes / bandwidth).

        Args:
          flops: of one device.
          bytes_moved: read and written in its memory.
          dtype: of the operands; chooses the peak.
          efficiency: the fraction of the peak reached; None for that of large matrix products in steps.
        """
        reached = self._peak(dtype) * (self.cluster.step_efficiency if efficiency is None else efficiency)
        return max(flops / reached, bytes_moved / self.cluster.memory_bandwidth / self.cluster.memory_efficiency)

    def matmul(self, m: int, n: int, k: int, batch: int, dtype: Any, itemsize: int) -> float:
        """Seconds of `batch` products of [m, k] and [k, n] by themselves on one device, with the start of the kernel.

        Each matrix is read or written once, at the whole memory bandwidth.
        """
        cluster = self.cluster
        share = self.matmul_efficiency(m, n, k, batch) or cluster.step_efficiency
        flops = 2.0 * batch * m * n * k / (cluster.peak(dtype) * share / cluster.sustained_efficiency)
        bytes_moved = float(itemsize) * batch * (m * k + k * n + m * n)
        return max(flops, bytes_moved / cluster.memory_bandwidth) + cluster.kernel_start_alone

    def matmul_efficiency(self, m: int, n: int, k: int, batch: int = 1) -> float | None:
        """Returns the fraction of the peak that a product of [m, k] and [k, n] reaches in a step; None if a dim is 1.

        With tiles of A x B, t = batch * ceil(m / A) * ceil(n / B) of them, and U units that work at once,

            efficiency = largest * m / (A ceil(m / A)) * n / (B ceil(n / B)) * r * c / (c + L) * min(1, t s / U),
            s = min(U / t, k / (8 L)), at least 1;  c = k / s;  L = max(A, B);  r = min(1, 4 A B / (T (A + B)))

        quantisation along m and n, the loads of a small tile (which are as many as A + B, for work of A B), filling the
        pipeline along k, and idle units where there are few tiles, which then share k in s parts of length c. Tiles are
        T x T; libraries have smaller ones for short sides, A the least power of two from 16 up that holds m, and B
        likewise n. The seconds 2 batch m n k / efficiency never fall as a dim grows.

        A product with m, n or k of 1 does not use a matrix unit: XLA emits a multiplication, or a multiplication
        and a sum, for GPUs, TPUs and CPUs alike (as compiled by jaxlib 0.12, but for single vectors on CPUs, which
        still read each matrix once). It is bound by bytes.
        """
        if 0 in (m, n, k, batch):
            return self.cluster.step_efficiency
        if 1 in (m, n, k):
            return None
        units = self.cluster.parallel_units
        a, b = self._tile(m), self._tile(n)
        rows, columns, longest = -(-m // a), -(-n // b), max(a, b)
        tiles = batch * rows * columns
        split = max(1.0, min(units / tiles, k / (_SPLIT_TILES * longest)))
        depth = k / split
        quantised = (m / (rows * a)) * (n / (columns * b))
        fed = min(1.0, _REUSE * a * b / (self.cluster.tile * (a + b)))
        filled = depth / (depth + longest) * min(1.0, tiles * split / units)
        return self.cluster.step_efficiency * quantised * fed * filled

    def _tile(self, size: int) -> int:
        """Returns the side of the tile that a side of this length is worked on in."""
        return min(self.cluster.tile, max(_LEAST_TILE, 1 << (size - 1).bit_length()))

    def _derive(self, kind: str, axes: Axes, payload: float) -> tuple[float, float]:
        """Returns the formulas of the module's docstring."""
        if kind != "slice" and kind not in get_args(CollectiveKind):
            raise ValueError(f"collective kind {kind!r}: use one of {', '.join(get_args(CollectiveKind))}")
        unknown = [axis for axis in axes if axis not in self.mesh.axis_names]
        if unknown:
            raise ValueError(f"axes={axes}: the mesh has the axes {self.mesh.axis_names}; give some of these")
        rungs = self._rungs(frozenset(axes))
        if kind == "slice" or not rungs:
            return 0.0, 0.0
        launch, alpha, beta, inside = self.cluster.node_link.latency, 0.0, 0.0, 1
        total = math.prod(rung.size for rung in rungs)
        group = self.group(axes)
        if (curve := self._curve(kind, group)) is not None:
            if curve.group == group or len(group) == 1:
                return curve.tangent(payload)
            inside, rungs, launch = rungs[0].size, rungs[1:], 0.0
            share = inside / total if kind == "all_to_all" else 1.0
            alpha, beta = curve.tangent(payload * share)
            beta *= share
        steps = sum(rung.steps for rung in rungs)
        if kind == "collective_permute":
            worst = rungs[-1]
            return launch + worst.step, max(1 / worst.bandwidth, worst.exchange)
        times = 2 if kind == "all_reduce" else 1
        for rung in rungs:
            if kind == "all_to_all":
                # `exchange` is for a group of this rung alone, of whose payload (size - 1) / size leaves the device.
                beta += rung.exchange * (inside * rung.size / total)
            else:
                beta += times * (rung.size - 1) / rung.size / (rung.bandwidth * inside)
            inside *= rung.size
        return launch + times * steps + alpha, beta

    def _curve(self, kind: str, group: tuple[int, ...]) -> Curve | None:
        """Returns the measured curve of a group, or of its devices on the innermost level; None where there is none."""
        if not self.cluster.collectives or not group:
            return None
        if (found := self._curves.get((kind, group))) is not None:
            return found
        if kind == "collective_permute" or group[0] == 1 or self._levels[-1].is_torus:
            return None
        sizes = sorted(
            curve.group[0] for curve in self._curves.values() if curve.kind == kind and len(curve.group) == 1
        )
        larger = [size for size in sizes if size >= group[0]] or sizes[-1:]
        return self._curves[kind, (larger[0],)] if larger else None

    @cached_property
    def _curves(self) -> dict[tuple[str, tuple[int, ...]], Curve]:
        return {(curve.kind, curve.group): curve for curve in self.cluster.collectives}

    def group(self, axes: Axes) -> tuple[int, ...]:
        """Returns how many devices a group over `axes` has on each level of the machine, innermost first.

        (8,) are all devices of a node of eight, (1, 2) two devices of two nodes. Levels beyond the last that joins any
        are left out; () is a device by itself, or a group that straddles a level unevenly.
        """
        if self._pieces is None:
            return ()
        sizes = [1] * len(self._levels)
        for name, axis in zip(self.mesh.axis_names, self._pieces, strict=True):
            for piece in axis if name in axes else ():
                sizes[piece.level] *= piece.size
        while sizes and sizes[0] == 1:
            del sizes[0]
        return tuple(reversed(sizes))

    def _rungs(self, axes: frozenset[str]) -> list[_Rung]:
        """Returns the levels that a group over `axes` occupies, innermost first, the torus dims as one."""
        if self._pieces is None:
            # An axis that straddles a level unevenly: price every group as if it crossed the slowest link only.
            size = self.mesh.product(tuple(axes))
            slowest = min((level for level in self._levels if level.size > 1), key=lambda level: level.bandwidth)
            return [_switch(slowest, size)] if size > 1 else []
        pieces = [
            p for name, axis in zip(self.mesh.axis_names, self._pieces, strict=True) if name in axes for p in axis
        ]
        held = [(self._levels[i], [p for p in pieces if p.level == i]) for i in sorted({p.level for p in pieces})]
        dims = [(level, parts) for level, parts in held if level.is_torus]
        switches = [(level, math.prod(p.size for p in parts)) for level, parts in held[::-1] if not level.is_torus]
        return [*([_torus(dims)] if dims else []), *(_switch(*one) for one in switches)]


def _switch(level: Level, size: int) -> _Rung:
    """Returns a group of `size` devices on a level where every pair has the same rate."""
    steps = min(size - 1, math.ceil(math.log2(size)))
    return _Rung(size, level.bandwidth, level.latency, steps * level.latency, (size - 1) / size / level.bandwidth)


def _torus(dims: list[tuple[Level, list[Piece]]]) -> _Rung:
    """Returns a group on torus dims, given the pieces of each dim that belong to it."""
    total, bandwidth, steps, exchange = 1, 0.0, 0.0, 0.0
    for level, pieces in dims:
        size = math.prod(p.size for p in pieces)
        extent = max(p.stride * p.size for p in pieces)
        interleaved = extent / size
        closed = level.kind == "ring" and extent == level.size and size > 2
        link = level.bandwidth / interleaved
        bandwidth += link * (2 if closed else 1)
        steps += level.latency * interleaved * (size // 2 if closed else size - 1)
        exchange = max(exchange, size / (8 if closed else 4) / link)
        total *= size
    return _Rung(total, bandwidth, steps, steps, exchange)  # any block may have to cross the whole torus
