"""Samples: a value for each measurement, and the list of those that a calibration makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from alpa_lite.cluster import Cluster
from alpa_lite.cluster.cost import CollectiveKind, MeshCost
from alpa_lite.ir import json_codec
from alpa_lite.ir.layout import Axes, LogicalMesh

Figure = Literal["product", "sustained", "elementwise", "kernel", "attention", "collective", "run", "transfer"]
"""The quantity that a sample measures.

    product      a matrix product of [m, k] and [k, n] on each device; `sizes` is (m, n, k)
    sustained    a product after some seconds of nothing else, when power and heat limit the clock
    kernel       the start of a kernel within a program; `sizes` is how many the program has
    attention    a pass of fused attention on each device, causal; `kind` is "forward" or "backward", `dtype` bf16, and
                 `sizes` is (examples, tokens, heads, features)
    elementwise  one operation that reads and writes an array of `sizes` bytes on each device
    collective   `kind` over groups of devices; `sizes` is the payload in bytes, as `cost.MeshCost` counts it
    run          the start of an executable on `sizes` devices
    transfer     the start of a transfer between submeshes of `sizes` devices
"""


PASSES = ("forward", "backward")
"""The passes of attention."""


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
      figure: what it is of.
      sizes: as `Figure` says.
      seconds: of one operation, on all devices at once; 0 before it is measured.
      dtype: of the operands, by its short name.
      kind: of a collective, or the pass of attention.
      group: of a collective, the devices of a group on each level, as `MeshCost.group` says.
    """

    figure: Figure
    sizes: tuple[int, ...]
    seconds: float = 0.0
    dtype: str = "f32"
    kind: str = ""
    group: tuple[int, ...] = ()

    @classmethod
    def from_json(cls, data: Any) -> Sample:
        """Returns the sample of JSON values. Raises ValueError for damaged data."""
        found = json_codec.decode_fields(cls, data)
        if not found.seconds > 0:
            raise ValueError(f"a sample of {found.figure!r} with {found.seconds!r} seconds")
        return found


@dataclass(frozen=True)
class Grid:
    """The work and the payloads that are measured.

    Attributes:
      work: of each device by itself, the most important first.
      payloads: bytes, of each kind of collective and each group of devices.
    """

    work: tuple[Sample, ...]
    payloads: tuple[int, ...]

    @classmethod
    def from_platform(cls, platform: str) -> Grid:
        """Returns the usual sizes: what one device of a plan has to do, on a CPU device a hundred times less.

        Products after seconds of others are measured where clocks depend on what is computed, attention where JAX has a
        kernel of its own.
        """
        if platform == "cpu":
            cubes = [(n, n, n) for n in (64, 128, 256, 512)]
            flat = [(16, 256, 256), (64, 512, 128), (256, 64, 512), (512, 512, 32)]
            halves, sustained = [(64, 64, 64), (256, 256, 256)], []
            payloads, elementwise = (2**12, 2**16, 2**20, 2**23), (2**19, 2**21, 2**23)
        else:
            cubes = [(n, n, n) for n in (512, 1024, 2048, 4096)]
            flat = [(128, 4096, 4096), (4096, 4096, 128), (8192, 1024, 4096), (256, 8192, 1024)]
            sustained = [(8192, 8192, 8192)]
            halves = [*cubes, *flat, *sustained]
            payloads, elementwise = (2**14, 2**18, 2**22, 2**26), (2**24, 2**27, 2**29)
        work = [Sample("product", sizes) for sizes in (*cubes, *flat)]
        work += [Sample("product", sizes, dtype="bf16") for sizes in halves]
        work += [*(Sample("elementwise", (size,)) for size in elementwise), Sample("kernel", (64,))]
        for tokens in (1024, 4096, 16384) if platform == "cuda" else ():
            sizes = (32768 // tokens, tokens, 16, 128)
            work += [Sample("attention", sizes, dtype="bf16", kind=kind) for kind in PASSES]
        return cls((*work, *(Sample("sustained", sizes, dtype="bf16") for sizes in sustained)), payloads)


def cases(grid: Grid, cluster: Cluster) -> Iterator[tuple[Sample, LogicalMesh | None, Axes]]:
    """Yields the samples to measure, those of collectives with mesh and axes; most important first as time may end.

    The work of devices and the start of tasks come first, then collectives, those over the most devices before others.
    """
    count = cluster.num_devices
    sizes = [size for size in (1 << n for n in range(count.bit_length())) if count % size == 0]
    starts = [Sample("run", (size,)) for size in sizes]
    starts += [Sample("transfer", (size,)) for size in sizes if 2 * size <= count]
    for sample in (*grid.work, *starts):
        yield sample, None, ()
    for group, (mesh, axes) in groups(cluster).items():
        for kind in get_args(CollectiveKind):
            for payload in grid.payloads:
                yield Sample("collective", (payload,), kind=kind, group=group), mesh, axes


def groups(cluster: Cluster) -> dict[tuple[int, ...], tuple[LogicalMesh, Axes]]:
    """The groups of devices that collectives of plans run over, the largest first, each with a mesh that has it."""
    found: dict[tuple[int, ...], tuple[LogicalMesh, Axes]] = {}
    for shape in cluster.mesh_shapes():
        mesh = LogicalMesh(shape, tuple("xyz"[: len(shape)]))
        cost = MeshCost(cluster, mesh)
        for number in range(1, 1 << len(shape)):
            axes = tuple(name for i, name in enumerate(mesh.axis_names) if number >> i & 1)
            group = cost.group(axes)
            if group:
                found.setdefault(group, (mesh, axes))
    return dict(sorted(found.items(), key=lambda item: (-item[1][0].product(item[1][1]), item[0])))
