"""Emits a local program as one `jax.shard_map`, or as several where operations outside split it.

Inside, every operation is its local form and every collective is spelled out. `emit_constrained` writes the same plan
as constraints on the whole program instead, with the collectives left to the compiler.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.ir.graph import Lit, Op, Traced
from alpa_lite.ir.layout import Layout, LogicalMesh, Step
from alpa_lite.passes.ir import evaluation, primitives
from alpa_lite.passes.local.types import LocalForm, apply_in_bytes, block_number, permute_blocks
from alpa_lite.passes.lowering.program import (
    Body,
    Compute,
    GlobalOp,
    LocalProgram,
    Loop,
    Operand,
    Reshard,
    computes,
    read_before,
    spec_of,
)
from alpa_lite.passes.lowering.runs import runs_of

AnyMesh = Mesh | AbstractMesh


def emit(program: LocalProgram, traced: Traced, mesh: AnyMesh, *, shared: bool = False) -> Callable[..., list[Any]]:
    """Returns a function of the flat global arguments and constants that returns the flat global outputs.

    It is one `shard_map`, unless operations outside split it into several. A partial sum that crosses from one to the
    next travels with a leading dim that is sharded over its partial axes.

    With `shared`, equal runs of instructions (`lowering.runs`) are calls of one function, in the bodies of loops, too:
    the same instructions, traced and lowered once for all layers, under the names and source lines of the first.
    """
    items, layouts = program.body.instructions, program.registers
    parts = [(outside, tuple(part)) for outside, part in itertools.groupby(items, lambda i: isinstance(i, GlobalOp))]
    emitter = _Emitter(traced, program.mesh, shared)
    kept = {o for o in program.body.outputs if not isinstance(o, Lit)}

    def fun(*leaves: Any) -> list[Any]:
        registers: dict[int, Any] = dict(zip(program.body.inputs, leaves, strict=True))
        position = 0
        for outside, part in parts:
            position += len(part)
            if not outside:
                read_later = kept.union(*(item.reads for item in items[position:]))
                wanted = tuple(sorted(read_later.intersection(r for item in part for r in item.results)))
                body = Body(tuple(sorted(read_before(part) & registers.keys())), part, wanted)
                registers.update(zip(wanted, _run_region(emitter, body, layouts, registers, mesh), strict=True))
                continue
            for item in part:
                assert isinstance(item, GlobalOp)
                results = evaluation.bind(item.op, _read_all(item.operands, registers))
                registers.update(zip(item.results, results, strict=True))
        return _read_all(program.body.outputs, registers)

    return fun


def _run_region(
    emitter: _Emitter, body: Body, layouts: Sequence[Layout], registers: Mapping[int, Any], mesh: AnyMesh
) -> list[Any]:
    """Runs a body as one region on global arrays; returns the values that are read after it.

    XLA refuses a region whose operands are all constants: of arrays without elements alone, a region takes none.
    """
    arrays, specs = [registers[r] for r in body.inputs], [_crossing_spec(layouts[r]) for r in body.inputs]

    def run(*blocks: Any) -> list[Any]:
        inputs = [b[0] if layouts[r].partial else b for r, b in zip(body.inputs, blocks, strict=True)]
        outputs = zip(body.outputs, emitter.run(body, inputs), strict=True)
        return [b[None] if isinstance(r, int) and layouts[r].partial else b for r, b in outputs]

    outputs = [_crossing_spec(layouts[r]) for r in body.outputs if not isinstance(r, Lit)]
    place = functools.partial(jax.shard_map, mesh=mesh, out_specs=outputs, check_vma=False)
    if arrays and all(a.size == 0 and isinstance(a.dtype, np.dtype) for a in arrays):
        shapes = [NamedSharding(mesh, spec).shard_shape(a.shape) for a, spec in zip(arrays, specs, strict=True)]
        empty = [(shape, a.dtype) for a, shape in zip(arrays, shapes, strict=True)]
        return place(lambda: run(*(lax.full(shape, 0, dtype) for shape, dtype in empty)), in_specs=())()
    return place(run, in_specs=tuple(specs))(*arrays)


def _crossing_spec(layout: Layout) -> PartitionSpec:
    """Returns the spec of a value between regions: a partial sum has a leading dim for its summands."""
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
    for item in computes(program.body.instructions):
        op = item.op
        layouts.update(zip(op.results, item.form.results, strict=False))
        if op.name == primitives.CONSTRAINT:
            said.update(op.results)
        if op.name in primitives.KERNELS or _misdivided(op, mesh):
            own[op.index] = _alone(item.form, mesh)
    # What branches return, all must return in one way: the compiler's.
    branches = [branch for op in traced.graph.ops() if op.name == "cond" for branch in op.bodies]
    returned = {a for branch in branches for a in branch.outputs if isinstance(a, int)}

    def place(value: int, array: Any) -> Any:
        layout = layouts.get(value)
        if layout is None or layout.partial:
            return array
        if value not in said and (layout.is_replicated or value in returned):
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
    """Returns whether XLA's partitioner divides an operation wrongly, or into operations that its backends do not have.

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
    """Returns a local form as a region of its own, which leaves no partial sums."""

    def run(*blocks: Any) -> list[Any]:
        made = form.run(*blocks)
        return [
            apply_in_bytes(lambda x, la=la: lax.psum(x, la.partial), x) if la.partial else x
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
    return _Emitter(traced, program.mesh, shared).run(body, inputs)


@dataclass(frozen=True, eq=False)
class _Emitter:
    """Executes instructions of a program inside `shard_map`; `shares_functions` is `shared` of `emit`."""

    traced: Traced
    mesh: LogicalMesh
    shares_functions: bool

    def run(
        self, body: Body, inputs: Sequence[Any], outer: Mapping[int, Any] = MappingProxyType({}), *,
        is_function: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Executes a body that may read registers of `outer`; with `is_function` it is one of the functions shared."""
        registers = {**outer, **dict(zip(body.inputs, inputs, strict=True))}
        if self.shares_functions and not is_function:
            self._call(body, registers)
        else:
            self._execute(body, registers)
        return _read_all(body.outputs, registers)

    def _call(self, body: Body, registers: dict[int, Any]) -> None:
        """Executes the instructions of a body, equal runs as calls of one function."""
        functions: dict[Any, Callable[..., list[Any]]] = {}
        wanted = list(dict.fromkeys(o for o in body.outputs if not isinstance(o, Lit)))
        for run in runs_of(body.instructions, wanted, self.traced):
            call = functions.get(run.key)
            if call is None:
                call = functools.partial(self.run, run.body, is_function=True)
                if run.key is not None:
                    call = functions[run.key] = jax.jit(call)
            registers.update(zip(run.outputs, call([registers[r] for r in run.body.inputs]), strict=True))

    def _execute(self, body: Body, registers: dict[int, Any]) -> None:
        """Executes the instructions of a body one by one."""
        tied = _tied(body, self.traced)
        for item in body.instructions:
            match item:
                case Compute():
                    if item.op.name in primitives.EXTREMA:
                        for register in tied.intersection(item.reads):
                            registers[register] = _jax.materialise(registers[register])
                    results = item.form.run(*_read_all(item.operands, registers))
                case Reshard():
                    user = item.used_by
                    with contextlib.nullcontext() if user is None else _jax.equation_scope(user.source):
                        block = registers[item.source]
                        if item.is_late:
                            block = lax.optimization_barrier(block)
                        shape = self.traced.graph.values[item.value].shape
                        for step in item.steps:
                            block = change_layout(block, step, shape, self.mesh)
                    results = [block]
                case Loop():
                    with _jax.equation_scope(item.op.source):
                        results = self._loop(item, registers)
                case GlobalOp():
                    raise AssertionError("an operation that must be outside is inside a region")
            registers.update(zip(item.results, results, strict=True))

    def _loop(self, item: Loop, registers: Mapping[int, Any]) -> list[Any]:
        """Emits a scan, while or cond over local bodies."""

        def function(body: Body) -> Callable[[Sequence[Any]], list[Any]]:
            return lambda inputs: _strong(self.run(body, inputs, registers))

        operands = _strong(_read_all(item.operands, registers))
        return evaluation.control_flow(item.op, operands, [function(body) for body in item.bodies])


def _read_all(operands: Sequence[Operand], registers: Mapping[int, Any]) -> list[Any]:
    """Returns the arrays of some operands."""
    return [o.value if isinstance(o, Lit) else registers[o] for o in operands]


def _strong(blocks: Sequence[Any]) -> list[Any]:
    """Drops weak types: carries and branch results must agree in them, and primitives do not look at them."""
    return [_jax.drop_weak_type(block) for block in blocks]


def _tied(body: Body, traced: Traced) -> frozenset[int]:
    """Returns the registers of reductions' operands of which the compiler must make one copy only (see `ties`)."""
    computed = [item for item in body.instructions if isinstance(item, Compute)]
    chosen = [item for item in computed if item.op.name in primitives.EXTREMA]
    if not chosen:
        return frozenset()
    # A register of an outer body stays as it is.
    own = set(body.inputs).union(*(item.results for item in body.instructions))
    equal = {a for item in computed if item.op.name == "eq" for a in item.op.operands}
    kept = own.intersection(o for o in body.outputs if not isinstance(o, Lit))
    return frozenset(
        register for item in chosen for value, register in zip(item.op.operands, item.operands, strict=True)
        if isinstance(value, int) and isinstance(register, int) and register in own
        and (value in equal or register in kept)
        and jnp.issubdtype(traced.graph.values[value].dtype, jnp.inexact)
    )  # fmt: skip


def change_layout(block: Any, step: Step, shape: tuple[int, ...], mesh: LogicalMesh) -> Any:
    """Returns one elementary change of layout of a local block."""
    return apply_in_bytes(lambda x: _change_layout(x, step, shape, mesh), block)


def _change_layout(block: Any, step: Step, shape: tuple[int, ...], mesh: LogicalMesh) -> Any:
    match step.kind:
        case "slice":
            sizes = list(block.shape)
            sizes[step.dim] = shape[step.dim] // mesh.product(step.target.dims[step.dim])
            starts: list[Any] = [np.int32(0)] * len(sizes)
            starts[step.dim] = lax.mul(block_number(step.axes), np.int32(sizes[step.dim]))
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
            before = step.source.dims[step.dim]
            same = [(block, block) for block in range(mesh.product(before))]
            return permute_blocks(block, before, same, mesh, step.axes)
