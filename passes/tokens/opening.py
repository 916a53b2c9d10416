"""Attention that is one operation, as the operations that it consists of, and values behind barriers under one name.

`jax.nn.dot_product_attention` is one operation for the other passes (`kernels`), and so are its derivatives. Which keys
a slice needs is seen in their operations: the mask, the maximum of a row, the sums. Barriers are
left out: phases keep the passes apart.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from alpa_lite import _jax
from alpa_lite.ir.graph import Atom, Block, Graph, Op
from alpa_lite.ir.kernels import KERNEL
from alpa_lite.passes.ir import primitives
from alpa_lite.passes.ir.flow import values_in
from alpa_lite.passes.ir.inlining import inlined
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_atom, renamed_op
from alpa_lite.passes.tracing import conversion


def opened(rewriter: Rewriter, block: Block) -> tuple[Block, dict[int, int]]:
    """The block with such operations in place of the one, and for each of them, by index, the one that it is part of.

    Functions that are written for a device (Pallas, custom calls) stay as they are.
    """
    names: dict[int, Atom] = {}
    out: list[Op] = []
    part_of: dict[int, int] = {}
    for op in block.ops:
        op = renamed_op(op, names)
        if op.name in primitives.PAIRWISE:
            names.update(zip(op.results, op.operands, strict=True))
            continue
        inner = _inner(rewriter, op) if op.primitive is KERNEL else None
        if inner is None:
            out.append(op)
            continue
        ops, results = inlined(rewriter, inner, dict(zip(inner.block.inputs, op.operands, strict=True)), op.source)
        out += ops
        part_of.update((one.index, op.index) for one in ops)
        names.update(zip(op.results, results, strict=True))
    outputs = tuple(renamed_atom(a, names) for a in block.outputs)
    return Block(block.inputs, tuple(out), outputs), part_of


def _inner(rewriter: Rewriter, op: Op) -> Graph | None:
    """Returns the graph of a kernel; None if it holds a kernel of unknown operations, or arrays of its own."""
    if len(values_in(op.operands)) < len(op.operands):
        return None
    specs = [_jax.spec_of(rewriter.values[v].aval) for v in values_in(op.operands)]
    jaxpr = jax.make_jaxpr(op.params["kernel"].fun)(*specs)
    graph = conversion.graph_of(jaxpr, rewriter.keys)
    if graph.constants and all(_counts(array) for array in graph.constants):  # positions: made in the program
        graph = conversion.graph_of(jax.make_jaxpr(functools.partial(_counting, jaxpr))(*specs), rewriter.keys)
    opaque = any(one.name in primitives.KERNELS for one in graph.ops())
    return None if opaque or graph.constants else graph


def _counts(array: Any) -> bool:
    """Whether an array is 0, 1, 2, ..."""
    return np.ndim(array) == 1 and np.array_equal(array, np.arange(len(array)))


def _counting(jaxpr: Any, *operands: Any) -> Any:
    """A program whose constants are all 0, 1, 2, ..."""
    opened, constants = _jax.open_jaxpr(jaxpr)
    counts = [lax.iota(array.dtype, len(array)) for array in constants]
    return eval_jaxpr(opened, counts, *operands)
