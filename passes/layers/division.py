"""From a step over micro-batches to the step that is cut into stages.

    divisible   cuts scans over layers as finely as layers are wanted, so that stages may begin between any two
                iterations, and finds the layers. On these the search prices and chooses.
    recomputing one mesh: makes the first layers, or all, compute again what they do not save, and cuts scans between
                these layers and the others.
    divided     cuts the scans where the chosen stages begin and nowhere else, so that each stage has one shorter scan,
                and makes the stages that rematerialise compute again what they do not save.

The layers of the one and of the other correspond: an operation of the second is in the layer of the first that its
first iteration was in.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Op, Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes import factors
from alpa_lite.passes.ir.loops import ScanView, scan_op
from alpa_lite.passes.ir.rewriting import RewrittenStep
from alpa_lite.passes.layers import assignment as layering_stages
from alpa_lite.passes.layers import layering, rematerialisation, scans
from alpa_lite.passes.layers.layering import forward_ops
from alpa_lite.passes.layers.rematerialisation import Choice, Remat
from alpa_lite.passes.layers.scans import Cut
from alpa_lite.passes.layers.types import Assignment, Layer, Layering
from alpa_lite.passes.microbatches.loop import Accumulated


@dataclass(frozen=True, eq=False)
class LayeredStep:
    """A step in layers.

    Attributes:
      accumulated: the step, its scans whole.
      rules: of its operations.
      fine: the step with its scans cut finely; None if it has none over layers.
      layering: of the finely cut step.
    """

    accumulated: Accumulated
    rules: Mapping[object, Rule]
    fine: Cut | None
    layering: Layering


@dataclass(frozen=True, eq=False)
class AssignedStep:
    """A step ready to be cut into stages.

    Attributes:
      accumulated: the step; scans are cut where stages begin, and what is not saved is computed again.
      layering: its layers; they may be fewer than those that were priced.
      cuts: the first of these layers of each stage after the first.
      assignment: of its operations to stages.
    """

    accumulated: Accumulated
    layering: Layering
    cuts: tuple[int, ...]
    assignment: Assignment


MAX_OUTER_LAYERS = 8
"""Number of layers before and after scans over layers, at most: embeddings, final norm, head and loss."""


def find_layers(
    accumulated: Accumulated, *, max_layers: int, rules: Mapping[object, Rule] | None = None
) -> LayeredStep:
    """Returns the layers of a step. Scans over layers are cut into equal parts.

    Args:
      max_layers: the most layers. Scans share all but those that may be before and after them (`MAX_OUTER_LAYERS`).
      rules: of the step's operations, where they are known.
    """
    step = accumulated.traced
    if rules is None:
        rules = factors.rules_of(step.graph.ops(), step.graph.values)
    points: dict[int, tuple[int, ...]] = {}
    repeated = layer_scans(step, accumulated.scan)
    for op in repeated:
        found = even_points(op.params["length"], max(1, (max_layers - MAX_OUTER_LAYERS) // len(repeated)))
        if found:
            points[op.index] = found
    if not points:
        layers = layering.cut_into_layers(step, accumulated.scan, rules, max_layers=max_layers)
        return LayeredStep(accumulated, rules, None, layers)
    fine = scans.cut_scans(step, accumulated.scan, points, rules, split_arguments=True)
    fine_rules = factors.rules_of(fine.traced.graph.ops(), fine.traced.graph.values)
    layers = layering.cut_into_layers(fine.traced, fine.scan, fine_rules, max_layers=max_layers)
    return LayeredStep(accumulated, rules, fine, layers)


def divide_into_stages(step: LayeredStep, cuts: Sequence[int], remat: Sequence[Choice] = ()) -> AssignedStep:
    """Returns the step for given stages.

    Args:
      cuts: the first of `step.layering.layers` of each stage after the first; rising.
      remat: of each stage; empty for none.

    Raises:
      OptionError: `cuts` do not rise strictly within 1 .. number of layers - 1.
    """
    step.layering.check(cuts)
    layers, cuts = _coarse(step, cuts)
    if any(choice != "none" for choice in remat):
        layers = rematerialise_stages(layers, cuts, remat)
    accumulated = replace(step.accumulated, traced=layers.traced, scan=layers.scan)
    return AssignedStep(accumulated, layers, tuple(cuts), layering_stages.assign(layers, cuts))


def recompute_layers(step: LayeredStep, remat: Remat) -> Accumulated:
    """Returns the step as one mesh runs it, whose backward pass recomputes the layers that `remat` selects.

    Raises:
      OptionError: `remat` is for another number of layers.
    """
    cuts: list[int] = []
    choices: list[Choice] = [remat.choice]
    if remat.first is not None:
        first, total = remat.first
        if total != len(step.layering.layers):
            raise OptionError(
                f"remat={remat}: the step has {len(step.layering.layers)} layers; recompute some of these"
            )
        cuts, choices = [first], [remat.choice, "none"]
        step.layering.check(cuts)
    layers, cuts = _coarse(step, cuts, split_arguments=False)
    layers = rematerialise_stages(layers, cuts, choices)
    return replace(step.accumulated, traced=layers.traced, scan=layers.scan)


def _coarse(step: LayeredStep, cuts: Sequence[int], split_arguments: bool = True) -> tuple[Layering, list[int]]:
    """Returns the layers of the step cut at stages alone, and the first of each stage."""
    fine = step.fine
    if fine is None:
        return step.layering, list(cuts)
    before = step.accumulated
    points = kept_points(fine, step.layering, cuts)
    coarse = scans.cut_scans(before.traced, before.scan, points, step.rules, split_arguments=split_arguments)
    rules = factors.rules_of(coarse.traced.graph.ops(), coarse.traced.graph.values)
    whole = layering.cut_into_layers(coarse.traced, coarse.scan, rules, max_layers=1)
    parts = [(fine.part(i), n) for n, layer in enumerate(step.layering.layers) for i in layer.ops]
    number_of = {part: n for part, n in parts if part[0] >= 0}
    made: dict[int, int] = {}  # value -> layer
    numbers: dict[int, list[int]] = {}
    ops = {op.index: op for op in whole.body.ops}
    for index in whole.layers[0].ops:
        known = [made[v] for v in ops[index].reads if v in made]
        number = number_of.get(coarse.part(index), max(known, default=0))
        made.update(dict.fromkeys(ops[index].results, number))
        numbers.setdefault(number, []).append(index)
    firsts = sorted(numbers)
    layers = []
    for first, stop in zip(firsts, [*firsts[1:], len(step.layering.layers)], strict=True):
        some = step.layering.layers[first:stop]
        layers.append(
            Layer(
                tuple(numbers[first]),
                sum(layer.seconds for layer in some),
                " ".join(layer.fingerprint for layer in some),
                some[-1].bytes_out,
            )
        )
    starts = [sum(first < cut for first in firsts) for cut in cuts]
    return replace(whole, layers=tuple(layers)), starts


def rematerialise_stages(layers: Layering, cuts: Sequence[int], remat: Sequence[Choice]) -> Layering:
    """Makes the backward pass of each stage recompute the values that its choice does not save.

    Args:
      cuts: the first layer of each stage after the first.
      remat: of each stage.

    Returns:
      The same layers of the new step.
    """
    stage_of = layers.stage_of(cuts)
    choices: dict[int, Choice] = {
        number: remat[stage_of[layer.ops[0]]] for number, layer in enumerate(layers.layers) if layer.ops
    }
    choice_of: dict[int, Choice] = {index: c for number, c in choices.items() for index in layers.layers[number].ops}
    wanted: dict[int, Choice] = {
        op.index: choice_of[op.index]
        for op in layers.body.ops
        if rematerialisation.find_dropped_residuals(op, layers.body, choice_of.get(op.index, "none"))
    }
    if wanted:
        result = rematerialisation.rematerialise_scans(layers.traced, layers.scan, wanted)
        layers = _carried_over(layers, result)
        wanted = {new: wanted[before] for new, before in result.origin.items() if before in wanted}
    again: dict[int, Choice] = {number: choice for number, choice in choices.items() if choice != "none"}
    places = layering_stages.stages(layers, cuts)
    return _carried_over(layers, rematerialisation.rematerialise(layers, again, kept=wanted, stages=places))


def _carried_over(layers: Layering, result: RewrittenStep) -> Layering:
    """Returns the same layers of the rewritten step."""
    place = {before: new for new, before in result.origin.items() if new not in result.copies}
    return replace(
        layers,
        traced=result.traced,
        scan=result.scan,
        forward=frozenset(place[i] for i in layers.forward if i in place),
        layers=tuple(replace(layer, ops=tuple(place[i] for i in layer.ops if i in place)) for layer in layers.layers),
        free_ops=frozenset(new for new, before in result.origin.items() if before in layers.free_ops),
    )


def layer_scans(traced: Traced, scan: int) -> tuple[Op, ...]:
    """The forward scans of a micro-batch that could be cut: in more than one step, over something made of parameters.

    A stacked parameter may be cast, or otherwise changed, before it is scanned.
    """
    op = scan_op(traced, scan)
    view = ScanView(op)
    forward = forward_ops(op, traced.graph.values)
    constant = set(view.inputs.consts)
    found = []
    for inner in view.body.ops:
        if inner.name == "scan" and inner.index in forward and inner.params["length"] > 1:
            if not constant.isdisjoint(ScanView(inner).operands.xs):
                found.append(inner)
        elif inner.reads and constant.issuperset(inner.reads):
            constant.update(inner.results)
    return tuple(found)


def even_points(length: int, most: int) -> tuple[int, ...]:
    """Cut points of equal pieces: as many pieces as divide the length, at most `most`."""
    count = max(n for n in range(1, max(1, most) + 1) if length % n == 0)
    return tuple(range(length // count, length, length // count))


def kept_points(cut: Cut, layering: Layering, cuts: Sequence[int]) -> dict[int, list[int]]:
    """Returns the stage boundaries in each scan that was cut: cutting there alone makes one scan a stage.

    Args:
      cut: a fine cutting.
      layering: the layers of `cut.traced`.
      cuts: the first layer of each stage after the first.
    """
    stage = layering.stage_of(cuts)
    pieces = sorted((scan, start, stage[i]) for i, (scan, start, _) in cut.pieces.items() if i in stage)
    found: dict[int, list[int]] = {}
    for (before, _, last), (scan, start, own) in itertools.pairwise(pieces):
        if before == scan and last != own:
            found.setdefault(scan, []).append(start)
    return found
