"""Steps in groups."""

from typing import Any

from alpa_lite.passes import factors
from alpa_lite.passes.sharding import grouping
from alpa_lite.passes.sharding.tables import GroupedStep
from alpa_lite.passes.tracing import tracing


def grouped_step(step: Any, *args: Any) -> GroupedStep:
    """A step traced, with the rules of its operations and its groups."""
    traced = tracing.trace(step, args, {})
    rules = dict(factors.rules_of(traced.graph.ops(), traced.graph.values))
    return GroupedStep(traced, grouping.group(traced, rules), rules)
