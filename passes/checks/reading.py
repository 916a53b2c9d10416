"""Reads lowered modules: their functions, constants, trip counts, types and shardings; and replaces operations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from alpa_lite import _jax
from alpa_lite.ir.layout import Axes
from alpa_lite.passes.ir.evaluation import UNKNOWN_TRIPS

_UNKNOWN_LOOP = re.compile(rf'{UNKNOWN_TRIPS}\)*/while"')
_LISTED_AXIS = re.compile(r'"((?:[^"\\]|\\.)*)"(:\(\d+\)\d+)?')


def is_unknown_loop(text: str) -> bool:
    """Returns whether the quoted name of a loop is that of one whose trip count plans do not know.

    In a derivative the scope stands in the parentheses of the transformation: `jvp(unknown_trips)/while`.
    """
    return _UNKNOWN_LOOP.search(text) is not None


def names(attributes: Any) -> list[str]:
    """Returns the names in a `DictAttr`, whose `get` constructs one instead of looking a name up."""
    return [one.name for one in attributes]


def operations(region: Any) -> list[Any]:
    """Returns the operations of a region of one block."""
    return [view.operation for view in region.blocks[0].operations]


def symbol(op: Any) -> str:
    """Returns the name of a function or a mesh."""
    return ir.StringAttr(op.attributes["sym_name"]).value


def functions_of(module: Any) -> dict[str, Any]:
    """Returns the functions of a module by name."""
    return {symbol(op): op for op in operations(module.regions[0]) if op.name == "func.func"}


def is_public(function: Any) -> bool:
    """Returns whether a function can be called from outside of its module."""
    attributes = function.attributes
    return "sym_visibility" not in attributes or ir.StringAttr(attributes["sym_visibility"]).value != "private"


def callee(call: Any) -> str:
    """Returns the name of the function that a `func.call` calls."""
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def sharding_of(value: Any) -> Any:
    """Returns the sharding of a value, as far as its operation or its function carries one, else None."""
    op = maker(value)
    if op is None:
        owner = value.owner.owner
        if "arg_attrs" not in owner.attributes:
            return None
        attributes = owner.attributes["arg_attrs"][ir.BlockArgument(value).arg_number]
        return attributes["sdy.sharding"] if "sdy.sharding" in names(attributes) else None
    if "out_sharding" in op.attributes:
        return op.attributes["out_sharding"]
    if "sdy.sharding" not in op.attributes:
        return None
    shardings = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings
    return shardings[ir.OpResult(value).result_number]


def axes_of(mesh: Any) -> Axes:
    """Returns the names of the axes of a mesh."""
    return tuple(sdy.MeshAxisAttr(axis).name for axis in sdy.MeshAttr(mesh).axes)


def dims_of(sharding: Any) -> tuple[Axes, ...]:
    """Returns the axes of each dim of a sharding, () without one; a part of an axis is `axis:(before)size`."""
    if sharding is None:
        return ()
    dims = [sdy.DimensionShardingAttr(dim) for dim in sdy.TensorShardingAttr(sharding).dimension_shardings]
    return tuple(tuple(_axis_name(sdy.AxisRefAttr(axis)) for axis in dim.axes) for dim in dims)


def _axis_name(axis: Any) -> str:
    if axis.sub_axis_info is None:
        return axis.name
    part = sdy.SubAxisInfoAttr(axis.sub_axis_info)
    return f"{axis.name}:({part.pre_size}){part.size}"


def listed_axes(text: str) -> Axes:
    """Returns the axes that a printed list names, as `dims_of` names them. Lists of axes have no class in Python."""
    return tuple(dict.fromkeys(name + part for name, part in _LISTED_AXIS.findall(text)))


def trip_count(op: Any) -> int | None:
    """Returns the iterations of a `stablehlo.while` whose counter starts, steps and ends at constants, else None.

    None, too, of one whose trip count plans do not know, as its name says: it is counted once there and here alike.
    """
    if is_unknown_loop(str(op.location)):
        return None
    condition, body = (region.blocks[0] for region in op.regions)
    compare = maker(terminator(condition).operands[0])
    if compare is None or compare.name != "stablehlo.compare":
        return None
    direction = re.search(r"comparison_direction (\w+)", str(compare.attributes["comparison_direction"]))
    left, bound = compare.operands
    limit = constant(bound)
    if direction is None or direction[1] not in ("LT", "LE") or limit is None or not is_argument_of(left, condition):
        return None
    index = ir.BlockArgument(left).arg_number
    start, step = constant(op.operands[index]), _step(body, index)
    if start is None or step is None or step <= 0:
        return None
    return max(0, -((start - limit - (direction[1] == "LE")) // step))


def _step(body: Any, index: int) -> int | None:
    """Returns the increment of the counter in one iteration, None where it is not a constant."""
    add = maker(terminator(body).operands[index])
    if add is None or add.name != "stablehlo.add":
        return None
    for counter, step in (tuple(add.operands), tuple(add.operands)[::-1]):
        if is_argument_of(counter, body) and ir.BlockArgument(counter).arg_number == index:
            return constant(step)
    return None


def terminator(block: Any) -> Any:
    """Returns the last operation of a block."""
    return block.operations[len(block.operations) - 1].operation


def maker(value: Any) -> Any:
    """Returns the operation that makes `value`, None for a block's argument."""
    owner = value.owner
    return None if isinstance(owner, ir.Block) else owner.operation


def is_argument_of(value: Any, block: Any) -> bool:
    """Returns whether a value comes into a block."""
    return isinstance(value.owner, ir.Block) and value.owner == block


def constant(value: Any) -> int | None:
    """Returns the integer that a scalar constant holds, else None."""
    op = maker(value)
    if op is None or op.name not in ("stablehlo.constant", "sdy.constant"):
        return None
    match = re.match(r"dense<(-?\d+)> : tensor<u?i\d+>", str(_jax.constant_of(op)).replace("ui", "i"))
    return int(match[1]) if match else None


def item_bits(kind: Any) -> int:
    """Bits of one item of a tensor type, eight at least, as collectives send it. 0 for what is not a tensor."""
    if not isinstance(kind, ir.RankedTensorType):
        return 0
    item: Any = kind.element_type
    if isinstance(item, ir.ComplexType):
        part: Any = item.element_type
        return 2 * part.width
    return max(8, item.width)


def nbytes(kind: Any) -> int:
    """Returns bytes of a tensor type, 0 for any other type."""
    bits = item_bits(kind)
    return math.prod(kind.shape) * bits // 8 if bits else 0


def create(
    name: str, at: Any, results: Sequence[Any], operands: Iterable[Any], attributes: Any, regions: int = 0
) -> Any:
    """Returns a new operation before another one, or at the end of a block; `results` are types."""
    place = ir.InsertionPoint(at)
    operands = list(operands)
    return ir.Operation.create(name, results, operands, attributes, regions=regions, ip=place)


def create_opaque(target: str, at: Any, results: Sequence[Any], operands: Iterable[Any], *, effects: bool) -> Any:
    """Returns a new operation that nothing is known of but whether it has side effects."""
    attributes = {"call_target_name": ir.StringAttr.get(target), "has_side_effect": ir.BoolAttr.get(effects)}
    return create("stablehlo.custom_call", at, results, operands, attributes)


def replace_values(old: Iterable[Any], new: Iterable[Any]) -> None:
    """Makes everything that reads some values read others."""
    for before, after in zip(list(old), list(new), strict=True):
        before.replace_all_uses_with(after)
