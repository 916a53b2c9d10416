"""A digest of a whole program, by which two traces of one step are found to be the same program.

Two graphs have equal digests if they apply the same operations to the same operands in the same order: then they
compute the same values, bit for bit, and one plan and one executable serve both. Weak dtypes are left out, since they
only decide which operations JAX traces: what promotion they cause is in the graph, as conversions.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence

from alpa_lite.ir.graph import Atom, Block, Graph, Lit, Value
from alpa_lite.passes.ir.keys import Keys

_WEAK = re.compile(r"weak_type=(True|False),?")


def digest(graph: Graph, *, constants: bool = True) -> str:
    """The digest of a graph, equal in every process.

    Args:
      graph: the program.
      constants: whether the closed-over arrays count; their shapes and dtypes do in any case.
    """
    writer = _Writer(graph.values, graph.keys if isinstance(graph.keys, Keys) else Keys())
    lines = writer.block(graph.block)
    if constants:
        lines += [writer.keys.text(constant) for constant in graph.constants]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


class _Writer:
    """Writes blocks as lines; values by the order in which they are made."""

    def __init__(self, values: Sequence[Value], keys: Keys) -> None:
        self._values, self.keys = values, keys

    def block(self, block: Block) -> list[str]:
        """Inputs, operations and outputs."""
        names: dict[int, str] = {}
        numbers = itertools.count()

        def name(atom: Atom) -> str:
            return self.keys.key("", [atom]) if isinstance(atom, Lit) else names[atom]

        def made(values: Sequence[int]) -> str:
            for value in values:
                names[value] = f"%{next(numbers)}:{self.keys.type_of(self._values[value])}"
            return ",".join([names[value] for value in values])

        lines = [made(block.inputs)]
        for op in block.ops:
            read = ",".join([name(atom) for atom in op.operands])
            head = self.keys.head(op.primitive, op.params, structured=True) if op.bodies else op.key
            bodies = [line for body in op.bodies for line in ("{", *self.block(body), "}")]
            lines += [f"{made(op.results)}={_WEAK.sub('', head)}:{read}", *bodies]
        return [*lines, ",".join([name(atom) for atom in block.outputs])]
