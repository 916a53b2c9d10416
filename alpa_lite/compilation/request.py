"""The request of one compilation: options, cluster and a given plan, and the answers that follow from them alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from alpa_lite.cluster import Cluster
from alpa_lite.errors import OptionError
from alpa_lite.ir.graph import Traced
from alpa_lite.ir.strategy import Rule
from alpa_lite.options import Auto, Manual, Method, Options, Pipeline, Sharded
from alpa_lite.passes.layers.rematerialisation import Choice
from alpa_lite.passes.sharding.strategies import MERGING
from alpa_lite.passes.stages.pricing import REMAT
from alpa_lite.plan.pins import NO_PINS, NO_WISHES, Pins, Wishes
from alpa_lite.plan.plan import Plan


@dataclass(frozen=True, eq=False)
class Step:
    """The traced step, and the rules of its operations."""

    traced: Traced
    rules: Mapping[Any, Rule]


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """The given options and arguments, and the plans that they admit.

    Attributes:
      options: of the user.
      cluster: the devices.
      trace: traces the step; with other shapes for some flat arguments if they are given by number.
      pins: where flat arguments already are and stay.
      like: the plan of the same step for other shapes, whose division a pipeline keeps; None if there is none.
      wishes: what the user says of arguments and of the mesh, in the method and elsewhere.
    """

    options: Options
    cluster: Cluster
    trace: Callable[..., Any]
    pins: Pins = NO_PINS
    like: Plan | None = None
    wishes: Wishes = NO_WISHES

    @property
    def method(self) -> Method:
        """Which plans are allowed."""
        method = self.options.method
        assert isinstance(method, Method)  # `Options` has looked names up
        return method

    @property
    def base(self) -> Method:
        """The method of everything that `Manual` does not name."""
        return self.method.rest if isinstance(self.method, Manual) else self.method

    @property
    def pipeline(self) -> Pipeline:
        """The constraints on pipelines."""
        return self.base if isinstance(self.base, Pipeline) else Pipeline(token_slices="auto")

    @property
    def budget(self) -> float:
        """Bytes per device that a plan may use."""
        return self.options.memory_per_device or self.cluster.usable_memory

    def with_budget(self, budget: float) -> PlanRequest:
        """Returns the same with another budget."""
        return replace(self, options=replace(self.options, memory_per_device=budget))

    @cached_property
    def plan(self) -> Plan | None:
        """The plan to run without solving.

        Raises:
          OptionError: it is not a plan, or another number of micro-batches is given, too.
        """
        given, count = self.options.plan, self.options.num_microbatches
        if given is None:
            return None
        plan = Plan.load(given) if isinstance(given, str | os.PathLike) else given
        if not isinstance(plan, Plan):
            raise OptionError(f"plan={given!r}: give a Plan, or the path of a file that Plan.save wrote")
        if count not in ("auto", plan.num_microbatches):
            raise OptionError(
                f"num_microbatches={count}: the given plan has {plan.num_microbatches}; leave one of the two out"
            )
        return plan

    @property
    def description(self) -> str:
        """The method in words, or that of the given plan."""
        return self.method.describe() if self.plan is None else self.plan.method

    @property
    def num_microbatches(self) -> int | None:
        """The number of micro-batches, if it is given."""
        count = self.options.num_microbatches
        return count if isinstance(count, int) else None

    @property
    def allows_one_mesh(self) -> bool:
        """Whether the method allows one mesh."""
        return not isinstance(self.base, Pipeline)

    @property
    def allows_pipelines(self) -> bool:
        """Whether the method allows pipelines on this cluster; a mesh of all devices that the user names has none.

        Nor are there any where the state is already on one mesh.

        Raises:
          OptionError: the method is a pipeline, but the state is on one mesh.
        """
        if self.pins:
            if isinstance(self.method, Pipeline):
                raise OptionError(
                    f"method={self.method.describe()}: {next(iter(self.pins.arguments.values())).why}, on one mesh; "
                    "leave method or state_from out"
                )
            return False
        return isinstance(self.base, Pipeline) or (
            isinstance(self.method, Auto)
            and self.cluster.num_devices > 1
            and self.wishes.mesh is None
            and not self.wishes.forbidden
        )

    @property
    def remat(self) -> tuple[Choice, ...]:
        """The rematerialisation choices of one mesh, least recomputation first. Textbook plans rematerialise nothing.

        Raises:
          OptionError: the requested rematerialisation would be undone by the compiler of the platform.
        """
        remat = (
            self.base.remat if isinstance(self.base, Sharded) else "auto" if isinstance(self.method, Auto) else "none"
        )
        if remat == "none" or (remat == "auto" and self.cluster.platform in MERGING):
            return ("none",)
        if self.cluster.platform in MERGING:
            raise OptionError(
                f"Sharded remat={remat!r}: the compiler for {self.cluster.platform} merges the recomputation with the "
                'first computation; use remat="none", or Pipeline(), whose stages are compiled apart'
            )
        return ("none", "selective", "layer") if remat == "auto" else tuple(c for c in REMAT if c == remat)

    @property
    def inexact_options(self) -> dict[str, Any]:
        """The keyword arguments of `microbatches.accumulate` that control inexact micro-batches."""
        return {"allow_inexact": self.options.allow_inexact, "retrace": lambda shapes: self.trace(shapes=shapes)}
