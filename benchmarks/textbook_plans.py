"""Seconds of textbook methods on a step that is traced once: the search of one mesh, and none of what follows it.

Their operations are fixed, so that each is one integer program of few choices for a number of micro-batches; tracing,
lowering, writing and verifying a plan of each would take most of the time. The seconds are those of its plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from alpa_lite import _jax, compiler
from alpa_lite.api import make_options
from alpa_lite.compilation.asked import PlanRequest, Step
from alpa_lite.compilation.gc_pause import reduced_gc
from alpa_lite.compilation.runner import passes
from alpa_lite.passes import factors
from alpa_lite.passes.search.planner import search_plan
from alpa_lite.passes.sharding import wishes
from alpa_lite.plan.pins import NO_PINS


class Textbook:
    """A step, traced, whose methods are then compared."""

    def __init__(self, fun: Callable[..., Any], args: Sequence[Any], cluster: Any, **options: Any) -> None:
        """Traces the step; options as of `make_plan`."""
        checked = make_options({**options, "cluster": cluster})
        trace = compiler.tracer(fun, args, {}, checked, NO_PINS, cluster.platform)
        self.asked = PlanRequest(checked, cluster, trace)
        with reduced_gc(), _jax.without_mesh():
            traced = trace()
            self.step = Step(traced, factors.rules_of(traced.graph.ops(), traced.graph.values))

    def seconds(self, method: Any, effort: str) -> tuple[float, int]:
        """The seconds of the method's best plan of one mesh, and its number of micro-batches.

        Raises:
          AlpaLiteError: none fits, or the method cannot be applied.
        """
        options = replace(self.asked.options, method=method, effort=effort)
        wished = wishes.of(self.step.traced, method, self.asked.cluster.num_devices, [], None, frozenset())
        asked = replace(self.asked, options=options, wishes=wished)
        with reduced_gc(), _jax.without_mesh(), passes("textbook", None) as run:
            staged = search_plan(run, self.step, asked)[0]
        return staged.seconds, staged.program.num_microbatches
