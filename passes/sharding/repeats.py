"""The parts in which one planned program runs, each of which reshards its inputs anew.

One integer program plans a stage, but a schedule runs the stage in parts: forward and backward, or both once for each
slice of the sequence. A part keeps no other layout of a parameter, of the batch, or of values made cheaply of these:
a later part that needs that layout communicates again (`stages.cutting`). The program pays such a transfer once for
each part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, eq=False)
class Repeats:
    """The parts that a program runs in.

    Attributes:
      parts: op index -> the numbers of the parts that do it; several for what each part makes for itself.
      values: that each part lays out anew.
    """

    parts: Mapping[int, frozenset[int]] = field(default_factory=dict)
    values: frozenset[int] = frozenset()


NO_REPEATS = Repeats()
"""Of a program that runs in one part."""
