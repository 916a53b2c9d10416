"""Pairs of planned and found collectives, against all ways to pair them."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.passes.checks.matching import LOST, OPEN, paired

amounts = st.lists(st.integers(0, 2), min_size=1, max_size=3)


def total(amounts_of, planned, found, costs, group_of, lost):
    """Cost of pairs with all that they leave open or out; None if there are too many of something."""
    rest = [n - sum(x for (i, _), x in amounts_of.items() if i == row) for row, n in planned.items()]
    free = [n - sum(x for (_, j), x in amounts_of.items() if j == column) for column, n in found.items()]
    if min([*rest, *free]) < 0:
        return None
    in_group = {group: sum(n for row, n in zip(planned, rest, strict=True) if group_of[row] == group) for group in lost}
    out = sum(min(n, lost[group]) for group, n in in_group.items())
    return sum(costs[pair] * x for pair, x in amounts_of.items()) + LOST * out + OPEN * (sum(rest) - out + sum(free))


@given(amounts, amounts, st.data())
def test_pairs_cost_the_least_of_all(rows, columns, data):
    planned, found = dict(enumerate(rows)), dict(enumerate(columns))
    pairs = [pair for pair in itertools.product(planned, found) if data.draw(st.booleans())]
    costs = {pair: data.draw(st.sampled_from([1.0, 2.0, 5.0])) for pair in pairs}
    group_of = {row: row // 2 for row in planned}
    lost = {group: data.draw(st.integers(0, 2)) for group in set(group_of.values())}
    got = paired(planned, found, costs, group_of, lost)
    assert all(isinstance(n, int) and n > 0 for n in got.values())
    ways = itertools.product(*(range(1 + min(planned[i], found[j])) for i, j in pairs))
    values = [total(dict(zip(pairs, way, strict=True)), planned, found, costs, group_of, lost) for way in ways]
    assert total(got, planned, found, costs, group_of, lost) == min(v for v in values if v is not None)
