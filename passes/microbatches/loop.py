"""Gradient accumulation without markers: a step rewritten as a loop over micro-batches that computes the same.

Problem. Pipelines, and steps whose activations do not fit, work on one micro-batch at a time. The user writes one step
on the whole batch, and its results must not change.

Mathematics. A micro-batch is a shard of the batch, in time instead of space. Let the batch be cut into b contiguous
blocks x_1 .. x_b, or, where that makes no difference but saves communication, into every b-th example (`builder`). The
factors of the operations (`factors`) say how the batch goes through the step, and the local forms (`local.forms`) give
the computation of one block, positions and random draws included. A value that loses the batch by a sum is
S = sum_t s(x_t): the s(x_t) are added up in a loop, and operations on S come after it. All constants are those of the
whole batch (a mean's 1/N is a constant of the step), so sums are exact up to the order of additions. Where single
examples would need S itself, S is computed from the batch before the loop if it depends on no parameters; else the step
has no exact form and is refused, unless `allow_inexact`: then b s(x_t) stands for S within micro-batch t, as in a step
on the micro-batch alone, and the mean over micro-batches is returned. Where there is no such S (contrastive losses,
capacities), each micro-batch is computed independently (`microbatches.independent`).

Source: DESIGN section 3; GPipe (Huang et al. 2019), section 2.2, for micro-batches and for batch norm within them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, MicrobatchError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.paths import format_path
from alpa_lite.ir.strategy import Rule
from alpa_lite.options import Pipeline
from alpa_lite.passes import factors
from alpa_lite.passes.microbatches import messages
from alpa_lite.passes.microbatches.analysis import Analysis, InexactStep
from alpa_lite.passes.microbatches.batch import (
    Cut,
    argument_dims,
    batch_arrays,
    bound_inputs,
    candidate_cuts,
    find_indivisible,
    inputs_of,
)
from alpa_lite.passes.microbatches.builder import PositionDependent
from alpa_lite.passes.microbatches.emission import WithoutLoop, emit
from alpa_lite.passes.microbatches.independent import IndependentLoop, TraceMismatch
from alpa_lite.passes.microbatches.states import StepStates
from alpa_lite.passes.microbatches.whole_batch import assign_whole_batch, has_reverse_pass, is_work_in_loop

Retrace = Callable[[Mapping[int, tuple[int, ...]]], Traced]
"""Traces the step again with other shapes for some flat arguments, by their numbers."""

Rules = Mapping[Any, Rule]

MAX_MICROBATCHES = 256
"""The most micro-batches of a pipeline that are tried unless a number is given."""

LARGE_CLUSTER, MAX_MICROBATCHES_LARGE = 1024, 512
"""On this many devices more micro-batches are tried: there are more stages, and the bubble is longer."""


@dataclass(frozen=True, eq=False)
class Accumulated:
    """A step as a loop over micro-batches.

    Attributes:
      traced: the step; arguments, outputs and state as before. The top block of its graph holds the operations on the
        whole batch, one scan over micro-batches, and the operations on its sums.
      scan: the index of that scan.
      num_microbatches: its length.
      notes: for the plan: the dims that are cut, operations on the whole batch before the loop, inexact results.
    """

    traced: Traced
    scan: int
    num_microbatches: int
    notes: tuple[str, ...]


def accumulate(
    traced: Traced,
    rules: Rules,
    num_microbatches: int,
    *,
    allow_inexact: bool = False,
    retrace: Retrace | None = None,
    strided: bool = False,
) -> Accumulated:
    """Rewrites a step as a loop over micro-batches.

    Args:
      traced: the step.
      rules: of its operations, by `Op.key`.
      num_microbatches: how many; it divides the batch. With 1 the loop is there too, and everything is exact.
      allow_inexact: take reductions over the batch that single examples need (batch norm) within the micro-batch, and
        where that does not help (contrastive losses), let each micro-batch be a batch of its own.
      retrace: traces the step on other shapes, for the latter; without it such steps are refused.
      strided: let a micro-batch have every m-th example where the step does not tell examples apart by their position,
        so that no device sends another its examples (`microbatches.builder`).

    Returns:
      The step with the same arguments and results.

    Raises:
      MicrobatchError: if the batch does not divide, or the step has no exact form; it names operation and source line.
    """
    parts = num_microbatches
    if parts < 1:
        raise MicrobatchError(f"num_microbatches={parts}: give a positive number")
    if parts == 1:
        return _accumulate_in_one(traced, rules)
    refusals, retraced = [], []
    found: tuple[Analysis, Cut] | None = None
    for cut in candidate_cuts(traced, parts):
        try:
            analysis, refusal = _analyse(traced, rules, parts, cut, allow_inexact), None
        except MicrobatchError as error:
            analysis, refusal = None, error
        if allow_inexact and (analysis is None or analysis.local_reductions):
            try:
                retraced.append((cut, _retrace_small(traced, parts, cut, retrace)))
            except MicrobatchError as error:
                analysis, refusal = None, error
        if analysis is None:
            refusals.append(refusal)
            continue
        if found is None or _is_better(analysis, found[0]):
            found = analysis, cut
        if not analysis.local_reductions and all(dim == 0 for dim in cut.dims.values()):
            break
    if found is not None:
        return _accumulate_exactly(traced, *found, strided)
    for cut, small in retraced:
        if small is not None:
            return _accumulate_independently(traced, small, parts, cut, refusals[0])
    raise find_indivisible(traced, parts) or messages.add_guessed_batch(refusals[0], traced)


def _accumulate_exactly(traced: Traced, analysis: Analysis, cut: Cut, strided: bool) -> Accumulated:
    """Returns the step in micro-batches whose sums are those of the batch, but for reductions that are local."""
    parts, is_strided = analysis.parts, strided and not analysis.local_reductions
    try:
        try:
            graph, scan = emit(analysis, strided=is_strided)
        except PositionDependent:
            is_strided = False
            graph, scan = emit(analysis)
    except WithoutLoop as error:
        raise messages.empty_loop_error(analysis, error) from error
    notes = [messages.cut_note(traced, parts, cut), *messages.notes_on_analysis(traced, analysis)]
    if is_strided:
        sizes = {traced.graph.values[value].shape[dim] for value, dim in cut.dims.items()}
        unit = "examples" if len(sizes) == 1 else "groups of examples"
        notes.append(f"micro-batch t has the {unit} t, t + {parts}, t + {2 * parts}, .., so that cutting moves no data")
    return Accumulated(replace(traced, graph=graph), scan, parts, tuple(notes))


def _accumulate_in_one(traced: Traced, rules: Rules) -> Accumulated:
    """Returns the step as a loop over one micro-batch.

    Raises:
      MicrobatchError: the step does nothing that could be in a loop.
    """
    try:
        graph, scan = emit(_analyse_whole_batch(traced, rules))
    except WithoutLoop as error:
        raise MicrobatchError(f"num_microbatches=1: {error}; use one mesh (Sharded())") from error
    batch = batch_arrays(traced)
    sizes = {item.shape[0] for item in batch}
    note = "1 micro-batch: the whole batch"
    if len(sizes) == 1:
        note = messages.cut_note(traced, 1, Cut(min(sizes), {item.value: 0 for item in batch}))
    return Accumulated(replace(traced, graph=graph), scan, 1, (note,))


def _analyse_whole_batch(traced: Traced, rules: Rules) -> StepStates:
    """The states and roles of a step in one micro-batch, in which no operation needs a form for a part of the batch.

    Where JAX has not marked a reverse pass, the way in which the batch can be cut tells where the update begins.
    """
    dims = {item.value: 0 for item in batch_arrays(traced)}
    if dims and not has_reverse_pass(traced.graph):
        for cut in candidate_cuts(traced, 1):
            with contextlib.suppress(MicrobatchError):
                analysis = _analyse(traced, rules, 1, cut, False)
                if is_work_in_loop(analysis):
                    return analysis
    scalars = {v for argument, v in inputs_of(traced) if argument.role == "batch" and v not in dims}
    return assign_whole_batch(traced.graph, rules, dims, bound_inputs(traced), scalars)


_SHAPE_ERRORS = (AlpaLiteError, TypeError, ValueError, AssertionError, IndexError, ArithmeticError)
"""Exceptions of a function that does not take its arguments' shapes; other errors are not explained here."""


def _retrace_small(traced: Traced, parts: int, cut: Cut, retrace: Retrace | None) -> Traced | None:
    """Returns the step on one micro-batch; None if nothing can trace it.

    Raises:
      MicrobatchError: it is not a step there, as where the dim that is cut is one of the model's.
      Exception: of the user's function, for other reasons than shapes, with a note that says when.
    """
    if retrace is None:
        return None
    shapes = {}
    for number, dim in argument_dims(traced, cut.dims).items():
        shape = list(traced.graph.values[traced.graph.block.inputs[number]].shape)
        shape[dim] //= parts
        shapes[number] = tuple(shape)
    try:
        return retrace(shapes)
    except Exception as error:
        number = min(shapes)
        where = f"{format_path(traced.arguments[number].path)} has shape {list(shapes[number])}"
        if not isinstance(error, _SHAPE_ERRORS):
            error.add_note(f"This was raised when the step was traced on one micro-batch of {parts}, in which {where}.")
            raise
        raise MicrobatchError(
            f"num_microbatches={parts}: the step cannot be traced on one micro-batch, in which {where}: {error}; "
            "use num_microbatches=1"
        ) from error


def _accumulate_independently(
    traced: Traced, small: Traced, parts: int, cut: Cut, refusal: MicrobatchError
) -> Accumulated:
    """Returns the step in micro-batches that are batches of their own.

    Raises:
      MicrobatchError: the step does something else on one of them.
    """
    states = _analyse_whole_batch(small, factors.rules_of(small.graph.ops(), small.graph.values))
    update = {op.index for op in small.graph.block.ops if states.is_update(op)}
    try:
        loop = IndependentLoop(traced, small, argument_dims(traced, cut.dims), parts, update)
        graph, scan = emit(loop.states)
    except (TraceMismatch, WithoutLoop) as error:
        raise MicrobatchError(
            f"{refusal}; nor can each micro-batch be computed independently: {error}; use num_microbatches=1"
        ) from error
    notes = (messages.cut_note(traced, parts, cut), *loop.notes(), f"the reason: {refusal}")
    return Accumulated(replace(traced, graph=graph), scan, parts, notes)


def _is_better(new: Analysis, old: Analysis) -> bool:
    """Whether a choice of the batch beats an earlier one: more exact, unless it leaves the work out of the loop."""
    if bool(new.local_reductions) != bool(old.local_reductions):
        return new.work > old.work // 2 if old.local_reductions else new.work // 2 > old.work
    return new.work > old.work


def _analyse(traced: Traced, rules: Rules, parts: int, cut: Cut, allow_inexact: bool) -> Analysis:
    """Returns the analysis of a step, with reductions within the micro-batch where needed and allowed."""
    may_be_local = allow_inexact or parts == 1
    try:
        found = Analysis(traced.graph, rules, parts, cut.dims, bound_inputs(traced), may_be_local)
        if not found.has_loop:  # nothing may be read ahead of the loop
            found = Analysis(traced.graph, rules, parts, cut.dims, traced.graph.block.inputs, may_be_local)
        return found
    except InexactStep as refused:
        raise messages.refusal(refused, parts, allow_inexact, traced.graph) from None


def batch_dims(traced: Traced, rules: Rules, num_microbatches: int) -> dict[str, int] | None:
    """Returns the dim of each batch argument, by path, along which a step is cut exactly; None if it cannot be.

    Cheaper than `accumulate`: nothing is rewritten. One micro-batch is the batch, which always can be.
    """
    try:
        cuts = candidate_cuts(traced, num_microbatches)
    except MicrobatchError:
        return {} if num_microbatches == 1 else None
    for cut in cuts:
        with contextlib.suppress(MicrobatchError):
            if num_microbatches > 1:
                _analyse(traced, rules, num_microbatches, cut, False)
            return {traced.arguments[number].path: dim for number, dim in argument_dims(traced, cut.dims).items()}
    return {} if num_microbatches == 1 else None


def candidate_numbers(traced: Traced, rules: Mapping[Any, Rule], cluster: Cluster, method: Pipeline) -> list[int]:
    """Powers of two that the batch divides into, exactly, and above them its size over powers of two, rising.

    The latter leave a power of two of examples: a batch of 1600 is cut into 64 parts of 25, or into 100 of 16, which
    more devices can share. A step that can be cut into a number of parts can be cut into each of its divisors.

    Raises:
      MicrobatchError: there is none, not even one.
    """
    limit = MAX_MICROBATCHES_LARGE if cluster.num_devices >= LARGE_CLUSTER else MAX_MICROBATCHES
    most = min(limit, 8 * max(2, method.num_stages or cluster.num_devices))
    powers = [1 << i for i in range(most.bit_length())]
    sizes = {item.shape[0] for item in batch_arrays(traced)}
    if len(sizes) == 1:  # one analysis, of the least common multiple, may cover all numbers
        (size,) = sizes
        fitting = [count for count in powers if size % count == 0]
        finer = _halvings(size, fitting[-1], most)
        cut = batch_dims(traced, rules, math.lcm(fitting[-1], finer[-1])) if finer else None
        if cut and not any(cut.values()):
            return [*fitting, *finer]
    cut = None
    while powers and (cut := batch_dims(traced, rules, powers[-1])) is None:
        powers.pop()
    if cut is None:
        raise MicrobatchError("the step cannot be written as a loop over micro-batches; use one mesh (Sharded())")
    shapes = {argument.path: traced.graph.values[value].shape for argument, value in inputs_of(traced)}
    finer = _halvings(max(shapes[path][dim] for path, dim in cut.items()), powers[-1], most) if cut else []
    while finer and batch_dims(traced, rules, finer[-1]) is None:
        finer.pop()
    return [*powers, *finer]


def _halvings(size: int, largest: int, most: int) -> list[int]:
    """The size over powers of two, rising: those above the largest power of two of parts and not above the most."""
    found = [size >> i for i in range(size.bit_length()) if size % (1 << i) == 0]
    return sorted(count for count in found if 2 * largest <= most and largest < count <= most)


def state_bytes(traced: Traced) -> int:
    """Returns bytes of the training state and of frozen weights, whole."""
    return sum(traced.graph.values[value].nbytes for argument, value in inputs_of(traced) if argument.is_resident)
