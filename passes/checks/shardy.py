"""What communicates in a lowered step: exactly the collectives that the plan wrote, and none that Shardy would add.

A step is emitted as `shard_map` regions (`sdy.manual_computation` in StableHLO) whose collectives are spelled out.
Two sets decide whether the plan is true:

    inside   the stablehlo collectives within regions, times the trip counts of the loops around them
    outside  the collectives that Shardy inserts between and around regions once shardings are propagated, and
             stablehlo collectives outside any region

and the check is  inside = planned  (as a multiset of kind, axes and bytes, with executions per step)  and  outside =
{}. `communication="compiler"` plans have no regions: there `outside` *is* the plan's list.

Nothing within a region whose manual axes are all axes of its mesh can be partitioned any more, so before the Shardy
passes run on a copy of the module such bodies are replaced by one opaque operation: their cost grows with the number
of regions, not with the depth of the model. A mesh axis left automatic in a region keeps its body.

Trip counts: a loop that compares a counter with a constant, starts it at a constant and steps it by a constant has
ceil((bound - start) / step) iterations; any other counts as one, and the report names it. Each branch of a `case`
counts as taken. The calls of a function are followed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir

from alpa_lite import _jax
from alpa_lite.errors import VerificationError
from alpa_lite.layout import Axes, LogicalMesh
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
_LISTED_AXIS = re.compile(r'"((?:[^"\\]|\\.)*)"(:\(\d+\)\d+)?')
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
    """Checks that a lowered step communicates as planned and in no other way.

    Args:
      module_or_text: the StableHLO module of `jax.jit(...).trace(...).lower(...).compiler_ir("stablehlo")`, or its
        text. It is not changed.
      mesh: the mesh of the plan; its axis names are those of the module.
      planned: the plan's collectives. Entries that agree in kind, axes and bytes are added up.

    Returns:
      What was found.

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
        _hollow(skeleton)
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
        self.functions = {_symbol(op): op for op in _body(operation) if op.name == "func.func"}
        self.memo: dict[str, tuple[tuple[Collective, bool], ...]] = {}
        self.found: tuple[tuple[Collective, bool], ...] = ()
        self.unknown_loops: list[str] = []

    def run(self) -> None:
        """Fills `found` from the public functions."""
        public = [n for n, op in self.functions.items() if _visibility(op) != "private"]
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
    return [Collective(kind, axes, int(_bytes(value.type) * held), times, 0, where) for value in values]


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
    after = _dims(op.attributes.get("out_sharding"))
    split = tuple(dict.fromkeys(axis for dim in after for axis in dim))
    shards = math.prod(_size(axis, mesh) for axis in split)
    if kind == "collective_permute":
        before = _dims(_sharding_of(op.operands[0]))
        moved = [pair for pair in zip(before, after, strict=False) if pair[0] != pair[1]] or [((), split)]
        axes = tuple(dict.fromkeys(axis for pair in moved for side in pair for axis in side))
    else:
        lists = [str(op.attributes[name]) for name in op.attributes if name != "out_sharding"]
        axes = tuple(axis for text in lists for axis in _listed_axes(text))
    scattered = math.prod(_size(axis, mesh) for axis in axes) if kind == "reduce_scatter" else 1
    return normal_axes(axes, mesh), scattered / shards


def _size(axis: str, mesh: LogicalMesh) -> int:
    """The devices along an axis, or along the part of it that `axis:(before)size` names."""
    name, _, part = axis.partition(":(")
    return int(part.split(")")[1]) if part else mesh.axis_size(name) if name in mesh.axis_names else 1


def trip_count(op: Any) -> int | None:
    """The iterations of a `stablehlo.while` whose counter starts, steps and ends at constants, else None."""
    condition, body = (region.blocks[0] for region in op.regions)
    compare = _owner(_terminator(condition).operands[0])
    if compare is None or compare.name != "stablehlo.compare":
        return None
    direction = re.search(r"comparison_direction (\w+)", str(compare.attributes["comparison_direction"]))
    left, bound = compare.operands
    limit = _constant(bound)
    if direction is None or direction[1] not in ("LT", "LE") or limit is None or not _is_argument_of(left, condition):
        return None
    index = ir.BlockArgument(left).arg_number
    start, step = _constant(op.operands[index]), _step(body, index)
    if start is None or step is None or step <= 0:
        return None
    return max(0, -((start - limit - (direction[1] == "LE")) // step))


def _step(body: Any, index: int) -> int | None:
    """What one iteration adds to the counter, None where it is not a constant."""
    add = _owner(_terminator(body).operands[index])
    if add is None or add.name != "stablehlo.add":
        return None
    for counter, step in (tuple(add.operands), tuple(add.operands)[::-1]):
        if _is_argument_of(counter, body) and ir.BlockArgument(counter).arg_number == index:
            return _constant(step)
    return None


def _terminator(block: Any) -> Any:
    return block.operations[len(block.operations) - 1].operation


def _owner(value: Any) -> Any:
    """The operation that makes `value`, None for a block's argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def _is_argument_of(value: Any, block: Any) -> bool:
    return isinstance(value.owner, ir.Block) and value.owner == block


def _constant(value: Any) -> int | None:
    """The integer that a scalar constant holds, else None."""
    op = _owner(value)
    if op is None or op.name not in ("stablehlo.constant", "sdy.constant"):
        return None
    match = re.match(r"dense<(-?\d+)> : tensor<u?i\d+>", str(_jax.constant_of(op)).replace("ui", "i"))
    return int(match[1]) if match else None


def _hollow(module: Any) -> None:
    """Replaces the bodies of fully manual regions by one opaque operation, and drops the functions only they called."""
    meshes = {_symbol(op): _mesh_axes(op.attributes["mesh"]) for op in _body(module) if op.name == "sdy.mesh"}
    functions = {_symbol(op): op for op in _body(module) if op.name == "func.func"}
    called: set[str] = set()
    stack = [op for op in functions.values() if _visibility(op) != "private"]
    while stack:
        for name in _hollow_blocks(stack.pop(), meshes):
            if name in functions and name not in called:
                called.add(name)
                stack.append(functions[name])
    for name, op in functions.items():
        if name not in called and _visibility(op) == "private":
            op.erase()


def _hollow_blocks(op: Any, meshes: dict[str, Axes]) -> set[str]:
    """Hollows the regions within `op`; the functions that what is left calls."""
    calls: set[str] = set()
    for region in op.regions:
        for block in region.blocks:
            for view in list(block.operations):
                inner = view.operation
                if inner.name == "sdy.manual_computation" and _is_fully_manual(inner, meshes):
                    _hollow_region(inner)
                elif inner.name == "func.call":
                    calls.add(ir.FlatSymbolRefAttr(inner.attributes["callee"]).value)
                else:
                    calls |= _hollow_blocks(inner, meshes)
    return calls


def _is_fully_manual(op: Any, meshes: dict[str, Axes]) -> bool:
    names = sdy.ManualAxesAttr(op.attributes["manual_axes"])
    manual = {names[i] for i in range(len(names))}
    shardings = [
        sdy.TensorShardingAttr(one)
        for side in ("in_shardings", "out_shardings")
        for one in sdy.TensorShardingPerValueAttr(op.attributes[side]).shardings
    ]
    used = {one.mesh_or_ref for one in shardings}
    known = [
        meshes.get(ir.FlatSymbolRefAttr(mesh).value) if isinstance(mesh, ir.FlatSymbolRefAttr) else _mesh_axes(mesh)
        for mesh in used
    ]
    return bool(known) and all(axes is not None and set(axes) <= manual for axes in known)


def _hollow_region(op: Any) -> None:
    """Replaces a fully manual region by many opaque ones, each of one operand at most and one result at most.

    Every operand is wanted, and every result comes, in the sharding that it had. Nothing is propagated through such a
    region, so that is all that Shardy sees of it; but it takes time quadratic in the operands of one region.

    What leaves nothing to decide is left out, which in a step is nearly everything and is most of the time of Shardy:
    arguments of the function that come as they are wanted, and results that it returns as they come.
    """
    wanted = sdy.TensorShardingPerValueAttr(op.attributes["in_shardings"]).shardings
    given = sdy.TensorShardingPerValueAttr(op.attributes["out_shardings"]).shardings
    block = op.regions[0].blocks[0]
    made = [value.type for value in _terminator(block).operands]
    operands = [
        (value, sharding, argument.type)
        for value, sharding, argument in zip(op.operands, wanted, block.arguments, strict=True)
        if not _comes_in(value, sharding)
    ]
    results, returned = [], []
    for value, sharding, kind in zip(op.results, given, made, strict=True):
        if _is_returned(value):
            returned.append(value)
        else:
            results.append((value, sharding, kind))
    if returned:
        with ir.InsertionPoint(op):
            _replace(returned, _opaque([value.type for value in returned], []))
    for i in range(max(len(operands), len(results))):
        ins, outs = operands[i : i + 1], results[i : i + 1]
        part = ir.Operation.create(
            "sdy.manual_computation",
            results=[value.type for value, _, _ in outs],
            operands=[value for value, _, _ in ins],
            attributes={
                "in_shardings": sdy.TensorShardingPerValueAttr.get([sharding for _, sharding, _ in ins]),
                "out_shardings": sdy.TensorShardingPerValueAttr.get([sharding for _, sharding, _ in outs]),
                "manual_axes": op.attributes["manual_axes"],
            },
            regions=1,
            ip=ir.InsertionPoint(op),
        )
        body = part.regions[0].blocks.append(*[kind for _, _, kind in ins])
        with ir.InsertionPoint(body):
            opaque = _opaque([kind for _, _, kind in outs], list(body.arguments))
            ir.Operation.create("sdy.return", operands=list(opaque.results))
        _replace([value for value, _, _ in outs], part)
    op.erase()


def _opaque(results: Sequence[Any], operands: Sequence[Any]) -> Any:
    """An operation that nothing is known of; `results` are types."""
    attributes = {"call_target_name": ir.StringAttr.get("region"), "has_side_effect": ir.BoolAttr.get(True)}
    return ir.Operation.create("stablehlo.custom_call", results=results, operands=operands, attributes=attributes)


def _replace(values: Sequence[Any], op: Any) -> None:
    for old, new in zip(values, op.results, strict=True):
        old.replace_all_uses_with(new)


def _comes_in(value: Any, sharding: Any) -> bool:
    """Whether a value is an argument that has a sharding, in which no dim is left to be sharded otherwise."""
    return (
        isinstance(value.owner, ir.Block)
        and _sharding_of(value) == sharding
        and all(sdy.DimensionShardingAttr(d).is_closed for d in sdy.TensorShardingAttr(sharding).dimension_shardings)
    )


def _is_returned(value: Any) -> bool:
    """Whether a value is a result of a public function in whatever sharding it comes, and nothing else."""
    for use in value.uses:
        op = use.owner.operation
        if op.name != "func.return" or _visibility(op.parent) == "private":
            return False
        attributes = op.parent.attributes
        if "res_attrs" in attributes and "sdy.sharding" in _names(attributes["res_attrs"][use.operand_number]):
            return False
    return True


def _names(attributes: Any) -> list[str]:
    """What a dict of attributes names; `get` of JAX's makes one."""
    return [one.name for one in attributes]


def _body(module: Any) -> list[Any]:
    return [view.operation for view in module.regions[0].blocks[0].operations]


def _symbol(op: Any) -> str:
    return ir.StringAttr(op.attributes["sym_name"]).value


def _visibility(op: Any) -> str:
    return ir.StringAttr(op.attributes["sym_visibility"]).value if "sym_visibility" in op.attributes else "public"


def _sharding_of(value: Any) -> Any:
    """The sharding of a value, as far as its operation or its function carries one, else None."""
    op = _owner(value)
    if op is None:
        owner = value.owner.owner
        if "arg_attrs" not in owner.attributes:
            return None
        attributes = owner.attributes["arg_attrs"][ir.BlockArgument(value).arg_number]
        return attributes["sdy.sharding"] if "sdy.sharding" in _names(attributes) else None
    if "out_sharding" in op.attributes:
        return op.attributes["out_sharding"]
    if "sdy.sharding" not in op.attributes:
        return None
    shardings = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings
    return shardings[ir.OpResult(value).result_number]


def _mesh_axes(mesh: Any) -> Axes:
    return tuple(sdy.MeshAxisAttr(axis).name for axis in sdy.MeshAttr(mesh).axes)


def _dims(sharding: Any) -> tuple[Axes, ...]:
    """The axes of each dim of a sharding, () without one; a part of an axis is `axis:(before)size`."""
    if sharding is None:
        return ()
    dims = [sdy.DimensionShardingAttr(dim) for dim in sdy.TensorShardingAttr(sharding).dimension_shardings]
    return tuple(tuple(_axis_name(sdy.AxisRefAttr(axis)) for axis in dim.axes) for dim in dims)


def _axis_name(axis: Any) -> str:
    if axis.sub_axis_info is None:
        return axis.name
    part = sdy.SubAxisInfoAttr(axis.sub_axis_info)
    return f"{axis.name}:({part.pre_size}){part.size}"


def _listed_axes(text: str) -> Axes:
    """The axes that a printed list names, as `_dims` names them. Lists of axes have no class in Python."""
    return tuple(dict.fromkeys(name + part for name, part in _LISTED_AXIS.findall(text)))


def item_bits(kind: Any) -> int:
    """Bits of one item of a tensor type; a truth value takes eight, as in memory. 0 for what is no tensor."""
    if not isinstance(kind, ir.RankedTensorType):
        return 0
    item: Any = kind.element_type
    if isinstance(item, ir.ComplexType):
        part: Any = item.element_type
        return 2 * part.width
    return 8 if item.width == 1 else item.width


def _bytes(kind: Any) -> int:
    """Bytes of a tensor type, 0 for what is no tensor."""
    bits = item_bits(kind)
    return math.prod(kind.shape) * bits // 8 if bits else 0


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
    """Executions per step by kind, axes and bytes; what runs over axes of one device communicates nothing."""
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
