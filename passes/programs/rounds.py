"""Blocks from some devices to others as rounds of one permutation each: what `ppermute` over all of them can do.

In a round every device sends at most one piece and receives at most one, and all pieces have one shape. The pieces of
an array form a bipartite graph between senders and receivers; each shape's edges are coloured greedily, in the order of
the receivers. For blocks that divide each other, which is what layouts make, that needs as many rounds as the device
that has most to send or to receive has pieces, and no fewer can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.passes.programs.transfers import Ranges


@dataclass(frozen=True)
class Part:
    """A piece of an array on its way.

    Attributes:
      source, destination: devices, by their position among those that take part.
      ranges: of the array.
    """

    source: int
    destination: int
    ranges: Ranges


@dataclass(frozen=True)
class Hop:
    """A piece in a round.

    Attributes:
      source, destination: as in `Part`.
      taken: where it begins in the sender's block, along each dim.
      put: where it begins in the receiver's block.
    """

    source: int
    destination: int
    taken: tuple[int, ...]
    put: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """One permutation.

    Attributes:
      shape: of every piece.
      hops: the pieces.
    """

    shape: tuple[int, ...]
    hops: tuple[Hop, ...]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of each piece."""
        return tuple((hop.source, hop.destination) for hop in self.hops)


def rounds(parts: Sequence[Part], have: dict[int, Ranges], need: dict[int, Ranges]) -> tuple[Round, ...]:
    """The rounds that move the pieces of one array.

    Args:
      parts: every piece once.
      have, need: the block of each sender, and of each receiver.
    """
    shapes: dict[tuple[int, ...], list[list[Hop]]] = {}
    for part in parts:
        shape = tuple(high - low for low, high in part.ranges)
        hop = Hop(
            part.source,
            part.destination,
            _starts(part.ranges, have[part.source]),
            _starts(part.ranges, need[part.destination]),
        )
        made = shapes.setdefault(shape, [])
        free = (one for one in made if all(h.source != hop.source and h.destination != hop.destination for h in one))
        room = next(free, None)
        if room is None:
            made.append([hop])
        else:
            room.append(hop)
    return tuple(Round(shape, tuple(hops)) for shape, made in shapes.items() for hops in made)


def _starts(piece: Ranges, block: Ranges) -> tuple[int, ...]:
    return tuple(low - first for (low, _), (first, _) in zip(piece, block, strict=True))
