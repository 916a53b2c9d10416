"""Numbers the values of a graph densely, in program order.

Graphs that do the same then have the same value numbers, and differ in names and source lines alone: what has been
found out about one of them, keyed by value or by operation, holds for the others.
"""

from __future__ import annotations

from dataclasses import replace

from alpa_lite.graph import Atom, Block, Graph


def renumbered(graph: Graph) -> Graph:
    """The same graph, its values numbered in the order in which they appear; those that do not are left out."""
    number: dict[int, int] = {}

    def named(atom: Atom) -> Atom:
        return number[atom] if isinstance(atom, int) else atom

    def visit(block: Block) -> Block:
        inputs = tuple(number.setdefault(value, len(number)) for value in block.inputs)
        ops = []
        for op in block.ops:
            bodies = tuple(map(visit, op.bodies))
            operands = tuple(map(named, op.operands))
            results = tuple(number.setdefault(value, len(number)) for value in op.results)
            ops.append(replace(op, operands=operands, results=results, bodies=bodies))
        return Block(inputs, tuple(ops), tuple(map(named, block.outputs)))

    block = visit(graph.block)
    return Graph(tuple(graph.values[value] for value in number), block, graph.constants)
