"""The step as one mesh runs it in a configuration: its loop, rules and groups, each made once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from alpa_lite.asked import PlanRequest, Step
from alpa_lite.errors import MicrobatchError
from alpa_lite.graph import Traced
from alpa_lite.options import Pipeline
from alpa_lite.passes import factors, microbatches, sharding
from alpa_lite.passes.layers.division import MAX_OUTER_LAYERS, Divisible, divisible, recomputing
from alpa_lite.passes.layers.remat import NOTHING
from alpa_lite.passes.layers.stacked_sums import add_within_scans
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.search.configs import ExecutionConfig
from alpa_lite.passes.sharding.groups import Grouping
from alpa_lite.passes.sharding.tables import Shared
from alpa_lite.runner import Passes
from alpa_lite.strategy import Rule

MAX_LAYERS = 72
"""The most layers that a forward pass is cut into: 64 parts of repeated blocks, and those before and after them.

More where `num_stages` asks for as many stages (`max_layers`).
"""


def max_layers(method: Pipeline) -> int:
    """The most layers that a forward pass is cut into for a pipeline."""
    return max(MAX_LAYERS, (method.num_stages or 0) + MAX_OUTER_LAYERS)


@dataclass(frozen=True, eq=False)
class AnalyzedStep:
    """A step in a configuration.

    Attributes:
      loop: the step so. layers: the number of its layers, where any may be recomputed; else 0.
      rules, groups: of its operations.
      shared: the tables that its integer programs have in common.
    """

    config: ExecutionConfig
    loop: Accumulated
    layers: int
    rules: Mapping[Any, Rule]
    groups: Grouping
    shared: Shared


class Analyses:
    """Analyses of a step, each made once, on demand."""

    def __init__(self, run: Passes, step: Step, request: PlanRequest) -> None:
        self._run, self._step, self._request = run, step, request
        self._known: dict[ExecutionConfig, AnalyzedStep | MicrobatchError] = {}

    def of(self, config: ExecutionConfig) -> AnalyzedStep:
        """The step in a configuration.

        Raises:
          MicrobatchError: it cannot be cut into as many micro-batches.
        """
        if config not in self._known:
            try:
                self._known[config] = self._analyze(config)
            except MicrobatchError as error:
                self._known[config] = error
        found = self._known[config]
        if isinstance(found, MicrobatchError):
            raise found
        return found

    def loop_of(self, config: ExecutionConfig) -> tuple[Accumulated, int]:
        """The step as one mesh runs it, with several micro-batches a loop over them, and the number of its layers.

        Inner scans add to the carries of outer ones. Rematerialisation is of the body of a loop, be it of one
        micro-batch. Layers are counted only there.
        """
        loop, layers = Accumulated(self._step.traced, -1, 1, ()), 0
        if config.remat != NOTHING:
            divided = self._layers(config.microbatches)
            loop, layers = self._run("layers", recomputing, divided, config.remat), len(divided.layering.layers)
        elif config != ExecutionConfig():
            loop = self._loop(config.microbatches)
        traced, scan = add_within_scans(loop.traced, loop.scan)
        return replace(loop, traced=traced, scan=scan), layers

    def _analyze(self, config: ExecutionConfig) -> AnalyzedStep:
        loop, layers = self.loop_of(config)
        rules = self._rules(loop.traced)
        groups = self._run("grouping", sharding.group, loop.traced, rules)
        return AnalyzedStep(config, loop, layers, rules, groups, Shared(loop.traced, groups))

    @functools.cache  # noqa: B019 - as long as the search
    def _loop(self, count: int) -> Accumulated:
        traced, rules = self._step.traced, self._step.rules
        arguments = self._request.inexact
        return self._run("micro-batches", microbatches.accumulate, traced, rules, count, strided=True, **arguments)

    @functools.cache  # noqa: B019
    def _rules(self, traced: Traced) -> Mapping[Any, Rule]:
        if traced is self._step.traced:
            return self._step.rules
        return self._run("factors", factors.rules_of, traced.graph.ops(), traced.graph.values)

    @functools.cache  # noqa: B019
    def _layers(self, count: int) -> Divisible:
        loop = self._loop(count)
        return self._run("layers", divisible, loop, max_layers=MAX_LAYERS, rules=self._rules(loop.traced))
