"""Check of the collectives of a lowered step: exactly those that the plan wrote, and none that Shardy would add.

A step is emitted as `shard_map` regions (`sdy.manual_computation` in StableHLO) whose collectives are spelled out.
Two sets decide whether the plan is true:

    inside   the stablehlo collectives within regions, times the trip counts of the loops around them
    outside  the collectives that Shardy inserts between and around regions once shardings are propagated, and
             stablehlo collectives outside any region

and the check is  inside = planned  (as a multiset of kind, axes and bytes, with executions per step)  and  outside =
{}. `communication="compiler"` plans have regions only around what is not left to the compiler
(`lowering.emission`): there both together *are* the plan's list.

Nothing within a region whose manual axes are all axes of its mesh can be partitioned any more, so before the Shardy
passes run on a copy of the module such bodies are replaced by one opaque operation: their cost grows with the number
of regions, not with the depth of the model. A mesh axis left automatic in a region keeps its body.

Trip counts: a loop that compares a counter with a constant, starts it at a constant and steps it by a constant has
ceil((bound - start) / step) iterations; any other, and each that the plan does not know, counts as one, and the report
names it. Each branch of a `case` counts as taken. The calls of a function are followed.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.mlir import ir, passmanager

from alpa_lite.errors import VerificationError
from alpa_lite.ir.layout import Axes, LogicalMesh
from alpa_lite.passes.checks.hollow import hollow_regions
from alpa_lite.passes.checks.reading import (
    callee,
    dims_of,
    functions_of,
    is_public,
    listed_axes,
    nbytes,
    sharding_of,
    trip_count,
)
from alpa_lite.passes.checks.replica_groups import axes_from_pairs, axes_from_text, normal_axes
from alpa_lite.plan.records import Collective

Key = tuple[str, Axes, int]
"""Kind, axes and bytes of a collective."""

SHARDY_PASSES = (
    "builtin.module(sdy-propagation-pipeline)",
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))",
    "builtin.module(func.func(sdy-reshard-to-collectives))",
)
"""Propagation of shardings, then reshards where they disagree, then the collectives that make them."""

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute", "collective_broadcast")
WRITTEN = {f"stablehlo.{kind}": kind for kind in _KINDS}
"""The collectives of StableHLO by operation."""
_INSERTED = {f"sdy.{kind}": kind for kind in _KINDS}
_MESH_AXES = re.compile(r'axis_ref<name = "((?:[^"\\]|\\.)*)"(, sub_axis_info[^>]*>)?')


@dataclass(frozen=True)
class ShardyReport:
    """The collectives of a lowered step.

    Attributes:
      region_collectives: those written in regions, equal ones joined, `count` the executions per step.
      inserted_collectives: those that Shardy inserts, and stablehlo collectives outside regions.
      unknown_loops: where each loop stands whose trip count is not known and was taken as one, if it communicates.
    """

    region_collectives: tuple[Collective, ...]
    inserted_collectives: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]


def check_shardy(module: Any, mesh: LogicalMesh, planned: Sequence[Collective]) -> ShardyReport:
    """Checks that a lowered step has the planned collectives and no others; returns those that were found.

    Args:
      module: of StableHLO, as of `jax.jit(...).trace(...).lower(...).compiler_ir("stablehlo")`. It is not changed.
      mesh: the mesh of the plan; its axis names are those of the module.
      planned: the plan's collectives. Entries that agree in kind, axes and bytes are added up.

    Raises:
      VerificationError: naming each collective that is planned but not found, or found but not planned.
    """
    report = shardy_report(module, mesh)
    want, have = totals(planned, mesh), totals(report.region_collectives, mesh)
    problems = [
        f"{title}: {n} x {describe(key)}{_places(known, key, mesh)}"
        for title, differing, known in (
            ("planned but not found", want - have, planned),
            ("found but not planned", have - want, report.region_collectives),
        )
        for key, n in sorted(differing.items())
    ]
    for c in report.inserted_collectives:
        place = f" at {c.where}" if c.where else ""
        key = c.kind, c.axes, c.bytes
        problems.append(f"inserted by the partitioner outside the written regions: {c.count} x {describe(key)}{place}")
    if problems:
        loops = "".join(f"\n  a loop of unknown trip count is counted once: {w}" for w in report.unknown_loops)
        raise VerificationError(
            "the lowered step does not communicate as planned on mesh "
            f"{dict(zip(mesh.axis_names, mesh.shape, strict=True))}:\n  " + "\n  ".join(problems) + loops
        )
    return report


def collectives_of_shardy(module: Any, mesh: LogicalMesh) -> tuple[Collective, ...]:
    """Every collective of a lowered step, inserted and written, for the plan's list: the largest total payload first.

    The arguments are those of `check_shardy`.
    """
    report = shardy_report(module, mesh)
    return tuple(sorted(report.region_collectives + report.inserted_collectives, key=lambda c: -c.bytes * c.count))


def shardy_report(module: Any, mesh: LogicalMesh) -> ShardyReport:
    """The collectives of a lowered step inside and outside its regions; see `check_shardy` for the arguments."""
    operation = module.operation
    with operation.context, ir.Location.unknown():
        written, unknown = _found(operation, mesh, WRITTEN)
        skeleton = operation.clone()
        hollow_regions(skeleton)
        for text in SHARDY_PASSES:
            passmanager.PassManager.parse(text).run(skeleton.operation)
        inserted, more = _found(skeleton, mesh, _INSERTED)
    inside, outside = ([one for one in written if one[2] == region] for region in (True, False))
    return ShardyReport(_join(inside), _join([*outside, *inserted]), tuple(dict.fromkeys(unknown + more)))


_Found = tuple[Collective, int, bool]
"""A collective, its executions per step, and whether it is in a region."""


def _found(operation: Any, mesh: LogicalMesh, names: dict[str, str]) -> tuple[list[_Found], list[str]]:
    """Yields the collectives named in `names` that the public functions reach, and the loops of unknown trip count.

    A function's contents are walked once, and scaled by its calls.
    """
    functions = functions_of(operation)
    unknown: list[str] = []

    @functools.cache
    def called(name: str) -> list[_Found]:
        return list(walk(functions[name].regions, False)) if name in functions else []

    def walk(regions: Iterable[Any], inside: bool) -> Iterator[_Found]:
        for op in (view.operation for region in regions for block in region.blocks for view in block.operations):
            name = op.name
            if name in names:
                yield from ((c, 1, inside) for c in read_collective(op, mesh))
            elif name == "func.call":
                yield from ((c, times, inside or region) for c, times, region in called(callee(op)))
            elif name == "stablehlo.while":
                yield from loop(op, inside)
            elif regions := op.regions:
                yield from walk(regions, inside or name == "sdy.manual_computation")

    def loop(op: Any, inside: bool) -> list[_Found]:
        trips = trip_count(op)
        runs = (1, 1) if trips is None else (trips + 1, trips)
        found = [
            (c, times * n, region)
            for part, n in zip(op.regions, runs, strict=True)
            for c, times, region in walk([part], inside)
        ]
        if trips is None and found:
            unknown.append(_where(op))
        return found

    return [one for name, op in functions.items() if is_public(op) for one in called(name)], unknown


def read_collective(op: Any, mesh: LogicalMesh) -> list[Collective]:
    """The logical collectives of a stablehlo or sdy collective, one per operand; none over axes of one device only."""
    written = op.name in WRITTEN
    kind = (WRITTEN if written else _INSERTED)[op.name]
    axes, held = _written(op, kind, mesh) if written else _inserted(op, kind, mesh)
    if not axes:
        return []
    values = op.operands if kind == "reduce_scatter" and written else op.results
    where = _where(op)
    return [Collective(kind, axes, int(nbytes(value.type) * held), 1, 0, where) for value in values]


def _written(op: Any, kind: str, mesh: LogicalMesh) -> tuple[Axes, float]:
    """Returns the axes of a stablehlo collective, and 1: its values are local already."""
    if kind == "collective_permute":
        return axes_from_pairs(_table(op.attributes["source_target_pairs"]), mesh), 1
    groups = op.attributes["replica_groups"]
    if isinstance(groups, ir.DenseElementsAttr):
        return axes_from_text(_table(groups), mesh), 1
    named = [name + ("" if not sub else " (part)") for name, sub in _MESH_AXES.findall(str(groups))]
    return normal_axes(tuple(named) or (f"groups {groups}",), mesh), 1


def _table(numbers: Any) -> str:
    """Returns a table of numbers as text, whole, where MLIR abbreviates."""
    return str(np.array(numbers).tolist())


def _inserted(op: Any, kind: str, mesh: LogicalMesh) -> tuple[Axes, float]:
    """Returns the axes of an sdy collective, and the part of its global value that counts on one device."""
    after = dims_of(op.attributes.get("out_sharding"))
    split = tuple(dict.fromkeys(axis for dim in after for axis in dim))
    shards = math.prod(_size(axis, mesh) for axis in split)
    if kind == "collective_permute":
        before = dims_of(sharding_of(op.operands[0]))
        moved = [pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]] or [((), split)]
        axes = tuple(dict.fromkeys(axis for pair in moved for side in pair for axis in side))
    else:
        lists = [str(op.attributes[name]) for name in op.attributes if name != "out_sharding"]
        axes = tuple(axis for text in lists for axis in listed_axes(text))
    scattered = math.prod(_size(axis, mesh) for axis in axes) if kind == "reduce_scatter" else 1
    return normal_axes(axes, mesh), scattered / shards


def _size(axis: str, mesh: LogicalMesh) -> int:
    """Returns the devices along an axis, or along the part of it that `axis:(before)size` names."""
    name, _, part = axis.partition(":(")
    return int(part.split(")")[1]) if part else mesh.axis_size(name) if name in mesh.axis_names else 1


def _where(op: Any) -> str:
    """Returns the name stack and the source line of an operation: `name (file:line)`."""
    text = str(op.location)
    name = re.match(r'loc\("((?:[^"\\]|\\.)*)"[()]', text)
    line = re.search(r'"(?:[^"]*[/\\])?([^"]*)":(\d+)', text)
    source = f"{line[1]}:{line[2]}" if line else ""
    return f"{name[1]} ({source})" if name and source else name[1] if name else source


def _join(found: Iterable[_Found]) -> tuple[Collective, ...]:
    """Returns collectives that agree in all but the count, as one."""
    counts: Counter[tuple[str, Axes, int, str]] = Counter()
    for c, times, _ in found:
        counts[c.kind, c.axes, c.bytes, c.where] += times
    return tuple(Collective(k, a, b, n, 0, w) for (k, a, b, w), n in counts.items() if n)


def totals(collectives: Iterable[Collective], mesh: LogicalMesh) -> Counter[Key]:
    """Returns executions per step by kind, axes and bytes; collectives over axes of one device are left out."""
    counts: Counter[Key] = Counter()
    for c in collectives:
        if axes := normal_axes(c.axes, mesh):
            counts[c.kind, axes, c.bytes] += c.count
    return counts


def describe(key: Key) -> str:
    """Returns one execution of a collective, in words."""
    kind, axes, size = key
    return f"{kind} over ({', '.join(axes)}) of {size} bytes"


def _places(known: Iterable[Collective], key: Key, mesh: LogicalMesh) -> str:
    """At which places the first three collectives of a key are, in words."""
    at = [c.where for c in known if c.where and (c.kind, normal_axes(c.axes, mesh), c.bytes) == key]
    return f" at {'; '.join(list(dict.fromkeys(at))[:3])}" if at else ""
