"""Emits a local program as one `jax.shard_map`, or as several where operations outside split it.

Inside, every operation is its local form and every collective is spelled out. `emit_constrained` writes the same plan
as constraints on the whole program instead, with the collectives left to the compiler.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.graph import Lit, Op, Traced
from alpa_lite.layout import Axes, Layout, LogicalMesh, Step
from alpa_lite.passes.ir import evaluation, primitives
from alpa_lite.passes.local.types import LocalForm, in_bytes
from alpa_lite.passes.lowering.program import (
    Body,
    Compute,
    Instruction,
    LocalProgram,
    Loop,
    Operand,
    Outside,
    Reshard,
    in_mesh_order,
    read_before,
    reads,
    spec_of,
    writes,
)
from alpa_lite.passes.lowering.runs import runs_of

AnyMesh = Mesh | AbstractMesh


def emit(program: LocalProgram, traced: Traced, mesh: AnyMesh, *, shared: bool = False) -> Callable[..., list[Any]]:
    """A function of the flat global arguments and constants that returns the flat global outputs.

    It is one `shard_map`, unless operations outside split it into several. A partial sum that crosses from one to the
    next travels with a leading dim that is sharded over its partial axes.

    With `shared`, equal runs of instructions (`lowering.runs`) are calls of one function, in the bodies of loops, too:
    the same instructions, traced and lowered once for all layers, under the names and source lines of the first.
    """
    pieces = _pieces(program.body.instructions)

    def fun(*leaves: Any) -> list[Any]:
        registers: dict[int, Any] = dict(zip(program.body.inputs, leaves, strict=True))
        for number, (outside, instructions) in enumerate(pieces):
            if outside is not None:
                operands = [o.value if isinstance(o, Lit) else registers[o] for o in outside.operands]
                registers.update(zip(outside.results, evaluation.bind(outside.op, operands), strict=True))
            later = [
                read_before(rest).union(reads(before) if before is not None else ())
                for before, rest in pieces[number + 1 :]
            ]
            finals = [o for o in program.body.outputs if not isinstance(o, Lit)]
            written = {register for item in instructions for register in writes(item)}
            wanted = sorted(set(finals).union(*later) & written)
            taken = sorted(read_before(instructions) & registers.keys())
            region = functools.partial(_region, program, traced, instructions, taken, wanted, shared)
            specs = tuple(_crossing_spec(program.registers[r]) for r in taken)
            arrays = [registers[r] for r in taken]
            if _are_empty(arrays):
                region, specs, arrays = _on_empty(region, arrays, specs, mesh), (), []
            run = jax.shard_map(
                region,
                mesh=mesh,
                in_specs=specs,
                out_specs=[_crossing_spec(program.registers[r]) for r in wanted],
                check_vma=False,
            )
            if instructions:
                registers.update(zip(wanted, run(*arrays), strict=True))
        return [o.value if isinstance(o, Lit) else registers[o] for o in program.body.outputs]

    return fun


def _are_empty(arrays: Sequence[Any]) -> bool:
    return bool(arrays) and all(a.size == 0 and isinstance(a.dtype, np.dtype) for a in arrays)


def _on_empty(
    region: Callable[..., list[Any]], arrays: Sequence[Any], specs: Sequence[PartitionSpec], mesh: AnyMesh
) -> Callable[[], list[Any]]:
    """A region that takes arrays without elements, taking none: XLA refuses one whose operands are all constants."""
    shapes = [NamedSharding(mesh, spec).shard_shape(a.shape) for a, spec in zip(arrays, specs, strict=True)]
    return lambda: region(*(lax.full(shape, 0, a.dtype) for a, shape in zip(arrays, shapes, strict=True)))


def _pieces(instructions: Sequence[Instruction]) -> list[tuple[Outside | None, tuple[Instruction, ...]]]:
    """Maximal runs of instructions inside a region, each after the outside operation that comes before it."""
    pieces: list[tuple[Outside | None, list[Instruction]]] = [(None, [])]
    for item in instructions:
        if isinstance(item, Outside):
            pieces.append((item, []))
        else:
            pieces[-1][1].append(item)
    return [(outside, tuple(run)) for outside, run in pieces]


def _region(
    program: LocalProgram,
    traced: Traced,
    instructions: tuple[Instruction, ...],
    taken: Sequence[int],
    wanted: Sequence[int],
    shared: bool,
    *blocks: Any,
) -> list[Any]:
    """Runs the instructions of one region on the blocks of a device."""
    layouts = program.registers
    inputs = [b[0] if layouts[r].partial else b for r, b in zip(taken, blocks, strict=True)]
    if shared:
        outputs = _run_shared(instructions, wanted, dict(zip(taken, inputs, strict=True)), program.mesh, traced)
    else:
        body = Body(tuple(taken), instructions, tuple(wanted))
        outputs = _run(body, inputs, {}, program.mesh, traced)
    return [b[None] if layouts[r].partial else b for r, b in zip(wanted, outputs, strict=True)]


def _run_shared(
    instructions: tuple[Instruction, ...],
    wanted: Sequence[int],
    registers: dict[int, Any],
    mesh: LogicalMesh,
    traced: Traced,
) -> list[Any]:
    """Executes instructions, equal runs as calls of one function."""
    functions: dict[Any, Callable[..., list[Any]]] = {}
    for run in runs_of(instructions, wanted, traced):
        blocks = [registers[r] for r in run.inputs]
        if run.key is None:
            outputs = _run(run.body(), blocks, {}, mesh, traced, shared=True)
        else:
            if run.key not in functions:
                functions[run.key] = jax.jit(functools.partial(_call, run.body(), mesh, traced))
            outputs = functions[run.key](*blocks, *run.numbers)
        registers.update(zip(run.outputs, outputs, strict=True))
    return [registers[r] for r in wanted]


def _call(body: Body, mesh: LogicalMesh, traced: Traced, *blocks: Any) -> list[Any]:
    return _run(body, blocks, {}, mesh, traced)


def _crossing_spec(layout: Layout) -> PartitionSpec:
    """The spec of a value between regions: a partial sum has a leading dim for its summands."""
    if not layout.partial:
        return spec_of(layout)
    return spec_of(Layout((layout.partial, *layout.dims)))


def emit_constrained(program: LocalProgram, traced: Traced, mesh: AnyMesh) -> Callable[..., list[Any]]:
    """Returns the function of `emit` with the plan's layouts as constraints, its collectives left to the compiler.

    Operations that the compiler cannot look into (kernels), or would divide wrongly, are regions of their own.
    """
    layouts: dict[int, Layout] = {}
    own: dict[int, Callable[..., Sequence[Any]]] = {}
    said: set[int] = set()  # the user says where they lie, be it whole everywhere
    returned: set[int] = set()  # by branches, of which all must return them in one way: the compiler's

    def visit(body: Body) -> None:
        for item in body.instructions:
            match item:
                case Compute(op=op, form=form):
                    layouts.update(zip(op.results, form.results, strict=False))
                    if op.name == primitives.CONSTRAINT:
                        said.update(op.results)
                    if op.name in primitives.KERNELS or _misdivided(op, mesh):
                        own[op.index] = _alone(form, mesh)
                case Loop(op=op, bodies=bodies):
                    for inner in bodies:
                        visit(inner)
                    if op.name == "cond":
                        returned.update(a for branch in op.bodies for a in branch.outputs if isinstance(a, int))

    visit(program.body)

    def place(value: int, array: Any) -> Any:
        layout = layouts.get(value)
        if layout is None or layout.partial or (layout.is_replicated and value not in said):
            return array
        if value in returned and value not in said:
            return array
        return lax.with_sharding_constraint(array, NamedSharding(mesh, spec_of(layout)))

    def fun(*leaves: Any) -> list[Any]:
        count = len(leaves) - len(traced.graph.constants)
        outputs = evaluation.evaluate(traced.graph, leaves[:count], leaves[count:], place, own)
        return [
            lax.with_sharding_constraint(x, NamedSharding(mesh, spec_of(layout)))
            for x, layout in zip(outputs, program.outputs, strict=True)
        ]

    return fun


def _misdivided(op: Op, mesh: AnyMesh) -> bool:
    """Whether XLA's partitioner divides an operation wrongly, or into operations that its backends do not have.

    Seen on JAX 0.10.2 and 0.12.0.1: a convolution in groups whose kernel is sharded over its outputs takes each
    device's outputs for all groups (silently other numbers); a product or a convolution on a mesh of three axes, one of
    which is summed over and then divides the result with the others, exchanges blocks (silently, too: of random
    shardings of operands and result 40 in 10,000; on meshes of two axes none); XLA:CPU has no all-reduce of bitwise
    operations.
    """
    if op.name in primitives.PRODUCTS and sum(size > 1 for size in mesh.shape.values()) > 2:
        return True
    if op.name == "conv_general_dilated":
        return op.params["feature_group_count"] > 1 or op.params["batch_group_count"] > 1
    return op.name in ("reduce_and", "reduce_or", "reduce_xor")


def _alone(form: LocalForm, mesh: AnyMesh) -> Callable[..., Sequence[Any]]:
    """A local form as a region of its own, which leaves no partial sums."""

    def run(*blocks: Any) -> list[Any]:
        made = form.run(*blocks)
        return [
            in_bytes(lambda x, la=la: lax.psum(x, la.partial), x) if la.partial else x
            for x, la in zip(made, form.results, strict=True)
        ]

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(spec_of(layout) for layout in form.operands),
        out_specs=[spec_of(Layout(layout.dims)) for layout in form.results],
        check_vma=False,
    )


def function_of(
    program: LocalProgram, traced: Traced, mesh: AnyMesh, communication: str, *, shared: bool = False
) -> Callable[..., list[Any]]:
    """The step as a function of flat global arrays, as `communication` says; on one device just the traced program.

    `shared` is that of `emit`.
    """
    if program.mesh.size == 1:
        return lambda *leaves: evaluation.evaluate_block(traced.graph.block, leaves)
    if communication == "explicit":
        return emit(program, traced, mesh, shared=shared)
    return emit_constrained(program, traced, mesh)


def run_region(
    body: Body, inputs: Sequence[Any], program: LocalProgram, traced: Traced, *, shared: bool = False
) -> list[Any]:
    """Executes a body of a program's instructions inside a `shard_map` that the caller has opened, on local blocks.

    `shared` is that of `emit`.
    """
    if not shared:
        return _run(body, inputs, {}, program.mesh, traced)
    return _run_body_shared(body, inputs, {}, program.mesh, traced)


def _run_body_shared(
    body: Body, inputs: Sequence[Any], outer: Mapping[int, Any], mesh: LogicalMesh, traced: Traced
) -> list[Any]:
    """Executes a body that may read registers of `outer`, equal runs as calls of one function."""
    wanted = list(dict.fromkeys(o for o in body.outputs if not isinstance(o, Lit)))
    registers = {**outer, **dict(zip(body.inputs, inputs, strict=True))}
    made = dict(zip(wanted, _run_shared(body.instructions, wanted, registers, mesh, traced), strict=True))
    return [o.value if isinstance(o, Lit) else made[o] for o in body.outputs]


def _run(
    body: Body, inputs: Sequence[Any], registers: dict[int, Any], mesh: LogicalMesh, traced: Traced,
    *, shared: bool = False,
) -> list[Any]:  # fmt: skip
    """Executes a body's instructions inside `shard_map`; the bodies of its loops `shared` as of `emit`."""

    def read(operand: Operand) -> Any:
        return operand.value if isinstance(operand, Lit) else registers[operand]

    for register, block in zip(body.inputs, inputs, strict=True):
        registers[register] = block
    tied = _tied(body, traced)
    for item in body.instructions:
        match item:
            case Compute():
                if item.op.name in primitives.EXTREMA:
                    for register in tied.intersection(reads(item)):
                        registers[register] = _jax.materialised(registers[register])
                results = item.form.run(*(read(o) for o in item.operands))
                for register, block in zip(item.results, results, strict=True):
                    registers[register] = block
            case Reshard():
                with _jax.under(item.used_by.source) if item.used_by is not None else contextlib.nullcontext():
                    block = registers[item.source]
                    if item.late:
                        block = lax.optimization_barrier(block)
                    shape = traced.graph.values[item.value].shape
                    for step in item.steps:
                        block = change_layout(block, step, shape, mesh)
                registers[item.result] = block
            case Loop():
                with _jax.under(item.op.source):
                    results = _loop(item, [read(o) for o in item.operands], registers, mesh, traced, shared)
                for register, block in zip(item.results, results, strict=True):
                    registers[register] = block
            case Outside():
                raise AssertionError("an operation that must be outside is inside a region")
    return [read(o) for o in body.outputs]


def _tied(body: Body, traced: Traced) -> frozenset[int]:
    """The registers of reductions' operands of which the compiler must make one copy only (see `ties`)."""
    computed = [item for item in body.instructions if isinstance(item, Compute)]
    chosen = [item for item in computed if item.op.name in primitives.EXTREMA]
    if not chosen:
        return frozenset()
    own = set(body.inputs).union(*map(writes, body.instructions))  # a register of an outer body stays as it is
    equal = {a for item in computed if item.op.name == "eq" for a in item.op.operands}
    kept = own.intersection(o for o in body.outputs if not isinstance(o, Lit))
    return frozenset(
        register for item in chosen for value, register in zip(item.op.operands, item.operands, strict=True)
        if isinstance(value, int) and isinstance(register, int) and register in own
        and (value in equal or register in kept)
        and jnp.issubdtype(traced.graph.values[value].dtype, jnp.inexact)
    )  # fmt: skip


def change_layout(block: Any, step: Step, shape: tuple[int, ...], mesh: LogicalMesh) -> Any:
    """One elementary change of layout of a local block."""
    return in_bytes(lambda x: _change_layout(x, step, shape, mesh), block)


def _change_layout(block: Any, step: Step, shape: tuple[int, ...], mesh: LogicalMesh) -> Any:
    match step.kind:
        case "slice":
            sizes = list(block.shape)
            sizes[step.dim] = shape[step.dim] // mesh.product(step.after.dims[step.dim])
            starts: list[Any] = [np.int32(0)] * len(sizes)
            starts[step.dim] = lax.mul(_block_number(step.axes, mesh), np.int32(sizes[step.dim]))
            return lax.dynamic_slice(block, starts, sizes, allow_negative_indices=False)
        case "all_reduce":
            return lax.psum(block, step.axes)
        case "reduce_scatter":
            return lax.psum_scatter(block, step.axes, scatter_dimension=step.dim, tiled=True)
        case "all_gather":
            return lax.all_gather(block, step.axes, axis=step.dim, tiled=True)
        case "all_to_all":
            return lax.all_to_all(block, step.axes, step.to_dim, step.dim, tiled=True)
        case "collective_permute":
            before = step.before.dims[step.dim]
            return lax.ppermute(block, in_mesh_order(before, mesh), _reorder(before, step.axes, mesh))


def _block_number(axes: Axes, mesh: LogicalMesh) -> Any:
    """This device's number along the axes, major to minor; in plain `lax`, which traces faster than operators."""
    number = lax.axis_index(axes[0])
    for axis in axes[1:]:
        number = lax.add(lax.mul(number, np.int32(mesh.axis_size(axis))), lax.axis_index(axis))
    return number


def _reorder(before: Axes, after: Axes, mesh: LogicalMesh) -> list[tuple[int, int]]:
    """(source, destination) pairs that move block b from its place along `before` to its place along `after`.

    Devices are numbered along the axes in mesh order: `ppermute` does not follow another order of its axis names.
    """
    axes = in_mesh_order(before, mesh)

    def device(block: int, order: Axes) -> int:
        place = {}
        for axis in reversed(order):
            place[axis] = block % mesh.axis_size(axis)
            block //= mesh.axis_size(axis)
        number = 0
        for axis in axes:
            number = number * mesh.axis_size(axis) + place[axis]
        return number

    return [(device(block, before), device(block, after)) for block in range(mesh.product(before))]


def _loop(
    item: Loop, operands: list[Any], registers: dict[int, Any], mesh: LogicalMesh, traced: Traced, shared: bool
) -> list[Any]:
    """Emits a scan, while or cond over local bodies."""
    execute = _run_body_shared if shared else _run

    def function(body: Body) -> Callable[[Sequence[Any]], list[Any]]:
        return lambda inputs: _strong(execute(body, inputs, registers, mesh, traced))

    return evaluation.control_flow(item.op, _strong(operands), [function(body) for body in item.bodies])


def _strong(blocks: Sequence[Any]) -> list[Any]:
    """Drops weak types: carries and branch results must agree in them, and primitives do not look at them."""
    return [_jax.strong(block) for block in blocks]
