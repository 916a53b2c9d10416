"""The budget of a search, counted in work, and the constants that convert other work into its unit.

One unit is one cell of a cost matrix that message passing visits. The constants were measured once, as ratios of CPU
seconds on one core, and need not be accurate: they move the end of a search, never its order.
"""

from __future__ import annotations

from collections.abc import Mapping

EFFORTS: Mapping[str, int] = {"quick": 400_000_000, "normal": 3_500_000_000, "thorough": 30_000_000_000}
"""Cells that a search may visit, by `effort`: about 3, 20 and 180 CPU seconds of a core of 2026."""

ANALYSIS_PER_OP = 8_000
"""Cells of tracing micro-batches, factors and groups, for each operation: 0.6 ms."""

BUILD_PER_CELL = 4
"""Cells of building a program, for each cell of its cost matrices."""

BUILD_PER_STRATEGY = 1_000
"""Cells of building a program, for each strategy of its nodes: their layouts and rooflines."""

LAYER_COST = 6_000_000
"""Cells of one cost of a layer, of which lowering is the most: 50 ms."""

STAGE_DP = 10_000_000
"""Cells of choosing stages for one number of micro-batches: 0.2 s."""

STAGE_PER_OP = 25_000
"""Cells of planning a stage, lowering it and simulating its program, for each operation: 1.2 ms."""
