"""Errors and notes about micro-batches: refusals that name the operation, and how inexact results are combined."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.errors import MicrobatchError
from alpa_lite.ir.graph import Argument, Block, Graph, Op, Traced, walk
from alpa_lite.ir.paths import format_path, tokens
from alpa_lite.passes.ir import flow
from alpa_lite.passes.microbatches.analysis import Analysis, InexactStep
from alpa_lite.passes.microbatches.batch import Cut, argument_dims
from alpa_lite.passes.microbatches.lattice import AFTER
from alpa_lite.passes.microbatches.states import StepStates
from alpa_lite.passes.microbatches.transfer import ONCE

AVERAGED = "averaged over micro-batches"
SUMMED = "summed over micro-batches"
LAST = "taken from the last micro-batch"
JOINED = "computed within each micro-batch"

COMBINED = (AVERAGED, LAST, SUMMED, JOINED)
"""A leaf that several of these have a part in is noted under the first."""

MAX_NAMED = 32
"""Leaves that one note names; of more, it names the first and the number of the others."""


def refusal(refused: InexactStep, parts: int, allow_inexact: bool, graph: Graph) -> MicrobatchError:
    """Returns the error for a step that has no exact form: the operation, the reason, and a remedy."""
    failure = refused.failure
    reason = "it works across the examples of the batch" if failure is None else failure.text
    op = refused.op if failure is None else failure.op
    text = f"num_microbatches={parts}: {name_op(op, graph)} has no exact form in a micro-batch: {reason}"
    if failure is not None and failure.text == ONCE and refused.op.has_effects:
        return MicrobatchError(
            f"{text}, and {name_op(refused.op, graph)} runs it in each micro-batch; use num_microbatches=1, or move "
            "the callback out of it"
        )
    if op is not refused.op:
        text += f", and {name_op(refused.op, graph)} needs its result for single examples"
    if allow_inexact:
        return MicrobatchError(f"{text}; use num_microbatches=1")
    within = "compute it within each micro-batch" if refused.roots else "compute each micro-batch independently"
    return MicrobatchError(f"{text}; use num_microbatches=1, or allow_inexact=True to {within}")


def empty_loop_error(analysis: Analysis, error: Exception) -> MicrobatchError:
    """The error for a step of which nothing is in the loop: all its readers of the batch come before or after it."""
    failures = analysis.failures
    failure = next((failures[i] for i in sorted(failures, key=lambda i: i not in analysis.ops_ahead)), None)
    if failure is not None:
        return refusal(InexactStep(failure.op, failure, frozenset()), analysis.parts, True, analysis.graph)
    return MicrobatchError(f"num_microbatches={analysis.parts}: {error}; use num_microbatches=1")


def add_guessed_batch(error: MicrobatchError, traced: Traced) -> MicrobatchError:
    """A refusal that names the arguments that were taken as the batch, if several were: one may be a parameter."""
    names = {tokens(argument.path)[0] for argument in traced.arguments if argument.role == "batch"}
    if len(names) < 2 or traced.has_named_batch:
        return error
    return MicrobatchError(
        f"{error}. The arguments {', '.join(sorted(names))} were taken as the batch; if one of them is not, name "
        "the batch with batch_argnums=(i,) or batch_argnames=(name,)"
    )


def name_op(op: Op, graph: Graph) -> str:
    """Returns the operation and its source line; where JAX has lost that, the line of its operands."""
    where = _jax.describe_location(op.source)
    if not _jax.source_line(op.source):
        makers = {value: maker for maker in graph.ops() for value in maker.results}
        near = [op]
        for reader in near:
            near += [m for a in reader.operands if isinstance(a, int) and (m := makers.get(a)) and m not in near]
            line = _jax.source_line(reader.source)
            if line:
                where = f"{where} after {line}".strip()
                break
    return f"{op.name} at {where}" if where else op.name


def cut_note(traced: Traced, parts: int, cut: Cut) -> str:
    """Returns the note on how the batch is cut."""
    sizes = {}
    for number, dim in argument_dims(traced, cut.dims).items():
        shape = traced.graph.values[traced.graph.block.inputs[number]].shape
        sizes[f"dim {dim} of {format_path(traced.arguments[number].path)}"] = shape[dim]
    if set(sizes.values()) == {cut.size}:
        number = "1 micro-batch" if parts == 1 else f"{parts} micro-batches"
        return f"{number} of {cut.size // parts} examples: {', '.join(sizes)}"
    each = ", ".join(f"{dim} ({whole // parts} examples)" for dim, whole in sizes.items())
    return f"{parts} micro-batches: {each}"


def notes_on_analysis(traced: Traced, analysis: Analysis) -> list[str]:
    """Notes on the operations that are computed for the whole batch, and on inexact ones."""
    graph = traced.graph
    ahead = dict.fromkeys(name_op(op, graph) for op in analysis.ops_ahead.values())
    notes = [f"computed once for the whole batch, before the micro-batches: {name}" for name in ahead]
    if analysis.local_reductions:
        ops = {op.index: op for op in graph.ops()}
        inexact = dict.fromkeys(name_op(ops[index], graph) for index in sorted(analysis.local_reductions))
        notes += [f"inexact, computed within each micro-batch: {name}" for name in inexact]
        own = [
            op
            for op in graph.block.ops
            if any(o.index in analysis.local_reductions for o in walk(Block((), (op,), ())))
        ]
        notes += notes_on_leaves(traced.outputs, analysis, own)
    return notes


def notes_on_leaves(outputs: Sequence[Argument], states: StepStates, inexact: Sequence[Op]) -> list[str]:
    """Returns a note for each of `COMBINED` that leaves of the result have.

    Args:
      outputs: the leaves.
      states: of the step.
      inexact: the operations of the loop whose results differ from those on the whole batch.
    """
    kinds, notes = _combined_leaves(outputs, states, inexact), []
    for kind in COMBINED:
        paths = [format_path(path) for path, one in kinds.items() if one == kind]
        more = len(paths) - MAX_NAMED
        if paths:
            notes.append(f"{kind}: {', '.join(paths[:MAX_NAMED])}" + (f" and {more} others" if more > 0 else ""))
    return notes


def _combined_leaves(outputs: Sequence[Argument], states: StepStates, own: Sequence[Op]) -> dict[str, str]:
    """How micro-batches are combined into each leaf of the result that depends on an inexact operation, by path."""
    block, state = states.graph.block, states.state
    inexact = flow.find_dependents(block.ops, [value for op in own for value in op.results])
    makers = flow.producers(block.ops)

    def kind(value: int) -> str:
        if state[value].kind == "local":
            return AVERAGED if jnp.issubdtype(states.values[value].dtype, jnp.inexact) else LAST
        return {"partial": SUMMED, "sliced": JOINED}.get(state[value].kind, "")

    def operands_after(value: int) -> list[int]:
        return [r for r in makers[value].reads if r in inexact] if state[value] == AFTER else []

    found = {}
    for output, atom in zip(outputs, block.outputs, strict=True):
        if isinstance(atom, int) and atom in inexact:
            kinds = {kind(value) for value in flow.reach([atom], operands_after)}
            found[output.path] = next((one for one in COMBINED if one in kinds), "")
    return found
