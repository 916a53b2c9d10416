"""Independent micro-batches: the inexact form of steps that look across the batch.

Problem. A contrastive loss compares every example with every other, and the capacity of an expert is a share of the
batch. Such operations have no local form, and no sum over micro-batches gives what they give on the whole batch. What
is meant by micro-batches there is the step on a batch of b examples, M times, and the mean of its gradients.

Answer. The step is traced once more on b examples. As a loop of length one (`accumulation`), which is exact, that trace
says what comes before, in and after the loop; here its body runs M times, on each micro-batch in turn. Both traces are
the same operations in the same order; where their shapes differ, a dim is derived from the batch.

    what depends on the batch alone     in the loop: the number of tokens that count is that of the micro-batch
    random draws                        those of the whole batch, a block for each micro-batch
    sums over examples (`aggregates`)   averaged, if the step divides by a number of examples on the way: by a literal
                                        that differs between the traces, or by a value of the batch alone; else added
    other floating-point results        averaged: a maximum, the solution of a system, new weights keep their scale
    other integers, random keys         those of the last micro-batch
    what is divided after the loop by   computed by each micro-batch for itself, and averaged
    a count of this micro-batch
    results with one value an example   put together again

The notes name each leaf of the result under one of these.

(GPipe, Huang et al. 2019, section 2.2, takes the statistics of batch norm so, within micro-batches.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite import _jax
from alpa_lite.graph import Atom, Graph, Lit, Op, Traced, walk
from alpa_lite.passes.ir import evaluation, primitives, pruning
from alpa_lite.passes.ir.flow import made_of, made_of_all, producers
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.microbatches.aggregates import Aggregates, Tag, tag_inputs
from alpa_lite.passes.microbatches.results import AVERAGED, COMBINED, JOINED, LAST, SUMMED, notes_on
from alpa_lite.passes.microbatches.states import spec_of
from alpa_lite.passes.tracing import conversion

SCOPE = "micro_batches"
"""The named scope of the loop."""


class Unlike(Exception):
    """The step on one micro-batch is not the same operations as the step on the batch; says what differs."""


def loop(
    whole: Traced, whole_scan: int, one: Traced, one_scan: int, dims: Mapping[int, int], parts: int
) -> tuple[Graph, int, tuple[str, ...]]:
    """The step in `parts` micro-batches that do not know of each other.

    Args:
      whole, whole_scan: the step on the batch as a loop of length one, and the index of its scan.
      one, one_scan: the same for the step on one micro-batch.
      dims: argument number -> the dim that is cut.
      parts: the number of micro-batches.

    Returns:
      The graph, the index of its scan, and notes on what is averaged.

    Raises:
      Unlike: the traces differ in more than shapes, or a result has no form that micro-batches can give.
    """
    return _Loop(_Pair(whole, whole_scan, one, one_scan), dims, parts).graph()


class _Pair:
    """The two traces side by side; `big` and `small` in names of what is said of both."""

    def __init__(self, whole: Traced, whole_scan: int, one: Traced, one_scan: int) -> None:
        self.whole, self.one = whole, one
        self.big, self.small = whole.graph, one.graph
        self.scans = scan_op(whole, whole_scan), scan_op(one, one_scan)
        ops = list(self.big.ops()), list(self.small.ops())
        for op in ops[0]:
            if op.has_effects:
                raise Unlike(
                    f"the effect of {op.name} at {_jax.source_line(op.source)} happens once for the whole batch"
                )
        shapes = [[(op.name, len(op.operands), len(op.results)) for op in some] for some in ops]
        if shapes[0] != shapes[1]:
            raise Unlike("on one micro-batch the step does not do the same operations as on the batch")
        if len(self.big.block.inputs) != len(self.small.block.inputs):
            raise Unlike("on one micro-batch the step does not close over the same constants as on the batch")
        self.other: dict[int, Op] = {}  # index of a small op -> the big one
        self.value: dict[int, int] = dict(zip(self.small.block.inputs, self.big.block.inputs, strict=True))
        for big, small in zip(*ops, strict=True):
            self.other[small.index] = big
            self.value.update(zip(small.results, big.results, strict=True))
            for a, b in zip(big.bodies, small.bodies, strict=True):
                self.value.update(zip(b.inputs, a.inputs, strict=True))

    def literals_differ(self, op: Op) -> bool:
        """Whether an op on small values, or one in its bodies, computes with another float literal than its twin.

        What is compared with one (a capacity) is not scaled by it.
        """
        inside = [op, *(o for body in op.bodies for o in walk(body))]
        pairs = [(o, self.other[o.index]) for o in inside if o.name not in primitives.COMPARISONS]
        return any(
            isinstance(a, Lit) and isinstance(b, Lit) and _is_float(a.aval) and not np.array_equal(a.value, b.value)
            for small, big in pairs
            for a, b in zip(small.operands, big.operands, strict=True)
        )

    def grown(self, small: Atom, big: Atom) -> list[int]:
        """The dims in which a value differs between the traces."""
        a, b = (_value(self.small, small).shape, _value(self.big, big).shape)
        if len(a) != len(b):
            raise Unlike("a value has different dims on one micro-batch and on the batch")
        return [d for d, (m, n) in enumerate(zip(a, b, strict=True)) if m != n]

    def cut_dims(self, drawn: Iterable[int]) -> dict[int, int]:
        """Of random values those whose shape comes from the batch: small value -> the dim that differs."""
        found = {}
        for value in drawn:
            grown = self.grown(value, self.value[value])
            if len(grown) > 1:
                raise Unlike("random numbers are drawn for pairs of examples of the batch")
            if grown:
                found[value] = grown[0]
        return found


class _Loop:
    """The new step, as a function of its flat arguments."""

    def __init__(self, pair: _Pair, dims: Mapping[int, int], parts: int) -> None:
        self.pair, self.dims, self.parts = pair, dims, parts
        scan, block = pair.scans[1], pair.small.block
        at = block.ops.index(scan)
        self.before, self.after = block.ops[:at], block.ops[at + 1 :]
        self.batch = made_of(self.before, {block.inputs[i] for i in dims})
        self.inside = [op for op in self.before if not self.batch.isdisjoint(op.results)]
        self.random = {v for op in self.before if op.name in primitives.DRAWS for v in op.results}
        self.random = made_of(self.before, self.random)
        (self.body,) = scan.bodies
        self.view = ScanView(scan)
        iotas = {v for op in self.before if op.name == "iota" and op.params["shape"] == (1,) for v in op.results}
        self.numbers = iotas.intersection(self.view.operands.xs)  # of the micro-batch
        self.counters = {v for atom, v in self.view.xs if atom in self.numbers}
        self.tags = self._tags()
        self.combined = self._combined()
        self.once = self._terms_added_once()
        self.sliced = self._sliced()
        self.draws, self.drawn = self._drawn()
        self.late = self._late()

    # -- how results are combined ---------------------------------------------------------------------------------

    def _combined(self) -> list[str]:
        """For each result of the scan one of `COMBINED`."""
        pair, view = self.pair, self.view
        normed = self._normed()
        found = []
        for number, (result, atom) in enumerate(zip(view.op.results, self.body.outputs, strict=True)):
            value = _value(pair.small, atom)
            is_mean = normed[number] or self.tags.of(atom) != Tag.SUM
            if number < view.num_carry and number not in view.additions:
                found.append(LAST)  # overwritten: the same in every micro-batch
            elif number >= view.num_carry and pair.grown(atom, pair.scans[0].bodies[0].outputs[number]):
                found.append(JOINED)
            elif _is_float(pair.small.values[result]):
                found.append(AVERAGED if is_mean else SUMMED)
            elif value.dtype == np.bool_:
                raise Unlike("a result is a truth value of the whole batch")
            else:  # what a loop of one adds is a sum, of integers above a threshold that examples share, for one
                found.append(SUMMED if number < view.num_carry or not is_mean else LAST)
        return found

    def _tags(self) -> Aggregates:
        """How the values of the loop's body depend on the examples."""
        pair, block = self.pair, self.pair.small.block
        tags = Aggregates(
            pair.small.values,
            lambda value: pair.small.values[value].shape != pair.big.values[pair.value[value]].shape,
            lambda op: op.params["length"] != pair.other[op.index].params["length"],
        )
        tags.tags |= tag_inputs(block.inputs, {block.inputs[i]: None for i in self.dims})
        tags.walk(self.before)
        tags.tags |= dict.fromkeys(self.numbers, Tag.COUNTER)
        given = [tags.of(atom) for atom in self.view.op.operands]
        tags.tags |= dict(zip(self.body.inputs, given, strict=True))
        tags.tags |= {self.view.inputs.carry[number]: Tag.SUM for number in self.view.additions}
        tags.walk(self.body.ops, may_add_once=True)
        return tags

    def _terms_added_once(self) -> dict[int, tuple[str, list[int]]]:
        """Operations (by index) on a term that no example reaches: how their result is combined, and which operands.

        A sum has the term once, a mean in each micro-batch. The operands are the number of the micro-batch, where the
        operation selects the term by it, or the term itself.

        Raises:
          Unlike: the term is added to a sum and to a mean.
        """
        terms = {op.index: [i for i, a in enumerate(op.operands) if a in self.counters] for op in self.body.ops}
        found = {}
        for op in self.body.ops:
            operands = terms[op.index] or self.tags.once.get(op.index)
            if not operands:
                continue
            reached = made_of(self.body.ops, op.results)
            outputs = zip(self.combined, self.body.outputs, strict=True)
            kinds = {kind for kind, atom in outputs if isinstance(atom, int) and atom in reached}
            if {AVERAGED, SUMMED} <= kinds:
                raise Unlike("it adds a value that no example reaches to a sum and to a mean over examples")
            found[op.index] = AVERAGED if AVERAGED in kinds else SUMMED, operands
        return found

    def _normed(self) -> list[bool]:
        """For each result of the scan, whether the step divides by a number of examples on its way."""
        pair, scan, block = self.pair, self.pair.scans[1], self.pair.small.block
        state = {
            value
            for argument, value in zip(pair.one.arguments, block.inputs, strict=False)
            if argument.role == "state" and _is_float(pair.small.values[value])
        }
        inner = dict(zip(self.body.inputs, scan.operands, strict=True))
        of_state = made_of(self.before, state)
        of_state |= {v for v, a in inner.items() if a in of_state}
        of_batch = self.batch | {v for v, a in inner.items() if a in self.batch}
        of_state = made_of(self.body.ops, of_state)
        of_batch = made_of(self.body.ops, of_batch)

        def divides(op: Op) -> bool:
            if pair.literals_differ(op):
                return True
            by = op.operands[1] if op.name == "div" else None
            if not isinstance(by, int) or by not in of_batch or by in of_state or not _is_float(pair.small.values[by]):
                return False
            return not pair.grown(by, pair.value[by])  # examples are divided by values of their own for other reasons

        normed = {v for op in self.before if divides(op) for v in op.results}
        normed = made_of(self.before, normed)
        normed |= {v for v, a in inner.items() if a in normed}
        normed |= {v for op in self.body.ops if divides(op) for v in op.results}
        normed = made_of(self.body.ops, normed)
        later: set[int] = set()  # what is divided after the loop
        for op in reversed(self.after):
            if not later.isdisjoint(op.results) or pair.literals_differ(op):
                later.update(op.reads)
        return [
            result in later or (isinstance(atom, int) and atom in normed)
            for result, atom in zip(scan.results, self.body.outputs, strict=True)
        ]

    # -- what differs between micro-batches besides the batch ---------------------------------------------------------

    def _sliced(self) -> dict[int, int]:
        """Random values made before the loop whose shape comes from the batch: value -> the dim that is cut."""
        scan = self.pair.scans[1]
        used = [value for op in (*self.inside, scan) for value in op.reads]
        return self.pair.cut_dims(sorted(self.random.intersection(used) - self.batch))

    def _drawn(self) -> tuple[list[Op], dict[int, int]]:
        """The same of values that the loop makes of random keys alone: the ops, and value -> the dim that is cut."""
        scan = self.pair.scans[1]
        carried = set(self.view.inputs.carry)
        inputs = list(zip(self.body.inputs, scan.operands, strict=True))
        known = {v for v, a in inputs if v not in carried and not (isinstance(a, int) and a in self.batch)}
        random = {v for v, a in inputs if v in known and isinstance(a, int) and a in self.random}
        ops = []
        for op in self.body.ops:
            if not op.bodies and not op.has_effects and known.issuperset(op.reads):
                ops.append(op)
                known.update(op.results)
                if op.name in primitives.DRAWS or not random.isdisjoint(op.reads):
                    random.update(op.results)
        own = {op.index for op in ops}
        used = {value for op in self.body.ops if op.index not in own for value in op.reads}
        used |= {a for a in self.body.outputs if isinstance(a, int)}
        return ops, self.pair.cut_dims(sorted(random & used))

    def _late(self) -> list[int]:
        """Results that also need values of single micro-batches after the loop (a count of pairs that they divide by).

        Each micro-batch computes its own, and they are averaged. State is not among them.
        """
        pair, scan = self.pair, self.pair.scans[1]
        inputs = pair.small.block.inputs
        known = {v for i, v in enumerate(inputs) if i not in self.dims}
        known |= {v for op in self.before if self.batch.isdisjoint(op.results) for v in op.results}
        known |= {
            result
            for result, small, big in zip(scan.results, self.body.outputs, pair.scans[0].bodies[0].outputs, strict=True)
            if not pair.grown(small, big)
        }
        once = made_of_all(self.after, known)
        each = made_of_all(self.after, {*known, *inputs, *scan.results, *(v for op in self.inside for v in op.results)})
        reached = made_of(self.after, set(scan.results))
        outputs = zip(pair.one.outputs, pair.small.block.outputs, pair.big.block.outputs, strict=True)
        return [
            small
            for output, small, big in outputs
            if isinstance(small, int) and small in reached & each - once and output.role != "state"
            and _is_float(pair.small.values[small]) and not pair.grown(small, big)
        ]  # fmt: skip

    # -- the step -------------------------------------------------------------------------------------------------

    def graph(self) -> tuple[Graph, int, tuple[str, ...]]:
        big = self.pair.big
        specs = [spec_of(big.values[v]) for v in big.block.inputs[: len(self.pair.whole.arguments)]]
        graph = conversion.graph_of(jax.make_jaxpr(self._run)(*specs))
        *outputs, mark = graph.block.outputs
        scan = next(op.index for op in graph.block.ops if mark in op.results)
        graph, origin = pruning.prune_tracked(replace(graph, block=replace(graph.block, outputs=tuple(outputs))))
        found = [new for new, before in origin.items() if before == scan]
        if not found:
            raise Unlike("nothing that the step returns depends on its batch")
        return graph, found[0], self._notes()

    def _run(self, *leaves: Any) -> list[Any]:
        """The flat results, and a result of the loop alone."""
        pair, (big_scan, scan) = self.pair, self.pair.scans
        whole = dict(zip(pair.big.block.inputs, [*leaves, *pair.big.constants], strict=True))
        env: dict[int, Any] = {
            value: leaf
            for number, (value, leaf) in enumerate(
                zip(pair.small.block.inputs, [*leaves, *pair.small.constants], strict=True)
            )
            if number not in self.dims
        }
        at = pair.big.block.ops.index(big_scan)
        _evaluate(pair.big.block.ops[:at], whole)
        _evaluate([op for op in self.before if self.batch.isdisjoint(op.results)], env)
        batch = {pair.small.block.inputs[i]: _blocks(leaves[i], dim, self.parts) for i, dim in self.dims.items()}
        inner = self._inner(big_scan, whole) if self.drawn else {}
        batch |= {value: _blocks(whole[pair.value[value]], dim, self.parts) for value, dim in self.sliced.items()}
        batch |= {value: _blocks(inner[pair.value[value]], dim, self.parts) for value, dim in self.drawn.items()}
        for small, large in zip(self.view.outputs.carry, ScanView(big_scan).outputs.carry, strict=True):
            if pair.grown(small, large):
                shape = list(_value(pair.big, large).shape)
                raise Unlike(
                    f"it computes further with a sum over the batch, of shape {shape}, whose value is smaller on a "
                    "micro-batch"
                )
        carry, ys, late, mark = self._scan(scan, env, batch)
        carry = [x / self.parts if kind == AVERAGED else x for x, kind in zip(carry, self.combined, strict=False)]
        results: list[Any] = []
        known = list(carry)
        for i, (small, large) in enumerate(zip(self.body.outputs, big_scan.bodies[0].outputs, strict=True)):
            if i >= self.view.num_carry:
                joined, single = self._joined(i, ys[i - self.view.num_carry], small, large)
                known.append(joined)
                results.append(single)
        env.update(zip(scan.results, [*carry, *results], strict=True))
        whole.update(zip(big_scan.results, known, strict=True))
        env = {value: x for value, x in env.items() if x is not None}
        _evaluate(self.after, env, partly=True)
        _evaluate(pair.big.block.ops[at + 1 :], whole)
        made = {v: env[v] for v in made_of(self.after, set(scan.results)) if v in env}
        made |= {v: jnp.mean(x, 0, dtype=x.dtype) for v, x in zip(self.late, late, strict=True)}
        outputs = zip(pair.small.block.outputs, pair.big.block.outputs, strict=True)
        return [*(self._output(a, b, made, whole) for a, b in outputs), mark]

    def _inner(self, scan: Op, whole: Mapping[int, Any]) -> dict[int, Any]:
        """What the loop of length one over the whole batch makes of random keys alone."""
        (body,) = scan.bodies
        scanned = self.view.num_consts + self.view.num_carry
        own: dict[int, Any] = {}
        for number, (value, atom) in enumerate(zip(body.inputs, scan.operands, strict=True)):
            x = atom.value if isinstance(atom, Lit) else whole[atom]
            own[value] = x[0] if number >= scanned else x
        _evaluate([self.pair.other[op.index] for op in self.draws], own)
        return own

    def _scan(
        self, scan: Op, env: Mapping[int, Any], batch: Mapping[int, Any]
    ) -> tuple[Sequence[Any], Sequence[Any], list[Any], Any]:
        """What the micro-batches add up to, what each returns also, and the values of `late`, both stacked.

        Last, a stacked result that nothing reads: it tells which scan this is.
        """
        view = self.view

        def read(atom: Atom, own: Mapping[int, Any]) -> Any:
            return atom.value if isinstance(atom, Lit) else own[atom]

        def step(carry: Any, turn: Any) -> Any:
            number, blocks = turn
            own = {**env, **blocks}
            _evaluate(self.inside, own)
            own |= {v: jnp.reshape(number, (1,)) for v in self.numbers if v in own}
            consts = [read(a, own) for a in view.operands.consts]
            xs = [read(a, own)[0] for a in view.operands.xs]
            inner = dict(zip(self.body.inputs, [*consts, *carry, *xs], strict=True))
            inner |= {v: blocks[v] for v in self.drawn}
            ops = [op for op in self.body.ops if not (op.results and inner.keys() >= set(op.results))]
            _evaluate(ops, inner, adapt=functools.partial(self._with_terms, number))
            out = [read(a, inner) for a in self.body.outputs]
            mine = {}
            if self.late:
                mine = own | dict(zip(scan.results, self._alone(inner, out), strict=True))
                _evaluate(self.after, mine, partly=True)
            given = view.given(out)
            return given.carry, (given.ys, [mine[v] for v in self.late], lax.add(number, np.int32(1)))

        first = tuple(read(a, env) for a in view.operands.carry)
        count = np.arange(self.parts, dtype=np.int32)
        with jax.named_scope(SCOPE):
            carry, (ys, late, mark) = lax.scan(step, first, (count, dict(batch)), length=self.parts)
        return carry, ys, late, mark

    def _with_terms(self, number: Any, op: Op, operands: list[Any]) -> list[Any]:
        """The operands of an operation of the body in a micro-batch: terms of sums are zero in all but the first."""
        kind, own = self.once.get(op.index, ("", ()))
        for i in own:
            if op.operands[i] not in self.counters:
                operands[i] = jnp.where(number == 0, operands[i], 0) if kind == SUMMED else operands[i]
            elif kind == AVERAGED:
                operands[i] = np.int32(0)
        return operands

    def _alone(self, inner: Mapping[int, Any], out: Sequence[Any]) -> list[Any]:
        """The results that a loop over this micro-batch alone has: what it adds to each carry, and stacks of one."""
        makers = producers(self.body.ops)
        found = []
        for i, (atom, x) in enumerate(zip(self.body.outputs, out, strict=True)):
            carried = self.view.inputs.carry[i] if i < self.view.num_carry else None
            op = makers.get(atom) if isinstance(atom, int) else None
            if carried is None:
                x = x[None]
            elif op is not None and op.name in primitives.ADDS and carried in op.operands:
                (added,) = [a for a in op.operands if a != carried] or [carried]
                x = added.value if isinstance(added, Lit) else inner[added]
            found.append(x)
        return found

    def _joined(self, number: int, stacked: Any, small: Atom, big: Atom) -> tuple[Any, Any]:
        """What the micro-batches return, as a loop of one would on the whole batch, and on a micro-batch."""
        grown, kind = self.pair.grown(small, big), self.combined[number]
        if len(grown) > 1:
            raise Unlike("a result has a value for each pair of examples of the batch")
        if grown:
            whole = jnp.moveaxis(stacked, 0, grown[0])
            shape = (*whole.shape[: grown[0]], -1, *whole.shape[grown[0] + 2 :])
            return jnp.reshape(whole, shape)[None], None
        if kind == LAST:
            return stacked[-1:], stacked[-1:]
        total = jnp.sum(stacked, 0, keepdims=True, dtype=stacked.dtype)
        one = total / self.parts if kind == AVERAGED else total
        return one, one

    def _output(self, small: Atom, big: Atom, made: Mapping[int, Any], whole: Mapping[int, Any]) -> Any:
        """A result of the step: from what the micro-batches made, or where it has a value an example, all of them."""
        if isinstance(big, Lit):
            return big.value
        same = isinstance(small, int) and small in made and not self.pair.grown(small, big)
        return made[small] if same else whole[big]  # type: ignore[index]

    def _notes(self) -> tuple[str, ...]:
        """How each leaf of the result that the loop has a part in is combined."""
        scan, outputs = self.pair.scans[1], self.pair.one.outputs
        reach = {
            kind: made_of(self.after, {r for r, one in zip(scan.results, self.combined, strict=True) if one == kind})
            for kind in COMBINED
        }
        reach[AVERAGED].update(self.late)
        kinds = {
            output.path: next((kind for kind in COMBINED if atom in reach[kind]), "")
            for output, atom in zip(outputs, self.pair.small.block.outputs, strict=True)
        }
        notes = ["inexact: each micro-batch is computed independently, as a whole batch", *notes_on(kinds)]
        own = {op.index for op in self.draws}
        if any(op.name in primitives.DRAWS and op.index not in own for op in walk(self.body)):
            notes.append("random numbers drawn in the loop are the same in every micro-batch")
        return tuple(notes)


def _evaluate(
    ops: Sequence[Op],
    env: dict[int, Any],
    *,
    partly: bool = False,
    adapt: Callable[[Op, list[Any]], list[Any]] = lambda _, operands: operands,
) -> None:
    """Runs ops on what `env` holds, and puts their results into it; with `partly`, those whose operands are there."""
    for op in ops:
        if partly and not env.keys() >= set(op.reads):
            continue
        operands = adapt(op, [a.value if isinstance(a, Lit) else env[a] for a in op.operands])
        env.update(zip(op.results, evaluation.bind(op, operands), strict=True))


def _blocks(x: Any, dim: int, parts: int) -> Any:
    """An array as its micro-batches along `dim`, stacked along a new leading dim."""
    split = jnp.reshape(x, (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :]))
    return jnp.moveaxis(split, dim, 0)


def _value(graph: Graph, atom: Atom) -> Any:
    return atom.aval if isinstance(atom, Lit) else graph.values[atom]


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)
