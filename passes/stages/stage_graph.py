"""One stage as a step of its own, and the roles of its arguments and results in the whole step."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from alpa_lite.ir.graph import Op, Traced
from alpa_lite.passes.ir import flow, primitives
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.layers.types import Phases
from alpa_lite.passes.sharding.tables import NO_REPEATS, Repeats

PortKind = Literal["argument", "copy", "crossing", "late"]


@dataclass(frozen=True)
class Port:
    """The role of an argument or a result of a stage's graph in the whole step.

    kind / number:
      argument: flat argument `number` of the step; as a result: flat result `number`.
      copy: state argument `number`, owned by another stage.
      crossing: body value `number`, stacked over micro-batches.
      late: update value `number` (of the whole step's top block).
    """

    kind: PortKind
    number: int


@dataclass(frozen=True, eq=False)
class StageGraph:
    """One stage as a step of its own.

    Attributes:
      traced: its graph; value numbers are those of the whole step, new ones above them.
      scan: `Op.index` of its scan over micro-batches, or -1 where nothing of the body is its own.
      inputs, outputs: one for each argument (constants excluded), and each result.
      constants: for each of the graph's constants its number in the whole step.
      rounds: for each op of the top block but the scan, by `Op.index`, the round of the update in which it can run.
      late_rounds: for each late argument and result, by value number, the round that makes it.
      phases: of its body ops, by `Op.index` in this graph.
      runs_apart: whether the iterations of its scan run apart, as in a pipeline, where each hands on its own results.
    """

    traced: Traced
    scan: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    constants: tuple[int, ...]
    rounds: Mapping[int, int] = field(default_factory=dict)
    late_rounds: Mapping[int, int] = field(default_factory=dict)
    phases: Phases = field(default_factory=Phases)
    runs_apart: bool = False

    @property
    def apart_results(self) -> frozenset[int]:
        """The stacked results of its scan whose parts are made one by one."""
        scans = [op for op in self.traced.graph.block.ops if self.runs_apart and op.index == self.scan]
        return frozenset(result for op in scans for _, result in ScanView(op).ys)


def whole_step_stage(traced: Traced, scan: int) -> StageGraph:
    """Returns a step that is not divided, as its only stage.

    Args:
      scan: the index of its loop over micro-batches, or -1 without one.
    """
    return StageGraph(
        traced=traced,
        scan=scan,
        inputs=tuple(Port("argument", i) for i in range(len(traced.arguments))),
        outputs=tuple(Port("argument", i) for i in range(len(traced.outputs))),
        constants=tuple(range(len(traced.graph.constants))),
    )


def repeats(stage: StageGraph, *, split_weights: bool = False) -> Repeats:
    """Returns the loop-body segments that run each op, and the values that each of them reshards; none of a whole step.

    `cutting` sorts the instructions of a lowered stage into segments and makes cheap values again. This predicts the
    same for the operations of a graph, so that the integer program counts collectives as often as they run.

    Args:
      split_weights: whether gradients of parameters are computed in a segment of their own.
    """
    scans = [op for op in stage.traced.graph.block.ops if op.index == stage.scan]
    if not scans or not stage.phases.number:
        return NO_REPEATS
    view = ScanView(scans[0])
    ports = sum(port.kind == "crossing" for port in stage.inputs)
    body = view.body
    crossing = set(body.inputs[len(body.inputs) - ports :])
    given = {*view.inputs.consts, *view.inputs.xs} - crossing
    values = flow.find_computable(body.ops, given, lambda op: op.name in primitives.CHEAP_TO_REPEAT)

    def choose(op: Op, readers: Set[int]) -> Set[int]:
        own = stage.phases.phase_of(op.index, split_weights=split_weights)
        return readers if readers and values.issuperset(op.results) else {min([own, *readers])}

    parts, _ = flow.label_by_readers(body.ops, choose)
    return Repeats({op.index: frozenset(some) for op, some in zip(body.ops, parts, strict=True)}, frozenset(values))
