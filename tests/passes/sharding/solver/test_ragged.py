"""Arrays of rows of unequal length against lists of lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.passes.sharding.solver import ragged

ROWS = st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=6)
FULL = st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=4), min_size=1, max_size=6)


@given(ROWS, st.data())
def test_rows_are_split_and_taken(rows: list[list[int]], data: st.DataObject):
    values, at = ragged.joined([np.array(row, dtype=np.int64) for row in rows]), ragged.offsets([*map(len, rows)])
    assert [row.tolist() for row in ragged.split(values, at)] == rows
    some = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8) if rows else st.just([]))
    taken = ragged.entries(at, np.array(some, dtype=np.int64))
    assert values[taken].tolist() == [value for row in some for value in rows[row]]


@given(FULL)
def test_each_row_is_reduced(rows: list[list[int]]):
    values, at = np.concatenate(rows), ragged.offsets([*map(len, rows)])
    assert ragged.reduced(np.minimum, values, at).tolist() == [*map(min, rows)]
    assert ragged.lowest(values, at[:-1]).tolist() == [row.index(min(row)) for row in rows]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), max_size=12))
def test_values_that_share_an_index_are_summed(pairs: list[tuple[int, int]]):
    index, values = (np.array([pair[n] for pair in pairs], dtype=np.int64) for n in range(2))
    expected = [sum(value for number, value in pairs if number == i) for i in range(5)]
    assert ragged.summed(index, values, 5).tolist() == expected
