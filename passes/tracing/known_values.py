"""Operations of another form that values known at tracing allow: loops that are counted, and rows as batch dims.

Loops: a `while` becomes a scan if scalar arithmetic on known integers decides its condition before each iteration. One
counter that is compared with a known number and stepped by another has a closed form, whichever way it counts; any
other form is run in NumPy, for at most `MAX_SIMULATED_TRIPS` iterations. Every later pass prices, divides and verifies
the scan by its length; a loop without an iteration is removed. All that stays a `while` has an unknown trip count, and
is counted once: in plans, and where lowered programs are read (`evaluation.UNKNOWN_TRIPS`).

Rows: gathers and scatters in which every example picks from its own row, `x[arange(N), i]`, and its gradient. Their
rule shards the rows of the indices or the indexed dim, since an index may point anywhere. But where the component of
the indices for a dim is the row number itself, example n reads and writes row n alone: the dim is a batch dim. `lax`
has a form for that (`operand_batching_dims`), in which nothing is indexed along the dim, so that it may be sharded or
cut into micro-batches without communication. A position is known through reshapes, normalised negative indices, the
constants of loops (the rows of a scanned layer are made before the scan), and what one scan stacks for another, such as
the backward pass of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core.primitives import broadcast_in_dim_p, concatenate_p, scan_p, slice_p

from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Op
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import Port, ScanView, ports
from alpa_lite.passes.ir.rewriting import Rewriter, rename_atom, rename_op, shape_of
from alpa_lite.passes.tracing.statics import FOLDED, Statics, fold_constant

MAX_SIMULATED_TRIPS = 1_000
_MAX_LENGTH = 2**31 - 1  # of a scan, whose own counter has 32 bits
Trips = tuple[int, dict[int, Any]] | None
"""The iterations of a loop, and the final value of each known carry by its number; None if not known."""
_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}

_GATHER = ("start_index_map", "collapsed_slice_dims", "start_indices_batching_dims")
_SCATTER = ("scatter_dims_to_operand_dims", "inserted_window_dims", "scatter_indices_batching_dims")
"""Names of the dimension numbers that gathers and scatters have in common: indexed dims, single dims, batch dims."""


def use_known_values(graph: Graph) -> Graph:
    """Returns the same program, with a scan for each `while` of known trip count, and rows as batch dims.

    It is still to be pruned.
    """
    walk = _Walk(graph)
    block = walk.block(graph.block)
    return replace(graph, values=tuple(walk.values), block=block)


class _Walk:
    """Walks a graph in program order, and learns the final counters of loops."""

    def __init__(self, graph: Graph) -> None:
        self._rewriter, self._makers = Rewriter(graph), dict[int, Op]()
        self.values = self._rewriter.values
        constants = zip(graph.block.inputs[-len(graph.constants) :], graph.constants, strict=False)
        self._statics = Statics((), self.values, dict(constants))

    def block(self, block: Block) -> Block:
        """Returns the block with its operations in other forms."""
        ops, names = list[Op](), dict[int, Atom]()
        for op in block.ops:
            op = rename_op(op, names)
            self._statics.add(op)
            if op.bodies:
                op = self._counted(replace(op, bodies=tuple(map(self.block, op.bodies))))
            if op.name == "scan" and not ScanView(op).length and not ScanView(op).ys:
                names.update((carry.end, carry.start) for carry in ScanView(op).carries)
                continue
            ops += self._with_rows(op) if op.name == "gather" or op.name in primitives.SCATTERS else [op]
            self._makers.update((value, op) for value in op.results)
        return Block(block.inputs, tuple(ops), tuple(rename_atom(a, names) for a in block.outputs))

    def _read(self, atom: Atom | None) -> Any:
        """Returns the integer or boolean that an atom holds; None if it is not known, or another value."""
        array = None if atom is None else self._statics.array_of(atom)
        return None if array is None or array.shape or array.dtype.kind not in "iub" else array[()]

    def _counted(self, op: Op) -> Op:
        """Returns a `while` of known trip count as a scan, and any other operation as it is."""
        if op.name != "while" or any(inner.has_effects for inner in op.bodies[0].ops):
            return op
        carries = [port for port in ports(op) if port.role == "carry"]
        start = enumerate(self._read(port.operand) for port in carries)
        state = {n: scalar for n, scalar in start if scalar is not None}
        found = self._linear(op, carries, state) or self._simulated(op, carries, state)
        if found is None:
            return op
        length, ends = found
        self._statics.constants.update((op.results[n], np.asarray(end)) for n, end in ends.items())
        operands = op.operands[op.params["cond_nconsts"] :]
        counts = {"num_consts": op.params["body_nconsts"], "num_carry": len(carries)}
        params = {"length": length, "reverse": False, "unroll": 1, **counts}
        return replace(op, primitive=scan_p, params=params, operands=operands, bodies=op.bodies[1:], key=None)

    def _simulated(self, op: Op, carries: Sequence[Port], state: Mapping[int, Any]) -> Trips:
        """Runs a loop for its trips; `state`: the known carries at the start."""
        tests, steps = ([inner for inner in block.ops if self._is_scalar(inner)] for block in op.bodies)
        for trips in range(MAX_SIMULATED_TRIPS + 1):
            running = self._run(tests, {carries[n].inputs[1]: scalar for n, scalar in state.items()})
            goes_on = running(op.bodies[0].outputs[0])
            if goes_on is None or not goes_on:
                return None if goes_on is None else (trips, dict(state))
            after = self._run(steps, {carries[n].inputs[0]: scalar for n, scalar in state.items()})
            ends = ((n, after(carries[n].outputs[0])) for n in state)
            state = {n: scalar for n, scalar in ends if scalar is not None}
        return None

    def _run(self, ops: Sequence[Op], scalars: dict[int, Any]) -> Callable[[Atom], Any]:
        """Returns a reader of the scalars after some operations, given those of the carries before; None if unknown."""

        def read(atom: Atom) -> Any:
            known = scalars.get(atom) if isinstance(atom, int) else None
            return self._read(atom) if known is None else known

        for op in ops:
            operands = list(map(read, op.operands))
            if all(one is not None for one in operands):
                scalars[op.results[0]] = fold_constant(op, list(map(np.asarray, operands)), self.values)
        return read

    def _is_scalar(self, op: Op) -> bool:
        """Returns whether an operation makes one integer or boolean."""
        made = self.values[op.results[0]] if op.name in FOLDED else None
        return made is not None and not made.shape and isinstance(made.dtype, np.dtype) and made.dtype.kind in "iub"

    def _linear(self, op: Op, carries: Sequence[Port], state: Mapping[int, Any]) -> Trips:
        """As `_simulated`, of one counter to which a known number is added until a comparison with another ends it."""
        cond, body = op.bodies
        asked: list[Atom] = [port.inputs[1] for port in carries]
        compare = _maker(cond, cond.outputs[0])
        if compare is None or compare.name not in _FLIPPED:
            return None
        (left, right), kind = compare.operands, compare.name
        if right in asked:
            left, right, kind = right, left, _FLIPPED[kind]
        limit, n = self._read(right), asked.index(left) if left in asked else -1
        step = _maker(body, carries[n].outputs[0]) if n in state else None
        if limit is None or step is None or step.name not in primitives.ADDITIONS:
            return None
        (first, second), (carried, _) = step.operands, carries[n].inputs
        if second == carried and step.name != "sub":
            first, second = second, first
        by = self._read(second)
        if by is None or first != carried:
            return None
        by = -int(by) if step.name == "sub" else int(by)
        start, dtype = int(state[n]), np.asarray(state[n]).dtype
        trips = _linear_trips(kind, start, by, int(limit))
        if trips is None or trips > _MAX_LENGTH or dtype.kind == "b":
            return None
        end, info = start + trips * by, np.iinfo(dtype)
        return (trips, {n: dtype.type(end)}) if info.min <= end <= info.max else None

    def _with_rows(self, op: Op) -> list[Op]:
        """Returns a gather or scatter with batch dims for rows indexed by their number, behind new index operations."""
        operand, indices = op.operands[:2]
        if isinstance(operand, Lit) or isinstance(indices, Lit):
            return [op]
        names, numbers = _GATHER if op.name == "gather" else _SCATTER, op.params["dimension_numbers"]
        indexed, single, batching = (getattr(numbers, name) for name in names)
        sizes, shape, parts = self.values[operand].shape, self.values[indices].shape, self._components(indices)
        pairs, kept = dict(zip(numbers.operand_batching_dims, batching, strict=True)), []
        for component, (dim, part) in enumerate(zip(indexed, parts, strict=False)):
            row = _position_in(self._statics.array_of(part))
            is_free = row is not None and row < len(shape) - 1 and row not in pairs.values()
            if row is not None and is_free and dim in single and shape[row] == sizes[dim]:
                pairs[dim] = row
            else:
                kept.append(component)
        if len(kept) == len(parts):
            return [op]
        ops: list[Op] = []
        rest = self._joined(op, indices, kept, parts, ops)
        new = (
            tuple(indexed[component] for component in kept),
            tuple(dim for dim in single if dim not in pairs),
            tuple(pairs[dim] for dim in sorted(pairs)),
        )
        fields = dict(zip(names, new, strict=True)) | {"operand_batching_dims": tuple(sorted(pairs))}
        params = {**op.params, "dimension_numbers": numbers._replace(**fields), "indices_are_sorted": False}
        operands = (operand, rest, *op.operands[2:])
        return [*ops, self._rewriter.op(op.primitive, params, operands, op.results, op.source, op.index, op.ctx)]

    def _components(self, indices: int) -> Sequence[Atom]:
        """The components of index vectors, each with a last dim of one; none if they are not made one by one."""
        outside, last = self._statics.resolve(indices), len(self.values[indices].shape) - 1
        op, parts = self._makers.get(outside) if isinstance(outside, int) else None, [outside]
        if op is not None and op.name == "concatenate" and op.params["dimension"] == last:
            parts = op.operands
        return parts if all(shape_of(part, self.values)[last:] == (1,) for part in parts) else []

    def _joined(self, op: Op, indices: int, kept: Sequence[int], parts: Sequence[Atom], ops: list[Op]) -> Atom:
        """Returns index vectors of some components, or of none; appends the operations that make them to `ops`."""
        (*rows, _), dtype = self.values[indices].shape, self.values[indices].dtype

        def emit(primitive: Any, size: int, operands: Sequence[Atom], **params: Any) -> Atom:
            result = self._rewriter.new_value_of_shape(indices, (*rows, size))
            ops.append(self._rewriter.op(primitive, params, operands, [result], op.source, op.index, op.ctx))
            return result

        def cut(component: int) -> Atom:
            start, limit = (*(0 for _ in rows), component), (*rows, component + 1)
            return emit(slice_p, 1, [indices], start_indices=start, limit_indices=limit, strides=None)

        if not kept:
            zero = Lit(np.zeros((), dtype), ShapedArray((), dtype))
            return emit(broadcast_in_dim_p, 0, [zero], shape=(*rows, 0), broadcast_dimensions=(), sharding=None)
        is_here = indices in self._makers  # else the components are made elsewhere
        own = [parts[component] if is_here else cut(component) for component in kept]
        return own[0] if len(own) == 1 else emit(concatenate_p, len(own), own, dimension=len(rows))


def _maker(block: Block, atom: Atom) -> Op | None:
    return next((op for op in block.ops if atom in op.results), None)


def _linear_trips(kind: str, start: int, step: int, limit: int) -> int | None:
    """Returns how often `step` is added to `start` before a comparison with `limit` is false; None if it never is."""
    if kind == "ne":
        whole, rest = divmod(limit - start, step) if step else (0, limit - start)
        return whole if not rest and whole >= 0 else None
    if kind in ("gt", "ge"):
        start, step, limit = -start, -step, -limit
    left = limit - start + (kind in ("le", "ge"))
    return 0 if left <= 0 else -(-left // step) if step > 0 else None


def _position_in(array: np.ndarray | None) -> int | None:
    """Returns the dim along which each element of an array of integers is its own position; None if there is none."""
    if array is None or array.dtype.kind not in "iu":
        return None
    for dim, size in enumerate(array.shape):
        positions = np.arange(size).reshape([size if d == dim else 1 for d in range(array.ndim)])
        if size > 1 and np.array_equal(array, np.broadcast_to(positions, array.shape)):
            return dim
    return None
