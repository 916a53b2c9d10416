"""Examples that come several times along one dim: `concatenate([x, augmented])`, `tile`, and their inverses.

Let a dim consist of segments, each of which has every example in order: [x_1 .. x_N, x'_1 .. x'_N]. Micro-batch t has
its part of each segment, and not a block of the whole. A state notes the sizes of the segments (`State.segments`);
operations that treat each row by itself treat these rows like any others. Some operations make segments or take them
apart, and keep all rows of an example in one micro-batch:

    concatenate    segments one after the other
    tile           copies of the segments
    slice, split   whole segments
    pad            segments of the padding value
    reshape        a leading dim of copies merged with the dim of examples, and back

The gradient of a slice is a pad, that of a concatenation consists of slices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alpa_lite.ir.graph import Lit, Op, Value
from alpa_lite.passes.microbatches.lattice import WHOLE, State, sliced_state
from alpa_lite.passes.microbatches.states import Role

Segments = tuple[int, ...]
_Found = tuple[list[State], list[State], dict[str, Any]]
"""The wanted states of operands, those of results, and changed parameters."""


@dataclass(frozen=True, eq=False)
class _Case:
    """An operation with the states and shapes of its operands; `first` is the first sliced state."""

    op: Op
    states: Sequence[State]
    first: State
    shapes: Sequence[tuple[int, ...]]
    results: Sequence[tuple[int, ...]]
    parts: int
    known_segments: Mapping[int, Segments]

    @property
    def segments(self) -> Segments:
        """Those of the first operand."""
        return self.first.segment_sizes(self.shapes[0][self.first.dim])


def segmented_role(
    op: Op, states: Sequence[State], values: Sequence[Value], parts: int, known: Mapping[int, Segments]
) -> Role | None:
    """Returns the role of an operation that makes segments or takes them apart; None for any other.

    Args:
      op: the operation.
      states: of its operands, one at least sliced.
      values: of the graph.
      parts: the number of micro-batches.
      known: size of a dim -> the segments that a dim of this size was found to have last.
    """
    if op.name not in _RULES or any(isinstance(a, Lit) for a in op.operands[: None if op.name != "pad" else 1]):
        return None
    first = next(s for s in states if s.kind == "sliced")
    shapes = [values[a].shape if isinstance(a, int) else () for a in op.operands]
    case = _Case(op, states, first, shapes, [values[v].shape for v in op.results], parts, known)
    found = _RULES[op.name](case)
    if found is None:
        return None
    wanted, results, changes = found
    if any(want != given and given.kind not in ("whole", "inner") for want, given in zip(wanted, states, strict=True)):
        return None
    pairs = zip((*wanted, *results), (*shapes, *case.results), strict=True)
    if any(n % parts for s, shape in pairs if s.segments for n in s.segment_sizes(shape[s.dim])):
        return None
    return Role("form", tuple(wanted), tuple(results), params={**op.params, **changes})


def _concatenate(case: _Case) -> _Found | None:
    dim, shapes = case.op.params["dimension"], case.shapes
    wanted = [s if s.kind == "sliced" else sliced_state(dim) for s in case.states]
    if any(s.dim != dim for s in wanted) or any(shape[dim] % case.parts for shape in shapes):
        return None
    found = [n for s, shape in zip(wanted, shapes, strict=True) for n in s.segment_sizes(shape[dim])]
    return wanted, [sliced_state(dim, segments=found)], {}


def _tile(case: _Case) -> _Found | None:
    dim = case.first.dim
    copies = case.op.params["reps"][dim]
    if case.shapes[0][dim] % case.parts:
        return None
    return [case.first], [sliced_state(dim, segments=case.segments * copies)], {}


def _between(segments: Segments, start: int, stop: int) -> Segments | None:
    """Returns the segments from one position to another; None if these are not their ends."""
    ends = [0, *itertools.accumulate(segments)]
    return segments[ends.index(start) : ends.index(stop)] if start in ends and stop in ends else None


def _slice(case: _Case) -> _Found | None:
    dim, params = case.first.dim, case.op.params
    start, stop = list(params["start_indices"]), list(params["limit_indices"])
    found = _between(case.segments, start[dim], stop[dim])
    if not found or (params["strides"] or (1,) * len(start))[dim] != 1:
        return None
    start[dim], stop[dim] = start[dim] // case.parts, stop[dim] // case.parts
    changes = {"start_indices": tuple(start), "limit_indices": tuple(stop)}
    return [case.first], [sliced_state(dim, segments=found)], changes


def _split(case: _Case) -> _Found | None:
    dim, sizes = case.op.params["axis"], case.op.params["sizes"]
    if case.first.dim != dim:
        return None
    found = [_between(case.segments, *pair) for pair in itertools.pairwise([0, *itertools.accumulate(sizes)])]
    if not all(found):
        return None
    changes = {"sizes": tuple(n // case.parts for n in sizes)}
    return [case.first], [sliced_state(dim, segments=one or ()) for one in found], changes


def _pad(case: _Case) -> _Found | None:
    dim, config, own = case.first.dim, list(case.op.params["padding_config"]), case.segments
    (low, high, interior), size = config[dim], case.results[0][dim]
    if interior or min(low, high) < 0 or case.states[0] != case.first or not low + high:
        return None
    whole = case.known_segments.get(size, ())
    if _between(whole, low, size - high) != own:  # otherwise copies of the whole operand
        step = sum(own)
        whole = tuple(own) * (size // step) if low % step == high % step == 0 else (low, *own, high)
        whole = tuple(n for n in whole if n)
    config[dim] = (low // case.parts, high // case.parts, 0)
    if low % case.parts or high % case.parts:
        return None
    return [case.first, WHOLE], [sliced_state(dim, segments=whole)], {"padding_config": tuple(config)}


def _reshape(case: _Case) -> _Found | None:
    before, after, dim, own = case.shapes[0], case.results[0], case.first.dim, case.segments
    if len(set(own)) > 1 or case.op.params["dimensions"] is not None:
        return None
    copies, length = math.prod(before[:dim]) * len(own), own[0] * math.prod(before[dim + 1 :])
    for position, size in enumerate(after):
        ahead = math.prod(after[:position])
        if copies % ahead or size % (copies // ahead):
            continue
        count = copies // ahead
        each = size // count
        if each * math.prod(after[position + 1 :]) == length and each % case.parts == 0 and each > 1:
            local = tuple(n // case.parts if d == position else n for d, n in enumerate(after))
            return (
                [case.first],
                [sliced_state(position, segments=(each,) * count)],
                {"new_sizes": local, "sharding": None},
            )
    return None


_RULES = {
    "concatenate": _concatenate, "tile": _tile, "slice": _slice, "split": _split, "pad": _pad, "reshape": _reshape
}  # fmt: skip
