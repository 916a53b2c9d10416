"""Rounds of permutations bring every element where it belongs, in as many rounds as the busiest device has pieces."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from alpa_lite.passes.programs.rounds import Part, rounds

SHAPE = (12, 8)


def blocks(cuts: tuple[int, int], copies: int, first: int) -> dict[int, tuple[tuple[int, int], ...]]:
    """The blocks of devices numbered from `first`: the array cut along both dims, each block on some devices."""
    sizes = [size // cut for size, cut in zip(SHAPE, cuts, strict=True)]
    grid = itertools.product(*map(range, cuts), range(copies))
    return {
        first + n: tuple((i * size, (i + 1) * size) for i, size in zip(place[:2], sizes, strict=True))
        for n, place in enumerate(grid)
    }


def parts_between(have, need):
    """Each piece from the first device that has it."""
    out = []
    for receiver, wanted in need.items():
        seen = set()
        for sender, block in have.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, wanted, strict=True))
            if all(low < high for low, high in common) and common not in seen:
                seen.add(common)
                out.append(Part(sender, receiver, common))
    return out


CUTS = [((1, 1), 1), ((1, 1), 2), ((2, 1), 1), ((4, 1), 1), ((1, 4), 1), ((2, 2), 1), ((3, 1), 1), ((2, 1), 2)]


@pytest.mark.parametrize("source", CUTS)
@pytest.mark.parametrize("goal", CUTS)
def test_all_arrives(source, goal):
    have = blocks(*source, first=0)
    need = blocks(*goal, first=len(have))
    parts = parts_between(have, need)
    made = rounds(parts, have, need)
    whole = np.arange(np.prod(SHAPE)).reshape(SHAPE)
    got = {device: np.full([high - low for low, high in block], -1) for device, block in need.items()}
    for one in made:
        senders, receivers = zip(*one.pairs, strict=True)
        assert len(set(senders)) == len(senders) and len(set(receivers)) == len(receivers)
        for hop in one.hops:
            block = whole[tuple(slice(*span) for span in have[hop.source])]
            taken = tuple(slice(start, start + size) for start, size in zip(hop.taken, one.shape, strict=True))
            put = tuple(slice(start, start + size) for start, size in zip(hop.put, one.shape, strict=True))
            got[hop.destination][put] = block[taken]
    for device, block in need.items():
        assert np.array_equal(got[device], whole[tuple(slice(*span) for span in block)])
    assert sum(len(one.hops) for one in made) == len(parts)
    shapes = {tuple(high - low for low, high in part.ranges) for part in parts}
    if len(shapes) == 1:
        ends = Counter(p.source for p in parts), Counter(p.destination for p in parts)
        assert len(made) == max(max(one.values()) for one in ends)
