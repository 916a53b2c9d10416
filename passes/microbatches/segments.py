"""Examples that come several times along one dim: `concatenate([x, augmented])`, `tile`, and what takes them apart.

Let a dim consist of segments, each of which has every example in order: [x_1 .. x_N, x'_1 .. x'_N]. Micro-batch t has
block t of each segment, and not a block of the whole. A state notes the sizes of the segments (`State.segments`);
operations that treat each row by itself do on these rows what they do on any others. Some operations make segments or
take them apart, and keep all rows of an example in one micro-batch:

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
from typing import Any

from alpa_lite.graph import Lit, Op, Value
from alpa_lite.passes.local.types import LocalForm, rebound
from alpa_lite.passes.microbatches.states import WHOLE, Role, State, sliced

Segments = tuple[int, ...]


def segmented_role(
    op: Op,
    states: Sequence[State],
    values: Sequence[Value],
    parts: int,
    known: Mapping[int, Segments],
) -> Role | None:
    """The role of an operation that makes segments or takes them apart; None for any other.

    Args:
      op: the operation.
      states: of its operands, one at least sliced.
      values: of the graph.
      parts: the number of micro-batches.
      known: size of a dim -> the segments that a dim of this size was found to have last.
    """
    if op.name not in _MAKERS or any(isinstance(a, Lit) for a in op.operands[: None if op.name != "pad" else 1]):
        return None
    (first, *_) = [s for s in states if s.kind == "sliced"]
    shapes = [values[a].shape if isinstance(a, int) else () for a in op.operands]
    made = _MAKERS[op.name](op, first, states, shapes, [values[v].shape for v in op.results], parts, known)
    if made is None:
        return None
    wanted, results, changes = made
    if any(want != given and given.kind not in ("whole", "inner") for want, given in zip(wanted, states, strict=True)):
        return None
    if any(size % parts for state in (*wanted, *results) for size in state.segments):
        return None
    form = rebound(op, LocalForm((), (), (), list), changes)  # the states stand for layouts
    return Role("form", tuple(wanted), tuple(results), form, segmented=True)


_Made = tuple[list[State], list[State], dict[str, Any]]
"""The wanted states of operands, those of results, and changed parameters."""


def segments_of(state: State, size: int) -> Segments:
    """The segments of a dim of some size that is sliced so."""
    return state.segments or (size,)


def with_segments(dim: int, segments: Sequence[int]) -> State:
    """The state of a value that is sliced along a dim of these segments."""
    return State("sliced", dim, tuple(segments) if len(segments) > 1 else ())


def _joined(
    op: Op, first: State, states: Sequence[State], shapes: Any, results: Any, parts: int, known: Any
) -> _Made | None:
    dim = op.params["dimension"]
    if first.dim != dim:
        return None
    wanted = [s if s.kind == "sliced" else sliced(dim) for s in states]
    if any(s.dim != dim for s in wanted) or any(shape[dim] % parts for shape in shapes):
        return None
    found = [n for s, shape in zip(wanted, shapes, strict=True) for n in segments_of(s, shape[dim])]
    return wanted, [with_segments(dim, found)], {}


def _tiled(
    op: Op, first: State, states: Sequence[State], shapes: Any, results: Any, parts: int, known: Any
) -> _Made | None:
    own, copies = segments_of(first, shapes[0][first.dim]), op.params["reps"][first.dim]
    return ([first], [with_segments(first.dim, own * copies)], {}) if shapes[0][first.dim] % parts == 0 else None


def _between(segments: Segments, start: int, stop: int) -> Segments | None:
    """The segments from one place to another; None if these are not their ends."""
    ends = [sum(segments[:i]) for i in range(len(segments) + 1)]
    return segments[ends.index(start) : ends.index(stop)] if start in ends and stop in ends else None


def _taken(
    op: Op, first: State, states: Sequence[State], shapes: Any, results: Any, parts: int, known: Any
) -> _Made | None:
    dim, start, stop = first.dim, list(op.params["start_indices"]), list(op.params["limit_indices"])
    found = _between(segments_of(first, shapes[0][dim]), start[dim], stop[dim])
    if not found or (op.params["strides"] or (1,) * len(start))[dim] != 1:
        return None
    start[dim], stop[dim] = start[dim] // parts, stop[dim] // parts
    return [first], [with_segments(dim, found)], {"start_indices": tuple(start), "limit_indices": tuple(stop)}


def _split(
    op: Op, first: State, states: Sequence[State], shapes: Any, results: Any, parts: int, known: Any
) -> _Made | None:
    dim, sizes = op.params["axis"], op.params["sizes"]
    if first.dim != dim:
        return None
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    found = [_between(segments_of(first, shapes[0][dim]), *pair) for pair in itertools.pairwise(ends)]
    if not all(found):
        return None
    return [first], [with_segments(dim, one or ()) for one in found], {"sizes": tuple(n // parts for n in sizes)}


def _padded(
    op: Op, first: State, states: Sequence[State], shapes: Any, results: Any, parts: int, known: Any
) -> _Made | None:
    dim, config = first.dim, list(op.params["padding_config"])
    low, high, interior = config[dim]
    own, size = segments_of(first, shapes[0][dim]), results[0][dim]
    if interior or min(low, high) < 0 or states[0] != first or not low + high:
        return None
    whole = known.get(size, ())
    if _between(whole, low, size - high) != own:  # otherwise copies of the whole operand
        step = sum(own)
        whole = tuple(own) * (size // step) if low % step == high % step == 0 else (low, *own, high)
        whole = tuple(n for n in whole if n)
    config[dim] = (low // parts, high // parts, 0)
    if low % parts or high % parts:
        return None
    return [first, WHOLE], [with_segments(dim, whole)], {"padding_config": tuple(config)}


def _reshaped(
    op: Op, first: State, states: Sequence[State], shapes: Any, results: Any, parts: int, known: Any
) -> _Made | None:
    before, after, dim = shapes[0], results[0], first.dim
    own = segments_of(first, before[dim])
    if len(set(own)) > 1 or op.params["dimensions"] is not None:
        return None
    copies, length = math.prod(before[:dim]) * len(own), own[0] * math.prod(before[dim + 1 :])
    for place, size in enumerate(after):
        ahead = math.prod(after[:place])
        if copies % ahead or size % (copies // ahead):
            continue
        count = copies // ahead
        each = size // count
        if each * math.prod(after[place + 1 :]) == length and each % parts == 0 and each > 1:
            local = tuple(n // parts if d == place else n for d, n in enumerate(after))
            return [first], [with_segments(place, (each,) * count)], {"new_sizes": local, "sharding": None}
    return None


_MAKERS = {
    "concatenate": _joined, "tile": _tiled, "slice": _taken, "split": _split, "pad": _padded, "reshape": _reshaped
}  # fmt: skip
