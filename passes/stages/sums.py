"""One accumulator for each stage that contributes to a tied parameter's gradient.

Problem. Where a parameter is used on several stages, what a micro-batch adds to its accumulator is a sum of values made
on different stages. Sending them to one stage for every micro-batch would send the whole gradient so often.

Answer. Addition commutes with the sum over micro-batches: each stage accumulates what it makes, and the accumulators
are added once, after the last micro-batch:

    c + sum_m sum_s g[s, m]  =  (c + sum_m g[0, m]) + sum_m g[1, m] + ...

The first of them starts where the accumulator started, the others at zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
from jax.core import ShapedArray

from alpa_lite.ir.graph import Lit, Op, Traced
from alpa_lite.passes.ir.flow import producers, users
from alpa_lite.passes.ir.loops import Carry, ScanView, scan_op
from alpa_lite.passes.ir.rewriting import Rewriter, replace_op
from alpa_lite.passes.layers.types import Assignment


def split_sums(traced: Traced, scan: int, assignment: Assignment) -> tuple[Traced, Assignment]:
    """Returns the step with `assignment.split_sums` carried out, and the assignment extended by the added ops."""
    if not assignment.split_sums:
        return traced, assignment
    return _Splitter(traced, scan, assignment).build()


class _Splitter:
    """The tables of one rewriting. Values and ops keep their numbers: the assignment speaks of them."""

    def __init__(self, traced: Traced, scan: int, assignment: Assignment) -> None:
        self.traced, self.assignment = traced, assignment
        self.scan = scan_op(traced, scan)
        self.rewriter = Rewriter(traced.graph)
        self.stage = dict(assignment.stage)
        self.phases = dict(assignment.phases.number)
        self.made_by = producers(self.scan.bodies[0].ops)
        self.readers = users(traced.graph.block.ops)
        self.before: list[Op] = []
        self.after: list[Op] = []

    def build(self) -> tuple[Traced, Assignment]:
        view, assignment = ScanView(self.scan), self.assignment
        self.body = [op for op in view.body.ops if op.index not in assignment.dissolved_additions]
        carries, added = [*view.carries], list[Carry]()
        for number, summands in assignment.split_sums:
            carries[number], *others = self.split(carries[number], summands)
            added += others
        scan = view.rebuild(self.body, view.consts, [*carries, *added], view.xs, view.ys)
        scan = replace(scan, key=self.scan.key)
        block = replace_op(self.traced.graph.block, self.scan, [*self.before, scan, *self.after])
        graph = replace(self.traced.graph, values=tuple(self.rewriter.values), block=block)
        phases = replace(assignment.phases, number=self.phases)
        return replace(self.traced, graph=graph), replace(
            assignment, stage=self.stage, split_sums=(), dissolved_additions=frozenset(), phases=phases
        )

    def split(self, whole: Carry, summands: Sequence[tuple[int, int]]) -> list[Carry]:
        """Returns one carry for each stage that makes summands; the first starts where the whole did."""
        assert isinstance(whole.output, int)
        template = self.made_by[whole.output]
        by_stage: dict[int, list[int]] = {}
        for value, stage in summands:
            by_stage.setdefault(stage, []).append(value)
        parts: list[Carry] = []
        for stage, values in by_stage.items():
            held = self.rewriter.new_value(whole.output) if parts else whole.input
            sources = [self.made_by[v].index for v in values if v in self.made_by]
            contribution = values[0]
            for value in values[1:]:
                contribution = self.add(template, contribution, value, stage, sources)
            total = self.add(template, held, contribution, stage, sources)
            start = self.zeros(whole.end) if parts else whole.start
            parts.append(Carry(start, held, total, self.rewriter.new_value(whole.end)))
        self.join(template, whole.end, [part.end for part in parts])
        return parts

    def addition(self, template: Op, left: int, right: int, result: int, stage: int) -> Op:
        """Returns an op like the template, on other values."""
        index = self.rewriter.index()
        self.stage[index] = stage
        return replace(template, index=index, operands=(left, right), results=(result,))

    def add(self, template: Op, left: int, right: int, stage: int, sources: Sequence[int]) -> int:
        """Appends an addition to the body; it runs as soon as its operands are made."""
        op = self.addition(template, left, right, self.rewriter.new_value(template.results[0]), stage)
        self.body.append(op)
        phases = [self.phases.get(index, 0) for index in sources]
        if self.assignment.phases.num_slices == 1 and min(phases, default=0) < 2:
            phases = [min(phase, 1) for phase in phases]  # with one of the backward task, it runs there
        if any(phases):
            self.phases[op.index] = max(phases)
        return op.results[0]

    def zeros(self, value: int) -> int:
        """Appends an op before the scan that makes zeros like `value`."""
        aval = self.rewriter.values[value].aval
        zero = Lit(np.zeros((), aval.dtype), ShapedArray((), aval.dtype))
        params = {"shape": tuple(aval.shape), "broadcast_dimensions": (), "sharding": None}
        result = self.rewriter.new_value(value)
        self.before.append(self.rewriter.op(jax.lax.broadcast_in_dim_p, params, [zero], [result], self.scan.source))
        return result

    def join(self, template: Op, total: int, parts: Sequence[int]) -> None:
        """Appends the additions after the scan, on the stage that reads the total."""
        stages = [self.stage[op.index] for op in self.readers.get(total, ()) if op.index in self.assignment.stage]
        left = parts[0]
        for number, part in enumerate(parts[1:], start=2):
            result = total if number == len(parts) else self.rewriter.new_value(total)
            self.after.append(self.addition(template, left, part, result, stages[0] if stages else 0))
            left = result
