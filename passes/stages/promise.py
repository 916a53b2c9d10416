"""Whether a pipeline can be faster than a plan of one mesh: a lower bound of all pipelines, before any is searched.

Computing. An operation that takes w seconds on one device takes at least w / n on n of them, since smaller pieces are
computed no better; a pipeline of D devices thus computes for W / D seconds at least, W = sum of w. Programs do not hold
the strategies that divide nothing where a method or memory rules them out; of products W counts at least the FLOPs at
the rate of large ones, those left out that are computed again. With S stages and n runs of each stage in each direction
(micro-batches, times the stages of a submesh), it also waits for the first and the last one: the published bubbles are
at least (S - 1) / 3n of its computing (that of zb-h1, whose idle time is a third of that of 1F1B). Dispatching. A
process starts one task after the other: 2 n of them for each stage that it has.

    T  >=  min over n  of  max( W / D * (1 + 1 / 3n),  (2 n S_p - 1) * seconds of a dispatch )

with S_p stages in the busiest process, 2 if all devices are of one. Transfers, communication within stages, the update
and memory are left out: the bound is below whatever the search can find.
"""

from __future__ import annotations

import numpy as np

from alpa_lite.passes.sharding.computing import products_seconds
from alpa_lite.passes.stages.planning import DecidedStage

HOPE = 0.5
"""A pipeline is hoped for where one mesh computes for less than this fraction of its seconds."""

DIRE = 0.1
"""The same, where one mesh is so slow that no time is too long for what is faster."""

RUNS = tuple(1 << i for i in range(12))
"""The numbers of runs of a stage that are considered."""


def least_seconds(whole: DecidedStage) -> float:
    """Seconds that no pipeline of two or more stages undercuts.

    Args:
      whole: the same step on one mesh of all devices.
    """
    cluster, values = whole.cluster, whole.graph.traced.graph.values
    undivided = sum(_undivided(node.compute) * len(node.members) for node in whole.found.space.nodes)
    computing = max(undivided / cluster.num_devices, products_seconds(whole.grouping, whole.rules, values, cluster))
    stages = 2 if cluster.controller(cluster.num_devices - 1) == cluster.controller(0) else 1
    task = cluster.dispatch.seconds(1)
    return min(max(computing * (1 + 1 / (3 * n)), (2 * n * stages - 1) * task) for n in RUNS)


def is_hoped_for(whole: DecidedStage, seconds: float, fraction: float = HOPE) -> bool:
    """Whether a pipeline that computes as a plan of one mesh does, and communicates nothing, takes such a fraction."""
    return max(whole.found.compute_seconds, least_seconds(whole)) < fraction * seconds


def _undivided(compute: np.ndarray) -> float:
    """Seconds of a node with the strategy that divides it least, as far as that is among those of the program."""
    finite = np.asarray(compute)[np.isfinite(compute)]
    return float(finite.max()) if finite.size else 0.0
