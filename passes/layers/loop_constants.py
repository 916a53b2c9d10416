"""Constants of scans: large ones that the scan can compute itself from smaller ones.

JAX moves out of a differentiated scan whatever does not depend on its carry, such as a mask of the shape of the
attention scores, broadcast from [length, length], and the fill value in the same shape. Every iteration then reads them
from memory, where outside of loops XLA would compute them within the kernels that use them.

Each iteration reads bytes(v) for a constant v; constants of at most `CACHED_BYTES` stay in a cache and as they are. The
cut of `recomputation`, over the operations of the enclosing block, says which values replace the others.
"""

from __future__ import annotations

from collections.abc import Mapping

from alpa_lite.ir.graph import Atom, Op
from alpa_lite.passes.ir.loops import ScanView
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_parts
from alpa_lite.passes.layers import recomputation

CACHED_BYTES = 2**20
"""Constants of a loop up to this size are read from a cache."""


def sink_constants(rewriter: Rewriter, op: Op, makers: Mapping[int, Op]) -> Op:
    """Makes a scan compute large constants in its body.

    Args:
      op: an operation; all but scans are left as they are.
      makers: value -> the operation of the enclosing block that makes it, of those that can be repeated.

    Returns:
      The operation with other operands; itself if no constant costs less to compute than to read.
    """
    values = rewriter.values
    if op.name != "scan":
        return op
    view = ScanView(op)
    required = {
        atom: own for atom, own in view.consts
        if isinstance(atom, int) and atom in makers and values[atom].nbytes > CACHED_BYTES
    }  # fmt: skip
    if not required:
        return op
    present = {atom for atom in view.operands.consts if isinstance(atom, int)} - required.keys()
    repeated, again = recomputation.choose_repeated(values, required, makers, present, lambda v: values[v].nbytes)
    if repeated.isdisjoint(required):
        return op
    consts = [pair for pair in view.consts if pair[0] not in repeated]
    names: dict[int, Atom] = {atom: own for atom, own in consts if isinstance(atom, int)}

    def enter(value: int) -> int:
        consts.append((value, rewriter.fresh(value)))
        return consts[-1][1]

    copies = recomputation.copy_ops(rewriter, again, names, enter, is_remat=False)
    ops, carries, ys = renamed_parts(view, {own: names[atom] for atom, own in required.items() if atom in repeated})
    return view.rebuilt(recomputation.place_at_first_use(copies, ops), consts, carries, view.xs, ys)
