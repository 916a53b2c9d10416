"""Scans and operands of operations: what every pass that walks a graph asks first."""

from __future__ import annotations

from alpa_lite.graph import Op, Traced


def scan_op(traced: Traced, scan: int) -> Op:
    """The op of the top block with index `scan`.

    Raises:
      ValueError: if there is none, or it is no scan.
    """
    for op in traced.graph.block.ops:
        if op.index == scan:
            if op.name != "scan":
                raise ValueError(f"scan={scan} is the op {op.name}; pass the index of the scan over micro-batches")
            return op
    raise ValueError(f"scan={scan} is not the index of an op of the top block")


def reads(op: Op) -> tuple[int, ...]:
    """The values among an op's operands."""
    return tuple([atom for atom in op.operands if isinstance(atom, int)])
