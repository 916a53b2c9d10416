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
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from alpa_lite.graph import Op, Value
from alpa_lite.passes.ir import flow, primitives

EXPENSIVE_BYTES = 4
"""Memory traffic, in bytes an element, that computing an expensive function once more is worth (as in `ir.fusion`)."""

REPEATABLE = (primitives.IN_LOOPS | primitives.SAME_BYTES) - primitives.PLACEMENT - {"name", "gather"}
"""Operations that kernels compute element by element. Values that the user named are not computed again."""

_CAPACITY = 1 << 28  # of all edges together: SciPy's maximum flow counts in int32
_UNLIMITED = 1 << 30


def is_repeatable(op: Op) -> bool:
    """Whether an operation can be computed again within the kernels that read its result."""
    return op.name in REPEATABLE and not op.has_effects and not op.bodies


def repetition_bytes(value: Value, op: Op) -> int:
    """Memory traffic, in bytes, that computing a value once more by `op` is worth."""
    return EXPENSIVE_BYTES * math.prod(value.shape) if op.name in primitives.TRANSCENDENTAL else 0


class RecomputationCut:
    """The network of one choice. Vertices 0 and 1 are source and sink, and each value has two."""

    def __init__(self) -> None:
        self._vertex: dict[int, int] = {}
        self._edges: dict[tuple[int, int], tuple[float, bool]] = {}  # capacity, whether it loses against an equal one

    def add(self, value: int, keeping: float, repeating: float, operands: Iterable[int], is_required: bool) -> None:
        """Adds a value.

        Args:
          value: its number.
          keeping: bytes of memory traffic of keeping it.
          repeating: bytes that computing it again is worth, beyond making its operands available; `math.inf` if it
            cannot be.
          operands: of the operation that makes it.
          is_required: whether it must be available; of equal choices, required values are kept.
        """
        here = self._of(value)
        self._edges[here, here + 1] = keeping, not is_required
        self._edges[0, here] = repeating, False
        for operand in operands:
            self._edges[self._of(operand) + 1, here] = math.inf, False
        if is_required:
            self._edges[here + 1, 1] = math.inf, False

    def _of(self, value: int) -> int:
        return self._vertex.setdefault(value, 2 + 2 * len(self._vertex))

    def repeated(self) -> frozenset[int]:
        """The values that are computed again, in the minimum cut that is nearest to the sink."""
        total = sum(size for size, _ in self._edges.values() if size < math.inf)
        scale = _CAPACITY / max(1.0, total)
        sizes = [
            _UNLIMITED if size == math.inf else 2 * math.ceil(size * scale) + loses
            for size, loses in self._edges.values()
        ]
        count = 2 + 2 * len(self._vertex)
        starts, ends = np.array(list(self._edges), np.int32).T
        graph = sparse.csr_matrix((np.array(sizes, np.int32), (starts, ends)), shape=(count, count), dtype=np.int32)
        left = (graph - csgraph.maximum_flow(graph, 0, 1).flow).tocsr()
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        sink = set(csgraph.breadth_first_order(left.T.tocsr(), 1, return_predecessors=False).tolist())
        return frozenset(value for value, here in self._vertex.items() if here in sink)


def place_at_first_use(copies: Sequence[Op], ops: Sequence[Op]) -> list[Op]:
    """Ops with copies among them, each right before the first op that needs it; what outputs need is at the end."""
    waiting = flow.producers(copies)
    found: list[Op] = []
    for op in (*ops, None):
        wanted = list(waiting) if op is None else flow.needed([v for v in op.reads if v in waiting], waiting)
        now = {id(waiting[value]) for value in wanted if value in waiting}
        found += [copy for copy in copies if id(copy) in now]
        waiting = {value: copy for value, copy in waiting.items() if id(copy) not in now}
        found += [] if op is None else [op]
    return found
