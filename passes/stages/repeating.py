"""Predicts the segments of a stage that repeat reshardings of others, before the stage is planned.

`cutting` sorts the instructions of a lowered stage into segments and makes cheap values again. This module predicts
the same for the operations of the stage's graph, so that the integer program counts collectives as often as they run.
"""

from __future__ import annotations

from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.sharding.tables import NO_REPEATS, Repeats
from alpa_lite.passes.stages.staging import StageGraph


def repeats(stage: StageGraph, *, split_weights: bool = False) -> Repeats:
    """Returns the loop-body segments that run each op, and the values that each of them reshards; none of a whole step.

    Args:
      split_weights: whether gradients of parameters are computed in a segment of their own.
    """
    scans = [op for op in stage.traced.graph.block.ops if op.index == stage.scan]
    if not scans or not (stage.phases or stage.backward):
        return NO_REPEATS
    view = ScanView(scans[0])
    ports = sum(port.kind == "crossing" for port in stage.inputs)
    body = view.body
    crossing = set(body.inputs[len(body.inputs) - ports :])
    values = {*view.inputs.consts, *view.inputs.xs} - crossing
    cheap = set()
    for op in body.ops:
        if op.name in primitives.CHEAP_TO_REPEAT and values.issuperset(op.reads):
            values.update(op.results)
            cheap.add(op.index)
    parts: dict[int, frozenset[int]] = {}
    read_in: dict[int, frozenset[int]] = {}
    for op in reversed(body.ops):
        if stage.phases:
            own = stage.phases[op.index]
        else:
            own = 2 if split_weights and op.index in stage.weight else int(op.index in stage.backward)
        readers = frozenset[int]().union(*(read_in[v] for v in op.results if v in read_in))
        parts[op.index] = readers if op.index in cheap and readers else frozenset((min([own, *readers]),))
        for value in op.reads:
            read_in[value] = read_in.get(value, frozenset()) | parts[op.index]
    return Repeats(parts, frozenset(values))
