"""One mesh or a pipeline: the best plan of any kind that a method allows.

The integer program on one mesh is solved first. A pipeline can be faster only by communicating less, since all devices
together compute as much either way: where what one mesh computes is nearly all that it costs, none is searched. It is
searched too where nothing fits one mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, InfeasibleError
from alpa_lite.graph import Traced
from alpa_lite.options import Auto, Method, Pipeline
from alpa_lite.passes import pipeline_search, search
from alpa_lite.passes.grouping import Grouping
from alpa_lite.passes.pipeline_search import FoundPipeline
from alpa_lite.passes.search import Found
from alpa_lite.strategy import Rule

logger = logging.getLogger(__name__)

WORTH = 0.9
"""A pipeline is searched if one mesh computes for less than this fraction of its step."""


def choose(
    traced: Traced,
    groups: Grouping,
    rules: Mapping[Any, Rule],
    cluster: Cluster,
    method: Method,
    *,
    num_microbatches: int | str,
    allow_inexact: bool,
    budget: float,
    time_limit: float,
    progress: Callable[[str], None] = lambda text: None,
) -> Found | FoundPipeline:
    """The plan with the fewest predicted seconds that fits the budget.

    Args:
      num_microbatches: for pipelines; one mesh is given the whole batch.
      budget: bytes per device.
      time_limit: seconds for each integer program.

    Raises:
      InfeasibleError: nothing fits.
      MicrobatchError, OptionError: a pipeline was asked for, and the step or the cluster does not allow it.
    """

    def pipelined(asked: Pipeline) -> FoundPipeline:
        return pipeline_search.search(
            traced, rules, cluster, asked, num_microbatches=num_microbatches, allow_inexact=allow_inexact,
            budget=budget, time_limit=time_limit, progress=progress,
        )  # fmt: skip

    if isinstance(method, Pipeline):
        return pipelined(method)
    whole: Found | None = None
    reason: InfeasibleError | None = None
    try:
        whole = search.search(
            traced, groups, rules, cluster, method, budget=budget, time_limit=time_limit, progress=progress
        )
    except InfeasibleError as error:
        if not isinstance(method, Auto) or cluster.num_devices == 1:
            raise
        reason = error
    if whole is not None and not (isinstance(method, Auto) and _worth_a_pipeline(whole, cluster)):
        return whole
    try:
        found = pipelined(Pipeline())
    except AlpaLiteError as error:
        logger.info("no pipeline: %s", error)
        if whole is None:
            assert reason is not None
            raise InfeasibleError(f"{reason} No pipeline fits either: {error}") from reason
        return whole
    if whole is None or found.seconds < whole.solution.objective:
        return found
    return whole


def _worth_a_pipeline(whole: Found, cluster: Cluster) -> bool:
    if cluster.num_devices == 1:
        return False
    nodes, choice = whole.space.nodes, whole.solution.choice
    compute = sum(float(n.compute[c]) * len(n.members) for n, c in zip(nodes, choice, strict=True))
    return compute < WORTH * whole.solution.objective
