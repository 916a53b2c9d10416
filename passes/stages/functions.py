"""The segments of a stage as functions of global arrays: what is compiled, and what is verified.

A segment runs inside one `jax.shard_map`, on local blocks. A pack (`packing`) is cut into its members' blocks first,
and joined from them last.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.ir.graph import Lit
from alpa_lite.ir.layout import local_shape
from alpa_lite.passes.lowering.emission import AnyMesh, run_region
from alpa_lite.passes.lowering.program import Body, spec_of
from alpa_lite.passes.stages.segments import ArrayType, Segment, Segments, Wire


def types_of(parts: Segments, segment: Segment, count: int) -> tuple[list[ArrayType], list[ArrayType]]:
    """Returns the types of the arrays that the function of a segment takes, and of those that it returns."""
    taken = [item for item in segment.inputs.items() for _ in range(_arrays(item[0], count))]
    return [parts.type_of(*item) for item in taken], [parts.type_of(*item) for item in segment.outputs.items()]


def function_of(
    parts: Segments, segment: Segment, mesh: AnyMesh, count: int, *, shared: bool = False
) -> Callable[..., list[Any]]:
    """Returns the segment as a function of flat global arrays: one for each wire, `count` for one of "pieces".

    `shared` is that of `lowering.emission.emit`.
    """
    program, traced = parts.program, parts.stage.traced

    def blocks(*arrays: Any) -> list[Any]:
        number = next((array for wire, array in zip(segment.inputs, arrays, strict=False) if wire.kind == "number"), 0)
        registers: dict[int, Any] = {register: literal.value for register, literal in segment.preset}
        rest = iter(arrays)
        for wire, binds in segment.inputs.items():
            taken = list(itertools.islice(rest, _arrays(wire, count)))
            for register, block in _bound(parts, wire, binds, taken[0]):
                partial = bool(program.registers[register].partial)
                if wire.kind == "pieces":
                    block = jnp.stack([a[0] if partial else a for a in taken])
                elif partial:
                    block = block[0]
                if wire.kind == "slice":
                    block = lax.dynamic_index_in_dim(block, number, 0, keepdims=False)
                registers[register] = block
        reads = tuple(operand for operands in segment.outputs.values() for operand in operands)
        body = Body(tuple(registers), segment.instructions, reads)
        outputs = iter(run_region(body, list(registers.values()), program, traced, shared=shared))
        given = []
        for wire, operands in segment.outputs.items():
            some = zip(parts.members(wire), operands, itertools.islice(outputs, len(operands)), strict=True)
            shaped = [_shaped(parts, *one) for one in some]
            given.append(jnp.concatenate([jnp.ravel(block) for block in shaped]) if wire in parts.packs else shaped[0])
        return given

    taken, given = types_of(parts, segment, count)
    specs_in = tuple(spec_of(layout) for _, _, layout in taken)
    specs_out = [spec_of(layout) for _, _, layout in given]
    return jax.shard_map(blocks, mesh=mesh, in_specs=specs_in, out_specs=specs_out, check_vma=False)


def _arrays(wire: Wire, count: int) -> int:
    return count if wire.kind == "pieces" else 1


def _bound(parts: Segments, wire: Wire, binds: Sequence[int], array: Any) -> Iterator[tuple[int, Any]]:
    """Yields the registers that an array sets, with their blocks: of a pack, a part for each."""
    if wire not in parts.packs:
        yield from ((register, array) for register in binds)
        return
    pack = parts.packs[wire]
    for register, member, end, size in zip(
        binds, pack.members, itertools.accumulate(pack.sizes), pack.sizes, strict=True
    ):
        shape, _, layout = parts.type_of(member, (register,))
        block = lax.slice_in_dim(array, end - size, end)
        yield register, block.reshape(local_shape(shape, layout, parts.program.mesh))


def _shaped(parts: Segments, wire: Wire, operand: Any, block: Any) -> Any:
    """Returns the block of an output: a literal as an array, a summand with its leading dim."""
    if isinstance(operand, Lit):
        block = jnp.asarray(operand.value, operand.aval.dtype)
    register = parts.carry_registers[wire.number] if wire.kind == "carry" else operand
    partial = not isinstance(register, Lit) and parts.program.registers[register].partial
    return block[None] if partial else block
