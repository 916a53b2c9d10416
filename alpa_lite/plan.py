"""The plan: what was decided, what it costs, and why. A value without devices that prints, saves, loads and compares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Collective:
    """One logical collective of a step.

    Attributes:
      kind: all_reduce, all_gather, reduce_scatter, all_to_all, collective_permute or transfer.
      axes: the mesh axes it runs over.
      bytes: per-device result payload at the program's dtype (for reduce_scatter the operand's) of one execution.
      count: executions per step, with loop trip counts multiplied in.
      stage: the pipeline stage.
      where: the user's source line or name scope, and the value that moves.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    stage: int
    where: str
