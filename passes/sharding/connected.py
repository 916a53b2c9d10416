"""Which factors of a step's groups are one dim: those between which a value passes, and what the examples become.

A dim of a value is made of some factors of the group that makes it, major to minor, and used as some factors of each
group that wants it. `find_connected_factors` follows that whatever the factors hold. `examples` follows how many
examples each of them holds, since only the major part of a dim that is made of several factors belongs to the batch:

    [batch, length] -> [batch * length]      the result has as many examples as the batch, not batch * length of them
    [batch] -> [parts, batch / parts]        both factors hold examples: a part, and the examples within it
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from alpa_lite.ir.graph import Traced
from alpa_lite.passes.ir.flow import reach
from alpa_lite.passes.ir.remembered import memoise_by_identity
from alpa_lite.passes.sharding.groups import Grouping

Place = tuple[int, int]
"""A factor of a group: their numbers."""

Dim = tuple[int, ...]
Pairs = Callable[[Dim, Dim], Iterable[tuple[int, int]]]


def every_part(made: Dim, used: Dim) -> Iterable[tuple[int, int]]:
    """The pairs of factors between which a dim passes: part by part, or all with all where it is divided otherwise.

    The examples of a batch are both the micro-batches and the examples of each.
    """
    return zip(made, used, strict=True) if len(made) == len(used) else itertools.product(made, used)


def leading_part(made: Dim, used: Dim) -> Iterable[tuple[int, int]]:
    """Likewise, but a dim that is divided otherwise grows with its first factor alone."""
    return zip(made, used, strict=True) if len(made) == len(used) else [(made[0], used[0])]


def find_connected_factors(grouping: Grouping, start: Iterable[Place], pairs: Pairs = itertools.product) -> set[Place]:
    """The factors that hang together with some, those included: by default each with each that its dim passes to."""
    links = _links(grouping)

    def following(place: Place) -> Iterator[Place]:
        for here, other, there in links.get(place[0], ()):
            if place[1] in here:
                yield from ((other, factor) for mine, factor in pairs(here, there) if mine == place[1])

    return set(reach(start, following))


def batch_factors(traced: Traced, grouping: Grouping) -> list[Place]:
    """Returns the factors of the first dims of batch arguments."""
    homes = [
        grouping.homes[value]
        for argument, value in zip(traced.arguments, traced.graph.block.inputs, strict=False)
        if argument.role == "batch" and traced.graph.values[value].shape
    ]
    return [(home.group, factor) for home in homes if home.group for factor in home.dims[0]]


def examples(traced: Traced, grouping: Grouping) -> dict[int, dict[int, int]]:
    """Group -> factor -> by how many examples of the batch it runs; only those of more than one.

    A factor of n elements that runs by e examples may be cut into any number of blocks that divides e, and every block
    then holds whole examples.
    """
    links, sizes = _links(grouping), [[f.size for f in group.factors] for group in grouping.groups]
    found: dict[int, dict[int, int]] = {}
    for group, factor in batch_factors(traced, grouping):
        found.setdefault(group, {})[factor] = sizes[group][factor]
    waiting = set(found)
    while waiting:
        group = waiting.pop()
        mine = found[group]
        for here, other, there in links.get(group, ()):
            count = _count(here, mine, sizes[group])
            for factor in there:
                if count <= 1:
                    break
                size = sizes[other][factor]
                known = found.setdefault(other, {})
                if min(size, count) > known.get(factor, 1):
                    known[factor] = min(size, count)
                    waiting.add(other)
                count = count // size if count % size == 0 else 1
    return {group: some for group, some in found.items() if some}


def _count(dim: Collection[int], counts: Mapping[int, int], sizes: Sequence[int]) -> int:
    """How many examples a dim holds that is made of some factors: those of the major ones that hold nothing else."""
    out = 1
    for factor in dim:
        out *= counts.get(factor, 1)
        if counts.get(factor, 1) < sizes[factor]:
            break
    return out


@memoise_by_identity
def _links(grouping: Grouping) -> Mapping[int, set[tuple[Dim, int, Dim]]]:
    """Group -> (factors of a dim there, another group, factors of that dim there), in both directions."""
    homes, found = grouping.homes, dict[int, set[tuple[Dim, int, Dim]]]()
    passing = [(homes[demand.value], demand) for demand in grouping.demands if demand.group and demand.value in homes]
    for group, dims, other, wanted in {(home.group, home.dims, one.group, one.dims) for home, one in passing}:
        for made, used in zip(dims, wanted, strict=True) if group else ():
            if made and used:
                found.setdefault(group, set()).add((made, other, used))
                found.setdefault(other, set()).add((used, group, made))
    return found
