"""Which values to compute again rather than to keep: a minimum cut over the operations that make them.

Problem. Some values are *required* in another place of the program than where they are made. Each can be kept, at a
cost, or be computed again there from values that are available, in turn kept or computed again. Operations that kernels
compute element by element (`REPEATABLE`) cost nothing more within the kernel that reads their result, but for expensive
functions (exp, tanh, ...), which are worth `EXPENSIVE_BYTES` of memory traffic an element, as in `costs.fusion`.
Reductions, products, draws and operations with bodies are never computed again.

Mathematics. Each value v is an edge v' -> v'' of the capacity that keeping it costs; an edge source -> v' has the cost
of computing it again, without limit where that cannot be; each operand u of the operation that makes v is an edge
u'' -> v' without limit; required values have an edge v'' -> sink without limit. In a minimum cut,

    source side of v', sink side of v''     v is kept
    sink side of v'                         v is computed again, and its operands are available

Source: min-cut rematerialisation of He and Yu, "Transcending runtime-memory tradeoffs in checkpointing by being fusion
aware" (MLSys 2023); the costs are those of `costs.fusion`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Op, Value
from alpa_lite.passes.costs.fusion import EXPENSIVE_BYTES
from alpa_lite.passes.ir import flow, min_cut, primitives
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter, rename_atom, rename_parts

REPEATABLE = (primitives.IN_LOOPS | primitives.SAME_BYTES) - primitives.PLACEMENT - {"name", "gather"}
"""Operations that kernels compute element by element. Values that the user named are not computed again."""

_CAPACITY = 1 << 28  # of all edges together


def is_repeatable(op: Op) -> bool:
    """Returns whether an operation can be computed again within the kernels that read its result."""
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
    vertex = {value: 2 + 2 * n for n, value in enumerate(flow.find_needed(required, makers))}  # v'; v'' is the next
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
      names: the names that values have there, which stay; those of the other results are added.
      enter: gives a name to a value that has none.
      is_remat: whether the copies are marked as rematerialised.
    """
    copies = []
    for op in ops:
        names.update([(value, enter(value)) for value in dict.fromkeys(op.reads) if value not in names])
        copies.append(rewriter.copy(op, names, source=_jax.mark_rematerialised(op.source) if is_remat else None))
        names.update([pair for pair in zip(op.results, copies[-1].results, strict=True) if pair[0] not in names])
    return copies


def read_by_scans(
    view: ScanView, readers: Mapping[int, Sequence[Op]], outputs: Iterable[Atom]
) -> dict[int, Sequence[Op]]:
    """Returns the stacks of a scan that scans alone read, row by row, with these scans.

    Args:
      readers, outputs: of the block that the scan is in.
    """
    left = set(flow.values_in(outputs))
    for user in {op for stack in view.results.ys for op in readers.get(stack, ())}:
        left.update(flow.values_in(sum(ScanView(user).operands[:2], ()) if user.name == "scan" else user.operands))
    return {stack: readers[stack] for stack in view.results.ys if stack in readers and stack not in left}


def repeat_in_backward(
    rewriter: Rewriter,
    before: ScanView,
    after: ScanView,
    gone: Mapping[int, Atom],
    again: Sequence[Op],
    first: Sequence[int] | None = None,
) -> tuple[Op, Op]:
    """A forward scan that no longer stacks some values, and a backward scan whose iterations compute them again.

    Args:
      gone: stack -> the atom of the forward body that it is made of.
      again: the ops of the forward body that are repeated, in program order.
      first: values of the forward body that are there before all else, as are its inputs and what it stacks already. A
        barrier on its carries precedes the repeated ops: a scan of one iteration is not a loop, and XLA would find both
        bodies to be the same. None: ops stand where they are first needed.
    """
    ys = [pair for pair in before.ys if pair[1] not in gone]
    stacks = {atom: stack for atom, stack in ys if isinstance(atom, int)}
    consts, xs = [*after.consts], [pair for pair in after.xs if pair[0] not in gone]
    operands, invariants = ({own: atom for atom, own in pairs} for pairs in (before.xs, before.consts))

    def enter(value: int) -> int:
        """The backward body's input for a value of the forward body that is not computed again, added if need be."""
        if value in invariants:
            group, atom = consts, invariants[value]
        elif value in operands and value not in stacks:
            group, atom = xs, operands[value]
        else:
            if value not in stacks:
                stacks[value] = rewriter.new_value_of_shape(value, (before.length, *rewriter.values[value].shape))
                ys.append((value, stacks[value]))
            group, atom = xs, stacks[value]
        own = next((own for other, own in group if other is atom or other == atom), None)
        if own is None:
            own = rewriter.new_value(value)
            group.append((atom, own))
        return own

    names: dict[int, Atom] = {}  # of the forward body
    barrier: list[Op] = []
    if first is not None:
        taken = before.inputs
        given = {value: enter(value) for value in (*taken.consts, *taken.carry, *taken.xs)}
        if taken.carry:
            begun = [given[value] for value in taken.carry]
            op, held = rewriter.barrier(begun, _jax.mark_rematerialised(after.op.source))
            barrier, given = [op], {value: held.get(own, own) for value, own in given.items()}
        names |= given | {value: enter(value) for value in (*stacks, *first) if value not in given}
    copies = copy_ops(rewriter, again, names, enter, is_remat=True)
    known = {
        own: rename_atom(gone[stack], names) for stack, own in after.xs if isinstance(stack, int) and stack in gone
    }
    ops, carries, outputs = rename_parts(after, known)
    ops = place_at_first_use(copies, ops) if first is None else [*barrier, *copies, *ops]
    return (
        before.rebuild(before.body.ops, before.consts, before.carries, before.xs, ys),
        after.rebuild(ops, consts, carries, xs, outputs),
    )


def place_at_first_use(copies: Sequence[Op], ops: Sequence[Op]) -> list[Op]:
    """Merges copies into ops, each right before the first op that needs it; those that only outputs need come last."""
    waiting = flow.producers(copies)
    found: list[Op] = []
    for op in (*ops, None):
        wanted = list(waiting) if op is None else flow.find_needed([v for v in op.reads if v in waiting], waiting)
        now = {id(waiting[value]) for value in wanted if value in waiting}
        found += [copy for copy in copies if id(copy) in now]
        waiting = {value: copy for value, copy in waiting.items() if id(copy) not in now}
        found += [] if op is None else [op]
    return found
