"""Blocks from some devices to others as rounds of one permutation each: what `ppermute` over all of them can do.

In a round every device sends at most one piece and receives at most one, and all pieces have one shape. The pieces of
an array form a bipartite graph between senders and receivers, whose edges are coloured, those of each shape by
themselves: with as many colours as the device that has most to send or to receive has pieces. No fewer can do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa_lite.passes.programs.transfers import Ranges


@dataclass(frozen=True)
class Part:
    """A piece of an array between two devices, which are given by their position among those that take part."""

    source: int
    destination: int
    ranges: Ranges


@dataclass(frozen=True)
class Hop:
    """A piece in a round, with the places where it begins in the sender's block and in the receiver's."""

    source: int
    destination: int
    source_start: tuple[int, ...]
    destination_start: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """One permutation of pieces of one shape."""

    shape: tuple[int, ...]
    hops: tuple[Hop, ...]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(source, destination) of each piece."""
        return tuple((hop.source, hop.destination) for hop in self.hops)


def rounds(parts: Sequence[Part], have: dict[int, Ranges], need: dict[int, Ranges]) -> tuple[Round, ...]:
    """Returns the rounds that move the pieces of one array.

    Args:
      parts: every piece once.
      have, need: the block of each sender, and of each receiver.
    """
    shapes: dict[tuple[int, ...], list[Hop]] = {}
    for part in parts:
        starts = _starts(part.ranges, have[part.source]), _starts(part.ranges, need[part.destination])
        shape = tuple(high - low for low, high in part.ranges)
        shapes.setdefault(shape, []).append(Hop(part.source, part.destination, *starts))
    out = []
    for shape, hops in shapes.items():
        colours = assign_rounds([(hop.source, hop.destination) for hop in hops])
        for colour in range(max(colours) + 1):
            out.append(Round(shape, tuple(hop for hop, own in zip(hops, colours, strict=True) if own == colour)))
    return tuple(out)


def assign_rounds(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """Returns a round for each (sender, receiver), in none of which a device sends or receives twice; as few as can be.

    Koenig's colouring of the edges of a bipartite graph: where the first round that is free at the sender is taken at
    the receiver, the rounds are exchanged along the path of alternating rounds that begins there.
    """
    ends = [(("sends", one), ("receives", other)) for one, other in pairs]
    taken: dict[tuple[str, int], dict[int, int]] = {end: {} for both in ends for end in both}  # round -> pair
    out = [0] * len(pairs)
    for number, (sender, receiver) in enumerate(ends):
        mine = next(colour for colour in range(len(pairs)) if colour not in taken[sender])
        theirs = next(colour for colour in range(len(pairs)) if colour not in taken[receiver])
        path, end, colour = [], receiver, mine
        while colour in taken[end]:
            path.append(taken[end][colour])
            end = next(other for other in ends[path[-1]] if other != end)
            colour = theirs if colour == mine else mine
        for one in path:
            for end in ends[one]:
                del taken[end][out[one]]
        for one in path:
            out[one] = theirs if out[one] == mine else mine
            for end in ends[one]:
                taken[end][out[one]] = one
        out[number] = mine
        taken[sender][mine] = taken[receiver][mine] = number
    return out


def _starts(piece: Ranges, block: Ranges) -> tuple[int, ...]:
    return tuple(low - first for (low, _), (first, _) in zip(piece, block, strict=True))
