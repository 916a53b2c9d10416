"""One accumulator for each stage that contributes to a tied parameter's gradient.

Problem. Where a parameter is used on several stages, what a micro-batch adds to its accumulator is a sum of values made
on different stages. Sending them to one stage for every micro-batch would send the whole gradient so often.

Answer. Addition commutes with the sum over micro-batches: each stage accumulates what it makes, and the accumulators
are added once, after the last micro-batch:

    c + sum_m sum_s g[s, m]  =  (c + sum_m g[0, m]) + sum_m g[1, m] + ...

The first of them starts where the accumulator started, the others at zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np
from jax.core import ShapedArray

from alpa_lite.graph import Atom, Block, Graph, Lit, Op, Traced, Value
from alpa_lite.passes.ir.keys import Keys
from alpa_lite.passes.ir.loops import scan_op
from alpa_lite.passes.layers.types import Assignment


def split_sums(traced: Traced, scan: int, assignment: Assignment) -> tuple[Traced, Assignment]:
    """The step with `assignment.split_sums` carried out, and the assignment of what was added to it."""
    if not assignment.split_sums:
        return traced, assignment
    return _Splitter(traced, scan, assignment).result()


@dataclass
class _Splitter:
    """The tables of one rewriting."""

    traced: Traced
    scan: int
    assignment: Assignment
    values: list[Value] = field(default_factory=list)
    stage: dict[int, int] = field(default_factory=dict)
    backward: set[int] = field(default_factory=set)
    weight: set[int] = field(default_factory=set)
    index: int = 0

    def result(self) -> tuple[Traced, Assignment]:
        graph, assignment = self.traced.graph, self.assignment
        self.values = list(graph.values)
        self.stage = dict(assignment.stage)
        self.backward, self.weight = set(assignment.backward), set(assignment.weight)
        self.index = 1 + max(op.index for op in graph.ops())
        scan = scan_op(self.traced, self.scan)
        (body,) = scan.bodies
        consts, carries = scan.params["num_consts"], scan.params["num_carry"]
        made_by = {v: op for op in body.ops for v in op.results}
        kept = [op for op in body.ops if op.index not in assignment.dissolved]
        inputs, outputs = list(body.inputs), list(body.outputs)
        results = list(scan.results)
        before: list[Op] = []
        after: list[Op] = []
        new_inputs: list[int] = []
        new_outputs: list[Atom] = []
        new_starts: list[Atom] = []
        new_results: list[int] = []
        for carry, summands in assignment.split_sums:
            made = outputs[carry]
            assert isinstance(made, int)
            template = made_by[made]
            by_stage: dict[int, list[int]] = {}
            for value, stage in summands:
                by_stage.setdefault(stage, []).append(value)
            total = results[carry]
            parts: list[int] = []
            for number, (stage, some) in enumerate(by_stage.items()):
                held = inputs[consts + carry] if number == 0 else self.like(made)
                contribution = some[0]
                sources = [made_by[v].index for v in some if v in made_by]
                for value in some[1:]:
                    contribution = self.add(template, contribution, value, stage, kept, sources)
                new = self.add(template, held, contribution, stage, kept, sources)
                parts.append(self.like(total))
                if number == 0:
                    outputs[carry] = new
                    results[carry] = parts[0]
                else:
                    new_inputs.append(held)
                    new_outputs.append(new)
                    new_starts.append(self.zeros(total, before))
                    new_results.append(parts[-1])
            self.join(template, total, parts, after)
        split = consts + carries
        new_scan = replace(
            scan,
            params={**scan.params, "num_carry": carries + len(new_inputs)},
            operands=(*scan.operands[:split], *new_starts, *scan.operands[split:]),
            results=(*results[:carries], *new_results, *results[carries:]),
            bodies=(
                Block(
                    (*inputs[:split], *new_inputs, *inputs[split:]),
                    tuple(_ordered(kept, {*inputs, *new_inputs})),
                    (*outputs[:carries], *new_outputs, *outputs[carries:]),
                ),
            ),
        )
        ops: list[Op] = []
        for op in graph.block.ops:
            ops += [*before, new_scan, *after] if op.index == self.scan else [op]
        block = replace(graph.block, ops=tuple(ops))
        changed = Graph(tuple(self.values), block, graph.constants)
        return replace(self.traced, graph=changed), replace(
            assignment,
            stage=self.stage,
            backward=frozenset(self.backward),
            weight=frozenset(self.weight),
            split_sums=(),
            dissolved=frozenset(),
        )

    def like(self, value: int) -> int:
        """A new value of the same type."""
        self.values.append(self.values[value])
        return len(self.values) - 1

    def new(self, op: Op, operands: Sequence[Atom], result: int) -> Op:
        self.index += 1
        return replace(op, index=self.index - 1, operands=tuple(operands), results=(result,))

    def add(self, template: Op, left: int, right: int, stage: int, out: list[Op], sources: Sequence[int]) -> int:
        """Appends an addition to the body; it runs when what it adds is made."""
        result = self.like(template.results[0])
        op = self.new(template, (left, right), result)
        out.append(op)
        self.stage[op.index] = stage
        if any(i in self.backward for i in sources):
            self.backward.add(op.index)
            if all(i in self.weight for i in sources):
                self.weight.add(op.index)
        return result

    def zeros(self, value: int, out: list[Op]) -> int:
        """Appends an op before the scan that makes zeros like `value`."""
        aval = self.values[value].aval
        zero = Lit(np.zeros((), aval.dtype), ShapedArray((), aval.dtype))
        params: Mapping[str, object] = {
            "shape": tuple(aval.shape),
            "broadcast_dimensions": (),
            "sharding": None,
        }
        keys = Keys()
        primitive = jax.lax.broadcast_in_dim_p
        key = keys.key(keys.head(primitive, params), [zero])
        source = scan_op(self.traced, self.scan).source
        result = self.like(value)
        out.append(Op(self.index, primitive, params, (zero,), (result,), (), source, key))
        self.index += 1
        return result

    def join(self, template: Op, total: int, parts: Sequence[int], out: list[Op]) -> None:
        """Appends the additions after the scan, on the stage that reads the total."""
        readers = [
            self.assignment.stage[op.index]
            for op in self.traced.graph.block.ops
            if total in op.operands and op.index in self.assignment.stage
        ]
        stage = readers[0] if readers else 0
        left = parts[0]
        for number, part in enumerate(parts[1:], start=2):
            result = total if number == len(parts) else self.like(total)
            op = self.new(template, (left, part), result)
            out.append(op)
            self.stage[op.index] = stage
            left = result


def _ordered(ops: Sequence[Op], known: set[int]) -> list[Op]:
    """The ops in an order in which each comes after what it reads; otherwise as they stand."""
    made = {v for op in ops for v in op.results}
    seen = set(known)
    out: list[Op] = []
    waiting = list(ops)
    while waiting:
        rest = []
        for op in waiting:
            if all(not isinstance(a, int) or a in seen or a not in made for a in op.operands):
                out.append(op)
                seen.update(op.results)
            else:
                rest.append(op)
        assert len(rest) < len(waiting)
        waiting = rest
    return out
