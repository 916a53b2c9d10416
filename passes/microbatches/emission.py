"""Writes the graph of a step whose gradient part is a loop over micro-batches.

    [operations on the whole batch]  one `scan` over micro-batches  [operations after it]

The body of the scan is made by demand: every operation that `Analysis` put inside of the loop is emitted there in
program order, and what it reads is fetched in the state that its decision asks for. A value from outside becomes a
constant of the scan, or, cut, one of its scanned inputs; where a value that is the same for all micro-batches is wanted
cut and something computes it (positions, masks, random bits), its local form makes the block instead.

Operations before and after the scan keep their value numbers. The scan's results are

    partial   a carry that starts at zero and is added to; sums of 16-bit floats are carried in float32, since with
              b micro-batches a 16-bit running sum loses up to b/2 units in the last place
    local     the same with each summand divided by the number of micro-batches: a mean
    inner     a carry that is overwritten: all are equal
    sliced    stacked, and joined along their dim after the scan
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import primitives

from alpa_lite import _jax
from alpa_lite.graph import Atom, Block, Graph, Lit, Op, Value
from alpa_lite.passes.ir import pruning
from alpa_lite.passes.local.types import rebinding
from alpa_lite.passes.microbatches.analysis import Analysis
from alpa_lite.passes.microbatches.states import (
    AFTER,
    AXIS,
    INNER,
    LOCAL,
    PARTIAL,
    WHOLE,
    Decision,
    State,
    is_zero,
    shifted,
    sliced,
    spec_of,
    state_of,
)
from alpa_lite.passes.tracing import conversion


def emit(analysis: Analysis) -> tuple[Graph, int]:
    """The rewritten graph, and the index of its scan over micro-batches in the top block.

    Raises:
      ValueError: if nothing that is live depends on the batch.
    """
    builder = _Builder(analysis)
    outside = _Outside(builder)
    loop = _Loop(outside)
    for op in analysis.graph.block.ops:
        loop.emit(op)
    after = outside.after(loop)
    scan, post = loop.finish()
    block = analysis.graph.block
    outputs = tuple(loop.exported(a) for a in block.outputs)
    ops = (*outside.before(), *outside.prepared, scan, *post, *after(loop))
    inputs = (*block.inputs, *builder.constant_numbers)
    constants = (*analysis.graph.constants, *builder.constants)
    graph = Graph(tuple(builder.values), Block(inputs, ops, outputs), constants)
    keep = len(block.inputs) - len(analysis.graph.constants)
    graph = pruning.prune(graph, keep_inputs=keep)
    found = [op.index for op in graph.block.ops if op.source is scan.source]
    if not found:
        raise ValueError("nothing that the step returns depends on its batch")
    return graph, found[0]


class _Builder:
    """The values of the new graph, and operations made by tracing small functions."""

    def __init__(self, analysis: Analysis):
        self.analysis = analysis
        self.parts = analysis.parts
        self.values: list[Value] = list(analysis.graph.values)
        self.constants: list[Any] = []
        self.constant_numbers: list[int] = []
        self.traces: dict[Hashable, Graph] = {}

    def new(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def shaped(self, like: int, shape: tuple[int, ...]) -> int:
        """A new value like `like`, of another shape."""
        old = self.values[like]
        if old.shape == shape:
            return self.new(old)
        weak = bool(getattr(old.aval, "weak_type", False))
        return self.new(Value(shape, old.dtype, ShapedArray(shape, old.dtype, weak_type=weak)))

    def local(self, value: int, state: State) -> int:
        """A new value for the part of `value` that one micro-batch has."""
        shape = list(self.values[value].shape)
        if state.kind == "sliced":
            shape[state.dim] //= self.parts
        return self.shaped(value, tuple(shape))

    def copied(
        self,
        op: Op,
        operands: Sequence[Atom],
        results: Sequence[int],
        params: Mapping[str, Any] | None = None,
        values: Sequence[Value] | None = None,
    ) -> Op:
        """The op on other values; its bodies get numbers of their own. `values` are those of the op's own graph."""
        known = self.analysis.graph.values if values is None else values
        bodies = tuple(self._copied_block(body, known) for body in op.bodies)
        used = op.params if params is None else params
        return Op(
            -1, op.primitive, used, tuple(operands), tuple(results), bodies, op.source, None, op.ctx, op.has_effects
        )

    def _copied_block(self, block: Block, values: Sequence[Value]) -> Block:
        env: dict[int, int] = {}

        def define(value: int) -> int:
            env[value] = self.new(values[value])
            return env[value]

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Lit) else env[atom]

        inputs = tuple(define(v) for v in block.inputs)
        ops = []
        for op in block.ops:
            operands = [read(a) for a in op.operands]
            ops.append(self.copied(op, operands, [define(v) for v in op.results], values=values))
        return Block(inputs, tuple(ops), tuple(read(a) for a in block.outputs))

    def traced(
        self,
        run: Callable[..., Sequence[Any]],
        operands: Sequence[Atom],
        ops: list[Op],
        constant: Callable[[int], Atom],
        counter: Callable[[], Atom] | None = None,
        kind: Hashable = None,
    ) -> list[Atom]:
        """Appends the operations that `run` does on arrays like `operands`, and returns its results.

        `constant` fetches one of the graph's constants, `counter` the number of the micro-batch. Runs of one `kind` do
        the same on operands of the same types, and are traced once; None is like nothing.
        """
        places = [i for i, a in enumerate(operands) if not isinstance(a, Lit)]
        fixed = [a.value if isinstance(a, Lit) else None for a in operands]

        def call(*arrays: Any) -> Sequence[Any]:
            given = list(fixed)
            for place, array in zip(places, arrays, strict=True):
                given[place] = array
            return run(*given)

        atoms = [a for a in operands if not isinstance(a, Lit)]
        specs = [spec_of(self.values[a]) for a in atoms]
        key = (
            None
            if kind is None or len(places) < len(operands)
            else (kind, *((s.shape, s.dtype, s.weak_type) for s in specs))
        )
        graph = self.traces.get(key)
        if graph is None:
            graph = conversion.graph_of(jax.make_jaxpr(call, axis_env=[(AXIS, self.parts)])(*specs))
            if key is not None:
                self.traces[key] = graph
        env: dict[int, Atom] = dict(zip(graph.block.inputs, atoms, strict=False))
        for value, array in zip(graph.block.inputs[len(atoms) :], graph.constants, strict=True):
            number = self.new(graph.values[value])
            self.constants.append(array)
            self.constant_numbers.append(number)
            env[value] = constant(number)
        for op in graph.block.ops:
            if op.name == "axis_index":
                assert counter is not None
                env[op.results[0]] = counter()
                continue
            results = [self.new(graph.values[v]) for v in op.results]
            read = [a if isinstance(a, Lit) else env[a] for a in op.operands]
            ops.append(self.copied(op, read, results, values=graph.values))
            env.update(zip(op.results, results, strict=True))
        return [a if isinstance(a, Lit) else env[a] for a in graph.block.outputs]


class _Outside:
    """What is before and after the loop: operations of the top block, under their own value numbers."""

    def __init__(self, builder: _Builder):
        self.builder, self.analysis = builder, builder.analysis
        self.prepared: list[Op] = []
        self._early: set[int] = set()
        self._blocks: dict[tuple[int, int], int] = {}
        self._counter: int | None = None
        self.block = self.analysis.graph.block

    def need(self, value: int) -> int:
        """Makes sure that a value is computed, for the whole batch, before the loop."""
        self._mark(value, self._early)
        return value

    def _mark(self, value: int, marked: set[int]) -> None:
        stack = [value]
        while stack:
            top = stack.pop()
            if top in marked or top in self._early or top not in self.analysis.producers:
                continue
            marked.add(top)
            op, result = self.analysis.producers[top]
            reads = [op.operands[result]] if op.name == "optimization_barrier" else op.operands
            stack.extend(a for a in reads if not isinstance(a, Lit))

    def blocks(self, value: int, dim: int) -> int:
        """The value with its micro-batches stacked along a new leading dim."""
        key = (value, dim)
        if key not in self._blocks:
            parts = self.builder.parts

            def cut(x: jax.Array) -> list[jax.Array]:
                shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
                x = lax.reshape(x, shape)
                return [lax.transpose(x, (dim, *(d for d in range(len(shape)) if d != dim)))] if dim else [x]

            found = self.trace(cut, [self.need(value)], self.prepared)
            assert isinstance(found, int)
            self._blocks[key] = found
        return self._blocks[key]

    def counter(self) -> int:
        """The numbers of the micro-batches: int32, one each."""
        if self._counter is None:
            found = self.trace(lambda: [lax.iota(np.int32, self.builder.parts)], [], self.prepared)
            assert isinstance(found, int)
            self._counter = found
        return self._counter

    def trace(
        self, run: Callable[..., Sequence[Any]], operands: Sequence[Atom], ops: list[Op], kind: Hashable = None
    ) -> Atom:
        """The one result of some operations outside of the loop; `kind` as for `_Builder.traced`."""
        (found,) = self.builder.traced(run, operands, ops, lambda constant: constant, kind=kind)
        return found

    def before(self) -> tuple[Op, ...]:
        """The operations before the loop."""
        return tuple(part for op in self.block.ops if (part := self._part(op, self._early)) is not None)

    def _part(self, op: Op, wanted: set[int]) -> Op | None:
        """An operation that makes wanted values; of a barrier only the part that makes them."""
        kept = [i for i, value in enumerate(op.results) if value in wanted]
        if not kept:
            return None
        if op.name != "optimization_barrier" or len(kept) == len(op.results):
            return op
        return replace(
            op, operands=tuple(op.operands[i] for i in kept), results=tuple(op.results[i] for i in kept), key=None
        )

    def after(self, loop: _Loop) -> Callable[[_Loop], tuple[Op, ...]]:
        """Tells the loop what it must return, and gives the function that lists the operations after it."""
        analysis, late = self.analysis, set[int]()
        effects = set[int]()

        def read(atom: Atom) -> None:
            if isinstance(atom, Lit):
                return
            if analysis.state[atom] == WHOLE or analysis.outside(atom):
                self._mark(atom, late)
            elif analysis.state[atom] != AFTER:
                loop.export(atom)

        for op in self.block.ops:
            outside = op.index not in analysis.decisions
            alone = op.has_effects and not outside and analysis.decisions[op.index].kind == "whole"
            if outside or alone:
                effects.add(op.index)
                late.update(op.results)
            for atom, value in zip(op.operands, op.results, strict=False):
                if op.name == "optimization_barrier" and analysis.state[value] == AFTER:
                    late.add(value)
                    read(atom)
            if outside or alone:
                for atom in op.operands:
                    read(atom)
        for atom in self.block.outputs:
            read(atom)

        def listed(loop: _Loop) -> tuple[Op, ...]:
            out = []
            wanted = late - self._early  # what is early is known when the loop is built
            for op in self.block.ops:
                part = self._part(op, wanted)
                if part is None and op.index in effects and not op.results:
                    part = op
                if part is not None:
                    operands = tuple(loop.exported(a) for a in part.operands)
                    out.append(replace(part, operands=operands, key=None if "#" in str(part.key) else part.key))
            return tuple(out)

        return listed


class _Scope:
    """A block that is being built inside of the loop."""

    def __init__(self, builder: _Builder):
        self.builder, self.analysis = builder, builder.analysis
        self.ops: list[Op] = []
        self.env: dict[tuple[int, State], Atom] = {}
        self.consts: list[tuple[Atom, int]] = []  # (value of the enclosing block, input of this one)
        self.xs: list[tuple[Atom, int]] = []
        self._constants: dict[int, int] = {}
        self._count: Atom | None = None

    # What subclasses say of their inputs.

    def port(self, value: int, want: State) -> Atom | None:
        """An input of the block in a wanted state; None if `value` is none, or one that a loop carries."""
        raise NotImplementedError

    def make_counter(self) -> Atom:
        raise NotImplementedError

    def outer_constant(self, value: int) -> Atom:
        raise NotImplementedError

    # -- fetching -------------------------------------------------------------------------------------------------

    def fetch(self, atom: Atom, want: State) -> Atom:
        """A value in a wanted state."""
        if isinstance(atom, Lit):
            return self._on_first(atom) if want == PARTIAL and not is_zero(atom, {}) else atom
        key = (atom, want)
        if key not in self.env:
            self.env[key] = self._make(atom, want)
        return self.env[key]

    def _make(self, value: int, want: State) -> Atom:
        base = self.analysis.state[value]
        if want == PARTIAL and base != PARTIAL:
            return self._as_partial(value, base)
        if self.builder.parts == 1 and {base.kind, want.kind} == {"sliced", "local"}:
            return self.fetch(value, base)
        found = self.port(value, want)
        if found is not None:
            return found
        if want.kind in ("whole", "inner"):
            return self._whole(value, want)
        assert want.kind == "sliced" and base.kind in ("whole", "inner", "local"), (base, want)
        return self._block(value, want.dim, base)

    def _as_partial(self, value: int, base: State) -> Atom:
        if base == LOCAL:
            parts = self.builder.parts
            found = self.fetch(value, LOCAL)
            if parts == 1:
                return found
            return self.trace(lambda x: [lax.div(x, jnp.asarray(parts, x.dtype))], [found], self._source(value))
        found = self.fetch(value, base)
        return found if is_zero(value, self.analysis.producers) else self._on_first(found, self._source(value))

    def _on_first(self, atom: Atom, source: Any = None) -> Atom:
        """The value in the first micro-batch, zeros in the others: a value as a sum of summands."""

        def run(count: jax.Array, x: jax.Array) -> list[jax.Array]:
            x = jnp.asarray(x)
            return [lax.select(lax.broadcast(lax.eq(count, np.int32(0)), x.shape), x, lax.full_like(x, 0))]

        return self.trace(run, [self.counter(), atom], source)

    def _whole(self, value: int, want: State) -> Atom:
        """A value that this block computes from what is the same in all micro-batches."""
        op, result = self.analysis.producers[value]
        if op.name == "optimization_barrier":
            return self.fetch(op.operands[result], want)
        self._emit_whole(op)
        return self.env[value, WHOLE]

    def _emit_whole(self, op: Op) -> None:
        operands = [self.fetch(a, WHOLE) for a in op.operands]
        results = [self.builder.new(self.builder.values[v]) for v in op.results]
        self.ops.append(self.builder.copied(op, operands, results))
        self.env.update({(v, WHOLE): r for v, r in zip(op.results, results, strict=True)})

    def _block(self, value: int, dim: int, base: State) -> Atom:
        """This micro-batch's block of a value that is the same in all of them."""
        found = self._local_block(value, dim)
        if found is not None:
            return found
        assert base != LOCAL
        size = self.builder.values[value].shape[dim] // self.builder.parts

        def cut(count: jax.Array, x: jax.Array) -> list[jax.Array]:
            return [lax.dynamic_slice_in_dim(x, lax.mul(count, np.int32(size)), size, dim)]

        return self.trace(cut, [self.counter(), self.fetch(value, base)], self._source(value))

    def _local_block(self, value: int, dim: int) -> Atom | None:
        """The same by the local form of what makes the value; None if it has none."""
        if value not in self.analysis.producers:
            return None
        op, result = self.analysis.producers[value]
        if op.name == "optimization_barrier":
            return self.fetch(op.operands[result], sliced(dim))
        made = self.analysis.block_form(value, dim)
        if made is None:
            return None
        op, form = made
        results = tuple(state_of(layout) for layout in form.results)
        wanted = []
        for atom, layout in zip(op.operands, form.operands, strict=True):
            state, given = state_of(layout), self.analysis.of(atom)
            if state == WHOLE and given in (INNER, LOCAL):
                state = given
            if state.kind == "sliced" and given != state and not self.analysis.can_block(atom, state.dim):
                return None
            wanted.append(state)
        self._emit_form(op, Decision("form", tuple(wanted), results, form))
        return self.env[value, sliced(dim)]

    def counter(self) -> Atom:
        """The number of the micro-batch, an int32 scalar."""
        if self._count is None:
            self._count = self.make_counter()
        return self._count

    def constant(self, value: int) -> Atom:
        """One of the new graph's constants."""
        if value not in self._constants:
            inner = self.builder.new(self.builder.values[value])
            self._constants[value] = inner
            self.consts.append((self.outer_constant(value), inner))
        return self._constants[value]

    def trace(
        self, run: Callable[..., Sequence[Any]], operands: Sequence[Atom], source: Any, kind: Hashable = None
    ) -> Atom:
        """The one result of some operations, under a source line; `kind` as for `_Builder.traced`."""

        def under(*arrays: Any) -> Sequence[Any]:
            with _jax.under(source):
                return run(*arrays)

        call = run if source is None else under
        before = len(self.ops)
        (found,) = self.builder.traced(call, operands, self.ops, self.constant, self.counter, kind)
        if kind is not None and source is not None:  # the operations may have been traced under another source
            self.ops[before:] = [replace(op, source=source) for op in self.ops[before:]]
        return found

    def _source(self, value: int) -> Any:
        return self.analysis.producers[value][0].source if value in self.analysis.producers else None

    # -- operations -----------------------------------------------------------------------------------------------

    def emit(self, op: Op) -> None:
        """Emits one operation as it was decided."""
        decision = self.analysis.decisions.get(op.index)
        if decision is None:
            return
        match decision.kind:
            case "whole":
                self.emit_whole_effects(op)
            case "form":
                self._emit_form(op, decision)
            case "copy":
                operands = [self.fetch(a, s) for a, s in zip(op.operands, decision.operands, strict=True)]
                self.ops.append(self.builder.copied(op, operands, self._define(op, decision)))
            case "map":
                operands = [self.fetch(a, s) for a, s in zip(op.operands, decision.operands, strict=True)]
                params = {k: v for k, v in op.params.items() if k != "jaxpr"} | {"length": decision.length}
                self.ops.append(self.builder.copied(op, operands, self._define(op, decision), params))
            case "barrier":
                self.emit_barrier(op, decision)
            case _:
                self._emit_control(op, decision)

    def emit_whole_effects(self, op: Op) -> None:
        """Emits an operation on whole values at once if it must run even if nobody reads it."""
        if op.has_effects:
            self._emit_whole(op)

    def emit_barrier(self, op: Op, decision: Decision) -> None:
        """Emits the part of a barrier whose values are in the loop."""
        kept = [i for i, s in enumerate(decision.results) if self.holds(s)]
        kept = [i for i in kept if not isinstance(op.operands[i], Lit)]
        if not kept:
            return
        operands = [self.fetch(op.operands[i], decision.operands[i]) for i in kept]
        results = [self.builder.local(op.results[i], decision.results[i]) for i in kept]
        self.ops.append(self.builder.copied(op, operands, results))
        self.env.update({(op.results[i], decision.results[i]): r for i, r in zip(kept, results, strict=True)})

    def holds(self, state: State) -> bool:
        """Whether a value in this state is in the loop."""
        return state != AFTER

    def _define(self, op: Op, decision: Decision) -> list[int]:
        results = [self.builder.local(v, s) for v, s in zip(op.results, decision.results, strict=True)]
        self.env.update({(v, s): r for v, s, r in zip(op.results, decision.results, results, strict=True)})
        return results

    def _emit_form(self, op: Op, decision: Decision) -> None:
        form = decision.form
        assert form is not None
        operands = [self.fetch(a, s) for a, s in zip(op.operands, decision.operands, strict=True)]
        params = rebinding(form)
        if params is not None and not decision.scale:
            self.ops.append(self.builder.copied(op, operands, self._define(op, decision), params))
            return
        found = self.builder.traced(form.run, operands, self.ops, self.constant, self.counter)
        for value, state, atom in zip(op.results, decision.results, found, strict=True):
            if decision.scale and state == LOCAL and self.builder.parts > 1:
                atom = self.trace(self._scaled, [atom], op.source)
            self.env[value, state] = atom

    def _scaled(self, x: jax.Array) -> list[jax.Array]:
        return [lax.mul(x, jnp.asarray(self.builder.parts, x.dtype))]

    def _emit_control(self, op: Op, decision: Decision) -> None:
        results = self._define(op, decision)
        match op.name:
            case "scan":
                params, operands, bodies = self._scan(op, decision)
            case "while":
                params, operands, bodies = self._while(op, decision)
            case _:
                params, operands, bodies = self._cond(op, decision)
        params = {k: v for k, v in params.items() if k not in ("jaxpr", "cond_jaxpr", "body_jaxpr", "branches")}
        self.ops.append(
            Op(
                -1, op.primitive, params, tuple(operands), tuple(results), bodies, op.source, None, op.ctx,
                op.has_effects,
            )
        )  # fmt: skip

    def _scan(self, op: Op, decision: Decision) -> tuple[dict[str, Any], list[Atom], tuple[Block, ...]]:
        (body,) = op.bodies
        consts, carries = op.params["num_consts"], op.params["num_carry"]
        split = consts + carries
        inits = [self.fetch(op.operands[i], decision.operands[i]) for i in range(consts, split)]
        kinds = ["const"] * consts + ["carry"] * carries + ["xs"] * (len(op.operands) - split)
        inner = _Nested(self, body, op.operands, kinds)
        carried = inner.carry(body.inputs[consts:split], decision.inner[:carries])
        outputs = inner.run(body, decision.inner)
        inputs = (*(v for _, v in inner.consts), *carried, *(v for _, v in inner.xs))
        params = dict(op.params, num_consts=len(inner.consts), num_carry=carries, length=decision.length)
        operands = [*(a for a, _ in inner.consts), *inits, *(a for a, _ in inner.xs)]
        return params, operands, (Block(inputs, tuple(inner.ops), outputs),)

    def _while(self, op: Op, decision: Decision) -> tuple[dict[str, Any], list[Atom], tuple[Block, ...]]:
        cond, body = op.bodies
        first, second = op.params["cond_nconsts"], op.params["body_nconsts"]
        split = first + second
        inits = [self.fetch(op.operands[i], decision.operands[i]) for i in range(split, len(op.operands))]
        blocks, consts = [], []
        for block, start, count in ((cond, 0, first), (body, first, second)):
            carries = len(block.inputs) - count
            atoms = [*op.operands[start : start + count], *op.operands[split:]]
            inner = _Nested(self, block, atoms, ["const"] * count + ["carry"] * carries)
            carried = inner.carry(block.inputs[count:], decision.inner)
            wanted = decision.inner if block is body else [self.analysis.of(block.outputs[0])]
            outputs = inner.run(block, wanted)
            blocks.append(Block((*(v for _, v in inner.consts), *carried), tuple(inner.ops), outputs))
            consts.append([a for a, _ in inner.consts])
        params = dict(op.params, cond_nconsts=len(consts[0]), body_nconsts=len(consts[1]))
        return params, [*consts[0], *consts[1], *inits], tuple(blocks)

    def _cond(self, op: Op, decision: Decision) -> tuple[dict[str, Any], list[Atom], tuple[Block, ...]]:
        scopes, outputs = [], []
        for branch in op.bodies:
            inner = _Nested(self, branch, op.operands[1:], ["const"] * len(branch.inputs))
            outputs.append(inner.run(branch, decision.inner))
            scopes.append(inner)
        taken = list(dict.fromkeys(a for scope in scopes for a, _ in scope.consts if isinstance(a, int)))
        blocks = []
        for scope, outs in zip(scopes, outputs, strict=True):
            own: dict[Atom, int] = {}
            names: dict[int, int] = {}
            for atom, value in scope.consts:
                names[value] = own.setdefault(atom, value)
            inputs = tuple(own[a] if a in own else self.builder.new(self.builder.values[a]) for a in taken)
            blocks.append(_renamed(Block(inputs, tuple(scope.ops), outs), names))
        predicate = self.fetch(op.operands[0], decision.operands[0])
        return dict(op.params), [predicate, *taken], tuple(blocks)


def _renamed(block: Block, names: Mapping[int, int]) -> Block:
    """The block with some of the values that it reads replaced by equal ones."""
    if all(a == b for a, b in names.items()):
        return block

    def read(atom: Atom) -> Atom:
        return names.get(atom, atom) if isinstance(atom, int) else atom

    ops = tuple(replace(op, operands=tuple(read(a) for a in op.operands)) for op in block.ops)
    return Block(block.inputs, ops, tuple(read(a) for a in block.outputs))


class _Nested(_Scope):
    """A body of control flow inside of the loop. What it reads from outside comes in as it is asked for."""

    def __init__(self, parent: _Scope, block: Block, atoms: Sequence[Atom], kinds: Sequence[str]):
        super().__init__(parent.builder)
        self.parent = parent
        self._ports = {v: (a, k) for v, a, k in zip(block.inputs, atoms, kinds, strict=True) if k != "carry"}

    def carry(self, inputs: Sequence[int], states: Sequence[State]) -> list[int]:
        """New inputs for what the loop carries."""
        out = []
        for value, state in zip(inputs, states, strict=True):
            out.append(self.builder.local(value, state))
            self.env[value, state] = out[-1]
        return out

    def run(self, block: Block, wanted: Sequence[State]) -> tuple[Atom, ...]:
        """Emits the block's operations and returns its outputs in the wanted states."""
        for op in block.ops:
            self.emit(op)
        return tuple(self.fetch(a, s) for a, s in zip(block.outputs, wanted, strict=True))

    def port(self, value: int, want: State) -> Atom | None:
        if value not in self._ports:
            return None
        atom, kind = self._ports[value]
        outer = self.parent.fetch(atom, want if kind == "const" else shifted(want, 1))
        if isinstance(outer, Lit):
            return outer
        shape = self.builder.values[outer].shape
        inner = self.builder.shaped(outer, shape if kind == "const" else shape[1:])
        (self.consts if kind == "const" else self.xs).append((outer, inner))
        return inner

    def make_counter(self) -> Atom:
        outer = self.parent.counter()
        assert isinstance(outer, int)
        inner = self.builder.new(self.builder.values[outer])
        self.consts.append((outer, inner))
        return inner

    def outer_constant(self, value: int) -> Atom:
        return self.parent.constant(value)


class _Loop(_Scope):
    """The body of the scan over micro-batches."""

    def __init__(self, outside: _Outside):
        super().__init__(outside.builder)
        self.outside = outside
        self._exports: dict[int, State] = {}
        self._renames: dict[int, int] = {}

    def port(self, value: int, want: State) -> Atom | None:
        analysis = self.analysis
        if want == WHOLE:
            if self._is_source(value):
                return None
            return self._const(self.outside.need(value))
        if want.kind == "sliced" and (analysis.outside(value) or analysis.state[value] == WHOLE):
            found = self._local_block(value, want.dim) if analysis.state[value] == WHOLE else None
            return found if found is not None else self._scanned(self.outside.blocks(value, want.dim))
        return None

    def _is_source(self, value: int) -> bool:
        """Whether a value is made from nothing, so that it need not come in from outside."""
        if value not in self.analysis.producers:
            return False
        op, _ = self.analysis.producers[value]
        return not op.bodies and not op.has_effects and all(isinstance(a, Lit) for a in op.operands)

    def _const(self, outer: int) -> int:
        inner = self.builder.new(self.builder.values[outer])
        self.consts.append((outer, inner))
        return inner

    def _scanned(self, outer: int) -> int:
        inner = self.builder.shaped(outer, self.builder.values[outer].shape[1:])
        self.xs.append((outer, inner))
        return inner

    def make_counter(self) -> Atom:
        return self._scanned(self.outside.counter())

    def outer_constant(self, value: int) -> Atom:
        return value

    def emit_whole_effects(self, op: Op) -> None:
        """Outside of the loop."""

    def holds(self, state: State) -> bool:
        return state not in (AFTER, WHOLE)

    # -- results --------------------------------------------------------------------------------------------------

    def export(self, value: int) -> None:
        """Makes the loop return a value."""
        self._exports[value] = self.analysis.state[value]

    def exported(self, atom: Atom) -> Atom:
        """What stands for a value after the loop."""
        return atom if isinstance(atom, Lit) else self._renames.get(atom, atom)

    def finish(self) -> tuple[Op, list[Op]]:
        """The scan, and the operations that make the exported values of its results."""
        post: list[Op] = []
        inits, inputs, carried, finals = [], [], [], []
        stacked, joined = [], []
        for value, state in self._exports.items():
            if state.kind == "sliced" or (state == LOCAL and self.builder.parts == 1):
                inner = self.fetch(value, state)
                stacked.append(inner)
                shape = self.builder.values[value].shape
                local = self._shape(inner)
                joined.append((value, self.builder.shaped(value, (self.builder.parts, *local)), shape, state.dim))
                continue
            init, start, end = self._accumulated(value, state)
            inits.append(init)
            inputs.append(start)
            carried.append(end)
            finals.append((value, self.builder.new(self.builder.values[start])))
        source = self._scan_source()
        consts, xs = self.consts, self.xs
        body = Block((*(v for _, v in consts), *inputs, *(v for _, v in xs)), tuple(self.ops), (*carried, *stacked))
        operands = (*(a for a, _ in consts), *inits, *(a for a, _ in xs))
        params = {
            "length": self.builder.parts, "reverse": False, "unroll": 1,
            "num_consts": len(consts), "num_carry": len(inits),
        }  # fmt: skip
        results = (*(r for _, r in finals), *(r for _, r, _, _ in joined))
        scan = Op(-1, primitives.scan_p, params, operands, results, (body,), source, None)
        for value, result in finals:
            dtype = self.builder.values[value].dtype
            if self.builder.values[result].dtype != dtype:
                result = self._outside(lambda x, t=dtype: [lax.convert_element_type(x, t)], result, post)
            self._renames[value] = result
        for value, result, shape, dim in joined:
            self._renames[value] = self._outside(_joining(shape, max(dim, 0)), result, post)
        return scan, post

    def _outside(self, run: Callable[..., Sequence[Any]], value: int, ops: list[Op]) -> int:
        found = self.outside.trace(run, [value], ops)
        assert isinstance(found, int)
        return found

    def _shape(self, atom: Atom) -> tuple[int, ...]:
        return tuple(atom.aval.shape) if isinstance(atom, Lit) else self.builder.values[atom].shape

    def _accumulated(self, value: int, state: State) -> tuple[Atom, int, Atom]:
        """A carry for an exported value: what it starts with, its input, and its output."""
        shape, dtype = self.builder.values[value].shape, self.builder.values[value].dtype
        wide = np.dtype(np.float32) if dtype in (jnp.bfloat16, np.float16) and state != INNER else dtype
        zeros = "zeros", shape, wide
        init = self.outside.trace(lambda: [lax.full(shape, 0, wide)], [], self.outside.prepared, zeros)
        start = self.builder.new(Value(shape, wide, ShapedArray(shape, wide)))
        if state == INNER:
            return init, start, self.fetch(value, INNER)
        summand = self.fetch(value, PARTIAL)
        if wide != dtype:
            widened = "to", wide
            summand = self.trace(lambda x: [lax.convert_element_type(x, wide)], [summand], self._source(value), widened)
        return init, start, self.trace(lambda a, x: [lax.add(a, x)], [start, summand], self._source(value), "add")

    def _scan_source(self) -> Any:
        """A source of its own, without a name stack: those of the operations inside are whole."""
        for op in (*self.ops, *self.outside.block.ops):
            if op.source is not None:
                return op.source.replace(name_stack=_jax.empty_stack())
        raise ValueError("nothing that the step returns depends on its batch")


def _joining(shape: tuple[int, ...], dim: int) -> Callable[..., Sequence[Any]]:
    """Joins the stacked blocks of a value along a dim."""

    def run(x: jax.Array) -> list[jax.Array]:
        order = (*range(1, dim + 1), 0, *range(dim + 1, x.ndim))
        return [lax.reshape(lax.transpose(x, order) if dim else x, shape)]

    return run
