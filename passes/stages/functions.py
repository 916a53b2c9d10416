"""The segments of a stage as functions of global arrays: what is compiled, and what is verified.

A segment runs inside one `jax.shard_map`, on local blocks. Arrays come in and go out by the segment's slots
(`packing`): a pack is cut into its members' blocks first, and joined from them last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.ir.graph import Lit
from alpa_lite.ir.layout import local_shape
from alpa_lite.passes.lowering.emission import AnyMesh, run_region
from alpa_lite.passes.lowering.program import Body, spec_of
from alpa_lite.passes.stages.packing import Slot, slots
from alpa_lite.passes.stages.segments import ArrayType, Segment, Segments


def types_of(parts: Segments, segment: Segment, count: int) -> tuple[list[ArrayType], list[ArrayType]]:
    """Returns the types of the arrays that the function of a segment takes, and of those that it returns."""
    taken = [slot for slot in slots(parts, segment) for _ in range(_arrays(slot, count))]
    return [slot.kind for slot in taken], [slot.kind for slot in slots(parts, segment, output=True)]


def function_of(
    parts: Segments, segment: Segment, mesh: AnyMesh, count: int, *, shared: bool = False
) -> Callable[..., list[Any]]:
    """Returns the segment as a function of flat global arrays: one for each slot, `count` for one of "pieces".

    `shared` is that of `lowering.emission.emit`.
    """
    program, traced = parts.program, parts.stage.traced
    entries, exits = slots(parts, segment), slots(parts, segment, output=True)

    def blocks(*arrays: Any) -> list[Any]:
        found = _apart(parts, segment, entries, arrays, count)
        number = next((found[i] for i, wire in enumerate(segment.inputs) if wire.kind == "number"), None)
        registers: dict[int, Any] = {register: literal.value for register, literal in segment.preset}
        for i, (wire, binds) in enumerate(zip(segment.inputs, segment.binds, strict=True)):
            if wire.kind == "number":
                continue
            for register in binds:
                partial = bool(program.registers[register].partial)
                if wire.kind == "pieces":
                    block = jnp.stack([a[0] if partial else a for a in found[i]])
                else:
                    block = found[i][0] if partial else found[i]
                    if wire.kind == "slice":
                        block = lax.dynamic_index_in_dim(block, number, 0, keepdims=False)
                registers[register] = block
        body = Body(tuple(registers), segment.instructions, segment.reads)
        outputs = run_region(body, list(registers.values()), program, traced, shared=shared)
        shaped = [_shaped(block, parts, segment, position) for position, block in enumerate(outputs)]
        return [_together(slot, [shaped[i] for i in slot.positions]) for slot in exits]

    taken, given = types_of(parts, segment, count)
    specs_in = tuple(spec_of(layout) for _, _, layout in taken)
    specs_out = [spec_of(layout) for _, _, layout in given]
    return jax.shard_map(blocks, mesh=mesh, in_specs=specs_in, out_specs=specs_out, check_vma=False)


def _arrays(slot: Slot, count: int) -> int:
    return count if slot.wire.kind == "pieces" else 1


def _apart(
    parts: Segments, segment: Segment, entries: Sequence[Slot], arrays: Sequence[Any], count: int
) -> dict[int, Any]:
    """Returns the block of each input of a segment; of "pieces" a list."""
    found: dict[int, Any] = {}
    rest = iter(arrays)
    for slot in entries:
        taken = list(itertools.islice(rest, _arrays(slot, count)))
        if slot.pack is None:
            (position,) = slot.positions
            found[position] = taken if slot.wire.kind == "pieces" else taken[0]
            continue
        starts = dict(zip(slot.pack.members, itertools.accumulate(slot.pack.sizes, initial=0), strict=False))
        sizes = dict(zip(slot.pack.members, slot.pack.sizes, strict=True))
        for position in slot.positions:
            wire = segment.inputs[position]
            shape, _, layout = parts.type_of(segment, position)
            block = lax.slice_in_dim(taken[0], starts[wire], starts[wire] + sizes[wire])
            found[position] = block.reshape(local_shape(shape, layout, parts.program.mesh))
    return found


def _together(slot: Slot, blocks: Sequence[Any]) -> Any:
    if slot.pack is None:
        return blocks[0]
    return jnp.concatenate([jnp.ravel(block) for block in blocks])


def _shaped(block: Any, parts: Segments, segment: Segment, position: int) -> Any:
    """Returns the block of an output: a literal as an array, a summand with its leading dim."""
    operand, wire = segment.reads[position], segment.outputs[position]
    if isinstance(operand, Lit):
        block = jnp.asarray(operand.value, operand.aval.dtype)
    register = parts.carry_registers[wire.number] if wire.kind == "carry" else operand
    partial = not isinstance(register, Lit) and parts.program.registers[register].partial
    return block[None] if partial else block
