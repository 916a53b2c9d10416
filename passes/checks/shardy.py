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

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir, passmanager
from jax.interpreters import mlir

from alpa_lite.errors import VerificationError
from alpa_lite.layout import Axes, LogicalMesh
from alpa_lite.passes.checks.hollow import hollow
from alpa_lite.passes.checks.reading import (
    dims_of,
    listed_axes,
    nbytes,
    operations,
    sharding_of,
    symbol,
    trip_count,
    visibility,
)  # fmt: skip
from alpa_lite.passes.checks.replica_groups import axes_from_pairs, axes_from_text, normal_axes
from alpa_lite.records import Collective

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
      inside: those written in regions, equal ones joined, `count` the executions per step.
      outside: those that Shardy inserts, and stablehlo collectives outside regions.
      unknown_loops: where each loop stands whose trip count is not known and was taken as one, if it communicates.
    """

    inside: tuple[Collective, ...]
    outside: tuple[Collective, ...]
    unknown_loops: tuple[str, ...]


def check_shardy(module_or_text: Any, mesh: LogicalMesh, planned: Sequence[Collective]) -> ShardyReport:
    """Checks that a lowered step has the planned collectives and no others.

    Args:
      module_or_text: the StableHLO module of `jax.jit(...).trace(...).lower(...).compiler_ir("stablehlo")`, or its
        text. It is not changed.
      mesh: the mesh of the plan; its axis names are those of the module.
      planned: the plan's collectives. Entries that agree in kind, axes and bytes are added up.

    Returns:
      The collectives that were found.

    Raises:
      VerificationError: naming each collective that is planned but not found, or found but not planned.
    """
    report = shardy_report(module_or_text, mesh)
    want, have = _totals(planned, mesh), _totals(report.inside, mesh)
    problems = [
        *_difference("planned but not found", want, have, planned, mesh),
        *_difference("found but not planned", have, want, report.inside, mesh),
        *(f"inserted by the partitioner outside the written regions: {_describe(c, c.count)}" for c in report.outside),
    ]
    if problems:
        loops = "".join(f"\n  a loop of unknown trip count is counted once: {w}" for w in report.unknown_loops)
        raise VerificationError(
            "the lowered step does not communicate as planned on mesh "
            f"{dict(zip(mesh.axis_names, mesh.shape, strict=True))}:\n  " + "\n  ".join(problems) + loops
        )
    return report


def collectives_of_shardy(module_or_text: Any, mesh: LogicalMesh) -> tuple[Collective, ...]:
    """Every collective of a lowered step, those that Shardy inserts and those that are written, for the plan's list.

    Args:
      module_or_text: as in `check_shardy`.
      mesh: the mesh of the plan.

    Returns:
      Equal ones joined, largest total payload first; stage 0.
    """
    report = shardy_report(module_or_text, mesh)
    return tuple(sorted(report.inside + report.outside, key=lambda c: -c.bytes * c.count))


def shardy_report(module_or_text: Any, mesh: LogicalMesh) -> ShardyReport:
    """The collectives of a lowered step inside and outside its regions; see `check_shardy` for the arguments."""
    if isinstance(module_or_text, str):
        with mlir.make_ir_context() as context:
            return shardy_report(ir.Module.parse(module_or_text, context), mesh)
    operation = module_or_text.operation
    with operation.context, ir.Location.unknown():
        written = _Walker(operation, mesh, WRITTEN)
        written.run()
        skeleton = operation.clone()
        hollow(skeleton)
        for text in SHARDY_PASSES:
            passmanager.PassManager.parse(text).run(skeleton.operation)
        inserted = _Walker(skeleton, mesh, _INSERTED)
        inserted.run()
    outside = [c for c, region in written.found if not region] + [c for c, _ in inserted.found]
    return ShardyReport(
        _join([c for c, region in written.found if region]),
        _join(outside),
        tuple(dict.fromkeys(written.unknown_loops + inserted.unknown_loops)),
    )


class _Walker:
    """Finds the collectives named in `names` in every function that `main` reaches, with their executions per step.

    `found` pairs each with whether it lies in a region. A function's contents are walked once and scaled by its calls.
    """

    def __init__(self, operation: Any, mesh: LogicalMesh, names: dict[str, str]) -> None:
        self.mesh = mesh
        self.names = names
        self.functions = {symbol(op): op for op in operations(operation) if op.name == "func.func"}
        self.memo: dict[str, tuple[tuple[Collective, bool], ...]] = {}
        self.found: tuple[tuple[Collective, bool], ...] = ()
        self.unknown_loops: list[str] = []

    def run(self) -> None:
        """Fills `found` from the public functions."""
        public = [n for n, op in self.functions.items() if visibility(op) != "private"]
        self.found = tuple(item for name in public for item in self._function(name))

    def _function(self, name: str) -> tuple[tuple[Collective, bool], ...]:
        if name not in self.memo:
            self.memo[name] = ()  # a recursive call, which JAX never lowers, adds nothing
            out: list[tuple[Collective, bool]] = []
            for region in self.functions[name].regions:
                for block in region.blocks:
                    self._block(block, 1, False, out)
            self.memo[name] = tuple(out)
        return self.memo[name]

    def _block(self, block: Any, times: int, inside: bool, out: list[tuple[Collective, bool]]) -> None:
        for view in block.operations:
            op = view.operation
            name = op.name
            if name in self.names:
                out.extend((c, inside) for c in read_collective(op, self.mesh, times))
            elif name == "func.call":
                callee = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
                for c, region in self._function(callee) if callee in self.functions else ():
                    out.append((_scaled(c, times), inside or region))
            elif name == "stablehlo.while":
                self._while(op, times, inside, out)
            elif regions := op.regions:
                region_inside = inside or name == "sdy.manual_computation"
                for region in regions:
                    for inner in region.blocks:
                        self._block(inner, times, region_inside, out)

    def _while(self, op: Any, times: int, inside: bool, out: list[tuple[Collective, bool]]) -> None:
        trips = trip_count(op)
        before = len(out)
        for region, n in zip(
            op.regions, (1 if trips is None else trips + 1, 1 if trips is None else trips), strict=True
        ):
            for block in region.blocks:
                self._block(block, times * n, inside, out)
        if trips is None and len(out) > before:
            self.unknown_loops.append(_where(op))


def read_collective(op: Any, mesh: LogicalMesh, times: int = 1) -> list[Collective]:
    """The logical collectives of a stablehlo or sdy collective, one per operand, each `times` executions.

    Empty where it runs over axes of one device only.
    """
    written = op.name in WRITTEN
    kind = (WRITTEN if written else _INSERTED)[op.name]
    axes, held = _written(op, kind, mesh) if written else _inserted(op, kind, mesh)
    if not axes:
        return []
    values = op.operands if kind == "reduce_scatter" and written else op.results
    where = _where(op)
    return [Collective(kind, axes, int(nbytes(value.type) * held), times, 0, where) for value in values]


def _written(op: Any, kind: str, mesh: LogicalMesh) -> tuple[Axes, float]:
    """The axes of a stablehlo collective, and 1: its values are local already."""
    if kind == "collective_permute":
        return axes_from_pairs(str(op.attributes["source_target_pairs"]), mesh), 1
    text = str(op.attributes["replica_groups"])
    if text.startswith("dense"):
        return axes_from_text(text, mesh), 1
    named = [name + ("" if not sub else " (part)") for name, sub in _MESH_AXES.findall(text)]
    return normal_axes(tuple(named) or (f"groups {text}",), mesh), 1


def _inserted(op: Any, kind: str, mesh: LogicalMesh) -> tuple[Axes, float]:
    """The axes of an sdy collective, and the part of its global value that counts on one device."""
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
    """The devices along an axis, or along the part of it that `axis:(before)size` names."""
    name, _, part = axis.partition(":(")
    return int(part.split(")")[1]) if part else mesh.axis_size(name) if name in mesh.axis_names else 1


def _where(op: Any) -> str:
    """The name stack and the source line of an operation: `name (file:line)`."""
    text = str(op.location)
    name = re.match(r'loc\("((?:[^"\\]|\\.)*)"[()]', text)
    line = re.search(r'"(?:[^"]*[/\\])?([^"]*)":(\d+)', text)
    source = f"{line[1]}:{line[2]}" if line else ""
    return f"{name[1]} ({source})" if name and source else name[1] if name else source


def _scaled(c: Collective, times: int) -> Collective:
    return c if times == 1 else Collective(c.kind, c.axes, c.bytes, c.count * times, c.stage, c.where)


def _join(found: Sequence[Collective]) -> tuple[Collective, ...]:
    """Collectives that agree in all but the count, as one."""
    totals: Counter[tuple[str, Axes, int, int, str]] = Counter()
    for c in found:
        totals[(c.kind, c.axes, c.bytes, c.stage, c.where)] += c.count
    return tuple(Collective(k, a, b, n, s, w) for (k, a, b, s, w), n in totals.items() if n)


def _totals(collectives: Sequence[Collective], mesh: LogicalMesh) -> Counter[tuple[str, Axes, int]]:
    """Executions per step by kind, axes and bytes; collectives over axes of one device are left out."""
    totals: Counter[tuple[str, Axes, int]] = Counter()
    for c in collectives:
        if axes := normal_axes(c.axes, mesh):
            totals[(c.kind, axes, c.bytes)] += c.count
    return totals


def _difference(
    title: str,
    more: Counter[tuple[str, Axes, int]],
    less: Counter[tuple[str, Axes, int]],
    known: Sequence[Collective],
    mesh: LogicalMesh,
) -> list[str]:
    out = []
    for (kind, axes, size), n in sorted((more - less).items()):
        at = [c.where for c in known if (c.kind, normal_axes(c.axes, mesh), c.bytes) == (kind, axes, size) and c.where]
        places = "; ".join(list(dict.fromkeys(at))[:3])
        out.append(f"{title}: {_describe(Collective(kind, axes, size, n, 0, places), n)}")
    return out


def _describe(c: Collective, count: int) -> str:
    return f"{count} x {c.kind} over ({', '.join(c.axes)}) of {c.bytes} bytes" + (f" at {c.where}" if c.where else "")
