"""How many micro-batches, and one mesh or a pipeline: the best plan of any kind that a method allows.

The integer program on one mesh is solved first. On one mesh, micro-batches only save memory: the step computes as much,
synchronises its gradients once either way, and also keeps accumulators. So unless a number is given there is one
micro-batch if that fits, and else the least power of two that does. A plan whose peak is S + A, of which only A shrinks
with the micro-batch, needs S + A/b bytes with b micro-batches. If no plan needs less than P bytes with one, and every
plan holds the training state, F bytes per device when all of it is sharded, then S + A >= P and S >= F give

    S + A/b  >=  F + (P - F)/b,

so numbers b for which that exceeds the budget are left out without solving.

A pipeline can be faster only by communicating less, since all devices together compute as much either way: where what
one mesh computes is nearly all that it costs, or the rest is less than it takes to dispatch a pipeline, none is
searched. It is searched too where nothing fits one mesh.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import AlpaLiteError, InfeasibleError, MicrobatchError
from alpa_lite.graph import Traced
from alpa_lite.options import Auto, Method, Pipeline
from alpa_lite.passes import factors
from alpa_lite.passes.microbatches import loop
from alpa_lite.passes.microbatches.loop import Retrace
from alpa_lite.passes.programs import search as pipeline_search
from alpa_lite.passes.programs.search import FoundPipeline
from alpa_lite.passes.sharding import grouping, search
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.search import Found
from alpa_lite.strategy import Rule

logger = logging.getLogger(__name__)

WORTH = 0.9
"""A pipeline is searched if one mesh computes for less than this fraction of its step."""

LEAST = 2e-3
"""Seconds that one mesh must spend on anything but computation for a pipeline to be searched.

Two stages and two micro-batches are some twenty tasks and transfers, at about 1e-4 seconds each for one controller
(`benchmarks/pipeline_overhead.py`), which predictions do not count.
"""


@dataclass(frozen=True, eq=False)
class Step:
    """A step as one mesh runs it.

    Attributes:
      traced: the step; with several micro-batches a loop over them, and the notes say what was cut.
      rules: of its operations.
      num_microbatches: the length of the loop; with 1 there is none.
    """

    traced: Traced
    rules: Mapping[Any, Rule]
    num_microbatches: int

    @cached_property
    def groups(self) -> Grouping:
        """Its operations in groups; pipelines group those of their stages instead."""
        return grouping.group(self.traced, self.rules)


@dataclass(frozen=True, eq=False)
class OneMesh:
    """A step, and the best plan that was found for it on one mesh."""

    step: Step
    found: Found


def cut(
    traced: Traced,
    rules: Mapping[Any, Rule],
    num_microbatches: int,
    *,
    allow_inexact: bool = False,
    retrace: Retrace | None = None,
) -> Step:
    """The step with its batch cut into micro-batches, ready to be planned on one mesh.

    Raises:
      MicrobatchError: the batch does not divide, or the step has no exact form and `allow_inexact` is false.
    """
    if num_microbatches > 1:
        found = loop.accumulate(traced, rules, num_microbatches, allow_inexact=allow_inexact, retrace=retrace)
        traced = replace(found.traced, notes=(*traced.notes, *found.notes))
        rules = factors.rules_of(traced.graph.ops(), traced.graph.values)
    return Step(traced, rules, num_microbatches)


def choose(
    traced: Traced,
    rules: Mapping[Any, Rule],
    step: Step,
    cluster: Cluster,
    method: Method,
    *,
    num_microbatches: int | str,
    allow_inexact: bool,
    retrace: Retrace,
    budget: float,
    time_limit: float,
    progress: Callable[[str], None] = lambda text: None,
) -> OneMesh | FoundPipeline:
    """The plan with the fewest predicted seconds that fits the budget.

    Args:
      traced, rules: the step on the whole batch.
      step: the same, cut into as many micro-batches as are to be tried first on one mesh.
      num_microbatches: a number, or "auto".
      allow_inexact, retrace: for the micro-batches of pipelines, as in `microbatches.loop.accumulate`.
      budget: bytes per device.
      time_limit: seconds for each integer program.

    Raises:
      InfeasibleError: nothing fits.
      MicrobatchError, OptionError: a pipeline was asked for, and the step or the cluster does not allow it.
    """
    given = {"budget": budget, "time_limit": time_limit, "progress": progress}

    def pipelined(asked: Pipeline) -> FoundPipeline:
        return pipeline_search.search(
            traced, rules, cluster, asked,
            num_microbatches=num_microbatches, allow_inexact=allow_inexact, retrace=retrace, **given,
        )  # fmt: skip

    def meshed(step: Step) -> OneMesh:
        return OneMesh(step, search.search(step.traced, step.groups, step.rules, cluster, method, **given))

    if isinstance(method, Pipeline):
        return pipelined(method)
    whole: OneMesh | None = None
    reason: InfeasibleError | None = None
    try:
        try:
            whole = meshed(step)
        except InfeasibleError as error:
            if num_microbatches != "auto":
                raise
            whole = _with_microbatches(traced, rules, cluster, budget, meshed, error)
    except InfeasibleError as error:
        if not isinstance(method, Auto) or cluster.num_devices == 1:
            raise
        reason = error
    if whole is not None and not (isinstance(method, Auto) and _worth_a_pipeline(whole.found, cluster)):
        return whole
    try:
        found = pipelined(Pipeline())
    except AlpaLiteError as error:
        logger.info("no pipeline: %s", error)
        if whole is None:
            assert reason is not None
            raise InfeasibleError(f"{reason} No pipeline fits either: {error}") from reason
        return whole
    if whole is None or found.seconds < whole.found.solution.objective:
        return found
    return whole


def _with_microbatches(
    traced: Traced, rules: Mapping[Any, Rule], cluster: Cluster, budget: float,
    meshed: Callable[[Step], OneMesh], error: InfeasibleError,
) -> OneMesh:  # fmt: skip
    """One mesh with the least power of two of micro-batches that fits, where one does not.

    Raises:
      InfeasibleError: none fits, or the step cannot be cut exactly; says so after the message of `error`.
    """
    count, tried, needed = 1, 1, error.smallest_budget
    floor = _state_bytes(traced) / cluster.num_devices
    if floor >= budget or needed is None:
        raise error
    while True:
        count *= 2
        if floor + (needed - floor) * tried / count > budget:
            continue
        try:
            step = cut(traced, rules, count)
        except MicrobatchError as refusal:
            raise InfeasibleError(f"{error} Micro-batches do not help: {refusal}") from error
        note = f"{count} micro-batches: with fewer, the step does not fit into memory_per_device={budget:.0f} bytes"
        step = replace(step, traced=replace(step.traced, notes=(*step.traced.notes, note)))
        try:
            return meshed(step)
        except InfeasibleError as again:
            less = again.smallest_budget
            if less is None or less >= needed:
                raise InfeasibleError(
                    f"{error} Micro-batches do not help: {count} micro-batches need {less or needed:.0f} bytes per "
                    "device."
                ) from error
            tried, needed = count, less


def _state_bytes(traced: Traced) -> int:
    values = traced.graph.values
    arguments = zip(traced.arguments, traced.graph.block.inputs, strict=False)
    return sum(values[value].nbytes for argument, value in arguments if argument.role == "state")


def _worth_a_pipeline(whole: Found, cluster: Cluster) -> bool:
    if cluster.num_devices == 1:
        return False
    objective = whole.solution.objective
    return whole.compute_seconds < min(WORTH * objective, objective - LEAST)
