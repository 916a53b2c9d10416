"""The program points that are kept imply the others, and they are few where layers repeat."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.passes.sharding.points import compress_intervals, needed_points
from alpa_lite.passes.sharding.solver.problem import timeline


@st.composite
def lives(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    points = draw(st.integers(1, 40))
    buffers = draw(st.integers(1, 30))
    ends = [sorted(draw(st.tuples(*[st.integers(0, points - 1)] * 2))) for _ in range(buffers)]
    kind = draw(st.lists(st.integers(0, 4), min_size=buffers, max_size=buffers))
    alike = draw(st.lists(st.integers(0, 3), min_size=points, max_size=points))
    start, end = np.array(ends).T
    return start, end, np.array(kind), np.array(alike)


@settings(max_examples=60, deadline=None)
@given(lives(), st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_the_peak_of_any_sizes_is_that_of_all_points(table, sizes):
    start, end, kind, alike = table
    size = np.array(sizes, float)[kind]
    points = needed_points(start, end, kind, alike)
    first, last, live = compress_intervals(points, start, end)
    kept = timeline(len(points), first[live], last[live], size[live])
    assert kept.max(initial=0.0) == timeline(len(alike), start, end, size).max()


def test_points_do_not_grow_with_depth():
    def count(layers: int) -> int:
        """Activations are made going forward, and make room for gradients and temporaries going backward."""
        rows = []
        for layer in range(layers):
            for i in range(5):
                rows.append((5 * layer + i, 10 * layers - 5 * layer - i, i))
                rows.append((10 * layers - 5 * layer - i, 10 * layers, 10 + i))
                rows.append((5 * layer + i, 5 * layer + i + 1, 20))
        start, end, kind = np.array(rows).T
        return len(needed_points(start, end, kind, np.arange(10 * layers + 1) % 5))

    assert count(64) == count(8) < 40
