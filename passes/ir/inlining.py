"""Graphs written into a block of another one: traced helper functions, and operations that stand for a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from alpa_lite.ir.graph import Atom, Graph, Lit, Op, Value
from alpa_lite.passes.ir.rewriting import Rewriter, renamed_atom


def shape_of(atom: Atom, values: Sequence[Value]) -> tuple[int, ...]:
    """Returns the shape of an atom."""
    return tuple(atom.aval.shape) if isinstance(atom, Lit) else values[atom].shape


def inlined(
    rewriter: Rewriter, graph: Graph, given: Mapping[int, Atom], source: Any = None
) -> tuple[list[Op], list[Atom]]:
    """Returns the operations of a graph under new value numbers, and the atoms of its outputs.

    Args:
      given: the atoms of its inputs; operations whose results are among them are left out.
      source: of all operations, in place of their own.
    """
    names, ops = dict(given), []
    for op in graph.block.ops:
        if op.results and names.keys() >= set(op.results):
            continue
        operands = [renamed_atom(a, names) for a in op.operands]
        results = [rewriter.fresh(graph.values[value]) for value in op.results]
        made = rewriter.moved(op, operands, results, values=graph.values)
        key = op.key if len(made.reads) == len(op.reads) else None  # which says the numbers of literals
        ops.append(replace(made, key=key, source=op.source if source is None else source))
        names.update(zip(op.results, results, strict=True))
    return ops, [renamed_atom(atom, names) for atom in graph.block.outputs]
