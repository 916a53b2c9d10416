"""A step as one mesh runs it in some way, grouped: what all searches of that way have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.programs.outcomes import Way
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.search import Found
from alpa_lite.passes.sharding.tables import Shared
from alpa_lite.passes.stages import planning
from alpa_lite.strategy import Rule


@dataclass(frozen=True, eq=False)
class Analysed:
    """A step in a way.

    Attributes:
      way: micro-batches, and what is computed again.
      loop: the step so. layers: the number of its layers, where any may be computed again; else 0.
      rules, groups: of its operations.
      shared: what its integer programs have in common.
    """

    way: Way
    loop: Accumulated
    layers: int
    rules: Mapping[Any, Rule]
    groups: Grouping
    shared: Shared

    def settled(self, cluster: Cluster) -> Callable[[Found], float]:
        """What tells the seconds of a plan, where communication hides behind computing."""
        return functools.partial(planning.settled, self.loop.traced, self.groups, self.rules, cluster)


Analyse = Callable[[Way], Analysed]
"""Analyses a step; each way once. Raises MicrobatchError if it cannot be cut so."""
