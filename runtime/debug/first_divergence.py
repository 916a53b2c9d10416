"""The first operation of a planned step that differs from the same operation on one device, on the same inputs.

The planned program runs with more results: the registers of some instructions, a chunk of `CHUNK` bytes at a time.
Then each instruction is judged by itself. An operation, applied on one device to what the planned program had in its
operands' registers, must give what is in its results' registers, on every device. A change of layout must not change
the value. A loop is judged as one operation, and if it differs, iteration by iteration by the instructions of its body.

The error of a sum is measured by the sum of the absolute values (the bound of its rounding), that of other operations
by their largest result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from alpa_lite import _jax
from alpa_lite.ir.graph import Lit, Op, Traced
from alpa_lite.ir.layout import Layout
from alpa_lite.passes.ir import evaluation, primitives
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.lowering import emission
from alpa_lite.passes.lowering.program import (
    Body,
    GlobalOp,
    Instruction,
    LocalProgram,
    Loop,
    Reshard,
    read_before,
    spec_of,
)  # fmt: skip

CHUNK = 2**30
"""Bytes of registers that are looked at in one run."""
ITERATIONS = 16
"""Iterations of a loop that are judged."""
_COARSE = 0.1
"""The error from which on a loop is called wrong of which only the first iterations were judged, and are right."""
_SUMS = primitives.LINEAR_IN_EACH | primitives.LINEAR_IN_ALL | primitives.ADDITIONS | {
    "reduce_sum", "cumsum", "reduce_window_sum", "scatter-add", "add_any", "psum",
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """An operation whose planned result is not that of the operation as written."""

    operation: str  # the primitive, or the collectives of a change of layout
    where: str  # source line and name scope
    layouts: str  # of operands and results
    error: float  # relative, of the largest result
    stage: int = -1  # of the pipeline; -1 on one mesh
    iteration: tuple[int, ...] = ()  # of the loops around it, outermost first

    def __str__(self) -> str:
        stage = f"stage {self.stage}: " if self.stage >= 0 else ""
        loops = f", iteration {'.'.join(map(str, self.iteration))}" if self.iteration else ""
        return f"{stage}{self.operation} at {self.where}{loops}: {self.layouts}, error {self.error:.2g}"


def error(planned: Any, written: Any, scale: float | None = None) -> float:
    """max |planned - written| / scale over all devices' blocks; scale is by default max |written|.

    Infinite where one of the two is not finite and the other is; 0 where both are equal, and for 0 / 0. Of integers,
    keys and booleans 0 or infinite.
    """
    if jnp.issubdtype(written.dtype, jax.dtypes.prng_key):
        planned, written = jax.random.key_data(planned), jax.random.key_data(written)
    whole = np.asarray(written)
    pairs = ((np.asarray(shard.data), whole[shard.index]) for shard in planned.addressable_shards)
    if not jnp.issubdtype(whole.dtype, jnp.inexact):
        return 0.0 if all(itertools.starmap(np.array_equal, pairs)) else np.inf
    wide = np.complex128 if np.issubdtype(whole.dtype, np.complexfloating) else np.float64
    worst = 0.0
    for mine, other in pairs:
        mine, other = mine.astype(wide), other.astype(wide)
        finite = np.isfinite(mine) & np.isfinite(other)
        if not np.array_equal(mine[~finite], other[~finite], equal_nan=True):
            return np.inf
        worst = max(worst, float(np.max(np.abs(mine - other), where=finite, initial=0.0)))
    if not worst:
        return 0.0
    if scale is None:
        values = np.abs(whole.astype(wide))
        scale = float(np.max(values, where=np.isfinite(values), initial=0.0))
    return worst / scale if scale else np.inf


@dataclass(frozen=True, eq=False)
class _Search:
    """One stage under examination."""

    program: LocalProgram
    traced: Traced
    mesh: Mesh
    limit: float
    functions: dict[Any, Callable[..., Any]]

    def body(self, body: Body, raw: dict[int, Any]) -> Difference | None:
        """Returns the first instruction of a body that differs.

        Args:
          raw: the arrays of its inputs, and of other registers that it reads; a partial sum has a dim of its summands.
        """
        done = 0
        while done < len(body.instructions):
            stop, wanted = self._chunk(body, done, raw)
            found = raw | dict(zip(wanted, self.run(body, stop, wanted, raw), strict=True))
            differences = (self.judge(item, found) for item in body.instructions[done:stop])
            difference = next((one for one in differences if one is not None), None)
            if difference is not None:
                return difference
            done = stop
        return None

    def _chunk(self, body: Body, first: int, known: dict[int, Any]) -> tuple[int, list[int]]:
        """Returns the end of the next chunk, and the registers that judging it takes."""
        wanted: dict[int, None] = {}
        size, stop = 0, first
        while stop < len(body.instructions) and (size < CHUNK or stop == first):
            item = body.instructions[stop]
            new = {*item.reads, *item.results} - known.keys() - wanted.keys()
            wanted |= dict.fromkeys(sorted(new))
            made = (item.value,) if isinstance(item, Reshard) else item.op.results
            size += sum(self.traced.graph.values[value].nbytes for value in made)
            stop += 1
        return stop, list(wanted)

    def run(self, body: Body, stop: int, wanted: Sequence[int], raw: dict[int, Any]) -> list[Any]:
        """Returns some registers after the first `stop` instructions of a body."""
        names = tuple(raw)
        key = id(body), stop, tuple(wanted), names
        if key not in self.functions:
            part = Body(names, body.instructions[:stop], tuple(wanted))
            self.functions[key] = jax.jit(emission.emit(replace(self.program, body=part), self.traced, self.mesh))
        return self.functions[key](*raw.values())

    def judge(self, item: Instruction, found: dict[int, Any]) -> Difference | None:
        """Returns the difference of an instruction from the same on one device, or None."""
        if isinstance(item, Reshard):
            source, result = item.source, item.result
            wrong = error(self.unshard(result, found[result]), self.fetch(source, found[source]))
            if wrong <= self.limit:
                return None
            kinds = ", ".join(f"{step.kind} over {'+'.join(step.axes)}" for step in item.steps)
            where = _jax.describe_location(item.used_by.source) if item.used_by is not None else "a result of the step"
            return Difference(kinds, where, self.layouts((source,), (result,)), wrong)
        if isinstance(item, GlobalOp) or item.op.has_effects:
            return None
        op = item.op
        operands = [o.value if isinstance(o, Lit) else self.fetch(o, found[o]) for o in item.operands]
        results = self.apply(op, operands)
        wrong = 0.0
        for number, (register, written) in enumerate(zip(item.results, results, strict=True)):
            planned = self.unshard(register, found[register])
            one = error(planned, written)
            if self.limit < one < np.inf and op.name in _SUMS:
                one = error(planned, written, self.bound(op, operands, number))
            wrong = max(wrong, one)
        if wrong <= self.limit:
            return None
        difference = Difference(
            op.name, _jax.describe_location(op.source), self.layouts(item.operands, item.results), wrong
        )
        return self.loop(item, found, difference) if isinstance(item, Loop) else difference

    def layouts(self, operands: Sequence[int | Lit], results: Sequence[int]) -> str:
        """Returns the layouts of operands and results, as text."""
        given, made = (
            [str(self.program.registers[o]) for o in some if isinstance(o, int)] for some in (operands, results)
        )
        return f"{' x '.join(given)} -> {', '.join(made)}"

    def apply(self, op: Op, operands: Sequence[Any]) -> list[Any]:
        """Returns the operation as written, on one device."""
        key = op.key, tuple(i for i, a in enumerate(op.operands) if isinstance(a, Lit))
        if key not in self.functions:
            self.functions[key] = jax.jit(lambda *operands: evaluation.bind(op, list(operands)))
        return self.functions[key](*operands)

    def bound(self, op: Op, operands: Sequence[Any], number: int) -> float | None:
        """Returns the largest sum of absolute values of a sum."""
        if op.name in ("sub", "add", "add_any"):
            return sum(float(np.max(np.abs(np.asarray(x, np.float64)), initial=0.0)) for x in operands)
        sizes = [abs(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x for x in operands]
        return float(np.max(np.asarray(self.apply(op, sizes)[number], np.float64), initial=0.0))

    def loop(self, item: Loop, found: dict[int, Any], whole: Difference) -> Difference | None:
        """Returns the first instruction of a scan's body that differs, in the first iteration in which any does.

        A loop of which no instruction differs is right: what its sums are off by is the rounding of their terms.
        `whole` is the difference of the loop as one operation.
        """
        if item.op.name != "scan":
            return whole
        view, body = ScanView(item.op), item.bodies[0]
        registers = view.split_operands(item.operands)
        inputs = view.split_operands(body.inputs)

        def array(operand: int | Lit, register: int) -> Any:
            if not isinstance(operand, Lit):
                return found[operand]
            layout, value = self.program.registers[register], jnp.asarray(operand.value, operand.aval.dtype)
            parts = self.program.mesh.product(layout.partial)  # every device holds the literal as its summand
            return jnp.broadcast_to(value, (parts, *value.shape)) if layout.partial else value

        outer = {r: found[r] for r in sorted(read_before(body.instructions) - set(body.inputs)) if r in found}
        carry = list(map(array, registers.carry, inputs.carry))
        order = range(view.length)[::-1] if item.op.params["reverse"] else range(view.length)
        for iteration in order[:ITERATIONS]:
            raw = outer | dict(zip(inputs.consts, map(array, registers.consts, inputs.consts), strict=True))
            raw.update(zip(inputs.carry, carry, strict=True))
            for operand, register in zip(registers.xs, inputs.xs, strict=True):
                partial = isinstance(operand, int) and bool(self.program.registers[operand].partial)
                stacked = array(operand, register)
                raw[register] = self.place(register, stacked[:, iteration] if partial else stacked[iteration])
            difference = self.body(body, raw)
            if difference is not None:
                return replace(difference, iteration=(iteration, *difference.iteration))
            outputs = view.split_results(body.outputs).carry
            wanted = [o for o in outputs if isinstance(o, int)]
            made = dict(zip(wanted, self.run(body, len(body.instructions), wanted, raw), strict=True))
            carry = [array(o, r) if isinstance(o, Lit) else made[o] for o, r in zip(outputs, inputs.carry, strict=True)]
        return whole if view.length > ITERATIONS and whole.error > _COARSE else None

    def place(self, register: int, array: Any) -> Any:
        """Returns an array as the register has it; of a partial sum, with a leading dim for its summands."""
        layout = self.program.registers[register]
        dims = (layout.partial, *layout.dims) if layout.partial else layout.dims
        return jax.device_put(array, NamedSharding(self.mesh, spec_of(Layout(dims))))

    def unshard(self, register: int, raw: Any) -> Any:
        """Returns the value of a register on its devices; of a partial sum, the sum."""
        return raw.sum(0) if self.program.registers[register].partial else raw

    def fetch(self, register: int, raw: Any) -> Any:
        """Returns the value of a register on one device."""
        return jax.device_put(self.unshard(register, raw), self.mesh.devices.flat[0])


def first_difference(
    program: LocalProgram, traced: Traced, mesh: Mesh, leaves: Sequence[Any], limit: float
) -> Difference | None:
    """The first instruction of a local program that differs from its stage as traced by more than a relative error.

    Args:
      leaves: its flat arguments and constants, whole.
    """
    search = _Search(program, traced, mesh, limit, {})
    raw = {r: search.place(r, leaf) for r, leaf in zip(program.body.inputs, leaves, strict=True)}
    return search.body(program.body, raw)
