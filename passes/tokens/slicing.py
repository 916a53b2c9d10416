"""A layered step over micro-batches, in slices of the sequence: which dims are the sequence, and whether slices help.

Problem. A user gives the number of tokens of each slice, and nothing else. Find the dims of the batch that are the
sequence, and write the step in slices; or report the operation that prevents it.

Answer. The sequence is a dim of the batch in addition to that of the examples. Each size that such dims have (tokens
may have one more than the model reads, for the labels) is tried, for all arguments that have it, then for each of them
by itself. The step is legal to slice if no product of the forward pass waits for a later slice. The step that is
written is correct in any case (`expansion`), so this decides about usefulness, not about correctness.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

from alpa_lite import _jax
from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Block, Op, Traced, walk
from alpa_lite.ir.paths import format_path
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes import factors
from alpa_lite.passes.blockwise import FunctionWriter
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import find_dependents
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import replace_body, replace_op
from alpa_lite.passes.layers import assignment
from alpa_lite.passes.layers.division import AssignedStep
from alpa_lite.passes.layers.types import Layering, Phases
from alpa_lite.passes.tokens import beyond, expansion, opening, states
from alpa_lite.passes.tracing.statics import Statics

_PRODUCTS = primitives.COMPUTE_INTENSIVE


def slice_sequence(step: AssignedStep, lengths: Sequence[int]) -> AssignedStep:
    """Returns a step that is cut into stages, in slices of the sequence: the same layers on the same stages.

    Args:
      lengths: tokens of each slice.

    Raises:
      OptionError: the step has no sequence of this many tokens; a token of it depends on later ones, and on which
        operation that depends.
    """
    layers, phases = _Slicer(step.layering, tuple(lengths)).slice()
    accumulated = replace(step.accumulated, traced=layers.traced, scan=layers.scan)
    return replace(
        step,
        accumulated=accumulated,
        layering=layers,
        assignment=replace(assignment.assign(layers, step.cuts), phases=Phases(phases, len(lengths))),
    )


class _Slicer:
    """The tables of one step."""

    def __init__(self, layers: Layering, lengths: tuple[int, ...]) -> None:
        self.layers, self.lengths = layers, lengths
        self.traced: Traced = layers.traced
        self.graph = self.traced.graph
        self.rewriter = FunctionWriter(self.graph, fold_empty=False)
        self.scan, self.view = layers.scan_op, ScanView(layers.scan_op)
        self.rules: dict[object, Rule] = {}
        top = self.graph.block.ops
        self.early = top[: top.index(self.scan)]
        self.values = self.rewriter.values
        inputs = self.graph.block.inputs
        self.constants = dict(zip(inputs[len(self.traced.arguments) :], self.graph.constants, strict=True))

    def _body_of(self, block: Block, free_ops: frozenset[int]) -> states.Body:
        """Returns a body in operations that slices cut, with its rules and knowledge."""
        block = opening.replace_by_operations(self.rewriter, block)
        forward = frozenset(op.index for op in block.ops if self.rewriter.origin(op.index) in self.layers.forward)
        new = [op for op in (*self.early, *walk(block)) if op.key not in self.rules]
        self.rules.update(factors.rules_of(new, self.values))
        ops = [*self.early, replace_body(self.scan, block)]
        known = beyond.derive_knowledge([*ops, *block.ops], self.rules, Statics(ops, self.values, self.constants))
        return states.Body(block, self.rules, self.values, known, forward, free_ops)

    def _without_loops(self, body: states.Body, sequence: Mapping[int, int]) -> tuple[states.Body, states.States]:
        """Returns the body once loops that do not run along the sequence are written out, and its states.

        Raises:
          OptionError: they would become too many operations.
        """
        found = self._states(body, sequence)
        while loops := [op for op in body.block.ops if found.roles[op.index].reason == states.ACROSS]:
            count = sum(map(opening.operations, loops))
            if count > opening.MOST:
                raise OptionError(
                    f"token_slices={list(self.lengths)}: the loop at {_where(loops[0])} does not run along the "
                    f"sequence, and loops like it would be {count:,} operations once written out, of at most "
                    f"{opening.MOST:,}; leave token_slices out"
                )
            flat, rows = opening.unroll_scans(self.rewriter, body.block, {op.index for op in loops})
            whole = {value for _, value in self.view.consts}
            whole |= {v for op in body.block.ops if op.index in body.free_ops for v in op.results}
            body = self._body_of(flat, body.free_ops | {index for index, stack in rows.items() if stack in whole})
            found = self._states(body, sequence)
        return body, found

    def slice(self) -> tuple[Layering, Mapping[int, int]]:
        """Returns the layers of the new step; and of each op of its body, by index, the phase."""
        reasons: list[str] = []
        whole = self._body_of(self.layers.body, self.layers.free_ops)
        for sequence in self._candidates():
            body, found = self._without_loops(whole, sequence)
            tokens = _tokens(found)
            fits = tokens == sum(self.lengths)
            products = [op for op in body.block.ops if op.index in body.forward and op.name in _PRODUCTS]
            if all(found.roles[op.index].kind == "whole" for op in products):  # then slices are of no use
                read = [op for op in products if not found.by_atom.keys().isdisjoint(op.operands)]
                reasons += [_waits(op, found.roles[op.index].reason or "it takes the whole sequence") for op in read]
                continue
            lengths = self.lengths if fits else (tokens // 2, tokens - tokens // 2)
            made = expansion.expand(self.rewriter, body, found, lengths)
            if any(late.op.name in _PRODUCTS for late in made.late):
                reasons.append(_waits(made.late[0].op, made.late[0].reason))
            elif fits:
                return self._step(body.free_ops - self.layers.free_ops, made)
            elif tokens:
                reasons.append(f"the sequence has {tokens} tokens, and {list(self.lengths)} are {sum(self.lengths)}")
        reasons.sort(key=lambda reason: "waits for" not in reason)
        why = reasons[0] if reasons else "no argument of the batch has a sequence that the model reads"
        raise OptionError(f"token_slices={list(self.lengths)}: {why}; leave token_slices out")

    # -- where the sequence is ------------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[dict[int, int]]:
        """Yields dims of the batch's arguments that may be the sequence, those of all arguments together first.

        That may be dim 0 where the batch is one example without a dim.
        """
        arguments = list(zip(self.graph.block.inputs, self.traced.arguments, strict=False))
        shapes = {v: self.values[v].shape for v, argument in arguments if argument.role == "batch"}
        total = sum(self.lengths)
        first = 0 if self.view.length == 1 and max(map(len, shapes.values()), default=0) == 1 else 1
        fits = {v: [d for d, n in enumerate(s) if d >= first and n in (total, total + 1)] for v, s in shapes.items()}
        every = {v: dims[0] for v, dims in fits.items() if dims}
        if every:
            yield every
        for value, dims in fits.items():
            for dim in dims:
                if {value: dim} != every:
                    yield {value: dim}
        if not every:  # to say what there is
            yield {v: first for v, shape in shapes.items() if len(shape) > first}

    def _states(self, body: states.Body, sequence: Mapping[int, int]) -> states.States:
        """Of a body, given the dims of the step's arguments."""
        outer = Block(self.graph.block.inputs, tuple(self.early), ())
        early = frozenset(op.index for op in self.early)
        above = states.States(states.Body(outer, self.rules, self.values, {}, early), sequence)
        inner = {v: above.by_atom[a].dim for a, v in self.view.consts if a in above.by_atom}
        inner |= {v: above.by_atom[a].dim - 1 for a, v in self.view.xs if a in above.by_atom and above.by_atom[a].dim}
        return states.States(body, inner)

    # -- the new step ---------------------------------------------------------------------------------------------

    def _step(self, cuts: Set[int], made: expansion.SlicedBlock) -> tuple[Layering, Mapping[int, int]]:
        """Returns the layers and phases of the new step; `cuts`: ops that take a row of a stacked parameter."""
        layers, slices, rewriter = self.layers, len(self.lengths), self.rewriter
        scan = replace_body(self.scan, made.block)
        result = rewriter.step(self.traced, replace_op(self.graph.block, self.scan, [scan]), self.scan.index)
        parts: dict[int, list[int]] = defaultdict(list)
        place = rewriter.place
        for op in made.block.ops:
            if op.index in place:
                parts[rewriter.origin(made.owner[op.index])].append(op.index)
        forward = {i for i, phase in made.phase.items() if phase < slices}

        def parts_of(ops: Sequence[int]) -> tuple[int, ...]:
            return tuple(place[i] for op in ops for i in parts[op] if i in forward)

        free = {i for op in layers.free_ops for i in parts[op]}
        free |= {i for i, owner in made.owner.items() if owner in cuts}
        free |= {op.index for op in self.graph.block.ops if op.index in layers.free_ops}
        free |= self._cuts_of_constants(made.block, free & place.keys())
        layering = replace(
            layers,
            traced=result.traced,
            scan=result.scan,
            forward=frozenset(place[i] for i in forward if i in place),
            layers=tuple(replace(layer, ops=parts_of(layer.ops)) for layer in layers.layers),
            free_ops=frozenset(place[i] for i in free if i in place),
        )
        return layering, {place[i]: phase for i, phase in made.phase.items() if i in place}

    def _cuts_of_constants(self, block: Block, free: Set[int]) -> set[int]:
        """Returns the cuts and joins, by index, that depend on no trained argument and no example: masks, zeros.

        They are made once for all operations of a phase, and like the values that they cut, wherever they are read.
        """
        held = zip(self.graph.block.inputs, self.traced.arguments, strict=False)
        of_state = find_dependents(self.early, {value for value, argument in held if argument.is_resident})
        constant = {inner for outer, inner in self.view.consts if outer not in of_state}
        found = set()
        for op in block.ops:
            if (op.index in free or op.name in primitives.REARRANGED) and constant.issuperset(op.reads):
                constant.update(op.results)
                found.add(op.index)
        return found


def _tokens(found: states.States) -> int:
    """Returns the length of the sequence: of most values that have it."""
    sizes = Counter(state.size for state in found.by_atom.values() if not state.is_free)
    return sizes.most_common(1)[0][0] if sizes else 0


def _where(op: Op) -> str:
    return _jax.describe_location(op.source) or format_path(op.name)


def _waits(op: Op, reason: str) -> str:
    return f"{op.name} at {_where(op)} waits for later tokens: {reason}"
