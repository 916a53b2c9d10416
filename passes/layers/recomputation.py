"""Which values to compute again rather than to keep: a minimum cut over the operations that make them.

Problem. Some values are *required* in another place of the program than where they are made. Each can be kept, at a
cost, or be computed again there from values that are available, in turn kept or computed again. Operations that kernels
compute element by element (`REPEATABLE`) cost nothing more within the kernel that reads their result, but for expensive
functions (exp, tanh, ...), which are worth `EXPENSIVE_BYTES` of memory traffic an element, as in `ir.fusion`.
Reductions, products, draws and operations with bodies are never computed again.

Mathematics. Each value v is an edge v' -> v'' of the capacity that keeping it costs; an edge source -> v' has the cost
of computing it again, without limit where that cannot be; each operand u of the operation that makes v is an edge
u'' -> v' without limit; required values have an edge v'' -> sink without limit. In a minimum cut,

    source side of v', sink side of v''     v is kept
    sink side of v'                         v is computed again, and its operands are available

Source: min-cut rematerialisation of He and Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion
aware" (MLSys 2023); the costs are those of `ir.fusion`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Op, Value
from alpa_lite.passes.ir import flow, min_cut, primitives
from alpa_lite.passes.ir.rewriting import Rewriter

EXPENSIVE_BYTES = 4
"""Memory traffic, in bytes an element, that computing an expensive function once more is worth (as in `ir.fusion`)."""

REPEATABLE = (primitives.IN_LOOPS | primitives.SAME_BYTES) - primitives.PLACEMENT - {"name", "gather"}
"""Operations that kernels compute element by element. Values that the user named are not computed again."""

_CAPACITY = 1 << 28  # of all edges together


def is_repeatable(op: Op) -> bool:
    """Whether an operation can be computed again within the kernels that read its result."""
    return op.name in REPEATABLE and not op.has_effects and not op.bodies


def choose_repeated(
    values: Sequence[Value],
    required: Collection[int],
    makers: Mapping[int, Op],
    present: Set[int],
    keeping_bytes: Callable[[int], float],
) -> tuple[frozenset[int], list[Op]]:
    """Chooses the values that are computed again.

    Args:
      required: the values that must be available.
      makers: value -> the operation that makes it, of those that can be repeated, in program order.
      present: the values that are available in any case.
      keeping_bytes: memory traffic, in bytes, of keeping a value; `math.inf` if it cannot be kept.

    Returns:
      The values that are computed again, and the operations that make them, in program order.
    """
    vertex = {value: 2 + 2 * n for n, value in enumerate(flow.needed(required, makers))}  # v'; v'' is the next
    edges: dict[tuple[int, int], tuple[float, bool]] = {}  # capacity in bytes, whether it loses against an equal one
    for value, here in vertex.items():
        maker = None if value in present else makers.get(value)
        is_expensive = maker is not None and maker.name in primitives.TRANSCENDENTAL
        repeating = EXPENSIVE_BYTES * math.prod(values[value].shape) if is_expensive else 0
        edges[here, here + 1] = 0 if value in present else keeping_bytes(value), value not in required
        edges[min_cut.SOURCE, here] = math.inf if maker is None else repeating, False
        for operand in () if maker is None else maker.reads:
            edges[vertex[operand] + 1, here] = math.inf, False
        if value in required:
            edges[here + 1, min_cut.SINK] = math.inf, False
    scale = _CAPACITY / max(1.0, sum(size for size, _ in edges.values() if size < math.inf))
    sizes = {
        edge: min_cut.UNLIMITED if size == math.inf else 2 * math.ceil(size * scale) + loses
        for edge, (size, loses) in edges.items()
    }
    sink = min_cut.smallest_side(sizes, 2 + 2 * len(vertex), min_cut.SINK)
    repeated = frozenset(value for value, here in vertex.items() if here in sink)
    return repeated, list(dict.fromkeys(op for value, op in makers.items() if value in repeated))


def copy_ops(
    rewriter: Rewriter, ops: Iterable[Op], names: dict[int, Atom], enter: Callable[[int], int], *, is_remat: bool
) -> list[Op]:
    """Copies operations into another body.

    Args:
      names: the names that values have there; those of the results are added.
      enter: gives a name to a value that has none.
      is_remat: whether the copies are marked as rematerialised.
    """
    copies = []
    for op in ops:
        names.update([(value, enter(value)) for value in dict.fromkeys(op.reads) if value not in names])
        copies.append(rewriter.copy(op, names, _jax.mark_rematerialised(op.source) if is_remat else None))
        names.update(zip(op.results, copies[-1].results, strict=True))
    return copies


def entering(rewriter: Rewriter, group: list[tuple[Atom, int]], atom: Atom, like: int) -> int:
    """The body input of an operand of a scan, which is added to its constants or scanned inputs if it is not there."""
    known = next((own for other, own in group if other is atom or other == atom), None)
    if known is None:
        known = rewriter.fresh(like)
        group.append((atom, known))
    return known


def place_at_first_use(copies: Sequence[Op], ops: Sequence[Op]) -> list[Op]:
    """Merges copies into ops, each right before the first op that needs it; those that only outputs need come last."""
    waiting = flow.producers(copies)
    found: list[Op] = []
    for op in (*ops, None):
        wanted = list(waiting) if op is None else flow.needed([v for v in op.reads if v in waiting], waiting)
        now = {id(waiting[value]) for value in wanted if value in waiting}
        found += [copy for copy in copies if id(copy) in now]
        waiting = {value: copy for value, copy in waiting.items() if id(copy) not in now}
        found += [] if op is None else [op]
    return found
