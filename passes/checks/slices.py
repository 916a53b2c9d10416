"""Programs of several TPU slices: what each collective does within a slice, and what the network moves between them.

The TPU compiler makes one program for the devices of one slice (`num_partitions` in the head of its HLO), which every
slice runs. A collective over k slices of w devices each is two: one over the w devices, and a *transfer*, which the
hosts carry out over the network. It stands in the text as a `send` and a `recv` with the kind of the collective among
the attributes. With n bytes of payload (of a reduce-scatter the operand's, else the result's):

    all_reduce        all_reduce n; or reduce_scatter n, transfer n / w, all_gather n; or all_reduce n, transfer n / w
                      of it, all_gather n
    reduce_scatter    reduce_scatter n, transfer n / w
    all_gather        transfer n / (w k), all_gather n

Seen with libtpu 0.0.50 for two slices of v5e, meshes of one and two axes. A transfer may be larger than that, since it
is sent as it lies in memory, padded to tiles. Several small all-reduces are one of their bytes together, rounded up to
whole tiles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.passes.checks.hlo_text import HloCollective
from alpa_lite.passes.checks.redundancy import Redundancy, Sent
from alpa_lite.passes.checks.replica_groups import normal_axes
from alpa_lite.plan.records import Collective

SUMS = ("all_reduce", "reduce_scatter")
"""Kinds whose transfers carry a device's part of the sum over its slice, not a block of its own."""

_PARTITIONS = re.compile(r"^HloModule [^\n]*\bnum_partitions=(\d+)")


def part_of(text: str, mesh: LogicalMesh) -> LogicalMesh:
    """Returns the part of a mesh that the devices of one program form: all of it, but with several slices that of one.

    The slices follow each other in the mesh, so the major axes are what they divide.
    """
    match = _PARTITIONS.match(text)
    slices, rest = divmod(mesh.size, int(match[1])) if match else (1, 0)
    if rest or slices < 2:
        return mesh
    shape = []
    for size in mesh.shape:
        outer = size if slices % size == 0 else slices if size % slices == 0 else 0
        if not outer:
            return mesh
        shape.append(size // outer)
        slices //= outer
    return LogicalMesh(tuple(shape), mesh.axis_names) if slices == 1 else mesh


def restrict_to_slices(redundancy: Redundancy, part: LogicalMesh) -> Redundancy:
    """Returns the same with every collective over the axes that it has within a slice."""

    def count_within(counts: Counter[Sent]) -> Counter[Sent]:
        out: Counter[Sent] = Counter()
        for (kind, axes, size, bits), n in counts.items():
            out[kind, normal_axes(axes, part), size, bits] += n
        return out

    removals = {reason: count_within(counts) for reason, counts in redundancy.removals.items()}
    return Redundancy(removals, count_within(redundancy.collectives))


def collectives_across_slices(planned: Iterable[Collective], mesh: LogicalMesh, part: LogicalMesh) -> list[Collective]:
    """Returns the planned collectives that run over several slices."""
    if part == mesh:
        return []
    return [c for c in planned if mesh.product(_whole(c.axes, mesh)) != part.product(_whole(c.axes, part))]


def _whole(axes: Axes, mesh: LogicalMesh) -> Axes:
    """Returns the axes themselves where a partitioner uses a part of one, `x:(1)4`."""
    return normal_axes(tuple(dict.fromkeys(axis.partition(":(")[0] for axis in axes)), mesh)


def transfers(
    found: Sequence[HloCollective], crossed: Sequence[Collective], mesh: LogicalMesh, part: LogicalMesh, spare: int
) -> tuple[str, list[str]]:
    """Compares the transfers of a program between slices with the planned collectives over several slices.

    Args:
      spare: executions that a compiler may leave out.

    Returns:
      The transfers that were found, in words; and one message for each difference from the plan.
    """
    kinds = Counter[str]()
    for c in found:
        kinds[c.kind] += c.count
    count, there = sum(c.count for c in crossed), kinds.total()
    least = sum(_least(c, mesh, part) * c.count for c in crossed)
    moved = sum(c.bytes * c.count for c in found)
    differences = []
    if there > count:
        differences.append(f"{there} transfers between slices, of {count} planned collectives that cross them")
    if moved < least and not spare:
        differences.append(f"{moved} bytes between slices, fewer than the {least} of what crosses them in the plan")
    known = {c.kind for c in crossed}
    known |= {"all_reduce"} if known else set()  # the compiler's form of what is small or misaligned
    differences += [
        f"found but not planned: {n} x {kind} between slices" for kind, n in kinds.items() if kind not in known
    ]
    listed = ", ".join(f"{n} x {kind}" for kind, n in sorted(kinds.items()))
    return f"for {count} collectives: {listed or 'nothing'}, {moved} bytes in all", differences


def _least(c: Collective, mesh: LogicalMesh, part: LogicalMesh) -> int:
    """Returns the fewest bytes that a device sends to other slices in a collective."""
    axes: Axes = normal_axes(c.axes, mesh)
    return c.bytes // (part.product(axes) if c.kind in SUMS else mesh.product(axes))
