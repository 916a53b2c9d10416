"""Removal of the parts of a module that Shardy cannot change: the bodies of fully manual regions."""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from alpa_lite.ir.layout import Axes
from alpa_lite.passes.checks.reading import (
    axes_of,
    callee,
    create,
    create_opaque,
    functions_of,
    is_public,
    names,
    operations,
    replace_values,
    sharding_of,
    symbol,
    terminator,
)


def hollow_regions(module: Any) -> None:
    """Replaces the bodies of fully manual regions by one opaque operation, and drops the functions only they called.

    Regions that neither take nor return a value, as of a callback on nothing, are dropped: there is nothing that Shardy
    could communicate for them, and it refuses them.
    """
    meshes = {
        symbol(op): axes_of(op.attributes["mesh"]) for op in operations(module.regions[0]) if op.name == "sdy.mesh"
    }
    functions = functions_of(module)
    called: set[str] = set()
    stack = [op for op in functions.values() if is_public(op)]
    while stack:
        for name in _hollow_blocks(stack.pop(), meshes):
            if name in functions and name not in called:
                called.add(name)
                stack.append(functions[name])
    for name, op in functions.items():
        if name not in called and not is_public(op):
            op.erase()


def _hollow_blocks(op: Any, meshes: dict[str, Axes]) -> set[str]:
    """Hollows the regions within `op`, and returns the names of the functions that the remaining operations call."""
    calls: set[str] = set()
    for region in op.regions:
        for block in region.blocks:
            for view in list(block.operations):
                inner = view.operation
                if inner.name == "sdy.manual_computation" and not (inner.operands or inner.results):
                    inner.erase()
                elif inner.name == "sdy.manual_computation" and _is_fully_manual(inner, meshes):
                    _hollow_region(inner)
                elif inner.name == "func.call":
                    calls.add(callee(inner))
                else:
                    calls |= _hollow_blocks(inner, meshes)
    return calls


def _is_fully_manual(op: Any, meshes: dict[str, Axes]) -> bool:
    listed = sdy.ManualAxesAttr(op.attributes["manual_axes"])
    manual = {listed[i] for i in range(len(listed))}
    used = {
        sdy.TensorShardingAttr(one).mesh_or_ref
        for side in ("in_shardings", "out_shardings")
        for one in sdy.TensorShardingPerValueAttr(op.attributes[side]).shardings
    }
    known = [
        meshes.get(ir.FlatSymbolRefAttr(mesh).value) if isinstance(mesh, ir.FlatSymbolRefAttr) else axes_of(mesh)
        for mesh in used
    ]
    return bool(known) and all(axes is not None and set(axes) <= manual for axes in known)


def _hollow_region(op: Any) -> None:
    """Replaces a fully manual region by many opaque ones, each of one operand at most and one result at most.

    Every operand is wanted, and every result comes, in the sharding that it had. Nothing is propagated through such a
    region, so that is all that Shardy sees of it; but it takes time quadratic in the operands of one region.

    Values that leave nothing to decide are left out, which in a step are nearly all and take most of Shardy's time:
    arguments of the function that come as they are wanted, and results that it returns as they come.
    """
    wanted = sdy.TensorShardingPerValueAttr(op.attributes["in_shardings"]).shardings
    given = sdy.TensorShardingPerValueAttr(op.attributes["out_shardings"]).shardings
    block = op.regions[0].blocks[0]
    made = [value.type for value in terminator(block).operands]
    taken = [argument.type for argument in block.arguments]
    operands = [each for each in zip(op.operands, wanted, taken, strict=True) if not _comes_in(*each[:2])]
    returned = [value for value in op.results if _is_returned(value)]
    results = [each for each in zip(op.results, given, made, strict=True) if each[0] not in returned]
    if returned:
        replace_values(returned, create_opaque("region", op, [v.type for v in returned], [], effects=True).results)
    for i in range(max(len(operands), len(results))):
        ins, outs = operands[i : i + 1], results[i : i + 1]
        attributes = {
            "in_shardings": sdy.TensorShardingPerValueAttr.get([sharding for _, sharding, _ in ins]),
            "out_shardings": sdy.TensorShardingPerValueAttr.get([sharding for _, sharding, _ in outs]),
            "manual_axes": op.attributes["manual_axes"],
        }
        types, taken = [value.type for value, _, _ in outs], [value for value, _, _ in ins]
        part = create("sdy.manual_computation", op, types, taken, attributes, regions=1)
        body = part.regions[0].blocks.append(*[kind for _, _, kind in ins])
        opaque = create_opaque("region", body, [kind for _, _, kind in outs], body.arguments, effects=True)
        create("sdy.return", body, [], opaque.results, {})
        replace_values([value for value, _, _ in outs], part.results)
    op.erase()


def _comes_in(value: Any, sharding: Any) -> bool:
    """Returns whether a value is an argument that has a sharding, in which no dim is left to be sharded otherwise."""
    return (
        isinstance(value.owner, ir.Block)
        and (own := sharding_of(value)) is not None  # an argument of a loop's body has none
        and own == sharding
        and all(sdy.DimensionShardingAttr(d).is_closed for d in sdy.TensorShardingAttr(sharding).dimension_shardings)
    )


def _is_returned(value: Any) -> bool:
    """Returns whether a value is a result of a public function in whatever sharding it comes, and nothing else."""
    for use in value.uses:
        op = use.owner.operation
        if op.name != "func.return" or not is_public(op.parent):
            return False
        attributes = op.parent.attributes
        if "res_attrs" in attributes and "sdy.sharding" in names(attributes["res_attrs"][use.operand_number]):
            return False
    return True
