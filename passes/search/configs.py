"""How one mesh runs a step: micro-batches and rematerialisation, which configuration only adds to which, and its loop.

Both save activations and cost seconds: micro-batches repeat what each of them does (gathers of weights, latencies), and
what is recomputed is computed twice. Let T(config) be the seconds of its best plan within the budget, and F(config)
those without one. More micro-batches and more recomputation only add, so on each mesh

    T(more)  >=  F(more)  >=  F(less),      more: no fewer micro-batches, and no less recomputed.

Bytes. Let P(c) be the least bytes per device of any plan with c micro-batches, and `floor` the bytes of the training
state in equal blocks. Take the layouts of a plan with b >= c of them: with c, a micro-batch's values are at most b / c
times as large, and the rest takes at least `floor`. Hence

    P(b)  >=  floor + (P(c) - floor) * c / b .
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from alpa_lite.compilation.request import PlanRequest, Step
from alpa_lite.compilation.runner import Passes
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.layout import LogicalMesh
from alpa_lite.ir.strategy import Rule
from alpa_lite.passes import factors, microbatches, sharding
from alpa_lite.passes.ir.remembered import memoise_method
from alpa_lite.passes.layers.division import LayeredStep, find_layers, recompute_layers
from alpa_lite.passes.layers.rematerialisation import NOTHING, Choice, Remat
from alpa_lite.passes.layers.stacked_sums import add_within_scans
from alpa_lite.passes.microbatches.loop import Accumulated
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.sharding.textbook import Textbook

MAX_LAYERS = 72  # of a forward pass: 64 parts of repeated blocks, and those before and after them

# Estimates:
MICROBATCH_OVERHEAD = 0.005  # relative cost of each further micro-batch: gathers of weights and latencies are repeated
REMAT_OVERHEAD: Mapping[Choice, float] = {"none": 0.0, "selective": 0.08, "layer": 1 / 3}
"""Relative cost of rematerialisation: with whole layers, the forward pass, a third of the operations."""
REMAT_MEMORY_FACTOR: Mapping[Choice, int] = {"none": 1, "selective": 16, "layer": 64}
"""Factor by which rematerialisation lowers saved activations."""


@dataclass(frozen=True)
class ExecutionConfig:
    """A number of micro-batches, and the rematerialisation of the backward pass."""

    microbatches: int = 1
    remat: Remat = NOTHING

    @property
    def rank(self) -> tuple[int, int]:
        """Its micro-batches, and its rematerialisation in thousandths of a rank."""
        first, total = self.remat.first or (1, 1)
        return self.microbatches, 1000 * tuple(REMAT_OVERHEAD).index(self.remat.choice) * first // total

    @property
    def remat_overhead(self) -> float:
        """Estimated share of the computing that is repeated."""
        first, total = self.remat.first or (1, 1)
        return REMAT_OVERHEAD[self.remat.choice] * first / total

    def scale(self, other: ExecutionConfig, computing: float, seconds: float) -> float:
        """Returns estimated seconds, where another configuration takes `seconds`, of which `computing` for computing.

        Computing is repeated as rematerialisation asks; with fewer micro-batches communication is in proportion, as
        gathers of weights are, and with more of them each adds a little.
        """
        compute = computing * (1 + self.remat_overhead) / (1 + other.remat_overhead)
        fewer = min(1.0, self.microbatches / other.microbatches)
        more = max(0, self.microbatches - other.microbatches)
        return (compute + max(seconds - computing, 0.0) * fewer) * (1 + MICROBATCH_OVERHEAD * more)

    def only_adds_to(self, other: ExecutionConfig) -> bool:
        """Returns whether it has no fewer micro-batches than another, and recomputes whatever the other does."""
        less, more = other.remat, self.remat
        within = less in (NOTHING, more) or (less.choice == "selective" and more == Remat("layer"))
        return other.microbatches <= self.microbatches and within

    def __str__(self) -> str:
        parts = f"{self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"
        return parts if self.remat == NOTHING else f"{parts}, rematerialisation {str(self.remat)!r}"


def next_feasible_microbatches(count: int, least: float, floor: float, budget: float) -> int:
    """Returns the least 2^k times as many micro-batches, k >= 1, that may fit a budget above the floor.

    Args:
      least: bytes per device that `count` of them need at least; 0 if that is not known.
    """
    assert floor < budget and least < math.inf
    more = 2 * count
    while floor + (least - floor) * count / more > budget:
        more *= 2
    return more


@dataclass(frozen=True, eq=False)
class AnalyzedStep:
    """A step in a configuration.

    Attributes:
      loop: the step so. layers: the number of its layers, where any may be recomputed; else 0.
      grouped_step: the step of the loop, with the rules of its operations and its groups.
    """

    config: ExecutionConfig
    loop: Accumulated
    layers: int
    grouped_step: GroupedStep

    @cached_property
    def num_ops(self) -> int:
        """The operations of the loop's step."""
        return self.loop.traced.graph.num_ops


@dataclass(frozen=True, eq=False)
class Family:
    """The plans of one mesh that one method admits.

    Attributes:
      state: bytes per device that the state takes at least.
      order: of textbook methods. textbook: which of them it is; None for the method of the request.
    """

    name: str
    state: float
    order: int = 0
    textbook: Textbook | None = None


@dataclass(eq=False)
class Record:
    """A configuration of a family, and the facts about it that are proven so far.

    Attributes:
      interval: numbers of recomputed layers that are known to exceed the budget and to fit it, if it came by bisection.
      step: the step so, once the candidate is expanded.
      meshes: how many logical meshes it has.
      bounds: mesh -> seconds that none of its plans takes less of, whatever the budget.
      peak: the same for every mesh: an equal part of the work on each device, at peak rates.
      least: bytes per device that no plan of the meshes that exceed the budget takes less of; 0 if unknown.
      may_fit: whether a mesh was weighed that may not exceed it. excess: seconds of its plans over their free bounds;
        another mesh is expected to exceed its own by the geometric mean of that and nothing.
    """

    family: Family
    config: ExecutionConfig
    interval: tuple[int, int] | None
    step: AnalyzedStep = field(init=False)
    meshes: int = 0
    bounds: defaultdict[LogicalMesh, float] = field(default_factory=lambda: defaultdict(float))
    peak: float = 0.0
    least: float = 0.0
    may_fit: bool = False
    excess: float = 0.0


class Analyses:
    """Analyses of a step in configurations of one mesh, each made once, on demand."""

    def __init__(self, run: Passes, step: Step, request: PlanRequest) -> None:
        self._run, self._step, self._request = run, step, request

    @memoise_method
    def analyze(self, config: ExecutionConfig) -> AnalyzedStep:
        """Returns the step in a configuration.

        Raises:
          MicrobatchError: it cannot be cut into as many micro-batches.
        """
        loop, layers = self.loop_of(config)
        rules = self._rules(loop.traced)
        groups = self._run("grouping", sharding.group, loop.traced, rules)
        return AnalyzedStep(config, loop, layers, GroupedStep(loop.traced, groups, rules))

    def loop_of(self, config: ExecutionConfig) -> tuple[Accumulated, int]:
        """The step as one mesh runs it, with several micro-batches a loop over them, and the number of its layers.

        Inner scans add to the carries of outer ones. Rematerialisation is of the body of a loop, be it of one
        micro-batch. Layers are counted only there.
        """
        loop, layers = Accumulated(self._step.traced, -1, 1, ()), 0
        if config.remat != NOTHING:
            divided = self._layers(config.microbatches)
            loop, layers = self._run("layers", recompute_layers, divided, config.remat), len(divided.layering.layers)
        elif config != ExecutionConfig():
            loop = self._loop(config.microbatches)
        traced, scan = add_within_scans(loop.traced, loop.scan)
        return replace(loop, traced=traced, scan=scan), layers

    @memoise_method
    def _loop(self, count: int) -> Accumulated:
        traced, rules = self._step.traced, self._step.rules
        arguments = self._request.inexact_options
        return self._run("micro-batches", microbatches.accumulate, traced, rules, count, strided=True, **arguments)

    @memoise_method
    def _rules(self, traced: Traced) -> Mapping[Any, Rule]:
        if traced is self._step.traced:
            return self._step.rules
        return self._run("factors", factors.rules_of, traced.graph.ops(), traced.graph.values)

    @memoise_method
    def _layers(self, count: int) -> LayeredStep:
        loop = self._loop(count)
        return self._run("layers", find_layers, loop, max_layers=MAX_LAYERS, rules=self._rules(loop.traced))
