"""Gradient accumulation without markers: a step rewritten as a loop over micro-batches that computes the same.

Problem. Pipelines, and steps whose activations do not fit, work on one micro-batch at a time. The user writes one step
on the whole batch, and what it computes must not change.

Mathematics. A micro-batch is a shard of the batch, in time instead of space. Let the batch be cut into b contiguous
blocks x_1 .. x_b, or, where that makes no difference but saves communication, into every b-th example (`strides`). The
factors of the operations (`factors`) say how the batch goes through the step, and the local forms (`local.forms`) what
one block needs, positions and random draws included. A value that loses the batch by a sum is S = sum_t s(x_t): the
s(x_t) are added up in a loop, and what depends on S comes after it. All constants are those of the whole batch (a
mean's 1/N is a constant of the step), so sums are exact up to the order of additions. Where single examples would need
S itself, S is computed from the batch before the loop if it depends on no parameters; else the step has no exact form
and is refused, unless `allow_inexact`: then b s(x_t) stands for S within micro-batch t, which is what a step on the
micro-batch alone would use, and what is returned of it is the mean over micro-batches. Where there is no such S
(contrastive losses, capacities), each micro-batch is computed independently (`microbatches.independent`).

Source: DESIGN section 3; GPipe (Huang et al. 2019), section 2.2, for micro-batches and for batch norm within them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from alpa_lite import _jax
from alpa_lite.errors import AlpaLiteError, MicrobatchError
from alpa_lite.graph import Graph, Op, Traced, walk
from alpa_lite.passes import factors
from alpa_lite.passes.ir import flow
from alpa_lite.passes.microbatches import independent, single
from alpa_lite.passes.microbatches.analysis import Analysis, Refused
from alpa_lite.passes.microbatches.emission import emit
from alpa_lite.passes.microbatches.results import AVERAGED, COMBINED, JOINED, LAST, SUMMED, notes_on
from alpa_lite.passes.microbatches.roles import ONCE
from alpa_lite.passes.microbatches.states import AFTER
from alpa_lite.passes.microbatches.strides import Ordered, Strides
from alpa_lite.paths import shown, tokens
from alpa_lite.strategy import Rule

Retrace = Callable[[Mapping[int, tuple[int, ...]]], Traced]
"""Traces the step again with other shapes for some flat arguments, by their numbers."""


@dataclass(frozen=True, eq=False)
class Accumulated:
    """A step as a loop over micro-batches.

    Attributes:
      traced: the step; arguments, outputs and state as before. The top block of its graph holds what is computed for
        the whole batch, one scan over micro-batches, and what depends on its sums.
      scan: the index of that scan.
      num_microbatches: its length.
      notes: for the plan: which dims were cut, what is computed for the whole batch first, what is inexact.
    """

    traced: Traced
    scan: int
    num_microbatches: int
    notes: tuple[str, ...]


def accumulate(
    traced: Traced,
    rules: Mapping[Any, Rule],
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
        so that no device sends another its examples (`microbatches.strides`).

    Returns:
      The step with the same arguments and results.

    Raises:
      MicrobatchError: if the batch does not divide, or the step has no exact form; it names operation and source line.
    """
    if num_microbatches < 1:
        raise MicrobatchError(f"num_microbatches={num_microbatches}: give a positive number")
    if num_microbatches == 1:
        return _in_one(traced, rules)
    refusals, smaller = [], []
    found: tuple[Analysis, tuple[int, dict[int, int]]] | None = None
    for candidate in _candidates(traced, num_microbatches):
        analysis, refusal = None, None
        try:
            analysis = _analysed(traced, rules, num_microbatches, candidate[1], allow_inexact)
        except MicrobatchError as error:
            refusal = error
        if allow_inexact and (analysis is None or analysis.local):
            try:
                smaller.append((candidate, _smaller(traced, num_microbatches, candidate[1], retrace)))
            except MicrobatchError as error:
                analysis, refusal = None, error
        if analysis is None:
            refusals.append(refusal)
            continue
        if found is None or _better(analysis, found[0]):
            found = analysis, candidate
        if not analysis.local and all(dim == 0 for dim in candidate[1].values()):
            break
    if found is None:
        for (size, dims), small in smaller:
            if small is not None:
                return _alone(traced, rules, num_microbatches, size, dims, small, refusals[0])
        raise _undivided(traced, num_microbatches) or _refused_guess(refusals[0], traced)
    analysis, (size, dims) = found
    try:
        graph, scan, is_strided = _emitted(analysis, strided)
    except ValueError as error:  # all that reads the batch comes before or after the loop, as far as anything does
        failures = [*analysis.unfit, *(cause for cause in analysis.cause.values() if cause is not None)]
        if failures:
            refused = Refused(failures[0].op, failures[0], frozenset())
            raise _refusal(refused, num_microbatches, True, traced.graph) from error
        raise MicrobatchError(f"num_microbatches={num_microbatches}: {error}; use num_microbatches=1") from error
    notes = _notes(traced, analysis, size, dims)
    if is_strided:
        m = num_microbatches
        notes += (f"micro-batch t has the examples t, t + {m}, t + {2 * m}, .., so that cutting moves no data",)
    return Accumulated(replace(traced, graph=graph), scan, num_microbatches, notes)


def _in_one(traced: Traced, rules: Mapping[Any, Rule]) -> Accumulated:
    """The step as a loop over one micro-batch, in which no operation needs a form for a part of the batch.

    How a batch is cut says where the update begins of a step whose reverse pass JAX has not marked.

    Raises:
      MicrobatchError: the step does nothing that could be in a loop.
    """
    batch = _batch(traced)
    dims = {value: 0 for _, value, _ in batch}
    analysis: Analysis | None = None
    if batch and not single.has_reverse_pass(traced.graph):
        for _, cut in _candidates(traced, 1):
            with contextlib.suppress(MicrobatchError):
                found = _analysed(traced, rules, 1, cut, False)
                if single.holds_the_work(found):
                    analysis = found
                    break
    if analysis is None:
        scalars = {
            value
            for argument, value in zip(traced.arguments, traced.graph.block.inputs, strict=False)
            if argument.role == "batch" and value not in dims
        }
        analysis = single.Single(traced.graph, rules, dims, _bound(traced), scalars)
    try:
        graph, scan = emit(analysis)
    except ValueError as error:
        raise MicrobatchError(f"num_microbatches=1: {error}; use one mesh (Sharded())") from error
    sizes = {shape[0] for *_, shape in batch}
    note = _cut_note(traced, 1, min(sizes), dims) if len(sizes) == 1 else "1 micro-batch: the whole batch"
    return Accumulated(replace(traced, graph=graph), scan, 1, (note,))


def _emitted(analysis: Analysis, strided: bool) -> tuple[Graph, int, bool]:
    """As `emit`, with micro-batches of every m-th example if that is asked for and possible; and whether it was."""
    if strided and not analysis.local:
        try:
            return *emit(analysis, Strides(analysis)), True
        except Ordered:
            pass
    return *emit(analysis), False


_OF_SHAPES = (AlpaLiteError, TypeError, ValueError, AssertionError, IndexError, ArithmeticError)
"""What a function raises that does not take its arguments' shapes; other errors are not for us to explain."""


def _smaller(traced: Traced, parts: int, dims: Mapping[int, int], retrace: Retrace | None) -> Traced | None:
    """The step on one micro-batch; None if nothing can trace it.

    Raises:
      MicrobatchError: it is no step there, as where the dim that is cut is one of the model's.
      Exception: what the user's function raises for other reasons than shapes, with a note that says when.
    """
    if retrace is None:
        return None
    shapes = {}
    for number, dim in _numbered(traced, dims).items():
        shape = list(traced.graph.values[traced.graph.block.inputs[number]].shape)
        shape[dim] //= parts
        shapes[number] = tuple(shape)
    try:
        return retrace(shapes)
    except Exception as error:
        number = min(shapes)
        where = f"{shown(traced.arguments[number].path)} has shape {list(shapes[number])}"
        if not isinstance(error, _OF_SHAPES):
            error.add_note(f"This was raised when the step was traced on one micro-batch of {parts}, in which {where}.")
            raise
        raise MicrobatchError(
            f"num_microbatches={parts}: the step cannot be traced on one micro-batch, in which {where}: {error}; "
            "use num_microbatches=1"
        ) from error


def _alone(
    traced: Traced,
    rules: Mapping[Any, Rule],
    parts: int,
    size: int,
    dims: Mapping[int, int],
    small: Traced,
    refusal: MicrobatchError,
) -> Accumulated:
    """The step in micro-batches that are batches of their own.

    Raises:
      MicrobatchError: the step does something else on one of them.
    """
    by_number = _numbered(traced, dims)
    small_rules = factors.rules_of(small.graph.ops(), small.graph.values)
    try:
        graph, scan, notes = independent.loop(
            *_loop_of_one(traced, rules, by_number), *_loop_of_one(small, small_rules, by_number), by_number, parts
        )
    except independent.Unlike as error:
        raise MicrobatchError(f"{refusal}; nor can each micro-batch be computed independently: {error}") from error
    notes = (_cut_note(traced, parts, size, dims), *notes, f"the reason: {refusal}")
    return Accumulated(replace(traced, graph=graph), scan, parts, notes)


def _loop_of_one(traced: Traced, rules: Mapping[Any, Rule], by_number: Mapping[int, int]) -> tuple[Traced, int]:
    """A step as a loop over one micro-batch, which is exact, and the index of its scan."""
    dims = {traced.graph.block.inputs[number]: dim for number, dim in by_number.items()}
    graph, scan = emit(_analysed(traced, rules, 1, dims, False))
    return replace(traced, graph=graph), scan


def _better(new: Analysis, old: Analysis) -> bool:
    """Whether a choice of the batch beats an earlier one: more exact, unless it leaves the work out of the loop."""
    if bool(new.local) != bool(old.local):
        return new.work > old.work // 2 if old.local else new.work // 2 > old.work
    return new.work > old.work


def batch_dims(traced: Traced, rules: Mapping[Any, Rule], num_microbatches: int) -> dict[str, int] | None:
    """The dim of each batch argument, by path, along which a step is cut exactly; None if it cannot be.

    Cheaper than `accumulate`: nothing is rewritten. One micro-batch is the batch, which always can be.
    """
    try:
        for _, dims in _candidates(traced, num_microbatches):
            try:
                if num_microbatches > 1:
                    _analysed(traced, rules, num_microbatches, dims, False)
            except MicrobatchError:
                continue
            return {traced.arguments[number].path: dim for number, dim in _numbered(traced, dims).items()}
    except MicrobatchError:
        pass
    return {} if num_microbatches == 1 else None


def _candidates(traced: Traced, parts: int) -> list[tuple[int, dict[int, int]]]:
    """(size of the batch, input -> dim) in order of preference: dim 0 of every batch argument first.

    The size is one that every argument of the batch has. Where there is none, there may be several batches (of points
    within and points on the edge), each cut along its own dim 0; or only the size that most have is one of a batch, and
    the others (class weights) are whole in every micro-batch.
    """
    batch = [item for item in _batch(traced) if math.prod(item[2]) > 1]
    if not batch:
        raise MicrobatchError(
            f"num_microbatches={parts}: no argument of the step is a batch of arrays; name it with batch_argnums=..."
        )
    sizes = _sizes([shape for *_, shape in batch])
    fits = [size for size in sizes if size % parts == 0]
    leading = {shape[0] for *_, shape in batch}
    several = []  # batches
    if len(leading) > 1 and all(size % parts == 0 for size in leading):
        several = [(batch[0][2][0], {value: 0 for _, value, _ in batch})]
    if not fits and not several and not any(size % parts == 0 for size in leading if not traced.batch_named):
        path, _, shape = next(item for item in batch if sizes[0] in item[2])
        raise _indivisible(path, shape, sizes[0], parts)
    out = []
    for size in fits:
        have = [(value, [d for d, n in enumerate(shape) if n == size]) for _, value, shape in batch if size in shape]
        common = set.intersection(*(set(dims) for _, dims in have))
        out.append((size, {value: min(common) if common else dims[0] for value, dims in have}))
    whole = any(size not in shape for size in fits for *_, shape in batch)  # these would not be cut
    out = [*several, *out] if whole else [*out, *several]
    if len(leading) > 1 and not traced.batch_named:  # the arguments of one size may be all that is a batch
        alone = [(size, {v: 0 for _, v, shape in batch if shape[0] == size}) for size in leading if size % parts == 0]
        out += [one for one in sorted(alone, key=lambda one: -len(one[1])) if one not in out]
    return out


def _batch(traced: Traced) -> list[tuple[str, int, tuple[int, ...]]]:
    """Path, value and shape of each argument of the batch that is no scalar."""
    values = traced.graph.values
    return [
        (shown(argument.path), value, values[value].shape)
        for argument, value in zip(traced.arguments, traced.graph.block.inputs, strict=False)
        if argument.role == "batch" and values[value].shape
    ]


def _undivided(traced: Traced, parts: int) -> MicrobatchError | None:
    """That the first dim of the batch does not divide: what is wrong where cutting another one was refused."""
    batch = _batch(traced)
    if len({shape[0] for *_, shape in batch}) != 1:
        return None
    path, _, shape = batch[-1]
    return _indivisible(path, shape, shape[0], parts) if shape[0] % parts else None


def _indivisible(path: str, shape: Sequence[int], size: int, parts: int) -> MicrobatchError:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return MicrobatchError(
        f"num_microbatches={parts}: the batch argument {path} of shape {list(shape)} holds {size} examples, "
        f"which {parts} micro-batches do not divide; use one of {divisors}, or another batch size"
    )


def _sizes(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """The sizes that the batch may have: only that of every dim 0, else those that all have, else the commonest."""
    first = Counter(shape[0] for shape in shapes)
    if len(first) == 1:
        size = shapes[0][0]
        others = set.intersection(*(set(shape[1:]) for shape in shapes)) - {1, size}
        return [size, *sorted(others, reverse=True)]
    everywhere = set.intersection(*(set(shape) for shape in shapes)) - {1}
    if everywhere:
        return sorted(everywhere, key=lambda size: (first[size], size), reverse=True)
    return [first.most_common(1)[0][0]]


def _analysed(
    traced: Traced, rules: Mapping[Any, Rule], parts: int, dims: Mapping[int, int], allow_inexact: bool
) -> Analysis:
    """The analysis of a step, reductions that must be so taken within the micro-batch if that is allowed."""
    may_be_local = allow_inexact or parts == 1
    try:
        found = Analysis(traced.graph, rules, parts, dims, _bound(traced), may_be_local=may_be_local)
        if not found.has_loop:  # nothing may be read ahead of the loop
            found = Analysis(traced.graph, rules, parts, dims, {*traced.graph.block.inputs}, may_be_local=may_be_local)
        return found
    except Refused as refused:
        raise _refusal(refused, parts, allow_inexact, traced.graph) from None


def _bound(traced: Traced) -> set[int]:
    """Arguments that are floating-point state; without state, weights: they must not be read ahead of the loop."""
    values = traced.graph.values
    kept = "state" if traced.state else "frozen"
    return {
        value
        for argument, value in zip(traced.arguments, traced.graph.block.inputs, strict=False)
        if argument.role == kept and jnp.issubdtype(values[value].dtype, jnp.inexact)
    }


def _refusal(refused: Refused, parts: int, allow_inexact: bool, graph: Graph) -> MicrobatchError:
    failure = refused.failure
    reason = "it works across the examples of the batch" if failure is None else failure.text
    op = refused.op if failure is None else failure.op
    text = f"num_microbatches={parts}: {_named(op, graph)} has no exact form in a micro-batch: {reason}"
    if failure is not None and failure.text == ONCE and refused.op.has_effects:
        return MicrobatchError(
            f"{text}, and {_named(refused.op, graph)} runs it in each micro-batch; use num_microbatches=1, or move "
            "the callback out of it"
        )
    if op is not refused.op:
        text += f", and {_named(refused.op, graph)} needs its result for single examples"
    if allow_inexact:
        return MicrobatchError(f"{text}; use num_microbatches=1")
    within = "compute it within each micro-batch" if refused.roots else "compute each micro-batch independently"
    return MicrobatchError(f"{text}; use num_microbatches=1, or allow_inexact=True to {within}")


def _refused_guess(refusal: MicrobatchError, traced: Traced) -> MicrobatchError:
    """The refusal; where several arguments were taken for the batch, they are named, since one may be a parameter."""
    names = {tokens(argument.path)[0] for argument in traced.arguments if argument.role == "batch"}
    if len(names) < 2 or traced.batch_named:
        return refusal
    return MicrobatchError(
        f"{refusal}. The arguments {', '.join(sorted(names))} were taken as the batch; if one of them is not, name "
        "the batch with "
        "batch_argnums=(i,) or batch_argnames=(name,)"
    )


def _named(op: Op, graph: Graph) -> str:
    """The operation and where it is; where JAX has lost the source line, that of what it reads."""
    where = _jax.where(op.source)
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


def _numbered(traced: Traced, dims: Mapping[int, int]) -> dict[int, int]:
    """Argument number -> dim, from value -> dim."""
    number = {value: i for i, value in enumerate(traced.graph.block.inputs)}
    return {number[value]: dim for value, dim in dims.items()}


def _cut_note(traced: Traced, parts: int, size: int, dims: Mapping[int, int]) -> str:
    shape_of = [traced.graph.values[value].shape for value in traced.graph.block.inputs]
    cut = {
        f"dim {dim} of {shown(traced.arguments[i].path)}": shape_of[i][dim]
        for i, dim in _numbered(traced, dims).items()
    }
    if set(cut.values()) == {size}:
        number = "1 micro-batch" if parts == 1 else f"{parts} micro-batches"
        return f"{number} of {size // parts} examples: {', '.join(cut)}"
    each = ", ".join(f"{what} ({whole // parts} examples)" for what, whole in cut.items())
    return f"{parts} micro-batches: {each}"


def _combined(traced: Traced, analysis: Analysis) -> dict[str, str]:
    """How micro-batches are combined into each leaf of the result that depends on a local reduction, by path."""
    ops = traced.graph.block.ops
    own = [op for op in ops if any(o.index in analysis.local for o in (op, *_nested(op)))]
    inexact = flow.made_of(ops, [value for op in own for value in op.results])
    makers = flow.producers(ops)

    def kind(value: int) -> str:
        state, dtype = analysis.state[value].kind, traced.graph.values[value].dtype
        if state == "local":
            return AVERAGED if jnp.issubdtype(dtype, jnp.inexact) else LAST
        return {"partial": SUMMED, "sliced": JOINED}.get(state, "")

    found = {}
    for output, atom in zip(traced.outputs, traced.graph.block.outputs, strict=True):
        if isinstance(atom, int) and atom in inexact:
            after = lambda v: [r for r in makers[v].reads if r in inexact] if analysis.state[v] == AFTER else []  # noqa: E731
            kinds = {kind(value) for value in flow.reach([atom], after)}
            found[output.path] = next((one for one in COMBINED if one in kinds), "")
    return found


def _nested(op: Op) -> list[Op]:
    return [inner for body in op.bodies for inner in walk(body)]


def _notes(traced: Traced, analysis: Analysis, size: int, dims: Mapping[int, int]) -> tuple[str, ...]:
    notes = [_cut_note(traced, analysis.parts, size, dims)]
    ahead = dict.fromkeys(_named(op, traced.graph) for op in analysis.ahead)
    notes += [f"computed once for the whole batch, before the micro-batches: {name}" for name in ahead]
    if analysis.parts > 1:
        inexact = dict.fromkeys(_named(analysis.sources[index], traced.graph) for index in sorted(analysis.local))
        notes += [f"inexact, computed within each micro-batch: {name}" for name in inexact]
        notes += notes_on(_combined(traced, analysis))
    return tuple(notes)
